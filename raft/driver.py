"""The shell around the Raft core: gives it time, disk and network, and hands out what it commits.

One task owns the core. Whatever happens is an event in its inbox; a round steps all that wait and then carries out the
effects, so that proposals that wait together share one append to each peer and, by way of the persister, one sync.

    inbox (messages, ticks, proposals, completions)
      |  a round: step each, harvest once
      v
    persister    persist effects, all that wait at once            -> Persisted
    peers        messages, one stream to each peer                 -> messages, Disconnected
    snapshotter  take, receive, read out                           -> Snapshot*
    applier      load, apply, role: the state machine, in order    -> proposals and reads are answered
    timer        the core's next deadline                          -> Tick

Bounds: proposals that wait (`waiting_max`, then `OverloadedError`), messages in the inbox (a peer that sends more is
not read from), bytes for each peer (see `peers`), bytes in the log that are not committed (the core's).

An error of the disk, or of our own, ends the driver: it says nothing more, answers all who wait with an error, and
tells its owner (`on_failure`). What it said before was durable, so stopping is always safe.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from random import Random

from tidelog.model.errors import NotLeaderError, OverloadedError, RaftStoppedError, RecordTooLargeError
from tidelog.model.ids import Epoch, NodeId, Offset
from tidelog.raft.applier import Applier
from tidelog.raft.config import BootState, RaftConfig
from tidelog.raft.core import RaftCore
from tidelog.raft.effects import Effects, Role, RoleChange
from tidelog.raft.heard import HeardNodes
from tidelog.raft.leading import FAR_FUTURE_MS
from tidelog.raft.membership import Member, Membership, VoterKey
from tidelog.raft.messages import (
    ChangeMembership,
    Disconnected,
    Event,
    Message,
    Persisted,
    Propose,
    ReadIndex,
    SnapshotId,
    Tick,
    Transfer,
)
from tidelog.raft.peers import LinkConfig, Peers
from tidelog.raft.persister import Persister
from tidelog.raft.report import MemberReport, RaftMetrics, RaftReport, waits_for
from tidelog.raft.snapshotter import Snapshotter, Take
from tidelog.raft.state_machine import StateMachine, load_snapshot
from tidelog.raft.storage import RaftStorage
from tidelog.raft.tail import Tail, TailServer
from tidelog.raft.waiting import Waiting
from tidelog.world.transport import Transport
from tidelog.world.work import Work

LOGGER = logging.getLogger(__name__)

ROUND_EVENTS_MAX = 1024
RETAKE_WAIT_S = 0.1


@dataclass(frozen=True, slots=True, kw_only=True)
class DriverConfig:
    raft: RaftConfig = field(default_factory=RaftConfig)
    link: LinkConfig = field(default_factory=LinkConfig)
    address: str = ""
    """Where the others reach this node; told to peers that do not know it from the membership."""
    listener: str = "CONTROLLER"
    """Which of a member's endpoints is for its peers (the first one, if it has none of this name)."""
    snapshot_bytes: int = 20 << 20
    """Take a snapshot after so many bytes of committed entries; some voters after up to a quarter more, so that not all
    of them need the memory for it at the same time. The same holds for its age."""
    snapshot_age_ms: int = 60 * 60 * 1000
    """Take one at the latest so long after the last, if anything was committed."""
    entry_bytes_max: int = 8 << 20
    """Of one proposal."""
    waiting_max: int = 100_000
    inbox_messages_max: int = 10_000
    report_after_ms: int = 2_000
    """Say whom this node waits for when no leader has been known for so long, and again after `report_every_ms`."""
    report_every_ms: int = 10_000


