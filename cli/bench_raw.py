"""`tidelog bench ... --raw`: what a cluster takes and gives, without the cost of a client.

One batch that was encoded before is sent again and again, and what is read is not decoded: so few cycles are spent here
that the figure is the cluster's. It is an upper bound; what a program gets is measured without `--raw` (`bench_cmd`).
So it uses the parts below the clients: `Writer` takes encoded batches, `Reader` returns undecoded ones.
"""

import argparse
import asyncio
import contextlib
from collections import deque
from collections.abc import AsyncIterator
from typing import Any

from tidelog.cli import session
from tidelog.cli.bench_figures import DELIVERY_MS, show, times_document
from tidelog.cli.messages import report
from tidelog.cli.produce import acks_of
from tidelog.cli.progress import Progress
from tidelog.client.admin.core import AdminCore
from tidelog.client.cluster import ClusterClient
from tidelog.client.consumer.reader import Reader, ReaderConfig
from tidelog.client.metadata import TopicInfo
from tidelog.client.offsets import EARLIEST, LATEST, list_offsets
from tidelog.client.producer.writer import Acknowledged, Writer, WriterConfig
from tidelog.log.batch import encode_columns
from tidelog.model.errors import TidelogError

BATCH_BYTES = 1 << 20


@contextlib.asynccontextmanager
async def own_topic(options: argparse.Namespace, cluster: ClusterClient) -> AsyncIterator[TopicInfo]:
    """The topic of the options, or one that is made for this and deleted after it."""
    if options.topic is not None:
        yield await cluster.topic(options.topic)
        return
    name = f"bench-{cluster.random.getrandbits(48):012x}"
    admin = AdminCore(cluster)
    await admin.create_topic(name, partitions=options.partitions, replication_factor=options.replication_factor)
    try:
        yield await _led(cluster, name)
    finally:
        await admin.delete_topic(name)


async def _led(cluster: ClusterClient, name: str) -> TopicInfo:
    """When every partition has a leader that answers: what comes before belongs to no figure."""
    topic = await cluster.topic(name)
    await list_offsets(cluster, topic, LATEST)
    return topic


