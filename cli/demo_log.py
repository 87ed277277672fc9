"""`tidelog demo log`: kills the writer of a log and recovers the log: everything acknowledged is there.

A child process appends numbered records and prints the durable end after each sync; that line is the acknowledgement,
and this process is the witness. Then comes SIGKILL in the middle of the work, and half a batch of garbage at the end of
the newest segment, as a power loss leaves of a write. Recovery must cut the garbage and keep every acknowledged record,
once, in order, at its offset.
"""

import argparse
import asyncio
import contextlib
import logging
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from functools import partial
from uuid import UUID

from tidelog.cli.exit_codes import EXIT_FAILURE, EXIT_OK
from tidelog.cli.main import UsageError
from tidelog.log.batch import decode_columns, encode_columns, split_batches
from tidelog.log.config import LogConfig
from tidelog.log.file_pool import FilePool
from tidelog.log.group_commit import GroupCommit
from tidelog.log.log import Log
from tidelog.log.recovery_result import RecoveryReport
from tidelog.model.errors import StorageError
from tidelog.model.ids import Epoch, PartitionId, TopicId
from tidelog.world.real.clock import SystemClock
from tidelog.world.real.disk import RealDisk
from tidelog.world.real.store import LmdbStore
from tidelog.world.real.work import InlineWork

TOPIC = TopicId(UUID(int=random.Random("tidelog demo").getrandbits(128), version=4))
LOG_PATH = f"demo.{TOPIC.hex}-0"
STATE_PATH = "state"
CONFIG = LogConfig(segment_bytes=512 << 10)
BATCH_RECORDS = 20
WAITING_MAX = 64
"""Concurrent appends of the writer: they share the syncs."""
READ_BYTES = 1 << 20
BATCH_BYTES_MAX = 1 << 20
CHECKPOINT_S = 0.1


def value_of(number: int) -> bytes:
    """Record `number` in 100 bytes; it is written at offset `number`."""
    return b"record %d " % number + b"." * (100 - len(b"record %d " % number))


def _stop(error: StorageError) -> None:
    raise SystemExit(f"tidelog: the disk failed: {error}")


@contextlib.asynccontextmanager
async def opened_log(directory: str) -> AsyncIterator[Log]:
    """The demo's log on the real disk; closed cleanly at the end."""
    disk = RealDisk(directory)
    files = FilePool(disk)
    group_commit = GroupCommit(disk, on_failure=_stop)
    with LmdbStore(os.path.join(directory, STATE_PATH)) as store:
        log = await Log.open(
            disk=disk,
            store=store,
            work=InlineWork(),
            group_commit=group_commit,
            clock=SystemClock(),
            files=files,
            path=LOG_PATH,
            log_id=PartitionId(TOPIC, 0),
            config=CONFIG,
        )
        yield log
        await log.close()
        await group_commit.close()
        files.close()


# The child


async def write_until_killed(directory: str) -> None:
    """Append numbered records forever; print the durable end whenever it moves."""
    async with opened_log(directory) as log:
        waiting: set[asyncio.Future[None]] = set()
        checkpoints = asyncio.create_task(_checkpoint_for_ever(log))
        while not checkpoints.done():
            first = log.end_offset
            numbers = range(first, first + BATCH_RECORDS)
            batch = encode_columns(
                timestamps=[time.time_ns() // 1_000_000] * BATCH_RECORDS,
                keys=[b"%d" % (number % 100) for number in numbers],
                values=[value_of(number) for number in numbers],
            )
            appended = log.append(batch, leader_epoch=Epoch(0))
            done = log.wait_durable(appended.last_offset)
            done.add_done_callback(partial(_acknowledge, appended.last_offset + 1))
            waiting.add(done)
            if len(waiting) >= WAITING_MAX:
                _, waiting = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)


def _acknowledge(end: int, done: "asyncio.Future[None]") -> None:
    if done.exception() is None:
        os.write(1, b"%d\n" % end)


async def _checkpoint_for_ever(log: Log) -> None:
    """The log's owner must checkpoint: after a crash recovery reads only what lies past the last checkpoint."""
    while True:
        await asyncio.sleep(CHECKPOINT_S)
        await log.checkpoint()


# The witness


@dataclass(frozen=True, slots=True)
class Witnessed:
    """What the witness saw before the writer died."""

    acknowledged_end: int
    acknowledgements: int
    seconds: float


