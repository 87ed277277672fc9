"""Replicas of one partition, run by their pure cores alone: `LeaderState`, `FollowerState`, `divergence`, and a real
controller (`support.metadata.controller.Cluster`).

No IO and no time: every step is one event at one place, in any order. Requests to the controller are taken late, twice
never, answered or not; metadata reaches each broker when it does; logs lose what was not synced, disks are replaced;
brokers are fenced while they live, and live on for a while after they were replaced.

A record is its offset and the epoch that it was written in: an epoch has one leader, and a leader only appends. After
every step (`check`):
- what any leader's high watermark covers is the same for all, for ever (`committed`);
- a broker that the controller may elect (in sync, or eligible) has all of it, on its device;
- a follower's high watermark covers nothing else;
- a high watermark does not move back within an epoch;
- nobody is proposed who has less than the high watermark or the epoch start.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from support.metadata.controller import Cluster
from tidelog.log.epochs import EpochHistory
from tidelog.metadata.config_changes import AlterConfigs, ConfigChange, ResourceChange
from tidelog.metadata.configs import min_isr
from tidelog.metadata.image import ClusterImage, Partition
from tidelog.metadata.partition_changes import can_serve
from tidelog.metadata.partitions import AlteredPartition, AlterPartition, PartitionState
from tidelog.metadata.records import NO_LEADER
from tidelog.model.errors import TidelogError
from tidelog.model.ids import Offset
from tidelog.replication.divergence import Continue, TooFarBehind, Truncate, divergence, epoch_query, truncation_point
from tidelog.replication.partition import FollowerState, IsrProposal, LeaderState

LAG_MS = 1000
ROUNDS_MAX = 60


@dataclass
class Ack:
    leader: int
    leader_epoch: int
    number: int
    broker_epoch: int
    durable_end: int


@dataclass
class Member:
    """One broker with its replica. `records` has the epoch of each offset."""

    broker: int
    broker_epoch: int
    records: list[int] = field(default_factory=list)
    epochs: EpochHistory = field(default_factory=EpochHistory)
    durable: int = 0
    high_watermark: int = 0
    is_up: bool = True
    view: int = 0
    leading: LeaderState | None = None
    following: FollowerState | None = None
    numbers: dict[int, int] = field(default_factory=dict)
    """As leader: the subscription of each follower."""
    acks: list[Ack] = field(default_factory=list)
    """As follower: sent, not yet arrived; in order."""
    call: int | None = None
    """The request that an answer is awaited for."""

    @property
    def end(self) -> Offset:
        return Offset(len(self.records))

    def epoch_query(self) -> tuple[int, int]:
        return epoch_query(self.epochs, log_start=Offset(0), log_end=self.end)

    def append(self, epoch: int, count: int) -> None:
        if epoch < self.epochs.latest:
            self.epochs.truncate_from_end(len(self.records))  # led in vain, and older records come instead
        self.epochs.assign(epoch, len(self.records))
        self.records += [epoch] * count

    def cut_to(self, end: int) -> None:
        if end < len(self.records):
            del self.records[end:]
            self.epochs.truncate_from_end(end)
        self.durable = min(self.durable, end)


class Cores:
    """See the module."""

    def __init__(self, brokers: int, *, leader_type: type[LeaderState] = LeaderState) -> None:
        self.leader_type = leader_type
        self.cluster = Cluster(brokers)
        self.topic_id = self.cluster.made("t", tuple(range(brokers)), min_insync_replicas="2")
        self.images: list[ClusterImage] = [self.cluster.image]
        self.members = [Member(b, self.cluster.image.brokers[b].broker_epoch) for b in range(brokers)]
        self.network: dict[int, AlterPartition] = {}
        self.answers: dict[int, PartitionState | TidelogError] = {}
        self.committed: list[int] = []
        self.next_id = 0
        self.now_ms = 0
        self.known: dict[tuple[int, int], int] = {}
        """(broker, leader epoch) -> its high watermark before."""
        for member in self.members:
            self._look(member)
        self.check()

    # Brokers and metadata.

    def partition(self, image: ClusterImage) -> Partition:
        partition = image.partition(self.topic_id, 0)
        assert partition is not None
        return partition

    def _note(self) -> None:
        if self.cluster.image is not self.images[-1]:
            self.images.append(self.cluster.image)

    def deliver(self, broker: int, count: int) -> None:
        """The next images reach a broker: one by one, or the last of them at once."""
        member = self.members[broker]
        if member.is_up and member.view < len(self.images) - 1:
            member.view = min(member.view + count, len(self.images) - 1)
            self._look(member)

    def _look(self, member: Member) -> None:
        image = self.images[member.view]
        partition = self.partition(image)
        least = min_isr(image, self.topic_id, partition)
        leading, epoch = member.leading, partition.leader_epoch
        if leading is not None and leading.leader_epoch == epoch and partition.leader == member.broker:
            leading.metadata_changed(partition, least, self.now_ms)
            return
        if member.following is not None and member.following.leader_epoch == epoch and partition.leader != NO_LEADER:
            return
        member.leading = member.following = None
        member.call = None
        member.numbers.clear()
        if partition.leader == member.broker:
            member.epochs.assign(epoch, member.end)
            member.leading = self.leader_type(
                me=member.broker,
                my_broker_epoch=member.broker_epoch,
                partition=partition,
                min_isr=least,
                log_end=member.end,
                durable_end=Offset(member.durable),
                high_watermark=Offset(member.high_watermark),
                now_ms=self.now_ms,
                lag_max_ms=LAG_MS,
            )
        elif partition.leader != NO_LEADER:
            member.following = FollowerState(
                leader=partition.leader,
                leader_epoch=epoch,
                log_end=member.end,
                durable_end=Offset(member.durable),
                high_watermark=Offset(member.high_watermark),
            )

    def crash(self, broker: int, kept: int, known: int) -> None:
        """kill -9 and power loss: of what was not synced, `kept` records survive; of the high watermark, some age."""
        member = self.members[broker]
        if not member.is_up:
            return
        member.is_up = False
        member.leading = member.following = None
        member.call = None
        member.numbers.clear()
        member.cut_to(min(member.durable + kept, len(member.records)))
        member.durable = len(member.records)  # recovery ends with a sync of what it kept
        member.high_watermark = max(0, member.high_watermark - known)

    def fence(self, broker: int) -> None:
        if self.cluster.image.brokers[broker].is_live:
            self.cluster.crash(broker)
            self._note()

    def start(self, broker: int) -> None:
        """A new incarnation; or a broker that was fenced for its silence is heard again."""
        member = self.members[broker]
        if member.is_up:
            if self.cluster.image.brokers[broker].fenced:
                self.deliver(broker, len(self.images))
                self.cluster.beat(broker)
                self._note()
            return
        self.fence(broker)
        self._register(member)

    def _register(self, member: Member, **more: Any) -> None:
        member.broker_epoch = self.cluster.start(member.broker, clean_stop_epoch=-1, **more)
        self._note()
        member.is_up = True
        member.view = len(self.images) - 1
        self._look(member)

    def wipe(self, broker: int) -> None:
        """Its disk is replaced while others have everything; it says so when it registers."""
        partition = self.partition(self.cluster.image)
        if not {*partition.isr, *partition.eligible} - {broker}:
            return
        self.crash(broker, 0, 0)
        self.fence(broker)
        member = self.members[broker]
        member.records.clear()
        member.epochs.clear()
        member.durable = member.high_watermark = 0
        self._register(member, lost=((self.topic_id, 0),))

    def configure(self, least: int) -> None:
        change = ConfigChange(key="min.insync.replicas", operation="set", value=str(least))
        self.cluster.ask(
            AlterConfigs(resources=(ResourceChange(resource_type="topic", resource="t", changes=(change,)),))
        )
        self._note()

    # The log.

    def append(self, broker: int, count: int) -> None:
        member = self.members[broker]
        if member.leading is not None:
            member.append(member.leading.leader_epoch, count)
            member.leading.appended(member.end, self.now_ms)

    def sync(self, broker: int, count: int) -> None:
        member = self.members[broker]
        if member.is_up:
            member.durable = min(member.durable + count, len(member.records))
            if member.leading is not None:
                member.leading.durable(Offset(member.durable), self.now_ms)
            if member.following is not None:
                member.following.durable(Offset(member.durable))

    def _leader_of(self, member: Member) -> Member | None:
        """The broker that this one follows, if it agrees."""
        state = member.following
        if state is None or not member.is_up:
            return None
        leader = self.members[state.leader]
        is_same = leader.leading is not None and leader.leading.leader_epoch == state.leader_epoch
        return leader if is_same else None

    def subscribe(self, broker: int) -> bool:
        """One question and its answer. True if it was Continue."""
        member = self.members[broker]
        leader, state = self._leader_of(member), member.following
        if leader is None or state is None:
            return False
        last_epoch, next_offset = member.epoch_query()
        answer = divergence(leader.epochs, Offset(0), leader.end, last_epoch=last_epoch, next_offset=next_offset)
        self.next_id += 1
        state.subscribed(self.next_id)
        leader.numbers.pop(broker, None)
        if isinstance(answer, Continue):
            assert leader.records[: len(member.records)] == member.records, "Continue for a log that is no prefix"
            leader.numbers[broker] = state.subscription
            self.send_ack(broker)
            return True
        shared = _shared(leader.records, member.records)
        if isinstance(answer, Truncate):
            member.cut_to(truncation_point(member.epochs, answer, log_start=Offset(0), log_end=member.end))
        elif isinstance(answer, TooFarBehind):
            member.cut_to(answer.start)
        assert len(member.records) >= shared, f"{answer} cuts what both have"
        state.truncated(member.end, Offset(member.durable), log_start=Offset(0))
        return False

    def _is_subscribed(self, member: Member, leader: Member) -> bool:
        return member.following is not None and leader.numbers.get(member.broker) == member.following.subscription

    def push(self, broker: int, count: int) -> None:
        member = self.members[broker]
        leader, state = self._leader_of(member), member.following
        if leader is None or state is None or leader.leading is None or not self._is_subscribed(member, leader):
            return
        for epoch in leader.records[len(member.records) : len(member.records) + count]:
            member.append(epoch, 1)
        state.pushed(leader.leading.high_watermark, member.end)

    def send_ack(self, broker: int) -> None:
        member = self.members[broker]
        leader, state = self._leader_of(member), member.following
        if leader is not None and state is not None and self._is_subscribed(member, leader):
            member.acks.append(
                Ack(leader.broker, state.leader_epoch, state.subscription, member.broker_epoch, member.durable)
            )

    def ack_arrives(self, broker: int) -> None:
        member = self.members[broker]
        if not member.acks:
            return
        ack = member.acks.pop(0)
        leader = self.members[ack.leader]
        if leader.leading is None or leader.leading.leader_epoch != ack.leader_epoch:
            return
        if leader.numbers.get(broker) == ack.number:
            leader.leading.acked(broker, ack.broker_epoch, Offset(ack.durable_end), self.now_ms)

    # In-sync sets.

    def propose(self, broker: int) -> None:
        member = self.members[broker]
        state = member.leading
        if state is None or member.call is not None:
            return
        image = self.images[member.view]
        partition = self.partition(image)

        def live(other: int) -> int | None:
            return image.brokers[other].broker_epoch if can_serve(image, partition, other) else None

        proposal = state.next_proposal(live, self.now_ms)
        if proposal is None:
            return
        state.sent(proposal)
        self._check_joins(state, proposal)
        item = AlteredPartition(
            topic_id=self.topic_id,
            partition=0,
            leader_epoch=proposal.leader_epoch,
            partition_epoch=proposal.partition_epoch,
            isr=proposal.isr,
            is_barrier=proposal.is_barrier,
        )
        self.next_id += 1
        member.call = self.next_id
        self.network[member.call] = AlterPartition(broker=broker, broker_epoch=member.broker_epoch, partitions=(item,))

    def _check_joins(self, state: LeaderState, proposal: IsrProposal) -> None:
        for other, broker_epoch in proposal.isr:
            member = self.members[other]
            if other not in state.isr and member.broker_epoch == broker_epoch:
                assert member.durable >= max(state.high_watermark, state.epoch_start), "joins without having it all"

    def take(self, number: int) -> None:
        """The controller takes one of the requests that are on their way, however old."""
        if not self.network:
            return
        call = sorted(self.network)[number % len(self.network)]
        request = self.network.pop(call)
        try:
            (state,) = self.cluster.ask(request).partitions
            self.answers[call] = state
        except TidelogError as error:
            self.answers[call] = error
        self._note()

    def answer_arrives(self, broker: int) -> None:
        member = self.members[broker]
        if member.leading is None or member.call is None or member.call not in self.answers:
            return
        answer, member.call = self.answers[member.call], None
        if isinstance(answer, TidelogError):
            member.leading.failed(may_be_done=False)
        else:
            member.leading.answered(answer, self.now_ms)

    def call_fails(self, broker: int) -> None:
        """No answer in time. The request may still be on its way."""
        member = self.members[broker]
        if member.leading is not None and member.call is not None:
            member.call = None
            member.leading.failed(may_be_done=True)

    def lose(self, number: int) -> None:
        """A request that nobody waits for any more gets lost for good."""
        waited = {member.call for member in self.members}
        ghosts = [call for call in sorted(self.network) if call not in waited]
        if ghosts:
            del self.network[ghosts[number % len(ghosts)]]

    # What must hold.

    def check(self) -> None:
        for member in self.members:
            state = member.leading
            if state is not None:
                state.validate()
                self._check_high_watermark(member, state)
                member.high_watermark = state.high_watermark
        for member in self.members:
            if member.following is not None:
                member.following.validate()
                member.high_watermark = member.following.high_watermark
                covered = member.records[: member.high_watermark]
                assert covered == self.committed[: len(covered)], "a follower's high watermark covers something else"
        partition = self.partition(self.cluster.image)
        for broker in (*partition.isr, *partition.eligible):
            member = self.members[broker]
            assert member.durable >= len(self.committed), f"{broker} may be elected, and lacks what is committed"
            assert member.records[: len(self.committed)] == self.committed, (
                f"{broker} may be elected with other records"
            )

    def _check_high_watermark(self, member: Member, state: LeaderState) -> None:
        key = (member.broker, state.leader_epoch)
        assert state.high_watermark >= self.known.get(key, 0), "the high watermark moved back"
        self.known[key] = state.high_watermark
        covered = member.records[: state.high_watermark]
        assert len(covered) == state.high_watermark, "the high watermark is past the log"
        shared = min(len(covered), len(self.committed))
        assert covered[:shared] == self.committed[:shared], "two leaders have committed different records"
        if len(covered) > len(self.committed):
            self.committed = covered

    def run_until_stable(self) -> None:
        """Everything works again: the whole log of the leader is committed, and everybody is in sync."""
        for _ in range(ROUNDS_MAX):
            self.now_ms += 10
            for member in self.members:
                self.start(member.broker)
                self.deliver(member.broker, len(self.images))
            for member in self.members:
                leader = self._leader_of(member)
                if leader is not None and (self._is_subscribed(member, leader) or self.subscribe(member.broker)):
                    self.push(member.broker, len(leader.records))
            for member in self.members:
                self.sync(member.broker, len(member.records))
                self.send_ack(member.broker)
                while member.acks:
                    self.ack_arrives(member.broker)
            for member in self.members:
                self.propose(member.broker)
            while self.network:
                self.take(0)
            for member in self.members:
                self.answer_arrives(member.broker)
            self.check()
            if self._is_stable():
                return
        partition = self.partition(self.cluster.image)
        raise AssertionError(
            f"no progress: {partition}, {[m.leading and m.leading.high_watermark for m in self.members]}"
        )

    def _is_stable(self) -> bool:
        partition = self.partition(self.cluster.image)
        if partition.leader == NO_LEADER or len(partition.isr) < len(self.members):
            return False
        member = self.members[partition.leader]
        state = member.leading
        return state is not None and state.is_confirmed and state.high_watermark == len(member.records)


def _shared(one: list[int], other: list[int]) -> int:
    """How many records two logs have in common: a record that both have at an offset makes everything before common."""
    ends = [at + 1 for at, (a, b) in enumerate(zip(one, other, strict=False)) if a == b]
    return max(ends, default=0)
