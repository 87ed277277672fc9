"""Kafka Streams with exactly_once_v2, and Kafka Connect with exactly-once sources, through kill -9 of a node and of the
framework itself."""

from __future__ import annotations

import http.client
import json
import signal
import subprocess
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
from kafka_tools import Tools, java_command, needs_tools, running
from support.clusters.waiting import until
from support.interop.reading import read_values

import tidelog
from tidelog.server.local_nodes import free_ports
from tidelog.testing import LocalCluster

pytestmark = [pytest.mark.interop, pytest.mark.cluster, pytest.mark.timeout(500), needs_tools]

HERE = Path(__file__).parent
DEADLINE_S = 180.0
LINES = 100


@pytest.fixture
def cluster() -> Iterator[LocalCluster]:
    with LocalCluster(nodes=3) as made:
        yield made


class WordCounts:
    """Lines for the program, and all counts that it has ever committed."""

    def __init__(self, cluster: LocalCluster) -> None:
        self.cluster = cluster
        self.total = 0

    def say(self) -> None:
        with tidelog.Producer(self.cluster.bootstrap) as producer:
            for number in range(LINES):
                producer.send("lines", f"sea tide{number % 5}".encode(), key=b"%d" % number)
            producer.flush(60)
        self.total += LINES

    def read(self) -> list[tuple[bytes, int]]:
        """(word, count), in the order of each partition."""
        places = [("counts", number) for number in range(3)]
        rows: list[tuple[bytes, int]] = []
        with tidelog.Consumer(
            self.cluster.bootstrap, isolation="read_committed", auto_offset_reset="earliest"
        ) as consumer:
            consumer.assign(places)
            ends = consumer.end_offsets(*places)

            def is_read() -> bool:
                for record in consumer.poll(0.5):
                    assert record.key is not None
                    assert record.value is not None
                    rows.append((record.key, int(record.value)))
                return all(consumer.position(place) >= end for place, end in ends.items())

            until(is_read, "the end of the counts", timeout_s=60)
        return rows

    def until_counted(self, process: subprocess.Popen[bytes], out: Path) -> None:
        wanted = {b"sea": self.total} | {b"tide%d" % number: self.total // 5 for number in range(5)}

        def is_counted() -> bool:
            return process.poll() is not None or dict(self.read()) == wanted

        until(is_counted, f"{self.total} lines", timeout_s=DEADLINE_S)
        assert process.poll() is None, out.read_text()[-4000:]


def pause(cluster: LocalCluster, process: subprocess.Popen[bytes]) -> None:
    """In the middle of a transaction, until it has timed out."""
    with tidelog.Admin(cluster.bootstrap) as admin:
        until(lambda: list(admin.list_transactions(states=["Ongoing"])), "an open transaction")
        process.send_signal(signal.SIGSTOP)
        until(lambda: not list(admin.list_transactions(states=["Ongoing"])), "its end")
        process.send_signal(signal.SIGCONT)


@pytest.mark.requirement("a:H-50", "a:X3-36")
def test_streams_counts_each_word_exactly_once_through_a_pause_and_kills(cluster: LocalCluster, tmp_path: Path) -> None:
    """A pause that is longer than the timeout of its transaction does not end Streams."""
    tools = Tools(cluster.kafka_bootstrap)
    tools.create("lines", partitions=3)
    tools.create("counts", partitions=3)
    command = [
        *java_command(str(HERE / "WordCount.java")),
        *(cluster.kafka_bootstrap, "words", str(tmp_path / "state"), "lines", "counts", "exactly_once_v2"),
    ]
    words = WordCounts(cluster)
    first, second = tmp_path / "first.log", tmp_path / "second.log"
    words.say()
    with running(command, first) as process:
        words.until_counted(process, first)
        words.say()
        pause(cluster, process)
        words.until_counted(process, first)
        cluster.kill(2)
        words.say()
        words.until_counted(process, first)
        cluster.start(2)
        words.say()
        process.send_signal(signal.SIGKILL)  # in the middle of a transaction, probably
    words.say()
    with running(command, second) as process:
        words.until_counted(process, second)
    rising: dict[bytes, list[int]] = {}
    for word, count in words.read():
        rising.setdefault(word, []).append(count)
    assert all(seen == sorted(set(seen)) for seen in rising.values()), "no count is written twice, none goes back"


def request(port: int, method: str, path: str, document: object = None) -> tuple[int, bytes]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
    try:
        body = None if document is None else json.dumps(document)
        connection.request(method, path, body, {"Content-Type": "application/json"})
        response = connection.getresponse()
        return response.status, response.read()
    finally:
        connection.close()


def worker_settings(cluster: LocalCluster, port: int) -> dict[str, object]:
    converter = "org.apache.kafka.connect.storage.StringConverter"
    return {
        "bootstrap.servers": cluster.kafka_bootstrap,
        "group.id": "connect",
        "exactly.once.source.support": "enabled",
        "key.converter": converter,
        "value.converter": converter,
        "config.storage.topic": "connect-configs",
        "offset.storage.topic": "connect-offsets",
        "status.storage.topic": "connect-status",
        "config.storage.replication.factor": 3,
        "offset.storage.replication.factor": 3,
        "status.storage.replication.factor": 3,
        "offset.storage.partitions": 3,
        "listeners": f"http://127.0.0.1:{port}",
        "plugin.discovery": "only_scan",
        "scheduled.rebalance.max.delay.ms": 0,
    }


@pytest.mark.requirement("a:X3-36")
def test_connect_writes_each_line_of_a_file_exactly_once_through_kills(cluster: LocalCluster, tmp_path: Path) -> None:
    Tools(cluster.kafka_bootstrap).create("copied", partitions=1)
    source = tmp_path / "source.txt"
    lines = [b"line %d" % number for number in range(600)]
    (port,) = free_ports(1)
    settings = tmp_path / "worker.properties"
    settings.write_text("".join(f"{key}={value}\n" for key, value in worker_settings(cluster, port).items()))
    command = [*java_command("org.apache.kafka.connect.cli.ConnectDistributed"), str(settings)]
    connector = {
        "connector.class": "org.apache.kafka.connect.file.FileStreamSourceConnector",
        "tasks.max": "1",
        "file": str(source),
        "topic": "copied",
        "exactly.once.support": "required",
        "transaction.boundary": "poll",
    }

    def write(first: int, end: int) -> None:
        with source.open("ab") as file:
            file.write(b"".join(line + b"\n" for line in lines[first:end]))

    def copied() -> list[bytes]:
        return read_values(cluster, "copied", 1)[0]

    def is_up() -> bool:
        try:
            return request(port, "GET", "/connectors")[0] == 200
        except OSError:
            return False

    def until_copied(process: subprocess.Popen[bytes], out: Path, count: int) -> None:
        until(lambda: process.poll() is not None or len(copied()) >= count, f"{count} lines", timeout_s=DEADLINE_S)
        assert process.poll() is None, out.read_text()[-4000:]

    write(0, 200)
    first, second = tmp_path / "first.log", tmp_path / "second.log"
    with running(command, first) as process:
        until(lambda: process.poll() is not None or is_up(), "the worker", timeout_s=DEADLINE_S)
        assert process.poll() is None, first.read_text()[-4000:]
        status, answer = request(port, "PUT", "/connectors/reader/config", connector)
        assert status in (200, 201), answer
        until_copied(process, first, 200)
        cluster.kill(1)
        write(200, 400)
        until_copied(process, first, 400)
        cluster.start(1)
        write(400, 500)
        until_copied(process, first, 420)
        process.send_signal(signal.SIGKILL)
    write(500, 600)
    with running(command, second) as process:
        until_copied(process, second, 600)
    assert [line for line, count in Counter(copied()).items() if count > 1] == []
    assert copied() == lines
