"""The table of handlers by API key and version. ApiVersions advertises exactly this table.

A handler is `async def handle(request, context)`; `services.Handle` and `services.DeferredResponse` say what it
returns. Requests of one connection begin in order, the next one when `handle` has returned: so a handler that waits
long, or only waits for others, returns a `DeferredResponse`. An error that it raises is the error code of the response
(`failure`); errors of topics, partitions or groups are in their rows.

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
    "transactions",
    "transaction_admin",
    "metadata",
    "topics",
    "configs",
    "cluster",
    "admin",
    "security",
    "acls",
)
"""In `tidelog.rpc.kafka`."""

Table = Mapping[int, Served]


def handlers(modules: Iterable[str] = _MODULES) -> dict[int, Entry]:
    """Returns the handlers of all modules; each API has one."""
    entries: dict[int, Entry] = {}
    for name in modules:
        more: dict[int, Entry] = import_module(f"tidelog.rpc.kafka.{name}").HANDLERS
        assert not entries.keys() & more.keys(), f"{name} handles an API of another module"
        entries |= more
    return entries


def build(entries: Mapping[int, Entry] | None = None) -> Table:
    """The table of a broker."""
    table: dict[int, Served] = {}
    for key, entry in (handlers() if entries is None else entries).items():
        api = APIS[key]
        low = api.low if entry.low is None else entry.low
        high = api.high if entry.high is None else entry.high
        assert api.low <= low <= high <= api.high, f"{api.name} {low} to {high}: there is {api.low} to {api.high}"
        advertised_low = low if entry.advertised_low is None else entry.advertised_low
        table[key] = Served(api, entry.handle, low, high, advertised_low, entry.on_stop, entry.is_single)
    api_versions.add_to(table)
    return table


def failure(served: Served, version: int, code: ErrorCode, message: str) -> Any | None:
    """Returns the response to a failed request; None if this version has no error code."""
    carried = served.carries(version)
    if "error_code" not in carried:
        return None
    values: dict[str, Any] = {"error_code": code.value.code}
    if "error_message" in carried:
        values["error_message"] = message
    return served.api.response(**values)
