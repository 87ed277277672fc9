"""`tidelog demo`: a cluster of three nodes loses the leader of a partition, and nothing else.

    start three nodes -> a topic with three replicas -> write, acks=all -> kill -9 of the leader in the middle
      -> the writer goes on by itself -> read everything, count, compare -> the killed node comes back

Record n is n's text, and one writer writes them in order to one partition: so record n must be at offset n, once, and
the log must end where the writer ended. The time of the failover is from just before the kill to the acknowledgement of
the first batch that was given to the writer *after* it: what was acknowledged before and was still on its way here does
not count. The nodes end with this process, however it ends.
"""

import argparse
import asyncio
import contextlib
import logging
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Coroutine, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from random import SystemRandom
from typing import Any

from tidelog.cli.main import EXIT_OK, RefusedError, WrongCallError
from tidelog.client.admin import AdminClient
from tidelog.client.cluster import ClusterClient, error_in
from tidelog.client.grpc_connections import GrpcConnections
from tidelog.client.metadata import TopicInfo
from tidelog.client.offsets import LATEST, list_offsets
from tidelog.client.reader import Reader
from tidelog.client.writer import Acknowledged, Writer, WriterConfig
from tidelog.log.batch import encode_columns
from tidelog.model.errors import TidelogError
from tidelog.rpc.v1 import admin_pb2 as pb
from tidelog.testing import LocalCluster
from tidelog.world.real.clock import SystemClock

NODES = 3
TOPIC = "demo"
BATCH_RECORDS = 20
WAITING_MAX = 8
"""Batches that are not acknowledged yet."""
PATIENCE_S = 30.0
"""How long any one step may take before the demo gives up."""
POLL_S = 0.02
RECORDS_MIN = 10 * BATCH_RECORDS


class DemoFailedError(Exception):
    """What was promised is not so, or a step took too long."""


def _say(text: str) -> None:
    """As it happens, also into a pipe."""
    print(text, flush=True)


def value_of(number: int) -> bytes:
    """Record `number`, in 100 bytes; it belongs at offset `number`."""
    return (b"record %d " % number).ljust(100, b".")


def run(options: argparse.Namespace) -> int:
    if options.records < RECORDS_MIN:
        raise WrongCallError(f"--records: at least {RECORDS_MIN}")
    data = data_directory(options.data)
    # What the client says while a node is killed on purpose is told in the story.
    logging.getLogger("tidelog").addHandler(logging.NullHandler())
    began_s = time.monotonic()
    try:
        _run(data, options.records)
    except (KeyboardInterrupt, BrokenPipeError):
        if options.data is None:
            shutil.rmtree(data, ignore_errors=True)
        raise
    except Exception as error:
        raise RefusedError(f"the demo failed: {reason(error)}\nThe nodes' logs: {data}/node-*/node.log") from error
    if options.data is None:
        shutil.rmtree(data)
    kept = "" if options.data is None else f" The nodes' files are in {data}."
    print(f"Done in {time.monotonic() - began_s:.0f} s.{kept}")
    return EXIT_OK


def data_directory(asked: str | None) -> Path:
    if asked is None:
        return Path(tempfile.mkdtemp(prefix="tidelog-demo-"))
    if os.path.exists(asked) and (not os.path.isdir(asked) or os.listdir(asked)):
        raise WrongCallError(f"{asked}: is there already; give an empty or a new directory")
    os.makedirs(asked, exist_ok=True)
    return Path(asked).absolute()


def _run(data: Path, records: int) -> None:
    failure: BaseException | None = None
    with LocalCluster(NODES, data=data, is_started=False) as cluster:
        try:
            _start(cluster)  # blocks: outside of the event loop, where Ctrl-C would wait for it
            asyncio.run(_tell(cluster, records))
        except BaseException as error:
            failure = error  # raised below: in here the cluster would print all of its logs
    if failure is not None:
        raise failure


