"""A program and a table of wrong calls, against the mocks and against a cluster in memory: both see the same. So a
handler that a test with a mock proves also works."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any
from uuid import UUID

import pytest

import tidelog
from tidelog.testing import MemoryCluster, MockAdmin, MockConsumer, MockProducer

P0, P1, P9 = ("orders", 0), ("orders", 1), ("orders", 9)
Call = Callable[[Any], Any]


@pytest.fixture(scope="module")
def cluster() -> Iterator[MemoryCluster]:
    with MemoryCluster(brokers=3) as started:
        with tidelog.Admin(started.bootstrap) as admin, tidelog.Producer(started.bootstrap) as producer:
            admin.create_topic("orders", partitions=2)
            for number in range(2):
                producer.send("orders", b"%d" % number, partition=0).result(60)
        yield started


def outcome(call: Call, client: Any) -> Any:
    """The class of the error that programs catch, or the result."""
    try:
        return call(client)
    except Exception as error:
        names = {name for name in tidelog.errors.__all__ if name != "ErrorCode"}
        public = [kind.__name__ for kind in type(error).__mro__ if kind.__name__ in names]
        return public[0] if public else type(error).__name__


ADMIN: dict[str, Call] = {
    "describe a missing topic": lambda admin: admin.describe_topic("none"),
    "delete a missing topic": lambda admin: admin.delete_topic("none"),
    "create an existing topic": lambda admin: admin.create_topic("orders"),
    "create with a bad name": lambda admin: admin.create_topic("bad name"),
    "create with too many replicas": lambda admin: admin.create_topic("x", replication_factor=9),
    "create from one str": lambda admin: admin.create_topics("ab"),
    "delete one str": lambda admin: admin.delete_topics("ab"),
    "describe one str": lambda admin: admin.describe_topics("ab"),
    "describe groups of one str": lambda admin: admin.describe_groups("ab"),
    "delete groups of one str": lambda admin: admin.delete_groups("ab"),
    "describe one key": lambda admin: admin.describe_config(("topic", "orders"), "retention.ms"),
    "delete one key": lambda admin: admin.alter_config(("topic", "orders"), deletes="retention.ms"),
    "list groups of one state": lambda admin: admin.list_groups(states="empty"),
    "remove the members of one str": lambda admin: admin.remove_members("g", member_ids="ab"),
    "alter a missing topic": lambda admin: admin.alter_config(("topic", "none"), sets={"retention.ms": 1}),
    "alter to a wrong value": lambda admin: admin.alter_config(("topic", "orders"), sets={"retention.ms": "x"}),
    "alter nothing": lambda admin: admin.alter_config(("topic", "orders")),
    "describe a str as resource": lambda admin: admin.describe_config("cluster"),
    "fewer partitions": lambda admin: admin.add_partitions({"orders": 1}),
    "partitions of a missing topic": lambda admin: admin.add_partitions({"none": 3}),
    "elect of nothing": lambda admin: admin.elect_leaders([]),
    "elect where it leads": lambda admin: admin.elect_leaders([P1]),
    "elect of a missing topic": lambda admin: admin.elect_leaders([("none", 0)]),
    "reassign a missing topic": lambda admin: admin.alter_reassignments({("none", 0): [1]}),
    "cancel no reassignment": lambda admin: admin.alter_reassignments({P0: None}),
    "list reassignments of nothing": lambda admin: admin.list_reassignments([]),
    "offsets of nothing": lambda admin: admin.list_offsets([]),
    "offsets of a missing partition": lambda admin: admin.list_offsets([P9]),
    "offsets at no time": lambda admin: admin.list_offsets(["orders"], at="x"),
    "delete records of nothing": lambda admin: admin.delete_records({}),
    "delete records beyond the end": lambda admin: admin.delete_records({P0: 99}),
    "delete records of a missing partition": lambda admin: admin.delete_records({P9: 1}),
    "delete records before no offset": lambda admin: admin.delete_records({P0: -1}),
    "delete records before no time": lambda admin: admin.delete_records_by_time(["orders"], "x"),
    "describe a group without a name": lambda admin: admin.describe_group(""),
    "describe a missing group": lambda admin: admin.describe_group("none"),
    "delete a missing group": lambda admin: admin.delete_group("none"),
    "offsets of a missing group": lambda admin: admin.group_offsets("none"),
    "group offsets of nothing": lambda admin: admin.group_offsets("g", []),
    "commit a negative offset": lambda admin: admin.alter_group_offsets("g", {P0: -5}),
    "commit nothing": lambda admin: admin.alter_group_offsets("g", {}),
    "commit for a missing topic": lambda admin: admin.alter_group_offsets("g", {("none", 0): 1}),
    "reset without a commit": lambda admin: admin.reset_group_offsets("none", to="earliest"),
    "reset to nothing": lambda admin: admin.reset_group_offsets("g", topics="orders"),
    "reset a table and its topics": lambda admin: admin.reset_group_offsets(
        "g", to={P0: 1, P1: 1}, topics="orders", dry_run=True
    ),
    "reset to two targets": lambda admin: admin.reset_group_offsets("g", to="earliest", shift_by=1),
    "remove nobody": lambda admin: admin.remove_members("g"),
    "remove a missing member": lambda admin: admin.remove_members("g", member_ids=["nobody"]),
    "brokers of nothing": lambda admin: admin.describe_brokers([]),
    "log directories of nothing": lambda admin: dict(admin.describe_log_dirs([])),
    "drain a missing broker": lambda admin: admin.drain_broker(77),
    "unregister a missing broker": lambda admin: admin.unregister_broker(77),
    "unregister a live broker": lambda admin: admin.unregister_broker(1),
    "remove a missing voter": lambda admin: admin.remove_voter(77, UUID(int=7)),
    "a negative timeout": lambda admin: admin.list_topics(timeout=-1),
}


def test_mock_admin_answers_misuse_as_the_admin(cluster: MemoryCluster) -> None:
    with tidelog.Admin(cluster.bootstrap, default_api_timeout_ms=3_000) as real, MockAdmin() as mock:
        mock.create_topic("orders", partitions=2)
        mock.set_offsets(P0, end=2)
        for admin in (real, mock):
            admin.alter_group_offsets("g", {tidelog.TopicPartition(*P0): 1})
        differences = {
            name: (outcome(call, mock), outcome(call, real))
            for name, call in ADMIN.items()
            if outcome(call, mock) != outcome(call, real)
        }
        assert differences == {}
        assert mock.metrics()["failures"] > 0


def raise_in_callback(method: str) -> Call:
    def call(consumer: Any) -> Any:
        raised: list[str] = []

        def on_assigned(_partitions: object) -> None:
            job: Call = (lambda client: client.close()) if method == "close" else (lambda client: client.poll(0))
            raised.append(outcome(job, consumer))

        consumer.subscribe("orders", on_assigned=on_assigned)
        while not raised:
            consumer.poll(0.1)
        consumer.unsubscribe()
        return raised

    return call


CONSUMER: dict[str, Call] = {
    "poll without a subscription": lambda consumer: consumer.poll(0),
    "assign nothing and poll": lambda consumer: (consumer.assign([]), consumer.poll(0)),
    "assign a missing topic": lambda consumer: consumer.assign([("none", 0)]),
    "assign a missing partition": lambda consumer: consumer.assign([P9]),
    "assign what is no partition": lambda consumer: consumer.assign(["orders"]),
    "subscribe to nothing": lambda consumer: consumer.subscribe([]),
    "subscribe to a wrong pattern": lambda consumer: consumer.subscribe(pattern="("),
    "poll for a negative time": lambda consumer: consumer.poll(-1),
    "poll for no records": lambda consumer: consumer.poll(0, 0),
    "close in a negative time": lambda consumer: consumer.close(-1),
    "commit for a missing topic": lambda consumer: consumer.commit({("none", 0): 1}),
    "commit for a missing partition": lambda consumer: consumer.commit({P9: 1}),
    "commit a negative offset": lambda consumer: consumer.commit({P0: -1}),
    "commit asynchronously for a missing topic": lambda consumer: consumer.commit_async({("none", 0): 1}),
    "committed of a missing topic": lambda consumer: consumer.committed(("none", 0)),
    "committed of a missing partition": lambda consumer: consumer.committed(P9),
    "end of a missing topic": lambda consumer: consumer.end_offsets(("none", 0)),
    "end of a missing partition": lambda consumer: consumer.end_offsets(P9),
    "partitions of a missing topic": lambda consumer: consumer.partitions_for("none"),
    "position of what is not assigned": lambda consumer: consumer.position(P0),
    "seek of what is not assigned": lambda consumer: consumer.seek(P0, 1),
    "pause of what is not assigned": lambda consumer: consumer.pause(P0),
    "times of no time": lambda consumer: consumer.offsets_for_times({P0: "x"}),
    "seek to times and partitions": lambda consumer: consumer.seek_to_time({P0: 1}, P0),
    "a negative timeout": lambda consumer: consumer.end_offsets(P0, timeout=-1),
    "pause all": lambda consumer: (consumer.assign([P0]), consumer.pause(), consumer.paused(), consumer.unsubscribe()),
    "close in a callback": raise_in_callback("close"),
    "poll in a callback": raise_in_callback("poll"),
    "names of the metrics": lambda consumer: sorted(name for name in consumer.metrics() if "." not in name),
    "use after close": lambda consumer: (consumer.close(), consumer.poll(0)),
}


def test_mock_consumer_answers_misuse_as_the_consumer(cluster: MemoryCluster) -> None:
    options: dict[str, Any] = {"group": "misuse", "default_api_timeout_ms": 5_000}
    with tidelog.Consumer(cluster.bootstrap, **options) as real, MockConsumer(**options) as mock:
        mock.add_topic("orders", 2)
        assert {name: outcome(call, mock) for name, call in CONSUMER.items()} == {
            name: outcome(call, real) for name, call in CONSUMER.items()
        }


GROUP = tidelog.GroupMetadata("g", "m", 1)
PRODUCER: dict[str, Call] = {
    "a topic that is no str": lambda producer: producer.send(3, b"x"),
    "a topic without a name": lambda producer: producer.send("", b"x"),
    "a value that is no bytes": lambda producer: producer.send("orders", 3),
    "a key that is no bytes": lambda producer: producer.send("orders", b"x", key=3),
    "a missing partition": lambda producer: producer.send("orders", b"x", partition=9),
    "a partition that is no number": lambda producer: producer.send("orders", b"x", partition="0"),
    "headers that are no pairs": lambda producer: producer.send("orders", b"x", headers=["ab"]),
    "a negative timestamp": lambda producer: producer.send("orders", b"x", timestamp_ms=-1),
    "too large": lambda producer: producer.send("orders", bytes(2 << 20)),
    "a callback that is no function": lambda producer: producer.send("orders", b"x", on_delivery=3),
    "send_many of a str": lambda producer: producer.send_many("orders", "ab"),
    "send_many of nothing named": lambda producer: producer.send_many("orders"),
    "send_many with unequal columns": lambda producer: producer.send_many("orders", values=[b"1"], keys=[]),
    "init without an id": lambda producer: producer.init_transactions(),
    "begin without an id": lambda producer: producer.begin_transaction(),
    "commit without an id": lambda producer: producer.commit_transaction(),
    "abort without an id": lambda producer: producer.abort_transaction(),
    "prepare without an id": lambda producer: producer.prepare_transaction(),
    "a block without an id": lambda producer: producer.transaction().__enter__(),
    "offsets without an id": lambda producer: producer.send_offsets({P0: 1}, GROUP),
    "a token without an id": lambda producer: producer.last_token(),
    "leave what was not joined": lambda producer: producer.leave_transaction(),
    "join nothing": lambda producer: producer.join_transaction(""),
    "init in a negative time": lambda producer: producer.init_transactions(timeout=-1),
    "flush in a negative time": lambda producer: producer.flush(-1),
    "close in a negative time": lambda producer: producer.close(-1),
    "partitions in a negative time": lambda producer: producer.partitions_for("orders", -1),
    "names of the metrics": lambda producer: sorted(producer.metrics()),
    "records of send_many": lambda producer: (
        producer.send_many("orders", values=[b"1", b"2"], partition=0).result(60).count
    ),
    "ranges of send_many": lambda producer: [
        (row.partition, row.count)
        for row in producer.send_many("orders", values=[b"1", b"2"], partition=0).result(60).ranges
    ],
    "send after close": lambda producer: (producer.close(), producer.send("orders", b"x")),
    "partitions after close": lambda producer: producer.partitions_for("orders"),
}


def test_mock_producer_answers_misuse_as_the_producer(cluster: MemoryCluster) -> None:
    with tidelog.Producer(cluster.bootstrap) as real, MockProducer(partitions=2) as mock:
        assert {name: outcome(call, mock) for name, call in PRODUCER.items()} == {
            name: outcome(call, real) for name, call in PRODUCER.items()
        }


# Right calls.


OPTIONS: dict[str, Any] = {"group": "billing", "auto_offset_reset": "earliest", "enable_auto_commit": False}


def administered(admin: Any) -> list[Any]:
    made = admin.create_topic("orders", partitions=2, replication_factor=3, configs={"retention.ms": 60_000})
    found: list[Any] = [made.name, made.partitions, made.replication_factor, made.note]
    found.append([(one.name, one.partitions, one.is_internal) for one in admin.list_topics()])
    described = admin.describe_topic("orders")
    found.append((dict(described.configs), described.replication_factor, [one.state for one in described.partitions]))
    found.append(admin.describe_config(("topic", "orders"), ["retention.ms", "cleanup.policy"]))
    found.append(admin.alter_config(("topic", "orders"), sets={"cleanup.policy": "compact"}))
    found.append(admin.add_partitions({"orders": 3}).all())
    found.append(admin.alter_group_offsets("billing", {tidelog.TopicPartition(*P0): 0}).all())
    found.append([(row.partition, row.committed, row.lag) for row in admin.group_lag("billing")])
    found.append(admin.list_reassignments())
    return found


def test_admins_see_the_same() -> None:
    with MemoryCluster() as cluster, tidelog.Admin(cluster.bootstrap) as real, MockAdmin() as mock:
        assert administered(mock) == administered(real)


def produced(producer: Any) -> list[Any]:
    found = [producer.send("orders", b"1", key="a").result(30)[:3]]
    found.append(producer.send("orders", b"2", key=b"b", partition=1).result(30)[:3])
    found.append(producer.send("orders", "3", key="a", headers=[("h", None)], timestamp_ms=7).result(30)[:4:3])
    bulk = producer.send_many("orders", values=[b"4", b"5"], partition=0).result(30)
    found.append((bulk.count, sorted({one.partition for one in bulk.ranges})))
    found.append(producer.partitions_for("orders"))
    producer.flush(30)
    producer.close()
    return found


def test_producers_see_the_same() -> None:
    with MemoryCluster() as cluster:
        with tidelog.Admin(cluster.bootstrap) as admin:
            admin.create_topic("orders", partitions=2, replication_factor=3)
        assert produced(MockProducer(partitions=2)) == produced(tidelog.Producer(cluster.bootstrap))


def polled(consumer: Any, count: int) -> list[Any]:
    """Until so many are there."""
    found: list[Any] = []
    end_s = time.monotonic() + 30
    while len(found) < count and time.monotonic() < end_s:
        found += consumer.poll(0.2)
    return sorted((one.topic, one.partition, one.offset, one.key, one.value, one.headers) for one in found)


def consumed(consumer: Any) -> list[Any]:
    reported: list[Any] = []
    found: list[Any] = []
    consumer.subscribe(
        ["orders"],
        on_assigned=lambda places: reported.append(("assigned", sorted(places))),
        on_revoked=lambda places: reported.append(("revoked", sorted(places))),
    )
    found.append(outcome(lambda client: client.assign([P0]), consumer))
    found.append(consumer.assignment())
    found.append(polled(consumer, 4))
    found.append((consumer.position(P0), consumer.position(P1)))
    found.append(consumer.committed(P0, P1))
    consumer.commit({tidelog.TopicPartition(*P0): 1})
    found.append(consumer.committed(P0, P1)[tidelog.TopicPartition(*P0)])
    consumer.commit()
    found.append({place: one.offset for place, one in consumer.committed(P0, P1).items()})
    committed: list[Any] = []
    consumer.commit_async(on_commit=lambda error, offsets: committed.append((offsets, error)))
    end_s = time.monotonic() + 30
    while not committed and time.monotonic() < end_s:
        consumer.poll(0.01)
    found.append(committed)
    consumer.seek(P0, 1)
    consumer.pause(P1)
    found.append((consumer.paused(), polled(consumer, 2)))
    consumer.resume(P1)
    consumer.seek_to_beginning(P1)
    found.append(polled(consumer, 1))
    consumer.seek_to_end()
    found.append((consumer.position(P0), consumer.position(P1)))
    consumer.seek_to_time(1_001)
    found.append((consumer.position(P0), consumer.position(P1)))
    found += [consumer.beginning_offsets(P0), consumer.end_offsets(P0, P1)]
    found.append(consumer.offsets_for_times({tidelog.TopicPartition(*P0): 1_001, tidelog.TopicPartition(*P1): 5_000}))
    found.append(consumer.partitions_for("orders"))
    consumer.wakeup()
    found.append(outcome(lambda client: client.poll(0), consumer))
    consumer.close()
    return [*found, reported]


class Noting:
    """An interceptor that leaves out a record, fails once, and notes what it hears."""

    def __init__(self) -> None:
        self.heard: list[Any] = []

    def on_consume(self, records: list[Any]) -> list[Any]:
        return [record for record in records if record.value != b"1"]

    def on_commit(self, error: Any, offsets: Any) -> None:
        self.heard.append({place: reported.offset for place, reported in offsets.items()})
        raise RuntimeError("of the program")

    def close(self) -> None:
        self.heard.append("closed")


def intercepted(consumer: Any, noting: Noting) -> list[Any]:
    consumer.assign([P0])
    found = [one[2:5:2] for one in polled(consumer, 2)]
    consumer.commit()
    consumer.close()
    return [*found, *noting.heard]


RECORDS: list[tuple[int, bytes, int]] = [(0, b"0", 1_000), (0, b"1", 1_001), (0, b"2", 1_002), (1, b"3", 1_003)]


def test_consumers_see_the_same() -> None:
    mock = MockConsumer(**OPTIONS)
    mock.add_topic("orders", partitions=2)
    for partition, value, stamp in RECORDS:
        mock.add_record("orders", value, key=b"k", partition=partition, timestamp_ms=stamp)
    with MemoryCluster() as cluster:
        with tidelog.Admin(cluster.bootstrap) as admin:
            admin.create_topic("orders", partitions=2, replication_factor=3)
        with tidelog.Producer(cluster.bootstrap) as producer:
            for partition, value, stamp in RECORDS:
                producer.send("orders", value, key=b"k", partition=partition, timestamp_ms=stamp)
        real = consumed(tidelog.Consumer(cluster.bootstrap, **OPTIONS))
        noting = [Noting(), Noting()]
        others = [{**OPTIONS, "group": "others", "interceptors": [one]} for one in noting]
        wanted = intercepted(tidelog.Consumer(cluster.bootstrap, **others[0]), noting[0])
    assert consumed(mock) == real
    second = MockConsumer(**others[1])
    for partition, value, stamp in RECORDS:
        second.add_record("orders", value, key=b"k", partition=partition, timestamp_ms=stamp)
    assert intercepted(second, noting[1]) == wanted
    assert wanted[-2:] == [{P0: 3}, "closed"]
