"""Groups whose members speak the Kafka API, in runs that have groups: their machines, what happens to them, and what
must become of them when faults have ended.

    kappa         members of the classic protocol
    mixed         each consumer of a member speaks one protocol or the other: the group changes with its members
    epsilon       no members: an operator (`a141`) commits its offsets, deletes some, and the group itself
"""

from __future__ import annotations

from dataclasses import dataclass
from random import Random
from typing import TYPE_CHECKING

from simulation.cluster import Station
from simulation.groups_checker import has_all
from simulation.kafka_admin import GROUP as WITHOUT_MEMBERS
from simulation.kafka_admin import KafkaAdmin
from simulation.kafka_client import KafkaClient
from simulation.kafka_consumers import ClassicConsumer, ServerConsumer
from simulation.kafka_fetcher import FetchCounts
from simulation.kafka_groups_checker import CLASSIC, RETENTION_MS, KafkaGroupsChecker, KafkaLife
from simulation.kafka_member import Consumer, KafkaMember
from tidelog.coordinator.classic_group import ClassicState
from tidelog.coordinator.records import ClassicValue
from tidelog.coordinator.state import Group
from tidelog.model.ids import NodeId, PartitionId, TopicId

if TYPE_CHECKING:
    from simulation.broker_sim import BrokerSimulation
    from simulation.consumer_groups import ConsumerGroups
    from simulation.kafka_plan import KafkaGroupsPlan

MEMBERS = (NodeId(211), NodeId(212), NodeId(213))
ADMIN = NodeId(141)
EXPIRY_S, SWEEP_S = 5.0, 1.5


@dataclass(slots=True)
class Trial:
    """A member that is stopped and started again, and what it had."""

    station: Station
    member: KafkaMember
    generation: int
    held: frozenset[PartitionId]


