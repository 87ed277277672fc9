"""A log on a simulated machine, for the tests of the log."""

from collections.abc import Callable, Coroutine
from dataclasses import replace
from typing import Any
from uuid import UUID

from tidelog.log.batch import ControlKind, Record, encode, encode_control, read_header, stamp
from tidelog.log.config import FlushMode, LogConfig
from tidelog.log.file_pool import FilePool
from tidelog.log.group_commit import GroupCommit
from tidelog.log.log import Log
from tidelog.log.segment import LOG, file_path
from tidelog.log.stored_state import key_prefix
from tidelog.model.errors import StorageError
from tidelog.model.ids import PartitionId, TopicId
from tidelog.world.simulated import Loss, SimMachine, SimNode, SimWorld

LOG_ID = PartitionId(TopicId(UUID(int=7)), 3)
PREFIX = key_prefix(LOG_ID)
PATH = "orders.07-3"
SMALL = LogConfig(segment_bytes=1500, index_interval_bytes=200)
"""Segments of a few batches, so that a short test sees many."""
PAGE_CACHE = replace(SMALL, flush_mode=FlushMode.PAGE_CACHE)
ONE_SEGMENT = LogConfig(segment_bytes=1 << 20, index_interval_bytes=200)


async def open_log(node: SimNode, config: LogConfig = SMALL, *, verify: bool = False) -> Log:
    """The log of this node, opened as a new process would."""
    failures: list[StorageError] = []
    disk = node.disk()
    log = await Log.open(
        disk=disk,
        store=node.store(),
        work=node.work,
        group_commit=GroupCommit(disk, on_failure=failures.append),
        clock=node.clock,
        files=FilePool(disk, open_max=4),
        path=PATH,
        log_id=LOG_ID,
        config=config,
        verify=verify,
    )
    log.validate()
    return log


def batch(
    count: int = 1,
    *,
    timestamp: int = 1_000,
    value: bytes = b"value",
    key: bytes | None = b"key",
    **fields: Any,
) -> bytes:
    """A batch of `count` records as a client sends it."""
    return encode([Record(at, timestamp, key, value, ()) for at in range(count)], **fields)


def stamped(data: bytes, *, base_offset: int, leader_epoch: int) -> bytes:
    """The batch as the log must store it."""
    copy = bytearray(data)
    stamp(copy, base_offset=base_offset, leader_epoch=leader_epoch)
    return bytes(copy)


def idempotent(sequence: int, *, producer: int = 7, epoch: int = 0, count: int = 1, **more: Any) -> bytes:
    return batch(count, producer_id=producer, producer_epoch=epoch, base_sequence=sequence, **more)


def marker(producer: int, kind: ControlKind) -> bytes:
    return encode_control(kind, coordinator_epoch=1, timestamp=1_000, producer_id=producer, producer_epoch=0)


def fill(log: Log, count: int, *, epoch: int = 1, size: int = 100) -> list[bytes]:
    """Append `count` batches of one record; returns them as the log must store them."""
    expected = []
    for at in range(count):
        data = batch(1, timestamp=1_000 + log.end_offset, value=bytes([at % 256]) * size)
        expected.append(stamped(data, base_offset=log.end_offset, leader_epoch=epoch))
        log.append(data, leader_epoch=epoch)
    return expected


async def synced(node: SimNode, count: int, *, then: int = 0, config: LogConfig = SMALL) -> list[bytes]:
    """A log with a checkpoint after `count` batches, and `then` more that are synced but not in the checkpoint."""
    log = await open_log(node, config)
    expected = fill(log, count)
    await log.checkpoint()
    expected += fill(log, then)
    await log.flush()
    return expected


def segment(base: int, suffix: str = LOG) -> str:
    return file_path(PATH, base, suffix)


def split(data: bytes | memoryview) -> list[bytes]:
    """The batches of a slice."""
    found = []
    position = 0
    while position < len(data):
        size = read_header(data, position).size
        found.append(bytes(data[position : position + size]))
        position += size
    assert position == len(data), "a slice holds whole batches"
    return found


async def read_all(log: Log, *, bytes_max: int = 700) -> list[bytes]:
    """Every batch of the log, read as a consumer would."""
    found: list[bytes] = []
    offset: int = log.start_offset
    while offset < log.end_offset:
        slice_ = await log.read(offset, bytes_max=bytes_max)
        if not slice_.data:
            break
        assert slice_.next_offset > offset, "a read makes progress"
        found += split(slice_.data)
        offset = slice_.next_offset
    return found


class Lab:
    """One simulated machine with one log; each `run` is a process, which `crash` or `kill` ends."""

    def __init__(self, world: SimWorld) -> None:
        self.world = world
        self.machine: SimMachine = world.machine("a")

    def run(self, main: Callable[[SimNode], Coroutine[Any, Any, Any]]) -> Any:
        """Boot, run `main`, and leave the process running."""
        return self.world.run(self.machine.boot(), main)

    def again(self, main: Callable[[SimNode], Coroutine[Any, Any, Any]]) -> Any:
        """The same in the process that runs."""
        assert self.machine.node is not None
        return self.world.run(self.machine.node, main)

    def crash(self, loss: Loss = Loss.ALL) -> None:
        self.machine.lose_power(loss)

    def kill(self) -> None:
        self.machine.kill()
