"""A transaction coordinator for tests of partition leaders: a few values instead of a replicated machine.

peers = ScriptedCoordinator()
peers.begin("app", producer_id=7, epoch=3)           # its transaction 1 is open
verifier = TransactionVerifier(peers, replicas.tasks)
peers.hold()                                         # questions wait until `release`
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import Any

from tidelog.log.batch import encode
from tidelog.log.columns import Record
from tidelog.log.log_appender import AppendInfo
from tidelog.model.errors import InvalidTransactionStateError, TidelogError
from tidelog.model.ids import PartitionId
from tidelog.model.transaction_errors import InvalidProducerIdMappingError
from tidelog.replication.leader_replica import LeaderReplica
from tidelog.replication.partition_transactions import ProducerTransaction
from tidelog.replication.transaction_messages import AddPartitions, AddReply, MarkedPartition, Marker


@dataclass
class OpenId:
    producer_id: int
    epoch: int
    number: int
    partitions: set[PartitionId] = field(default_factory=set)


class ScriptedCoordinator:
    """Implements `TransactionPeers`."""

    def __init__(self) -> None:
        self.open: dict[str, OpenId] = {}
        self.requests: list[AddPartitions] = []
        self.error: TidelogError | None = None
        """The answer to every question, while it stands here."""
        self.scripted: list[TidelogError | None] = []
        """The answers to the next questions; None: what is open decides."""
        self.was_asked = asyncio.Event()
        self._gate = asyncio.Event()
        self._gate.set()

    def begin(self, transactional_id: str, *, producer_id: int, epoch: int, number: int = 1) -> OpenId:
        self.open[transactional_id] = OpenId(producer_id, epoch, number)
        return self.open[transactional_id]

    def hold(self) -> None:
        self._gate.clear()

    def release(self) -> None:
        self._gate.set()

    async def add_partitions(self, request: AddPartitions) -> AddReply:
        self.requests.append(request)
        self.was_asked.set()
        await self._gate.wait()
        scripted = self.scripted.pop(0) if self.scripted else None
        if scripted is not None:
            raise scripted
        if self.error is not None:
            raise self.error
        known = self.open.get(request.transactional_id)
        if known is None or known.producer_id != request.producer_id:
            raise InvalidProducerIdMappingError(f"no transaction of producer {request.producer_id} is open")
        if known.epoch != request.epoch or (request.verify_only and not request.partitions <= known.partitions):
            raise InvalidTransactionStateError("the partition is no part of the transaction")
        known.partitions |= request.partitions
        return AddReply(number=known.number)


def transactional(value: bytes, producer_id: int, epoch: int, sequence: int = 0, **fields: Any) -> bytes:
    return encode(
        [Record(0, 1_000, b"key", value, ())],
        producer_id=producer_id,
        producer_epoch=epoch,
        base_sequence=sequence,
        is_transactional=True,
        **fields,
    )


def marker_of(
    leader: LeaderReplica,
    producer_id: int,
    epoch: int,
    *,
    number: int = 1,
    is_commit: bool = True,
    is_strict: bool = True,
    coordinator_epoch: int = 0,
    leader_epoch: int | None = None,
) -> Marker:
    partition = leader.replica.partition_id
    known = leader.leader_epoch if leader_epoch is None else leader_epoch
    return Marker(
        transactional_id="app",
        producer_id=producer_id,
        epoch=epoch,
        coordinator_epoch=coordinator_epoch,
        is_commit=is_commit,
        is_strict=is_strict,
        number=number,
        partitions=(MarkedPartition(partition.topic_id, partition.partition, known),),
    )


def append_open(
    leader: LeaderReplica, data: bytes, producer_id: int, epoch: int, *, transactional_id: str = "app", number: int = 1
) -> AppendInfo:
    """Append a batch of a transaction as if its coordinator had just confirmed it."""
    transaction = ProducerTransaction(transactional_id)
    leader.transactions.answered(leader.transactions.ask(transaction, producer_id, epoch), number)
    return leader.append(data, transaction=transaction)
