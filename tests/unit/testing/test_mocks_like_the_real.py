"""One program against the mocks and against a cluster in memory: what it sees must be the same."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import tidelog
from tidelog.model.errors import TidelogError
from tidelog.testing import MemoryCluster, MockAdmin, MockConsumer, MockProducer

P0, P1 = ("orders", 0), ("orders", 1)
OPTIONS: dict[str, Any] = {"group": "billing", "auto_offset_reset": "earliest", "enable_auto_commit": False}


def seen(job: Callable[[], Any]) -> Any:
    """A result, or the code of an error."""
    try:
        return job()
    except TidelogError as error:
        return error.code.name


def administered(admin: Any) -> list[Any]:
    made = admin.create_topic("orders", partitions=2, replication_factor=3, configs={"retention.ms": 60_000})
    found: list[Any] = [made.name, made.partitions, made.replication_factor, made.note]
    found.append(seen(lambda: admin.create_topic("orders")))
    found.append(seen(lambda: admin.create_topic("x", replication_factor=9)))
    found.append(seen(lambda: admin.create_topic("bad name")))
    found.append([(one.name, one.partitions, one.is_internal) for one in admin.list_topics()])
    described = admin.describe_topic("orders")
    found.append((dict(described.configs), described.replication_factor, [one.state for one in described.partitions]))
    found.append(admin.describe_config(("topic", "orders"), ["retention.ms", "cleanup.policy"]))
    found.append(seen(lambda: admin.alter_config(("topic", "orders"), sets={"retention.ms": "soon"})))
    found.append(seen(lambda: admin.alter_config(("topic", "orders"), sets={"cleanup.policy": "compact"})))
    found.append(seen(lambda: admin.add_partitions({"orders": 1})))
    found.append(admin.add_partitions({"orders": 3}).all())
    found.append(seen(lambda: admin.describe_group("nobody")))
    found.append(seen(lambda: admin.delete_group("nobody")))
    found.append(admin.alter_group_offsets("billing", {tidelog.TopicPartition(*P0): 0}).all())
    found.append([(row.partition, row.committed, row.lag) for row in admin.group_lag("billing")])
    found.append(seen(lambda: admin.elect_leaders([P0])))
    found.append(seen(lambda: admin.delete_topic("nothing")))
    found.append(admin.list_reassignments())
    return found


def test_admins_see_the_same() -> None:
    with MemoryCluster() as cluster, tidelog.Admin(cluster.bootstrap) as real, MockAdmin() as mock:
        assert administered(mock) == administered(real)


def produced(producer: Any) -> list[Any]:
    found = [producer.send("orders", b"1", key="a").result(30)[:3]]
    found.append(producer.send("orders", b"2", key=b"b", partition=1).result(30)[:3])
    found.append(producer.send("orders", "3", key="a", headers=[("h", None)], timestamp_ms=7).result(30)[:4:3])
    found.append(seen(lambda: producer.send("orders", b"x", partition=9)))
    found.append(seen(lambda: producer.send("orders", bytes(2 << 20))))
    bulk = producer.send_many("orders", values=[b"4", b"5"], partition=0).result(30)
    found.append((bulk.count, sorted({one.partition for one in bulk.ranges})))
    found.append(producer.partitions_for("orders"))
    producer.flush(30)
    producer.close()
    found.append(seen(lambda: producer.send("orders", b"x")))
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
        found += consumer.poll(200)
    return sorted((one.topic, one.partition, one.offset, one.key, one.value, one.headers) for one in found)


def consumed(consumer: Any) -> list[Any]:
    told: list[Any] = []
    found: list[Any] = [seen(lambda: consumer.poll(0))]
    consumer.subscribe(
        ["orders"],
        on_assigned=lambda places: told.append(("assigned", sorted(places))),
        on_revoked=lambda places: told.append(("revoked", sorted(places))),
    )
    found.append(seen(lambda: consumer.assign([P0])))
    found.append(consumer.assignment())
    found.append(polled(consumer, 4))
    found.append((consumer.position(P0), consumer.position(P1)))
    found.append(consumer.committed(P0, P1))
    consumer.commit({tidelog.TopicPartition(*P0): 1})
    found.append(consumer.committed(P0, P1)[tidelog.TopicPartition(*P0)])
    consumer.commit()
    found.append({place: one.offset for place, one in consumer.committed(P0, P1).items()})
    found.append(seen(lambda: consumer.commit({tidelog.TopicPartition("orders", 9): 1})))
    found.append(seen(lambda: consumer.commit({tidelog.TopicPartition(*P0): -1})))
    found.append(seen(lambda: consumer.poll(0, 0)))
    committed: list[Any] = []
    consumer.commit_async(on_commit=lambda offsets, error: committed.append((offsets, error)))
    end_s = time.monotonic() + 30
    while not committed and time.monotonic() < end_s:
        consumer.poll(10)
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
    found.append(seen(lambda: consumer.position(("orders", 9))))
    found.append(consumer.partitions_for("orders"))
    consumer.wakeup()
    found.append(seen(lambda: consumer.poll(0)))
    consumer.close()
    found.append(seen(lambda: consumer.poll(0)))
    return [*found, told]


class Noting:
    """An interceptor that leaves out a record, fails once, and notes what it hears."""

    def __init__(self) -> None:
        self.heard: list[Any] = []

    def on_consume(self, records: list[Any]) -> list[Any]:
        return [record for record in records if record.value != b"1"]

    def on_commit(self, offsets: Any) -> None:
        self.heard.append({place: told.offset for place, told in offsets.items()})
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
