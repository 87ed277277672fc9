"""A group whose members speak both protocols, with a network between them and the coordinator.

A process is a consumer, an eager or a cooperative classic client. Requests queue on the way in, answers on the way out;
a broken connection loses both, and a join on it may still arrive later. The coordinator keeps classic rounds
(`support.groups.classic_group`) and converts the group as its shell does. Checked after each step:

- no partition is held by two processes, unless one of them was put out of the group and does not know it yet;
- a commit is not taken from one process while another holds the partition;
- the log, whole or compacted, replays to the very state.

`heal` ends all faults and demands progress: every partition has an owner.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from support.groups.classic_group import Rounds
from support.groups.machine import Groups, Topics
from tidelog.coordinator import classic_members
from tidelog.coordinator.classic_group import ClassicState
from tidelog.coordinator.classic_requests import (
    ClassicJoin,
    ClassicSync,
    Downgrade,
    GroupMigratedError,
    JoinGroup,
    JoinReply,
    SyncGroup,
    SyncReply,
)
from tidelog.coordinator.consumer_protocol import encode_assignment, parse_assignment, parse_subscription
from tidelog.coordinator.limits import GroupLimits
from tidelog.coordinator.migration import is_downgrade_due
from tidelog.coordinator.requests import (
    CommitOffsets,
    ExpireMember,
    Heartbeat,
    HeartbeatReply,
    LiveClassicGroup,
    OffsetToCommit,
)
from tidelog.model.errors import TidelogError
from tidelog.model.group_errors import (
    FencedInstanceIdError,
    MemberIdRequiredError,
    RebalanceInProgressError,
    UnknownMemberIdError,
)
from tidelog.model.ids import PartitionId

CONSUMER, EAGER, COOPERATIVE = "consumer", "range", "cooperative-sticky"
KINDS = (CONSUMER, EAGER, COOPERATIVE, CONSUMER)
PROCESSES_MAX = 5
SESSION_MS = 1_800_000
TOPIC = "t"
PARTITIONS = 5
Held = frozenset[PartitionId]


def encode_subscription(topics: Iterable[str], owned: dict[str, list[int]] | None = None) -> bytes:
    """Version 0, or 1 with what is owned."""

    def text(name: str) -> bytes:
        return len(name).to_bytes(2, "big") + name.encode()

    names = list(topics)
    data = (0 if owned is None else 1).to_bytes(2, "big") + len(names).to_bytes(4, "big")
    data += b"".join(map(text, names)) + (0xFFFFFFFF).to_bytes(4, "big")
    if owned is not None:
        data += len(owned).to_bytes(4, "big")
        for topic, numbers in owned.items():
            data += text(topic) + len(numbers).to_bytes(4, "big")
            data += b"".join(number.to_bytes(4, "big") for number in numbers)
    return data


@dataclass(eq=False)
class Process:
    kind: str
    member_id: str
    epoch: int = 0
    """Or generation."""
    held: Held = frozenset()
    next_held: Held = frozenset()
    """What it shall hold; it gets there when it `acts`."""
    inbox: deque[Any] = field(default_factory=deque)
    outbox: deque[dict[str, Any]] = field(default_factory=deque)
    connection: int = 0
    is_alive: bool = True
    has_joined: bool = False
    """A consumer has an answer to its join, a classic client one to its sync: it heartbeats."""
    must_act: bool = False

    @property
    def is_classic(self) -> bool:
        return self.kind != CONSUMER


class MixedModel:
    def __init__(self, policy: str = "bidirectional") -> None:
        limits = GroupLimits(members_max=40, migration_policy=policy)
        self.groups = Groups(view=Topics.of(t=PARTITIONS), limits=limits)
        self.rounds: Rounds = self._new_rounds()
        self.waiting: dict[int, tuple[Process, int, dict[str, Any]]] = {}
        """Tickets of the rounds: who asked, on which connection, what."""
        self.late: list[tuple[Process, dict[str, Any]]] = []
        self.processes: list[Process] = []
        self.born = 0
        self.upgrades = self.downgrades = 0
        progress: list[Callable[[int], None]] = [self.arrive, self.arrive, self.hear, self.hear, self.act, self.beat]
        faults: list[Callable[[int], None]] = [
            self.break_connection,
            self.kill,
            self.put_out_somebody,
            self.leave,
            self.deliver_late,
            self.fail_over,
            self.check_compaction,
        ]
        self.steps = progress * 3 + [self.converse] * 12 + faults + [self.start] * 3 + [self.pass_time, self.commit] * 2

    def _new_rounds(self, tickets: int = 0) -> Rounds:
        rounds = Rounds(self.groups, migration_policy=self.groups.limits.migration_policy)
        rounds.tickets = tickets  # no ticket is given out twice
        return rounds

    def run(self, history: Iterable[int]) -> None:
        for number in history:
            self.steps[number % len(self.steps)](number // len(self.steps))
            self.check()
        self.check_replay()
        self.heal()

    # The coordinator.

    def is_consumer_group(self) -> bool:
        group = self.groups.state.group("g")
        return group is not None and bool(group.members)

    def fields(self) -> dict[str, Any]:
        return {"group": "g", "view": self.groups.view, "now_ms": self.groups.now_ms}

    def consumer_heartbeat(self, process: Process, message: dict[str, Any]) -> HeartbeatReply:
        request = Heartbeat(member_id=process.member_id, **self.fields(), **message)
        if message["member_epoch"] == 0 and self.rounds.group.members:
            return self._upgrade(request)
        reply: HeartbeatReply = self.groups.submit(request)
        return reply

    def _upgrade(self, request: Heartbeat) -> HeartbeatReply:
        stored, held = self.groups.state.group("g"), self.rounds.group
        live = LiveClassicGroup(
            -1 if stored is None or stored.classic is None else stored.classic.generation,
            held.generation,
            {member.member_id: member.protocols for member in held.members.values()},
        )
        reply: HeartbeatReply = self.groups.submit(
            Heartbeat(
                **self.fields(),
                member_id=request.member_id,
                member_epoch=0,
                topics=request.topics,
                owned=request.owned,
                live_classic=live,
            )
        )
        self.upgrades += 1
        self._answer_tickets()
        self.rounds.take(held.close(GroupMigratedError("a consumer group now")))
        self.rounds = self._new_rounds(self.rounds.tickets)
        self._dispatch_again()
        return reply

    def classic(self, process: Process, message: dict[str, Any]) -> None:
        """A request of a classic client, in the protocol that the group has; the answer may come later."""
        kind = message["kind"]
        if self.is_consumer_group():
            try:
                self._reply(process, message["connection"], self._in_consumer_group(message))
            except TidelogError as error:
                self._reply(process, message["connection"], error)
            return
        rounds = self.rounds
        if kind == "beat":
            self._reply(process, message["connection"], rounds.beat(message["member_id"], message["generation"]))
            return
        ticket = rounds.tickets + 1
        self.waiting[ticket] = process, message["connection"], message
        if kind == "join":
            join = message["join"]
            rounds.join(
                join.member_id,
                name=join.new_member_id,
                protocols=join.protocols,
                session_timeout_ms=SESSION_MS,
                rebalance_timeout_ms=SESSION_MS,
                topics=(TOPIC,),
            )
        else:
            rounds.sync(message["member_id"], message["generation"], dealt=message["dealt"])
        self._answer_tickets()

    def _in_consumer_group(self, message: dict[str, Any]) -> Any:
        if message["kind"] == "join":
            return self.groups.submit(ClassicJoin(**self.fields(), join=message["join"]))
        if message["kind"] == "sync":
            sync = SyncGroup(ticket=0, now_ms=0, member_id=message["member_id"], generation=message["generation"])
            return self.groups.submit(ClassicSync(**self.fields(), sync=sync))
        group = self.groups.state.group("g")
        classic_members.heartbeat(group, "g", message["member_id"], "", message["generation"])
        return None

    def _answer_tickets(self) -> None:
        for ticket in [each for each in self.waiting if each in self.rounds.answers]:
            process, connection, _ = self.waiting.pop(ticket)
            self._reply(process, connection, self.rounds.answers[ticket])

    def _dispatch_again(self) -> None:
        """What waits for rounds that a conversion has ended."""
        waiting, self.waiting = self.waiting, {}
        for process, connection, message in waiting.values():
            if message["kind"] == "join":
                self.classic(process, message)
            else:
                self._reply(process, connection, RebalanceInProgressError("migrated"))

    def _reply(self, process: Process, connection: int, answer: Any) -> None:
        if process.connection == connection:
            process.inbox.append(answer)

    def after(self) -> None:
        """What the shell does after a commit."""
        if is_downgrade_due(self.groups.state.group("g"), self.groups.limits):
            self.groups.submit(Downgrade(**self.fields()))
            self.downgrades += 1
            self.rounds = self._new_rounds(self.rounds.tickets)
            assert self.rounds.group.state is ClassicState.PREPARING, "a downgraded group begins with a rebalance"
        elif not self.is_consumer_group():
            group = self.groups.state.group("g")
            if self.rounds.group.state is ClassicState.DEAD:
                self.rounds = self._new_rounds(self.rounds.tickets)
            elif group is not None:
                self.rounds.group.catch_up(group.epoch)

    # Steps. Each takes a number for its choices.

    def alive(self) -> list[Process]:
        return [process for process in self.processes if process.is_alive]

    def pick(self, number: int) -> Process | None:
        alive = self.alive()
        return alive[number % len(alive)] if alive else None

    def start(self, number: int) -> None:
        if len(self.alive()) < PROCESSES_MAX:
            self.born += 1
            kind = KINDS[number % len(KINDS)]
            process = Process(kind, f"m{self.born}" if kind == CONSUMER else "")
            self.processes.append(process)
            self.join(process)

    def join(self, process: Process) -> None:
        process.outbox.clear()
        if not process.is_classic:
            process.outbox.append({"member_epoch": 0, "topics": (TOPIC,), "owned": frozenset()})
            return
        if process.kind == EAGER:
            process.held = process.next_held = frozenset()
        process.must_act = process.has_joined = False
        owned = None if process.kind == EAGER else {TOPIC: sorted(p.partition for p in process.held)}
        other = EAGER if process.kind == COOPERATIVE else ""
        # All know "range", so that a downgraded group has a protocol; a cooperative client uses it cooperatively here.
        metadata = encode_subscription([TOPIC], owned)
        protocols = ((process.kind, metadata), *(((other, metadata),) if other else ()))
        self.born += 1
        join = JoinGroup(
            ticket=0,
            now_ms=0,
            member_id=process.member_id,
            new_member_id=f"m{self.born}",
            protocol_type="consumer",
            protocols=protocols,
            session_timeout_ms=SESSION_MS,
            rebalance_timeout_ms=SESSION_MS,
            needs_known_id=False,
        )
        process.outbox.append({"kind": "join", "join": join, "connection": process.connection})

    def arrive(self, number: int) -> None:
        process = self.pick(number)
        if process is None or not process.outbox:
            return
        message = process.outbox.popleft()
        if "offsets" in message:
            self.take_commit(process, message)
        elif process.is_classic:
            self.classic(process, message)
        else:
            try:
                process.inbox.append(self.consumer_heartbeat(process, message))
            except TidelogError as error:
                process.inbox.append(error)
        self.after()

    def hear(self, number: int) -> None:
        process = self.pick(number)
        if process is None or not process.inbox:
            return
        answer = process.inbox.popleft()
        if isinstance(answer, TidelogError):
            self.hear_error(process, answer)
        elif isinstance(answer, HeartbeatReply):
            process.has_joined, process.epoch = True, answer.member_epoch
            if answer.assignment is not None:
                process.next_held = frozenset(answer.assignment)
        elif isinstance(answer, JoinReply):
            process.member_id, process.epoch = answer.member_id, answer.generation
            process.outbox.append(
                {
                    "kind": "sync",
                    "member_id": process.member_id,
                    "generation": process.epoch,
                    "dealt": self.deal(process, answer) if answer.leader == process.member_id else {},
                    "connection": process.connection,
                }
            )
        elif isinstance(answer, SyncReply):
            rows = parse_assignment(answer.assignment).partitions
            process.next_held = classic_members.partitions_of(rows, self.groups.view)
            process.has_joined = process.must_act = True

    def hear_error(self, process: Process, error: TidelogError) -> None:
        if isinstance(error, RebalanceInProgressError) and process.is_classic:
            self.join(process)
            return
        if isinstance(error, MemberIdRequiredError):
            process.member_id = error.member_id
        elif process.is_classic and isinstance(error, (UnknownMemberIdError, FencedInstanceIdError)):
            process.member_id = ""
        process.held = process.next_held = frozenset()
        process.has_joined, process.epoch = False, -1 if process.is_classic else 0
        process.inbox.clear()
        self.join(process)

    def deal(self, leader: Process, reply: JoinReply) -> dict[str, bytes]:
        """By the leader: cooperatively if all members say what they own, and nobody gets what another one holds."""
        names = sorted(member.member_id for member in reply.members)
        owned = {
            member.member_id: classic_members.partitions_of(parse_subscription(member.metadata).owned, self.groups.view)
            for member in reply.members
        }
        dealt: dict[str, list[int]] = {name: [] for name in names}
        for number in range(PARTITIONS):
            name = names[number % len(names)]
            part = self.groups.view.part(TOPIC, number)
            if not any(part in held for other, held in owned.items() if other != name):
                dealt[name].append(number)
        return {name: encode_assignment({TOPIC: numbers}) for name, numbers in dealt.items()}

    def act(self, number: int) -> None:
        """A process gives up and takes over what the coordinator says; a cooperative one that gave up joins again."""
        process = self.pick(number)
        if process is None or not process.has_joined:
            return
        gave_up = process.held - process.next_held
        process.held = process.next_held
        if process.must_act:
            process.must_act = False
            if gave_up and process.kind == COOPERATIVE:
                self.join(process)

    def beat(self, number: int) -> None:
        process = self.pick(number)
        if process is not None:
            self._beat(process, is_report=bool(number % 2))

    def _beat(self, process: Process, *, is_report: bool) -> None:
        if not process.has_joined or len(process.outbox) >= 3:
            return
        if process.is_classic:
            if not process.must_act:
                beat = {"kind": "beat", "member_id": process.member_id, "generation": process.epoch}
                process.outbox.append(beat | {"connection": process.connection})
        elif is_report:
            process.outbox.append({"member_epoch": process.epoch, "owned": process.held})
        else:
            process.outbox.append({"member_epoch": process.epoch})

    def converse(self, number: int) -> None:
        process = self.pick(number)
        if process is None:
            return
        for _ in range(5):
            self.arrive(number)
            if self.pick(number) is process:
                self.hear(number)
        if number % 4:
            self.act(number)
            self.beat(number)

    def commit(self, number: int) -> None:
        process = self.pick(number)
        if process is None or not process.held or len(process.outbox) >= 3:
            return
        part = sorted(process.held)[number % len(process.held)]
        message = {
            "member_id": process.member_id,
            "member_epoch": process.epoch,
            "offsets": {part: OffsetToCommit(number)},
        }
        if number % 2:
            process.outbox.append(message)
        else:
            self.late.append((process, message))

    def take_commit(self, process: Process, message: dict[str, Any]) -> None:
        try:
            if not self.is_consumer_group():
                if process.is_classic and self.rounds.group.members:
                    self.rounds.group.check_commit(message["member_id"], message["member_epoch"], self.rounds.now_ms)
                elif process.is_classic:
                    raise UnknownMemberIdError("no members")
            reply = self.groups.submit(CommitOffsets(group="g", now_ms=self.groups.now_ms, **message))
        except TidelogError:
            return
        for partition, error in reply.items():
            others = [p for p in self.members_for_sure() if p is not process and partition in p.held]
            if error is None and self.is_consumer_group():
                assert not others, f"{process.member_id} has committed what {others[0].member_id} holds"

    def break_connection(self, number: int) -> None:
        process = self.pick(number)
        if process is not None:
            self._break(process)

    def _break(self, process: Process) -> None:
        for message in process.outbox:
            if message.get("kind") == "join" or "offsets" in message:
                self.late.append((process, message))
        process.outbox.clear()
        process.inbox.clear()
        process.connection += 1
        if process.is_classic and not process.has_joined:
            self.join(process)
        elif not process.is_classic and process.has_joined:
            process.outbox.append({"member_epoch": process.epoch, "owned": process.held})
        elif not process.is_classic:
            self.join(process)

    def deliver_late(self, number: int) -> None:
        """A join of a broken connection counts in a consumer group only: rounds believe it, as Kafka's do."""
        if not self.late:
            return
        process, message = self.late.pop(number % len(self.late))
        if "offsets" in message:
            self.take_commit(process, message)
        elif self.is_consumer_group():
            self.classic(process, message)
        self.after()

    def fail_over(self, number: int) -> None:
        """A new coordinator reads the log: what was in memory is lost, and every connection breaks."""
        if number % 3:
            return
        assert self.groups.replayed() == self.groups.state
        self.rounds = self._new_rounds(self.rounds.tickets)
        self.waiting.clear()
        for process in self.alive():
            self._break(process)
        self.late.clear()
        self.after()

    def pass_time(self, number: int) -> None:
        self.rounds.wait(3_000)
        self._answer_tickets()
        self.after()

    def kill(self, number: int) -> None:
        process = self.pick(number)
        if process is not None and number % 3 == 0:
            process.is_alive = False
            process.connection += 1

    def members(self) -> list[str]:
        group = self.groups.state.group("g")
        if self.is_consumer_group() and group is not None:
            return sorted(group.members)
        return list(self.rounds.group.members)

    def put_out_somebody(self, number: int) -> None:
        alive = {process.member_id for process in self.alive()}
        chosen = [member_id for member_id in self.members() if member_id not in alive or number % 7 == 0]
        if chosen:
            self.put_out(chosen[number % len(chosen)])

    def put_out(self, member_id: str) -> None:
        group = self.groups.state.group("g")
        if self.is_consumer_group() and group is not None:
            epoch = group.currents[member_id].epoch
            self.groups.submit(ExpireMember(**self.fields(), member_id=member_id, member_epoch=epoch))
        else:
            self.rounds.leave((member_id, ""))
            self._answer_tickets()
        self.after()

    def leave(self, number: int) -> None:
        """A process gives up everything and leaves; it starts again under the other protocol, or does not."""
        process = self.pick(number)
        if process is None or number % 2:
            return
        process.is_alive = False
        process.connection += 1
        if process.member_id in self.members():
            self.put_out(process.member_id)
        if number % 4 == 0:
            self.start(number // 4)

    # What must hold.

    def members_for_sure(self) -> list[Process]:
        """Processes whose membership is what they think it is."""
        group = self.groups.state.group("g")
        if not self.is_consumer_group() or group is None:
            held = self.rounds.group
            known = (p for p in self.alive() if p.member_id in held.members)
            return [p for p in known if held.members[p.member_id].epoch in (-1, p.epoch)]
        sure = []
        for process in self.alive():
            current = group.currents.get(process.member_id)
            if current is not None and process.epoch in (current.epoch, current.previous_epoch):
                sure.append(process)
        return sure

    def check(self) -> None:
        holders: dict[PartitionId, Process] = {}
        for process in self.members_for_sure():
            for partition in process.held:
                other = holders.setdefault(partition, process)
                assert other is process, f"{partition} is held by {other} and {process}"
            group = self.groups.state.group("g")
            if self.is_consumer_group() and group is not None:
                current = group.currents[process.member_id]
                own = current.assigned | current.revoking
                assert process.held <= own, f"{process.member_id} holds what is not its own"

    def check_replay(self) -> None:
        assert self.groups.replayed() == self.groups.state
        assert self.groups.compacted() == self.groups.state

    def check_compaction(self, number: int) -> None:
        assert self.groups.compacted(number % (len(self.groups.records) + 1)) == self.groups.state

    def heal(self) -> None:
        self.late.clear()
        for process in self.processes:
            if not process.is_alive and process.member_id in self.members():
                self.put_out(process.member_id)
        for _ in range(80):
            self.heal_once()
            self.check()
            if self.is_at_rest():
                break
        else:
            raise AssertionError(f"the group does not come to rest: {self.alive()} {self.groups.state}")
        self.check_replay()

    def heal_once(self) -> None:
        alive = {process.member_id for process in self.alive()}
        alive.update(message["join"].new_member_id for _, _, message in self.waiting.values() if "join" in message)
        alive.update(answer.member_id for p in self.alive() for answer in p.inbox if isinstance(answer, JoinReply))
        for member_id in self.members():
            if member_id not in alive:
                self.put_out(member_id)
        for number in range(len(self.alive())):
            for _ in range(4):
                self.arrive(number)
                self.hear(number)
            self.act(number)
            if not self.alive()[number].outbox:
                self._beat(self.alive()[number], is_report=True)
        self.pass_time(0)

    def is_at_rest(self) -> bool:
        alive = self.alive()
        if any(p.outbox and p.outbox[0].get("kind") != "beat" and p.is_classic for p in alive):
            return False
        if any(not process.has_joined for process in alive):
            return False
        held = [partition for process in alive for partition in process.held]
        return not alive or (len(held) == len(set(held)) == PARTITIONS)
