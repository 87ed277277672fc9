"""A move that is under way, held back by a throttle, and cancelled: all is as before, and nothing stays behind."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from support.clusters.commands import Shell
from support.clusters.waiting import until

from tidelog.testing import LocalCluster

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(180)]

LINES = "".join(f"{number} {'x' * 1_000}\n" for number in range(5_000))
RATE = 20_000
"""Bytes a second: the five megabytes would take minutes."""


def topic_of(shell: Shell) -> dict[str, Any]:
    (topic,) = shell.json("topics", "describe", "held-back")["topics"]
    return dict(topic)


def logs_of(cluster: LocalCluster, node: int) -> list[str]:
    """The logs of the topic on a node, those that are being deleted aside."""
    found = [path.name for path in cluster.path(node).rglob("held-back.*-0*") if path.is_dir()]
    return sorted(name for name in found if not name.endswith(".deleted"))


def test_a_running_move_is_cancelled_and_leaves_nothing_behind(
    cluster: LocalCluster, shell: Shell, tmp_path: Path
) -> None:
    shell.run("topics", "create", "held-back", "--replica-assignment", "1:2")
    shell.run("produce", "held-back", stdin=LINES)
    plan = tmp_path / "plan.json"
    row = {"topic": "held-back", "partition": 0, "replicas": [3, 1]}
    plan.write_text(json.dumps({"version": 1, "partitions": [row]}), encoding="utf-8")
    assert len(logs_of(cluster, 1)) == 1
    shell.run("reassign", "execute", "--plan", str(plan), "--throttle", str(RATE))
    until(lambda: logs_of(cluster, 3) != [], "the new replica is being copied")
    (move,) = shell.json("reassign", "status")["reassignments"]
    assert (move["adding_replicas"], move["removing_replicas"], move["waiting_for"]) == ([3], [2], [3])
    assert any("throttled" in key for key in topic_of(shell)["configs"])

    shell.run("reassign", "cancel", "--yes")

    assert shell.json("reassign", "status") == {"reassignments": []}
    topic = topic_of(shell)
    assert topic["configs"] == {}, "the throttle ends with the move"
    (partition,) = topic["partitions"]
    assert (partition["replicas"], sorted(partition["isr"]), partition["leader"]) == ([1, 2], [1, 2], 1)
    until(lambda: logs_of(cluster, 3) == [], "what was copied is removed")
    shell.run("produce", "held-back", stdin="the last one\n")
    out = shell.run("consume", "held-back", "--from-beginning", "--exit-at-end")
    assert out == f"{LINES}the last one\n"

    # The same move once more, without a throttle: what the first one has left does not stand in its way.
    shell.run("reassign", "execute", "--plan", str(plan), "--wait")
    (partition,) = topic_of(shell)["partitions"]
    assert (partition["replicas"], sorted(partition["isr"])) == ([3, 1], [1, 3])
    assert shell.run("consume", "held-back", "--from-beginning", "--exit-at-end") == out
