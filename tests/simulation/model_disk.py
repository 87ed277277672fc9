"""What a node of `core_node` stores, as values: a model of `raft.storage` on a disk, with its losses and its damage."""

from collections.abc import Callable
from random import Random

from simulation.machine import EMPTY_SNAPSHOT
from tidelog.model.errors import StorageError
from tidelog.model.ids import Epoch, Offset
from tidelog.raft.config import BootState
from tidelog.raft.effects import HardState, Persist
from tidelog.raft.membership import Membership
from tidelog.raft.messages import Entry, SnapshotId
from tidelog.world.simulated import Latency, Loss

SNAPSHOTS_KEPT = 2


class ModelDisk:
    """What a Raft node stores, as values. It outlives the processes; `crash` is what a death leaves of a write."""

    def __init__(self, directory: bytes, membership: Membership, draw: Random) -> None:
        self.directory = directory
        self.hard_state = HardState(Epoch(0), None)
        self.synced_end = Offset(0)
        self.recovering_until: Offset | None = None
        self.loss_epoch = Epoch(0)
        self.snapshots: list[tuple[SnapshotId, Membership, bytes]] = [
            (SnapshotId(Offset(0), Epoch(0)), membership, EMPTY_SNAPSHOT)
        ]
        self.start, self.start_epoch, self.start_membership = Offset(0), Epoch(0), membership
        self.entries: list[Entry] = []
        self.latency = Latency(0.0005, 0.004)
        self.is_stalled = False
        self.is_full = False
        self.fails_next = False
        self.writes_left: int | None = None
        """How many more writes begin before the power goes."""
        self.dies_with_vote = False
        """The power goes with the next write that changes epoch or vote."""
        self.on_crash_point: Callable[[], None] | None = None
        self.damaged_at: Offset | None = None
        """The first entry that cannot be read any more; nobody knows before the next `boot`."""
        self.rotten: set[SnapshotId] = set()
        """Snapshots that fail their CRC; nobody knows before one is read."""
        self.set_aside: set[SnapshotId] = set()
        """Those that were read and failed it."""
        self.reset_points: dict[Offset, tuple[SnapshotId, Membership]] = {}
        """Snapshots that a log was, or is to be, reset to: a newer one may take their place before it is."""
        self._draw = draw
        self._under_way: list[Persist] = []
        self._stalled: list[Callable[[], None]] = []

    @property
    def end(self) -> Offset:
        return Offset(self.start + len(self.entries))

    def delay_s(self) -> float:
        return self.latency.draw(self._draw)

    # -- writing

    def begin(self, persists: list[Persist]) -> None:
        if self.is_full and any(persist.entries for persist in persists):
            raise StorageError("no space left")
        self._under_way = persists

    def is_crash_point(self, persists: list[Persist]) -> bool:
        """Shall the power go in the middle of this write?"""
        if self.dies_with_vote:
            found = any(persist.hard_state != self.hard_state for persist in persists)
        elif self.writes_left is not None:
            self.writes_left -= 1
            found = self.writes_left == 0
        else:
            return False
        if found:
            self.writes_left, self.dies_with_vote = None, False
        return found

    def when_it_answers(self, complete: Callable[[], None]) -> None:
        if self.is_stalled:
            self._stalled.append(complete)
        else:
            complete()

    def unstall(self) -> None:
        self.is_stalled = False
        stalled, self._stalled = self._stalled, []
        for complete in stalled:
            complete()

    def finish(self) -> None:
        under_way, self._under_way = self._under_way, []
        if self.fails_next:
            self.fails_next = False
            raise StorageError("sync failed")
        for persist in under_way:
            self._apply(persist)

    def _apply(self, persist: Persist) -> None:
        self._cut(persist)
        assert persist.first == self.end, f"entries from {persist.first} on a log that ends at {self.end}"
        self.entries.extend(persist.entries)
        self.hard_state = persist.hard_state
        self.synced_end = self.end
        if persist.recovered:
            self.recovering_until = None

    def _cut(self, persist: Persist) -> None:
        """The synced end is lowered before the log is."""
        if persist.reset_to is not None:
            self._begin_again(*self.reset_points[persist.reset_to])
        elif persist.truncate_to is not None:
            self.synced_end = min(self.synced_end, persist.truncate_to)
            if self.damaged_at is not None and self.damaged_at >= persist.truncate_to:
                self.damaged_at = None
            del self.entries[persist.truncate_to - self.start :]

    def _begin_again(self, snapshot: SnapshotId, membership: Membership) -> None:
        self.entries.clear()
        self.damaged_at = None
        self.start, self.start_epoch, self.start_membership = snapshot.offset, snapshot.epoch, membership
        self.synced_end = snapshot.offset

    def crash(self, loss: Loss | None) -> None:
        """Of what was under way some is done; the next is cut short before its synced end and vote are stored, unless
        it cuts the log: then epoch and vote of all that is under way are stored first."""
        under_way, self._under_way = self._under_way, []
        self._stalled.clear()
        done = self._draw.randrange(len(under_way) + 1)
        for persist in under_way[:done]:
            self._apply(persist)
        if done < len(under_way) and loss is not Loss.ALL:
            half = under_way[done]
            if half.truncate_to is not None or half.reset_to is not None:
                self.hard_state = under_way[-1].hard_state
            self._cut(half)
            if half.first == self.end:
                self.entries.extend(half.entries[: self._draw.randrange(len(half.entries) + 1)])
        if loss is not None and self._draw.random() < 0.5:
            del self.entries[max(self.synced_end, self.start) - self.start :]

    def drop_before(self, start: Offset, epoch: Epoch, membership: Membership) -> None:
        if self.start < start <= self.end:
            del self.entries[: start - self.start]
            if self.damaged_at is not None and self.damaged_at < start:
                self.damaged_at = None
            self.start, self.start_epoch, self.start_membership = start, epoch, membership

    def keep_snapshot(self, snapshot: SnapshotId, membership: Membership, data: bytes) -> None:
        self.rotten.discard(snapshot)
        kept = [item for item in self.snapshots if item[0] != snapshot and item[0] not in self.set_aside]
        self.set_aside.clear()
        self.snapshots = sorted([*kept, (snapshot, membership, data)], key=lambda item: item[0])[-SNAPSHOTS_KEPT:]

    def find_snapshot(self, snapshot: SnapshotId) -> tuple[SnapshotId, Membership, bytes] | None:
        known = () if snapshot in self.set_aside else self.snapshots
        return next((item for item in known if item[0] == snapshot), None)

    # -- damage and boot

    def damage(self, offset: Offset) -> None:
        self.damaged_at = offset if self.damaged_at is None else min(offset, self.damaged_at)

    @property
    def is_rotten(self) -> bool:
        return self.damaged_at is not None or any(map(self._is_spoilt, self.snapshots))

    def _is_spoilt(self, item: tuple[SnapshotId, Membership, bytes]) -> bool:
        return item[0] in self.rotten or item[0] in self.set_aside

    def _drop_spoilt(self) -> None:
        """An older snapshot that the log continues takes the place of a rotten one; without one all is lost here."""
        newest = self.snapshots[-1]
        self.snapshots = [item for item in self.snapshots if not self._is_spoilt(item) and item[0].offset >= self.start]
        self.rotten.clear()
        self.set_aside.clear()
        if not self.snapshots:
            self.recovering_until = max(self.recovering_until or Offset(0), self.synced_end, newest[0].offset)
            self.loss_epoch = self.hard_state.epoch
            self.snapshots = [(SnapshotId(Offset(0), Epoch(0)), newest[1], EMPTY_SNAPSHOT)]
            self._begin_again(*self.snapshots[0][:2])
        elif newest[0].offset > max(self.end, self.snapshots[-1][0].offset):
            # It was acknowledged as soon as it was there, before the log was reset to it.
            self.recovering_until = max(self.recovering_until or Offset(0), newest[0].offset)
            self.loss_epoch = self.hard_state.epoch

    def boot(self) -> tuple[BootState, bytes]:
        """The state to start from, and that of the state machine."""
        if any(map(self._is_spoilt, self.snapshots)):
            self._drop_spoilt()
        snapshot, membership, data = self.snapshots[-1]
        if self.damaged_at is not None:
            good_end, self.damaged_at = max(self.damaged_at, self.start), None
            if good_end < self.synced_end:
                self.recovering_until = max(self.recovering_until or Offset(0), self.synced_end)
                self.loss_epoch = self.hard_state.epoch
            del self.entries[good_end - self.start :]
        before = self.epoch_before(snapshot.offset)
        if before != snapshot.epoch:
            self._begin_again(snapshot, membership)
        self.synced_end = self.end
        boot = BootState(
            self.hard_state,
            snapshot,
            self.start_membership,
            self.start,
            self.start_epoch,
            tuple(self.entries),
            self.recovering_until,
            self.loss_epoch,
        )
        return boot, data

    def epoch_before(self, offset: Offset) -> Epoch | None:
        index = offset - self.start
        if index == 0:
            return self.start_epoch
        return self.entries[index - 1].epoch if 0 < index <= len(self.entries) else None
