"""How long a partition cannot be written when its leader dies or freezes: three real processes, a client under load.

One batch at a time goes to one partition with 3 replicas, acks=all. The figure is the time from the signal to the next
acknowledgement. Twenty times kill -9; then SIGSTOP, separately for a leader that is also the active controller. The
anchor is the median acknowledgement of the same run before the signals.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from bench.brokers_load import LIMIT_S, client_of, local_cluster, made_batch, make_topic, run_loop
from bench.harness import Result, at_least, at_most
from tidelog.cli.bench_failover import steady
from tidelog.client.metadata import TopicInfo
from tidelog.client.producer.writer import Writer
from tidelog.metadata.config_table import TABLES, Scope
from tidelog.testing import LocalCluster

KILLS, FREEZES = 20, 6
STEADY_ACKS = 30
LOOK_S = 0.05
MIDDLE_S_MAX, WORST_S_MAX = 0.5, 1.0
FROZEN_S_MAX, FROZEN_CONTROLLER_S_MAX = 1.0, 2.0
"""In addition to the session timeout, in seconds."""


@dataclass
class Times:
    acks_s: list[float] = field(default_factory=list)
    kills_s: list[float] = field(default_factory=list)
    freezes_s: list[tuple[float, bool]] = field(default_factory=list)
    """Seconds, and whether the leader was the active controller."""


class Beat:
    """Sends one batch at a time and records when each is acknowledged. `run` is a task."""

    def __init__(self, writer: Writer, topic: TopicInfo) -> None:
        self._writer = writer
        self._topic = topic
        self.acks: list[tuple[float, float]] = []
        """(sent, acknowledged) in seconds."""
        self._more = asyncio.Event()

    async def run(self) -> None:
        batch = made_batch(1, record_bytes=100)
        while True:
            sent_s = time.perf_counter()
            await (await self._writer.send(self._topic.name, 0, batch))
            self.acks.append((sent_s, time.perf_counter()))
            self._more.set()

    async def until(self, is_so: Callable[[], bool]) -> None:
        async with asyncio.timeout(LIMIT_S):
            while not is_so():
                self._more.clear()
                await self._more.wait()


async def one_round(beat: Beat, strike: Callable[[int], None], leader: int) -> float:
    """Return the seconds from the signal to the acknowledgement of a batch that was unacknowledged at the signal."""
    before = len(beat.acks) + STEADY_ACKS
    await beat.until(lambda: len(beat.acks) >= before)
    strike(leader)
    struck_s = time.perf_counter()
    # An acknowledgement of the old leader may still arrive: only a batch sent after the signal counts.
    await beat.until(lambda: beat.acks[-1][1] > struck_s and beat.acks[-1][1] - beat.acks[-1][0] > 0.02)
    return next(acked_s for sent_s, acked_s in beat.acks if acked_s > struck_s and acked_s - sent_s > 0.02) - struck_s


async def measure(cluster: LocalCluster) -> Times:
    times = Times()
    async with client_of(cluster) as client:
        topic = await make_topic(client, "failover", partitions=1)
        writer = Writer(client)
        beat = Beat(writer, topic)
        beating = asyncio.get_running_loop().create_task(beat.run())
        beating.add_done_callback(lambda task: None if task.cancelled() else task.result())
        try:
            await beat.until(lambda: len(beat.acks) >= 2 * STEADY_ACKS)
            times.acks_s = [acked_s - sent_s for sent_s, acked_s in beat.acks[STEADY_ACKS:]]
            for _ in range(KILLS):
                leader, _is_controller = await steady(client, topic, 3)
                times.kills_s.append(await one_round(beat, cluster.kill, leader))
                cluster.start(leader, wait=False)
            for _ in range(FREEZES):
                leader, is_controller = await steady(client, topic, 3)
                times.freezes_s.append((await one_round(beat, cluster.pause, leader), is_controller))
                cluster.resume(leader)
        finally:
            beating.cancel()
            await asyncio.wait([beating])
            await writer.close(is_flushed=False)
    return times


def session_s() -> float:
    default = TABLES[Scope.CLUSTER]["broker.session.timeout.ms"].default
    assert isinstance(default, int), "it has a default"
    return default / 1000


def run() -> Iterator[Result]:
    with local_cluster(3) as cluster:
        times = run_loop(measure(cluster))
    ack_s = sorted(times.acks_s)[len(times.acks_s) // 2]
    kills = sorted(times.kills_s)
    in_time = sum(seconds < WORST_S_MAX for seconds in kills)
    middle_s = kills[KILLS // 2]
    yield at_least(f"brokers, leader killed: a write within {WORST_S_MAX:.0f} s", in_time, f"of {KILLS}", target=KILLS)
    yield at_most("brokers, leader killed: the middle one", middle_s * 1000, "ms", target=MIDDLE_S_MAX * 1000)
    yield at_most("brokers, leader killed: the slowest", kills[-1] * 1000, "ms", target=WORST_S_MAX * 1000)
    yield Result("brokers, an ack before that", ack_s * 1000, "ms", middle_s / ack_s, "the middle failover against it")
    for is_controller, name, more_s in (
        (False, "leader frozen", FROZEN_S_MAX),
        (True, "leader and active controller frozen", FROZEN_CONTROLLER_S_MAX),
    ):
        found = [seconds for seconds, was_controller in times.freezes_s if was_controller is is_controller]
        if found:
            limit_ms = (session_s() + more_s) * 1000
            yield at_most(f"brokers, {name}: slowest of {len(found)}", max(found) * 1000, "ms", target=limit_ms)
