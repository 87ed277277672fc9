"""`tidelog produce` on a real cluster: pipes, FIFOs, terminals, signals, bytes as they are, topics that it creates."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import termios
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.clusters.commands import Shell
from support.clusters.waiting import until

import tidelog
from tidelog.testing import LocalCluster

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(300)]
WAIT_S = 60.0


@pytest.fixture(scope="module")
def cluster() -> Iterator[LocalCluster]:
    with LocalCluster(nodes=1, settings={"auto.create.topics.enable": True}) as cluster:
        yield cluster


@pytest.mark.requirement("b:EX-01")
def test_a_first_broker_takes_two_messages_and_gives_them_back(shell: Shell) -> None:
    said = shell.run("topics", "create", "test", "--partitions", "1", "--replication-factor", "1")
    assert said.startswith("test: ")
    (topic,) = shell.json("topics", "describe", "test")["topics"]
    assert (topic["name"], topic["replication_factor"]) == ("test", 1)
    (row,) = topic["partitions"]
    assert [row[key] for key in ("partition", "leader", "replicas", "isr")] == [0, 1, [1], [1]]
    shell.run("produce", "test", stdin="Test Message 1\nTest Message 2\n")
    read = shell.run("consume", "test", "--from-beginning", "--max-messages", "2")
    assert read == "Test Message 1\nTest Message 2\n"


def topics(admin: tidelog.Admin) -> set[str]:
    return {row.name for row in admin.list_topics()}


def test_the_first_record_creates_the_topic(shell: Shell, admin: tidelog.Admin) -> None:
    assert shell.json("produce", "first", stdin="one\ntwo\n")["records"] == 2
    assert "first" in topics(admin)


def test_empty_input_creates_nothing_and_is_reported(shell: Shell, admin: tidelog.Admin) -> None:
    assert shell.json("produce", "misspelt") == {
        "topic": "misspelt",
        "records": 0,
        "failed_batches": 0,
        "error": None,
        "partitions": [],
    }
    assert shell.err == "tidelog: nothing was read, and there is no topic 'misspelt' yet\n"
    assert "misspelt" not in topics(admin)


@pytest.mark.parametrize("flags", [["--key-separator", ":"], ["--input", "json"]])
def test_a_line_that_is_no_record_creates_nothing(shell: Shell, admin: tidelog.Admin, flags: list[str]) -> None:
    shell.run("produce", "wrong", *flags, stdin="no record\n", code=2)
    assert "tidelog: line 1" in shell.err
    assert "wrong" not in topics(admin)


# Input that does not end: each line is stored as it comes.


@contextlib.contextmanager
def started(shell: Shell, *arguments: str, **streams: Any) -> Iterator[subprocess.Popen[bytes]]:
    """A command that runs until it ends by itself; killed if it does not."""
    with shell.start(*arguments, text=False, **{"stdin": subprocess.PIPE, **streams}) as process:
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
    until(lambda: values(cluster, topic) == wanted, f"{topic} has {wanted}")  # the topic may not be there yet


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_each_line_of_a_pipe_is_stored_as_it_comes_and_a_signal_says_what_was_stored(
    cluster: LocalCluster, shell: Shell, number: signal.Signals, code: int
) -> None:
    topic = f"pipe-{number.name}"
    with started(shell, "produce", topic, "--partition", "0") as process:
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
        created, stored, *_ = said.splitlines()
        assert created.startswith(f"tidelog: created topic '{topic}'"), said
        assert stored == f"tidelog: 3 records stored in {topic}", said
        assert "Traceback" not in said
    assert values(cluster, topic) == sent, "half a line is no record"


def test_a_signal_ends_the_json_document_of_what_was_stored(cluster: LocalCluster, shell: Shell) -> None:
    with started(shell, "produce", "reported", "--output", "json") as process:
        assert process.stdin is not None
        process.stdin.write(b"one\n")
        process.stdin.flush()
        await_values(cluster, "reported", [b"one"])
        process.send_signal(signal.SIGTERM)
        assert process.wait(WAIT_S) == 143
        assert process.stdout is not None
        assert json.loads(process.stdout.read())["records"] == 1


def test_each_line_of_a_fifo_is_stored_as_it_comes(cluster: LocalCluster, shell: Shell, tmp_path: Path) -> None:
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    sink = os.open(fifo, os.O_RDWR)  # a reader may open it at once
    source = os.open(fifo, os.O_RDONLY)
    with started(shell, "produce", "fifo", stdin=source) as process:
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
def on_terminal(shell: Shell, *arguments: str) -> Iterator[tuple[subprocess.Popen[bytes], Terminal]]:
    """The command in the foreground of a terminal of its own: Ctrl-C and Ctrl-D are keys."""
    terminal = Terminal()
    streams = {"stdin": terminal.theirs, "stdout": subprocess.PIPE, "stderr": terminal.theirs}
    own_terminal = ("setsid", "--ctty")
    try:
        with started(shell, *arguments, wrapper=own_terminal, **streams) as process:
            yield process, terminal
    finally:
        terminal.close()


def test_what_is_typed_is_stored_line_by_line_and_ctrl_c_ends_it(cluster: LocalCluster, shell: Shell) -> None:
    with on_terminal(shell, "produce", "typed") as (process, terminal):
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
    shell: Shell, admin: tidelog.Admin, key: int | None, code: int, is_there: bool
) -> None:
    admin.create_topic("asked", partitions=1)
    with on_terminal(shell, "topics", "delete", "asked") as (process, terminal):
        terminal.await_text("[y/N] ")
        os.write(terminal.ours, b"y\n" if key is None else termios.tcgetattr(terminal.theirs)[6][key])
        if is_there:
            terminal.await_text("tidelog: nothing was changed")
        assert process.wait(WAIT_S) == code
    assert ("asked" in topics(admin)) is is_there
    if is_there:
        admin.delete_topic("asked")


# Bytes.


def test_bytes_are_stored_as_they_are(cluster: LocalCluster, shell: Shell) -> None:
    data = b"a\r\n\r\n\x00\xff\xfe\n\nno end\r"
    shell.run("produce", "bytes", "--partition", "0", stdin=data)
    assert values(cluster, "bytes") == [b"a\r", b"\r", b"\x00\xff\xfe", b"", b"no end\r"]
    assert shell.done("consume", "bytes", "--from-beginning", "--exit-at-end").raw == data + b"\n"


def test_a_file_is_one_record(cluster: LocalCluster, shell: Shell, tmp_path: Path) -> None:
    data = bytes(range(256)) * 100 + b"\r\n"
    path = tmp_path / "picture.bin"
    path.write_bytes(data)
    files = ("--file", str(path), "--file", "-")
    shell.run("produce", "files", "--partition", "0", "--key", "p", *files, stdin="all\nof\nit\n")
    assert values(cluster, "files") == [data, b"all\nof\nit\n"]
    path.write_bytes(b"x" * (2 << 20))
    shell.run("produce", "files", "--file", str(path), code=1)
    assert "max.message.bytes" in shell.err
    assert "0 records stored" in shell.err
    with path.open("wb") as file:
        file.truncate(100 << 20)
    shell.run("produce", "files", "--file", str(path), code=2)
    assert "it has 104857600 bytes; a record may have" in shell.err
