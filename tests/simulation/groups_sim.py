"""One run of a whole cluster with consumer groups. Seed in, verdict out.

    n1..n3, b11..b14    controllers and brokers, as in `broker_sim`; every broker has a group coordinator
    m201..m204          members (`groups_workload.Member`): consumers of one or two groups, static or not
    w111, w112          writers of numbered records
    c103                an operator: makes topics, lets them grow, moves partitions, those of the groups too

Faults first (`groups_faults`), then everything is healed and must go on: every group is stable, every partition has a
live owner. A member that only loses its streams stays; one that dies is out after its grace, one that dies with its
coordinator when the next one has waited for it (a static one: for its session). Then writers end, and every group has
processed and committed everything.
"""

import asyncio
from collections.abc import Collection
from dataclasses import dataclass, fields
from random import Random

from simulation.broker_checker import KnownPartition, KnownTopic
from simulation.broker_faults import BrokerNemesis
from simulation.broker_node import BrokerStack
from simulation.broker_sim import OPERATOR, SETTLE_S, BrokerShape, BrokerSimulation, draw_broker_shape
from simulation.cluster import Context, Station
from simulation.groups_checker import GroupsChecker, Life, has_all
from simulation.groups_faults import FAULTS, GroupsNemesis, draw_groups_plan
from simulation.groups_node import GroupsApp, GroupsStack, bootstrap_of
from simulation.groups_workload import GroupsOperator, GroupWriter, Member, MemberPlan
from simulation.nemesis import PlanStep
from simulation.raft_sim import Result, run_simulation
from tidelog.coordinator.coordinator import OFFSETS_TOPIC
from tidelog.coordinator.service import partition_for
from tidelog.coordinator.shard import Phase, Shard
from tidelog.metadata.image import Topic
from tidelog.model.errors import TidelogError
from tidelog.model.ids import NodeId, PartitionId, TopicId
from tidelog.world.simulated import SimWorld

