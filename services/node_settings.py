"""Settings of a node's own file and environment, as `ConfigService` describes them. Pure."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeSetting:
    """A setting of a node's own file or environment."""

    name: str
    value: str | None
    default: str | None
    is_set: bool
    is_sensitive: bool
    """A secret: its value is not shown."""
    kind: int
    doc: str
