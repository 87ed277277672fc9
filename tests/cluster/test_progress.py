"""Commands that take long, on a real terminal: a bar on stderr, the document alone on stdout."""

from __future__ import annotations

import os
import re
import threading
from pathlib import Path
from typing import Any

import pytest
from support.clusters.commands import Shell

import tidelog

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(180)]


def on_terminal(shell: Shell, *arguments: str, stdin: str = "") -> tuple[Any, str]:
    """The document, and what the terminal of stderr has got."""
    ours, theirs = os.openpty()
    shown: list[bytes] = []

    def read() -> None:
        try:
            while data := os.read(ours, 65_536):
                shown.append(data)
        except OSError:
            pass  # the other end is closed: a terminal tells it so

    reading = threading.Thread(target=read)
    reading.start()
    try:
        with open(theirs, "w", encoding="utf-8") as terminal:
            done = shell.done(*arguments, "--output", "json", stdin=stdin, stderr=terminal, TERM="xterm")
    finally:
        reading.join()
        os.close(ours)
    return done.document, re.sub(r"\x1b\[\d+m", "", b"".join(shown).decode())


def test_a_benchmark_shows_how_far_it_is(shell: Shell) -> None:
    for more in ((), ("--raw",)):
        out, said = on_terminal(shell, "bench", "produce", "--seconds", "1", "--replication-factor", "1", *more)
        assert out
        assert re.search(r"\rwriting \[[#.]+\] +\d+%  \d of 1 s", said), said


def test_a_verification_shows_how_far_it_is(shell: Shell, admin: tidelog.Admin, tmp_path: Path) -> None:
    admin.create_topic("verified", partitions=1, replication_factor=1)
    path = str(tmp_path / "history")
    wanted = ("verify", "produce", "verified", "--records", "300", "--rate", "400", "--history", path)
    out, said = on_terminal(shell, *wanted)
    assert out["acknowledged"] == 300
    assert re.search(r"\rwriting \[[#.]+\] +\d+%  \d+ of 300 records", said), said
    out, said = on_terminal(shell, "verify", "consume", "verified", "--history", path)
    assert out
    assert re.search(r"\rreading \[#+\] 100%  300 of 300 records", said), said


def test_a_file_that_is_sent_and_a_topic_that_is_read_show_how_far_they_are(shell: Shell, admin: tidelog.Admin) -> None:
    admin.create_topic("lines", partitions=1, replication_factor=1)
    out, said = on_terminal(shell, "produce", "lines", stdin="".join(f"{number}\n" for number in range(1000)))
    assert out["records"] == 1000
    assert re.search(r"\rproducing \[#+\] 100%  0.0 of 0.0 MB", said), said
    out, said = on_terminal(shell, "consume", "lines", "--from-beginning", "--exit-at-end")
    assert out["count"] == 1000
    assert re.search(r"\rreading \[#+\] 100%  1,000 of 1,000 records", said), said
    out, said = on_terminal(shell, "query", "select count(*) n from lines")
    assert out["rows"] == [{"n": 1000}]
    assert re.search(r"\rreading lines \[[#.]+\] +\d+%  [\d,]+ of 1,000 records", said), said
