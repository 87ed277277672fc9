"""`tidelog demo`: it tells what happened, it tells what went wrong, and it leaves nothing behind."""

import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from patience import until

from tidelog.cli import demo
from tidelog.cli import main as cli
from tidelog.log.batch import encode_columns
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
    command = [sys.executable, "-m", "tidelog", "demo", *arguments]
    environment = {**os.environ, "PYTHONSAFEPATH": "1"}
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)


def until_said(process: subprocess.Popen[str], text: str) -> None:
    assert process.stdout is not None
    for line in process.stdout:
        if text in line:
            return
    raise AssertionError(f"it never said: {text}")


@pytest.mark.source("a:U-12", "b:D-01")
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


@pytest.mark.parametrize("moment", ["Starting three nodes", "Writing with acks=all"])
def test_an_interrupted_demo_is_quiet_and_leaves_no_process(tmp_path: Path, moment: str) -> None:
    with start("--records", "10000000", "--data", str(tmp_path / "data")) as process:
        until_said(process, moment)
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


def test_a_killed_demo_takes_its_nodes_along(tmp_path: Path) -> None:
    with start("--records", "10000000", "--data", str(tmp_path / "data")) as process:
        until_said(process, "Writing with acks=all")
        process.kill()
    until(lambda: processes_in(tmp_path) == [], "the nodes have ended by themselves", timeout_s=DEADLINE_S)


class _TwoDie(LocalCluster):
    """With the leader another node dies: nobody can go on."""

    def kill(self, number: int) -> None:
        super().kill(number)
        super().kill(number % demo.NODES + 1)


def test_a_failure_says_what_and_where_the_logs_are(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(demo, "LocalCluster", _TwoDie)
    data = tmp_path / "data"
    say = demo._say

    def listen(text: str) -> None:
        say(text)
        if "kill -9" in text:
            monkeypatch.setattr(demo, "PATIENCE_S", 2.0)

    monkeypatch.setattr(demo, "_say", listen)
    assert cli.main(["demo", "--records", "200", "--data", str(data)]) == 1
    told = capsys.readouterr()
    assert "Nothing lost" not in told.out
    assert told.err == (
        "tidelog: the demo failed: waited 2 s in vain until a write is acknowledged after the kill\n"
        f"The nodes' logs: {data}/node-*/node.log\n"
    )
    assert len(list(data.glob("node-*/node.log"))) == 3
    until(lambda: processes_in(tmp_path) == [], "no process is left", timeout_s=DEADLINE_S)


def test_a_wrong_record_is_noticed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def garble(*, values: list[bytes], **more: Any) -> bytes:
        return encode_columns(values=[b"x" if value == demo.value_of(123) else value for value in values], **more)

    monkeypatch.setattr(demo, "encode_columns", garble)
    assert cli.main(["demo", "--records", "200", "--data", str(tmp_path / "data")]) == 1
    assert "200 records were acknowledged and 200 read, 1 of these are not what belongs" in capsys.readouterr().err


def test_a_wrong_call_starts_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["demo", "--records", "1"]) == 2
    assert capsys.readouterr().err == "tidelog: --records: at least 200\n"
    (tmp_path / "precious").write_text("x")
    assert cli.main(["demo", "--data", str(tmp_path)]) == 2
    assert capsys.readouterr().err == f"tidelog: {tmp_path}: is there already; give an empty or a new directory\n"
    assert os.listdir(tmp_path) == ["precious"]
