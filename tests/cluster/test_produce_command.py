"""`tidelog produce` to a topic that is not there, on a cluster that creates what is written to."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator

import pytest

import tidelog
from tidelog.testing import LocalCluster

pytestmark = pytest.mark.cluster


@pytest.fixture(scope="module")
def cluster() -> Iterator[LocalCluster]:
    with LocalCluster(nodes=1, settings={"auto.create.topics.enable": True}) as cluster:
        yield cluster


def produce(cluster: LocalCluster, topic: str, *flags: str, stdin: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "tidelog", "produce", topic, *flags, "--bootstrap", cluster.bootstrap],
        input=stdin,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        env={**os.environ, "PYTHONSAFEPATH": "1"},
    )


def topics(cluster: LocalCluster) -> set[str]:
    with tidelog.Admin(cluster.bootstrap) as admin:
        return {row.name for row in admin.list_topics()}


def test_the_first_record_creates_the_topic(cluster: LocalCluster) -> None:
    done = produce(cluster, "first", "--output", "json", stdin="one\ntwo\n")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["records"] == 2
    assert "first" in topics(cluster)


def test_nothing_to_send_creates_nothing_and_is_told(cluster: LocalCluster) -> None:
    done = produce(cluster, "misspelt", "--output", "json", stdin="")
    assert done.returncode == 0
    assert json.loads(done.stdout) == {
        "topic": "misspelt",
        "records": 0,
        "failed_batches": 0,
        "error": None,
        "partitions": [],
    }
    assert done.stderr == "tidelog: nothing was read, and there is no topic 'misspelt' yet\n"
    assert "misspelt" not in topics(cluster)


@pytest.mark.parametrize("flags", [["--key-separator", ":"], ["--input", "json"]])
def test_a_line_that_is_no_record_creates_nothing(cluster: LocalCluster, flags: list[str]) -> None:
    done = produce(cluster, "wrong", *flags, stdin="no record\n")
    assert done.returncode == 2
    assert "line 1: " in done.stderr
    assert "wrong" not in topics(cluster)
