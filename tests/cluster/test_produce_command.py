"""`tidelog produce` on a real cluster: pipes, FIFOs, terminals, signals, bytes as they are, topics that it creates."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import termios
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import tidelog
from tidelog.testing import LocalCluster

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(300)]
WAIT_S = 60.0


@pytest.fixture(scope="module")
def cluster() -> Iterator[LocalCluster]:
    with LocalCluster(nodes=1, settings={"auto.create.topics.enable": True}) as cluster:
        yield cluster


def produce(cluster: LocalCluster, topic: str, *flags: str, stdin: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "tidelog", "produce", topic, *flags, "--bootstrap", cluster.bootstrap],
        input=stdin,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        env={**os.environ, "PYTHONSAFEPATH": "1"},
    )


def topics(cluster: LocalCluster) -> set[str]:
    with tidelog.Admin(cluster.bootstrap) as admin:
        return {row.name for row in admin.list_topics()}


def test_the_first_record_creates_the_topic(cluster: LocalCluster) -> None:
    done = produce(cluster, "first", "--output", "json", stdin="one\ntwo\n")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["records"] == 2
    assert "first" in topics(cluster)


def test_nothing_to_send_creates_nothing_and_is_told(cluster: LocalCluster) -> None:
    done = produce(cluster, "misspelt", "--output", "json", stdin="")
    assert done.returncode == 0
    assert json.loads(done.stdout) == {
        "topic": "misspelt",
        "records": 0,
        "failed_batches": 0,
        "error": None,
        "partitions": [],
    }
    assert done.stderr == "tidelog: nothing was read, and there is no topic 'misspelt' yet\n"
    assert "misspelt" not in topics(cluster)


@pytest.mark.parametrize("flags", [["--key-separator", ":"], ["--input", "json"]])
def test_a_line_that_is_no_record_creates_nothing(cluster: LocalCluster, flags: list[str]) -> None:
    done = produce(cluster, "wrong", *flags, stdin="no record\n")
    assert done.returncode == 2
    assert "line 1: " in done.stderr
    assert "wrong" not in topics(cluster)


# Input that does not end: each line is stored as it comes.


@contextlib.contextmanager
def started(cluster: LocalCluster, *arguments: str, **streams: Any) -> Iterator[subprocess.Popen[bytes]]:
    """A command that runs until it ends by itself; killed if it does not."""
    process = subprocess.Popen(
        [sys.executable, "-m", "tidelog", *arguments, "--bootstrap", cluster.bootstrap],
        env={**os.environ, "PYTHONSAFEPATH": "1"},
        **{"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, **streams},
    )
    with process:
        try:
            yield process
        finally:
            if process.poll() is None:
                process.kill()


def values(cluster: LocalCluster, topic: str) -> list[bytes | None]:
    table = tidelog.read_arrow(topic, bootstrap=cluster.bootstrap)
    found: list[bytes | None] = table.sort_by([("partition", "ascending"), ("offset", "ascending")])[
        "value"
    ].to_pylist()
    return found


def await_values(cluster: LocalCluster, topic: str, wanted: list[bytes]) -> None:
    deadline_s = time.monotonic() + WAIT_S
    found: list[bytes | None] = []
    while found != wanted:
        assert time.monotonic() < deadline_s, f"{topic} has {found}, not {wanted}"
        with contextlib.suppress(tidelog.TidelogError):  # the topic may not be there yet
            found = values(cluster, topic)
        time.sleep(0.05)


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_each_line_of_a_pipe_is_stored_as_it_comes_and_a_signal_says_what_was_stored(
    cluster: LocalCluster, number: signal.Signals, code: int
) -> None:
    topic = f"pipe-{number.name}"
    with started(cluster, "produce", topic, "--partition", "0") as process:
        assert process.stdin is not None
        sent: list[bytes] = []
        for line in (b"first", b"second\r", b"third"):
            process.stdin.write(line + b"\n")
            process.stdin.flush()
            sent.append(line)
            await_values(cluster, topic, sent)
        process.stdin.write(b"half a li")
        process.stdin.flush()
        process.send_signal(number)
        assert process.wait(WAIT_S) == code
        assert process.stderr is not None
        said = process.stderr.read().decode()
        assert said.startswith(f"tidelog: 3 records stored in {topic}\n"), said
        assert "Traceback" not in said
    assert values(cluster, topic) == sent, "half a line is no record"


def test_a_signal_ends_the_json_document_of_what_was_stored(cluster: LocalCluster) -> None:
    with started(cluster, "produce", "reported", "--output", "json") as process:
        assert process.stdin is not None
        process.stdin.write(b"one\n")
        process.stdin.flush()
        await_values(cluster, "reported", [b"one"])
        process.send_signal(signal.SIGTERM)
        assert process.wait(WAIT_S) == 143
        assert process.stdout is not None
        assert json.loads(process.stdout.read())["records"] == 1


def test_each_line_of_a_fifo_is_stored_as_it_comes(cluster: LocalCluster, tmp_path: Path) -> None:
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    sink = os.open(fifo, os.O_RDWR)  # a reader may open it at once
    source = os.open(fifo, os.O_RDONLY)
    with started(cluster, "produce", "fifo", stdin=source) as process:
        os.write(sink, b"one\n")
        await_values(cluster, "fifo", [b"one"])
        os.write(sink, b"two\nthree")
        os.close(sink)
        os.close(source)
        assert process.wait(WAIT_S) == 0
    assert set(values(cluster, "fifo")) == {b"one", b"two", b"three"}, "the last line has no end, and is a record"


class Terminal:
    """A terminal with a command on it."""

    def __init__(self) -> None:
        self.ours, self.theirs = os.openpty()
        self.shown = ""

    def await_text(self, text: str) -> None:
        deadline_s = time.monotonic() + WAIT_S
        while text not in self.shown:
            assert time.monotonic() < deadline_s, f"the terminal shows {self.shown!r}, not {text!r}"
            if select.select([self.ours], [], [], 0.5)[0]:
                self.shown += os.read(self.ours, 65_536).decode()

    def close(self) -> None:
        os.close(self.ours)
        os.close(self.theirs)


@contextlib.contextmanager
def on_terminal(cluster: LocalCluster, *arguments: str) -> Iterator[tuple[subprocess.Popen[bytes], Terminal]]:
    """The command in the foreground of a terminal of its own: Ctrl-C and Ctrl-D are keys."""
    terminal = Terminal()

    def own() -> None:
        os.setsid()
        os.close(os.open(os.ttyname(terminal.theirs), os.O_RDWR))  # becomes the controlling terminal

    streams = {"stdin": terminal.theirs, "stdout": subprocess.PIPE, "stderr": terminal.theirs, "preexec_fn": own}
    try:
        with started(cluster, *arguments, **streams) as process:
            yield process, terminal
    finally:
        terminal.close()


def test_what_is_typed_is_stored_line_by_line_and_ctrl_c_ends_it(cluster: LocalCluster) -> None:
    with on_terminal(cluster, "produce", "typed") as (process, terminal):
        os.write(terminal.ours, b"hello\n")
        await_values(cluster, "typed", [b"hello"])
        os.write(terminal.ours, termios.tcgetattr(terminal.theirs)[6][termios.VINTR])
        terminal.await_text("tidelog: 1 record stored in typed")
        assert process.wait(WAIT_S) == 130


@pytest.mark.parametrize(
    ("key", "code", "is_there"),
    [(termios.VINTR, 130, True), (termios.VEOF, 1, True), (None, 0, False)],
    ids=["ctrl-c", "ctrl-d", "yes"],
)
def test_a_question_obeys_ctrl_c_and_the_end_of_the_input(
    cluster: LocalCluster, key: int | None, code: int, is_there: bool
) -> None:
    with tidelog.Admin(cluster.bootstrap) as admin:
        admin.create_topic("asked", partitions=1)
    with on_terminal(cluster, "topics", "delete", "asked") as (process, terminal):
        terminal.await_text("[y/N] ")
        os.write(terminal.ours, b"y\n" if key is None else termios.tcgetattr(terminal.theirs)[6][key])
        if is_there:
            terminal.await_text("tidelog: nothing was changed")
        assert process.wait(WAIT_S) == code
    assert ("asked" in topics(cluster)) is is_there
    if is_there:
        with tidelog.Admin(cluster.bootstrap) as admin:
            admin.delete_topic("asked")


# Bytes.


def test_bytes_are_stored_as_they_are(cluster: LocalCluster, tmp_path: Path) -> None:
    data = b"a\r\n\r\n\x00\xff\xfe\n\nno end\r"
    with started(cluster, "produce", "bytes", "--partition", "0") as process:
        process.communicate(data, timeout=WAIT_S)
        assert process.returncode == 0
    assert values(cluster, "bytes") == [b"a\r", b"\r", b"\x00\xff\xfe", b"", b"no end\r"]
    with started(cluster, "consume", "bytes", "--from-beginning", "--exit-at-end") as process:
        out, _ = process.communicate(timeout=WAIT_S)
    assert out == data + b"\n"


def test_a_file_is_one_record(cluster: LocalCluster, tmp_path: Path) -> None:
    data = bytes(range(256)) * 100 + b"\r\n"
    path = tmp_path / "picture.bin"
    path.write_bytes(data)
    with started(
        cluster, "produce", "files", "--partition", "0", "--key", "p", "--file", str(path), "--file", "-"
    ) as one:
        _, err = one.communicate(b"all\nof\nit\n", timeout=WAIT_S)
        assert one.returncode == 0, err
    assert values(cluster, "files") == [data, b"all\nof\nit\n"]
    path.write_bytes(b"x" * (2 << 20))
    with started(cluster, "produce", "files", "--file", str(path)) as two:
        _, err = two.communicate(timeout=WAIT_S)
    assert two.returncode == 1
    assert b"max.message.bytes" in err, err
    assert b"0 records stored" in err
    with path.open("wb") as file:
        file.truncate(100 << 20)
    with started(cluster, "produce", "files", "--file", str(path)) as three:
        _, err = three.communicate(timeout=WAIT_S)
    assert three.returncode == 2
    assert b"it has 104857600 bytes; a record may have" in err