class KafkaGroups:
    def __init__(self, simulation: BrokerSimulation, consumer_groups: ConsumerGroups, plan: KafkaGroupsPlan) -> None:
        self.plan = plan
        self.simulation = simulation
        self.consumer_groups = consumer_groups
        self.fail = simulation.fail
        self.checker = consumer_groups.checker
        self.kafka_checker = KafkaGroupsChecker(self.checker, simulation.fail, self._latest_ms)
        self.checker.kafka = self.kafka_checker
        self.members: list[KafkaMember] = []
        self.stations: list[Station] = []
        self.clients: list[KafkaClient] = []
        self.counts = FetchCounts()
        self.admin = KafkaAdmin(self, simulation.world.random("kafka/admin"))
        self.returns = self.jumps = 0

    def add_machines(self) -> None:
        world = self.simulation.world
        for node, plan in zip(MEMBERS, self.plan.members, strict=False):
            member = KafkaMember(self, int(node), plan, world.random(f"kafka/{node}"))
            station = self.simulation.cluster.add(f"g{node}", node, member.run)
            station.on_death = lambda _loss, member=member: member.died()
            self.members.append(member)
            self.stations.append(station)
        self.simulation.cluster.add(f"a{ADMIN}", ADMIN, self.admin.run)

    def new_consumer(self, member: KafkaMember, life: KafkaLife, client: KafkaClient) -> Consumer:
        return (ClassicConsumer if life.protocol == CLASSIC else ServerConsumer)(member, life, client)

    def _latest_ms(self) -> int:
        return max(station.machine.clock.now_ms() for station in self.simulation.brokers)

    # What members ask.

    @property
    def names(self) -> list[str]:
        return sorted({plan.group for plan in self.plan.members})

    @property
    def topic_names(self) -> list[str]:
        return self.consumer_groups.topic_names

    def topic_id(self, name: str) -> bytes:
        return next(topic.topic_id.bytes for topic in self.consumer_groups.topics if topic.name == name)

    def partition(self, topic: str | bytes, number: int) -> PartitionId:
        """By the topic's name or id."""
        self.consumer_groups.note_partitions()
        found = next(one for one in self.consumer_groups.topics if topic in (one.name, one.topic_id.bytes))
        return PartitionId(TopicId(found.topic_id), number)

    # When faults have ended.

    def steady(self) -> None:
        self.admin.is_steady = True
        for member in self.members:
            member.is_steady = True

    def trouble(self) -> str | None:
        """What is not as it shall be, of all groups."""
        everything = {known.partition_id for known, _ in self.consumer_groups.partitions()}
        for station, member in zip(self.stations, self.members, strict=True):
            life = member.life
            if life is None or life.is_over or life.is_closing or not station.is_up:
                return f"{station.name} has no consumer"
        for group_id in self.names:
            shard = self.consumer_groups.shard_of(group_id)
            group = None if shard is None else shard.state.group(group_id)
            if shard is None or group is None:
                return f"{group_id} has no coordinator"
            lives = [one for one in self.checker.running(group_id) if isinstance(one, KafkaLife)]
            if group.classic is not None:
                rounds = shard.rounds.get(group_id)
                if rounds is None or rounds.state is not ClassicState.STABLE:
                    return f"{group_id} is {None if rounds is None else rounds.state}"
                what = self._trouble_of_classic(group.classic, lives)
            else:
                what = self._trouble_of_consumer(group, lives)
            if what is not None:
                return f"{group_id}: {what}"
            held = [partition for life in lives for partition in life.holdings]
            if len(held) != len(set(held)) or set(held) != everything:
                return f"{group_id} holds {len(held)} of {len(everything)} partitions"
        return None

    @staticmethod
    def _trouble_of_classic(classic: ClassicValue, lives: list[KafkaLife]) -> str | None:
        ids = {member.member_id for member in classic.members}
        if ids != {life.member_id for life in lives}:
            return f"has members {sorted(ids)}, and {sorted(life.member_id for life in lives)} live"
        for life in lives:
            if life.generation != classic.generation:
                return f"{life.name} is in generation {life.generation} of {classic.generation}"
        return None

    @staticmethod
    def _trouble_of_consumer(group: Group, lives: list[KafkaLife]) -> str | None:
        if set(group.members) != {life.member_id for life in lives}:
            return f"has members {sorted(group.members)}, and {sorted(life.member_id for life in lives)} live"
        for life in lives:
            current, target = group.currents[life.member_id], group.targets[life.member_id]
            if current.revoking or current.assigned != target.partitions or set(life.holdings) != current.assigned:
                return f"{life.name} holds {sorted(life.holdings)}, and is at {current} of {target}"
        return None

    def try_static_return(self, draw: Random) -> None:
        """A static member of the classic protocol that dies and is back in its session has what it had, and nobody else
        hears of it. Stored is only what a member of the same subscription had."""
        choices = [
            Trial(station, member, member.life.generation, frozenset(member.life.holdings))
            for station, member in zip(self.stations, self.members, strict=True)
            if member.life is not None and member.life.instance_id and member.plan.protocols == (CLASSIC,)
        ]
        if not choices or self.trouble() is not None:
            return
        trial = draw.choice(choices)
        self.simulation.world.scheduler.trace("nemesis", f"{trial.station.name} dies, and is back at once")
        trial.station.kill()
        trial.station.start()

        def is_back() -> bool:
            return self.trouble() is None

        self.simulation._demand(f"{trial.station.name} is not back", is_back, self.plan.session_ms / 1000 + 10.0)
        life = trial.member.life
        assert life is not None, "it is back"
        self.returns += 1
        is_same = life.generation == trial.generation
        if is_same and frozenset(life.holdings) != trial.held:
            what = f"static: held {sorted(trial.held)}, and holds {sorted(life.holdings)} in the same generation"
            self.fail(life.name, what)

    def try_expiry(self) -> None:
        """The wall clocks of all brokers go on by more than the retention time: groups with members keep everything."""
        self.simulation.world.scheduler.trace("nemesis", "the clocks of all brokers jump past the retention of offsets")
        self.jump()

        def is_expired() -> bool:
            group = self.checker.group(WITHOUT_MEMBERS)
            return group is None or not group.offsets

        self.simulation._demand("offsets of a group without members do not expire", is_expired, EXPIRY_S)
        self.simulation.world.run_for(SWEEP_S)
        self.simulation.world.check()

    def jump(self) -> None:
        self.jumps += 1
        for station in self.simulation.brokers:
            station.machine.clock.jump(RETENTION_MS + 1_000)

    def is_all_processed(self, ends: dict[PartitionId, int]) -> bool:
        return all(has_all(self.checker.processed.get(name, {}), ends) for name in self.names)

    def lag(self, ends: dict[PartitionId, int]) -> str | None:
        for group_id in self.names:
            group = self.checker.group(group_id)
            for partition, end in ends.items():
                committed = None if group is None else group.offsets.get(partition)
                if end != (0 if committed is None else committed.offset):
                    return f"{group_id} has committed {committed} of {partition}, which ends at {end}"
        return None

    @property
    def acts(self) -> dict[str, int]:
        """What happened to these groups, for `coverage`."""
        kafka = self.kafka_checker
        return {
            "generations": kafka.generations,
            "refused commits of replaced members": kafka.zombies,
            "expired offsets": kafka.expired,
            "deleted offsets": kafka.deleted,
            "static members that return": self.returns,
            "refused deletions": self.admin.refused,
            "changes of protocol": kafka.conversions,
        }
