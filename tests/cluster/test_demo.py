"""`tidelog demo`: it tells what happened, it tells what went wrong, and it leaves nothing behind."""

import asyncio
import os
import re
import signal
import subprocess
from pathlib import Path

import pytest
from support.clusters import commands
from support.clusters.waiting import until

import tidelog
from tidelog.cli import demo
from tidelog.testing import LocalCluster

pytestmark = pytest.mark.cluster
DEADLINE_S = 110.0


def processes_in(data: Path) -> list[int]:
    """Processes that work in a directory: the nodes of a cluster do in theirs."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                path = os.readlink(entry / "cwd")
            except OSError:
                continue  # it has ended, or is another user's
            if Path(path).is_relative_to(data):
                found.append(int(entry.name))
    return found


def start(*arguments: str) -> subprocess.Popen[str]:
    return commands.start("demo", *arguments, text=True)


def until_said(process: subprocess.Popen[str], text: str) -> None:
    assert process.stdout is not None
    for line in process.stdout:
        if text in line:
            return
    raise AssertionError(f"it never said: {text}")


@pytest.mark.requirement("a:U-12", "b:D-01")
def test_a_leader_is_killed_and_every_acknowledged_record_is_read(tmp_path: Path) -> None:
    with start("--data", str(tmp_path / "data")) as process:
        out, err = process.communicate(timeout=DEADLINE_S)
    assert (process.returncode, err) == (0, "")
    found = re.search(r"The next write was acknowledged (\d+) ms after the kill; node (\d) leads now", out)
    assert found is not None, out
    killed = re.search(r"when node (\d), the leader", out)
    assert killed is not None, out
    assert killed[1] != found[2]
    assert int(found[1]) < 10_000
    assert "20,000 records, each once, in order, at its offset. Nothing lost." in out
    assert f"Started node {killed[1]} again: it has caught up and is in sync after" in out
    done = re.search(rf"Done in (\d+) s. The nodes' files are in {tmp_path / 'data'}\.\n$", out)
    assert done is not None, out
    assert int(done[1]) < 60
    until(lambda: processes_in(tmp_path) == [], "no process is left", timeout_s=DEADLINE_S)


def test_an_interrupted_demo_is_quiet_and_leaves_no_process(tmp_path: Path) -> None:
    with start("--records", "10000000", "--data", str(tmp_path / "data")) as process:
        until_said(process, "Writing with acks=all")
        until(lambda: len(processes_in(tmp_path)) >= 3, "three nodes run", timeout_s=DEADLINE_S)
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=DEADLINE_S)
    assert (process.returncode, err) == (130, "")
    until(lambda: processes_in(tmp_path) == [], "no process is left", timeout_s=DEADLINE_S)


def test_a_reader_that_goes_away_ends_it_quietly(tmp_path: Path) -> None:
    with start("--records", "10000000", "--data", str(tmp_path / "data")) as process:
        assert process.stdout is not None
        process.stdout.readline()
        process.stdout.close()
        assert process.stderr is not None
        assert process.stderr.read() == ""
        assert process.wait(DEADLINE_S) == 141
    until(lambda: processes_in(tmp_path) == [], "no process is left", timeout_s=DEADLINE_S)


class _AllDie(LocalCluster):
    """With the leader all others die: nobody can go on, and nobody hands anything over at the end."""

    def kill(self, _number: int) -> None:
        for number in range(1, demo.NODES + 1):
            super().kill(number)


def test_a_failure_says_what_and_where_the_logs_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo, "LocalCluster", _AllDie)
    data = tmp_path / "data"
    say = demo._say

    def listen(text: str) -> None:
        say(text)
        if "kill -9" in text:
            monkeypatch.setattr(demo, "STEP_TIMEOUT_S", 1.0)

    monkeypatch.setattr(demo, "_say", listen)
    output = commands.run("demo", "--records", "200", "--data", str(data), code=1)
    assert "Nothing lost" not in output.out
    assert output.err == (
        "tidelog: the demo failed: waited 1 s in vain until a write is acknowledged after the kill\n"
        f"The nodes' logs: {data}/node-*/node.log\n"
    )
    assert len(list(data.glob("node-*/node.log"))) == 3
    until(lambda: processes_in(tmp_path) == [], "no process is left", timeout_s=DEADLINE_S)


def test_a_wrong_record_is_noticed(cluster: LocalCluster, admin: tidelog.Admin) -> None:
    admin.create_topic(demo.TOPIC, partitions=1)
    values = [b"x" if number == 123 else demo.value_of(number) for number in range(200)]
    with tidelog.Producer(cluster.bootstrap) as producer:
        producer.send_many(demo.TOPIC, values=values).result(DEADLINE_S)
    wrong = "200 records were acknowledged and 200 read, 1 of these are not what belongs"
    with pytest.raises(demo.DemoFailedError, match=wrong):
        asyncio.run(demo._read_back(cluster.bootstrap, demo.Written(half=100, acknowledged=200)))


def test_a_wrong_call_starts_nothing(tmp_path: Path) -> None:
    assert commands.run("demo", "--records", "1", code=2).err == "tidelog: --records: at least 200\n"
    (tmp_path / "precious").write_text("x")
    said = commands.run("demo", "--data", str(tmp_path), code=2).err
    assert said == f"tidelog: {tmp_path}: is there already; use an empty or a new directory\n"
    assert os.listdir(tmp_path) == ["precious"]
