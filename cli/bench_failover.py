"""`tidelog bench failover`: how long writing stands still when a leader goes.

It starts a cluster of its own and kills (or freezes) the leader of a partition while one batch after the other is
written to it; the time from the signal to the next acknowledgement counts. Nodes of other clusters are never touched:
with `--watch` it only writes to the given one, and reports the longest gap.

It writes with the `Writer` that a `tidelog.Producer` sends its batches with, not with a producer: one batch after the
other is what is timed, and a producer's buffers and threads would have no part in it but their own time.
"""

import argparse
import asyncio
import json
import statistics
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

from tidelog.cli import session
from tidelog.cli.bench_figures import times_document
from tidelog.cli.bench_raw import own_topic
from tidelog.cli.clients import timeout_ms
from tidelog.cli.exit_codes import EXIT_FAILURE, EXIT_OK
from tidelog.cli.main import UsageError
from tidelog.cli.messages import error_text, report
from tidelog.client.admin.core import AdminCore
from tidelog.client.cluster import ClusterClient
from tidelog.client.metadata import TopicInfo
from tidelog.client.producer.writer import Writer, WriterConfig
from tidelog.log.batch import encode_columns
from tidelog.model.errors import CallTimeoutError, TidelogError

if TYPE_CHECKING:
    from tidelog.testing import LocalCluster

STEADY_BATCHES = 20
ROUND_TIMEOUT_S = 60.0
LOOK_S = 0.05
IN_FLIGHT_S = 0.01


def run(options: argparse.Namespace) -> int:
    options.topic, options.partitions, options.replication_factor = None, 1, None
    if options.watch:
        return session.run(options, lambda cluster: _watch(options, cluster))
    if options.bootstrap is not None:
        raise UsageError("it kills only nodes that it has started itself: leave out --bootstrap, or add --watch")
    if not 2 <= options.nodes <= 9 or options.rounds < 1:
        raise UsageError("--nodes from 2 to 9, --rounds from 1 on")
    from tidelog.testing import LocalCluster

    with LocalCluster(nodes=options.nodes) as nodes:
        options.replication_factor = min(3, options.nodes)
        return session.run_at(
            nodes.bootstrap.split(","),
            lambda cluster: _rounds(options, nodes, cluster),
            request_ms=timeout_ms(options),
        )


@asynccontextmanager
async def _in_time(what: str) -> AsyncIterator[None]:
    try:
        async with asyncio.timeout(ROUND_TIMEOUT_S):
            yield
    except TimeoutError:
        raise CallTimeoutError(f"{what} in {ROUND_TIMEOUT_S:.0f} s") from None


class _Beat:
    """One small batch after the other to one partition; the time of each acknowledgement."""

    def __init__(self, cluster: ClusterClient, topic: TopicInfo) -> None:
        self._cluster = cluster
        self._topic = topic
        self.writer = Writer(cluster, WriterConfig(delivery_timeout_ms=int(ROUND_TIMEOUT_S * 1000)))
        self.acks = 0
        self.acked_s = 0.0
        self.gaps: list[float] = []
        self.error: TidelogError | None = None
        self._more = asyncio.Event()

    async def run(self) -> None:
        loop = asyncio.get_running_loop()
        batch = encode_columns([self._cluster.clock.now_ms()], [None], [b"beat"])
        self.acked_s = loop.time()
        while True:
            try:
                await (await self.writer.send(self._topic.name, 0, batch))
            except TidelogError as error:
                self.error = error
                self._more.set()
                return
            now_s = loop.time()
            self.gaps.append(now_s - self.acked_s)
            self.acked_s = now_s
            self.acks += 1
            self._more.set()

    async def after(self, acks: int) -> None:
        """Until more than `acks` were acknowledged."""
        async with _in_time("nothing was acknowledged"):
            while self.acks <= acks:
                if self.error is not None:
                    raise self.error
                self._more.clear()
                await self._more.wait()


async def _rounds(options: argparse.Namespace, nodes: "LocalCluster", cluster: ClusterClient) -> int:
    loop = asyncio.get_running_loop()
    seconds: list[float] = []
    with_controller: list[bool] = []
    async with own_topic(options, cluster) as topic:
        beat = _Beat(cluster, topic)
        beating = loop.create_task(beat.run())
        try:
            for number in range(options.rounds):
                leader, is_controller = await steady(cluster, topic, options.replication_factor)
                await beat.after(beat.acks + STEADY_BATCHES)
                acks, start_s = beat.acks, loop.time()
                (nodes.pause if options.frozen else nodes.kill)(leader)
                # An acknowledgement that was on its way when the signal came does not count.
                await beat.after(acks)
                while beat.acked_s - start_s < IN_FLIGHT_S:
                    await beat.after(beat.acks)
                seconds.append(beat.acked_s - start_s)
                with_controller.append(is_controller)
                report(f"round {number + 1}: node {leader} gone, {seconds[-1] * 1000:.0f} ms")
                await _bring_back(options, nodes, leader)
        finally:
            beating.cancel()
            await asyncio.wait([beating])
            await beat.writer.close(is_flushed=False)
    return _show(options, seconds, with_controller)


async def _bring_back(options: argparse.Namespace, nodes: "LocalCluster", node: int) -> None:
    if options.frozen:
        nodes.resume(node)
    else:
        nodes.start(node, wait=False)


async def steady(cluster: ClusterClient, topic: TopicInfo, replicas: int) -> tuple[int, bool]:
    """(the leader, whether it is the active controller), once all replicas are in sync."""
    admin = AdminCore(cluster)
    async with _in_time(f"not all {replicas} replicas of {topic.name} were in sync again"):
        while True:
            try:
                (row,) = (await admin.describe_topic(topic.name)).partitions
                controller = (await admin.describe_cluster()).controller
            except TidelogError:
                await asyncio.sleep(LOOK_S)
                continue
            if row.leader is not None and len(row.isr) == replicas:
                return row.leader, row.leader == controller
            await asyncio.sleep(LOOK_S)


def _show(options: argparse.Namespace, seconds: list[float], with_controller: list[bool]) -> int:
    document: dict[str, Any] = {
        "name": "failover",
        "how": "frozen" if options.frozen else "killed",
        "rounds": len(seconds),
        "median_ms": round(statistics.median(seconds) * 1000),
        "max_ms": round(max(seconds) * 1000),
        "each": [
            {"ms": round(one * 1000), "was_controller": was} for one, was in zip(seconds, with_controller, strict=True)
        ],
    }
    if options.output == "json":
        print(json.dumps(document, indent=2))
    else:
        print(f"{document['rounds']} rounds, median {document['median_ms']} ms, worst {document['max_ms']} ms")
    return EXIT_OK


async def _watch(options: argparse.Namespace, cluster: ClusterClient) -> int:
    loop = asyncio.get_running_loop()
    async with own_topic(options, cluster) as topic:
        beat = _Beat(cluster, topic)
        beating = loop.create_task(beat.run())
        try:
            await asyncio.wait([beating], timeout=options.seconds)
        finally:
            beating.cancel()
            await asyncio.wait([beating])
            await beat.writer.close(is_flushed=False)
    document = {"name": "failover", "how": "watched", "batches": beat.acks, "gap": times_document(beat.gaps)}
    if options.output == "json":
        print(json.dumps(document, indent=2))
    else:
        print(f"{beat.acks} batches; the longest stand was {times_document(beat.gaps)['max_ms']:.0f} ms")
    if beat.error is not None:
        report(error_text(beat.error))
        return EXIT_FAILURE
    return EXIT_OK
