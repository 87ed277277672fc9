"""Rows of the table of handlers (`dispatch`): as a module declares them, and as they are served."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tidelog.model.errors import ErrorCode
from tidelog.rpc.kafka.api import Api
from tidelog.rpc.kafka.schema import FIELDS
from tidelog.rpc.kafka.services import Handle


@dataclass(frozen=True, slots=True)
class Entry:
    """A handler as its module declares it."""

    handle: Handle
    low: int | None = None
    """Lowest served version, where the codec knows lower ones; so with `high`."""
    high: int | None = None
    advertised_low: int | None = None
    """Lowest version in ApiVersions, where clients expect lower ones than are served: librdkafka uses Produce only if
    it begins at 0."""
    on_stop: ErrorCode | None = None
    """A long poll (by `DeferredResponse`) is cancelled when the node stops, and responds with this code."""
    is_single: bool = False
    """Responses may be large: the next request of a connection begins when the last response is written."""


@dataclass(frozen=True, slots=True)
class Served:
    api: Api[Any, Any]
    handle: Handle
    low: int
    high: int
    advertised_low: int
    on_stop: ErrorCode | None = None
    is_single: bool = False

    def carries(self, version: int) -> frozenset[str]:
        """Returns the top-level fields of the response in a version."""
        return frozenset(field.name for field in FIELDS[self.api.response] if field.within(version))