def made_batch(cluster: ClusterClient, record_bytes: int, batch_bytes: int) -> tuple[bytes, int]:
    """(a batch of at most `batch_bytes`, how many records are in it; at least one). The values do not compress."""
    count = max(1, batch_bytes // (record_bytes + 8))
    values: list[bytes | None] = [cluster.random.randbytes(record_bytes) for _ in range(count)]
    while True:
        batch = encode_columns([cluster.clock.now_ms()] * count, [None] * count, values[:count])
        if len(batch) <= batch_bytes or count == 1:
            return batch, count
        count = max(1, min(count - 1, count * batch_bytes // len(batch)))


class _Load:
    """One batch again and again, to the partitions in turn; how long each took to be acknowledged."""

    def __init__(self, writer: Writer, topic: TopicInfo, batch: bytes) -> None:
        self._writer = writer
        self._topic = topic
        self._batch = batch
        self._turn = 0
        self.seconds: list[float] = []
        self.errors: deque[BaseException] = deque(maxlen=1)
        self.stored = 0
        self.acked_s = 0.0

    async def send(self) -> asyncio.Future[Acknowledged]:
        loop = asyncio.get_running_loop()
        partition = self._turn
        self._turn = (self._turn + 1) % len(self._topic.partitions)
        start_s = loop.time()
        result = await self._writer.send(self._topic.name, partition, self._batch)
        result.add_done_callback(lambda done: self._done(start_s, done))
        return result

    def _done(self, start_s: float, result: asyncio.Future[Acknowledged]) -> None:
        if result.cancelled():
            return
        if (error := result.exception()) is not None:
            self.errors.append(error)
            return
        self.acked_s = asyncio.get_running_loop().time()
        self.seconds.append(self.acked_s - start_s)
        self.stored += 1

    def check(self) -> None:
        if self.errors:
            error = self.errors[0]
            raise error if isinstance(error, TidelogError) else RuntimeError(repr(error))


async def _fill(options: argparse.Namespace, cluster: ClusterClient, topic: TopicInfo) -> dict[str, Any]:
    batch, count = made_batch(cluster, options.record_bytes, options.batch_bytes or BATCH_BYTES)
    writer = Writer(cluster, WriterConfig(acks=acks_of(options), delivery_timeout_ms=DELIVERY_MS))
    load = _Load(writer, topic, batch)
    loop = asyncio.get_running_loop()
    try:
        for _ in topic.partitions:  # ids, streams, files: not what is measured
            await load.send()
        await writer.flush()
        load.check()
        load.seconds.clear()
        load.stored = 0
        start_s = loop.time()
        with Progress("writing", unit="s") as progress:
            while (passed_s := loop.time() - start_s) < options.seconds and not load.errors:
                progress.show(passed_s, options.seconds)
                await load.send()
        await writer.flush()
        load.check()
    finally:
        await writer.close(is_flushed=False)
    seconds = load.acked_s - start_s
    return {
        "seconds": round(seconds, 3),
        "batches": load.stored,
        "records": load.stored * count,
        "bytes": load.stored * len(batch),
        "mb_per_s": round(load.stored * len(batch) / seconds / 1e6, 2),
        "records_per_s": round(load.stored * count / seconds),
        "retries": writer.retries,
        "ack": times_document(load.seconds),
    }


def run_produce(options: argparse.Namespace) -> int:
    async def job(cluster: ClusterClient) -> int:
        async with own_topic(options, cluster) as topic:
            figures = await _fill(options, cluster, topic)
        return show(options, "produce", "raw", len(topic.partitions), figures)

    return session.run(options, job)


def run_consume(options: argparse.Namespace) -> int:
    async def job(cluster: ClusterClient) -> int:
        async with own_topic(options, cluster) as topic:
            if options.topic is None:
                report(f"writing for {options.seconds:.0f} s what is read then")
                await _fill(options, cluster, topic)
            figures = await _read(options, cluster, topic)
        return show(options, "consume", "raw", len(topic.partitions), figures)

    return session.run(options, job)


async def _read(options: argparse.Namespace, cluster: ClusterClient, topic: TopicInfo) -> dict[str, Any]:
    starts = {place: row.offset for place, row in (await list_offsets(cluster, topic, EARLIEST)).items()}
    ends = {place: row.offset for place, row in (await list_offsets(cluster, topic, LATEST)).items()}
    reader = Reader(cluster, ReaderConfig())
    loop = asyncio.get_running_loop()
    size = records = 0
    start_s = loop.time()
    reader.assign_topic(topic, starts)
    try:
        wanted = sum(ends.values()) - sum(starts.values())
        with Progress("reading", unit="records") as progress:
            while any(reader.position(place) < end for place, end in ends.items()):
                progress.show(records, wanted)
                for piece in await reader.poll(1000):
                    size += len(piece.data)
                    if options.decode:
                        records += sum(len(columns) for columns in piece.batches())
                    else:
                        records += piece.next_offset - piece.fetch_offset
    finally:
        await reader.close()
    seconds = max(loop.time() - start_s, 1e-9)
    return {
        "seconds": round(seconds, 3),
        "records": records,
        "bytes": size,
        "mb_per_s": round(size / seconds / 1e6, 2),
        "records_per_s": round(records / seconds),
        "is_decoded": options.decode,
    }


def run_latency(options: argparse.Namespace) -> int:
    async def job(cluster: ClusterClient) -> int:
        async with own_topic(options, cluster) as topic:
            figures = await _pace(options, cluster, topic)
        return show(options, "latency", "raw", len(topic.partitions), figures)

    return session.run(options, job)


async def _pace(options: argparse.Namespace, cluster: ClusterClient, topic: TopicInfo) -> dict[str, Any]:
    batch, _count = made_batch(cluster, options.record_bytes, 1)
    writer = Writer(cluster, WriterConfig(acks=acks_of(options), delivery_timeout_ms=DELIVERY_MS))
    load = _Load(writer, topic, batch)
    loop = asyncio.get_running_loop()
    try:
        for _ in range(2 * len(topic.partitions)):
            await (await load.send())
        load.seconds.clear()
        start_s = loop.time()
        sent = 0
        with Progress("writing", unit="s") as progress:
            while (passed_s := loop.time() - start_s) < options.seconds:
                await load.send()
                load.check()
                sent += 1
                progress.show(passed_s, options.seconds)
                await asyncio.sleep(max(0.0, start_s + sent / options.rate - loop.time()))
        await writer.flush()
        load.check()
    finally:
        await writer.close(is_flushed=False)
    return {"batches": len(load.seconds), "rate": options.rate, "ack": times_document(load.seconds)}
