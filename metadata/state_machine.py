"""The metadata log as a replicated state machine: connects `raft.driver` and `raft.runtime`.

    Raft's committed entries --> MetadataStateMachine --> Replay: the image    on every controller
                                      |
                                      +--> StateMachineRuntime: decisions      on the leader

A controller is active when it has applied the NO_OP of its own epoch: then its image has everything that was committed.
It stops being active when its role ends. A standby applies entries as they commit, so a failover loads nothing.

The active controller does not apply its own entries twice: it promotes the image that it computed for the decision.
Entries of a large decision are replayed, since a snapshot in between must contain its pending records.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any

from tidelog.metadata.controller import QUERIES, Controller
from tidelog.metadata.decision import Context, Done
from tidelog.metadata.features import bootstrap_records
from tidelog.metadata.image import ClusterImage
from tidelog.metadata.log_ends import LogEnds
from tidelog.metadata.partitions import ElectLeaders, lacks_log_ends
from tidelog.metadata.records import (
    DECISION_BYTES_MAX,
    AbortDecision,
    NoOp,
    Record,
    decode_records,
    encode_records,
    split_decision,
)
from tidelog.metadata.replay import Replay
from tidelog.metadata.snapshot import snapshot_bytes
from tidelog.metadata.snapshot_loader import SnapshotLoader
from tidelog.model.ids import Epoch, NodeId, Offset
from tidelog.raft.driver import RaftDriver
from tidelog.raft.effects import Role, RoleChange
from tidelog.raft.messages import Entry, EntryKind, SnapshotId
from tidelog.raft.runtime import StateMachineRuntime
from tidelog.raft.state_machine import SnapshotJob
from tidelog.world.clock import Clock

Levels = tuple[tuple[int, tuple[tuple[str, int, int], ...]], ...]
"""(controller, (feature, lowest level, highest level)...)."""


@dataclass(frozen=True, slots=True)
class WriteNoOp:
    """Submitted by the controller itself: writes a no-op record."""


@dataclass(frozen=True, slots=True)
class Bootstrap:
    """The controller's own: the first decision of a new cluster; no effect if it was made."""


class DriverLog:
    """`raft.runtime.AppendLog` over a Raft driver, which is created after its state machine."""

    def __init__(self) -> None:
        self._driver: RaftDriver | None = None

    def attach(self, driver: RaftDriver) -> None:
        self._driver = driver

    @property
    def end_offset(self) -> Offset:
        assert self._driver is not None, "attach first"
        return self._driver.core.log.end

    def width(self, data: bytes) -> int:
        return 1

    async def append_at(self, data: bytes, *, at: Offset, epoch: Epoch) -> None:
        assert self._driver is not None, "attach first"
        await self._driver.propose(data, at=at, epoch=epoch)

    def fail(self, error: BaseException) -> None:
        """Stops the node."""
        assert self._driver is not None, "attach first"
        self._driver.fail(error)

    async def confirm(self) -> None:
        assert self._driver is not None, "attach first"
        await self._driver.read_index()


class Decider:
    """`raft.runtime.DecisionMachine` over the pure controller."""

    def __init__(
        self, controller: Controller, me: NodeId, clock: Clock, random: Random, *, decision_bytes_max: int
    ) -> None:
        self._controller = controller
        self._clock = clock
        self._random = random
        self._me = int(me)
        self.own_levels = controller.levels()
        self.others: Levels = ()
        """The levels that the other members of the quorum last reported (`metadata.controller_node`)."""
        self.log_ends = LogEnds()
        """Reports of brokers since this controller became active."""
        self._decision_bytes_max = decision_bytes_max
        self._decided: tuple[ClusterImage, Sequence[Record], ClusterImage] | None = None
        """(image, records, resulting image) of the newest decision with a known result."""

    def decide(self, state: ClusterImage, request: Any, *, offset: Offset) -> tuple[Sequence[Record], Any]:
        if isinstance(request, WriteNoOp):
            return (NoOp(),), Done()
        if isinstance(request, Bootstrap):
            return (() if state.features else bootstrap_records()), Done()
        decision = self._controller.decide(state, request, self._context(offset))
        self._decided = None if decision.image is None else (state, decision.records, decision.image)
        return decision.records, decision.reply

    def _context(self, offset: int) -> Context:
        levels = ((self._me, self.own_levels), *self.others)
        now_ms = self._clock.now_ms()
        return Context(now_ms, self._random, int(offset), controller_features=levels, log_ends=self.log_ends)

    def lacks_log_ends(self, image: ClusterImage, request: ElectLeaders) -> bool:
        """Whether log ends that this election compares are still missing."""
        return lacks_log_ends(image, request, self._context(0))

    def apply(self, state: ClusterImage, records: Sequence[Record]) -> ClusterImage:
        decided, self._decided = self._decided, None
        if decided is not None and decided[0] is state and decided[1] is records:
            return decided[2]
        return state.apply_all(records)

    def encode(self, records: Sequence[Record]) -> list[bytes]:
        return split_decision(records, name="decisions", bytes_max=self._decision_bytes_max)

    def abort(self) -> bytes:
        return encode_records([AbortDecision(reason="the decision was not finished")])

    def answer(self, image: ClusterImage, query: object) -> Any:
        return self._controller.answer(image, query)


