"""Producer ids of a broker, from blocks that the controller allocates: each id is used once in the cluster."""

from __future__ import annotations

import asyncio

from tidelog.metadata.broker_lifecycle import BrokerLifecycle
from tidelog.metadata.producer_ids import AllocateProducerIdBlock, ProducerIdBlock


class ProducerIds:
    """One for each broker. The rest of a block is lost with the process: there are enough."""

    def __init__(self, agent: BrokerLifecycle) -> None:
        self._agent = agent
        self._next = 0
        self._end = 0
        self._allocating = asyncio.Lock()

    async def next(self) -> int:
        """Return an id that nobody has used; wait until a controller allocates a block if there is none left."""
        async with self._allocating:
            if self._next >= self._end:
                # A repeated request may waste a block.
                block = await self._agent.ask_registered(
                    lambda epoch: AllocateProducerIdBlock(broker=self._agent.broker, broker_epoch=epoch)
                )
                assert isinstance(block, ProducerIdBlock), "the reply to its request"
                self._next, self._end = block.first, block.first + block.count
            self._next += 1
            return self._next - 1