BEGIN_S = 2.5
WRITERS = (NodeId(111), NodeId(112))
MEMBERS = (NodeId(201), NodeId(202), NodeId(203), NodeId(204))
TAKEOVER_S = 1.5
"""For the coordinator to notice a broken stream, or to be found, and to commit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupsShape(BrokerShape):
    members: tuple[MemberPlan, ...]
    offsets_partitions: int
    grace_ms: int
    reconnect_ms: int
    member_session_ms: int
    heartbeat_ms: int
    poll_interval_ms: int
    auto_commit_ms: int
    trial: str
    """What happens to a member when all is well: `streams`, `kill` or `kill_both`."""

    def settings(self) -> dict[str, int]:
        return {
            "replica.lag.time.max.ms": self.lag_ms,
            "broker.session.timeout.ms": self.session_ms,
            "disk.stall.timeout.ms": self.stall_ms,
            "offsets.topic.num.partitions": self.offsets_partitions,
            "offsets.commit.timeout.ms": 1_500,
            "group.min.session.timeout.ms": 500,
            "group.consumer.stream.grace.ms": self.grace_ms,
            "group.consumer.stream.reconnect.ms": self.reconnect_ms,
        }


def draw_groups_shape(seed: int) -> GroupsShape:
    base = draw_broker_shape(seed)
    draw = Random(f"{seed}/groups")
    values = {field.name: getattr(base, field.name) for field in fields(BrokerShape)}
    values.update(
        stack="groups",
        fault_s=BEGIN_S + draw.choice((2.5, 4.0, 6.0)),
        client_pause_s=draw.choice((0.1, 0.2)),
        topics=draw.choice((("plain",), ("plain",), ("plain", "more"))),
        operations=draw.choice(((2, 0, 0, 1, 4), (1, 2, 3, 1, 1), (0, 0, 4, 1, 1))),
    )
    count = draw.choice((2, 3, 3, 4))
    is_restless, is_slow = draw.choice((0.0, 0.01, 0.03)), draw.choice((0.0, 0.0, 0.03))
    members = tuple(
        MemberPlan(
            group="beta" if at == 3 else "alpha",
            is_static=draw.random() < 0.3,
            is_auto=draw.random() < 0.5,
            is_iterating=draw.random() < 0.4,
            pattern=draw.choice(("", "", "(plain|more).*")),
            restless=is_restless,
            slow=is_slow,
        )
        for at in range(count)
    )
    return GroupsShape(
        **values,
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


class GroupsSimulation(BrokerSimulation):
    shape: GroupsShape
    operator: GroupsOperator

    def __init__(self, world: SimWorld, seed: int, shape: GroupsShape, *, only: Collection[int] | None = None) -> None:
        self.members: list[Member] = []
        self.member_stations: list[Station] = []
        self.writers: list[GroupWriter] = []
        super().__init__(world, seed, shape, only=only)

    def _new_stack(self) -> BrokerStack:
        self.groups_checker = GroupsChecker(self.replica_checker, self.fail)
        self.groups_checker.offsets_partitions = self.shape.offsets_partitions
        self.groups_checker.find_partitions = self.note_partitions
        return GroupsStack(self)

    def _make_clients(self) -> None:
        self.bootstrap = bootstrap_of(self)
        for node in WRITERS:
            draw = self.world.random(f"writer/{node}")
            writer = GroupWriter(self, int(node), draw, self.fail, pause_s=self.shape.client_pause_s)
            self.writers.append(writer)
            self.cluster.add(f"w{node}", node, writer.run)
        for node, plan in zip(MEMBERS, self.shape.members, strict=False):
            member = Member(self, int(node), plan, self.world.random(f"member/{node}"))
            station = self.cluster.add(f"m{node}", node, member.run)
            station.on_death = lambda _loss, member=member: member.died()
            self.members.append(member)
            self.member_stations.append(station)
        self.operator = GroupsOperator(self, self.world.random("operator"), self.fail)
        self.cluster.add(f"c{OPERATOR}", OPERATOR, self.operator.run)

    def _draw_plan(self, draw: Random) -> list[PlanStep]:
        return draw_groups_plan(draw, from_s=BEGIN_S, until_s=self.shape.fault_s)

    def _new_nemesis(self) -> BrokerNemesis:
        return GroupsNemesis(self, self.plan, FAULTS)

    # -- what others ask

    @property
    def groups(self) -> list[str]:
        return sorted({plan.group for plan in self.shape.members})

    @property
    def topic_names(self) -> list[str]:
        return [topic.name for topic in self.operator.topics]

    async def are_topics_made(self, context: Context) -> None:
        """Nobody begins before the operator has set up the cluster."""
        while len(self.operator.topics) < len(self.shape.topics):  # noqa: ASYNC110 - on another machine
            await asyncio.sleep(0.05)

    def made(self, topic: KnownTopic) -> None:
        self.world.scheduler.trace("operator", f"{topic.name} is {topic.topic_id}")
        for known in self.replica_checker.add(topic):
            self.groups_checker.add_partition(topic.name, known.partition_id)
        self.note_partitions()

    def note_partitions(self) -> None:
        """Topics may have got more of them."""
        self.metadata.advance()
        for topic in self.operator.topics:
            found = self.metadata.image.topic_named(topic.name)
            for number in () if found is None else sorted(found.partitions):
                partition = PartitionId(TopicId(topic.topic_id), number)
                if partition not in self.replica_checker.partitions:
                    topic.partitions = max(topic.partitions, number + 1)
                    self.replica_checker.partitions[partition] = KnownPartition(topic, partition)
                    self.groups_checker.add_partition(topic.name, partition)

    def leader_epoch(self, partition: PartitionId) -> int:
        found = self.metadata.image.partition(partition.topic_id, partition.partition)
        return -1 if found is None else found.leader_epoch

    def offsets_topic(self) -> Topic | None:
        return self.metadata.image.topic_named(OFFSETS_TOPIC)

    def coordinator_station(self, draw: Random) -> Station | None:
        topic = self.offsets_topic()
        if topic is None:
            return None
        group = draw.choice(self.groups)
        leader = topic.partitions[partition_for(group, len(topic.partitions))].leader
        return None if leader < 0 else self.cluster.station(NodeId(leader))

    def expel(self, station: Station) -> str | None:
        """Put the member of this machine out of its group; None if nobody can."""
        member = station.app
        life = member.life if isinstance(member, Member) else None
        shard = None if life is None else self._shard(partition_for(life.group, self.shape.offsets_partitions))
        if life is None or shard is None or not life.member_id:
            return None
        app = self.broker(self.cluster.station(shard._host.me))
        assert isinstance(app, GroupsApp)
        app.context.node.spawn(self._remove(app, life.group, life.member_id))
        return f"{life.name} is put out of {life.group} by an operator"

    async def _remove(self, app: GroupsApp, group: str, member_id: str) -> None:
        try:
            await app.groups.remove_members(group, [member_id], [])
        except TidelogError as error:
            app.context.trace(f"{member_id} is not put out: {error}")

    # -- the run

    @property
    def reads(self) -> int:
        return self.groups_checker.given_out

    def run(self) -> None:
        self._run_faults()
        self.note_partitions()
        for member in self.members:
            member.is_steady = True
        # A stream that is silent, and that nobody has noticed, would hold up what the trial waits for (seed 167).
        network = self.cluster.network
        self._demand("groups are not stable", lambda: not network.has_silent_streams() and self._are_stable(), SETTLE_S)
        getattr(self, f"_try_{self.shape.trial}")(self.world.random("trial"))
        self._demand("groups are not stable again", self._are_stable, SETTLE_S)
        for writer in self.writers:
            writer.is_stopping = True
        self._demand("writes are not answered", lambda: not any(writer.busy for writer in self.writers), SETTLE_S)
        self._demand("replicas do not converge", self._has_converged, SETTLE_S)
        self._demand("groups have not processed everything", self._is_all_processed, SETTLE_S)
        for station, member in zip(self.member_stations, self.members, strict=True):
            if station.context is not None:
                member.finish(station.context)
        self._demand("groups lag", self._is_lag_zero, SETTLE_S)
        self.metadata.advance()
        self._check_logs()
        self._check_groups()
        self.world.check()

    def _shard(self, number: int) -> Shard | None:
        topic = self.offsets_topic()
        leader = -1 if topic is None else topic.partitions[number].leader
        app = None if leader < 0 else self.broker(self.cluster.station(NodeId(leader)))
        if app is None:
            return None
        assert isinstance(app, GroupsApp)
        shard = app.coordinator.shards.get(number)
        return shard if shard is not None and shard.phase is Phase.LEADING else None

    def _are_stable(self) -> bool:
        self.note_partitions()
        return self._trouble() is None

    def _trouble(self) -> str | None:
        """What is not as it shall be, of all groups."""
        everything = set(self.replica_checker.partitions)
        for station, member in zip(self.member_stations, self.members, strict=True):
            life = member.life
            if life is None or life.is_over or life.is_closing or not station.is_up:
                return f"{station.name} has no consumer"
        for group_id in self.groups:
            shard = self._shard(partition_for(group_id, self.shape.offsets_partitions))
            group = None if shard is None else shard.state.group(group_id)
            if group is None:
                return f"{group_id} has no coordinator"
            lives = {one.member_id: one for one in self.groups_checker.running(group_id)}
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
        return None

    def _describe(self, station: Station) -> str:
        text = super()._describe(station)
        if station is self.stations[0]:
            text = f"{self._trouble()}\n{self._lag()}\n{text}"
        return text

    # -- trials of members, when all is well

    def _living(self, *, is_static: bool | None = None) -> list[tuple[Station, Life]]:
        return [
            (station, member.life)
            for station, member in zip(self.member_stations, self.members, strict=True)
            if member.life is not None and is_static in (None, member.plan.is_static)
        ]

    def _try_streams(self, draw: Random) -> None:
        """Who comes back within its grace has lost nothing."""
        station, life = draw.choice(self._living())
        if not self._has_stream(life):
            return  # its last one has broken before, and its grace may be over any moment
        member_id, lost, core = life.member_id, life.lost, life.consumer.core
        left = core.left_for_polling
        self.world.scheduler.trace("nemesis", f"the streams of {station.name} break, and all is well")
        for broker in self.brokers:
            self.cluster.network.cut_streams(station.node_id, broker.node_id)
        self.world.run_for(self.shape.grace_ms / 1000 + TAKEOVER_S)
        if core.left_for_polling != left:
            return  # it still waited for the answer to a commit of before
        if life.member_id != member_id or life.lost != lost or life.is_over:
            self.fail(life.name, "has lost its streams for a moment, and its membership with them")
        self.world.check()

    def _try_kill(self, draw: Random) -> None:
        """A dynamic member that dies is out after its grace, a static one after its session. One that has not found yet
        that its coordinator is another one has no stream that could break: it was to be heard of in time."""
        living = self._living(is_static=False) or self._living()
        station, life = draw.choice(living)
        shard = self._shard(partition_for(life.group, self.shape.offsets_partitions))
        is_soon = self._has_stream(life) and not life.is_static
        self._kill(station, life, self._silence_ms(life), shard if is_soon else None)

    def _try_kill_both(self, draw: Random) -> None:
        """A member and its coordinator: the next one knows nothing of deadlines, and gives a dynamic member the time to
        find it, a static one its session."""
        station, life = draw.choice(self._living())
        topic = self.offsets_topic()
        assert topic is not None, "groups are stable"
        leader = topic.partitions[partition_for(life.group, len(topic.partitions))].leader
        coordinator = self.cluster.station(NodeId(leader))
        self.world.scheduler.trace("nemesis", f"the coordinator {coordinator.name} dies, and all is well")
        coordinator.kill()
        # It is fenced when its own session is over, and who is elected needs a moment; the member dies before it has
        # met that one, or after.
        self.world.run_for(draw.choice((0.0, 0.0, self.shape.session_ms / 1000 + 2.0)))
        self._kill(station, life, self._silence_ms(life), has_moved=True)
        coordinator.start()

    def _has_stream(self, life: Life) -> bool:
        shard = self._shard(partition_for(life.group, self.shape.offsets_partitions))
        return shard is not None and (life.group, life.member_id) in shard.streams

    def _silence_ms(self, life: Life) -> int:
        """How long a coordinator waits for a member that has no stream there."""
        session_ms = self.shape.member_session_ms
        return session_ms if life.is_static else min(session_ms, self.shape.reconnect_ms)

    def _kill(
        self, station: Station, life: Life, within_ms: int, shard: Shard | None = None, *, has_moved: bool = False
    ) -> None:
        """`shard` has the member's stream, so that its grace is enough as long as that one coordinates the group.
        `has_moved`: the time is counted from when the next one has read the group."""
        member_id, group_id = life.member_id, life.group
        self.cluster.network.silent_death_probability = 0.0
        self.world.scheduler.trace("nemesis", f"{station.name} dies, and all is well")
        station.kill()

        def is_out() -> bool:
            group = self.groups_checker.group(group_id)
            return group is not None and member_id not in group.members

        what = f"{life.name} ({member_id}) is dead, and still in its group"
        if shard is not None:
            number = shard.number
            soon = lambda: is_out() or self._shard(number) is not shard  # noqa: E731
            self._demand(what, soon, self.shape.grace_ms / 1000 + TAKEOVER_S)
        if has_moved:
            moved = partition_for(group_id, self.shape.offsets_partitions)
            self._demand("nobody coordinates the group", lambda: self._shard(moved) is not None, SETTLE_S)
        self._demand(what, is_out, within_ms / 1000 + TAKEOVER_S)
        station.start()

    # -- the end

    def _ends(self) -> dict[PartitionId, int]:
        ends = {}
        for known, partition in self._partitions():
            state = self._state(partition.leader, known.partition_id)
            ends[known.partition_id] = -1 if state is None else state[0]
        return ends

    def _is_all_processed(self) -> bool:
        ends, processed = self._ends(), self.groups_checker.processed
        return all(has_all(processed.get(group_id, {}), ends) for group_id in self.groups)

    def _lag(self) -> str | None:
        ends = self._ends()
        for group_id in self.groups:
            group = self.groups_checker.group(group_id)
            for partition, end in ends.items():
                committed = None if group is None else group.offsets.get(partition)
                if end != (0 if committed is None else committed.offset):
                    known = self.replica_checker.partitions[partition]
                    return f"{group_id} has committed {committed} of {known}, which ends at {end}"
            if not has_all(self.groups_checker.processed.get(group_id, {}), ends):
                return f"{group_id} has not processed everything"
        return None

    def _is_lag_zero(self) -> bool:
        return self._lag() is None

    def _check_groups(self) -> None:
        self.groups_checker.check_end(self.groups, self._ends())
        topic = self.offsets_topic()
        assert topic is not None, "groups are stable"
        for number in sorted(topic.partitions):
            shard = self._shard(number)
            app = self.broker(self.cluster.station(NodeId(topic.partitions[number].leader)))
            assert app is not None, "all run"
            if shard is None:
                self.fail(app.name, f"partition {number} of {OFFSETS_TOPIC} is not coordinated")
                return
            state, end = shard.state, int(shard.replicated.applied)
            data = self._read(app, PartitionId(TopicId(topic.topic_id), number))
            if isinstance(data, int):
                self.fail(app.name, f"partition {number} of {OFFSETS_TOPIC} cannot be read at {data}")
            else:
                self.groups_checker.check_replay(app.name, number, data, state, end)


def run_groups_seed(seed: int, *, only: Collection[int] | None = None) -> Result:
    shape = draw_groups_shape(seed)
    return run_simulation(seed, shape, lambda world: GroupsSimulation(world, seed, shape, only=only))
