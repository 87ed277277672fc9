"""Kafka Connect, Kafka Streams and MirrorMaker 2 run against real clusters, through a kill -9 of a node."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from kafka_tools import Tools, java_command, needs_tools, running
from support.clusters.waiting import until

import tidelog
from tidelog.testing import LocalCluster

pytestmark = [pytest.mark.interop, pytest.mark.cluster, pytest.mark.timeout(400), needs_tools]

HERE = Path(__file__).parent
DEADLINE_S = 150.0


@pytest.fixture
def cluster() -> Iterator[LocalCluster]:
    with LocalCluster(nodes=3) as made:
        yield made


def properties(path: Path, **settings: object) -> str:
    lines = [f"{key.replace('__', '-').replace('_', '.')}={value}\n" for key, value in settings.items()]
    path.write_text("".join(lines))
    return str(path)


def values(cluster: LocalCluster, topic: str) -> list[tuple[bytes | None, bytes | None]]:
    """(key, value) of all records, by our own consumer."""
    with tidelog.Admin(cluster.bootstrap) as admin:
        partitions = len(admin.describe_topic(topic).partitions)
    places = [tidelog.TopicPartition(topic, number) for number in range(partitions)]
    with tidelog.Consumer(cluster.bootstrap) as consumer:
        consumer.assign(places)
        consumer.seek_to_beginning()
        total = sum(consumer.end_offsets(*places).values()) - sum(consumer.beginning_offsets(*places).values())
        found: list[tuple[bytes | None, bytes | None]] = []

        def all_read() -> bool:
            found.extend((record.key, record.value) for record in consumer.poll(1_000))
            return len(found) >= total

        until(all_read, f"{total} records of {topic}", timeout_s=60)
    return found


def test_connect_copies_a_file_to_a_topic_and_back_while_a_node_is_killed(
    cluster: LocalCluster, tmp_path: Path
) -> None:
    source, sink = tmp_path / "source.txt", tmp_path / "sink.txt"
    lines = [f"line {number}" for number in range(500)]
    source.write_text("".join(f"{line}\n" for line in lines[:250]))
    Tools(cluster.kafka_bootstrap).create("copied", partitions=1)
    converter = "org.apache.kafka.connect.storage.StringConverter"
    worker = properties(
        tmp_path / "worker.properties",
        bootstrap_servers=cluster.kafka_bootstrap,
        key_converter=converter,
        value_converter=converter,
        offset_storage_file_filename=tmp_path / "offsets",
        offset_flush_interval_ms=500,
        listeners="http://127.0.0.1:0",
        plugin_discovery="only_scan",
    )
    reader = properties(
        tmp_path / "reader.properties",
        name="reader",
        connector_class="org.apache.kafka.connect.file.FileStreamSourceConnector",
        tasks_max=1,
        file=source,
        topic="copied",
    )
    writer = properties(
        tmp_path / "writer.properties",
        name="writer",
        connector_class="org.apache.kafka.connect.file.FileStreamSinkConnector",
        tasks_max=1,
        file=sink,
        topics="copied",
    )
    command = [*java_command("org.apache.kafka.connect.cli.ConnectStandalone"), worker, reader, writer]

    def is_copied(count: int) -> bool:
        return sink.exists() and set(sink.read_text().splitlines()) == set(lines[:count])

    with running(command, tmp_path / "connect.log") as process:
        until(lambda: process.poll() is not None or is_copied(250), "the first half", timeout_s=DEADLINE_S)
        assert process.poll() is None, (tmp_path / "connect.log").read_text()[-4000:]
        cluster.kill(1)
        with source.open("a") as file:
            file.write("".join(f"{line}\n" for line in lines[250:]))
        until(lambda: is_copied(500), "all lines", timeout_s=DEADLINE_S)
        cluster.start(1)
    assert sorted(value.decode() for _, value in values(cluster, "copied") if value is not None) == sorted(lines)


def test_streams_counts_words_with_its_own_topics_while_a_node_is_killed(cluster: LocalCluster, tmp_path: Path) -> None:
    tools = Tools(cluster.kafka_bootstrap)
    tools.create("lines", partitions=3)
    tools.create("counts", partitions=3)
    command = [
        *java_command(str(HERE / "WordCount.java")),
        *(cluster.kafka_bootstrap, "words", str(tmp_path / "state"), "lines", "counts"),
    ]

    def say(count: int) -> None:
        with tidelog.Producer(cluster.bootstrap) as producer:
            for number in range(count):
                producer.send("lines", f"sea tide{number % 5}".encode(), key=b"%d" % number)
            producer.flush(60)

    def counted() -> dict[bytes | None, bytes | None]:
        return dict(values(cluster, "counts"))

    def wanted(total: int) -> dict[bytes, bytes]:
        return {b"sea": b"%d" % total} | {b"tide%d" % number: b"%d" % (total // 5) for number in range(5)}

    say(100)
    with running(command, tmp_path / "streams.log") as process:
        until(lambda: process.poll() is not None or counted() == wanted(100), "the first counts", timeout_s=DEADLINE_S)
        assert process.poll() is None, (tmp_path / "streams.log").read_text()[-4000:]
        cluster.kill(2)
        say(100)
        until(lambda: counted() == wanted(200), "all counts", timeout_s=DEADLINE_S)
        cluster.start(2)


def test_mirror_maker_copies_topics_with_their_settings_and_group_offsets(tmp_path: Path) -> None:
    with LocalCluster(nodes=1) as here, LocalCluster(nodes=1) as there:
        with tidelog.Admin(here.bootstrap) as admin:
            admin.create_topic("orders", partitions=2, replication_factor=1, configs={"retention.ms": "3600000"})
        with tidelog.Producer(here.bootstrap) as producer:
            for number in range(200):
                producer.send("orders", b"%d" % number, key=b"%d" % number)
            producer.flush(60)
        with tidelog.Consumer(here.bootstrap, group="readers", auto_offset_reset="earliest") as consumer:
            consumer.subscribe("orders")
            read: list[bytes | None] = []

            def all_read() -> bool:
                read.extend(record.value for record in consumer.poll(1_000))
                return len(read) >= 200

            until(all_read, "all orders", timeout_s=60)
            consumer.commit()
        settings = {
            "clusters": "here, there",
            "here.bootstrap.servers": here.kafka_bootstrap,
            "there.bootstrap.servers": there.kafka_bootstrap,
            "here->there.enabled": "true",
            "there->here.enabled": "false",
            "here->there.topics": "orders",
            "replication.factor": "1",
            "checkpoints.topic.replication.factor": "1",
            "heartbeats.topic.replication.factor": "1",
            "offset-syncs.topic.replication.factor": "1",
            "offset.storage.replication.factor": "1",
            "status.storage.replication.factor": "1",
            "config.storage.replication.factor": "1",
            "emit.checkpoints.interval.seconds": "1",
            "sync.group.offsets.enabled": "true",
            "sync.group.offsets.interval.seconds": "1",
            "refresh.topics.interval.seconds": "5",
            "offset.lag.max": "0",
        }
        path = tmp_path / "mm2.properties"
        path.write_text("".join(f"{key} = {value}\n" for key, value in settings.items()))
        command = [*java_command("org.apache.kafka.connect.mirror.MirrorMaker"), str(path)]

        def is_mirrored() -> bool:
            with tidelog.Admin(there.bootstrap) as admin:
                if "here.orders" not in {topic.name for topic in admin.list_topics()}:
                    return False
            return len(values(there, "here.orders")) >= 200

        with running(command, tmp_path / "mm2.log") as process:
            until(lambda: process.poll() is not None or is_mirrored(), "the mirrored topic", timeout_s=DEADLINE_S)
            assert process.poll() is None, (tmp_path / "mm2.log").read_text()[-4000:]
            mirrored = values(there, "here.orders")
        assert sorted(mirrored, key=str) == sorted(values(here, "orders"), key=str)
        with tidelog.Admin(there.bootstrap) as admin:
            described = admin.describe_topic("here.orders")
        assert (len(described.partitions), described.configs["retention.ms"]) == (2, "3600000")