def watch_and_kill(directory: str, records: int) -> Witnessed:
    """Start a writer, kill it once `records` are acknowledged; acknowledgements still in the pipe count too."""
    started = time.monotonic()
    command = [sys.executable, "-m", "tidelog.cli.demo_log", directory]
    # A process group of its own: Ctrl-C of the demo is for the witness alone.
    with subprocess.Popen(command, stdout=subprocess.PIPE, start_new_session=True) as writer:
        assert writer.stdout is not None, "a pipe was asked for"
        end = count = 0
        lines = _lines(writer.stdout.fileno())
        try:
            for line in lines:
                end, count = max(end, int(line)), count + 1
                if end >= records:
                    break
        finally:
            writer.kill()
        for line in lines:
            end, count = max(end, int(line)), count + 1
    if end < records:
        raise StorageError(f"the writer ended by itself after {end} records, with code {writer.returncode}")
    return Witnessed(end, count, time.monotonic() - started)


def _lines(descriptor: int) -> Iterator[bytes]:
    """Yield whole lines from a pipe; a line that the kill cut short was never acknowledged."""
    rest = b""
    while data := os.read(descriptor, 65536):
        *whole, rest = (rest + data).split(b"\n")
        yield from whole


def tear(directory: str) -> int:
    """Leave half a batch of garbage at the end of the newest segment; returns how many bytes."""
    segments = sorted(name for name in os.listdir(os.path.join(directory, LOG_PATH)) if name.endswith(".log"))
    garbage = encode_columns(timestamps=[0], keys=[None], values=[b"half of a write"])[:40]
    with open(os.path.join(directory, LOG_PATH, segments[-1]), "ab") as file:
        file.write(garbage)
    return len(garbage)


@dataclass(frozen=True, slots=True)
class Recovered:
    """The log after the crash, and the seconds to open it."""

    records: int
    end_offset: int
    wrong: int
    """Records that differ from what was written at their offset."""
    report: RecoveryReport
    seconds: float


async def recover_and_read(directory: str) -> Recovered:
    """Open the log, read it from start to end, compare every record with what was written there."""
    started = time.monotonic()
    async with opened_log(directory) as log:
        seconds = time.monotonic() - started
        expected, wrong = int(log.start_offset), 0
        while expected < log.end_offset:
            piece = await log.read(expected, bytes_max=READ_BYTES)
            for position, header in split_batches(piece.data):
                columns = decode_columns(piece.data, position, decompressed_bytes_max=BATCH_BYTES_MAX)
                for number, value in enumerate(columns.values, header.base_offset):
                    wrong += number != expected or value != value_of(number)
                    expected = number + 1
        return Recovered(expected, log.end_offset, wrong, log.report, seconds)


def run(options: argparse.Namespace) -> int:
    if options.records < 1:
        raise UsageError("--records: at least 1")
    with contextlib.ExitStack() as stack:
        directory = options.data
        if directory is None:
            directory = stack.enter_context(tempfile.TemporaryDirectory(prefix="tidelog-demo-"))
        elif os.path.exists(directory) and (not os.path.isdir(directory) or os.listdir(directory)):
            raise UsageError(f"{directory}: is there already; use an empty or a new directory")
        os.makedirs(directory, exist_ok=True)
        return _report_story(directory, options.records)


def _report_story(directory: str, records: int) -> int:
    logging.getLogger("tidelog").addHandler(logging.NullHandler())  # the report below has what recovery logs
    print(f"Writing a log in {directory}, in a process of its own.")
    seen = watch_and_kill(directory, records)
    print(
        f"Killed it with SIGKILL after {seen.seconds:.1f} s, in the middle of its work: "
        f"{seen.acknowledged_end:,} records were acknowledged, that is, synced to disk."
    )
    torn = tear(directory)
    print(f"Left {torn} bytes of half a batch at the end of the newest segment, as a loss of power would.")
    found = asyncio.run(recover_and_read(directory))
    report = found.report
    print(
        f"Recovered it in {found.seconds * 1000:.0f} ms: read {report.bytes_read:,} bytes past the recovery point "
        f"{report.recovery_point:,}, cut {report.bytes_truncated} bytes ({(report.fault or '').rpartition(': ')[2]})."
    )
    again = asyncio.run(recover_and_read(directory))
    print(f"Opened it once more after the clean stop, in {again.seconds * 1000:.1f} ms.")
    lost = max(0, seen.acknowledged_end - found.end_offset)
    if lost or found.wrong or (again.records, again.wrong) != (found.records, 0):
        print(f"FAILED: {lost} acknowledged records are lost, {found.wrong} are wrong.")
        return EXIT_FAILURE
    late = found.end_offset - seen.acknowledged_end
    extra = f"; {late:,} more had been written but not yet acknowledged" if late else ""
    print(
        f"Read all {seen.acknowledged_end:,} acknowledged records, in order, each at its offset{extra}. Nothing lost."
    )
    return EXIT_OK


if __name__ == "__main__":
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # a writer whose witness has gone must not go on for ever
    asyncio.run(write_until_killed(sys.argv[1]))
