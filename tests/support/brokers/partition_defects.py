"""Deliberate defects of a partition's leader: what must be noticed by every check of replication."""

from __future__ import annotations

from tidelog.metadata.image import Partition
from tidelog.metadata.partitions import PartitionState
from tidelog.model.ids import Offset
from tidelog.replication.partition import IsrProposal, LeaderState, Progress


class PendingAdditionsDoNotCount(LeaderState):
    def _count(self) -> None:
        self._maximal = tuple(sorted(self._isr & self._progress.keys()))


class PendingRemovalsDoNotCount(LeaderState):
    def sent(self, proposal: IsrProposal) -> None:
        super().sent(proposal)
        self._maximal = tuple(m for m in self._maximal if m in proposal.members)

    def validate(self) -> None:
        """What comes of it shall be noticed, not the breach itself."""


class DoubtIsForgotten(LeaderState):
    def failed(self, *, may_be_done: bool) -> bool:
        return super().failed(may_be_done=False)


class RefusalEndsAllDoubt(LeaderState):
    def answered(self, state: PartitionState, now_ms: int) -> bool:
        if state.error is not None:
            self._unresolved = frozenset()
        return super().answered(state, now_ms)


class MinIsrIsIgnored(LeaderState):
    def _advance(self) -> bool:
        least, self._min_isr = self._min_isr, 0
        eligible, self._eligible = self._eligible, ()
        moved = super()._advance()
        self._min_isr, self._eligible = least, eligible
        return moved


class OwnDurableEndIsTheLogEnd(LeaderState):
    def appended(self, end: Offset, now_ms: int) -> None:
        super().appended(end, now_ms)
        self.durable(end, now_ms)


class SilentFollowersAreCountedAsCaughtUp(LeaderState):
    def _advance(self) -> bool:
        for follower, known in self._progress.items():
            if known.durable_end is None:
                self._progress[follower] = Progress(self._log_end, 0, 0, self._log_end, 0)
        return super()._advance()


class JoinsAtTheHighWatermarkAlone(LeaderState):
    def next_proposal(self, live: object, now_ms: int) -> IsrProposal | None:
        start, self.epoch_start = self.epoch_start, Offset(0)
        proposal = super().next_proposal(live, now_ms)  # type: ignore[arg-type]
        self.epoch_start = start
        return proposal


class FormerIncarnationsAreProposed(LeaderState):
    """The proposal names all live replicas, not those that have acknowledged."""

    def _epoch_in_sync(self, follower: int, live_epoch: int | None) -> int | None:
        known = self._progress[follower]
        return super()._epoch_in_sync(follower, None if live_epoch is None else known.broker_epoch) and live_epoch


class StaleMetadataCounts(LeaderState):
    def metadata_changed(self, partition: Partition, min_isr: int, now_ms: int) -> bool:
        if partition.leader_epoch == self.leader_epoch and partition.partition_epoch < self.partition_epoch:
            self.partition_epoch = partition.partition_epoch
            self._install(frozenset(partition.isr), now_ms)
        return super().metadata_changed(partition, min_isr, now_ms)


class NewLeaderCommitsItsWholeLog(LeaderState):
    def _advance(self) -> bool:
        if self.high_watermark < self.epoch_start and self.durable_end >= self.epoch_start:
            self.high_watermark = self.epoch_start
        return super()._advance()
