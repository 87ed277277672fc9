"""The log on a real disk: appending, group commit, reading, opening, recovering, and ten thousand logs in one process.

Every speed has its anchor in the same run: the bare system call that moves the same bytes. Files lie below
`build/bench-data`, since a temporary directory of the system may be in memory, and are removed afterwards. The page
cache is warm on both sides of each comparison.
"""

import asyncio
import gc
import multiprocessing
import os
import random
import shutil
import time
import tracemalloc
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ProcessPoolExecutor
from contextlib import asynccontextmanager
from pathlib import Path
from uuid import UUID

from bench.harness import Result, at_least, at_most, seconds
from tidelog.log.batch import encode_columns
from tidelog.log.config import FlushMode, LogConfig
from tidelog.log.directories import directory_name
from tidelog.log.file_pool import FilePool
from tidelog.log.group_commit import GroupCommit
from tidelog.log.log import Log
from tidelog.log.logs import Logs
from tidelog.model.errors import StorageError
from tidelog.model.ids import DirectoryId, PartitionId, TopicId
from tidelog.world.real.clock import SystemClock
from tidelog.world.real.disk import RealDisk
from tidelog.world.real.store import LmdbStore
from tidelog.world.real.work import InlineWork

DATA = Path("build") / "bench-data"
BATCH_BYTES = 64 << 10
APPENDED_BYTES = 8 << 20
STORED_BYTES = 128 << 20
READ_BYTES = 1 << 20
ROUNDS = 25
WAITING = 64
GROUP_ROUNDS = 25
SEGMENTS = 16
LARGE_BYTES, SMALL_BYTES = 1 << 30, 64 << 20
PAST_BYTES = 8 << 20
LOGS = 10_000
LOG_ID = PartitionId(TopicId(UUID(int=7)), 0)
PAGE_CACHE = LogConfig(flush_mode=FlushMode.PAGE_CACHE)


def run() -> list[Result]:
    shutil.rmtree(DATA, ignore_errors=True)
    DATA.mkdir(parents=True)
    try:
        results = asyncio.run(_append())
        results += asyncio.run(_group_commit())
        results += asyncio.run(_read())
        results += asyncio.run(_open())
        results += _memory()
        return results
    finally:
        shutil.rmtree(DATA, ignore_errors=True)


# What a log needs


def _refuse(error: StorageError) -> None:
    raise AssertionError(f"the disk failed: {error}")


@asynccontextmanager
async def _place(root: Path) -> "AsyncIterator[tuple[RealDisk, LmdbStore, GroupCommit]]":
    """A directory with its store; on leaving all handles are dropped, as a process that dies drops them."""
    disk = RealDisk(root, create=True)
    store = LmdbStore(root / "state")
    group_commit = GroupCommit(disk, on_failure=_refuse)
    try:
        yield disk, store, group_commit
    finally:
        await group_commit.close()
        store.close()
        disk.close()


async def _log(place: tuple[RealDisk, LmdbStore, GroupCommit], name: str, config: LogConfig) -> Log:
    disk, store, group_commit = place
    return await Log.open(
        disk=disk,
        store=store,
        work=InlineWork(),
        group_commit=group_commit,
        clock=SystemClock(),
        files=FilePool(disk),
        path=name,
        log_id=LOG_ID,
        config=config,
    )


def _batch(size: int) -> bytes:
    """A batch of this many bytes, of 100-byte records."""
    draw = random.Random(size)
    count = size // 110
    now = SystemClock().now_ms()
    values: list[bytes | None] = [draw.randbytes(100) for _ in range(count)]
    short = size - len(encode_columns([now] * count, [None] * count, values))
    # Above 63 bytes more, the length of the record and of its value take another byte each.
    values[-1] = draw.randbytes(100 + short - 1)
    data = encode_columns([now] * count, [None] * count, values)
    assert len(data) in (size, size - 1), len(data)
    return data


# Appending


async def _append() -> list[Result]:
    data = _batch(BATCH_BYTES)
    count = APPENDED_BYTES // BATCH_BYTES
    ours, bare = [], []
    for number in range(ROUNDS):
        root = DATA / f"append-{number}"
        async with _place(root) as place:
            log = await _log(place, "log", PAGE_CACHE)
            log.append(data, leader_epoch=0)

            def append(log: Log = log) -> None:
                for _ in range(count):
                    log.append(data, leader_epoch=0)

            ours.append(seconds(append))
            await log.retire()
        stored = (root / "log" / f"{0:020d}.log").read_bytes()[: len(data)]
        bare.append(_write_bare(root / "bare", stored, count))
        shutil.rmtree(root)
    best, anchor = min(ours), min(bare)
    mebibytes = count * len(data) / (1 << 20)
    return [
        at_least(
            "append 64 KiB batches, no sync",
            mebibytes / best,
            "MiB/s",
            target=0.5,
            ratio=anchor / best,
            anchor=f"os.write of the same bytes, {mebibytes / anchor:,.0f} MiB/s",
        )
    ]


