"""`tidelog demo log`: it tells the truth, also when the truth is bad."""

import os
import signal
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from tidelog.cli import demo_log as demo
from tidelog.cli import main as cli


@pytest.mark.requirement("b:D-23", "b:B-09", "a:T-22", "a:X3-41")
def test_everything_acknowledged_survives_a_kill(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = tmp_path / "data"
    assert cli.main(["demo", "log", "--records", "3000", "--data", str(data)]) == 0
    text = capsys.readouterr()
    assert text.err == ""
    assert "with SIGKILL" in text.out
    assert "cut 40 bytes" in text.out
    assert text.out.endswith("Nothing lost.\n")
    assert cli.main(["log", "dump", str(data), "--verify"]) == 0


@pytest.mark.requirement("b:B-16", "b:B-20", "b:B-25")
def test_a_partition_is_a_directory_of_regular_files(tmp_path: Path) -> None:
    data = tmp_path / "data"
    assert cli.main(["demo", "log", "--records", "6000", "--data", str(data)]) == 0
    assert sorted(os.listdir(data)) == [f"demo.{demo.TOPIC.hex}-0", "state"]
    files = list((data / demo.LOG_PATH).iterdir())
    assert all(stat.S_ISREG(path.lstat().st_mode) for path in files)
    segments = sorted(path.name for path in files if path.suffix == ".log")
    assert len(segments) >= 2
    assert segments[0] == "00000000000000000000.log"
    with (data / demo.LOG_PATH / segments[1]).open("rb") as second:
        assert int(segments[1].removesuffix(".log")) == int.from_bytes(second.read(8), "big")


def test_a_lost_record_makes_the_demo_fail(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def lose(directory: str) -> int:
        for name in os.listdir(os.path.join(directory, demo.LOG_PATH)):
            if name.endswith(".log"):
                os.truncate(os.path.join(directory, demo.LOG_PATH, name), 0)
        return 0

    monkeypatch.setattr(demo, "tear", lose)
    assert cli.main(["demo", "log", "--records", "100", "--data", str(tmp_path / "data")]) == 1
    text = capsys.readouterr()
    assert "Nothing lost" not in text.out
    assert "FAILED" in text.out or "damaged" in text.err


def test_data_that_is_there_is_not_touched(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "precious").write_text("x")
    assert cli.main(["demo", "log", "--data", str(tmp_path)]) == 2
    assert capsys.readouterr().err == f"tidelog: {tmp_path}: is there already; use an empty or a new directory\n"
    assert os.listdir(tmp_path) == ["precious"]


def test_a_number_of_records_below_one_is_a_wrong_call(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["demo", "log", "--records", "0"]) == 2
    assert capsys.readouterr().err == "tidelog: --records: at least 1\n"


def test_a_writer_ends_when_its_witness_has_gone(tmp_path: Path) -> None:
    with subprocess.Popen(
        [sys.executable, "-m", "tidelog.cli.demo_log", str(tmp_path)], stdout=subprocess.PIPE
    ) as writer:
        assert writer.stdout is not None
        assert writer.stdout.readline()
        writer.stdout.close()
        assert writer.wait(timeout=60) == -signal.SIGPIPE
