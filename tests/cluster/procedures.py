"""What every fault procedure does: real commands write and read numbered records all the while; then it is checked."""

from __future__ import annotations

import argparse
import json
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from support.clusters.commands import Shell
from support.clusters.waiting import DEADLINE_S, until
from support.grpc_api.raw_channel import ClusterChannel

from tidelog.client.history import KINDS
from tidelog.rpc.v1 import admin_pb2, cluster_pb2

BROKERS = (1, 2, 3)
EACH_LEADS_ONE = "1:2:3,2:3:1,3:1:2"
"""Partition 0 is led by broker 1, and so on."""
MORE_ACKS = 5
"""Batches that are acknowledged, or read, after a fault: work goes on."""


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


def write_some(at: str, topic: str, history: Path, records: int) -> None:
    """Numbered records to the end of the topic, all of them acknowledged."""
    flags = ("--records", str(records), "--rate", "5000", "--history", str(history))
    summary = Shell(at).json("verify", "produce", topic, *flags)
    assert summary["acknowledged"] == records, summary


def judge(at: str, topic: str, *histories: Path, lost: int = 0) -> dict[str, Any]:
    """The verdict on what was written, read once more from start to end: `lost` of it and nothing else is wrong."""
    last = histories[0].parent / f"{topic}-last.jsonl"
    shell = Shell(at)
    shell.run("verify", "consume", topic, "--history", str(last))
    verdict: dict[str, Any] = shell.json("verify", "check", *map(str, histories), str(last), code=1 if lost else 0)
    assert verdict["is_complete"], verdict
    assert verdict["counts"] == {**dict.fromkeys(KINDS, 0), "lost": lost}, verdict
    return verdict


class Events:
    """Counts the events of one kind in a history that grows, by partition."""

    def __init__(self, path: Path, kind: str) -> None:
        self._path, self._start = path, f'{{"event":"{kind}",'.encode()
        self._counted_bytes = 0
        self._counts = Counter[int]()

    def now(self) -> Counter[int]:
        if self._path.exists():
            with self._path.open("rb") as file:
                file.seek(self._counted_bytes)
                for line in file:
                    if not line.endswith(b"\n"):
                        break
                    self._counted_bytes += len(line)
                    if line.startswith(self._start):
                        self._counts[json.loads(line)["partition"]] += 1
        return Counter(self._counts)


class Traffic:
    """A verifying writer and a verifying reader of a topic, each a process of its own."""

    def __init__(self, path: Path, topic: str) -> None:
        self.topic = topic
        self.written, self.read = path / f"{topic}-written.jsonl", path / f"{topic}-read.jsonl"
        self.acks, self.reads = Events(self.written, "ack").now, Events(self.read, "read").now

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
    wrapper: Sequence[str] = (),
    rate: int = 200,
) -> Iterator[Traffic]:
    """Writes and reads for the length of the block, with acks=all. After it the topic is whole, nothing has failed,
    and everything acknowledged is there once, in order, in its place."""
    running = Traffic(path, topic)
    command = ("verify", "produce", topic, "--rate", str(rate), "--history", str(running.written), "--output", "json")
    follow = ("verify", "consume", topic, "--follow", "--history", str(running.read), "--output", "json")
    shell = Shell(clients_at or at)
    with shell.start(*command, wrapper=wrapper) as writer, shell.start(*follow, wrapper=wrapper) as reader:
        try:
            running.goes_on()
            yield running
            running.goes_on()
            until(lambda: is_whole(at, topic), f"{topic} is in sync again")
            writer.send_signal(signal.SIGINT)
            reader.send_signal(signal.SIGINT)
            out, err = writer.communicate(timeout=DEADLINE_S)
            _, said = reader.communicate(timeout=DEADLINE_S)
        finally:
            writer.kill()
            reader.kill()
    assert out, f"the writer said nothing: {err}; the reader: {said}"
    summary = json.loads(out)
    assert (summary["failed"], summary["acknowledged"]) == (0, summary["sent"]), f"{out}\n{err}"
    verdict = judge(at, topic, running.written, running.read)
    assert verdict["acknowledged"] == summary["sent"]
    print(
        f"{topic}: {summary['sent']} records, {summary['retries']} retries, "
        f"the longest stand was {summary['longest_gap_ms']} ms"
    )
