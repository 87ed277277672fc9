"""The one place where a request is charged. `Unlimited` serves until client quotas are enforced. Pure."""

from __future__ import annotations

from enum import Enum
from typing import Protocol

from tidelog.services.context import RequestContext


class Charge(Enum):
    """What a client is charged for."""

    PRODUCE_BYTES = "produce bytes"
    FETCH_BYTES = "fetch bytes"
    MUTATIONS = "mutations"
    """Changes of topics, partitions, configs, groups or brokers."""
    REQUEST = "request"
    """A request that does none of these."""


class Quotas(Protocol):
    def charge(self, context: RequestContext, charge: Charge, amount: int) -> int:
        """Charge a client; return for how many ms the request is delayed (0: not at all)."""
        ...


class Unlimited:
    """Delays nothing."""

    def charge(self, context: RequestContext, charge: Charge, amount: int) -> int:
        return 0
