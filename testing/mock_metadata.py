"""The metadata of a `MockAdmin`: the controller's own decisions on an image in memory. No broker runs.

It rejects what a cluster rejects, as it is the same code.
"""

from __future__ import annotations

import time
from random import Random
from typing import Any
from uuid import UUID

from tidelog.metadata.brokers import Fence, Heartbeat, Register
from tidelog.metadata.controller import Controller
from tidelog.metadata.decision import Context
from tidelog.metadata.features import bootstrap_records, supported
from tidelog.metadata.image import ClusterImage, Partition
from tidelog.metadata.partitions import AlteredPartition, AlterPartition
from tidelog.metadata.records import Record
from tidelog.metadata.replay import Replay

CLUSTER_ID = "mock-cluster"
LISTENER = "CLIENT"
PORT = 9292


class MockMetadata:
    def __init__(self, brokers: int, seed: int) -> None:
        self._controller = Controller(CLUSTER_ID)
        self._random = Random(seed)
        self._replay = Replay(ClusterImage())
        self.offset = 0
        self._log(bootstrap_records())
        for broker in range(1, brokers + 1):
            self.start(broker)

    @property
    def image(self) -> ClusterImage:
        return self._replay.image

    def ask(self, request: object) -> Any:
        """Return the response; raises a rejection."""
        context = Context(now_ms=int(time.time() * 1000), random=self._random, next_offset=self.offset)
        decision = self._controller.decide(self.image, request, context)
        self._log(decision.records)
        return decision.reply

    def answer(self, question: object) -> Any:
        return self._controller.answer(self.image, question)

    def _log(self, records: tuple[Record, ...] | list[Record]) -> None:
        if records:
            self._replay.apply(records)
            self.offset += 1

    # Brokers.

    def start(self, broker: int) -> None:
        """Register and unfence the broker, with complete logs."""
        known = self.image.brokers.get(broker)
        self.ask(
            Register(
                cluster_id=CLUSTER_ID,
                broker=broker,
                incarnation=UUID(int=self._random.getrandbits(128), version=4),
                endpoints=((LISTENER, "PLAINTEXT", f"broker-{broker}.mock", PORT),),
                directories=(directory(broker),),
                features=supported(),
                clean_stop_epoch=-1 if known is None else known.broker_epoch,
            )
        )
        self.ask(Heartbeat(broker=broker, broker_epoch=self._epoch(broker), metadata_offset=self.offset))

    def fence(self, broker: int) -> None:
        """Fence the broker, as if it had died."""
        self.ask(Fence(broker=broker, broker_epoch=self._epoch(broker)))

    def catch_up(self) -> None:
        """Put every live replica in sync, which completes reassignments."""
        for topic_id, topic in list(self.image.topics.items()):
            for number in topic.partitions:
                self._catch_up(topic_id, number)

    def _catch_up(self, topic_id: UUID, number: int) -> None:
        partition: Partition = self.image.topics[topic_id].partitions[number]
        brokers = self.image.brokers
        members = tuple(
            (one, brokers[one].broker_epoch) for one in partition.replicas if one in brokers and brokers[one].is_live
        )
        if partition.leader < 0 or {one for one, _ in members} == set(partition.isr):
            return
        item = AlteredPartition(
            topic_id=topic_id,
            partition=number,
            leader_epoch=partition.leader_epoch,
            partition_epoch=partition.partition_epoch,
            isr=members,
        )
        leader = partition.leader
        self.ask(AlterPartition(broker=leader, broker_epoch=self._epoch(leader), partitions=(item,)))

    def _epoch(self, broker: int) -> int:
        return self.image.brokers[broker].broker_epoch


def directory(broker: int) -> UUID:
    return UUID(int=(0x7D << 120) | (4 << 76) | (2 << 62) | broker)
