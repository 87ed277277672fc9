"""A topic of 100 partitions gets 900 more while a group of ten reads it: how soon does each owner read them? And: a
consumer is killed with -9: how soon do other members read its partitions?

Three brokers, ten consumers in two processes (five threads with a consumer each), and this process, which creates and
produces, share the machine. Partitions have 3 replicas; records are sent with acks=all and synced.

The clock starts with the call that adds the partitions. As soon as it returns, each new one gets a record.

- assigned: the callback of each owner has received every new partition;
- fetched: every one was in a fetch request of its owner;
- flowed: the owner's program has received a record of every one.

Meanwhile ten of the old partitions, one per consumer, get a record every 100 ms from a separate producer (responses to
one producer are ordered, so it would wait for the 900). The pause is the longest time between two consecutive records.
It is compared with the same figure before the creation, and limited to half of the time until all flowed. A group that
stops for a rebalance would pause all of that time; here the pause comes only from sharing two cores. The benchmark also
counts partitions that were revoked and assigned again: none may be.

Killed: three processes with a consumer each share six partitions, which get a record every 100 ms. The clock starts
with the kill and ends with the first record of the last of the victim's partitions at another member. Two seconds of it
are the grace period in which a member with a broken stream may return.

Where the time goes: the steps in sequence on a topic without readers (decided, led, first and second record to each),
then the processor time of each process for each step. On a busy machine the wall time says little; the total processor
time divided by two cores is the minimum.

The disk matters: 3 x 900 directories and files are created. ext4 skips inodes that were deleted in the last minute, one
by one, so after many deletions (by an earlier run of this benchmark) a name costs ten times as much; the current cost
is reported first.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

from bench.brokers_load import LIMIT_S, ROOT, client_of, cpu_s, local_cluster, make_topic, run_loop
from bench.harness import Result, at_most
from tidelog.client.admin.threaded import Admin
from tidelog.client.consumer.errors import WakeupError
from tidelog.client.consumer.reader import Reader
from tidelog.client.consumer.threaded import Consumer
from tidelog.client.offsets import LATEST, list_offsets
from tidelog.client.producer.threaded import Producer
from tidelog.client.record import TopicPartition
from tidelog.testing import LocalCluster

OLD, NEW = 100, 900
CONSUMERS, PROCESSES = 10, 2
TOPIC, ALONE, GROUP = "many", "alone", "ten"
EVERY_S = 0.1
QUIET_S = 3.0
FLOWED_S_MAX = 5.0
PAUSE_PART_MAX = 0.5
"""Fraction of the time until all flowed."""
KILLED, SHARED = "killed", 6
KILLED_S_MAX = 3.0


def until(condition: Callable[[], object], what: str, *, timeout_s: float = LIMIT_S) -> None:
    end_s = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > end_s:
            raise SystemExit(f"not within {timeout_s:.0f} s: {what}")
        time.sleep(0.02)


# ---- A process of consumers: `python -m bench.rebalance BOOTSTRAP COUNT TOPIC GROUP`. Each line of its output is
# [seconds, who, what, numbers].


def say(who: int, what: str, numbers: Iterable[int]) -> None:
    sys.stdout.write(json.dumps([time.monotonic(), who, what, list(numbers)]) + "\n")
    sys.stdout.flush()


def note_fetches() -> None:
    """Report partitions that are in a fetch request for the first time."""
    seen: set[int] = set()
    request = Reader.request

    def noted(reader: Reader, places: list[Any]) -> Any:
        fresh = [place.partition.partition for place in places if place.partition.partition not in seen]
        if fresh:
            seen.update(fresh)
            say(-1, "fetched", fresh)
        return request(reader, places)

    Reader.request = noted  # type: ignore[method-assign,assignment]


def consume(who: int, consumer: Consumer, topic: str) -> None:
    def report(what: str) -> Callable[[list[TopicPartition]], None]:
        return lambda names: say(who, what, (name.partition for name in names))

    consumer.subscribe([topic], on_assigned=report("assigned"), on_revoked=report("revoked"), on_lost=report("lost"))
    try:
        while True:
            records = consumer.poll(1.0)
            if records:
                say(who, "read", (record.partition for record in records))
    except WakeupError:
        consumer.close()


def consumers(bootstrap: str, count: int, topic: str, group: str) -> None:
    note_fetches()
    made = [Consumer(bootstrap, group=group, auto_offset_reset="earliest") for _ in range(count)]
    threads = [threading.Thread(target=consume, args=(who, consumer, topic)) for who, consumer in enumerate(made)]
    for thread in threads:
        thread.start()
    sys.stdin.readline()
    for consumer in made:
        consumer.wakeup()
    for thread in threads:
        thread.join()


class Consumers:
    """A process of consumers and its reports."""

    def __init__(self, bootstrap: str, count: int, topic: str = TOPIC, group: str = GROUP) -> None:
        self.lines: list[tuple[float, int, str, list[int]]] = []
        self._process = subprocess.Popen(
            [sys.executable, "-m", "bench.rebalance", bootstrap, str(count), topic, group],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT,
            env={key: value for key, value in os.environ.items() if key != "PYTHONSAFEPATH"},
        )  # fmt: skip
        self.pid = self._process.pid
        self._thread = threading.Thread(target=self._hear, daemon=True)
        self._thread.start()

    def _hear(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self.lines.append(tuple(json.loads(line)))

    def kill(self) -> float:
        """Send SIGKILL; return the time."""
        self._process.kill()
        at_s = time.monotonic()
        self._process.wait(30)
        return at_s

    def close(self) -> None:
        with contextlib.suppress(BrokenPipeError), self._process:
            assert self._process.stdin is not None
            self._process.stdin.write("\n")
            self._process.stdin.flush()
            try:
                self._process.wait(30)
            except subprocess.TimeoutExpired:
                self._process.kill()


def said(processes: Iterable[Consumers], what: str) -> Iterator[tuple[float, list[int]]]:
    for process in processes:
        for at_s, _, kind, numbers in list(process.lines):
            if kind == what:
                yield at_s, numbers


def first_s(processes: Iterable[Consumers], what: str) -> dict[int, float]:
    """Return when each partition was first reported so."""
    found: dict[int, float] = {}
    for at_s, numbers in said(processes, what):
        for number in numbers:
            found[number] = min(at_s, found.get(number, at_s))
    return found


# ---- What is measured


@dataclass
class Costs:
    """Wall time between marks, and processor time of each process."""

    pids: dict[str, int]
    rows: list[tuple[str, float, dict[str, float]]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._last = time.monotonic(), self._now()

    def _now(self) -> dict[str, float]:
        return {name: cpu_s(pid) for name, pid in self.pids.items()}

    def mark(self, what: str) -> float:
        (before_s, before), now, now_s = self._last, self._now(), time.monotonic()
        self.rows.append((what, now_s - before_s, {name: now[name] - before[name] for name in now}))
        self._last = now_s, now
        return now_s

    @property
    def spent_s(self) -> float:
        return sum(sum(each.values()) for _, _, each in self.rows)

    def results(self, name: str) -> Iterator[Result]:
        for what, wall_s, each in self.rows:
            shares = ", ".join(f"{process} {seconds:.2f}" for process, seconds in each.items())
            spent_s = sum(each.values())
            yield Result(f"{name}: {what}", wall_s, "s", spent_s / wall_s, f"processor time ({shares} s) against wall")


def name_costs() -> tuple[float, float]:
    """Return microseconds of processor time per directory, and per file in it, on the cluster's disk."""
    count = 300
    with tempfile.TemporaryDirectory(dir=ROOT / "build", prefix="bench-names-") as path:
        paths = [Path(path) / str(number) for number in range(count)]
        began_s = time.process_time()
        for one in paths:
            one.mkdir()
        made_s = time.process_time()
        for one in paths:
            (one / "file").touch()
        return (made_s - began_s) / count * 1e6, (time.process_time() - made_s) / count * 1e6


