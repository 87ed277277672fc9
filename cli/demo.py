"""`tidelog demo`: a cluster of three nodes loses the leader of a partition, and nothing else.

    start three nodes -> a topic with three replicas -> write, acks=all -> kill -9 of the leader in the middle
      -> the writer continues -> read everything, count, compare -> the killed node comes back

Record n is n's text, and one writer writes them in order to one partition: so record n must be at offset n, once, and
the log must end where the writer ended. The failover time is from just before the kill to the acknowledgement of the
first batch that was sent *after* it: earlier acknowledgements in transit do not count. The nodes end with this process,
however it ends.
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
from typing import Any

from tidelog.cli.exit_codes import EXIT_OK
from tidelog.cli.main import CommandError, UsageError
from tidelog.client.admin.aio import Admin
from tidelog.client.consumer.aio import Consumer
from tidelog.client.producer.aio import Producer
from tidelog.client.producer.bulk import BulkDelivery
from tidelog.client.record import TopicPartition
from tidelog.model.errors import TidelogError, first_error
from tidelog.testing import LocalCluster

NODES = 3
TOPIC = "demo"
BATCH_RECORDS = 20
WAITING_MAX = 8
"""Batches that are not acknowledged yet."""
STEP_TIMEOUT_S = 30.0
"""How long any one step may take before the demo gives up."""
POLL_S = 0.02
RECORDS_MIN = 10 * BATCH_RECORDS


class DemoFailedError(Exception):
    """A guarantee was broken, or a step took too long."""


def _say(text: str) -> None:
    """Print at once, also into a pipe."""
    print(text, flush=True)


def value_of(number: int) -> bytes:
    """Return record `number`, in 100 bytes; it belongs at offset `number`."""
    return (b"record %d " % number).ljust(100, b".")


def run(options: argparse.Namespace) -> int:
    if options.records < RECORDS_MIN:
        raise UsageError(f"--records: at least {RECORDS_MIN}")
    data = data_directory(options.data)
    # The demo reports what the client logs while a node is killed on purpose.
    logging.getLogger("tidelog").addHandler(logging.NullHandler())
    began_s = time.monotonic()
    try:
        _run(data, options.records)
    except (KeyboardInterrupt, BrokenPipeError):
        if options.data is None:
            shutil.rmtree(data, ignore_errors=True)
        raise
    except Exception as error:
        raise CommandError(f"the demo failed: {reason(error)}\nThe nodes' logs: {data}/node-*/node.log") from error
    if options.data is None:
        shutil.rmtree(data)
    kept = "" if options.data is None else f" The nodes' files are in {data}."
    print(f"Done in {time.monotonic() - began_s:.0f} s.{kept}")
    return EXIT_OK


def data_directory(asked: str | None) -> Path:
    if asked is None:
        return Path(tempfile.mkdtemp(prefix="tidelog-demo-"))
    if os.path.exists(asked) and (not os.path.isdir(asked) or os.listdir(asked)):
        raise UsageError(f"{asked}: is there already; use an empty or a new directory")
    os.makedirs(asked, exist_ok=True)
    return Path(asked).absolute()


def _run(data: Path, records: int) -> None:
    failure: BaseException | None = None
    with LocalCluster(NODES, data=data, start=False) as cluster:
        try:
            _start(cluster)  # blocks: outside of the event loop, where Ctrl-C would wait for it
            asyncio.run(_report_story(cluster, records))
        except BaseException as error:
            failure = error  # raised below: in here the cluster would print all of its logs
    if failure is not None:
        raise failure


def reason(error: BaseException) -> str:
    """Return the first error, as a line."""
    error = first_error(error)
    text = " ".join(str(error).split())
    return text if isinstance(error, DemoFailedError | TidelogError) else f"{type(error).__name__}: {text}"


# The story


def _start(cluster: LocalCluster) -> None:
    _say("Starting three nodes on this machine, each of them broker and controller, in processes of their own.")
    with _measured() as took:
        cluster.start_all(timeout=STEP_TIMEOUT_S)
    _say(f"They are ready after {took():.1f} s.")


async def _report_story(cluster: LocalCluster, records: int) -> None:
    async with Admin(cluster.bootstrap) as admin:
        await admin.create_topic(TOPIC, partitions=1, replication_factor=NODES)
        leader = await _leader(admin)
        _say(
            f"Created the topic '{TOPIC}': one partition, a replica on each node, and node {leader} leads it.\n"
            "Writing with acks=all: acknowledged means synced to disk by every replica that is in sync, two at least."
        )
        limit_ms = int(STEP_TIMEOUT_S * 1000)
        producer = Producer(cluster.bootstrap, delivery_timeout_ms=limit_ms, request_timeout_ms=limit_ms // 2)
        try:
            written = await _write_and_kill(cluster, admin, producer, leader, records)
        finally:
            await producer.close(0)
        await _read_back(cluster.bootstrap, written)
        await _take_back(cluster, admin, leader)


async def _write_and_kill(
    cluster: LocalCluster, admin: Admin, producer: Producer, leader: int, records: int
) -> "Written":
    written = Written(half=records // 2)
    began_s = time.monotonic()
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(_write(producer, written, records))
        await written.is_half.wait()  # however long it takes: a batch that is not stored in time ends the writing
        was_controller = (await admin.describe_quorum()).leader == leader
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
            f"kill; node {await _leader(admin)} leads now."
        )
    _say(f"The writing went on with two nodes, to {written.acknowledged:,} acknowledged records.")
    return written


@dataclass(slots=True)
class Written:
    """Acknowledgements of the writer."""

    half: int
    acknowledged: int = 0
    misplaced: int = 0
    """Batches that were acknowledged at a wrong offset."""
    killed_s: float = 0.0
    is_half: asyncio.Event = field(default_factory=asyncio.Event)
    is_killed: asyncio.Event = field(default_factory=asyncio.Event)
    first_after_s: float | None = None
    """When the first batch sent after the kill was acknowledged."""
    waiting: set[asyncio.Task[None]] = field(default_factory=set)


async def _write(producer: Producer, written: Written, records: int) -> None:
    async with asyncio.TaskGroup() as tasks:
        for first in range(0, records, BATCH_RECORDS):
            numbers = range(first, min(first + BATCH_RECORDS, records))
            if first >= records * 3 // 4:
                await written.is_killed.wait()  # on a fast machine the kill is in the middle, too
            is_after_the_kill = written.is_killed.is_set()
            keys = [b"%d" % (number % 100) for number in numbers]
            delivery = await producer.send_many(TOPIC, values=list(map(value_of, numbers)), keys=keys, partition=0)
            task = tasks.create_task(_take(written, first, delivery, is_after_the_kill=is_after_the_kill))
            written.waiting.add(task)
            task.add_done_callback(written.waiting.discard)
            if len(written.waiting) >= WAITING_MAX:
                await asyncio.wait(written.waiting, return_when=asyncio.FIRST_COMPLETED)


async def _take(written: Written, first: int, delivery: BulkDelivery, *, is_after_the_kill: bool) -> None:
    (stored,) = (await delivery).ranges
    written.acknowledged += stored.count
    if written.acknowledged >= written.half:
        written.is_half.set()
    written.misplaced += stored.first_offset not in (first, -1)
    if is_after_the_kill and written.first_after_s is None:
        written.first_after_s = time.monotonic()


async def _read_back(bootstrap: str, written: Written) -> None:
    partition = TopicPartition(TOPIC, 0)
    numbers_read = wrong = 0
    with _measured() as took:
        async with Consumer(bootstrap, auto_offset_reset="none") as consumer:
            end = (await consumer.end_offsets(partition))[partition]
            await consumer.assign([partition])
            await consumer.seek(partition, 0)
            while numbers_read < end:
                records = await consumer.poll(STEP_TIMEOUT_S)
                if not records:
                    raise DemoFailedError(f"nothing came after {numbers_read:,} of {end:,} records")
                for record in records:
                    wrong += record.offset != numbers_read or record.value != value_of(numbers_read)
                    numbers_read += 1
    if (numbers_read, wrong, written.misplaced) != (written.acknowledged, 0, 0):
        raise DemoFailedError(
            f"{written.acknowledged:,} records were acknowledged and {numbers_read:,} read, {wrong:,} of these are not "
            f"what belongs at their offset, and {written.misplaced:,} batches were acknowledged elsewhere"
        )
    _say(
        f"Read everything from the beginning in {took():.2f} s: {numbers_read:,} records, each once, in order, at its "
        "offset. Nothing lost."
    )


async def _take_back(cluster: LocalCluster, admin: Admin, node: int) -> None:
    with _measured() as took:
        cluster.start(node, wait=False)

        async def is_back() -> bool:
            return sorted((await admin.describe_topic(TOPIC)).partitions[0].isr) == [1, 2, 3]

        await _until_true(is_back, f"node {node} is in sync again")
    _say(f"Started node {node} again: it has caught up and is in sync after {took():.1f} s.")


# Waiting


async def _leader(admin: Admin) -> int:
    leader: int | None = None

    async def leads() -> bool:
        nonlocal leader
        leader = (await admin.describe_topic(TOPIC)).partitions[0].leader
        return leader is not None

    await _until_true(leads, f"somebody leads '{TOPIC}'")
    assert leader is not None, "just awaited"
    return leader


async def _until(condition: Callable[[], bool], what: str) -> None:
    async def holds() -> bool:
        return condition()

    await _until_true(holds, what)


async def _until_true(condition: Callable[[], Coroutine[Any, Any, bool]], what: str) -> None:
    try:
        async with asyncio.timeout(STEP_TIMEOUT_S):
            while True:
                if await condition():
                    return
                await asyncio.sleep(POLL_S)
    except TimeoutError:
        raise DemoFailedError(f"waited {STEP_TIMEOUT_S:.0f} s in vain until {what}") from None


@contextlib.contextmanager
def _measured() -> Iterator[Callable[[], float]]:
    """Yield a function that returns the seconds since the start of the block."""
    began_s = time.monotonic()
    yield lambda: time.monotonic() - began_s
