"""Three Raft cores of production under every interleaving: `support.raft.core_cluster`, event by event.

A state is the cluster with its messages in flight, what its disks have under way, and how much of each budget is left:
election timeouts and heartbeats, proposals, crashes, losses and repeats of messages, broken connections. Timeouts are
not random here: any node may be the next one whose timeout expires, so time adds nothing but the question of how long
ago something was. Messages between two nodes arrive in order, or in any order (`is_ordered=False`).

The key has every field of a core (`FIELDS` names them; a test compares it with the classes), times relative to now and
clipped to one election timeout, numbers of persists relative to the newest. Nodes are renamed to the smallest of their
equal orders, since none of them is special. History that only the checkers need (who led which epoch, what was
committed) is part of the key: otherwise a violation could hide behind a merged state.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from itertools import permutations, product
from typing import Any

from support.raft.core_cluster import Cluster, Envelope
from support.raft.core_trace import Trace

from exploration.explorer import Action
from tidelog.model.ids import NodeId
from tidelog.raft.config import RaftConfig
from tidelog.raft.effects import Effects, Persist, Role
from tidelog.raft.membership import VoterKey
from tidelog.raft.messages import Message

TIMEOUT_MS = 1000
CONFIG = RaftConfig(
    election_timeout_min_ms=TIMEOUT_MS,
    election_timeout_max_ms=TIMEOUT_MS,
    heartbeat_interval_ms=TIMEOUT_MS // 2,
    broken_stream_wait_max_ms=0,
    retry_wait_min_ms=TIMEOUT_MS // 2,
    retry_wait_max_ms=TIMEOUT_MS // 2,
)

PLAIN, NODE, NODE_KEYS, NODES, TIME, SKIP = "plain", "node", "node keys", "nodes", "time", "skip"
FIELDS: dict[str, dict[str, str]] = {
    "RaftCore": {
        **dict.fromkeys(("epoch", "commit", "recovering_until", "durable_end", "_durable_epoch", "_matched"), PLAIN),
        **dict.fromkeys(("_loss_epoch", "_incoming_position", "_incoming_busy", "_submitted_end"), PLAIN),
        **dict.fromkeys(("_truncate_to", "_reset_to", "_persist_due", "_recovered", "_ack_due"), PLAIN),
        **dict.fromkeys(("_probe_seen", "_delivered", "_role_changed"), PLAIN),
        "leader": NODE,
        # Encoded by hand, the same for every state, or empty between two steps.
        **dict.fromkeys(("me", "config", "random", "voted_for", "log", "role", "leader_state", "elections"), SKIP),
        **dict.fromkeys(("_incoming", "_hard_state", "_persist_number", "_persisting", "_waiting"), SKIP),
        **dict.fromkeys(("_after_persist", "_out", "_handlers"), SKIP),
    },
    "Elections": {
        "core": SKIP,
        "contact_ms": TIME,
        "timeout_ms": SKIP,  # the same at all times
        "due_ms": TIME,
        "votes": NODE_KEYS,
        "rejecting_voters": SKIP,  # for status only
        "_campaigns": SKIP,  # lengthens a backoff, which has one length here
        "_disconnected": NODES,
    },
    "LeaderState": {
        **dict.fromkeys(("core", "peers", "_appends", "uncommitted_bytes", "_change_token"), SKIP),
        **dict.fromkeys(("_promotions", "_transfer", "_timeout_sent"), SKIP),  # no such actions here
        **dict.fromkeys(("_reads", "_new_reads"), SKIP),
        **dict.fromkeys(("since_ms", "_check_ms"), TIME),
        **dict.fromkeys(("probe", "epoch_start"), PLAIN),
        "_confirmed": NODE_KEYS,
    },
    "Progress": {
        **dict.fromkeys(("match", "next", "paused", "inflight_bytes", "probe", "counts", "position"), PLAIN),
        **dict.fromkeys(("directory", "snapshot", "advanced_ms"), SKIP),  # always the same; for status only
        **dict.fromkeys(("mode", "inflight"), SKIP),
        **dict.fromkeys(("active_ms", "sent_ms", "asked_ms"), TIME),
    },
}


class SilentTrace(Trace):
    """Writes nothing: a trace would be copied with each state."""

    def add(self, line: str) -> None:
        pass

    def effects(self, node: NodeId, out: Effects) -> None:
        pass

    def delivery(self, sender: int, to: int, message: Message) -> None:
        pass


class FixedDraws:
    """Draws the same number always: the timeouts of `CONFIG` leave nothing to draw, and a `Random` is large to copy."""

    def randint(self, _low: int, high: int) -> int:
        return high

    def getrandbits(self, _bits: int) -> int:
        return 0

    def __reduce__(self) -> str:
        return "FIXED_DRAWS"


FIXED_DRAWS = FixedDraws()


class ExploredCluster(Cluster):
    """A cluster that is small to copy."""

    def __init__(self, nodes: int) -> None:
        super().__init__(nodes, config=CONFIG)
        self.random = FIXED_DRAWS  # type: ignore[assignment]
        self.trace = SilentTrace()

    def start(self, node: int) -> None:
        super().start(node)
        self.core(node).random = FIXED_DRAWS


@dataclass
class RaftBudgets:
    """How often each kind of event may still happen."""

    timeouts: int = 2
    beats: int = 1
    proposals: int = 1
    crashes: int = 1
    losses: int = 1
    repeats: int = 0
    breaks: int = 0

    def as_key(self) -> tuple[int, ...]:
        return tuple(vars(self).values())


@dataclass
class RaftState:
    cluster: Cluster
    left: RaftBudgets


@dataclass(frozen=True)
class RaftModel:
    """`led` starts with a leader that has committed an entry, otherwise nothing has happened yet."""

    budgets: RaftBudgets = field(default_factory=RaftBudgets)
    nodes: int = 3
    is_led: bool = False
    is_ordered: bool = True
    has_slow_disks: bool = True
    """A write ends when the explorer says so; otherwise at once, which leaves fewer states and longer paths."""
    in_flight_max: int = 3
    """Messages from one node to another; further ones are lost, which a real connection may do as well."""

    def initial(self) -> RaftState:
        cluster = ExploredCluster(self.nodes)
        if self.is_led:
            cluster.elect(1)
            cluster.propose(1)
            cluster.deliver_all()
            cluster.wait(TIMEOUT_MS // 2)
        cluster.slow_disks = set(cluster.nodes) if self.has_slow_disks else set()
        return RaftState(cluster, RaftBudgets(**vars(self.budgets)))

    # Actions.

    def actions(self, state: RaftState) -> list[Action]:
        return [*self._local_actions(state), *self._network_actions(state)]

    def _local_actions(self, state: RaftState) -> Iterable[Action]:
        cluster, left = state.cluster, state.left
        for node, at in sorted(cluster.nodes.items()):
            core = at.core
            if core is None:
                yield ("start", node)
                continue
            if at.is_busy:
                yield ("persist", node)
            is_leader = core.role is Role.LEADER
            if left.beats and is_leader:
                yield ("beat", node)
            if left.timeouts and not is_leader and core.elections.may_campaign():
                yield ("timeout", node)
            if left.proposals and is_leader:
                yield ("propose", node)
            if left.crashes:
                yield ("crash", node)
                if any(isinstance(work, Persist) and work.entries for work in at.queue):
                    yield ("crash", node, "entries written, epoch not")
        if left.breaks:
            for one, other in product(sorted(cluster.cores()), repeat=2):
                if one < other:
                    yield ("break", one, other)

    def _network_actions(self, state: RaftState) -> Iterable[Action]:
        cluster, left = state.cluster, state.left
        for sender, to in sorted({(envelope.sender, envelope.to) for envelope in cluster.network}):
            waiting = _between(cluster, sender, to)
            for number, envelope in enumerate(waiting):
                if envelope in waiting[:number] or (self.is_ordered and number):
                    continue
                yield ("deliver", sender, to, number)
                if left.losses:
                    yield ("lose", sender, to, number)
                if left.repeats:
                    yield ("repeat", sender, to, number)

    def apply(self, state: RaftState, action: Action) -> None:
        kind, *rest = action
        cluster, left = state.cluster, state.left
        if kind in _BUDGET_OF:
            name = _BUDGET_OF[kind]
            setattr(left, name, getattr(left, name) - 1)
        if kind in ("deliver", "lose", "repeat"):
            sender, to, number = rest
            envelope = _between(cluster, sender, to)[number]
            if kind != "repeat":
                cluster.network.remove(envelope)
            if kind != "lose" and to in cluster.cores():
                cluster.step(to, envelope.message)
        elif kind in ("timeout", "beat"):
            cluster.now_ms = max(cluster.now_ms, cluster.core(rest[0]).deadline_ms)
            cluster.tick(rest[0])
        elif kind == "crash":
            self._crash(cluster, rest[0], is_torn=len(rest) > 1)
        elif kind == "break":
            cluster.disconnect(*rest)
        elif kind == "persist":
            cluster.persist(rest[0], 1)
        else:
            getattr(cluster, kind)(rest[0])
        self._drop_surplus(cluster)
        cluster.check.log_matching(cluster.cores().values())

    def _crash(self, cluster: Cluster, node: int, *, is_torn: bool) -> None:
        """The connections end with the process: what it sent before may still arrive, what it is sent does not."""
        cluster.crash(node, torn=1_000 if is_torn else None)
        cluster.take(lambda envelope: envelope.to == node)

    def _drop_surplus(self, cluster: Cluster) -> None:
        pairs = {(envelope.sender, envelope.to) for envelope in cluster.network}
        for sender, to in pairs:
            for envelope in _between(cluster, sender, to)[self.in_flight_max :]:
                cluster.network.remove(envelope)

    def check_progress(self, state: RaftState) -> None:
        """With timeouts of production, which are random: equal ones may collide for ever."""
        cluster = state.cluster
        cluster.slow_disks.clear()
        cluster.config = RaftConfig()
        for node, at in cluster.nodes.items():
            if at.core is None:
                cluster.start(node)
            cluster.core(node).config = cluster.config
            cluster.core(node).random = random.Random(node)
            cluster.persist(node)
        cluster.run_until(lambda: cluster.leader is not None, 20 * TIMEOUT_MS)
        token = cluster.propose(_required(cluster.leader))
        offset, epoch = cluster.accepted[token]
        cluster.run_until(lambda: all(core.commit > offset for core in cluster.cores().values()), 20 * TIMEOUT_MS)
        assert cluster.check.committed[offset].epoch == epoch, "another entry took the place of an accepted one"

    # Keys.

    def key(self, state: RaftState) -> Any:
        """The smallest among the renamings that sort nodes by what does not depend on names."""
        cluster = state.cluster
        by_signature: dict[Any, list[int]] = {}
        for node in cluster.nodes:
            by_signature.setdefault(repr(_signature(cluster, node)), []).append(node)
        groups = [by_signature[signature] for signature in sorted(by_signature)]
        orders = product(*(permutations(group) for group in groups))
        keys = [_KeyOf(cluster, [node for part in order for node in part]).whole() for order in orders]
        return (min(keys, key=repr) if len(keys) > 1 else keys[0], state.left.as_key())


_BUDGET_OF = {
    "timeout": "timeouts",
    "beat": "beats",
    "propose": "proposals",
    "crash": "crashes",
    "lose": "losses",
    "repeat": "repeats",
    "break": "breaks",
}


def _required(node: int | None) -> int:
    assert node is not None
    return node


def _between(cluster: Cluster, sender: int, to: int) -> list[Envelope]:
    return [envelope for envelope in cluster.network if (envelope.sender, envelope.to) == (sender, to)]


def _signature(cluster: Cluster, node: int) -> Any:
    """What tells nodes apart without naming any."""
    at = cluster.nodes[node]
    stored = (at.disk.hard_state.epoch, [entry.epoch for entry in at.disk.entries], len(at.queue))
    core = at.core
    if core is None:
        return (stored, None)
    return (stored, core.role.value, core.epoch, core.log.end, core.commit, core.voted_for == core.me, core.durable_end)


class _KeyOf:
    """The key of a cluster whose nodes are renamed to their places in `order`."""

    def __init__(self, cluster: Cluster, order: list[int]) -> None:
        self.cluster = cluster
        self.names = {node: name for name, node in enumerate(order)}

    def whole(self) -> Any:
        cluster, check = self.cluster, self.cluster.check
        nodes = [self._node(node) for node in self.names]
        network = [
            [self._message(envelope.message) for envelope in _between(cluster, sender, to)]
            for sender in self.names
            for to in self.names
        ]
        leaders = sorted((epoch, self.names[node]) for epoch, node in check.leaders.items())
        votes = sorted((self.names[node], epoch, self.names[to]) for (node, _, epoch), to in check.votes.items())
        committed = [(entry.epoch, int(entry.kind)) for entry in check.committed]
        return (nodes, network, leaders, votes, committed, list(check.commit_epochs))

    def _node(self, node: int) -> Any:
        at = self.cluster.nodes[node]
        disk = at.disk
        stored = (
            disk.hard_state.epoch,
            self._voter(disk.hard_state.voted_for),
            [(entry.epoch, int(entry.kind)) for entry in disk.entries],
            disk.synced_end,
            at.applied,
        )
        core = at.core
        if core is None:
            return (stored, None)
        newest = core._persist_number
        work = [self._persist(item, newest) for item in at.queue if isinstance(item, Persist)]
        waiting = [
            (number - newest, [(self.names[to], self._message(message)) for to, message in messages])
            for number, messages in core._waiting
        ]
        state = (
            core.role.value,
            self._voter(core.voted_for),
            [(entry.epoch, int(entry.kind)) for entry in core.log.entries],
            self._fields(core, "RaftCore"),
            self._fields(core.elections, "Elections"),
            [(number - newest, end, self._time(at_ms), epoch) for number, end, at_ms, epoch in core._persisting],
            waiting,
            self._leader_state(core),
        )
        return (stored, work, state)

    def _leader_state(self, core: Any) -> Any:
        state = core.leader_state
        if state is None:
            return None
        peers = sorted(
            (
                self.names[node],
                peer.mode.value,
                [(end, size) for end, size in peer.inflight],
                self._fields(peer, "Progress"),
            )
            for node, peer in state.peers.items()
        )
        return (peers, self._fields(state, "LeaderState"))

    def _persist(self, work: Persist, newest: int) -> Any:
        return (
            work.number - newest,
            work.hard_state.epoch,
            self._voter(work.hard_state.voted_for),
            work.truncate_to,
            work.first,
            [(entry.epoch, int(entry.kind)) for entry in work.entries],
        )

    def _fields(self, of: Any, name: str) -> Any:
        encode: dict[str, Callable[[Any], Any]] = {
            PLAIN: lambda value: value,
            NODE: self._name,
            NODE_KEYS: lambda value: sorted((self.names[node], item) for node, item in value.items()),
            NODES: lambda value: sorted(self.names[node] for node in value),
            TIME: self._time,
        }
        return [encode[kind](getattr(of, key)) for key, kind in FIELDS[name].items() if kind != SKIP]

    def _message(self, message: Message) -> Any:
        """Sender and receiver are known by the place; the directories are those of the nodes."""
        parts: list[Any] = [type(message).__name__]
        for key, value in message._asdict().items():
            if key == "entries":
                parts.append([(entry.epoch, int(entry.kind)) for entry in value])
            elif key not in ("sender", "directory", "to_directory"):
                parts.append(value)
        return parts

    def _time(self, at_ms: int) -> int:
        return max(-TIMEOUT_MS, min(3 * TIMEOUT_MS, at_ms - self.cluster.now_ms))

    def _name(self, node: int | None) -> int:
        return -1 if node is None else self.names[node]

    def _voter(self, voter: VoterKey | None) -> int:
        return -1 if voter is None else self.names[voter.node]