class RaftDriver:
    """One member of the group. `start`, then use, then `close`; not used again after that."""

    def __init__(
        self,
        me: VoterKey,
        storage: RaftStorage,
        boot: BootState,
        transport: Transport,
        machine: StateMachine,
        config: DriverConfig,
        random: Random,
        *,
        work: Work,
        on_failure: Callable[[BaseException], None] | None = None,
    ) -> None:
        self.me = me
        self.config = config
        self.failed: BaseException | None = None
        self._boot = boot
        self._storage = storage
        self._machine = machine
        self._random = random
        self._on_failure = on_failure
        self._core: RaftCore | None = None
        self._metrics = RaftMetrics()
        self._inbox: list[Message | Event] = []
        self._wake = asyncio.Event()
        self._room = asyncio.Event()
        self._room.set()
        self._waiting = Waiting()
        self._persister = Persister(storage, lambda number: self._post(Persisted(number)))
        self._snapshotter = Snapshotter(storage, work, self._post)
        self._applier = Applier(machine, storage.snapshots, self._waiting, boot.snapshot.offset, self._after_apply)
        self.heard = HeardNodes(storage.store)
        self._peers = Peers(transport, config.address, config.link, random, self, self.heard)
        self._tails = TailServer(self, transport)
        self._members: Membership | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._timer_ms = FAR_FUTURE_MS
        self._snapshot_timer: asyncio.TimerHandle | None = None
        self._leader_since_ms: int | None = None
        self._no_leader_since_ms = 0
        self._reported_ms = 0
        self._role_waiters: list[asyncio.Future[RoleChange]] = []
        self._group: asyncio.TaskGroup | None = None
        self._main: asyncio.Task[None] | None = None
        self._is_closing = False

    # Life.

    async def start(self) -> None:
        """Load the state and begin to take part. The transport is started by its owner, before or after."""
        assert self._main is None, "started twice"
        for note in self._storage.notes:
            LOGGER.warning("node=%d storage: %s", self.me.node, note)
        boot = self._boot
        if boot.snapshot.offset > 0:
            await load_snapshot(self._machine, boot.snapshot, self._storage.boot_data)
            self._storage.boot_data = b""
        now_ms = self._now_ms()
        self._core = RaftCore(self.me, boot, self.config.raft, self._random, now_ms)
        self._no_leader_since_ms = self._reported_ms = now_ms
        self._main = asyncio.get_running_loop().create_task(self._run_all(), name=f"raft-{self.me.node}")
        self._wake.set()

    async def close(self) -> None:
        """Stop taking part, at once. What was under way on the disk may be finished or not; nothing is said of it."""
        self._is_closing = True
        if self._main is not None:
            self._main.cancel()
            await asyncio.wait([self._main])
        self._end(RaftStoppedError(f"node {self.me.node} stops"))

    async def wait_stopped(self) -> None:
        """Returns when it is closed or has failed (`failed` says which)."""
        if self._main is not None:
            await asyncio.wait([self._main])

    async def _run_all(self) -> None:
        try:
            async with asyncio.TaskGroup() as group:
                self._group = group
                self._peers.start(group)
                self._snapshotter.start(self._take_snapshot)
                self._tails.start()
                for part in (self._run(), self._persister.run(), self._applier.run(), self._snapshotter.run()):
                    group.create_task(part)
                group.create_task(self._report())
        except asyncio.CancelledError:
            if not self._is_closing:
                raise
        except Exception as errors:
            self._fail(_first(errors))

    def fail(self, error: BaseException) -> None:
        """Whoever uses this driver cannot go on: it stops as if the error were its own. Nothing if it has stopped."""
        if self._group is not None:
            self._group.create_task(_raise(error))

    def _fail(self, error: BaseException) -> None:
        self.failed = error
        LOGGER.error("node=%d raft stops: %s", self.me.node, error, exc_info=error)
        self._end(RaftStoppedError(f"node {self.me.node} has stopped: {error}"))
        if self._on_failure is not None:
            self._on_failure(error)

    def _end(self, error: RaftStoppedError) -> None:
        self._group = None
        self._peers.stop()
        self._tails.stop()
        for timer in (self._timer, self._snapshot_timer):
            if timer is not None:
                timer.cancel()
        self._waiting.end(error)
        waiters, self._role_waiters = self._role_waiters, []
        for waiter in waiters:
            if not waiter.done():
                waiter.set_exception(error)
                waiter.exception()

    def _now_ms(self) -> int:
        return int(asyncio.get_running_loop().time() * 1000)

    @property
    def core(self) -> RaftCore:
        """To be looked at, not to be stepped."""
        assert self._core is not None, "start first"
        return self._core

    # The round.

    def _post(self, event: Message | Event) -> None:
        self._inbox.append(event)
        self._wake.set()

    async def _run(self) -> None:
        while True:
            await self._wake.wait()
            self._round()
            # Between two rounds others have their turn: a flood of messages does not keep a sync from being seen.
            await asyncio.sleep(0)

    def _round(self) -> None:
        core, now_ms = self.core, self._now_ms()
        events, self._inbox = self._inbox[:ROUND_EVENTS_MAX], self._inbox[ROUND_EVENTS_MAX:]
        if not self._inbox:
            self._wake.clear()
        for event in events:
            core.step(event, now_ms)
        if now_ms >= core.deadline_ms:
            core.step(Tick(), now_ms)
        self._metrics.rounds += 1
        self._carry_out(core.effects(now_ms), now_ms)
        if core.log.membership is not self._members:
            self._set_members(core.log.membership)
        self._set_timer(core.deadline_ms)
        if len(self._inbox) < self.config.inbox_messages_max:
            self._room.set()

    def _carry_out(self, effects: Effects, now_ms: int) -> None:
        """In the order of the fields; what was accepted is noted first, since the same effects may end it."""
        for token, offset, epoch in effects.accepted:
            self._metrics.proposals += 1
            self._waiting.accepted(token, offset, epoch)
        if effects.persist is not None:
            self._persister.put(effects.persist)
        for chunk in effects.snapshot_writes:
            self._snapshotter.write(chunk)
        for node, message in effects.messages:
            self._peers.send(node, message, now_ms)
        if effects.load_snapshot is not None:
            self._applier.load(effects.load_snapshot)
        if effects.drop_before is not None:
            self._persister.drop_before(effects.drop_before)
        if effects.committed:
            self._applier.commit(effects.committed_from, effects.committed)
        if effects.role is not None:
            self._role_changed(effects.role, now_ms)
        for token, refusal in effects.refused:
            self._waiting.refused(token, refusal, self.core.leader)
        for token, offset in effects.reads:
            self._waiting.read(token, offset)
        for piece in effects.snapshot_reads:
            assert self._group is not None, "effects of a driver that runs"
            self._group.create_task(self._snapshotter.read(piece))

    def _role_changed(self, change: RoleChange, now_ms: int) -> None:
        LOGGER.info("node=%d epoch=%d role=%s leader=%s", self.me.node, change.epoch, change.role.value, change.leader)
        metrics = self._metrics
        if change.role is Role.CANDIDATE:
            metrics.elections += 1
        if change.leader is None and self._leader_since_ms is not None:
            self._leader_since_ms = None
            self._no_leader_since_ms = self._reported_ms = now_ms
        elif change.leader is not None:
            metrics.leader_changes += 1
            if self._leader_since_ms is None:
                metrics.without_leader_ms += now_ms - self._no_leader_since_ms
            self._leader_since_ms = now_ms
        self._applier.role_changed(change)
        waiters, self._role_waiters = self._role_waiters, []
        for waiter in waiters:
            if not waiter.done():
                waiter.set_result(change)

    def _set_timer(self, deadline_ms: int) -> None:
        """A timer that fires too early costs a look at the deadline; one that is moved costs the same. So it is only
        ever moved forward in time."""
        if deadline_ms >= self._timer_ms:
            return
        if self._timer is not None:
            self._timer.cancel()
        self._timer_ms = deadline_ms
        if deadline_ms < FAR_FUTURE_MS:
            # One millisecond more: a deadline is reached when the clock, in whole milliseconds, shows it.
            self._timer = asyncio.get_running_loop().call_at((deadline_ms + 1) / 1000, self._time_passed)

    def _time_passed(self) -> None:
        self._timer, self._timer_ms = None, FAR_FUTURE_MS
        self._wake.set()

    # What the peers tell (`peers.Inbox`).

    def received(self, messages: Sequence[Message]) -> None:
        self._metrics.messages_received += len(messages)
        self._inbox.extend(messages)
        self._wake.set()

    def disconnected(self, peer: NodeId) -> None:
        self._post(Disconnected(peer))

    async def wait_for_room(self) -> None:
        if len(self._inbox) >= self.config.inbox_messages_max:
            self._room.clear()
            await self._room.wait()

    def _set_members(self, membership: Membership) -> None:
        self._members = membership
        others = [m for m in (*membership.voters, *membership.learners) if m.node != self.me.node]
        self._peers.set_members({member.node: self.endpoint(member.endpoints) for member in others})

    def endpoint(self, endpoints: tuple[tuple[str, str], ...]) -> str:
        """Which of a member's endpoints is for its peers."""
        named = [address for name, address in endpoints if name == self.config.listener]
        return next(iter([*named, *(address for _, address in endpoints)]), "")

    # Snapshots.

    def _after_apply(self) -> None:
        self._tails.wake()
        unsaved_bytes = self._applier.unsaved_bytes
        if unsaved_bytes >= self._spread(self.config.snapshot_bytes):
            self._take_snapshot()
        elif self._snapshot_timer is None and unsaved_bytes > 0:
            loop = asyncio.get_running_loop()
            age_ms = self._spread(self.config.snapshot_age_ms)
            self._snapshot_timer = loop.call_later(age_ms / 1000, self._take_snapshot)

    def _spread(self, limit: int) -> int:
        """Voters apply the same bytes at nearly the same time: each has a limit of its own, by its place among them."""
        place = sum(voter.node < self.me.node for voter in self.core.log.membership.voters)
        return limit + limit * (place % 3) // 8

    def _take_snapshot(self) -> None:
        """Of all that is applied, in the background. There may be more in line to be applied: under a steady load there
        always is. Later, if one is under way or could not be taken, or if a newer state is about to replace this one.
        """
        if self._snapshot_timer is not None:
            self._snapshot_timer.cancel()
            self._snapshot_timer = None
        if self._group is None:
            return
        core, applied = self.core, self._applier.applied
        wait_s = self._snapshotter.wait_s()
        if self._snapshotter.is_taking or applied < core.log.snapshot.offset:
            wait_s = max(wait_s, RETAKE_WAIT_S)
        if wait_s > 0:
            self._snapshot_timer = asyncio.get_running_loop().call_later(wait_s, self._take_snapshot)
            return
        epoch = core.log.epoch_before(applied)
        assert epoch is not None, "what is applied and not in a snapshot is in the log"
        self._applier.unsaved_bytes = 0
        snapshot = SnapshotId(applied, epoch)
        self._snapshotter.take(Take(snapshot, core.log.membership_at(applied), self._machine.take_snapshot()))

    # For the owner.

    def _check_running(self) -> None:
        if self._core is None or self._group is None:
            raise RaftStoppedError(f"node {self.me.node} does not run")

    async def propose(self, data: bytes, *, at: Offset | None = None, epoch: Epoch | None = None) -> Offset:
        """Append to the log; returns its offset when it is committed and applied here.

        Raises `NotLeaderError`, `OverloadedError`, `RecordTooLargeError` and, where `at` and `epoch` say where it
        belongs and the log has moved on, `MovedLogError` (nothing was done); `UnknownOutcomeError` (leadership was
        lost: it may be done, or be done yet); `RaftStoppedError`.
        """
        self._check_running()
        if len(data) > self.config.entry_bytes_max:
            raise RecordTooLargeError(
                f"a proposal of {len(data)} bytes is over the limit of {self.config.entry_bytes_max}"
            )
        if self._waiting.count >= self.config.waiting_max:
            raise OverloadedError(f"{self._waiting.count} requests wait already")
        token, future = self._waiting.ask()
        self._post(Propose(token, data, at, epoch))
        return await future

    async def read_index(self) -> Offset:
        """An offset such that a state that has applied everything below it has seen every proposal that was answered
        before this call. Raises `NotLeaderError`."""
        self._check_running()
        if self._waiting.count >= self.config.waiting_max:
            raise OverloadedError(f"{self._waiting.count} requests wait already")
        token, future = self._waiting.ask()
        self._post(ReadIndex(token))
        return await future

    async def applied(self, offset: Offset) -> Offset:
        """Returns when everything below `offset` has been applied here."""
        self._check_running()
        return await self._waiting.until_applied(offset, self._applier.applied)

    async def change_membership(
        self, *, add: Member | None = None, remove: NodeId | None = None, update: Member | None = None
    ) -> Offset:
        """Add a voter (returns when it has caught up and votes), remove one, or give a member of this node and
        directory new endpoints. One at a time.

        Raises as `propose`, and `MembershipChangeError`. Cancelling does not undo it: a learner that was added stays,
        and is promoted when it has caught up.
        """
        assert [add, remove, update].count(None) == 2, "one change at a time"
        self._check_running()
        token, future = self._waiting.ask()
        self._post(ChangeMembership(token, add=add, remove=remove, update=update))
        return await future

    def transfer(self, target: NodeId | None = None) -> None:
        """Hand leadership to a voter, if this node leads; by default to the most advanced one."""
        self._check_running()
        self._post(Transfer(target))

    async def hand_over(self, *, timeout_ms: int) -> bool:
        """Before an orderly stop: give leadership away. True when this node does not lead any more."""
        self._check_running()
        end_ms = self._now_ms() + timeout_ms
        while self.core.role is Role.LEADER and self._now_ms() < end_ms:
            self.transfer()
            # A transfer that its target does not answer is forgotten by the core after this time: then again.
            wait_ms = min(self.config.raft.election_timeout_max_ms, max(1, end_ms - self._now_ms()))
            try:
                async with asyncio.timeout(wait_ms / 1000):
                    await self.next_role()
            except TimeoutError:
                continue
        return self.core.role is not Role.LEADER

    async def next_role(self) -> RoleChange:
        """The next change of role, epoch or leader."""
        self._check_running()
        waiter: asyncio.Future[RoleChange] = asyncio.get_running_loop().create_future()
        self._role_waiters.append(waiter)
        return await waiter

    async def leader_known(self) -> NodeId:
        """Returns when a leader is known here."""
        self._check_running()
        while self.core.leader is None:
            await self.next_role()
        return self.core.leader

    def hears_leader(self) -> bool:
        """Whether it leads, or the leader that it knows of was heard within an election timeout. A node that may not
        campaign (one that was removed, or is no member yet) names the last leader it had for ever."""
        core = self.core
        if core.leading is not None:
            return True
        silent_ms = self._now_ms() - core.elections.contact_ms
        return core.leader is not None and silent_ms <= self.config.raft.election_timeout_max_ms

    def _without_leader_ms(self, now_ms: int) -> int:
        core = self.core
        if core.leader is None or self._leader_since_ms is None:
            return now_ms - self._no_leader_since_ms
        return 0 if self.hears_leader() else now_ms - max(core.elections.contact_ms, self._leader_since_ms)

    def without_leader_total_ms(self) -> int:
        """Since the process began, with the spell that lasts; never falls."""
        lasts_ms = self._now_ms() - self._no_leader_since_ms if self._leader_since_ms is None else 0
        return self._metrics.without_leader_ms + lasts_ms

    def set_disk_stall_timeout_ms(self, limit_ms: int) -> None:
        """From now on; it is a setting that changes while the node runs."""
        if limit_ms != self.core.config.disk_stall_timeout_ms:
            self.core.config = replace(self.core.config, disk_stall_timeout_ms=limit_ms)

    def tail(self, offset: Offset, epoch: Epoch) -> Tail:
        """Committed entries from `offset` on, `epoch` being that of the entry before it. The caller closes it."""
        self._check_running()
        return self._tails.open(offset, epoch)

    def check_leads(self) -> None:
        """Raise `NotLeaderError` unless this node leads as far as it knows."""
        if self.core.role is not Role.LEADER:
            raise NotLeaderError("not the leader", leader=self.core.leader)

    async def read_piece(self, snapshot: SnapshotId, position: int) -> tuple[bytes, int] | None:
        """Raw bytes of a snapshot's file, and its size; None if it is gone. Not checked: see `check_snapshot`."""
        return await self._storage.snapshots.read_piece(snapshot, position)

    def check_snapshot(self, snapshot: SnapshotId) -> asyncio.Task[bool]:
        """Whether a snapshot may be sent; see `Snapshotter.check`. It goes on, whatever becomes of who asked."""
        self._check_running()
        assert self._group is not None, "it runs"
        return self._group.create_task(self._snapshotter.check(snapshot))

    @property
    def applied_offset(self) -> Offset:
        return self._applier.applied

    @property
    def metrics(self) -> RaftMetrics:
        metrics = self._metrics
        metrics.proposals_committed = self._waiting.committed
        metrics.entries_applied = self._applier.entries
        metrics.persist_rounds = self._persister.rounds
        metrics.messages_sent = self._peers.sent
        metrics.queue_overflows = self._peers.overflows
        metrics.snapshots_taken = self._snapshotter.taken
        metrics.snapshots_installed = self._snapshotter.installed
        metrics.snapshots_refused = self._snapshotter.refused
        metrics.snapshots_failed = self._snapshotter.failed
        return metrics

    def describe(self) -> RaftReport:
        core, now_ms = self.core, self._now_ms()
        membership = core.log.membership
        return RaftReport(
            self.me.node,
            self.me.directory,
            core.epoch,
            core.role,
            core.leader,
            core.commit,
            self._applier.applied,
            core.log.start,
            core.log.end,
            core.durable_end,
            core.log.snapshot,
            core.recovering_until,
            self._without_leader_ms(now_ms),
            tuple(
                self._describe_member(member, is_voter=member in membership.voters, now_ms=now_ms)
                for member in (*membership.voters, *membership.learners)
            ),
            self._tails.describe(),
            tuple(sorted(core.elections.refusers)),
        )

    def _describe_member(self, member: Member, *, is_voter: bool, now_ms: int) -> MemberReport:
        core, link = self.core, self._peers.links.get(member.node)
        is_me = member.node == self.me.node
        error = None if is_me else ("no connection" if link is None else link.error)
        row = MemberReport(member.node, member.directory, member.endpoints, is_voter, error is None, error)
        if core.leading is None:
            return row
        progress = core.leading.peers.get(member.node)
        match = core.durable_end if is_me else (Offset(0) if progress is None else progress.match)
        return MemberReport(
            *(row.node, row.directory, row.endpoints, row.is_voter, row.is_connected, row.error),
            match=match,
            lag=core.log.end - match,
            silent_ms=0 if is_me or progress is None else now_ms - progress.active_ms,
            counts=True if is_me or progress is None else progress.counts,
            stuck_ms=0 if is_me or progress is None or match >= core.commit else now_ms - progress.advanced_ms,
        )

    # Waiting for a leader.

    async def _report(self) -> None:
        """Say in the log whom this node waits for, while no leader is known, or the one that is known is not heard."""
        after_ms, every_ms = self.config.report_after_ms, self.config.report_every_ms
        next_ms = after_ms
        while True:
            await asyncio.sleep(after_ms / 1000)
            waited_ms = self._without_leader_ms(self._now_ms())
            if waited_ms < after_ms:
                next_ms = after_ms
            elif waited_ms >= next_ms:
                LOGGER.warning("node=%d %s", self.me.node, self.waits_for())
                next_ms = waited_ms + every_ms

    def waits_for(self) -> str:
        """Why there is no leader, as far as this node can see."""
        return waits_for(self.describe(), self.endpoint)


async def _raise(error: BaseException) -> None:
    raise error


def _first(error: BaseException) -> BaseException:
    """The error that came first in a group of them."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