def is_query(request: object) -> bool:
    return type(request) in QUERIES


class MetadataStateMachine:
    """Implements `raft.state_machine.StateMachine`."""

    def __init__(
        self,
        me: NodeId,
        controller: Controller,
        clock: Clock,
        random: Random,
        *,
        decision_bytes_max: int = DECISION_BYTES_MAX,
        waiting_max: int = 10_000,
        on_role: Callable[[bool], None] | None = None,
    ) -> None:
        """`on_role` is called when this controller becomes active, and when it stops being so."""
        self.me = me
        self.log = DriverLog()
        self.decider = Decider(controller, me, clock, random, decision_bytes_max=decision_bytes_max)
        self.offset = Offset(0)
        """Everything below is applied."""
        empty = ClusterImage()
        self.runtime: StateMachineRuntime[ClusterImage] = StateMachineRuntime(
            self.decider, self.log, empty, waiting_max=waiting_max, on_failure=self.log.fail
        )
        self._replay = Replay(empty)
        self._elected: Epoch | None = None
        """The epoch in which this node leads, until it has applied its own no-op: before that it may not decide."""
        self._on_role = on_role
        self._loader = SnapshotLoader()

    @property
    def image(self) -> ClusterImage:
        """The committed image."""
        return self.runtime.state

    @property
    def is_torn(self) -> bool:
        """The log holds the beginning of a large decision without its end."""
        return self._replay.is_open

    def validate(self) -> None:
        """Asserts that the committed image is what was replayed, and the runtime's invariants."""
        assert self.runtime.applied == self.offset, f"applied {self.offset}, the runtime has {self.runtime.applied}"
        assert self.runtime.state is self._replay.image, "the committed image is not the replayed one"
        assert self._elected is None or not self.runtime.is_leading, "decides before its epoch has begun"
        self.runtime.validate()

    # From Raft.

    def apply(self, first: Offset, entries: Sequence[Entry]) -> None:
        assert first == self.offset, f"entries from {first} on a state at {self.offset}"
        for entry in entries:
            self._apply(self.offset, entry)

    def _apply(self, offset: Offset, entry: Entry) -> None:
        runtime, replay = self.runtime, self._replay
        self.offset = Offset(offset + 1)
        mine = entry.kind is EntryKind.DATA and runtime.is_mine(offset, entry.epoch)
        if entry.kind is EntryKind.DATA:
            pending_state = runtime.pending_state if mine else None
            if pending_state is not None and not replay.is_open:
                replay.image = pending_state
            else:
                replay.apply(decode_records(entry.data))
        runtime.committed(self.offset, replay.image, mine=mine)
        if entry.kind is EntryKind.NO_OP and entry.epoch == self._elected:
            self._elected = None
            runtime.lead(entry.epoch, self.me, is_torn=replay.is_open)
            self._notify_role(True)

    async def prepare_snapshot(self, data: bytes) -> None:
        await self._loader.prepare(data)

    def load_snapshot(self, snapshot: SnapshotId, data: bytes) -> None:
        loaded = self._loader.take(data)
        self._replay = Replay(loaded.image, loaded.pending)
        self.offset = snapshot.offset
        self.runtime.load(loaded.image, snapshot.offset)

    def take_snapshot(self) -> SnapshotJob:
        pending = self._replay.pending
        return SnapshotJob(snapshot_bytes, (self._replay.image, None if pending is None else tuple(pending)))

    def role_changed(self, change: RoleChange) -> None:
        was_active = self.runtime.is_leading
        if change.role is Role.LEADER:
            if was_active and self.runtime.epoch == change.epoch:
                return
            self._elected = change.epoch
            self.runtime.follow(None)
        else:
            self._elected = None
            self.runtime.follow(change.leader)
        if was_active:
            self._notify_role(False)

    def _notify_role(self, is_active: bool) -> None:
        if self._on_role is not None:
            self._on_role(is_active)