def _write_bare(path: Path, data: bytes, count: int) -> float:
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    os.write(descriptor, data)

    def write() -> None:
        for _ in range(count):
            os.write(descriptor, data)

    try:
        return seconds(write)
    finally:
        os.close(descriptor)


async def _group_commit() -> list[Result]:
    """So many producers, each of which waits for its append to be on the device before the next."""
    data = _batch(4096)
    async with _place(DATA / "group") as place:
        log = await _log(place, "log", LogConfig())
        group_commit = place[2]
        await log.flush()

        async def produce(rounds: int) -> None:
            for _ in range(rounds):
                await log.wait_durable(log.append(data, leader_epoch=0).last_offset)

        async def measure(producers: int, rounds: int) -> tuple[float, float]:
            groups, began = group_commit.groups, time.perf_counter()
            await asyncio.gather(*(produce(rounds) for _ in range(producers)))
            took = time.perf_counter() - began
            return (group_commit.groups - groups) / (producers * rounds), producers * rounds / took

        await measure(1, 5)
        _, alone = await measure(1, GROUP_ROUNDS)
        syncs, together = await measure(WAITING, GROUP_ROUNDS)
        await log.close()
    return [
        at_most(f"syncs per append, {WAITING} waiting", syncs, "syncs", target=1 / 16),
        Result(
            f"durable appends of 4 KiB, {WAITING} waiting",
            together,
            "appends/s",
            together / alone,
            f"one at a time, {alone:,.0f}/s",
        ),
    ]


# Reading


