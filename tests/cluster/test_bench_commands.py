"""`tidelog bench` by clients and without one: the figures belong together, and nothing is left behind."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest

import tidelog
from tidelog.testing import LocalCluster

pytestmark = pytest.mark.cluster

RECORD_BYTES = 200


@pytest.fixture(scope="module")
def cluster() -> Iterator[LocalCluster]:
    with LocalCluster(nodes=1) as cluster:
        yield cluster


def bench(cluster: LocalCluster, *arguments: str) -> Any:
    done = subprocess.run(
        [sys.executable, "-m", "tidelog", "bench", *arguments, "--output", "json", "--bootstrap", cluster.bootstrap],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        env={**os.environ, "PYTHONSAFEPATH": "1"},
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def flags(seconds: float) -> tuple[str, ...]:
    return ("--seconds", str(seconds), "--record-bytes", str(RECORD_BYTES), "--partitions", "2")


@pytest.mark.parametrize(("more", "how"), [([], "client"), (["--bulk"], "bulk"), (["--raw"], "raw")])
def test_producing_is_measured_by_a_producer_unless_it_is_raw(cluster: LocalCluster, more: list[str], how: str) -> None:
    found = bench(cluster, "produce", *flags(1.0), *more)
    assert (found["how"], found["partitions"], found["record_bytes"]) == (how, 2, RECORD_BYTES)
    assert found["records"] >= 1_000
    assert found["bytes"] > found["records"] * RECORD_BYTES, "values, and what is around them"
    assert found["records_per_s"] == pytest.approx(found["records"] / found["seconds"], rel=0.02)
    assert 0 < found["ack"]["p50_ms"] <= found["ack"]["max_ms"]
    assert found["batches"] < found["records"]


@pytest.mark.parametrize(
    ("more", "how", "is_decoded"),
    [
        ([], "client", True),
        (["--arrow"], "arrow", True),
        (["--raw"], "raw", False),
        (["--raw", "--decode"], "raw", True),
    ],
)
def test_all_that_was_written_is_read(cluster: LocalCluster, more: list[str], how: str, is_decoded: bool) -> None:
    if how == "arrow":
        pytest.importorskip("pyarrow")
    with tidelog.Admin(cluster.bootstrap) as admin, tidelog.Producer(cluster.bootstrap) as producer:
        topic = f"read-{how}-{is_decoded}"
        admin.create_topic(topic, partitions=3, replication_factor=1)
        producer.send_many(topic, values=[bytes(RECORD_BYTES)] * 25_000, keys=[b"%d" % n for n in range(25_000)])
        producer.flush(30)
    found = bench(cluster, "consume", "--topic", topic, *more)
    assert (found["how"], found["is_decoded"], found["records"], found["partitions"]) == (how, is_decoded, 25_000, 3)
    assert found["bytes"] > 25_000 * RECORD_BYTES


def test_consuming_writes_first_what_it_reads(cluster: LocalCluster) -> None:
    found = bench(cluster, "consume", *flags(0.5))
    assert found["records"] > 1_000


@pytest.mark.parametrize(("more", "how"), [([], "client"), (["--raw"], "raw")])
def test_latency_is_of_records_at_a_light_rate(cluster: LocalCluster, more: list[str], how: str) -> None:
    found = bench(cluster, "latency", *flags(1.0), "--rate", "40", *more)
    assert (found["how"], found["rate"]) == (how, 40)
    assert 10 <= found["batches"] <= 41
    assert 0 < found["ack"]["p50_ms"] <= found["ack"]["p99_ms"] <= found["ack"]["max_ms"]


def test_topics_of_its_own_are_gone_and_a_missing_one_is_told(cluster: LocalCluster) -> None:
    with tidelog.Admin(cluster.bootstrap) as admin:
        assert not [row.name for row in admin.list_topics() if row.name.startswith("bench-")]
    done = subprocess.run(
        [sys.executable, "-m", "tidelog", "bench", "produce", "--topic", "nosuch", "--bootstrap", cluster.bootstrap],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 1
    assert done.stderr == "tidelog: there is no topic 'nosuch'; create it with: tidelog topics create nosuch\n"
