"""What every fault procedure does: real commands write and read numbered records all the while; then it is checked."""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from patience import until

from tidelog.cli.channel import ClusterChannel
from tidelog.client.history import KINDS
from tidelog.rpc.v1 import admin_pb2, cluster_pb2

BROKERS = (1, 2, 3)
EACH_LEADS_ONE = "1:2:3,2:3:1,3:1:2"
"""Partition 0 is led by broker 1, and so on."""
COMMAND_TIMEOUT_S = 60
MORE_ACKS = 5
"""Batches that are acknowledged, or read, after a fault: work goes on."""


def start(at: str, *arguments: str, before: Sequence[str] = ()) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [*before, sys.executable, "-m", "tidelog", *arguments],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "TIDELOG_BOOTSTRAP": at, "PYTHONSAFEPATH": "1"},
    )


def tidelog(at: str, *arguments: str, code: int | None = 0) -> tuple[str, str]:
    """What a command has said, on stdout and stderr; `code` None: it may fail."""
    with start(at, *arguments) as process:
        try:
            out, err = process.communicate(timeout=COMMAND_TIMEOUT_S)
        finally:
            process.kill()
    assert code in (None, process.returncode), f"{arguments}: {process.returncode}\n{out}\n{err}"
    return out, err


def ask(at: str, *arguments: str, code: int | None = 0) -> Any:
    return json.loads(tidelog(at, *arguments, "--output", "json", code=code)[0])


def create(at: str, topic: str, *settings: str, replicas: str = EACH_LEADS_ONE) -> None:
    """In sync as a whole when it returns. `min.insync.replicas` is 2: a majority of three."""
    assignment = [admin_pb2.Replicas(brokers=map(int, row.split(":"))) for row in replicas.split(",")]
    pairs = [setting.split("=") for setting in settings]
    configs = [admin_pb2.ConfigPair(key=key, value=value) for key, value in pairs]
    request = admin_pb2.CreateTopicsRequest(
        topics=[admin_pb2.NewTopic(name=topic, assignment=assignment, configs=configs)]
    )
    with ClusterChannel(argparse.Namespace(bootstrap=at)) as channel:
        (made,) = channel.call("Admin/CreateTopics", request, admin_pb2.CreateTopicsResponse).topics
    assert not made.HasField("error"), made
    until(lambda: is_whole(at, topic), f"{topic} is in sync")


def partitions(at: str, topic: str) -> list[admin_pb2.PartitionDescription]:
    with ClusterChannel(argparse.Namespace(bootstrap=at)) as channel:
        request = admin_pb2.DescribeTopicsRequest(topics=[topic])
        (found,) = channel.call("Admin/DescribeTopics", request, admin_pb2.DescribeTopicsResponse).topics
    return sorted(found.partitions, key=lambda row: row.partition)


def is_whole(at: str, topic: str) -> bool:
    """Every partition has a leader, and all of its replicas are in sync."""
    rows = partitions(at, topic)
    return bool(rows) and all(row.leader >= 0 and sorted(row.isr) == sorted(row.replicas) for row in rows)


def are_in_sync(at: str, topic: str, brokers: Sequence[int]) -> bool:
    """These and no others, in every partition."""
    return all(sorted(row.isr) == sorted(brokers) for row in partitions(at, topic))


def is_left(at: str, topic: str, broker: int) -> bool:
    """It leads nothing and is nowhere in sync, and others lead."""
    return all(row.leader not in (-1, broker) and broker not in row.isr for row in partitions(at, topic))


def controller(at: str) -> int:
    with ClusterChannel(argparse.Namespace(bootstrap=at)) as channel:
        request = cluster_pb2.DescribeQuorumRequest()
        return channel.call("Cluster/DescribeQuorum", request, cluster_pb2.DescribeQuorumResponse).leader


def write_some(at: str, topic: str, history: Path, records: int, *, before: Sequence[str] = ()) -> dict[str, Any]:
    """Numbered records to the end of the topic, all of them acknowledged; what the writer says of it."""
    command = ("verify", "produce", topic, "--records", str(records), "--history", str(history), "--output", "json")
    with start(at, *command, "--rate", "5000", before=before) as process:
        try:
            out, err = process.communicate(timeout=COMMAND_TIMEOUT_S)
        finally:
            process.kill()
    assert process.returncode == 0, f"{out}\n{err}"
    told: dict[str, Any] = json.loads(out)
    assert told["acknowledged"] == records, told
    return told


