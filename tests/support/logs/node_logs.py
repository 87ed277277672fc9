"""The logs of a node, on simulated machines and on real files, for the tests of `Logs`.

A `Site` is a machine with some log directories. Each `run` is a process on it; it ends as a killed process does, unless
the test has closed its `Logs`. The simulated one can also lose its power.
"""

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from pathlib import Path
from typing import Any, Protocol, TypeVar
from uuid import UUID

from support.logs.single_log import SMALL, batch, read_all
from tidelog.log.batch import Record, decode, encode, read_header
from tidelog.log.config import LogConfig
from tidelog.log.directories import LogDirectory
from tidelog.log.log import Log
from tidelog.log.logs import Logs, LogsConfig
from tidelog.model.errors import StorageError
from tidelog.model.ids import DirectoryId, PartitionId, TopicId
from tidelog.world.clock import Clock
from tidelog.world.disk import Disk
from tidelog.world.real.clock import SystemClock
from tidelog.world.real.disk import RealDisk
from tidelog.world.real.store import LmdbStore
from tidelog.world.real.work import InlineWork
from tidelog.world.simulated import Loss, SimMachine, SimNode, SimWorld
from tidelog.world.store import StateStore
from tidelog.world.work import Work

T = TypeVar("T")


def log_id(topic: int, partition: int = 0) -> PartitionId:
    return PartitionId(TopicId(UUID(int=topic)), partition)


def directory_id(number: int) -> DirectoryId:
    return DirectoryId(UUID(int=1000 + number))


class Host:
    """One process: what it needs to open its logs, and the reported failures."""

    def __init__(self, places: list[tuple[Disk, StateStore, DirectoryId]], work: Work, clock: Clock) -> None:
        self.places = places
        self.work = work
        self.clock = clock
        self.failed: list[tuple[LogDirectory, StorageError]] = []
        self.crashes: list[BaseException] = []

    async def open(
        self,
        config: LogConfig | Callable[[PartitionId], LogConfig] = SMALL,
        logs_config: LogsConfig | None = None,
        *,
        wait: bool = True,
    ) -> Logs:
        logs = await Logs.open(
            self.places,
            work=self.work,
            clock=self.clock,
            config_of=(lambda _: config) if isinstance(config, LogConfig) else config,
            config=logs_config,
            on_crash=self.crashes.append,
        )
        self.failed += [(directory, directory.failed) for directory in logs.directories if directory.failed is not None]
        logs.observe(
            on_synced=lambda _: None,
            on_directory_failure=lambda directory, error: self.failed.append((directory, error)),
            on_opened=lambda _: None,
        )
        if wait:
            await logs.wait_all_open()
        return logs


class Site(Protocol):
    def run(self, main: Callable[[Host], Coroutine[Any, Any, T]]) -> T: ...


class RealSite:
    """Directories with real files and LMDB; the store is in the directory, under a name that is no log's."""

    def __init__(self, root: Path, directories: int = 2) -> None:
        self.roots = [root / f"disk-{number}" for number in range(directories)]
        for path in self.roots:
            path.mkdir(parents=True, exist_ok=True)

    def run(self, main: Callable[[Host], Coroutine[Any, Any, T]]) -> T:
        return asyncio.run(self._live(main))

    async def _live(self, main: Callable[[Host], Awaitable[T]]) -> T:
        disks = [RealDisk(path) for path in self.roots]
        stores = [LmdbStore(path / "state") for path in self.roots]
        places: list[tuple[Disk, StateStore, DirectoryId]] = [
            (disk, store, directory_id(number)) for number, (disk, store) in enumerate(zip(disks, stores, strict=True))
        ]
        try:
            return await main(Host(places, InlineWork(), SystemClock()))
        finally:
            for task in asyncio.all_tasks() - {asyncio.current_task()}:
                task.cancel()
                await asyncio.wait([task])
            for store in stores:
                store.close()
            for disk in disks:
                disk.close()


