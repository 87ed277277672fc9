"""`MockAdmin`: `tidelog.Admin` without a cluster, of any number of brokers. Topics, settings, reassignments and
elections are decided by the code of the controller; groups, offsets and records are what the test says.

    admin = MockAdmin(brokers=5)
    admin.create_topic("orders", partitions=6, replication_factor=3)
    admin.add_group("billing", {("orders", 0): 10})
    admin.set_offsets(("orders", 0), start=0, end=25)
    admin.fail_next("create_topic", error)
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from types import TracebackType
from typing import Any, Self, TypeVar
from uuid import UUID

from tidelog import __version__
from tidelog.client.admin import directory_named
from tidelog.client.admin_facade import Admin
from tidelog.client.admin_front import (
    Resource,
    read_new_topics,
    read_resource,
)
from tidelog.client.admin_rows import config_text
from tidelog.client.admin_values import (
    BrokerDescription,
    ClusterDescription,
    ConfigEntry,
    ConfigResource,
    CreatedTopic,
    LogDir,
    NewTopic,
    Outcomes,
    PartitionDescription,
    QuorumDescription,
    QuorumMember,
    Reassignment,
    ReplicaSize,
    TopicDescription,
    TopicListing,
)
from tidelog.client.consumer_front import Partitions, read_partition, read_partitions
from tidelog.client.names import AdminOptions, read_options
from tidelog.client.record import TopicPartition
from tidelog.metadata import describe, partitions, reassignments, settings
from tidelog.metadata import topics as topics_of
from tidelog.model.errors import (
    ErrorCode,
    InvalidRequestError,
    RemoteError,
    TidelogError,
)
from tidelog.testing.mock_admin_groups import MockAdminGroups, each
from tidelog.testing.mock_metadata import CLUSTER_ID, LISTENER, MockMetadata, directory, error_of

K = TypeVar("K")
V = TypeVar("V")
BROKERS_MAX = 10_000


class MockAdmin(MockAdminGroups):
    """See the module's docstring. Options are those of `tidelog.Admin`. Brokers are numbered from 1 on."""

    def __init__(self, bootstrap: object = "mock:9292", /, *, brokers: int = 3, seed: int = 0, **options: Any) -> None:
        if not 1 <= brokers <= BROKERS_MAX:
            raise ValueError(f"1 to {BROKERS_MAX:,} brokers, not {brokers}")
        super().__init__(MockMetadata(brokers, seed))
        self.options = read_options(AdminOptions, bootstrap, options)

    # What a test does with it.

    @property
    def is_closed(self) -> bool:
        return self._is_closed

    def fail_next(self, method: str, error: Exception, *, times: int = 1) -> None:
        """The next calls of this method raise it, and do nothing."""
        if method not in _METHODS:
            raise ValueError(f"Admin has no method '{method}'")
        self._errors.setdefault(method, deque()).extend([error] * times)

    def kill_broker(self, broker: int) -> None:
        """It is fenced: what it led is led by others, if there are any in sync."""
        self._check_broker(broker)
        self._metadata.fence(broker)

    def restart_broker(self, broker: int) -> None:
        """It is let in, and in sync again."""
        self._check_broker(broker)
        self._metadata.start(broker)
        self._metadata.catch_up()

    def finish_reassignments(self) -> None:
        """Replicas that were added have caught up: moves that are under way end."""
        self._metadata.catch_up()

    # Topics, as the real one.

    def create_topic(
        self,
        name: str,
        *,
        partitions: int | None = None,
        replication_factor: int | None = None,
        configs: Mapping[str, object] | None = None,
        assignment: Iterable[Iterable[int]] = (),
        validate_only: bool = False,
        timeout_ms: int | None = None,
    ) -> CreatedTopic:
        self._called("create_topic")
        topic = NewTopic(name, partitions, replication_factor, configs, tuple(tuple(row) for row in assignment))
        return self._create([topic], validate_only)[name]

    def create_topics(
        self,
        topics: Iterable[NewTopic | str],
        *,
        validate_only: bool = False,
        partial: bool = False,
        timeout_ms: int | None = None,
    ) -> Outcomes[str, CreatedTopic]:
        self._called("create_topics")
        return self._whole(self._create(read_new_topics(topics), validate_only), partial)

    def _create(self, wanted: Sequence[NewTopic], validate_only: bool) -> Outcomes[str, CreatedTopic]:
        asked = tuple(
            topics_of.NewTopic(
                name=one.name,
                partitions=-1 if one.partitions is None else one.partitions,
                replication_factor=-1 if one.replication_factor is None else one.replication_factor,
                assignment=one.assignment,
                configs=tuple((key, config_text(value)) for key, value in (one.configs or {}).items()),
            )
            for one in wanted
        )
        done: dict[str, CreatedTopic] = {}
        errors: dict[str, TidelogError] = {}
        for row in self._metadata.ask(topics_of.CreateTopics(topics=asked, validate_only=validate_only)).topics:
            if row.error is not None:
                errors[row.name] = RemoteError(row.message, code=row.error)
            else:
                topic_id = None if validate_only else row.topic_id
                done[row.name] = CreatedTopic(row.name, topic_id, row.partitions, row.replication_factor, row.message)
        return Outcomes(done, errors)

    def delete_topic(self, name: str, *, validate_only: bool = False, timeout_ms: int | None = None) -> None:
        self._called("delete_topic")
        return self._delete([name], validate_only)[name]

    def delete_topics(
        self, names: Iterable[str], *, validate_only: bool = False, partial: bool = False, timeout_ms: int | None = None
    ) -> Outcomes[str, None]:
        self._called("delete_topics")
        return self._whole(self._delete(list(dict.fromkeys(names)), validate_only), partial)

    def _delete(self, names: list[str], validate_only: bool) -> Outcomes[str, None]:
        reply = self._metadata.ask(topics_of.DeleteTopics(names=tuple(names), validate_only=validate_only))
        found = _outcomes(zip(names, reply.items, strict=True))
        if not validate_only:
            for place in [one for one in self._ends if one.topic in found.done]:
                del self._ends[place], self._times[place]
        return found

    def list_topics(self, *, internal: bool = False, timeout_ms: int | None = None) -> list[TopicListing]:
        self._called("list_topics")
        found = (one.topic for one in self._metadata.answer(describe.DescribeTopics()).topics)
        return [
            TopicListing(one.name, one.topic_id, one.is_internal, len(one.partitions))
            for one in found
            if internal or not one.is_internal
        ]

    def describe_topic(self, name: str, *, timeout_ms: int | None = None) -> TopicDescription:
        self._called("describe_topic")
        return self._describe([name])[name]

    def describe_topics(
        self, names: Iterable[str] | None = None, *, partial: bool = False, timeout_ms: int | None = None
    ) -> Outcomes[str, TopicDescription]:
        self._called("describe_topics")
        return self._whole(self._describe(None if names is None else list(dict.fromkeys(names))), partial)

    def _describe(self, names: list[str] | None) -> Outcomes[str, TopicDescription]:
        question = describe.DescribeTopics(names=None if names is None else tuple(names))
        rows = self._metadata.answer(question).topics
        return Outcomes(
            {row.name: _topic(row.topic) for row in rows if row.error is None},
            {row.name: RemoteError(row.message, code=row.error) for row in rows if row.error is not None},
        )

    def add_partitions(
        self,
        totals: Mapping[str, int],
        *,
        validate_only: bool = False,
        partial: bool = False,
        timeout_ms: int | None = None,
    ) -> Outcomes[str, int]:
        self._called("add_partitions")
        wanted = tuple(topics_of.MoreOfTopic(name=name, total=total) for name, total in totals.items())
        reply = self._metadata.ask(topics_of.AddPartitions(topics=wanted, validate_only=validate_only))
        found = _outcomes(zip(totals, reply.items, strict=True))
        return self._whole(Outcomes({name: totals[name] for name in found.done}, found.errors), partial)

    # Settings.

    def describe_config(
        self, resource: Resource, keys: Iterable[str] = (), *, timeout_ms: int | None = None
    ) -> dict[str, ConfigEntry]:
        self._called("describe_config")
        return self._configs(read_resource(resource), list(keys))

    def describe_configs(
        self,
        resources: Iterable[Resource],
        keys: Iterable[str] = (),
        *,
        partial: bool = False,
        timeout_ms: int | None = None,
    ) -> Outcomes[ConfigResource, dict[str, ConfigEntry]]:
        self._called("describe_configs")
        wanted, names = [read_resource(one) for one in resources], list(keys)
        return self._whole(each(wanted, lambda one: self._configs(one, names)), partial)

    def _configs(self, resource: ConfigResource, keys: Sequence[str]) -> dict[str, ConfigEntry]:
        question = describe.DescribeConfigs(resource_type=resource.type, resource=resource.name)
        return {
            one.name: ConfigEntry(one.name, one.value, one.source, one.default, one.doc, one.is_dynamic)
            for one in self._metadata.answer(question).entries
            if not keys or one.name in keys
        }

    def alter_config(
        self,
        resource: Resource,
        *,
        sets: Mapping[str, object] | None = None,
        deletes: Iterable[str] = (),
        appends: Mapping[str, object] | None = None,
        subtracts: Mapping[str, object] | None = None,
        validate_only: bool = False,
        timeout_ms: int | None = None,
    ) -> None:
        self._called("alter_config")
        wanted = read_resource(resource)
        changes = [settings.ConfigChange(key=key, operation=settings.DELETE) for key in deletes]
        named = ((settings.SET, sets), (settings.APPEND, appends), (settings.SUBTRACT, subtracts))
        for operation, values in named:
            for key, value in (values or {}).items():
                changes.append(settings.ConfigChange(key=key, operation=operation, value=config_text(value)))
        if not changes:
            raise InvalidRequestError(f"nothing to change of {wanted}: give set, delete, append or subtract")
        change = settings.ResourceChange(resource_type=wanted.type, resource=wanted.name, changes=tuple(changes))
        (row,) = self._metadata.ask(settings.AlterConfigs(resources=(change,), validate_only=validate_only)).items
        if (error := error_of(row)) is not None:
            raise error

    # Replicas and leaders.

    def alter_reassignments(
        self,
        targets: Mapping[TopicPartition, Sequence[int] | None],
        *,
        validate_only: bool = False,
        partial: bool = False,
        timeout_ms: int | None = None,
    ) -> Outcomes[TopicPartition, None]:
        """Under way until `finish_reassignments`."""
        self._called("alter_reassignments")
        places = [read_partition(place) for place in targets]
        wanted = tuple(
            reassignments.Reassigned(
                topic=place[0], partition=place[1], replicas=None if brokers is None else tuple(brokers)
            )
            for place, brokers in targets.items()
        )
        request = reassignments.AlterReassignments(partitions=wanted, validate_only=validate_only)
        return self._whole(_outcomes(zip(places, self._metadata.ask(request).items, strict=True)), partial)

    def list_reassignments(
        self, partitions: Iterable[Partitions] | None = None, *, timeout_ms: int | None = None
    ) -> list[Reassignment]:
        self._called("list_reassignments")
        wanted = (
            None if partitions is None else tuple((one.topic, one.partition) for one in read_partitions(partitions))
        )
        return [
            Reassignment(
                partition=TopicPartition(one.topic, one.partition),
                replicas=one.replicas,
                target=one.target,
                adding_replicas=one.adding,
                removing_replicas=one.removing,
                waiting_for=one.waiting_for,
            )
            for one in self._metadata.answer(describe.ListReassignments(partitions=wanted)).reassignments
        ]

    def elect_leaders(
        self,
        partitions: Iterable[Partitions] | None = None,
        *,
        unclean: bool = False,
        validate_only: bool = False,
        partial: bool = False,
        timeout_ms: int | None = None,
    ) -> Outcomes[TopicPartition, None]:
        self._called("elect_leaders")
        wanted = None if partitions is None else read_partitions(partitions)
        reply = self._metadata.ask(_election(wanted, unclean=unclean, validate_only=validate_only))
        names = {f"{place}": place for place in wanted or []}
        return self._whole(
            _outcomes((names.get(row.name) or _place_named(row.name), row) for row in reply.items), partial
        )

    # The cluster.

    def describe_cluster(self, *, timeout_ms: int | None = None) -> ClusterDescription:
        self._called("describe_cluster")
        rows = self._metadata.answer(describe.DescribeBrokers()).brokers
        brokers = tuple(
            BrokerDescription(
                id=row.broker,
                epoch=row.broker_epoch,
                endpoints={name: f"{host}:{port}" for name, _, host, port in row.endpoints},
                rack=row.rack or "",
                is_fenced=row.is_fenced,
            )
            for row in rows
        )
        return ClusterDescription(CLUSTER_ID, 1, brokers, __version__)

    def describe_quorum(self, *, timeout_ms: int | None = None) -> QuorumDescription:
        """Broker 1 is its only controller."""
        self._called("describe_quorum")
        end = self._metadata.offset
        member = QuorumMember(1, directory(1), {LISTENER: "broker-1.mock:9192"}, True, True, end, 0, "")
        return QuorumDescription(1, 1, end, (member,), dict.fromkeys(sorted(self._metadata.image.brokers), end))

    def describe_log_dirs(
        self,
        brokers: Iterable[int] = (),
        topics: Iterable[str] = (),
        *,
        partial: bool = False,
        timeout_ms: int | None = None,
    ) -> Outcomes[int, tuple[LogDir, ...]]:
        """Every replica takes no bytes: there are no records."""
        self._called("describe_log_dirs")
        image, names = self._metadata.image, set(topics)
        wanted = list(brokers) or sorted(number for number, one in image.brokers.items() if not one.fenced)

        def of_broker(broker: int) -> tuple[LogDir, ...]:
            self._check_broker(broker)
            held = [
                ReplicaSize(TopicPartition(topic.name, number), 0, 0)
                for topic in sorted(image.topics.values(), key=lambda one: one.name)
                for number, one in sorted(topic.partitions.items())
                if broker in one.replicas and (not names or topic.name in names)
            ]
            return (LogDir(directory(broker), f"mock-{broker}", None, tuple(held), None),)

        return self._whole(each(wanted, of_broker), partial)

    def move_replicas(
        self,
        broker: int,
        to: Mapping[TopicPartition, UUID | str],
        *,
        partial: bool = False,
        timeout_ms: int | None = None,
    ) -> Outcomes[TopicPartition, None]:
        """A broker has one directory, and everything is in it."""
        self._called("move_replicas")
        self._check_broker(broker)
        working = {f"mock-{broker}": directory(broker)}

        def of_place(place: TopicPartition) -> None:
            directory_named(working, to[place])

        return self._whole(each(list(to), of_place), partial)

    # The end.

    def metrics(self) -> dict[str, float]:
        return {"calls": len(self.calls), "failures": self._failures, "under_way": 0}

    def close(self, timeout: float | None = None) -> None:
        self._is_closed = True

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def at_exit(self, deadline_s: float) -> None:
        """Nothing is under way anywhere."""

    def forked(self) -> None:
        """It belongs to nobody."""

    # Within.

    def _check_broker(self, broker: int) -> None:
        if broker not in self._metadata.image.brokers:
            raise RemoteError(f"there is no broker {broker}", code=ErrorCode.BROKER_ID_NOT_REGISTERED)


