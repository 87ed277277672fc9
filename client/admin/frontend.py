"""What both admin clients share: their options and the state of their core."""

from __future__ import annotations

from typing import Any

from tidelog.client.admin.core import AdminCore, new_core
from tidelog.client.core_host import CoreHost
from tidelog.client.option_table import AdminConfig


class AdminFrontend:
    options: AdminConfig
    _host: CoreHost[AdminCore]

    def _new_core(self, io: Any) -> AdminCore:
        """Tests and mocks replace it."""
        return new_core(io, self.options)

    @property
    def answered_by(self) -> str:
        """The address of the node that answered last, to whichever thread; empty before the first answer."""
        return "" if self._host.core is None else self._host.core.answered_by

    @property
    def stale_ms(self) -> int | None:
        """Age of the answer to the last call, of whichever thread, by a node that did not hear from an active
        controller (`allow_stale`); None if it did."""
        return None if self._host.core is None else self._host.core.stale_ms

    def metrics(self) -> dict[str, float]:
        """Return counts of calls, of failed calls, and of calls that are running."""
        core = self._host.core
        return {"calls": 0, "failures": 0, "calls_in_progress": 0} if core is None else core.metrics()
