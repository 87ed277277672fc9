"""A fault in time. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(slots=True)
class Span:
    """A fault, from its first effect until all nodes are ready again; times count from the begin of the run."""

    kind: str
    node: int | None
    """None: it struck the cluster."""
    why: str
    begin_s: float
    end_s: float = -1.0
    """When the fault itself was over; -1: it is not."""
    ready_s: float = -1.0
    loses_majority: bool = False
    notes: list[str] = field(default_factory=list)