async def _read() -> list[Result]:
    data = _batch(BATCH_BYTES)
    root = DATA / "read"
    async with _place(root) as place:
        log = await _log(place, "log", PAGE_CACHE)
        for _ in range(STORED_BYTES // BATCH_BYTES):
            log.append(data, leader_epoch=0)
        total = log.size
        descriptor = os.open(root / "log" / f"{0:020d}.log", os.O_RDONLY | os.O_CLOEXEC)
        read = 0

        def read_log() -> None:
            nonlocal read
            read, offset, end = 0, 0, int(log.end_offset)
            while offset < end:
                found = log.read_nowait(offset, bytes_max=READ_BYTES)
                assert found is not None, "what was just written is in memory"
                read += len(found.data)
                offset = found.next_offset

        def read_bare() -> None:
            position = 0
            while position < total:
                position += len(os.pread(descriptor, READ_BYTES, position))

        ours, bare = [], []
        for _ in range(ROUNDS):
            ours.append(seconds(read_log))
            bare.append(seconds(read_bare))
        assert read == total, f"read {read} of {total} bytes"
        os.close(descriptor)
        await log.retire()
    best, anchor, mebibytes = min(ours), min(bare), total / (1 << 20)
    shutil.rmtree(root)
    return [
        at_least(
            f"sequential read, {READ_BYTES >> 20} MiB at a time",
            mebibytes / best,
            "MiB/s",
            target=0.5,
            ratio=anchor / best,
            anchor=f"os.pread, {mebibytes / anchor:,.0f} MiB/s",
        )
    ]


# Opening


async def _open() -> list[Result]:
    best = {}
    for size in (SMALL_BYTES, LARGE_BYTES):
        config = LogConfig(flush_mode=FlushMode.PAGE_CACHE, segment_bytes=size // SEGMENTS + BATCH_BYTES)
        root = DATA / f"open-{size}"
        await _write_log(root, config, size)
        best[size] = min([await _reopen(root, config) for _ in range(ROUNDS)])
        if size == LARGE_BYTES:
            recovered = await _recover(root, config)
        shutil.rmtree(root)
    large, small = best[LARGE_BYTES], best[SMALL_BYTES]
    return [
        at_most(f"open a closed log of 1 GiB, {SEGMENTS} segments", large * 1e3, "ms", target=20.0),
        at_most(
            "the same against segments a 16th of the size",
            large * 1e3,
            "ms",
            target=1.5,
            ratio=large / small,
            anchor=f"64 MiB, {SEGMENTS} segments: {small * 1e3:.2f} ms",
        ),
        *recovered,
    ]


async def _write_log(root: Path, config: LogConfig, size: int) -> None:
    data = _batch(BATCH_BYTES)
    async with _place(root) as place:
        log = await _log(place, "log", config)
        while log.size + len(data) <= size:
            log.append(data, leader_epoch=0)
            if log.active_bytes + len(data) > size // SEGMENTS:
                # Before the writing outruns the device, and the syncs at the end take for ever.
                await log.flush()
        await log.close()
        assert len(log.sealed_segments()) in (SEGMENTS - 1, SEGMENTS), len(log.sealed_segments())


async def _reopen(root: Path, config: LogConfig) -> float:
    async with _place(root) as place:
        began = time.perf_counter()
        log = await _log(place, "log", config)
        took = time.perf_counter() - began
        assert log.report.clean, log.report
        assert log.report.bytes_read == 0, log.report
        await log.close()
        return took


async def _recover(root: Path, config: LogConfig) -> list[Result]:
    """Write past the recovery point, let go of everything without a stop, and open."""
    data = _batch(BATCH_BYTES)
    async with _place(root) as place:
        log = await _log(place, "log", config)
        for _ in range(PAST_BYTES // len(data)):
            log.append(data, leader_epoch=0)
        past = log.size - _size_at_recovery_point(log)
        total = log.size
        await log.retire()
    async with _place(root) as place:
        began = time.perf_counter()
        log = await _log(place, "log", config)
        took = time.perf_counter() - began
        report = log.report
        assert log.size == total, "nothing was lost"
        await log.close()
    return [
        at_most(
            "recovery after a crash: bytes read",
            report.bytes_read / (1 << 20),
            "MiB",
            target=1.1,
            ratio=report.bytes_read / past,
            anchor=f"{past / (1 << 20):.1f} MiB past the recovery point, of {total >> 20} MiB",
        ),
        Result("recovery after a crash: time", took * 1e3, "ms"),
    ]


def _size_at_recovery_point(log: Log) -> int:
    below = sum(info.size for info in log.sealed_segments() if info.base_offset < log.mark.base_offset)
    return below + log.mark.position


# Ten thousand logs


def _memory() -> list[Result]:
    root = DATA / "many"
    root.mkdir()
    _in_process(_create_many, root)
    open_s, anonymous, logs = _in_process(_open_many, root, False)
    _, traced, _ = _in_process(_open_many, root, True)
    assert logs == LOGS, f"{logs} logs are open"
    shutil.rmtree(root)
    return [
        at_most("memory of an idle log", traced / logs / 1024, "KiB", target=16.0),
        at_most("the same, by the process's anonymous memory", anonymous / logs / 1024, "KiB", target=16.0),
        at_least("logs open in one process", logs, "logs", target=LOGS),
        Result("opening them after a clean stop", open_s, "s"),
        Result("opening one of them", open_s / logs * 1e3, "ms"),
    ]


def _in_process(fn: "Callable[..., tuple[float, int, int]]", *values: object) -> tuple[float, int, int]:
    """In a process of its own, which has nothing else in its memory."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        return pool.submit(fn, *values).result()


def _create_many(root: Path) -> tuple[float, int, int]:
    return asyncio.run(_many(root, is_new=True, traced=False))


def _open_many(root: Path, traced: bool) -> tuple[float, int, int]:
    return asyncio.run(_many(root, is_new=False, traced=traced))


async def _many(root: Path, *, is_new: bool, traced: bool) -> tuple[float, int, int]:
    """(seconds to open, bytes of memory they take, logs)."""
    async with _place(root) as (disk, store, _):
        gc.collect()
        if traced:
            tracemalloc.start()
        before = tracemalloc.get_traced_memory()[0] if traced else _anonymous_bytes()
        began = time.perf_counter()
        logs = await Logs.open(
            [(disk, store, DirectoryId(UUID(int=1)))],
            work=InlineWork(),
            clock=SystemClock(),
            config_of=lambda _: PAGE_CACHE,
        )
        await logs.wait_all_open()
        took = time.perf_counter() - began
        gc.collect()
        after = tracemalloc.get_traced_memory()[0] if traced else _anonymous_bytes()
        if traced:
            tracemalloc.stop()
        if is_new:
            await _fill_many(logs)
        count = len(logs)
        assert is_new or all(log.report.clean for log in logs.all()), "all were closed cleanly"
        await logs.close()
        return took, after - before, count


async def _fill_many(logs: Logs) -> None:
    data = encode_columns([SystemClock().now_ms()] * 10, [None] * 10, [b"x" * 100] * 10)
    for first in range(0, LOGS, 200):
        ids = [PartitionId(TopicId(UUID(int=1 + number)), 0) for number in range(first, first + 200)]
        made = await asyncio.gather(*(logs.create(one, label="topic", config=PAGE_CACHE) for one in ids))
        for log in made:
            log.append(data, leader_epoch=0)
    assert logs.directories[0].paths[ids[0]] == directory_name(ids[0], "topic")


def _anonymous_bytes() -> int:
    for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * 1024
    raise AssertionError("the kernel does not tell")
