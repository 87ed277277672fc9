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

from collections.abc import Collection, Sequence
from dataclasses import replace
from random import Random

from simulation.broker_checker import KnownTopic
from simulation.broker_shape import BrokerShape, draw_broker_shape
from simulation.broker_sim import CONVERGE_S, OPERATOR, BrokerSimulation
from simulation.cluster import Station
from simulation.consumer_groups import ConsumerGroups, draw_groups
from simulation.groups_checker import Life
from simulation.groups_faults import draw_groups_plan
from simulation.groups_workload import GroupsOperator, GroupWriter
from simulation.kafka_plan import draw_kafka
from simulation.nemesis import PlanStep
from simulation.raft_sim import run_simulation
from simulation.run_result import Result
from tidelog.coordinator.hashing import partition_for
from tidelog.coordinator.shard import Shard
from tidelog.model.ids import NodeId, PartitionId

BEGIN_S = 2.5
WRITERS = (NodeId(111), NodeId(112))
TAKEOVER_S = 1.5
"""For the coordinator to notice a broken stream, or to be found, and to commit."""


def draw_groups_shape(seed: int) -> BrokerShape:
    draw = Random(f"{seed}/groups")
    base = draw_broker_shape(seed, has_more=False)
    shape = replace(
        base,
        stack="groups",
        fault_s=BEGIN_S + draw.choice((2.5, 4.0, 6.0)),
        client_pause_s=draw.choice((0.1, 0.2)),
        topics=draw.choice((("plain",), ("plain",), ("plain", "more"))),
        operations=draw.choice(((2, 0, 0, 1, 4), (1, 2, 3, 1, 1), (0, 0, 4, 1, 1))),
    )
    groups = draw_groups(draw, pattern="(plain|more).*")
    return replace(shape, groups=groups, kafka=draw_kafka(seed, "groups", share=0.35, has_groups=True))


class GroupsSimulation(BrokerSimulation):
    groups: ConsumerGroups

    def _make_clients(self) -> None:
        self.writers: list[GroupWriter] = []
        for node in WRITERS:
            draw = self.world.random(f"writer/{node}")
            writer = GroupWriter(self, int(node), draw, self.fail, pause_s=self.shape.client_pause_s)
            self.writers.append(writer)
            self.cluster.add(f"w{node}", node, writer.run)
        self.groups.add_members()
        self.operator = GroupsOperator(self, self.world.random("operator"), self.fail)
        self.operator_station = self.cluster.add(f"c{OPERATOR}", OPERATOR, self.operator.run)

    def _draw_plan(self, draw: Random) -> list[PlanStep]:
        return draw_groups_plan(draw, from_s=BEGIN_S, until_s=self.shape.fault_s)

    def made(self, topic: KnownTopic, *, first: int = 0) -> None:
        assert not first, "groups notice new partitions by themselves"
        self.world.scheduler.trace("operator", f"{topic.name} is {topic.topic_id}")
        self.replica_checker.add(topic)
        self.groups.made(topic)

    def leader_epoch(self, partition: PartitionId) -> int:
        found = self.metadata.image.partition(partition.topic_id, partition.partition)
        return -1 if found is None else found.leader_epoch

    # -- the run

    @property
    def reads(self) -> int:
        return self.groups.checker.given_out

    def _clients(self) -> Sequence[GroupWriter]:
        return self.writers

    def _are_groups_stable(self) -> bool:
        # A stream that is silent, and that nobody has noticed, would hold up what the trial waits for (seed 167).
        return not self.cluster.network.has_silent_streams() and super()._are_groups_stable()

    def _await_groups(self) -> None:
        super()._await_groups()
        getattr(self, f"_try_{self.groups.plan.trial}")(self.world.random("trial"))
        self._demand("groups are not stable again", self.groups.are_stable, CONVERGE_S)
        kafka = self.groups.kafka
        if kafka is not None:
            kafka.try_static_return(self.world.random("kafka-trial"))
            kafka.try_expiry()

    # -- trials of members, when all is well

    def _try_streams(self, draw: Random) -> None:
        """Who comes back within its grace has lost nothing."""
        station, life = draw.choice(self.groups.living())
        if not self._has_stream(life):
            return  # its last one has broken before, and its grace may be over any moment
        member_id, lost, core = life.member_id, life.lost, life.consumer.core
        left = core.poll_interval_exceeded
        self.world.scheduler.trace("nemesis", f"the streams of {station.name} break, and all is well")
        for broker in self.brokers:
            self.cluster.network.cut_streams(station.node_id, broker.node_id)
        self.world.run_for(self.groups.plan.grace_ms / 1000 + TAKEOVER_S)
        if core.poll_interval_exceeded != left:
            return  # it still waited for the answer to a commit of before
        if life.member_id != member_id or life.lost != lost or life.is_over:
            self.fail(life.name, "has lost its streams for a moment, and its membership with them")
        self.world.check()

    def _try_kill(self, draw: Random) -> None:
        """A dynamic member that dies is out after its grace, a static one after its session. One that has not found yet
        that its coordinator is another one has no stream that could break: it was to be heard of in time."""
        living = self.groups.living(is_static=False) or self.groups.living()
        station, life = draw.choice(living)
        shard = self.groups.shard_of(life.group)
        is_soon = self._has_stream(life) and not life.is_static
        self._kill(station, life, self._silence_ms(life), shard if is_soon else None)

    def _try_kill_both(self, draw: Random) -> None:
        """A member and its coordinator: the next one knows nothing of deadlines, and gives a dynamic member the time to
        find it, a static one its session."""
        station, life = draw.choice(self.groups.living())
        topic = self.groups.offsets_topic()
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
        shard = self.groups.shard_of(life.group)
        return shard is not None and (life.group, life.member_id) in shard.streams

    def _silence_ms(self, life: Life) -> int:
        """How long a coordinator waits for a member that has no stream there."""
        session_ms = self.groups.plan.member_session_ms
        return session_ms if life.is_static else min(session_ms, self.groups.plan.reconnect_ms)

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
            group = self.groups.checker.group(group_id)
            return group is not None and member_id not in group.members

        what = f"{life.name} ({member_id}) is dead, and still in its group"
        if shard is not None:
            number = shard.number
            soon = lambda: is_out() or self.groups.shard(number) is not shard  # noqa: E731
            self._demand(what, soon, self.groups.plan.grace_ms / 1000 + TAKEOVER_S)
        if has_moved:
            moved = partition_for(group_id, self.groups.plan.offsets_partitions)
            self._demand("nobody coordinates the group", lambda: self.groups.shard(moved) is not None, CONVERGE_S)
        self._demand(what, is_out, within_ms / 1000 + TAKEOVER_S)
        station.start()


def run_groups_seed(seed: int, *, only: Collection[int] | None = None) -> Result:
    shape = draw_groups_shape(seed)
    return run_simulation(seed, shape, lambda world: GroupsSimulation(world, seed, shape, only=only))