class SimSite:
    """A simulated machine. A process ends with the next `run`, or with `lose_power`."""

    def __init__(self, world: SimWorld, directories: int = 2) -> None:
        self.world = world
        self.machine: SimMachine = world.machine("node")
        self.labels = [f"disk-{number}" for number in range(directories)]
        self.host: Host | None = None

    def boot(self) -> Host:
        if self.machine.node is not None:
            self.machine.kill()
        node = self.machine.boot()
        places: list[tuple[Disk, StateStore, DirectoryId]] = [
            (node.disk(label), node.store(label), directory_id(number)) for number, label in enumerate(self.labels)
        ]
        self.host = Host(places, node.work, node.clock)
        return self.host

    def run(self, main: Callable[[Host], Coroutine[Any, Any, T]]) -> T:
        self.boot()
        return self.again(main)

    def again(self, main: Callable[[Host], Coroutine[Any, Any, T]]) -> T:
        """The same in the process that runs."""
        host, node = self.host, self.machine.node
        assert host is not None, "no process runs"
        assert node is not None, "no process runs"

        async def call(_: SimNode) -> T:
            return await main(host)

        return self.world.run(node, call)

    def lose_power(self, loss: Loss = Loss.ALL) -> None:
        self.machine.lose_power(loss)


async def create(
    logs: Logs, topic: int, partition: int = 0, *, label: str = "orders", config: LogConfig = SMALL
) -> Log:
    return await logs.create(log_id(topic, partition), label=label, config=config)


async def write(log: Log, count: int = 1, *, wait: bool = True, **fields: Any) -> int:
    """Append `count` batches of one record; returns the end offset."""
    for _ in range(count):
        appended = log.append(batch(timestamp=log.clock.now_ms(), **fields), leader_epoch=max(0, log.epochs.latest))
    if wait and count:
        await log.wait_durable(appended.last_offset)
    return log.end_offset


async def records_of(log: Log) -> list[Record]:
    """Every data record of a log, read as a consumer would."""
    return [
        record
        for data in await read_all(log, bytes_max=400)
        if not read_header(data).is_control
        for record in decode(data, decompressed_bytes_max=1 << 20)
        if record.offset >= log.start_offset
    ]


Written = dict[int, tuple[bytes | None, bytes | None]]
"""All that was ever appended to a log: offset -> key, value."""


async def check_compacted(log: Log, written: Written, *, untouched_from: int) -> None:
    """Checks a compacted log: holds at any time, after any cleaning and any power loss.

    What is there stands as it was written, at its offset, in order. The latest record of each key is there (no
    tombstone is old enough to go in these tests), and at `untouched_from` and past it everything is.
    """
    log.validate()
    assert log.damaged is None
    records = await records_of(log)
    offsets = [record.offset for record in records]
    assert offsets == sorted(set(offsets)), "in order, none twice"
    assert all(written[record.offset] == (record.key, record.value) for record in records)
    present = set(offsets)
    known = [offset for offset in sorted(written) if log.start_offset <= offset < log.end_offset]
    latest = {written[offset][0]: offset for offset in known}
    assert set(latest.values()) <= present, f"lost {sorted(set(latest.values()) - present)}"
    assert all(offset in present for offset in known if offset >= untouched_from)
    for offset in known:
        found = await log.read(offset, bytes_max=1)
        first = read_header(found.data)
        assert first.last_offset >= offset
        following = next((at for at in offsets if at >= offset), None)
        if following is not None and first.base_offset <= following <= first.last_offset:
            assert following in [record.offset for record in decode(bytes(found.data), decompressed_bytes_max=1 << 20)]


async def put(log: Log, written: Written, count: int, *, keys: int = 5, epoch: int = 0, **fields: Any) -> None:
    """Append `count` records with different values; the keys repeat in turn."""
    for _ in range(count):
        offset = int(log.end_offset)
        key, value = b"k%d" % (offset % keys), b"v%d-%d" % (epoch, offset)
        data = encode([Record(0, log.clock.now_ms(), key, value, ())], **fields)
        appended = log.append(data, leader_epoch=epoch)
        written[offset] = (key, value)
    await log.wait_durable(appended.last_offset)


def replicate_all(logs: Logs, *numbers: int) -> None:
    """The high watermark of these topics reaches the log end."""
    for topic in numbers or (1,):
        log = logs.get(log_id(topic))
        assert log is not None
        logs.note_high_watermark(log_id(topic), log.end_offset)


def pass_time(sim: SimSite, milliseconds: int) -> None:
    sim.machine.clock.jump(milliseconds)
