"""The commands of clients against a real cluster of three nodes: what they print, and what they exit with."""

from __future__ import annotations

import json
import signal
import time
from pathlib import Path

import pytest
from support.clusters.commands import Shell

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(180)]


@pytest.mark.requirement("a:N-01", "a:N-02", "a:N-05", "b:EX-35")
def test_topics_are_created_described_changed_and_deleted(shell: Shell) -> None:
    there = set(shell.run("topics", "list").split())
    made = shell.json("topics", "create", "one", "--partitions", "3", "--replication-factor", "3")
    assert made["topics"][0]["error"] is None
    shell.run("topics", "create", "one", code=1)
    assert "TOPIC_ALREADY_EXISTS" in shell.err
    shell.run("topics", "create", "one", "--if-not-exists")
    shell.run("topics", "create", "two", "--partitions", "1", "--config", "retention.ms=5000", "--validate-only")
    assert set(shell.run("topics", "list").split()) == {*there, "one"}
    (topic,) = shell.json("topics", "describe", "one")["topics"]
    assert [row["partition"] for row in topic["partitions"]] == [0, 1, 2]
    assert all(sorted(row["replicas"]) == [1, 2, 3] for row in topic["partitions"])
    assert "one" not in {topic["name"] for topic in shell.json("topics", "describe", "--with-overrides")["topics"]}
    shell.run("configs", "alter", "--topic", "one", "--set", "retention.ms=5000000")
    listed = shell.json("topics", "describe", "--with-overrides")["topics"]
    assert all(topic["configs"] for topic in listed)
    assert "one" in {topic["name"] for topic in listed}
    described = shell.json("configs", "describe", "--topic", "one")
    assert [(one["key"], one["value"], one["source"]) for one in described["entries"]] == [
        ("retention.ms", "5000000", "topic")
    ]
    shell.run("configs", "alter", "--topic", "one", "--set", "segment.bytes=oops", code=2)
    assert "--set segment.bytes=oops: an integer (bytes), or one with a unit" in shell.err
    shell.run("topics", "alter", "one", "--partitions", "4")
    shell.run("topics", "alter", "one", "--partitions", "2", code=1)
    assert len(shell.json("topics", "describe", "one")["topics"][0]["partitions"]) == 4
    shell.run("topics", "delete", "one", "nosuch", "--yes", code=1)
    assert "UNKNOWN_TOPIC_OR_PARTITION" in shell.err
    document = shell.json("topics", "list")
    assert ({topic["name"] for topic in document["topics"]}, document["stale"], document["age_ms"]) == (
        there,
        False,
        None,
    )


@pytest.mark.requirement("a:N-03")
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
    for lines in (1, 5000):  # the pipe closes while there are records to write, and when there are none
        gone = shell.start("consume", "endless", "--from-beginning")
        assert gone.stdout is not None
        for _ in range(lines):
            gone.stdout.readline()
        gone.stdout.close()
        gone.stdout = None
        _, err = gone.communicate(timeout=30)
        assert (gone.returncode, err) == (141, "")


@pytest.mark.requirement("a:N-08", "b:EX-35")
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
    everything = [row for topic in shell.json("topics", "describe")["topics"] for row in topic["partitions"]]
    try:
        drained = shell.json("brokers", "drain", "3")
        assert drained["partitions_led"] == sum(row["replicas"] == [3] for row in everything), (
            "what has no other replica"
        )
        (topic,) = shell.json("topics", "describe", "moved")["topics"]
        assert all(row["leader"] == 2 for row in topic["partitions"])
    finally:
        shell.run("brokers", "drain", "3", "--undo")
    shell.run("elect-leaders", "--topic", "moved")
    (topic,) = shell.json("topics", "describe", "moved")["topics"]
    assert all(row["leader"] == 3 for row in topic["partitions"])
    shell.run("reassign", "cancel", "--yes")
    assert "no reassignment is in progress" in shell.err


@pytest.mark.requirement("b:EX-03", "b:Q-18", "b:C-02")
def test_three_brokers_share_a_topic_and_give_every_message_once_in_order(shell: Shell) -> None:
    shell.run("topics", "create", "dealt", "--partitions", "3", "--replication-factor", "3")
    (topic,) = shell.json("topics", "describe", "dealt")["topics"]
    assert sorted(row["leader"] for row in topic["partitions"]) == [1, 2, 3], "each leads a share"
    assert all(sorted(row["replicas"]) == [1, 2, 3] for row in topic["partitions"])
    lines = [json.dumps({"value": f"{part}/{number}", "partition": part}) for number in range(200) for part in range(3)]
    shell.run("produce", "dealt", "--input", "json", stdin="\n".join(lines) + "\n")
    found = shell.run("consume", "dealt", "--from-beginning", "--max-messages", "600").split()
    for part in range(3):
        mine = [value for value in found if value.startswith(f"{part}/")]
        assert mine == [f"{part}/{number}" for number in range(200)]
    assert len(found) == 600
