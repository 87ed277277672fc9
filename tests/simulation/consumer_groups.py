"""The consumer groups of a run: their members, what checks them, and what must become of them when faults have ended.

A member is a machine of its own (`groups_workload.Member`). Groups read some topics of the run, each from its first
record to its last: topics that are neither compacted nor deleted from. In the end every group is stable, every
partition of these topics has a live owner, and every record was processed and committed.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from random import Random
from typing import TYPE_CHECKING

from simulation.broker_checker import KnownPartition, KnownTopic
from simulation.cluster import Context, Station
from simulation.groups_checker import GroupsChecker, Life, has_all
from simulation.groups_node import bootstrap_of, node_at
from simulation.groups_workload import COMMIT, COMMIT_MS, LateCommit, Member, MemberPlan
from tidelog.coordinator.coordinator import OFFSETS_TOPIC
from tidelog.coordinator.hashing import partition_for
from tidelog.coordinator.partition_shard import Phase
from tidelog.coordinator.shard import Shard
from tidelog.log.housekeeping import cleaner_checkpoint
from tidelog.metadata.image import Partition, Topic
from tidelog.model.errors import TidelogError
from tidelog.model.ids import NodeId, PartitionId, TopicId
from tidelog.services.context import INTERNAL

if TYPE_CHECKING:
    from simulation.broker_node import BrokerApp
    from simulation.broker_sim import BrokerSimulation
    from simulation.kafka_groups import KafkaGroups

MEMBERS = (NodeId(201), NodeId(202), NodeId(203), NodeId(204))


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupsPlan:
    """What a seed decides about the groups of a run."""

    members: tuple[MemberPlan, ...]
    offsets_partitions: int
    grace_ms: int
    reconnect_ms: int
    member_session_ms: int
    heartbeat_ms: int
    poll_interval_ms: int
    auto_commit_ms: int
    trial: str
    """What happens to a member when all is well, in `groups_sim`: `streams`, `kill` or `kill_both`."""

    def settings(self) -> dict[str, int]:
        return {
            "offsets.topic.num.partitions": self.offsets_partitions,
            "offsets.commit.timeout.ms": 1_500,
            "group.min.session.timeout.ms": 500,
            "group.consumer.stream.grace.ms": self.grace_ms,
            "group.consumer.stream.reconnect.ms": self.reconnect_ms,
        }


def draw_groups(draw: Random, *, pattern: str) -> GroupsPlan:
    """`pattern` fits the names of the topics that are read."""
    count = draw.choice((2, 3, 3, 4))
    is_restless, is_slow = draw.choice((0.0, 0.01, 0.03)), draw.choice((0.0, 0.0, 0.03))
    members = tuple(
        MemberPlan(
            group="beta" if at == 3 else "alpha",
            is_static=draw.random() < 0.3,
            is_auto=draw.random() < 0.5,
            is_iterating=draw.random() < 0.4,
            pattern=draw.choice(("", "", pattern)),
            restless=is_restless,
            slow=is_slow,
        )
        for at in range(count)
    )
    return GroupsPlan(
        members=members,
        offsets_partitions=draw.choice((1, 2)),
        grace_ms=draw.choice((400, 800)),
        reconnect_ms=2_000,
        member_session_ms=draw.choice((3_000, 5_000)),
        heartbeat_ms=draw.choice((200, 400)),
        poll_interval_ms=draw.choice((1_500, 4_000)),
        auto_commit_ms=draw.choice((100, 400)),
        trial=draw.choice(("streams", "kill", "kill", "kill_both", "kill_both")),
    )


class ConsumerGroups:
    """See the module's docstring."""

    def __init__(self, simulation: BrokerSimulation, plan: GroupsPlan) -> None:
        self.plan = plan
        self.members: list[Member] = []
        self.stations: list[Station] = []
        self.topics: list[KnownTopic] = []
        self.bootstrap: tuple[str, ...] = ()
        self.cleaned = 0
        """Logs of the groups that the cleaner has cleaned, at the end."""
        self.fail = simulation.fail
        self.trace = simulation.world.scheduler.trace
        self.checker = GroupsChecker(simulation.replica_checker, simulation.fail)
        self.checker.offsets_partitions = plan.offsets_partitions
        self.checker.find_partitions = self.note_partitions
        self.kafka: KafkaGroups | None = None
        """Groups of the Kafka API."""
        self._simulation = simulation
        self._first_ends: dict[str, tuple[Shard, int]] = {}

    def add_members(self) -> None:
        simulation = self._simulation
        self.bootstrap = bootstrap_of(simulation)
        for node, plan in zip(MEMBERS, self.plan.members, strict=False):
            member = Member(self, int(node), plan, simulation.world.random(f"member/{node}"))
            station = simulation.cluster.add(f"m{node}", node, member.run)
            station.on_death = lambda _loss, member=member: member.died()
            self.members.append(member)
            self.stations.append(station)

    # -- what others ask

    @property
    def names(self) -> list[str]:
        return sorted({plan.group for plan in self.plan.members})

    @property
    def all_stations(self) -> list[Station]:
        return [*self.stations, *(() if self.kafka is None else self.kafka.stations)]

    @property
    def topic_names(self) -> list[str]:
        return [topic.name for topic in self.topics]

    async def are_topics_made(self) -> None:
        """Nobody begins before the operator has set up the cluster."""
        simulation = self._simulation
        while len(simulation.operator.topics) < len(simulation.shape.topics):  # noqa: ASYNC110 - on another machine
            await asyncio.sleep(0.05)

    def made(self, topic: KnownTopic) -> None:
        """Groups read this topic."""
        self.topics.append(topic)
        for number in range(topic.partitions):
            self.checker.add_partition(topic.name, PartitionId(TopicId(topic.topic_id), number))
        self.note_partitions()

    def note_partitions(self) -> None:
        """Topics may have got more of them."""
        simulation = self._simulation
        simulation.metadata.advance()
        for topic in self.topics:
            found = simulation.metadata.image.topic_named(topic.name)
            for number in () if found is None else sorted(found.partitions):
                partition = PartitionId(TopicId(topic.topic_id), number)
                if partition not in simulation.replica_checker.partitions:
                    topic.partitions = max(topic.partitions, number + 1)
                    simulation.replica_checker.partitions[partition] = KnownPartition(topic, partition)
                    self.checker.add_partition(topic.name, partition)

    def offsets_topic(self) -> Topic | None:
        return self._simulation.metadata.image.topic_named(OFFSETS_TOPIC)

    def coordinator_station(self, draw: Random) -> Station | None:
        topic = self.offsets_topic()
        if topic is None:
            return None
        group = draw.choice([*self.names, *(() if self.kafka is None else self.kafka.names)])
        leader = topic.partitions[partition_for(group, len(topic.partitions))].leader
        return None if leader < 0 else self._simulation.cluster.station(NodeId(leader))

    def expel(self, station: Station) -> str | None:
        """Put the member of this machine out of its group; None if nobody can."""
        member = station.app
        life = member.life if isinstance(member, Member) else None
        shard = None if life is None else self.shard_of(life.group)
        if life is None or shard is None or not life.member_id:
            return None
        app = self._simulation.broker(self._simulation.cluster.station(shard._host.me))
        assert app is not None, "a leading shard is on a broker that runs"
        app.context.node.spawn(self._remove(app, life.group, life.member_id))
        return f"{life.name} is put out of {life.group} by an operator"

    async def _remove(self, app: BrokerApp, group: str, member_id: str) -> None:
        try:
            await app.groups.remove_members(INTERNAL, group, [member_id], [])
        except TidelogError as error:
            app.context.trace(f"{member_id} is not put out: {error}")

    def commit_late(self, late: LateCommit, after_s: float) -> None:
        """A commit that the network has delayed arrives at a coordinator."""
        context = self._simulation.operator_station.context
        if context is not None and not self._simulation.operator.is_stopping:
            context.node.spawn(self._send_late(context, late, after_s))

    async def _send_late(self, context: Context, late: LateCommit, after_s: float) -> None:
        await asyncio.sleep(after_s)
        topic = self.offsets_topic()
        group = late.request.group
        leader = -1 if topic is None else topic.partitions[partition_for(group, len(topic.partitions))].leader
        if late.is_overtaken:
            # A commit in the same epoch after it: only the broker that it was sent to can get the older one.
            leader = node_at(late.address)
        if leader < 0:
            return
        try:
            await context.transport.call(
                NodeId(leader), COMMIT.wire_name, late.request.SerializeToString(), timeout_ms=COMMIT_MS
            )
        except TidelogError as error:
            context.trace(f"a late commit is refused: {error}")

    # -- when faults have ended

    def steady(self) -> None:
        """From now on members stay, and do their work at once."""
        self.note_partitions()
        for member in self.members:
            member.is_steady = True
        if self.kafka is not None:
            self.kafka.steady()

    def finish(self) -> None:
        """No more records come."""
        for station, member in zip(self.stations, self.members, strict=True):
            if station.context is not None:
                member.finish(station.context)

    def living(self, *, is_static: bool | None = None) -> list[tuple[Station, Life]]:
        return [
            (station, member.life)
            for station, member in zip(self.stations, self.members, strict=True)
            if member.life is not None and is_static in (None, member.plan.is_static)
        ]

    def shard_of(self, group_id: str) -> Shard | None:
        """Of the coordinator of this group, if it leads."""
        return self.shard(partition_for(group_id, self.plan.offsets_partitions))

    def shard(self, number: int) -> Shard | None:
        topic = self.offsets_topic()
        leader = -1 if topic is None else topic.partitions[number].leader
        app = None if leader < 0 else self._simulation.broker(self._simulation.cluster.station(NodeId(leader)))
        if app is None:
            return None
        shard = app.coordinator.shards.get(number)
        return shard if shard is not None and shard.phase is Phase.LEADING else None

    def are_stable(self) -> bool:
        self.note_partitions()
        is_stable = self.trouble() is None
        if is_stable:
            self._first_ends.clear()
        return is_stable

    def _end_at_first(self, group_id: str, shard: Shard) -> int:
        """Where the log ended when stability was first asked for: members go on to commit meanwhile."""
        first = self._first_ends.get(group_id)
        if first is None or first[0] is not shard:
            first = self._first_ends[group_id] = (shard, int(shard.leader.log.end_offset))
        return first[1]

    def trouble(self) -> str | None:
        """What is not as it shall be, of all groups."""
        everything = {known.partition_id for known, _ in self.partitions()}
        for station, member in zip(self.stations, self.members, strict=True):
            life = member.life
            if life is None or life.is_over or life.is_closing or not station.is_up:
                return f"{station.name} has no consumer"
        for group_id in self.names:
            shard = self.shard_of(group_id)
            group = None if shard is None else shard.state.group(group_id)
            if shard is None or group is None:
                return f"{group_id} has no coordinator"
            if shard.leader.high_watermark < self._end_at_first(group_id, shard):
                # A slow sync or a broker that starts may still hold up answers, and so the end of a stream.
                return f"{group_id}: its coordinator waits for replicas"
            lives = {one.member_id: one for one in self.checker.running(group_id)}
            if set(lives) != set(group.members):
                return f"{group_id} has members {sorted(group.members)}, and {sorted(lives)} live"
            for member_id, life in lives.items():
                current = group.currents[member_id]
                if current.revoking or current.assigned != group.targets[member_id].partitions:
                    return f"{life.name} is not where it shall be: {current} of {group.targets[member_id]}"
                if set(life.holdings) != current.assigned:
                    return f"{life.name} holds {sorted(life.holdings)}, and shall hold {sorted(current.assigned)}"
            if set(group.owners) != everything:
                return f"{group_id} has owners of {len(group.owners)} of {len(everything)} partitions"
        return None if self.kafka is None else self.kafka.trouble()

    def partitions(self) -> list[tuple[KnownPartition, Partition]]:
        return [row for row in self._simulation.known_partitions() if row[0].topic in self.topics]

    def _ends(self) -> dict[PartitionId, int]:
        ends = {}
        for known, partition in self.partitions():
            state = self._simulation.state_of(partition.leader, known.partition_id)
            ends[known.partition_id] = -1 if state is None else state[0]
        return ends

    def is_all_processed(self) -> bool:
        ends, processed = self._ends(), self.checker.processed
        if self.kafka is not None and not self.kafka.is_all_processed(ends):
            return False
        return all(has_all(processed.get(group_id, {}), ends) for group_id in self.names)

    def lag(self) -> str | None:
        ends = self._ends()
        for group_id in self.names:
            group = self.checker.group(group_id)
            for partition, end in ends.items():
                committed = None if group is None else group.offsets.get(partition)
                if end != (0 if committed is None else committed.offset):
                    known = self._simulation.replica_checker.partitions[partition]
                    return f"{group_id} has committed {committed} of {known}, which ends at {end}"
            if not has_all(self.checker.processed.get(group_id, {}), ends):
                return f"{group_id} has not processed everything"
        return None if self.kafka is None else self.kafka.lag(ends)

    def is_lag_zero(self) -> bool:
        return self.lag() is None

    def check_end(self) -> None:
        self.checker.check_end([*self.names, *(() if self.kafka is None else self.kafka.names)], self._ends())
        topic = self.offsets_topic()
        assert topic is not None, "groups are stable"
        for number in sorted(topic.partitions):
            shard = self.shard(number)
            app = self._simulation.broker(self._simulation.cluster.station(NodeId(topic.partitions[number].leader)))
            assert app is not None, "all run"
            if shard is None:
                self.fail(app.name, f"partition {number} of {OFFSETS_TOPIC} is not coordinated")
                return
            state, end = shard.state, int(shard.runtime.applied)
            self.cleaned += cleaner_checkpoint(shard.leader.log) is not None
            data = self._simulation.read_log(app, PartitionId(TopicId(topic.topic_id), number))
            if isinstance(data, int):
                self.fail(app.name, f"partition {number} of {OFFSETS_TOPIC} cannot be read at {data}")
            else:
                self.checker.check_replay(app.name, number, data, state, end)
