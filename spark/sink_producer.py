"""`TaskProducer`: a worker's producer that stores nothing after a failed batch.

Spark runs a failed task again with all of its rows. The first attempt must leave a prefix of its rows in each
partition, so that the order of rows separates the attempts: nothing is sent after a failed batch, and the log rejects
what is in flight, as its sequence numbers do not follow.
"""

from __future__ import annotations

from typing import Any

from tidelog.client.producer.core import ProducerCore
from tidelog.client.producer.threaded import Producer


class TaskProducer(Producer):
    def _new_core(self, io: Any) -> ProducerCore:
        core = super()._new_core(io)
        core.sender.stops_at_failure = True
        return core

    def abandon(self, timeout_s: float) -> None:
        """Close without sending what is not in flight; wait up to `timeout_s` for what is."""
        if self._host.core is not None and not self._host.is_closed:
            self._host.run(lambda core: core.sender.drain(timeout_s))
        self.close(0)
