"""The log of a coordinator as `raft.runtime.AppendLog`: a partition that this broker leads in one leader epoch.

An entry is one record batch and takes one offset per record. It is committed when the high watermark has passed it. One
object serves one `LeaderReplica`; the next epoch has a new one.
"""

from __future__ import annotations

from collections.abc import Callable

from tidelog.log.batch_header import read_header
from tidelog.model.errors import MovedLogError, NotLeaderError, TidelogError, UnknownOutcomeError
from tidelog.model.ids import Epoch, Offset
from tidelog.replication.leader_replica import LeaderReplica
from tidelog.replication.partition import ACKS_ALL


class PartitionLog:
    """See the module. `on_commit(first, end)` is called when an entry has committed, before `append_at` returns."""

    def __init__(self, leader: LeaderReplica, on_commit: Callable[[Offset, Offset], None]) -> None:
        self._leader = leader
        self._on_commit = on_commit

    @property
    def is_led(self) -> bool:
        """Whether this leader epoch is still the current one on this broker."""
        leader = self._leader
        return leader.replica.role is leader and not leader.state.is_superseded

    @property
    def end_offset(self) -> Offset:
        return self._leader.log.end_offset

    def width(self, data: bytes) -> int:
        return read_header(data).last_offset_delta + 1

    async def append_at(self, data: bytes, *, at: Offset, epoch: Epoch) -> None:
        leader = self._leader
        if not self.is_led:
            raise self._not_led()
        if epoch != leader.leader_epoch or at != self.end_offset:
            raise MovedLogError(f"{leader.log.path} ends at {self.end_offset}, not at {at}")
        leader.state.check_acks(ACKS_ALL)
        end = Offset(leader.append(data, is_coordinator=True).last_offset + 1)
        if leader.high_watermark < end:
            try:
                await leader.acks.wait(end)
            except TidelogError as error:
                raise UnknownOutcomeError(f"the entry may be stored or not: {error}") from error
        self._on_commit(at, end)

    async def confirm(self) -> None:
        """Checks only what this broker knows: see `AppendLog.confirm`."""
        if not self.is_led:
            raise self._not_led()

    def _not_led(self) -> NotLeaderError:
        leader = self._leader.replica.partition.leader
        return NotLeaderError(f"{self._leader.log.path} is led by broker {leader}", leader=leader)
