"""`tidelog bench` by clients and without one: the figures belong together, and nothing is left behind."""

from __future__ import annotations

import pytest
from support.clusters.commands import Shell

import tidelog
from tidelog.testing import LocalCluster

pytestmark = pytest.mark.cluster

RECORD_BYTES, RECORDS = 200, 25_000
FLAGS = ("--seconds", "0.3", "--record-bytes", str(RECORD_BYTES), "--partitions", "2")


@pytest.mark.requirement("a:N-15", "b:O-09", "b:P-10")
@pytest.mark.parametrize(("more", "how"), [([], "client"), (["--bulk"], "bulk"), (["--raw"], "raw")])
def test_producing_is_measured_by_a_producer_unless_it_is_raw(shell: Shell, more: list[str], how: str) -> None:
    found = shell.json("bench", "produce", *FLAGS, *more)
    assert (found["how"], found["partitions"], found["record_bytes"]) == (how, 2, RECORD_BYTES)
    assert found["bytes"] > found["records"] * RECORD_BYTES > 0, "values, and what is around them"
    assert found["records_per_s"] == pytest.approx(found["records"] / found["seconds"], rel=0.02)
    assert found["mb_per_s"] > 0
    assert 0 < found["ack"]["p50_ms"] <= found["ack"]["max_ms"]
    assert found["batches"] < found["records"]


@pytest.fixture(scope="module")
def filled(cluster: LocalCluster) -> str:
    with tidelog.Admin(cluster.bootstrap) as admin, tidelog.Producer(cluster.bootstrap) as producer:
        admin.create_topic("to-measure", partitions=3, replication_factor=1)
        keys = [b"%d" % number for number in range(RECORDS)]
        producer.send_many("to-measure", values=[bytes(RECORD_BYTES)] * RECORDS, keys=keys)
        producer.flush(30)
    return "to-measure"


@pytest.mark.parametrize(
    ("more", "how", "is_decoded"),
    [
        ([], "client", True),
        (["--arrow"], "arrow", True),
        (["--raw"], "raw", False),
        (["--raw", "--decode"], "raw", True),
    ],
)
def test_all_that_was_written_is_read(shell: Shell, filled: str, more: list[str], how: str, is_decoded: bool) -> None:
    if how == "arrow":
        pytest.importorskip("pyarrow")
    found = shell.json("bench", "consume", "--topic", filled, *more)
    assert (found["how"], found["is_decoded"], found["records"], found["partitions"]) == (how, is_decoded, RECORDS, 3)
    assert found["bytes"] > RECORDS * RECORD_BYTES


def test_consuming_writes_first_what_it_reads(shell: Shell) -> None:
    assert shell.json("bench", "consume", *FLAGS)["records"] > 0


@pytest.mark.parametrize(("more", "how"), [([], "client"), (["--raw"], "raw")])
def test_latency_is_of_records_at_a_light_rate(shell: Shell, more: list[str], how: str) -> None:
    found = shell.json("bench", "latency", *FLAGS, "--rate", "40", *more)
    assert (found["how"], found["rate"]) == (how, 40)
    assert 1 <= found["batches"] <= 13
    assert 0 < found["ack"]["p50_ms"] <= found["ack"]["p99_ms"] <= found["ack"]["max_ms"]


def test_failover_is_watched_and_own_topics_are_deleted_and_a_missing_one_is_reported(shell: Shell) -> None:
    assert shell.json("bench", "failover", "--watch", "--seconds", "0.3")["batches"] >= 1
    assert not [name for name in shell.run("topics", "list").split() if name.startswith("bench-")]
    shell.run("bench", "produce", "--topic", "nosuch", code=1)
    assert shell.err == "tidelog: there is no topic 'nosuch'; create it with: tidelog topics create nosuch\n"