def judge(at: str, topic: str, *histories: Path, lost: int = 0) -> dict[str, Any]:
    """The verdict on what was written, read once more from start to end: `lost` of it and nothing else is wrong."""
    last = histories[0].parent / f"{topic}-last.jsonl"
    tidelog(at, "verify", "consume", topic, "--history", str(last))
    verdict: dict[str, Any] = ask(at, "verify", "check", *map(str, histories), str(last), code=1 if lost else 0)
    assert verdict["is_complete"], verdict
    assert verdict["counts"] == {**dict.fromkeys(KINDS, 0), "lost": lost}, verdict
    return verdict


class Traffic:
    """A verifying writer and a verifying reader of a topic, each a process of its own."""

    def __init__(self, path: Path, topic: str) -> None:
        self.topic = topic
        self.written, self.read = path / f"{topic}-written.jsonl", path / f"{topic}-read.jsonl"
        self.told: dict[str, Any] = {}
        """What the writer said in the end."""

    def _events(self, path: Path, kind: str) -> Counter[int]:
        """By partition: batches that were acknowledged, or pieces that were read."""
        if not path.exists():
            return Counter()
        lines = path.read_text(encoding="utf-8").splitlines()
        start = f'{{"event":"{kind}",'
        return Counter(json.loads(line)["partition"] for line in lines if line.startswith(start) and line[-1] == "}")

    def acks(self) -> Counter[int]:
        return self._events(self.written, "ack")

    def reads(self) -> Counter[int]:
        return self._events(self.read, "read")

    def goes_on(self, partitions: Sequence[int] = (0, 1, 2)) -> float:
        """Waits until all of these were written to and read from again; how long that took, in seconds."""
        began_s, acks, reads = time.monotonic(), self.acks(), self.reads()

        def has_more(look: Callable[[], Counter[int]], before: Counter[int]) -> bool:
            now = look()
            return all(now[number] >= before[number] + MORE_ACKS for number in partitions)

        until(lambda: has_more(self.acks, acks), f"writing to {self.topic} goes on")
        took_s = time.monotonic() - began_s
        until(lambda: has_more(self.reads, reads), f"reading of {self.topic} goes on")
        return took_s


@contextmanager
def traffic(
    at: str,
    path: Path,
    topic: str,
    *,
    clients_at: str | None = None,
    before: Sequence[str] = (),
    rate: int = 200,
) -> Iterator[Traffic]:
    """Writes and reads for the length of the block, with acks=all. After it the topic is whole, nothing has failed,
    and everything acknowledged is there once, in order, in its place."""
    running = Traffic(path, topic)
    command = ("verify", "produce", topic, "--rate", str(rate), "--history", str(running.written), "--output", "json")
    follow = ("verify", "consume", topic, "--follow", "--history", str(running.read), "--output", "json")
    with (
        start(clients_at or at, *command, before=before) as writer,
        start(clients_at or at, *follow, before=before) as reader,
    ):
        try:
            running.goes_on()
            yield running
            running.goes_on()
            until(lambda: is_whole(at, topic), f"{topic} is in sync again")
            writer.send_signal(signal.SIGINT)
            out, err = writer.communicate(timeout=COMMAND_TIMEOUT_S)
            reader.send_signal(signal.SIGINT)
            _, said = reader.communicate(timeout=COMMAND_TIMEOUT_S)
        finally:
            writer.kill()
            reader.kill()
    assert out, f"the writer said nothing: {err}; the reader: {said}"
    running.told = json.loads(out)
    assert (running.told["failed"], running.told["acknowledged"]) == (0, running.told["sent"]), f"{out}\n{err}"
    verdict = judge(at, topic, running.written, running.read)
    assert verdict["acknowledged"] == running.told["sent"]
    print(
        f"{topic}: {running.told['sent']} records, {running.told['retries']} retries, "
        f"the longest stand was {running.told['longest_gap_ms']} ms"
    )
