"""`TaskProducer`: the producer of a worker, which stores nothing behind a batch that was not stored.

A task that fails is run again with all of its rows. So that the rows of the two attempts are told apart by their order,
in each partition the first attempt has stored a beginning of its rows: what would come behind a batch that has failed
is not sent, and what is on the wire already the log refuses, as its numbers do not follow.
"""

from __future__ import annotations

from tidelog.client.producer import Producer
from tidelog.client.producer_core import ProducerCore


class TaskProducer(Producer):
    async def _new_core(self) -> ProducerCore:
        core = await super()._new_core()
        core.writer.stops_at_failure = True
        return core

    def abandon(self, timeout_s: float) -> None:
        """Close it without sending what is not on the wire; what is, is waited for, so long at most."""
        core, host = self._core, self._host
        if core is not None and host is not None:
            host.run(core.writer.land(timeout_s))
        self.close(0)
