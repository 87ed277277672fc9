"""Producers with five batches in flight, several on one partition.

All batches of a window are sent at once, by calls that overtake each other, and each is repeated until it is answered.
OUT_OF_ORDER_SEQUENCE_NUMBER is the fate of a batch that arrives before the one ahead of it. A batch that was the oldest
without an acknowledgement when it was sent must never get it from the newest leader: what is ahead of it was
acknowledged. The first batch of a producer id travels alone, since a leader takes an unknown producer at any sequence.
"""

from __future__ import annotations

import asyncio
from collections import deque
from dataclasses import dataclass
from typing import Any

from simulation.broker_checker import KnownPartition
from simulation.broker_workload import ACKS_ALL, PRODUCE, PRODUCE_MS, RESETS, Client, Producer, View
from tidelog.log.batch import Record, encode
from tidelog.rpc.v1 import log_pb2 as pb

IN_FLIGHT = 5
IDLE = 0.05
"""How often a producer is silent for a while."""


@dataclass(slots=True, eq=False)
class Batch:
    data: bytes
    values: list[bytes]


@dataclass(slots=True)
class Window:
    """Of one producer id: batches without an answer, oldest first."""

    batches: deque[Batch]
    is_lost: bool = False
    """The producer begins again with another id: what became of these batches is not known."""


class Pipeliner(Client):
    """The program of a machine with such producers. It reads nothing."""

    producers = 1
    idle_s = 1.0
    sent = 0
    """Batches that were sent behind others."""

    def add(self, known: KnownPartition, acks: int | None) -> None:
        assert self._context is not None, "the machine runs"
        assert acks == ACKS_ALL, "all of them want to know"
        self._views[known] = View()
        for _ in range(self.producers):
            self._producers += 1
            producer = Producer(f"{self.name}.{self._producers}")
            self._checker.writers[producer.name.encode()] = known
            self._context.node.spawn(self._pipeline(known, producer), name=f"pipeline of {known}")

    def has_read(self, known: KnownPartition, end: int) -> bool:
        return True

    async def _pipeline(self, known: KnownPartition, producer: Producer) -> None:
        assert self._context is not None
        window = Window(deque(), is_lost=True)
        while not known.topic.is_left():
            await asyncio.sleep(self._random.expovariate(1 / self._pause_s) / IN_FLIGHT)
            if self._random.random() < IDLE:
                await asyncio.sleep(self._random.uniform(0.5, 2.0) * self.idle_s)
            if self.is_stopping:
                return
            if window.is_lost:
                self.busy += 1
                await self._init(producer)
                self.busy -= 1
                window = Window(deque())
            if len(window.batches) >= IN_FLIGHT or (window.batches and producer.sequence == 1):
                continue
            batch = self._next(producer)
            window.batches.append(batch)
            self._checker.sent(known, batch.values)
            self.sent += len(window.batches) > 1
            self.busy += 1
            self._context.node.spawn(self._push(known, window, batch), name=f"batch of {known}")

    def _next(self, producer: Producer) -> Batch:
        value = b"%s/%d" % (producer.name.encode(), producer.number)
        data = encode(
            [Record(0, 1_000, None, value, ())],
            producer_id=producer.producer_id,
            producer_epoch=producer.producer_epoch,
            base_sequence=producer.sequence,
        )
        producer.number += 1
        producer.sequence += 1
        return Batch(data, [value])

    async def _push(self, known: KnownPartition, window: Window, batch: Batch) -> None:
        """Until it is answered, or cannot be."""
        try:
            while not window.is_lost and not await self._attempt(known, window, batch):
                if known.topic.delete_asked:
                    window.is_lost = True
                await self._wait(0.03)
        finally:
            if batch in window.batches:
                window.batches.remove(batch)
            self.busy -= 1

    async def _attempt(self, known: KnownPartition, window: Window, batch: Batch) -> bool:
        view = self._views[known]
        is_oldest = window.batches[0] is batch
        item = pb.ProducePartition(
            topic_id=known.topic.topic_id.bytes, partition=known.partition_id.partition, batches=batch.data
        )
        request = pb.ProduceRequest(partitions=[item], acks=ACKS_ALL, timeout_ms=PRODUCE_MS)
        response = await self._call(self._target(view), PRODUCE, request)
        if response is None:
            view.leader = -1
            return False
        (row,) = response.partitions
        if not row.HasField("error"):
            self._acked(known, view, row, batch.values, ACKS_ALL)
            return True
        return self._rejected(known, window, batch, row, is_oldest=is_oldest)

    def _rejected(self, known: KnownPartition, window: Window, batch: Batch, row: Any, *, is_oldest: bool) -> bool:
        view, name = self._views[known], row.error.name
        if name == "DUPLICATE_SEQUENCE_NUMBER":
            self._checker.acked(self.name, known, batch.values, base_offset=-1, leader_epoch=row.leader_epoch)
            return True
        if row.leader_epoch < view.epoch:
            view.leader = -1  # a leader that does not know yet that it is replaced
        elif name not in RESETS:
            window.is_lost |= self._is_over(known, view, row.error, row)
        elif is_oldest:
            if not known.is_unclean and not self._checker.expiry_s:
                self._fail(self.name, f"{known}: what was acknowledged is missing: {row.error.message}")
            window.is_lost = True
        return False
