"""The metadata log as a replicated state machine: between `raft.driver` and `world.replicated`.

    Raft's committed entries --> MetadataMachine --> Replay: the image         on every controller
                                      |
                                      +--> ReplicatedMachine: decisions        on the one that leads

A controller is active when the NO_OP of its own epoch has been applied: then its image has everything that was ever
committed. It stops being so when its role ends. A standby applies as it goes, so taking over loads nothing.

An entry of the active controller's own is not applied twice: the image that was made when it was decided is promoted.
Entries of a large decision are replayed, since a snapshot in between has to carry what has come of it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any

from tidelog.metadata.controller import ANSWERS, Controller
from tidelog.metadata.decision import Context, Done
from tidelog.metadata.features import bootstrap_records
from tidelog.metadata.image import ClusterImage
from tidelog.metadata.loading import SnapshotLoader
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
from tidelog.model.ids import Epoch, NodeId, Offset
from tidelog.raft.driver import RaftDriver
from tidelog.raft.effects import Role, RoleChange
from tidelog.raft.messages import Entry, EntryKind, SnapshotId
from tidelog.raft.state_machine import SnapshotJob
from tidelog.world.clock import Clock
from tidelog.world.replicated import ReplicatedMachine

Levels = tuple[tuple[int, tuple[tuple[str, int, int], ...]], ...]
"""(controller, (feature, lowest level, highest level)...)."""


@dataclass(frozen=True, slots=True)
class KeepMoving:
    """The controller's own: a record that changes nothing."""


@dataclass(frozen=True, slots=True)
class Bootstrap:
    """The controller's own: the first decision of a new cluster; nothing if it was made."""


class DriverLog:
    """`world.replicated.AppendLog` over a Raft driver, which is made after its state machine."""

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
        """The node cannot go on."""
        assert self._driver is not None, "attach first"
        self._driver.fail(error)

    async def confirm(self) -> None:
        assert self._driver is not None, "attach first"
        await self._driver.read_index()


class Decider:
    """`world.replicated.Machine` over the pure controller."""

    def __init__(
        self, controller: Controller, me: NodeId, clock: Clock, random: Random, *, decision_bytes_max: int
    ) -> None:
        self._controller = controller
        self._clock = clock
        self._random = random
        self._me = int(me)
        self.own_levels = controller.levels()
        self.others: Levels = ()
        """What the other members of the quorum said that they support, when they were asked last (`metadata.shell`)."""
        self.log_ends = LogEnds()
        """What brokers have reported since this controller became active."""
        self._decision_bytes_max = decision_bytes_max
        self._decided: tuple[ClusterImage, Sequence[Record], ClusterImage] | None = None
        """(on what, which records, what they make) of the newest decision that knows it."""

    def decide(self, state: ClusterImage, request: Any, *, offset: Offset) -> tuple[Sequence[Record], Any]:
        if isinstance(request, KeepMoving):
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
        """Whether brokers have not reported yet all log ends that this election compares."""
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

    def answer(self, image: ClusterImage, question: object) -> Any:
        return self._controller.answer(image, question)


def is_question(request: object) -> bool:
    return type(request) in ANSWERS


class MetadataMachine:
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
        """`on_role` is told when this controller becomes active, and when it stops being so."""
        self.me = me
        self.log = DriverLog()
        self.decider = Decider(controller, me, clock, random, decision_bytes_max=decision_bytes_max)
        self.offset = Offset(0)
        """Everything below is applied."""
        self.replicated: ReplicatedMachine[ClusterImage] = ReplicatedMachine(
            self.decider, self.log, ClusterImage(), waiting_max=waiting_max, on_failure=self.log.fail
        )
        self._replay = Replay(ClusterImage())
        self._elected: Epoch | None = None
        """Leads in this epoch, and has not yet applied its NO_OP."""
        self._on_role = on_role
        self._loader = SnapshotLoader()

    @property
    def image(self) -> ClusterImage:
        """What is committed."""
        return self.replicated.state

    @property
    def is_torn(self) -> bool:
        """The log holds the beginning of a large decision without its end."""
        return self._replay.is_open

    # From Raft.

    def apply(self, first: Offset, entries: Sequence[Entry]) -> None:
        assert first == self.offset, f"entries from {first} on a state at {self.offset}"
        for entry in entries:
            self._apply(self.offset, entry)

    def _apply(self, offset: Offset, entry: Entry) -> None:
        replicated, replay = self.replicated, self._replay
        self.offset = Offset(offset + 1)
        mine = entry.kind is EntryKind.DATA and replicated.is_mine(offset, entry.epoch)
        if entry.kind is EntryKind.DATA:
            promised = replicated.promised if mine else None
            if promised is not None and not replay.is_open:
                replay.image = promised
            else:
                replay.apply(decode_records(entry.data))
        replicated.committed(self.offset, replay.image, mine=mine)
        if entry.kind is EntryKind.NO_OP and entry.epoch == self._elected:
            self._elected = None
            replicated.lead(entry.epoch, self.me, is_torn=replay.is_open)
            self._tell(True)

    async def prepare_snapshot(self, data: bytes) -> None:
        await self._loader.prepare(data)

    def load_snapshot(self, snapshot: SnapshotId, data: bytes) -> None:
        found = self._loader.take(data)
        self._replay = Replay(found.image, found.pending)
        self.offset = snapshot.offset
        self.replicated.load(found.image, snapshot.offset)

    def take_snapshot(self) -> SnapshotJob:
        pending = self._replay.pending
        return SnapshotJob(snapshot_bytes, (self._replay.image, None if pending is None else tuple(pending)))

    def role_changed(self, change: RoleChange) -> None:
        was_active = self.replicated.is_leading
        if change.role is Role.LEADER:
            if was_active and self.replicated.epoch == change.epoch:
                return
            self._elected = change.epoch
            self.replicated.follow(None)
        else:
            self._elected = None
            self.replicated.follow(change.leader)
        if was_active:
            self._tell(False)

    def _tell(self, is_active: bool) -> None:
        if self._on_role is not None:
            self._on_role(is_active)
