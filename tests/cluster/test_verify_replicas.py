"""Real nodes: replicas are compared while they are used; a byte that flips in a file of a running node is found."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.clusters.commands import Shell
from support.clusters.waiting import until

import tidelog
from tidelog.testing import LocalCluster

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(120)]

TOPIC = "compared"
RECORDS = 300


def sealed_segments(cluster: LocalCluster, node: int) -> list[Path]:
    (directory,) = cluster.path(node).rglob(f"{TOPIC}.*-0")
    return sorted(directory.glob("*.log"))[:-1]


def read_values(cluster: LocalCluster) -> list[bytes | None]:
    with tidelog.Consumer(cluster.bootstrap, auto_offset_reset="earliest") as consumer:
        consumer.assign([tidelog.TopicPartition(TOPIC, 0)])
        values: list[bytes | None] = []
        while len(values) < RECORDS:
            records = consumer.poll(20)
            assert records, f"{len(values)} records"
            values += [record.value for record in records]
    return values


@pytest.mark.parametrize("at", [3, 14, 90], ids=["base offset", "leader epoch", "records"])
def test_a_flipped_byte_of_a_running_node_is_named_repaired_and_lost_to_nobody(
    cluster: LocalCluster, shell: Shell, at: int
) -> None:
    with tidelog.Admin(cluster.bootstrap) as admin:
        if TOPIC not in {topic.name for topic in admin.list_topics()}:
            admin.create_topic(TOPIC, replication_factor=3, configs={"segment.bytes": "3000"})
            with tidelog.Producer(cluster.bootstrap) as producer:
                for number in range(RECORDS):
                    producer.send(TOPIC, value=b"%d" % number)
                    if number % 10 == 9:
                        producer.flush()
        sound = shell.json("brokers", "verify-replicas", TOPIC)
        assert sound["summary"] == {"agree": 1, "differ": 0, "unverified": 0}
        (row,) = sound["partitions"]
        assert (row["start"], row["end"]) == (0, RECORDS)
        leader = admin.describe_topic(TOPIC).partitions[0].leader
        assert leader is not None
        victim = leader if at == 3 else leader % 3 + 1
        segments = sealed_segments(cluster, victim)
        path = segments[len(segments) // 2]
        original = path.read_bytes()
        with path.open("r+b") as file:
            file.seek(at)
            file.write(bytes([original[at] ^ 0x10]))
        found = shell.json("brokers", "verify-replicas", f"{TOPIC}:0", code=None)
        (row,) = found["partitions"]
        if row["state"] == "differ":  # else the scrub was quicker
            assert row["difference"]["suspects"] == [victim]
            assert row["difference"]["start"] == int(path.stem)
        until(
            lambda: shell.json("brokers", "verify-replicas", TOPIC, code=None)["summary"]["agree"] == 1,
            "the replicas agree again",
            timeout_s=60,
        )
        assert read_values(cluster) == [b"%d" % number for number in range(RECORDS)]
