"""The bar of long work: on a terminal alone, in one line of it, and gone at the end."""

from __future__ import annotations

import fcntl
import io
import os
import re
import struct
import subprocess
import sys
import termios
from pathlib import Path

import pytest
from test_cli_log_dump import write_log

from tidelog.cli.progress import Progress


class Terminal(io.StringIO):
    """Has the width that the test sets."""

    def __init__(self, *, is_terminal: bool = True) -> None:
        super().__init__()
        self._is_terminal = is_terminal

    def isatty(self) -> bool:
        return self._is_terminal

    def screen(self) -> str:
        """What is seen in the line, without colours."""
        line: list[str] = []
        for part in re.sub(r"\x1b\[\d+m", "", self.getvalue()).split("\r"):
            line[: len(part)] = part
        return "".join(line)


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def wide(monkeypatch: pytest.MonkeyPatch, columns: int) -> None:
    monkeypatch.setattr(Progress, "_width", lambda _self: columns)


def test_the_bar_shows_what_is_done_and_what_time_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    wide(monkeypatch, 80)
    terminal, clock = Terminal(), Clock()
    with Progress("moving", unit="partitions", stream=terminal, clock=clock) as progress:
        progress.show(0, 4)
        assert terminal.screen() == "moving [" + "." * 30 + "]   0%  0 of 4 partitions"
        progress.show(1, 4)
        assert "1 of 4" not in terminal.screen(), "not more than ten times a second"
        clock.now += 10
        progress.show(1, 4)
        assert terminal.screen() == "moving [" + "#" * 7 + "." * 23 + "]  25%  1 of 4 partitions, 0:30 left"
        assert "\x1b[32m" in terminal.getvalue()
    assert terminal.screen().strip() == "", "it is gone"


@pytest.mark.parametrize("columns", [10, 24, 40, 60, 200])
def test_the_bar_fits_into_one_line(monkeypatch: pytest.MonkeyPatch, columns: int) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("NO_COLOR", "1")
    wide(monkeypatch, columns)
    terminal = Terminal()
    with Progress("moving to another place", unit="replicas", stream=terminal) as progress:
        progress.show(2_000, 3_000)
        assert 0 < len(terminal.screen()) < columns
    assert "\x1b" not in terminal.getvalue(), "NO_COLOR"
    assert len(terminal.screen()) < columns


def test_progress_is_not_shown_without_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    pipe = Terminal(is_terminal=False)
    with Progress("moving", stream=pipe) as progress:
        progress.show(1, 2)
    monkeypatch.setenv("TERM", "dumb")
    dumb = Terminal()
    with Progress("moving", stream=dumb) as progress:
        progress.show(1, 2)
    assert pipe.getvalue() == dumb.getvalue() == ""


@pytest.mark.parametrize("output", ["table", "json"])
def test_a_verification_shows_its_bar_on_a_real_terminal_and_its_data_elsewhere(tmp_path: Path, output: str) -> None:
    write_log(tmp_path)
    ours, theirs = os.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 60, 0, 0))
    try:
        done = subprocess.run(
            [sys.executable, "-m", "tidelog", "log", "dump", str(tmp_path), "--verify", "--output", output],
            stdout=subprocess.PIPE,
            stderr=theirs,
            check=False,
            timeout=60,
            env={**os.environ, "TERM": "xterm", "NO_COLOR": "1", "PYTHONSAFEPATH": "1"},
        )
        shown = os.read(ours, 65_536).decode()
    finally:
        os.close(ours)
        os.close(theirs)
    assert re.search(r"\rverifying \[#+\] 100%  0 of 0 MiB", shown), shown
    assert b"verifying" not in done.stdout
    assert all(len(line) < 60 for line in re.split(r"[\r\n]+", shown) if line.startswith("verifying"))


def test_the_end_of_quick_work_is_shown_though_it_comes_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    wide(monkeypatch, 80)
    terminal = Terminal()
    with Progress("reading", unit="records", stream=terminal, clock=Clock()) as progress:
        progress.show(0, 1000)
        progress.show(1000, 1000)
        assert terminal.screen().endswith("100%  1,000 of 1,000 records")
        drawn = terminal.getvalue()
        progress.show(1000, 1000)
        assert terminal.getvalue() == drawn, "the end is drawn once"
