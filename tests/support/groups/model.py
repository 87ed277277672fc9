"""Members with a network between them and the coordinator, and what must hold whatever happens there.

Each process has a connection: heartbeats and commits queue on the way in, answers on the way out, and both take their
time. The coordinator pushes as its shell does (`machine.py`). A process holds partitions for itself: what it has taken
over and not given up. Checked after each step:

- no partition is held by two processes, unless one of them was put out of the group and does not know it yet;
- a process never has to revoke what its old and its new target have in common;
- a commit is not taken from one process while another holds the partition;
- the log, whole or compacted up to anywhere, replays to the very state.

A history is a list of numbers that pick steps and their arguments. `heal` ends all faults and demands progress.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import Any

from support.groups.machine import Groups, Topics, topic_id
from tidelog.coordinator.limits import GroupLimits
from tidelog.coordinator.machine import members_to_notify
from tidelog.coordinator.requests import (
    CommitOffsets,
    CommitPendingOffsets,
    ExpireMember,
    Heartbeat,
    HeartbeatReply,
    OffsetToCommit,
    RefreshTopics,
    TopicShape,
)
from tidelog.coordinator.state import CoordinatorState
from tidelog.model.errors import TidelogError
from tidelog.model.group_errors import UnreleasedInstanceIdError
from tidelog.model.ids import PartitionId

NAMES = ("a", "b", "c")
SUBSCRIPTIONS: tuple[dict[str, Any], ...] = (
    {"topics": ("a",), "pattern": ""},
    {"topics": ("a", "b"), "pattern": ""},
    {"topics": (), "pattern": "[bc]"},
    {"topics": (), "pattern": ".*"},
)
ASSIGNORS = ("uniform", "range", "roundrobin")
PROCESSES_MAX = 6


@dataclass(eq=False)
class Process:
    member_id: str
    instance_id: str
    wants: dict[str, Any]
    epoch: int = 0
    held: frozenset[PartitionId] = frozenset()
    assigned: frozenset[PartitionId] = frozenset()
    """What it shall hold; it gets there when it `acts`."""
    inbox: deque[HeartbeatReply | TidelogError] = field(default_factory=deque)
    outbox: deque[dict[str, Any]] = field(default_factory=deque)
    heard_epoch: int = 0
    """The last epoch that the coordinator has heard from it on this connection."""
    is_alive: bool = True
    has_joined: bool = False


class Model:
    def __init__(self) -> None:
        self.groups = Groups(view=Topics.of(a=3, b=2), limits=GroupLimits(members_max=PROCESSES_MAX + 2))
        self.processes: list[Process] = []
        self.late: list[tuple[Process, CommitOffsets | Heartbeat]] = []
        """Commits and joins that a broken connection has not lost, but held up."""
        self.born = 0
        self.topics_made = 10
        self.transactions = [1, 1]
        """Numbers of the open transactions of two producers, whose epochs are the numbers too."""
        progress: list[Callable[[int], None]] = [
            self.send,
            self.send_report,
            self.arrive,
            self.arrive,
            self.hear,
            self.hear,
            self.act,
            self.commit,
        ]
        faults: list[Callable[[int], None]] = [
            self.break_connection,
            self.kill,
            self.expire,
            self.leave,
            self.check_compaction,
            self.end_transaction,
            *[self.deliver_late] * 3,
        ]
        changes: list[Callable[[int], None]] = [self.start, self.start, self.change_topics, self.change_wishes]
        self.steps = progress * 3 + [self.converse] * 8 + faults + changes

    def run(self, history: Iterable[int]) -> None:
        for number in history:
            self.steps[number % len(self.steps)](number // len(self.steps))
            self.check()
        self.check_replay()
        self.heal()

    # The world.

    def alive(self) -> list[Process]:
        return [process for process in self.processes if process.is_alive]

    def pick(self, number: int) -> Process | None:
        alive = self.alive()
        return alive[number % len(alive)] if alive else None

    def submit(self, request: Any) -> Any:
        """As the shell does: what has become of others is pushed to them."""
        before = self.groups.state
        targets = {} if (group := before.group("g")) is None else dict(group.targets)
        reply = self.groups.submit(request)
        self.check_moves(before, targets)
        self.push(before)
        return reply

    def push(self, before: CoordinatorState) -> None:
        for member_id in members_to_notify(before, self.groups.state, "g"):
            process = next((p for p in self.alive() if p.member_id == member_id and p.heard_epoch > 0), None)
            if process is not None:
                self.in_its_name(process)

    def in_its_name(self, process: Process) -> None:
        before = self.groups.state
        try:
            reply = self.groups.heartbeat(
                process.member_id, process.heard_epoch, instance_id=process.instance_id, is_on_behalf=True
            )
        except TidelogError as error:
            process.inbox.append(error)
            return
        process.inbox.append(reply)
        self.push(before)

    # Steps. Each takes a number for its choices.

    def start(self, number: int) -> None:
        if len(self.alive()) >= PROCESSES_MAX:
            return
        self.born += 1
        instance_id = f"i{number % 3}" if number % 2 else ""
        wants = dict(
            SUBSCRIPTIONS[number % len(SUBSCRIPTIONS)], assignor=ASSIGNORS[number // 7 % 3] if number % 5 else ""
        )
        process = Process(f"m{self.born}", instance_id, wants)
        self.processes.append(process)
        self.send_join(process)

    def send_join(self, process: Process) -> None:
        process.outbox.append({"member_epoch": 0, "owned": frozenset(), **process.wants})

    def send(self, number: int) -> None:
        process = self.pick(number)
        if process is not None and process.has_joined and len(process.outbox) < 3:
            process.outbox.append({"member_epoch": process.epoch})

    def send_report(self, number: int) -> None:
        process = self.pick(number)
        if process is not None and process.has_joined and len(process.outbox) < 3:
            process.outbox.append({"member_epoch": process.epoch, "owned": process.held})

    def arrive(self, number: int) -> None:
        """What a process has sent first reaches the coordinator."""
        process = self.pick(number)
        if process is None or not process.outbox:
            return
        message = process.outbox.popleft()
        request = self.request(process, message)
        if isinstance(request, CommitOffsets):
            self.take_commit(process, request)
            return
        process.heard_epoch = max(message["member_epoch"], 0)
        try:
            process.inbox.append(self.submit(request))
        except TidelogError as error:
            process.inbox.append(error)

    def request(self, process: Process, message: dict[str, Any]) -> CommitOffsets | Heartbeat:
        if "producer_id" in message:
            return CommitPendingOffsets(now_ms=self.groups.now_ms, **message)
        if "offsets" in message:
            return CommitOffsets(now_ms=self.groups.now_ms, **message)
        return Heartbeat(
            group="g",
            member_id=process.member_id,
            instance_id=process.instance_id,
            view=self.groups.view,
            now_ms=self.groups.now_ms,
            **message,
        )

    def hear(self, number: int) -> None:
        """The oldest answer reaches a process."""
        process = self.pick(number)
        if process is None or not process.inbox:
            return
        answer = process.inbox.popleft()
        if isinstance(answer, TidelogError):
            # Put out: it lets go of everything and begins again. Who finds its place taken gives up.
            process.held = process.assigned = frozenset()
            self.break_off(process)
            if isinstance(answer, UnreleasedInstanceIdError):
                process.is_alive = False
            process.has_joined = False
            process.epoch = 0
            self.send_join(process)
            return
        process.has_joined = True
        process.epoch = answer.member_epoch
        if answer.assignment is not None:
            process.assigned = frozenset(answer.assignment)

    def act(self, number: int) -> None:
        """A process revokes and acquires as assigned."""
        process = self.pick(number)
        if process is not None and process.has_joined:
            process.held = process.assigned

    def converse(self, number: int) -> None:
        """A process and the coordinator exchange all that is on the way."""
        process = self.pick(number)
        if process is None:
            return
        for _ in range(6):
            self.arrive(number)
            if process.is_alive:
                self.hear(number)
        if process.is_alive and number % 4:
            self.act(number)
            self.send_report(number)

    def commit(self, number: int) -> None:
        process = self.pick(number)
        if process is None or not process.held or len(process.outbox) >= 3:
            return
        held = sorted(process.held)
        offsets = {held[number % len(held)]: OffsetToCommit(number)}
        message: dict[str, Any] = {
            "group": "g",
            "member_id": process.member_id,
            "member_epoch": process.epoch,
            "offsets": offsets,
        }
        if number % 3 == 0:
            producer = number // 3 % 2
            transaction = self.transactions[producer]
            message |= {"producer_id": producer, "epoch": transaction, "number": transaction}
        if number % 2:
            process.outbox.append(message)
        else:
            self.late.append((process, self.request(process, message)))

    def end_transaction(self, number: int) -> None:
        """Which members it wrote for does not matter to a marker."""
        producer = number % 2
        transaction = self.transactions[producer]
        self.groups.mark(producer=producer, epoch=transaction + 1, number=transaction, is_commit=number % 4 < 2)
        assert self.groups.state.open_transaction(producer) is None
        self.transactions[producer] += 1

    def take_commit(self, process: Process, request: CommitOffsets) -> None:
        try:
            reply = self.submit(request)
        except TidelogError:
            return
        for partition, error in reply.items():
            if error is None:
                others = [p for p in self.members_for_sure() if p is not process and partition in p.held]
                assert not others, f"{process.member_id} has committed what {others[0].member_id} holds"

    def break_off(self, process: Process) -> None:
        for message in process.outbox:
            if "offsets" in message or message["member_epoch"] == 0:
                self.late.append((process, self.request(process, message)))
        process.outbox.clear()
        process.inbox.clear()
        process.heard_epoch = 0

    def break_connection(self, number: int) -> None:
        """What is on the way is lost; the process comes back with what it knows, and says what it holds."""
        process = self.pick(number)
        if process is None:
            return
        self.break_off(process)
        if process.has_joined:
            process.outbox.append({"member_epoch": process.epoch, "owned": process.held})
        else:
            self.send_join(process)

    def deliver_late(self, number: int) -> None:
        if not self.late:
            return
        process, request = self.late.pop(number % len(self.late))
        if isinstance(request, CommitOffsets):
            self.take_commit(process, request)
            return
        try:
            self.submit(replace(request, view=self.groups.view))
        except TidelogError:
            return  # the answer reaches nobody

    def kill(self, number: int) -> None:
        process = self.pick(number)
        if process is not None and number % 3 == 0:
            process.is_alive = False

    def expire(self, number: int) -> None:
        """Sessions end: of those who are dead, now and then of one who is only slow."""
        group = self.groups.state.group("g")
        if group is None or not group.members:
            return
        alive = {process.member_id for process in self.alive()}
        chosen = sorted(member_id for member_id in group.members if member_id not in alive or number % 7 == 0)
        if chosen:
            self.put_out(chosen[number % len(chosen)])

    def put_out(self, member_id: str) -> None:
        group = self.groups.group()
        self.submit(
            ExpireMember(
                group="g",
                member_id=member_id,
                member_epoch=group.currents[member_id].epoch,
                view=self.groups.view,
                now_ms=self.groups.now_ms,
            )
        )

    def leave(self, number: int) -> None:
        """A process goes; a static one perhaps only for a while. It holds nothing when it says so."""
        process = self.pick(number)
        if process is None or number % 2:
            return
        process.is_alive = False
        self.break_off(process)
        epoch = -2 if process.instance_id and number % 4 else -1
        try:
            self.submit(
                Heartbeat(
                    group="g",
                    member_id=process.member_id,
                    member_epoch=epoch,
                    instance_id=process.instance_id,
                    view=self.groups.view,
                    now_ms=self.groups.now_ms,
                )
            )
        except TidelogError:
            return

    def change_topics(self, number: int) -> None:
        name = NAMES[number % 3]
        shapes = dict(self.groups.view.shapes)
        shape = shapes.get(name)
        if shape is None:
            self.topics_made += 1
            shapes[name] = TopicShape(topic_id(self.topics_made), name, 1 + number // 3 % 4)
        elif number // 3 % 3 == 0:
            del shapes[name]
        elif shape.partitions < 8:
            shapes[name] = TopicShape(shape.topic_id, name, shape.partitions + 1)
        self.groups.view = Topics(shapes.values())
        self.submit(RefreshTopics(group="g", view=self.groups.view, now_ms=self.groups.now_ms))

    def change_wishes(self, number: int) -> None:
        process = self.pick(number)
        if process is not None and process.has_joined and len(process.outbox) < 3:
            process.wants = dict(SUBSCRIPTIONS[number // 3 % len(SUBSCRIPTIONS)])
            process.outbox.append({"member_epoch": process.epoch, **process.wants})

    # What must hold.

    def members_for_sure(self) -> list[Process]:
        """Processes whose membership is what they think it is: not those that were put out and do not know it."""
        group = self.groups.state.group("g")
        if group is None:
            return []
        known = []
        for process in self.alive():
            current = group.currents.get(process.member_id)
            if current is not None and process.has_joined and process.epoch in (current.epoch, current.previous_epoch):
                known.append(process)
        return known

    def check(self) -> None:
        holders: dict[PartitionId, Process] = {}
        for process in self.members_for_sure():
            for partition in process.held:
                other = holders.setdefault(partition, process)
                assert other is process, f"{partition} is held by {other.member_id} and {process.member_id}"
            current = self.groups.group().currents[process.member_id]
            assert process.held <= current.assigned | current.revoking, f"{process.member_id} holds what is not its own"

    def check_moves(self, before: CoordinatorState, targets: dict[str, Any]) -> None:
        was, now = before.group("g"), self.groups.state.group("g")
        if was is None or now is None:
            return
        for member_id, current in now.currents.items():
            old = was.currents.get(member_id)
            if old is not None and old.epoch > 0 and member_id in targets:
                stays = old.assigned & now.targets[member_id].partitions
                assert stays <= current.assigned, f"{member_id} has to give up what it shall keep"

    def check_replay(self) -> None:
        assert self.groups.replayed() == self.groups.state
        assert self.groups.compacted() == self.groups.state

    def check_compaction(self, number: int) -> None:
        assert self.groups.compacted(number % (len(self.groups.records) + 1)) == self.groups.state

    def heal(self) -> None:
        """Everybody answers, the dead are put out: the group must come to rest at its target."""
        self.groups.refresh()
        quiet = 0
        for _ in range(60):
            writes = len(self.groups.records)
            self.heal_once()
            self.check()
            is_quiet = writes == len(self.groups.records) and all(process.has_joined for process in self.alive())
            quiet = quiet + 1 if is_quiet else 0
            if quiet == 3:
                break
        else:
            raise AssertionError("the group does not come to rest")
        self.check_replay()
        self.check_rest()

    def heal_once(self) -> None:
        group = self.groups.state.group("g")
        alive = {process.member_id for process in self.alive()}
        for member_id in sorted(group.members) if group is not None else ():
            if member_id not in alive:
                self.put_out(member_id)
        for process in self.alive():
            number = self.alive().index(process)
            while process.outbox:
                self.arrive(number)
            while process.inbox:
                self.hear(number)
                if not process.is_alive:
                    break
            if not process.is_alive or not process.has_joined:
                continue
            self.act(number)
            self.send_report(number)

    def check_rest(self) -> None:
        group = self.groups.state.group("g")
        alive = self.alive()
        if group is None:
            assert not alive
            return
        assert set(group.members) == {process.member_id for process in alive}
        for process in alive:
            assert process.held == group.targets[process.member_id].partitions, f"{process.member_id} is not there"
        read: set[PartitionId] = set()
        for member in group.members.values():
            by_pattern = {".*": set(NAMES), "[bc]": {"b", "c"}, "": set[str]()}[member.pattern]
            for name in (set(member.topics) | by_pattern) & set(self.groups.view.shapes):
                read |= self.groups.view.all(name)
        assert set(group.owners) == read, "every partition that somebody reads has an owner"
