"""The transaction coordinator of a broker: the shards of `__transaction_state` (`partition_coordinator`).

one sender of markers for all shards (`marker_sender`)        one sweep for ids that nobody uses
metadata --> configs apply, markers find new leaders          answers to other brokers: `wire`
"""

from __future__ import annotations

import asyncio
from dataclasses import replace

from tidelog.coordinator.partition_coordinator import PartitionCoordinator
from tidelog.coordinator.partition_shard import coordinator_errors
from tidelog.coordinator.transactions.limits import TransactionLimits
from tidelog.coordinator.transactions.marker_sender import MarkerSender
from tidelog.coordinator.transactions.open_search import OpenTransactionSearch
from tidelog.coordinator.transactions.peers import TRANSACTIONS_TOPIC
from tidelog.coordinator.transactions.shard import TransactionCounts, TransactionShard
from tidelog.coordinator.transactions.wire import (
    ADD_PARTITIONS,
    WRITE_MARKERS,
    decode_add_partitions,
    decode_markers,
    encode_add_reply,
    encode_written,
)
from tidelog.metadata import configs
from tidelog.metadata.delta import ImageDelta
from tidelog.metadata.image import ClusterImage
from tidelog.metadata.tail import MetadataTail
from tidelog.model.ids import NodeId
from tidelog.replication.leader_replica import LeaderReplica
from tidelog.replication.replicas import Replicas
from tidelog.replication.transaction_messages import AddPartitions, AddReply, MarkerReceiver
from tidelog.world.clock import Clock
from tidelog.world.transport import Transport

SWEEP_CHECK_S = 1.0
END_WAIT_S = 2.0
"""How long a request of another broker waits for the end of the transaction before."""


class TransactionCoordinator(PartitionCoordinator[TransactionShard]):
    """See the module. `start`, then `close`. Implements `TransactionHost`."""

    TOPIC = TRANSACTIONS_TOPIC
    SUBJECT = TransactionShard.SUBJECT

    def __init__(
        self,
        replicas: Replicas,
        tail: MetadataTail,
        clock: Clock,
        transport: Transport,
        receiver: MarkerReceiver,
        *,
        waiting_max: int = 10_000,
    ) -> None:
        """`receiver` writes markers to the partitions that this broker leads."""
        super().__init__(replicas, tail, clock, waiting_max=waiting_max)
        self.limits = TransactionLimits()
        self.transactions = TransactionCounts()
        self.sender = MarkerSender(
            transport=transport,
            receiver=receiver,
            image=lambda: tail.image,
            spawn=self.spawn,
            deleted_topics=self.deleted_topics,
            random=replicas.random,
        )
        self.search = OpenTransactionSearch(self.leading_shards, tail, transport)
        self._transport = transport
        self._receiver = receiver

    def start(self) -> None:
        """Start; called before `Replicas.start`, so that shards find the configs."""
        self._settings_changed(self._tail.image)
        self._tail.subscribe(self._metadata_changed)
        self._transport.serve(ADD_PARTITIONS, self._serve_add_partitions)
        self._transport.serve(WRITE_MARKERS, self._serve_markers)
        self.search.start()
        self.spawn(self._sweep(), name="forget-transactional-ids")

    def _new_shard(self, leader: LeaderReplica) -> TransactionShard:
        return TransactionShard(self, leader)

    # `TransactionHost`.

    def now_ms(self) -> int:
        """Time that does not jump: deadlines of transactions are counted from what records say."""
        return self.steady_ms()

    async def new_producer_id(self) -> int:
        return await self._replicas.producer_ids.next()

    @property
    def expiration_ms(self) -> int:
        return self.setting("transactional.id.expiration.ms")

    # Requests of brokers.

    async def add_partitions(self, request: AddPartitions) -> AddReply:
        """Return when the partitions are in the committed record. Waits for the end of the transaction before, as its
        producer goes on at once."""
        shard = self.shard_of(request.transactional_id)
        work = shard.submit_after_end(replace(request, now_ms=self.now_ms()), wait_s=END_WAIT_S)
        reply = await coordinator_errors(shard, work)
        assert isinstance(reply, AddReply), "the reply to its request"
        return reply

    async def _serve_add_partitions(self, _broker: NodeId, data: bytes) -> bytes:
        return encode_add_reply(await self.add_partitions(decode_add_partitions(data)))

    async def _serve_markers(self, _broker: NodeId, data: bytes) -> bytes:
        return encode_written(await self._receiver.write_markers(decode_markers(data)))

    # Metadata.

    def _metadata_changed(self, delta: ImageDelta, _older: ClusterImage, newer: ClusterImage) -> None:
        if any(kind == "cluster" for kind, _ in delta.configs):
            self._settings_changed(newer)
        if delta.partitions or delta.brokers or delta.removed_topics:
            self.sender.metadata_changed()

    def _settings_changed(self, image: ClusterImage) -> None:
        self.limits = TransactionLimits(
            timeout_max_ms=configs.cluster_int(image, "transaction.max.timeout.ms"),
            prepared_timeout_ms=configs.cluster_int(image, "transaction.prepared.timeout.ms"),
        )
        for shard in self.shards.values():
            shard.limits_changed(self.limits)

    async def _sweep(self) -> None:
        loop = asyncio.get_running_loop()
        last_s = loop.time()
        while True:
            # Read each time: a shorter interval applies before the longer one has passed.
            await asyncio.sleep(SWEEP_CHECK_S)
            interval_ms = self.setting("transaction.remove.expired.transaction.cleanup.interval.ms")
            if loop.time() - last_s >= interval_ms / 1000:
                last_s = loop.time()
                for shard in self.leading_shards():
                    shard.forget_idle()
