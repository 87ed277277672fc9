"""The commands of clients against a real cluster of three nodes: what they print, and what they exit with."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tidelog.testing import LocalCluster

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(180)]


class Shell:
    def __init__(self, bootstrap: str) -> None:
        self._environment = {**os.environ, "TIDELOG_BOOTSTRAP": bootstrap, "PYTHONSAFEPATH": "1"}

    def start(self, *arguments: str, **more: Any) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, "-m", "tidelog", *arguments],
            stdin=more.get("stdin", subprocess.DEVNULL),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=self._environment,
        )

    def run(self, *arguments: str, stdin: str = "", code: int = 0) -> str:
        process = self.start(*arguments, stdin=subprocess.PIPE)
        out, err = process.communicate(stdin, timeout=60)
        self.err = err
        assert process.returncode == code, f"{arguments}: {process.returncode}\n{out}\n{err}"
        assert "Traceback" not in err
        return out

    def json_lines(self, *arguments: str) -> list[Any]:
        return [json.loads(line) for line in self.run(*arguments, "--output", "jsonl").splitlines()]

    def json(self, *arguments: str, stdin: str = "", code: int = 0) -> Any:
        """The document, whose keys are all listed in docs/cli.md."""
        document = json.loads(self.run(*arguments, "--output", "json", stdin=stdin, code=code))
        names = [name for name in KEYS if " ".join(arguments).startswith(name)]
        assert names, f"docs/cli.md has no keys of {arguments}"
        assert keys_of(document) <= KEYS[names[0]], arguments
        return document


def documented() -> dict[str, set[str]]:
    """Keys of the JSON document of each command."""
    page = (Path(__file__).resolve().parents[2] / "docs" / "cli.md").read_text(encoding="utf-8")
    found: dict[str, set[str]] = {}
    for heading, rows in re.findall(r"^Keys of (`.*`):\n\n((?:- .*\n)+)", page, re.MULTILINE):
        keys = set(re.findall(r"^- `([^`]+)`: ", rows, re.MULTILINE))
        found |= dict.fromkeys(re.findall(r"`([^`]+)`", heading), keys)
    return found


KEYS = documented()
FREE = ("configs", "endpoints", "counts")
"""Objects whose keys are names that users chose, or kinds."""


def keys_of(value: object, path: str = "") -> set[str]:
    if isinstance(value, dict) and not path.endswith(FREE):
        found = {f"{path}.{key}".lstrip("."): inside for key, inside in value.items()}
        return set(found).union(*(keys_of(inside, key) for key, inside in found.items()))
    if isinstance(value, list):
        return set().union(*(keys_of(inside, f"{path}[]") for inside in value if isinstance(inside, dict)))
    return set()


@pytest.fixture(scope="module")
def shell() -> Iterator[Shell]:
    with LocalCluster(nodes=3) as cluster:
        yield Shell(cluster.bootstrap)


@pytest.mark.source("a:N-01", "a:N-02", "a:N-05", "b:EX-35")
def test_topics_are_created_described_changed_and_deleted(shell: Shell) -> None:
    made = shell.json("topics", "create", "one", "--partitions", "3", "--replication-factor", "3")
    assert made["topics"][0]["error"] is None
    shell.run("topics", "create", "one", code=1)
    assert "TOPIC_ALREADY_EXISTS" in shell.err
    shell.run("topics", "create", "one", "--if-not-exists")
    shell.run("topics", "create", "two", "--partitions", "1", "--config", "retention.ms=5000", "--validate-only")
    assert shell.run("topics", "list").split() == ["one"]
    (topic,) = shell.json("topics", "describe", "one")["topics"]
    assert [row["partition"] for row in topic["partitions"]] == [0, 1, 2]
    assert all(sorted(row["replicas"]) == [1, 2, 3] for row in topic["partitions"])
    assert shell.json("topics", "describe", "--with-overrides")["topics"] == []
    shell.run("configs", "alter", "--topic", "one", "--set", "retention.ms=5000000")
    assert [one["name"] for one in shell.json("topics", "describe", "--with-overrides")["topics"]] == ["one"]
    described = shell.json("configs", "describe", "--topic", "one")
    assert [(one["key"], one["value"], one["source"]) for one in described["entries"]] == [
        ("retention.ms", "5000000", "topic")
    ]
    shell.run("configs", "alter", "--topic", "one", "--set", "segment.bytes=oops", code=1)
    assert "INVALID_CONFIG" in shell.err
    shell.run("topics", "alter", "one", "--partitions", "4")
    shell.run("topics", "alter", "one", "--partitions", "2", code=1)
    assert len(shell.json("topics", "describe", "one")["topics"][0]["partitions"]) == 4
    shell.run("topics", "delete", "one", "nosuch", "--yes", code=1)
    assert "UNKNOWN_TOPIC_OR_PARTITION" in shell.err
    assert shell.json("topics", "list") == {"topics": [], "stale": False, "age_ms": None}


@pytest.mark.source("a:N-03")
def test_what_goes_in_by_lines_comes_out_by_key_offset_and_time(shell: Shell) -> None:
    shell.run("topics", "create", "words", "--partitions", "3", "--replication-factor", "3")
    done = shell.json("produce", "words", "--key-separator", ":", stdin="".join(f"k{n}:v{n}\n" for n in range(50)))
    assert (done["records"], done["error"]) == (50, None)
    out = shell.run("consume", "words", "--from-beginning", "--max-messages", "50", "--keys", "--key-separator", "=")
    assert sorted(out.split()) == sorted(f"k{n}=v{n}" for n in range(50))
    later = int(time.time() * 1000) + 1_800_000
    line = {"value": "here", "partition": 1, "timestamp": later, "headers": {"h": "x"}}
    shell.run("produce", "words", "--input", "json", stdin=json.dumps(line) + "\n")
    (found,) = shell.json_lines("consume", "words", "--timestamp", str(later), "--max-messages", "1")
    assert (found["value"], found["partition"], found["headers"]) == ("here", 1, [{"key": "h", "value": "x"}])
    offset = str(found["offset"])
    again = shell.run("consume", "words", "--partition", "1", "--offset", offset, "--max-messages", "1", "--offsets")
    assert again == f"1\t{offset}\t{later}\there\n"
    document = json.loads(shell.run("consume", "words", "--from-beginning", "--exit-at-end", "--output", "json"))
    assert document["count"] == len(document["records"]) == 51
    assert shell.run("consume", "words", "--timeout-ms", "500") == "", "from the end on there is nothing"
    shell.run("delete-records", "words", "--before", "end", "--yes")
    assert shell.run("consume", "words", "--from-beginning", "--exit-at-end") == ""
    shell.run("consume", "words", "--partition", "0", "--offset", "100000", code=1)
    assert "OFFSET_OUT_OF_RANGE" in shell.err
    shell.run("consume", "nosuch", code=1)
    assert "there is no topic 'nosuch'" in shell.err
    shell.run("produce", "nosuch", stdin="x\n", code=1)
    assert shell.err.endswith("create it with: tidelog topics create nosuch\n"), "auto.create.topics.enable is off"
    shell.run("produce", "words", "--partition", "7", stdin="x\n", code=2)


def test_ctrl_c_says_how_many_and_a_closed_pipe_says_nothing(shell: Shell) -> None:
    shell.run("topics", "create", "endless", "--partitions", "1", "--replication-factor", "1")
    shell.run("produce", "endless", stdin="".join(f"{n}\n" for n in range(5000)))
    reading = shell.start("consume", "endless", "--from-beginning")
    assert reading.stdout is not None
    for number in range(5000):
        assert reading.stdout.readline() == f"{number}\n"
    reading.send_signal(signal.SIGINT)
    _, err = reading.communicate(timeout=30)
    assert (reading.returncode, err) == (130, "tidelog: 5000 records read\n")
    gone = shell.start("consume", "endless", "--from-beginning")
    assert gone.stdout is not None
    assert gone.stderr is not None
    gone.stdout.readline()
    gone.stdout.close()
    assert gone.stderr.read() == ""
    assert gone.wait(timeout=30) == 141
    gone.stderr.close()


@pytest.mark.source("a:N-08", "b:EX-35")
def test_brokers_elections_and_reassignments(shell: Shell, tmp_path: Path) -> None:
    brokers = shell.json("brokers", "list")["brokers"]
    assert [broker["id"] for broker in brokers] == [1, 2, 3]
    assert sum(broker["is_controller"] for broker in brokers) == 1
    (one,) = shell.json("brokers", "describe", "1")["brokers"]
    assert one["directories"][0]["error"] is None
    shell.run("topics", "create", "moved", "--replica-assignment", "1:2,2:1,1:2")
    shell.run("produce", "moved", "--acks", "all", stdin="".join(f"{n}\n" for n in range(100)))
    plan = tmp_path / "plan.json"
    rows = [{"topic": "moved", "partition": number, "replicas": [3, 2]} for number in range(3)]
    plan.write_text(json.dumps({"version": 1, "partitions": rows}))
    shell.run("reassign", "execute", "--plan", str(plan), "--throttle", "100000000", "--wait")
    assert shell.json("reassign", "status") == {"reassignments": []}
    (topic,) = shell.json("topics", "describe", "moved")["topics"]
    assert all(row["replicas"] == [3, 2] for row in topic["partitions"])
    assert topic["configs"] == {}, "throttles end with the moves"
    out = shell.run("consume", "moved", "--from-beginning", "--exit-at-end")
    assert sorted(map(int, out.split())) == list(range(100))
    spread = shell.json("reassign", "plan", "--topic", "moved", "--save", str(plan))
    assert spread["partitions"], "all on two of three brokers is not even"
    shell.run("reassign", "execute", "--plan", str(plan), "--validate-only")
    drained = shell.json("brokers", "drain", "3")
    assert drained["leads"] == 0
    (topic,) = shell.json("topics", "describe", "moved")["topics"]
    assert all(row["leader"] == 2 for row in topic["partitions"])
    shell.run("brokers", "drain", "3", "--undo")
    shell.run("elect-leaders", "--topic", "moved")
    (topic,) = shell.json("topics", "describe", "moved")["topics"]
    assert all(row["leader"] == 3 for row in topic["partitions"])
    shell.run("reassign", "cancel", "--yes")
    assert "nothing is under way" in shell.err


@pytest.mark.source("a:N-15", "b:O-09", "b:P-10")
def test_benches_give_figures(shell: Shell) -> None:
    produced = shell.json("bench", "produce", "--seconds", "1", "--batch-bytes", "100000")
    assert produced["mb_per_s"] > 0
    assert produced["ack"]["p50_ms"] > 0
    consumed = shell.json("bench", "consume", "--seconds", "1", "--batch-bytes", "100000", "--decode")
    assert consumed["records"] > 0
    paced = shell.json("bench", "latency", "--seconds", "1")
    assert paced["batches"] > 10
    watched = shell.json("bench", "failover", "--watch", "--seconds", "1")
    assert watched["batches"] > 1
    assert not [name for name in shell.run("topics", "list").split() if name.startswith("bench-")]
