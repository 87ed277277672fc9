"""Calls `validate` of whatever holds state on a node, while the run goes on.

After every `STRIDE`th event of a node one object of it is validated: the streams between replicas and all others take
turns, so that another one has its turn after `2 * STRIDE * objects` events. After every `AUDIT_STRIDE`th event one log
is audited against its files (`log_audit`). What an event certainly touched is validated at once: a replica whose role
or high watermark changed (`broker_checker`), a Raft core whose log, epoch, role or commit changed (`checkers`), a group
with each of its commits (`groups_checker`), the image with each decision, the deadlines of a coordinator when it begins
to lead.
`finish` validates everything thoroughly.

A failed assertion is a finding that names the node, the object and the time. Nothing here draws a random number or
changes an object, so a run is the same with it and without it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING, Any

from simulation.log_audit import LogAudit, can_audit
from tidelog.coordinator.partition_shard import Phase
from tidelog.coordinator.shard import Shard
from tidelog.coordinator.state import EMPTY, CoordinatorState
from tidelog.coordinator.state import validate as validate_groups
from tidelog.log.log import Log
from tidelog.metadata.image import ClusterImage
from tidelog.metadata.image_invariants import validate_changes
from tidelog.metadata.state_machine import MetadataStateMachine
from tidelog.replication.leader_replica import leaders_of

if TYPE_CHECKING:
    from simulation.broker_node import BrokerApp
    from tidelog.replication.replica import Replica

STRIDE = 4
AUDIT_STRIDE = 64
"""A multiple of STRIDE."""
LOOKS_MAX = 500
"""At a log that waits for a checkpoint, before it counts as forgotten."""

Fail = Callable[[str, str], None]


class Invariants:
    """See the module. One for each run."""

    def __init__(self, fail: Fail, is_rotten: Callable[[str, Log], bool] = lambda _name, _log: False) -> None:
        self.validated = self.audited = 0
        """Objects, and batches."""
        self._fail = fail
        self._is_rotten = is_rotten
        self._audits: dict[Log, LogAudit] = {}
        self._untouched: dict[Log, tuple[object, int]] = {}
        """Logs that no checkpoint would take when they were audited last, with their mark."""
        self._images: dict[object, ClusterImage] = {}
        self._groups: dict[Shard, CoordinatorState] = {}
        self._began: dict[Shard, None] = {}
        """Those that lead, or have led."""
        self._replicas: dict[Replica, tuple[object, ...]] = {}
        """What a replica was when it was validated last: nothing is asserted again of one that has not changed."""

    # -- after events

    def watcher(self, app: BrokerApp) -> Callable[[], None]:
        """What is called after every event of this broker."""
        shards, groups, count, began = app.coordinator.shards, self._groups, 0, self._began
        objects, audits = self._broker_turns(app), self._audit_turns(app)
        queues = self._queue_turns(app)

        def check() -> None:
            nonlocal count
            for shard in shards.values():
                if shard.phase is Phase.LEADING and shard not in began:
                    began[shard] = None
                    self._check(app.name, f"groups of partition {shard.number}", partial(_check_begun, shard))
                if shard.runtime._speculative is not groups.get(shard, EMPTY):
                    self._decided(app, shard)
            count += 1
            if not count % STRIDE:
                next(queues if count % 8 else objects)
                if not count % AUDIT_STRIDE:
                    next(audits)

        return check

    def runtime(self, name: str, machine: MetadataStateMachine) -> None:
        """After every event of a controller: what it speculates ends with its leadership."""
        self._check(name, "the decisions", machine.runtime.validate)

    def controller(self, name: str, machine: MetadataStateMachine) -> None:
        """After the machine has applied something."""
        self._check(name, "the metadata", machine.validate)
        self._image(name, machine, machine.runtime.speculative)

    # -- everything

    def finish(self, apps: list[BrokerApp]) -> None:
        """At the end of a run, when nothing is under way."""
        for app in apps:
            for _ in range(2):
                for replica in app.replicas.all():
                    self._replica(app, replica, thorough=True)
            for log in app.logs.all():
                self._audit(app, log)
            for shard in app.coordinator.shards.values():
                self._check(app.name, f"groups of partition {shard.number}", shard.validate)

    # -- one object

    def _broker_turns(self, app: BrokerApp) -> Iterator[None]:
        rounds = 0
        while True:
            rounds += 1
            if app.is_stopping:
                yield
                continue
            for replica in list(app.replicas.all()):
                self._replica(app, replica, thorough=not rounds % 16)
                yield
            self._check(app.name, "the logs", app.logs.validate)
            yield
            for directory in app.logs.directories:
                self._check(app.name, f"group commit of {directory.disk.label}", directory.group_commit.validate)
                self._check(app.name, f"files of {directory.disk.label}", directory.files.validate)
            yield
            self._check(app.name, "the reconciler's queue", app.replicas.follower_streams.context.queue.validate)
            yield
            for shard in list(app.coordinator.shards.values()):
                self._check(app.name, f"groups of partition {shard.number}", shard.validate)
                yield

    def _queue_turns(self, app: BrokerApp) -> Iterator[None]:
        """What has to be sent and is forgotten is often repaired soon, by the next thing to send: so these have more
        turns."""
        while True:
            self._check(app.name, "streams to leaders", app.replicas.follower_streams.validate)
            yield
            for stream in _streams_to_followers(app):
                self._check(app.name, f"the stream to broker {stream.peer}", stream.validate)
            yield

    def _audit_turns(self, app: BrokerApp) -> Iterator[None]:
        while True:
            logs = [] if app.is_stopping else app.logs.all()
            for log in logs:
                self._audit(app, log)
                yield
            for known in [log for log in self._audits if log.is_closed]:
                del self._audits[known]
                self._untouched.pop(known, None)
            yield

    def _replica(self, app: BrokerApp, replica: Replica, *, thorough: bool = False) -> None:
        log = replica.log
        if log is None or log.is_closed or log.is_changing or replica.is_removed:
            return
        state = _state_of(replica, log)
        if not thorough and self._replicas.get(replica) == state:
            return
        self._replicas[replica] = state
        audit = self._audits.get(log)
        if audit is None or audit.is_stale:
            self._audit(app, log)  # it was opened, or not only appended to
        self._check(app.name, log.path, lambda: log.validate(thorough=thorough))
        self._check(app.name, f"the replica of {log.path}", lambda: replica.validate(thorough=thorough))

    def _audit(self, app: BrokerApp, log: Log) -> None:
        attempt = app.logs.kept._attempts.get(log.log_id)
        if attempt is not None and attempt.has_moved and attempt.is_untruncated(log):
            return  # its segments are in a kept copy, and it is truncated next
        self._audit_log(app.name, log)

    def _audit_log(self, name: str, log: Log) -> None:
        if not can_audit(log) or self._is_rotten(name, log):
            return
        audit = self._audits.get(log)
        if audit is None:
            audit = self._audits[log] = LogAudit(log)

        def run() -> None:
            self.audited += audit.run()
            self._check_touched(log)

        self._check(name, f"{log.path} and its files", run)

    def _check_touched(self, log: Log) -> None:
        """What a checkpoint would store gets one: the next round has the log, or the one that runs takes it. A round
        may wait for other logs, whose disk stalls, for many looks."""
        checkpoint = log._checkpoint
        has_news = log.mark.offset != log.end_offset or bool(checkpoint._pending_infos) or log._epochs.is_unsaved
        waits = has_news and log not in log.group_commit._touched and not log.lock.locked()
        mark, looks = self._untouched.pop(log, (None, 0))
        if waits:
            looks = looks + 1 if mark is log.mark else 1
            self._untouched[log] = log.mark, looks
            assert looks < LOOKS_MAX, f"no checkpoint is due, and {log.mark} is stored of {log.end_offset} records"

    def _decided(self, app: BrokerApp, shard: Shard) -> None:
        """Decisions, committed or not: the next ones rest on them."""
        before, now = self._groups.get(shard, EMPTY), shard.runtime.speculative
        self._groups[shard] = now
        if shard.phase is Phase.LEADING:
            what = f"decided groups of partition {shard.number}"
            self._check(app.name, what, lambda: validate_groups(now, since=before))

    def _image(self, name: str, owner: object, image: ClusterImage) -> None:
        before = self._images.get(owner)
        self._images[owner] = image
        if before is not image:
            self._check(name, "the decided image", lambda: validate_changes(before or ClusterImage(), image))

    def _check(self, name: str, what: str, validate: Callable[[], object]) -> None:
        self.validated += 1
        try:
            validate()
        except AssertionError as error:
            self._fail(name, f"Invariant of {what}: {error}")


def _state_of(replica: Replica, log: Log) -> tuple[object, ...]:
    """Differs when an event has touched the log or the role. What it does not show is validated thoroughly, later."""
    segments, durability, offsets, role = log.segments, log.durability, log._offsets, replica.role
    active, state = segments.active, None if role is None else role.state
    return (
        role,
        replica.partition,
        replica.high_watermark,
        segments.version,
        segments.end_offset,
        active.base_offset,
        active.size,
        durability.generation,
        durability.durable_end,
        offsets.start_offset,
        offsets.high_watermark,
        log.mark,
        log.damaged,
        len(log.producers),
        log.epochs.latest,
        None if state is None else (state.high_watermark, state.durable_end),
    )


def _check_begun(shard: Shard) -> None:
    """A shard has begun to lead, and has heard of nobody yet: each member has its session to come back; a dynamic one
    that had a stream has the time in which it finds a new coordinator."""
    assert shard._loading is not None, "it has loaded"
    now_s, host = shard._loading.get_loop().time(), shard._host
    for group_id, group in shard.state.groups.items():
        for member_id, member in group.members.items():
            is_fast = member.is_streamed and not member.instance_id
            longest_ms = min(member.session_timeout_ms, host.reconnect_ms) if is_fast else member.session_timeout_ms
            at_s = shard.timers.at(("session", group_id, member_id))
            assert at_s is not None, f"member {member_id} of {group_id} has no deadline"
            assert round((at_s - now_s) * 1000) == longest_ms, f"{member_id} has {at_s - now_s} s, not {longest_ms} ms"


def _streams_to_followers(app: BrokerApp) -> list[Any]:
    leaders = leaders_of(app.replicas.all())
    return list({s.stream: None for leader in leaders for s in leader.subscriptions.values()})