def send_all(producer: Producer, topic: str, numbers: Iterable[int]) -> None:
    """Send a record to each partition."""
    sent = [producer.send(topic, b"%d" % number, partition=number) for number in numbers]
    for delivery in sent:
        delivery.result()


def alone(cluster: LocalCluster, admin: Admin, producer: Producer) -> Costs:
    """Measure the steps in sequence on a topic without readers."""
    admin.create_topic(ALONE, partitions=OLD, replication_factor=3)
    send_all(producer, ALONE, range(OLD))
    costs = Costs(pids_of(cluster))
    admin.add_partitions({ALONE: OLD + NEW})
    costs.mark(f"{NEW} partitions decided")
    run_loop(all_led(cluster))
    costs.mark("all of them led")
    send_all(producer, ALONE, range(OLD, OLD + NEW))
    costs.mark("a first record to each acknowledged")
    send_all(producer, ALONE, range(OLD, OLD + NEW))
    costs.mark("a second one")
    return costs


async def all_led(cluster: LocalCluster) -> None:
    async with client_of(cluster) as client:
        topic = await client.topic(ALONE)
        while len(topic.partitions) < OLD + NEW:
            await client.refresh(ALONE)
            topic = await client.topic(ALONE)
        await list_offsets(client, topic, LATEST)


