"""Commands that take long, on a real terminal: a bar on stderr, the document alone on stdout."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

import tidelog
from tidelog.testing import LocalCluster

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(180)]


@pytest.fixture(scope="module")
def cluster() -> Iterator[LocalCluster]:
    with LocalCluster(1) as made:
        with tidelog.Admin(made.bootstrap) as admin:
            admin.create_topic("numbers", partitions=1, replication_factor=1)
        yield made


def on_terminal(cluster: LocalCluster, *arguments: str, stdin: Path | None = None) -> tuple[str, str]:
    """(stdout, what the terminal of stderr has got)."""
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
        source = os.open(os.devnull if stdin is None else stdin, os.O_RDONLY)
        done = subprocess.run(
            [sys.executable, "-m", "tidelog", *arguments, "--output", "json"],
            stdin=source,
            stdout=subprocess.PIPE,
            stderr=theirs,
            text=True,
            check=False,
            timeout=90,
            env={**os.environ, "TIDELOG_BOOTSTRAP": cluster.bootstrap, "TERM": "xterm", "PYTHONSAFEPATH": "1"},
        )
    finally:
        os.close(source)
        os.close(theirs)
        reading.join()
        os.close(ours)
    said = b"".join(shown).decode()
    assert done.returncode == 0, said
    return done.stdout, re.sub(r"\x1b\[\d+m", "", said)


def test_a_benchmark_shows_how_far_it_is(cluster: LocalCluster) -> None:
    for more in ((), ("--raw",)):
        out, said = on_terminal(cluster, "bench", "produce", "--seconds", "1", "--replication-factor", "1", *more)
        assert json.loads(out)
        assert re.search(r"\rwriting \[[#.]+\] +\d+%  \d of 1 s", said), said


def test_a_verification_shows_how_far_it_is(cluster: LocalCluster, tmp_path: Path) -> None:
    path = str(tmp_path / "history")
    wanted = ("verify", "produce", "numbers", "--records", "300", "--rate", "400", "--history", path)
    out, said = on_terminal(cluster, *wanted)
    assert json.loads(out)["acknowledged"] == 300
    assert re.search(r"\rwriting \[[#.]+\] +\d+%  \d+ of 300 records", said), said
    out, said = on_terminal(cluster, "verify", "consume", "numbers", "--history", path)
    assert json.loads(out)
    assert re.search(r"\rreading \[#+\] 100%  300 of 300 records", said), said


def test_a_file_that_is_sent_and_a_topic_that_is_read_show_how_far_they_are(
    cluster: LocalCluster, tmp_path: Path
) -> None:
    with tidelog.Admin(cluster.bootstrap) as admin:
        admin.create_topic("lines", partitions=1, replication_factor=1)
    path = tmp_path / "lines"
    path.write_text("".join(f"{number}\n" for number in range(1000)))
    out, said = on_terminal(cluster, "produce", "lines", stdin=path)
    assert json.loads(out)["records"] == 1000
    assert re.search(r"\rproducing \[#+\] 100%  0.0 of 0.0 MB", said), said
    out, said = on_terminal(cluster, "consume", "lines", "--from-beginning", "--exit-at-end")
    assert json.loads(out)["count"] == 1000
    assert re.search(r"\rreading \[#+\] 100%  1,000 of 1,000 records", said), said
    out, said = on_terminal(cluster, "query", "select count(*) n from lines")
    assert json.loads(out)["rows"] == [{"n": 1000}]
    assert re.search(r"\rreading lines \[[#.]+\] +\d+%  [\d,]+ of 1,000 records", said), said
