"""The features of a run of the whole cluster, as `coverage` counts them: on which roles of a machine each is active."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from simulation.coverage import CONTROLLER, COORDINATOR, FOLLOWER, LEADER, RolesOf
from simulation.product_operator import TUNED
from tidelog.replication.leader_replica import LeaderReplica

if TYPE_CHECKING:
    from simulation.broker_node import BrokerApp
    from simulation.broker_sim import BrokerSimulation
    from simulation.cluster import Station
    from simulation.product_shape import ProductPlan
    from tidelog.replication.replica import Replica

OF_PARTITIONS = (LEADER, FOLLOWER)
Matches = Callable[["BrokerApp", "Replica"], bool]


def on_replicas(simulation: BrokerSimulation, matches: Matches) -> RolesOf:
    """Leader and follower, of partitions that match."""

    def roles_of(station: Station) -> Iterator[str]:
        app = simulation.broker(station)
        if app is not None:
            held = [replica for replica in app.replicas.all() if replica.role is not None and matches(app, replica)]
            leads = {isinstance(replica.role, LeaderReplica) for replica in held}
            yield from (role for role, is_leader in ((LEADER, True), (FOLLOWER, False)) if is_leader in leads)

    return roles_of


def on_controller(simulation: BrokerSimulation, is_active: Callable[[], bool]) -> RolesOf:
    """The active controller, while something goes on."""

    def roles_of(station: Station) -> Iterator[str]:
        leader = simulation.checker.leader_now()
        if leader is not None and leader[0] == station.node_id and station in simulation.quorum and is_active():
            yield CONTROLLER

    return roles_of


def on_coordinator(simulation: BrokerSimulation) -> RolesOf:
    """A broker that leads a shard of groups."""

    def roles_of(station: Station) -> Iterator[str]:
        app = simulation.broker(station)
        if app is not None and app.coordinator.shards:
            yield COORDINATOR

    return roles_of


def together(*parts: RolesOf) -> RolesOf:
    return lambda station: (role for part in parts for role in part(station))


def register_features(simulation: BrokerSimulation) -> None:
    """Those that a run has by its topics, groups and operations."""
    shape, coverage = simulation.shape, simulation.nemesis.coverage

    def of_kind(kind: str) -> Matches:
        return lambda _, replica: kind_of(replica.topic) == kind

    operations = {name for name, weight in zip(simulation.operator.operations, shape.operations, strict=True) if weight}
    churns = ("churn",) if "create" in operations else ()
    for kind in (*dict.fromkeys(shape.topics), *churns):
        coverage.feature(f"topics: {kind}", OF_PARTITIONS, on_replicas(simulation, of_kind(kind)))
    if "move" in operations or (shape.product is not None and shape.product.has_moves):
        moving = together(
            on_replicas(simulation, lambda _, replica: replica.partition.is_reassigning),
            on_controller(simulation, lambda: is_reassigning(simulation)),
        )
        coverage.feature("reassignment", (*OF_PARTITIONS, CONTROLLER), moving)
    if shape.directories > 1:
        moves = on_replicas(simulation, lambda app, replica: app.replicas.moves.is_moving(replica))
        coverage.feature("moves between directories", OF_PARTITIONS, moves)
    if shape.deletes and simulation.users:
        deleted = on_replicas(simulation, lambda _, replica: replica.partition.start_offset > 0)
        coverage.feature("delete-records", OF_PARTITIONS, deleted)
    if shape.groups is not None:
        coverage.feature("groups", (COORDINATOR,), on_coordinator(simulation))
    if shape.spares:
        coverage.feature("membership changes", (CONTROLLER,), on_controller(simulation, simulation.is_changing))
    if simulation.kafka is not None:
        served = on_replicas(simulation, of_kafka)
        for name in simulation.kafka.acts:
            coverage.feature(f"Kafka API: {name}", OF_PARTITIONS, served)
        for name in () if simulation.kafka.groups is None else simulation.kafka.groups.acts:
            coverage.feature(f"Kafka API: {name}", (COORDINATOR,), on_coordinator(simulation))
    if shape.product is not None:
        register_product(simulation, shape.product)


def of_kafka(_app: BrokerApp, replica: Replica) -> bool:
    """Partitions that the clients of the Kafka API write and read."""
    return kind_of(replica.topic) in ("plain", "weak", "more", "grouped", "churn")


def register_product(simulation: BrokerSimulation, plan: ProductPlan) -> None:
    """Those of `product_shape`."""
    coverage = simulation.nemesis.coverage

    def on_topics(*kinds: str) -> RolesOf:
        return on_replicas(simulation, lambda _, replica: kind_of(replica.topic) in kinds)

    def while_asked() -> RolesOf:
        return on_controller(
            simulation, lambda: simulation.product_operator is not None and simulation.product_operator.is_asking
        )

    for kind in plan.topics():
        if kind in ("timed", "sized"):
            coverage.feature(f"retention: {kind}", OF_PARTITIONS, on_topics(kind))
        elif kind != "tuned":
            roles, extra = ((*OF_PARTITIONS, CONTROLLER), [while_asked()]) if kind == "again" else (OF_PARTITIONS, [])
            coverage.feature(f"topics: {kind}", roles, together(on_topics(kind), *extra))
    if plan.has_changes:
        coverage.feature("retention: tuned", OF_PARTITIONS, on_topics("tuned"))
        for key, values in TUNED.items():
            changed = on_replicas(simulation, has_other(key, values[0]))
            coverage.feature(f"config: {key}", (*OF_PARTITIONS, CONTROLLER), together(changed, while_asked()))
        coverage.feature("config: brokers", (CONTROLLER,), while_asked())
    if plan.producers:
        coverage.feature("five in flight", OF_PARTITIONS, on_topics("piped"))
    if plan.expiry_ms:
        coverage.feature("producer expiry", OF_PARTITIONS, on_replicas(simulation, lambda _, __: True))
    if plan.has_drains:
        coverage.feature("drain", (*OF_PARTITIONS, CONTROLLER), together(on_drained(simulation), while_asked()))
    if plan.throttle_bytes:
        throttled = on_replicas(simulation, lambda _, replica: replica.is_leader_throttled)
        coverage.feature("throttle", OF_PARTITIONS, throttled)
    if plan.has_elections:
        coverage.feature("elections", (CONTROLLER,), while_asked())
    if plan.has_elections or any(kind in ("cached", "tuned") for kind in plan.topics()):
        coverage.feature("unclean elections", (CONTROLLER,), while_asked())
    if plan.has_moves:
        coverage.feature("cancelled reassignments", (CONTROLLER,), while_asked())
        coverage.feature("added partitions", (CONTROLLER,), while_asked())


def has_other(key: str, value: str) -> Matches:
    """Topics `tuned` with another value than they were made with."""
    return lambda app, replica: (
        kind_of(replica.topic) == "tuned" and app.tail.image.config("topic", replica.topic).get(key, value) != value
    )


def on_drained(simulation: BrokerSimulation) -> RolesOf:
    """The roles that a broker has while it is drained."""
    roles_of = on_replicas(simulation, lambda _, __: True)

    def roles(station: Station) -> Iterator[str]:
        broker = simulation.metadata.image.brokers.get(int(station.node_id))
        if broker is not None and broker.draining:
            yield from roles_of(station)

    return roles


def is_reassigning(simulation: BrokerSimulation) -> bool:
    topics = simulation.metadata.image.topics.values()
    return any(partition.is_reassigning for topic in topics for partition in topic.partitions.values())


def kind_of(topic: str) -> str:
    """The part of a topic's name before the dot."""
    return topic.partition(".")[0]


def count_acts(simulation: BrokerSimulation) -> None:
    """At the end of a run: how often what it had did its work."""
    coverage, checker = simulation.nemesis.coverage, simulation.replica_checker
    for known in checker.partitions.values():
        kind = kind_of(known.topic.name)
        if kind not in ("compacted", "again") and f"topics: {kind}" in coverage.counts.features:
            coverage.acted(f"topics: {kind}", len(known.acked) + len(known.records))
        if "delete-records" in coverage.counts.features:
            coverage.acted("delete-records", known.deleted > 0)
    for name, times in (
        ("topics: compacted", checker.compacted_away),
        ("five in flight", 0 if simulation.pipeliner is None else simulation.pipeliner.sent),
        ("producer expiry", 0 if simulation.product_checker is None else simulation.product_checker.forgotten),
        ("groups", 0 if simulation.groups is None else simulation.groups.checker.given_out),
        ("membership changes", simulation.membership_changes),
    ):
        if name in coverage.counts.features:
            coverage.acted(name, times)
    if simulation.kafka is not None:
        groups = simulation.kafka.groups
        for name, times in {**simulation.kafka.acts, **({} if groups is None else groups.acts)}.items():
            coverage.acted(f"Kafka API: {name}", times)