def pids_of(cluster: LocalCluster, processes: Iterable[Consumers] = ()) -> dict[str, int]:
    return (
        {f"node {number}": cluster.pid(number) for number in (1, 2, 3)}
        | {f"consumers {number}": process.pid for number, process in enumerate(processes, 1)}
        | {"producer": os.getpid()}
    )


class Trickle:
    """Sends a record to some partitions every 100 ms, for the duration of a `with` block."""

    def __init__(self, bootstrap: str, numbers: Iterable[int], topic: str = TOPIC) -> None:
        self._topic = topic
        self._producer = Producer(bootstrap)
        self._numbers = list(numbers)
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._send)

    def _send(self) -> None:
        while not self._is_over.wait(EVERY_S):
            for number in self._numbers:
                self._producer.send(self._topic, b"-", partition=number)

    def __enter__(self) -> None:
        self._thread.start()

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        self._thread.join()
        self._producer.close()


@dataclass
class Whole:
    costs: Costs
    decided_s: float = 0.0
    assigned_s: float = 0.0
    fetched_s: float = 0.0
    flowed_s: float = 0.0
    calm_s: float = 0.0
    pause_s: float = 0.0
    taken: int = 0
    """Revoked partitions."""
    load: float = 0.0


def longest_gap(processes: list[Consumers], numbers: list[int], begin_s: float, end_s: float) -> float:
    """Return the longest time between two consecutive records of one partition."""
    times: dict[int, list[float]] = {number: [] for number in numbers}
    for at_s, read in said(processes, "read"):
        if begin_s <= at_s <= end_s:
            for number in set(read) & times.keys():
                times[number].append(at_s)
    return max(after - before for row in times.values() for before, after in pairwise([begin_s, *sorted(row), end_s]))


