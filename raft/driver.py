"""The driver of the Raft core: gives it time, disk and network, and applies what it commits.

One task owns the core. Everything that happens is an event in its inbox; a round steps all pending events and then
executes the effects, so that proposals in one round share one append to each peer and, by the persister, one sync.

    inbox (messages, ticks, proposals, completions)
      |  a round: step each, get the effects once
      v
    persister    persist effects, all pending ones at once         -> Persisted
    peers        messages, one stream to each peer                 -> messages, Disconnected
    snapshotter  take, receive, read                               -> Snapshot*
    applier      load, apply, role: the state machine, in order    -> proposals and reads complete
    timer        the core's next deadline                          -> Tick

Bounds: pending proposals (`waiting_max`, then `OverloadedError`), messages in the inbox (a peer that sends more is not
read from), bytes for each peer (see `peers`), uncommitted bytes in the log (by the core).

A disk error or a bug ends the driver: it sends nothing more, fails all pending requests, and notifies its owner
(`on_failure`). What it sent before was durable, so stopping is always safe.
"""

import asyncio
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from random import Random

from tidelog.model.errors import OverloadedError, RaftStoppedError, RecordTooLargeError, first_error
from tidelog.model.ids import Epoch, NodeId, Offset
from tidelog.raft.applier import Applier
from tidelog.raft.config import BootState, RaftConfig
from tidelog.raft.core import RaftCore
from tidelog.raft.effects import Effects, Role, RoleChange
from tidelog.raft.leader import FAR_FUTURE_MS
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
from tidelog.raft.pending_requests import PendingRequests
from tidelog.raft.persister import Persister
from tidelog.raft.seen_peers import SeenPeers
from tidelog.raft.snapshotter import SnapshotRequest, Snapshotter
from tidelog.raft.state_machine import StateMachine, load_snapshot
from tidelog.raft.status import MemberStatus, RaftMetrics, RaftStatus, explain_missing_leader
from tidelog.raft.storage import RaftStorage
from tidelog.raft.tail import Tail, TailServer
from tidelog.world.transport import Transport
from tidelog.world.work import Work

LOGGER = logging.getLogger(__name__)

ROUND_EVENTS_MAX = 1024
SNAPSHOT_RETRY_S = 0.1


@dataclass(frozen=True, slots=True, kw_only=True)
class DriverConfig:
    raft: RaftConfig = field(default_factory=RaftConfig)
    link: LinkConfig = field(default_factory=LinkConfig)
    address: str = ""
    """The address of this node, sent to peers that do not know it from the membership."""
    listener: str = "CONTROLLER"
    """The listener name of the endpoint that peers use (the first endpoint, if none has this name)."""
    snapshot_bytes: int = 20 << 20
    """Take a snapshot after this many bytes of committed entries. Some voters use up to a quarter more, so that not all
    need the memory at the same time; likewise for `snapshot_age_ms`."""
    snapshot_age_ms: int = 60 * 60 * 1000
    """Maximum age of the last snapshot, if anything was committed since."""
    entry_bytes_max: int = 8 << 20
    """Limit of one proposal."""
    waiting_max: int = 100_000
    inbox_messages_max: int = 10_000
    report_after_ms: int = 2_000
    """Log why there is no leader after this time, and again every `report_every_ms`."""
    report_every_ms: int = 10_000


