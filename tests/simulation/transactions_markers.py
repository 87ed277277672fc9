"""The markers of transactions in the partitions and in the groups' coordinators, as far as they are committed.

    late         a marker of epoch m ends no transaction of epoch m or above; no batch of an epoch below m follows it
    repeated     a partition has each marker once
    written      a transaction is complete only when each of its partitions has its marker, and each group its fence

A partition whose records are deleted while a check has not read them is not checked any more.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from simulation.broker_checker import Fail, KnownPartition
from tidelog.coordinator.state import CoordinatorState
from tidelog.coordinator.transactions.queries import markers_to_write
from tidelog.coordinator.transactions.records import Transaction
from tidelog.log.batch_header import BatchHeader
from tidelog.model.ids import PartitionId, TopicId


@dataclass(slots=True)
class _Walk:
    """The batches of one partition, up to `known.end`."""

    known: KnownPartition
    next_offset: int = 0
    is_whole: bool = True
    open: dict[int, int] = field(default_factory=dict)
    """By producer: the epoch of its open transaction."""
    ended: dict[int, int] = field(default_factory=dict)
    """By producer: the highest epoch of a marker."""


class MarkerChecker:
    def __init__(self, fail: Fail) -> None:
        self._fail = fail
        self._walks: dict[PartitionId, _Walk] = {}

    def committed(self, who: str, known: KnownPartition, header: BatchHeader) -> None:
        """A batch of the partition, in the order of its log."""
        walk = self._walks.setdefault(known.partition_id, _Walk(known))
        if header.base_offset != walk.next_offset:
            walk.is_whole = False
        walk.next_offset = int(header.next_offset)
        if not walk.is_whole or not header.is_transactional:
            return
        producer_id, epoch = header.producer_id, header.producer_epoch
        what = (
            f"{known} at {header.base_offset}: a {'marker' if header.is_control else 'batch'} of producer {producer_id}"
        )
        ended = walk.ended.get(producer_id, -1)
        if not header.is_control:
            if epoch < ended:
                self._fail(who, f"{what}, epoch {epoch}, is late: the marker of epoch {ended} is before it")
            if walk.open.setdefault(producer_id, epoch) != epoch:
                self._fail(who, f"{what}, epoch {epoch}: a transaction of epoch {walk.open[producer_id]} is open")
            return
        opened = walk.open.pop(producer_id, -1)
        if opened >= epoch:
            self._fail(who, f"{what}, epoch {epoch}, is late: it ends the transaction of epoch {opened}")
        if ended >= epoch:
            self._fail(who, f"{what}, epoch {epoch}, is late or repeated: that of epoch {ended} is before it")
        walk.ended[producer_id] = max(epoch, ended)

    def completed(
        self, who: str, transactional_id: str, ending: Transaction, groups: Mapping[PartitionId, CoordinatorState]
    ) -> None:
        """The coordinator has committed that nothing is left to do for this transaction."""
        for marker in markers_to_write(transactional_id, ending, coordinator_epoch=0):
            for marked in marker.partitions:
                partition_id = PartitionId(TopicId(marked.topic_id), marked.partition)
                where = self._without(partition_id, marker.producer_id, marker.epoch, groups.get(partition_id))
                if where:
                    ended = f"transaction {ending.number} of {transactional_id!r} is complete"
                    missing = f"the marker of producer {marker.producer_id}, epoch {marker.epoch}"
                    self._fail(who, f"{ended}, and {where} has not committed {missing}")

    def _without(self, partition_id: PartitionId, producer_id: int, epoch: int, group: CoordinatorState | None) -> str:
        """The name of a partition that certainly lacks this marker."""
        if group is not None:
            fence = group.fences.get(producer_id)
            return f"partition {partition_id.partition} of groups" if fence is None or fence.epoch < epoch else ""
        walk = self._walks.get(partition_id)
        if walk is None or not walk.is_whole or walk.known.end < walk.known.high_watermark:
            return ""  # not all that is committed has been read
        return str(walk.known) if walk.ended.get(producer_id, -1) < epoch else ""
