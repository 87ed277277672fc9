"""Which handler answers which request, in which versions. ApiVersions tells exactly what is in this table.

A handler is `async def handle(request, context)`; `services.Handle` and `services.Later` say what it returns. Requests
of one connection are begun in their order: the next one when `handle` has returned, so what waits for long, and what
only waits for others, returns `Later`. What it raises is answered where the response has an error code of its own
(`failure`); errors of topics, partitions or groups it puts into their rows.

A module with handlers has `HANDLERS: dict[int, Entry]`, by api key, and stands in `_MODULES`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from importlib import import_module
from typing import Any

from tidelog.model.errors import ErrorCode
from tidelog.rpc.kafka import api_versions
from tidelog.rpc.kafka.entries import Entry, Served
from tidelog.rpc.kafka.messages import APIS

__all__ = ["Entry", "Served", "Table", "build", "failure", "handlers"]

_MODULES: tuple[str, ...] = (
    "produce",
    "fetch",
    "offsets",
    "groups",
    "group_offsets",
    "members",
    "metadata",
    "topics",
    "configs",
    "cluster",
    "admin",
    "security",
)
"""In `tidelog.rpc.kafka`."""

Table = Mapping[int, Served]


def handlers(modules: Iterable[str] = _MODULES) -> dict[int, Entry]:
    """Those of all modules; each api has one."""
    found: dict[int, Entry] = {}
    for name in modules:
        more: dict[int, Entry] = import_module(f"tidelog.rpc.kafka.{name}").HANDLERS
        assert not found.keys() & more.keys(), f"{name} answers what another module answers"
        found |= more
    return found


def build(entries: Mapping[int, Entry] | None = None) -> Table:
    """The table of a broker."""
    table: dict[int, Served] = {}
    for key, entry in (handlers() if entries is None else entries).items():
        api = APIS[key]
        low = api.low if entry.low is None else entry.low
        high = api.high if entry.high is None else entry.high
        assert api.low <= low <= high <= api.high, f"{api.name} {low} to {high}: there is {api.low} to {api.high}"
        told_low = low if entry.told_low is None else entry.told_low
        table[key] = Served(api, entry.handle, low, high, told_low, entry.on_stop, entry.is_single)
    api_versions.add_to(table)
    return table


def failure(served: Served, version: int, code: ErrorCode, message: str) -> Any | None:
    """The response to a request that has failed as a whole; None if this version has no place to say so."""
    carried = served.carries(version)
    if "error_code" not in carried:
        return None
    values: dict[str, Any] = {"error_code": code.value.code}
    if "error_message" in carried:
        values["error_message"] = message
    return served.api.response(**values)