class RaftDriver:
    """One member of the group. Life cycle: `start`, `close`; not reusable."""

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
        self._has_capacity = asyncio.Event()
        self._has_capacity.set()
        self._waiting = PendingRequests()
        self._persister = Persister(storage, lambda number: self._post(Persisted(number)))
        self._snapshotter = Snapshotter(storage, work, self._post)
        self._applier = Applier(machine, storage.snapshots, self._waiting, boot.snapshot.offset, self._after_apply)
        self.seen_peers = SeenPeers(storage.store)
        self._peers = Peers(transport, config.address, config.link, random, self, self.seen_peers)
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

    # Life cycle.

    async def start(self) -> None:
        """Loads the state and joins the group. The owner starts the transport, before or after."""
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
        """Stops at once. Running disk operations may complete or not; nothing depends on them."""
        self._is_closing = True
        if self._main is not None:
            self._main.cancel()
            await asyncio.wait([self._main])
        self._end(RaftStoppedError(f"node {self.me.node} stops"))

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
            self._fail(first_error(errors))

    def fail(self, error: BaseException) -> None:
        """Stops the driver with an error of its owner. No effect if it has stopped."""
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
        """The core, to be read by tests and tools; only the driver steps it."""
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
            # Other tasks run between two rounds: a flood of messages does not delay a sync completion.
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
        self._execute(core.effects(now_ms), now_ms)
        if core.log.membership is not self._members:
            self._set_members(core.log.membership)
        self._set_timer(core.deadline_ms)
        if len(self._inbox) < self.config.inbox_messages_max:
            self._has_capacity.set()

    def _execute(self, effects: Effects, now_ms: int) -> None:
        """Executes the effects in the order of their fields.

        Accepted proposals are registered first, since the same effects may end them.
        """
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
        for token, rejection in effects.rejected:
            self._waiting.rejected(token, rejection, self.core.leader)
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
        """Sets the timer. It only ever moves to an earlier time: an early timer costs one check of the deadline, as
        much as moving it."""
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

    # From the peers (`peers.Inbox`).

    def received(self, messages: Sequence[Message]) -> None:
        self._metrics.messages_received += len(messages)
        self._inbox.extend(messages)
        self._wake.set()

    def disconnected(self, peer: NodeId) -> None:
        self._post(Disconnected(peer))

    async def wait_for_capacity(self) -> None:
        if len(self._inbox) >= self.config.inbox_messages_max:
            self._has_capacity.clear()
            await self._has_capacity.wait()

    def _set_members(self, membership: Membership) -> None:
        self._members = membership
        others = [m for m in (*membership.voters, *membership.learners) if m.node != self.me.node]
        self._peers.set_members({member.node: self.endpoint(member.endpoints) for member in others})

    def endpoint(self, endpoints: tuple[tuple[str, str], ...]) -> str:
        """Returns the address that peers use of these endpoints."""
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
        """Voters apply the same bytes at nearly the same time: each has a limit of its own, by its rank among them."""
        rank = sum(voter.node < self.me.node for voter in self.core.log.membership.voters)
        return limit + limit * (rank % 3) // 8

    def _take_snapshot(self) -> None:
        """Requests a snapshot of the applied state, in the background, even while more entries are queued: under steady
        load there always are. Retries later if a snapshot is in progress or could not be taken, or if a newer state is
        about to be loaded."""
        if self._snapshot_timer is not None:
            self._snapshot_timer.cancel()
            self._snapshot_timer = None
        if self._group is None:
            return
        core, applied = self.core, self._applier.applied
        wait_s = self._snapshotter.wait_s()
        if self._snapshotter.is_taking or applied < core.log.snapshot.offset:
            wait_s = max(wait_s, SNAPSHOT_RETRY_S)
        if wait_s > 0:
            self._snapshot_timer = asyncio.get_running_loop().call_later(wait_s, self._take_snapshot)
            return
        epoch = core.log.epoch_before(applied)
        assert epoch is not None, "what is applied and not in a snapshot is in the log"
        self._applier.unsaved_bytes = 0
        snapshot = SnapshotId(applied, epoch)
        self._snapshotter.take(
            SnapshotRequest(snapshot, core.log.membership_at(applied), self._machine.take_snapshot())
        )

    # For the owner.

    def _check_running(self) -> None:
        if self._core is None or self._group is None:
            raise RaftStoppedError(f"node {self.me.node} is not running")

    async def propose(self, data: bytes, *, at: Offset | None = None, epoch: Epoch | None = None) -> Offset:
        """Appends to the log; returns the offset when it is committed and applied here.

        Raises `NotLeaderError`, `OverloadedError`, `RecordTooLargeError` and, if the log does not end at `at` in
        `epoch`, `MovedLogError` (nothing was done); `UnknownOutcomeError` (leadership was lost: it may be done now or
        later); `RaftStoppedError` (nothing was done).
        """
        self._check_running()
        if len(data) > self.config.entry_bytes_max:
            raise RecordTooLargeError(
                f"a proposal of {len(data)} bytes is over the limit of {self.config.entry_bytes_max}"
            )
        if self._waiting.count >= self.config.waiting_max:
            raise OverloadedError(f"{self._waiting.count} requests are pending: retry later")
        token, future = self._waiting.add()
        self._post(Propose(token, data, at, epoch))
        return await future

    async def read_index(self) -> Offset:
        """Returns an offset such that a state that has applied everything below it has seen every proposal that
        completed before this call. Raises `NotLeaderError`."""
        self._check_running()
        if self._waiting.count >= self.config.waiting_max:
            raise OverloadedError(f"{self._waiting.count} requests are pending: retry later")
        token, future = self._waiting.add()
        self._post(ReadIndex(token))
        return await future

    async def wait_applied(self, offset: Offset) -> Offset:
        """Returns when everything below `offset` has been applied here."""
        self._check_running()
        return await self._waiting.until_applied(offset, self._applier.applied)

    async def change_membership(
        self, *, add: Member | None = None, remove: NodeId | None = None, update: Member | None = None
    ) -> Offset:
        """Adds a voter (returns when it has caught up and votes), removes one, or changes the endpoints of a member of
        this node and directory. One at a time.

        Raises as `propose`, and `MembershipChangeError`. Cancelling does not undo it: an added learner stays, and is
        promoted when it has caught up.
        """
        assert [add, remove, update].count(None) == 2, "one change at a time"
        self._check_running()
        token, future = self._waiting.add(is_change=True)
        self._post(ChangeMembership(token, add=add, remove=remove, update=update))
        return await future

    def transfer(self, target: NodeId | None = None) -> None:
        """Transfers leadership to a voter, if this node leads; by default to the most advanced one."""
        self._check_running()
        self._post(Transfer(target))

    async def step_down(self, *, timeout_ms: int) -> bool:
        """Transfers leadership before an orderly stop. Returns True when this node does not lead."""
        self._check_running()
        end_ms = self._now_ms() + timeout_ms
        while self.core.role is Role.LEADER and self._now_ms() < end_ms:
            self.transfer()
            # The core drops a transfer without a response after this time: retry then.
            wait_ms = min(self.config.raft.election_timeout_max_ms, max(1, end_ms - self._now_ms()))
            try:
                async with asyncio.timeout(wait_ms / 1000):
                    await self.wait_for_role_change()
            except TimeoutError:
                continue
        return self.core.role is not Role.LEADER

    async def wait_for_role_change(self) -> RoleChange:
        """Returns the next change of role, epoch or leader."""
        self._check_running()
        waiter: asyncio.Future[RoleChange] = asyncio.get_running_loop().create_future()
        self._role_waiters.append(waiter)
        return await waiter

    def has_leader_contact(self) -> bool:
        """Whether it leads, or the known leader made contact within an election timeout. A node that may not campaign
        (removed, or not a member yet) keeps the last leader that it knew."""
        core = self.core
        if core.leader_state is not None:
            return True
        silent_ms = self._now_ms() - core.elections.contact_ms
        return core.leader is not None and silent_ms <= self.config.raft.election_timeout_max_ms

    def _without_leader_ms(self, now_ms: int) -> int:
        core = self.core
        if core.leader is None or self._leader_since_ms is None:
            return now_ms - self._no_leader_since_ms
        return 0 if self.has_leader_contact() else now_ms - max(core.elections.contact_ms, self._leader_since_ms)

    def without_leader_total_ms(self) -> int:
        """Milliseconds without a leader since the process started, including a current outage; never falls."""
        lasts_ms = self._now_ms() - self._no_leader_since_ms if self._leader_since_ms is None else 0
        return self._metrics.without_leader_ms + lasts_ms

    def set_disk_stall_timeout_ms(self, limit_ms: int) -> None:
        """Changes the timeout while the node runs."""
        if limit_ms != self.core.config.disk_stall_timeout_ms:
            self.core.config = replace(self.core.config, disk_stall_timeout_ms=limit_ms)

    def tail(self, offset: Offset, epoch: Epoch) -> Tail:
        """Returns a tail of committed entries from `offset` on; `epoch` is that of the entry before it. The caller
        closes it."""
        self._check_running()
        return self._tails.open(offset, epoch)

    async def read_chunk(self, snapshot: SnapshotId, position: int) -> tuple[bytes, int] | None:
        """Returns raw bytes of a snapshot file, and its size; None if it is gone. Unchecked: see `check_snapshot`."""
        return await self._storage.snapshots.read_chunk(snapshot, position)

    def check_snapshot(self, snapshot: SnapshotId) -> asyncio.Task[bool]:
        """Checks whether a snapshot may be sent; see `Snapshotter.check`. Continues if the caller is cancelled."""
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
        metrics.snapshots_rejected = self._snapshotter.rejected
        metrics.snapshots_failed = self._snapshotter.failed
        return metrics

    def describe(self) -> RaftStatus:
        core, now_ms = self.core, self._now_ms()
        membership = core.log.membership
        return RaftStatus(
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
            tuple(sorted(core.elections.rejecting_voters)),
        )

    def _describe_member(self, member: Member, *, is_voter: bool, now_ms: int) -> MemberStatus:
        core, link = self.core, self._peers.links.get(member.node)
        is_me = member.node == self.me.node
        error = None if is_me else ("no connection" if link is None else link.error)
        row = MemberStatus(member.node, member.directory, member.endpoints, is_voter, error is None, error)
        if core.leader_state is None:
            return row
        progress = core.leader_state.peers.get(member.node)
        match = core.durable_end if is_me else (Offset(0) if progress is None else progress.match)
        return MemberStatus(
            *(row.node, row.directory, row.endpoints, row.is_voter, row.is_connected, row.error),
            match=match,
            lag=core.log.end - match,
            silent_ms=0 if is_me or progress is None else now_ms - progress.active_ms,
            counts=True if is_me or progress is None else progress.counts,
            stuck_ms=0 if is_me or progress is None or match >= core.commit else now_ms - progress.advanced_ms,
        )

    async def _report(self) -> None:
        """Logs why there is no leader, while none is known or the known one makes no contact."""
        after_ms, every_ms = self.config.report_after_ms, self.config.report_every_ms
        next_ms = after_ms
        while True:
            await asyncio.sleep(after_ms / 1000)
            waited_ms = self._without_leader_ms(self._now_ms())
            if waited_ms < after_ms:
                next_ms = after_ms
            elif waited_ms >= next_ms:
                LOGGER.warning("node=%d %s", self.me.node, self.explain_missing_leader())
                next_ms = waited_ms + every_ms

    def explain_missing_leader(self) -> str:
        """Explains why there is no leader, as far as this node knows."""
        return explain_missing_leader(self.describe(), self.endpoint)


async def _raise(error: BaseException) -> None:
    raise error