def whole(cluster: LocalCluster, admin: Admin, producer: Producer) -> Whole:
    processes: list[Consumers] = []
    try:
        processes += [Consumers(cluster.bootstrap, CONSUMERS // PROCESSES) for _ in range(PROCESSES)]

        until(lambda: is_dealt(processes), "the old partitions are dealt")
        watched = [min(numbers) for numbers in held(processes)]
        send_all(producer, TOPIC, range(OLD))
        until(lambda: len(first_s(processes, "read")) == OLD, "the old partitions flow")
        with Trickle(cluster.bootstrap, watched):
            calm_s = time.monotonic()
            time.sleep(QUIET_S)
            return grown(cluster, admin, producer, processes, watched, calm_s)
    finally:
        for process in processes:
            process.close()


def held(processes: Iterable[Consumers]) -> list[set[int]]:
    """Return the partitions of each consumer."""
    found: dict[tuple[int, int], set[int]] = {}
    for process in processes:
        for _, who, what, numbers in list(process.lines):
            mine = found.setdefault((process.pid, who), set())
            if what == "assigned":
                mine.update(numbers)
            elif what in ("revoked", "lost"):
                mine.difference_update(numbers)
    return [mine for (_, who), mine in found.items() if who >= 0]


def is_dealt(processes: Iterable[Consumers]) -> bool:
    shares = [len(numbers) for numbers in held(processes)]
    return len(shares) == CONSUMERS and sum(shares) == OLD and max(shares) == OLD // CONSUMERS


def grown(
    cluster: LocalCluster,
    admin: Admin,
    producer: Producer,
    processes: list[Consumers],
    watched: list[int],
    calm_s: float,
) -> Whole:
    fresh = range(OLD, OLD + NEW)
    taken = len(list(said(processes, "revoked")))
    found = Whole(Costs(pids_of(cluster, processes)))
    began_s = time.monotonic()
    admin.add_partitions({TOPIC: OLD + NEW})
    found.decided_s = found.costs.mark(f"{NEW} partitions decided") - began_s
    sending = threading.Thread(target=send_all, args=(producer, TOPIC, fresh))
    sending.start()
    until(lambda: set(fresh) <= first_s(processes, "assigned").keys(), "every new partition is assigned")
    found.costs.mark("then all assigned")
    until(lambda: set(fresh) <= first_s(processes, "fetched").keys(), "every one is fetched from")
    found.costs.mark("then all fetched from")
    until(lambda: set(fresh) <= first_s(processes, "read").keys(), "every one has flowed")
    ended_s = found.costs.mark("then all flowed")
    found.load = os.getloadavg()[0]
    sending.join()
    time.sleep(3 * EVERY_S)
    for what, name in (("assigned", "assigned_s"), ("fetched", "fetched_s"), ("read", "flowed_s")):
        times = first_s(processes, what)
        setattr(found, name, max(times[number] for number in fresh) - began_s)
    found.calm_s = longest_gap(processes, watched, calm_s, began_s)
    found.pause_s = longest_gap(processes, watched, began_s, ended_s)
    found.taken = len(list(said(processes, "revoked"))) + len(list(said(processes, "lost"))) - taken
    return found


def killed_s(cluster: LocalCluster, admin: Admin) -> float:
    """Return the seconds from the kill until others read all of the victim's partitions."""
    admin.create_topic(KILLED, partitions=SHARED, replication_factor=3)
    processes: list[Consumers] = []
    try:
        processes += [Consumers(cluster.bootstrap, 1, KILLED, KILLED) for _ in range(3)]
        until(lambda: sorted(map(len, held(processes))) == [2, 2, 2], "each has two")
        with Trickle(cluster.bootstrap, range(SHARED), KILLED):
            until(lambda: len(first_s(processes, "read")) == SHARED, "all flow")
            victim, *others = processes
            (mine,) = held([victim])
            at_s = victim.kill()

            def flowing() -> dict[int, float]:
                """Return the first records after the kill: before, the others did not read these partitions."""
                return {number: when for number, when in first_s(others, "read").items() if number in mine}

            until(lambda: flowing().keys() == mine, "the others read what it had")
            return max(flowing().values()) - at_s
    finally:
        for process in processes:
            process.close()


def run() -> Iterator[Result]:
    directory_us, file_us = name_costs()
    with local_cluster(3) as cluster, Admin(cluster.bootstrap) as admin, Producer(cluster.bootstrap) as producer:
        parts = alone(cluster, admin, producer)
        run_loop(prepare(cluster))
        found = whole(cluster, admin, producer)
        elsewhere_s = killed_s(cluster, admin)
    name = f"rebalance, {CONSUMERS} consumers, {NEW} partitions added"
    yield Result(f"{name}: decided", found.decided_s, "s")
    yield Result(f"{name}: all assigned", found.assigned_s, "s")
    yield Result(f"{name}: all fetched from", found.fetched_s, "s")
    yield at_most(f"{name}: all flowed", found.flowed_s, "s", target=FLOWED_S_MAX)
    yield at_most(f"{name}: taken from anybody", found.taken, "times", target=0)
    gap = "rebalance, longest gap between two records of a partition that stays"
    yield Result(gap, found.pause_s, "s", found.pause_s / found.calm_s, "the longest before")
    yield at_most(
        gap,
        found.pause_s,
        "s",
        target=PAUSE_PART_MAX,
        ratio=found.pause_s / found.flowed_s,
        anchor="all flowed: so long stands a group that stops",
    )
    yield at_most(
        "rebalance, a consumer killed with -9: its partitions flow elsewhere", elsewhere_s, "s", target=KILLED_S_MAX
    )
    spent_s = found.costs.spent_s
    yield Result(
        f"{name}: processor time of all", spent_s, "s", spent_s / 2 / found.flowed_s, "half of it against all flowed"
    )
    yield Result("rebalance, load of the machine (1 minute)", found.load, "")
    yield Result("rebalance, the disk: a directory", directory_us, "us")
    yield Result("rebalance, the disk: a file", file_us, "us")
    yield from parts.results("rebalance, alone")
    yield from found.costs.results("rebalance, with the group")


async def prepare(cluster: LocalCluster) -> None:
    async with client_of(cluster) as client:
        await make_topic(client, TOPIC, partitions=OLD)


if __name__ == "__main__":
    consumers(sys.argv[1], int(sys.argv[2]), *sys.argv[3:])
