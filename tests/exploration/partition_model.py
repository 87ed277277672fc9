"""Three replicas of one partition and their controller under every interleaving: `support.brokers.partition_cores`.

The cores are those of production: `LeaderState`, `FollowerState`, `divergence`, and the decisions of the controller
on a real image. What they say to each other waits until it arrives, gets lost, or comes too late. Budgets bound how
often something new begins. A broker that is fenced, or that comes back, makes images; each broker learns them in its
time.

The key renames nothing: the assignment order decides who is elected. Epochs of brokers and numbers of requests and
subscriptions are replaced by their rank, so that states which differ only in how often something was tried are one.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from support.brokers.partition_cores import LAG_MS, Cores, Member

from exploration.explorer import Action
from tidelog.metadata.image import ClusterImage
from tidelog.metadata.partitions import PartitionState
from tidelog.replication.partition import IsrProposal, LeaderState, Progress

FOR_EVER = 1_000


@dataclass
class PartitionBudgets:
    """How often each kind of event may still happen."""

    appends: int = 2
    crashes: int = 1
    fences: int = 1
    waits: int = 1
    """Times after which a follower that has not caught up lags."""
    lost_answers: int = 1
    configs: int = 0
    wipes: int = 0

    def as_key(self) -> tuple[int, ...]:
        return tuple(vars(self).values())


_BUDGET_OF = {
    "append": "appends",
    "crash": "crashes",
    "fence": "fences",
    "wait": "waits",
    "call_fails": "lost_answers",
    "configure": "configs",
    "wipe": "wipes",
}


@dataclass
class PartitionExploration:
    cores: Cores
    left: PartitionBudgets


@dataclass(frozen=True)
class PartitionModel:
    budgets: PartitionBudgets = field(default_factory=PartitionBudgets)
    brokers: int = 3
    leader_type: type[LeaderState] = LeaderState

    def initial(self) -> PartitionExploration:
        cores = Cores(self.brokers, leader_type=self.leader_type)
        for broker in range(1, self.brokers):
            cores.subscribe(broker)
            cores.ack_arrives(broker)
        return PartitionExploration(cores, PartitionBudgets(**vars(self.budgets)))

    def actions(self, state: PartitionExploration) -> list[Action]:
        cores, found = state.cores, list[Action]()
        for member in cores.members:
            found += self._member_actions(state, member)
        found += [("take", number) for number in range(len(cores.network))]
        if state.left.configs:
            found += [("configure", 1), ("configure", 3)]
        if state.left.waits:
            found.append(("wait",))
        return found

    def _member_actions(self, state: PartitionExploration, member: Member) -> list[Action]:
        cores, left, broker = state.cores, state.left, member.broker
        found: list[Action] = []
        is_fenced = cores.cluster.image.brokers[broker].fenced
        if not member.is_up or is_fenced:
            found.append(("start", broker))
        if left.fences and not is_fenced:
            found.append(("fence", broker))
        if left.wipes:
            found.append(("wipe", broker))
        if not member.is_up:
            return found
        if left.crashes:
            found += [("crash", broker, kept) for kept in sorted({0, len(member.records) - member.durable})]
        if member.view < len(cores.images) - 1:
            found.append(("deliver", broker))
        if member.durable < len(member.records):
            found.append(("sync", broker))
        if member.leading is not None:
            found += self._leader_actions(left, cores, member)
        if member.following is not None:
            found += [("subscribe", broker), ("push", broker), ("send_ack", broker)]
        if member.acks:
            found.append(("ack_arrives", broker))
        return found

    def _leader_actions(self, left: PartitionBudgets, cores: Cores, member: Member) -> list[Action]:
        found: list[Action] = []
        if left.appends:
            found.append(("append", member.broker))
        if member.call is None:
            found.append(("propose", member.broker))
        else:
            if member.call in cores.answers:
                found.append(("answer_arrives", member.broker))
            if left.lost_answers:
                found.append(("call_fails", member.broker))
        return found

    def apply(self, state: PartitionExploration, action: Action) -> None:
        kind, *rest = action
        cores, left = state.cores, state.left
        if kind in _BUDGET_OF:
            setattr(left, _BUDGET_OF[kind], getattr(left, _BUDGET_OF[kind]) - 1)
        if kind == "wait":
            cores.now_ms += LAG_MS + 1
        elif kind in ("append", "sync", "push", "deliver"):
            getattr(cores, kind)(rest[0], 1)
        elif kind == "crash":
            cores.crash(rest[0], rest[1], FOR_EVER)
        elif kind == "send_ack":
            self._send_ack(cores, cores.members[rest[0]])
        else:
            getattr(cores, kind)(*rest)
        cores.check()

    def _send_ack(self, cores: Cores, member: Member) -> None:
        """A second ack that says the same changes nothing: without this, acks would queue up without end."""
        before = len(member.acks)
        cores.send_ack(member.broker)
        if len(member.acks) > before and before and member.acks[-2] == member.acks[-1]:
            member.acks.pop()

    def check_progress(self, state: PartitionExploration) -> None:
        state.cores.run_until_stable()

    # Keys.

    def key(self, state: PartitionExploration) -> Any:
        cores = state.cores
        oldest = min((member.view for member in cores.members if member.is_up), default=len(cores.images) - 1)
        epochs = _Ranks(_broker_epochs(cores))
        numbers = _Ranks(_numbers(cores))
        waited = {member.call for member in cores.members}
        return (
            [self._image(cores, image, epochs) for image in cores.images[oldest:]],
            [self._member(cores, member, oldest, epochs, numbers) for member in cores.members],
            [(numbers.of(call), _request(request, epochs)) for call, request in sorted(cores.network.items())],
            [(numbers.of(c), _answer(answer)) for c, answer in sorted(cores.answers.items()) if c in waited],
            list(cores.committed),
            sorted((broker, epoch, int(end)) for (broker, epoch), end in cores.known.items()),
            state.left.as_key(),
        )

    def _image(self, cores: Cores, image: ClusterImage, epochs: _Ranks) -> Any:
        partition = cores.partition(image)
        return (
            (partition.leader, partition.leader_epoch, partition.partition_epoch),
            (list(partition.isr), list(partition.eligible), str(image.configs)),
            [
                (broker, epochs.of(found.broker_epoch), found.fenced, found.is_live)
                for broker, found in sorted(image.brokers.items())
            ],
        )

    def _member(self, cores: Cores, member: Member, oldest: int, epochs: _Ranks, numbers: _Ranks) -> Any:
        return (
            (member.is_up, member.view - oldest if member.is_up else 0, epochs.of(member.broker_epoch)),
            (list(member.records), [tuple(entry) for entry in member.epochs], int(member.durable)),
            int(member.high_watermark),
            self._leading(cores, member.leading, epochs),
            self._following(member, numbers),
            sorted((follower, numbers.of(number)) for follower, number in member.numbers.items()),
            [
                (a.leader, a.leader_epoch, numbers.of(a.number), epochs.of(a.broker_epoch), a.durable_end)
                for a in member.acks
            ],
            numbers.of(member.call),
        )

    def _leading(self, cores: Cores, state: LeaderState | None, epochs: _Ranks) -> Any:
        if state is None:
            return None
        parts: list[Any] = []
        for name in LeaderState.__slots__:
            value = getattr(state, name)
            if isinstance(value, frozenset):
                parts.append(sorted(value))
            elif isinstance(value, IsrProposal):
                parts.append(_proposal(value, epochs))
            elif name == "_progress":
                parts.append([(follower, *self._progress(cores, known, epochs)) for follower, known in value.items()])
            elif name == "_my_broker_epoch":
                parts.append(epochs.of(value))
            else:
                parts.append(value)
        return parts

    def _progress(self, cores: Cores, known: Progress, epochs: _Ranks) -> Any:
        times = [max(at - cores.now_ms, -LAG_MS - 1) for at in (known.caught_up_ms, known.sample_ms)]
        return (known.durable_end, epochs.of(known.broker_epoch), *times, int(known.sample_end))

    def _following(self, member: Member, numbers: _Ranks) -> Any:
        state = member.following
        if state is None:
            return None
        return [
            numbers.of(value) if name == "subscription" else value
            for name in type(state).__slots__
            for value in (getattr(state, name),)
        ]


class _Ranks:
    """Numbers that only say which came first, by their rank."""

    def __init__(self, values: set[int]) -> None:
        self._ranks = {value: rank for rank, value in enumerate(sorted(values))}

    def of(self, value: int | None) -> int:
        return -1 if value is None or value < 0 else self._ranks[value]


def _broker_epochs(cores: Cores) -> set[int]:
    found = {broker.broker_epoch for image in cores.images for broker in image.brokers.values()}
    for member in cores.members:
        found.add(member.broker_epoch)
        found |= {ack.broker_epoch for ack in member.acks}
        if member.leading is not None:
            found |= {known.broker_epoch for known in member.leading._progress.values()}
    return found


def _numbers(cores: Cores) -> set[int]:
    found = {*cores.network, *cores.answers}
    for member in cores.members:
        found |= {member.call or 0, *member.numbers.values()} | {ack.number for ack in member.acks}
        if member.following is not None:
            found.add(member.following.subscription)
    return found


def _request(request: Any, epochs: _Ranks) -> Any:
    (item,) = request.partitions
    return (request.broker, epochs.of(request.broker_epoch), _proposal(item, epochs))


def _proposal(proposal: Any, epochs: _Ranks) -> Any:
    members = [(broker, epochs.of(epoch)) for broker, epoch in proposal.isr]
    return (proposal.leader_epoch, proposal.partition_epoch, members, proposal.is_barrier)


def _answer(answer: Any) -> Any:
    if not isinstance(answer, PartitionState):
        return str(answer.code)
    return (
        str(answer.error),
        answer.leader,
        answer.leader_epoch,
        answer.partition_epoch,
        list(answer.isr),
        answer.min_isr,
    )
