"""A verifying writer and reader while nodes die, freeze and restart: nothing acknowledged is lost, doubled or moved."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from patience import until

from tidelog.testing import LocalCluster

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(180)]


def tidelog(cluster: LocalCluster, *arguments: str, code: int = 0) -> Any:
    run = subprocess.run(
        [sys.executable, "-m", "tidelog", *arguments, "--output", "json"],
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
        env={**os.environ, "TIDELOG_BOOTSTRAP": cluster.bootstrap, "PYTHONSAFEPATH": "1"},
    )
    assert run.returncode == code, f"{arguments}\n{run.stdout}\n{run.stderr}"
    return json.loads(run.stdout)


def leader_of(cluster: LocalCluster, topic: str) -> int:
    (found,) = tidelog(cluster, "topics", "describe", topic)["topics"]
    leader = found["partitions"][0]["leader"]
    assert leader is not None
    return int(leader)


def acks_in(path: Path) -> int:
    return path.read_text(encoding="utf-8").count('"event":"ack"') if path.exists() else 0


def verified(cluster: LocalCluster, tmp_path: Path, harm: Callable[[LocalCluster, Path], None]) -> dict[str, Any]:
    """Write and read numbered records while harm is done; the verdict."""
    tidelog(cluster, "topics", "create", "v", "--partitions", "2", "--replication-factor", "3")
    written, read = tmp_path / "written.jsonl", tmp_path / "read.jsonl"
    command = ["verify", "produce", "v", "--rate", "600", "--history", str(written)]  # for as long as the harm takes
    writing = subprocess.Popen(
        [sys.executable, "-m", "tidelog", *command, "--output", "json"],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "TIDELOG_BOOTSTRAP": cluster.bootstrap},
    )
    try:
        until(lambda: acks_in(written) > 20, "the first acknowledgements")
        harm(cluster, written)
        writing.send_signal(signal.SIGINT)
        out, _ = writing.communicate(timeout=120)
    finally:
        writing.kill()
        writing.wait()
    assert writing.returncode == 0, out
    told = json.loads(out)
    assert told["acknowledged"] == told["sent"] > 0
    assert tidelog(cluster, "verify", "consume", "v", "--history", str(read))["read"] == told["sent"]
    verdict: dict[str, Any] = tidelog(cluster, "verify", "check", str(written), str(read))
    assert verdict["is_complete"]
    return verdict


def kill_and_restart(cluster: LocalCluster, written: Path) -> None:
    """The leader of a partition dies by kill -9, writing goes on, it comes back; then the next one."""
    for _ in range(2):
        leader = leader_of(cluster, "v")
        cluster.kill(leader)
        before = acks_in(written)
        until(lambda before=before: acks_in(written) > before + 20, "writing goes on")  # type: ignore[misc]
        cluster.start(leader)


def freeze_and_thaw(cluster: LocalCluster, written: Path) -> None:
    """The leader hangs: its stream does not break, and yet another takes over."""
    leader = leader_of(cluster, "v")
    cluster.freeze(leader)
    before = acks_in(written)
    until(lambda: acks_in(written) > before + 20, "writing goes on")
    cluster.thaw(leader)


def roll(cluster: LocalCluster, written: Path) -> None:
    """Every node is stopped in order and started again."""
    for number in (1, 2, 3):
        assert cluster.stop(number) == 0
        before = acks_in(written)
        until(lambda before=before: acks_in(written) > before + 20, "writing goes on")  # type: ignore[misc]
        cluster.start(number)


@pytest.mark.source("a:X3-1", "a:S-03", "a:S-02")
def test_killed_leaders_lose_nothing(tmp_path: Path) -> None:
    with LocalCluster(nodes=3) as cluster:
        assert verified(cluster, tmp_path, kill_and_restart)["is_good"]


def test_a_frozen_leader_is_left_and_loses_nothing(tmp_path: Path) -> None:
    with LocalCluster(nodes=3) as cluster:
        assert verified(cluster, tmp_path, freeze_and_thaw)["is_good"]


@pytest.mark.source("a:X3-3", "a:S-03", "b:E-12")
def test_a_rolling_restart_loses_nothing(tmp_path: Path) -> None:
    with LocalCluster(nodes=3) as cluster:
        assert verified(cluster, tmp_path, roll)["is_good"]
