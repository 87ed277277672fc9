"""A row of the table of handlers (`dispatch`): as its module declares it, and as it is served."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tidelog.model.errors import ErrorCode
from tidelog.rpc.kafka.api import Api
from tidelog.rpc.kafka.schema import FIELDS
from tidelog.rpc.kafka.services import Handle


@dataclass(frozen=True, slots=True)
class Entry:
    """What a module declares."""

    handle: Handle
    low: int | None = None
    """Versions that are truly served, where the codec knows more."""
    high: int | None = None
    told_low: int | None = None
    """What ApiVersions tells as the lowest, where clients want to see more than is served: librdkafka takes no broker
    for one that has Produce unless it begins at 0."""
    on_stop: ErrorCode | None = None
    """Of an api that waits for long (by `Later`): it is cancelled when the node stops, and this is its answer."""
    is_single: bool = False
    """Its answers may be large: of one connection, the next is begun when the one before was written."""


@dataclass(frozen=True, slots=True)
class Served:
    api: Api[Any, Any]
    handle: Handle
    low: int
    high: int
    told_low: int
    on_stop: ErrorCode | None = None
    is_single: bool = False

    def carries(self, version: int) -> frozenset[str]:
        """The fields of the response itself, in a version."""
        return frozenset(field.name for field in FIELDS[self.api.response] if field.within(version))
