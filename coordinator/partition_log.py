"""The log of a coordinator: a partition that this broker leads in one leader epoch, as `world.replicated.AppendLog`.

An entry is one record batch and takes as many offsets as it has records. It is committed when the high watermark has
passed it. Everything here belongs to one `Leading`: with the next epoch there is another one.
"""

from __future__ import annotations

from collections.abc import Callable

from tidelog.log.batch_header import read_header
from tidelog.model.errors import MovedLogError, NotLeaderError, TidelogError, UnknownOutcomeError
from tidelog.model.ids import Epoch, Offset
from tidelog.replication.leading import Leading
from tidelog.replication.partition import ACKS_ALL


class PartitionLog:
    """See the module. `on_commit(first, end)` is called when an entry of ours has committed, before `append_at`
    returns."""

    def __init__(self, leading: Leading, on_commit: Callable[[Offset, Offset], None]) -> None:
        self._leading = leading
        self._on_commit = on_commit

    @property
    def is_led(self) -> bool:
        """Whether this epoch is still the one that the metadata shows here."""
        leading = self._leading
        return leading.replica.role is leading and not leading.state.is_superseded

    @property
    def end_offset(self) -> Offset:
        return self._leading.log.end_offset

    def width(self, data: bytes) -> int:
        return read_header(data).last_offset_delta + 1

    async def append_at(self, data: bytes, *, at: Offset, epoch: Epoch) -> None:
        leading = self._leading
        if not self.is_led:
            raise self._not_led()
        if epoch != leading.leader_epoch or at != self.end_offset:
            raise MovedLogError(f"{leading.log.path} ends at {self.end_offset}, not at {at}")
        leading.state.check_acks(ACKS_ALL)
        end = Offset(leading.append(data, is_coordinator=True).last_offset + 1)
        if leading.high_watermark < end:
            try:
                await leading.acks.wait(end)
            except TidelogError as error:
                raise UnknownOutcomeError(f"it may be stored or not: {error}") from error
        self._on_commit(at, end)

    async def confirm(self) -> None:
        if not self.is_led:
            raise self._not_led()

    def _not_led(self) -> NotLeaderError:
        leader = self._leading.replica.partition.leader
        return NotLeaderError(f"{self._leading.log.path} is led by broker {leader}", leader=leader)