_METHODS = frozenset(name for name in vars(Admin) if not name.startswith("_"))


def _outcomes(rows: Iterable[tuple[K, Any]]) -> Outcomes[K, None]:
    found = [(key, error_of(row)) for key, row in rows]
    return Outcomes(
        {key: None for key, error in found if error is None}, {key: error for key, error in found if error is not None}
    )


def _election(wanted: list[TopicPartition] | None, *, unclean: bool, validate_only: bool) -> partitions.ElectLeaders:
    named = None if wanted is None else tuple((place.topic, place.partition) for place in wanted)
    kind = partitions.UNCLEAN if unclean else partitions.PREFERRED
    return partitions.ElectLeaders(kind=kind, partitions=named, validate_only=validate_only)


def _place_named(text: str) -> TopicPartition:
    topic, _, number = text.rpartition("-")
    return TopicPartition(topic, int(number))


def _topic(found: describe.TopicDescription) -> TopicDescription:
    return TopicDescription(
        name=found.name,
        topic_id=found.topic_id,
        is_internal=found.is_internal,
        replication_factor=found.replication_factor,
        configs=dict(found.configs),
        partitions=tuple(
            PartitionDescription(
                partition=one.partition,
                leader=one.leader if one.leader >= 0 else None,
                leader_epoch=one.leader_epoch,
                replicas=one.replicas,
                isr=one.isr,
                eligible_leader_replicas=one.eligible,
                offline_replicas=one.offline_replicas,
                adding_replicas=one.adding,
                removing_replicas=one.removing,
                min_isr=one.min_isr,
                state=one.state,
                advice=one.advice,
            )
            for one in found.partitions
        ),
    )