def reason(error: BaseException) -> str:
    """The first thing that went wrong, as a line."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    text = " ".join(str(error).split())
    return text if isinstance(error, DemoFailedError | TidelogError) else f"{type(error).__name__}: {text}"


# The story


def _start(cluster: LocalCluster) -> None:
    _say("Starting three nodes on this machine, each of them broker and controller, in processes of their own.")
    with _measured() as took:
        cluster.start_all(timeout_s=PATIENCE_S)
    _say(f"They are ready after {took():.1f} s.")


async def _tell(cluster: LocalCluster, records: int) -> None:
    client = ClusterClient(cluster.bootstrap.split(","), GrpcConnections(), random=SystemRandom(), clock=SystemClock())
    try:
        await _with_client(cluster, client, AdminClient(client), records)
    finally:
        await client.close()


async def _with_client(cluster: LocalCluster, client: ClusterClient, admin: AdminClient, records: int) -> None:
    (made,) = await admin.create_topics([pb.NewTopic(name=TOPIC, partitions=1, replication_factor=NODES)])
    if (error := error_in(made)) is not None:
        raise error
    topic = await client.topic(TOPIC)
    leader = await _leader(client, topic)
    _say(
        f"Created the topic '{TOPIC}': one partition, a replica on each node, and node {leader} leads it.\n"
        "Writing with acks=all: acknowledged means synced to disk by every replica that is in sync, two at least."
    )
    writer = Writer(client, WriterConfig(delivery_timeout_ms=int(PATIENCE_S * 1000)))
    try:
        written = await _write_and_kill(cluster, writer, topic, leader, records)
    finally:
        await writer.close(is_flushed=False)
    await _read_back(client, topic, written)
    await _take_back(cluster, admin, leader)


async def _write_and_kill(
    cluster: LocalCluster, writer: Writer, topic: TopicInfo, leader: int, records: int
) -> "Written":
    written = Written(half=records // 2)
    began_s = time.monotonic()
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(_write(writer, written, records))
        await written.is_half.wait()  # however long it takes: a batch that is not stored in time ends the writing
        was_controller = await _is_controller(writer.cluster, leader)
        seconds = time.monotonic() - began_s
        written.killed_s = time.monotonic()
        cluster.kill(leader)
        written.is_killed.set()
        at_the_kill = written.acknowledged
        role = "the leader, and the active controller too" if was_controller else "the leader"
        _say(
            f"{at_the_kill:,} records were acknowledged in {seconds:.1f} s when node {leader}, {role}, was killed with "
            "kill -9, in the middle of the writing."
        )
        await _until(lambda: written.first_after_s is not None, "a write is acknowledged after the kill")
        assert written.first_after_s is not None, "just awaited"
        _say(
            f"The next write was acknowledged {(written.first_after_s - written.killed_s) * 1000:.0f} ms after the "
            f"kill; node {await _leader(writer.cluster, topic)} leads now."
        )
    _say(f"The writing went on with two nodes, to {written.acknowledged:,} acknowledged records.")
    return written


@dataclass(slots=True)
class Written:
    """What the writer was told."""

    half: int
    acknowledged: int = 0
    misplaced: int = 0
    """Batches that were acknowledged at another offset than where they belong."""
    killed_s: float = 0.0
    is_half: asyncio.Event = field(default_factory=asyncio.Event)
    is_killed: asyncio.Event = field(default_factory=asyncio.Event)
    first_after_s: float | None = None
    """When the first batch was acknowledged that was sent after the kill."""
    waiting: set[asyncio.Task[None]] = field(default_factory=set)


async def _write(writer: Writer, written: Written, records: int) -> None:
    async with asyncio.TaskGroup() as tasks:
        for first in range(0, records, BATCH_RECORDS):
            numbers = range(first, min(first + BATCH_RECORDS, records))
            batch = encode_columns(
                timestamps=[time.time_ns() // 1_000_000] * len(numbers),
                keys=[b"%d" % (number % 100) for number in numbers],
                values=[value_of(number) for number in numbers],
            )
            if first >= records * 3 // 4:
                await written.is_killed.wait()  # on a fast machine the kill is in the middle, too
            is_after_the_kill = written.is_killed.is_set()
            result = await writer.send(TOPIC, 0, batch)
            task = tasks.create_task(_take(written, first, result, is_after_the_kill=is_after_the_kill))
            written.waiting.add(task)
            task.add_done_callback(written.waiting.discard)
            if len(written.waiting) >= WAITING_MAX:
                await asyncio.wait(written.waiting, return_when=asyncio.FIRST_COMPLETED)


async def _take(
    written: Written, first: int, result: "asyncio.Future[Acknowledged]", *, is_after_the_kill: bool
) -> None:
    told = await result
    written.acknowledged += told.count
    if written.acknowledged >= written.half:
        written.is_half.set()
    written.misplaced += told.base_offset not in (first, -1)
    if is_after_the_kill and written.first_after_s is None:
        written.first_after_s = time.monotonic()


async def _read_back(client: ClusterClient, topic: TopicInfo, written: Written) -> None:
    partition = topic.partitions[0]
    reader = Reader(client)
    numbers_read = wrong = 0
    with _measured() as took:
        try:
            end = (await list_offsets(client, topic, LATEST))[partition]
            if end.error is not None:
                raise end.error
            reader.assign_topic(topic, {partition: 0})
            while numbers_read < end.offset:
                pieces = await reader.poll(int(PATIENCE_S * 1000))
                if not pieces:
                    raise DemoFailedError(f"nothing came after {numbers_read:,} of {end.offset:,} records")
                for record in (record for piece in pieces for record in piece.records()):
                    wrong += record.offset != numbers_read or record.value != value_of(numbers_read)
                    numbers_read += 1
        finally:
            await reader.close()
    if (numbers_read, wrong, written.misplaced) != (written.acknowledged, 0, 0):
        raise DemoFailedError(
            f"{written.acknowledged:,} records were acknowledged and {numbers_read:,} read, {wrong:,} of these are not "
            f"what belongs at their offset, and {written.misplaced:,} batches were acknowledged elsewhere"
        )
    _say(
        f"Read everything from the beginning in {took():.2f} s: {numbers_read:,} records, each once, in order, at its "
        "offset. Nothing lost."
    )


async def _take_back(cluster: LocalCluster, admin: AdminClient, node: int) -> None:
    with _measured() as took:
        cluster.start(node, is_awaited=False)

        async def is_back() -> bool:
            (found,) = await admin.describe_topics([TOPIC])
            return sorted(found.partitions[0].isr) == [1, 2, 3]

        await _until_true(is_back, f"node {node} is in sync again")
    _say(f"Started node {node} again: it has caught up and is in sync after {took():.1f} s.")


# Waiting


async def _leader(client: ClusterClient, topic: TopicInfo) -> int:
    async def leads() -> bool:
        await client.refresh(topic.name)
        return client.leader(topic.partitions[0]) is not None

    await _until_true(leads, f"somebody leads '{topic.name}'")
    found = client.leader(topic.partitions[0])
    assert found is not None, "just awaited"
    return found.node


async def _is_controller(client: ClusterClient, node: int) -> bool:
    return (await AdminClient(client).describe_quorum()).leader == node


async def _until(condition: Callable[[], bool], what: str) -> None:
    async def told() -> bool:
        return condition()

    await _until_true(told, what)


async def _until_true(condition: Callable[[], Coroutine[Any, Any, bool]], what: str) -> None:
    try:
        async with asyncio.timeout(PATIENCE_S):
            while True:
                if await condition():
                    return
                await asyncio.sleep(POLL_S)
    except TimeoutError:
        raise DemoFailedError(f"waited {PATIENCE_S:.0f} s in vain until {what}") from None


@contextlib.contextmanager
def _measured() -> Iterator[Callable[[], float]]:
    """Seconds since the beginning of the block."""
    began_s = time.monotonic()
    yield lambda: time.monotonic() - began_s
