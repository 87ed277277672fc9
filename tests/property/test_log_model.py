"""A log against a list: whatever is appended, cut, dropped and reopened, and wherever the power goes.

The model is the list of stamped batches. A run is a number of processes, each of which opens the log, checks it against
the model, and does some operations, until it stops cleanly, is killed, or the power goes at some operation of the disk
or commit of the store. After that, what was promised to be durable must be there, and nothing may differ.
"""

import asyncio
from dataclasses import dataclass, field, replace

from hypothesis import given, settings
from hypothesis import strategies as st
from support.logs.single_log import Lab, batch, open_log, read_all, stamped

from tidelog.log.batch import ControlKind, encode_control, read_header
from tidelog.log.config import FlushMode, LogConfig
from tidelog.log.log import Log
from tidelog.log.log_scan import stored_marker
from tidelog.log.producers import ProducerState
from tidelog.log.transactions import AbortedTransaction
from tidelog.model.errors import DiskFullError, RecordsTruncatedError, StorageError
from tidelog.world.simulated import Loss, SimDevice, SimNode, SimulationError, SimWorld

PRODUCERS = 3


@dataclass
class Timeline:
    """A content that the log may have after a crash: a prefix of `batches` that reaches at least to `least_end`."""

    batches: list[bytes]
    origin: int
    least_end: int
    starts: set[int]


@dataclass
class Model:
    """What the log must hold. `batches` is everything since the origin, dropped beginnings too."""

    batches: list[bytes] = field(default_factory=list)
    origin: int = 0
    start: int = 0
    durable: int = 0
    epoch: int = 0
    clock_ms: int = 1_000
    has_dropped: bool = False
    device: SimDevice | None = None
    # More than one while an operation is under way that changes the log in one step.
    timelines: list[Timeline] = field(default_factory=list)

    @property
    def end(self) -> int:
        return read_header(self.batches[-1]).next_offset if self.batches else self.origin

    def timeline(self) -> Timeline:
        return Timeline(list(self.batches), self.origin, self.durable, {self.start})

    def forget_timelines(self) -> None:
        """No operation is under way."""
        self.timelines = []

    def possible(self) -> list[Timeline]:
        return self.timelines or [self.timeline()]

    def visible(self) -> list[bytes]:
        return [data for data in self.batches if read_header(data).last_offset >= self.start]


def replayed(batches: list[bytes]) -> tuple[ProducerState, list[AbortedTransaction]]:
    """Producers and aborted transactions as the batches alone tell them."""
    state = ProducerState()
    aborted = []
    for data in batches:
        header = read_header(data)
        done = state.apply(header, control=stored_marker(header, data), now_ms=0)
        entry = done.index_entry() if done is not None else None
        if entry is not None:
            aborted.append(entry)
    return state, aborted


def rows(state: ProducerState) -> list[object]:
    return [row._replace(seen_ms=0) for row in state.rows()]


async def check(log: Log, model: Model) -> None:
    """The log is what the model says, in every way that it can be asked."""
    log.validate()
    assert log.damaged is None
    assert log.end_offset == model.end
    assert log.start_offset == model.start
    visible = model.visible()
    assert await read_all(log) == visible
    for data in visible:
        header = read_header(data)
        assert log.epochs.epoch_for(max(header.base_offset, model.start)) == header.leader_epoch
        found = await log.read(max(header.last_offset, model.start), bytes_max=1)
        assert bytes(found.data) == data
    state, aborted = replayed(model.batches)
    if not model.has_dropped:
        assert rows(log.producers) == rows(state)
        assert await log.aborted_transactions(model.start, model.end) == [
            entry for entry in aborted if entry.last_offset >= model.start
        ]
    for timestamp in {0, model.clock_ms // 2, model.clock_ms, model.clock_ms + 1}:
        await check_timestamp(log, model, visible, timestamp)


async def check_timestamp(log: Log, model: Model, visible: list[bytes], timestamp: int) -> None:
    found = await log.offset_for_timestamp(timestamp)
    expected = next(
        (
            max(header.base_offset, model.start)
            for header in map(read_header, visible)
            if header.max_timestamp >= timestamp
        ),
        None,
    )
    assert (found.offset if found is not None else None) == expected


def adopt(log: Log, content: list[bytes], model: Model) -> None:
    """After a crash: which of the possible contents is it? The model goes on from there."""
    for timeline in model.possible():
        end = log.end_offset
        kept = [data for data in timeline.batches if read_header(data).next_offset <= end]
        reached = read_header(kept[-1]).next_offset if kept else timeline.origin
        expected = [data for data in kept if read_header(data).last_offset >= log.start_offset]
        if reached == end >= timeline.least_end and log.start_offset in timeline.starts and content == expected:
            model.batches, model.origin = kept, timeline.origin
            model.has_dropped |= model.start != log.start_offset
            model.start, model.durable = log.start_offset, end
            model.forget_timelines()
            return
    shown = [(t.origin, t.least_end, t.starts, len(t.batches)) for t in model.possible()]
    raise AssertionError(f"log [{log.start_offset}, {log.end_offset}) with {len(content)} batches is none of {shown}")


# Operations: an async function of (log, model, numbers); the name is the first of the tuple that hypothesis draws.


def next_batch(log: Log, model: Model, count: int, kind: int) -> bytes:
    """kind 0: no producer; 1: idempotent; 2: transactional; each with its own producer id."""
    model.clock_ms += 1 + 7 * (count % 3)
    value = b"v" * (17 * count % 120)
    if kind == 0:
        return batch(count, timestamp=model.clock_ms, value=value)
    # After a deep cut of a log whose beginning is gone, the log may know less than all that was ever written.
    state = log.producers if model.has_dropped else replayed(model.batches)[0]
    last = {int(row.producer_id): row for row in state.rows()}
    row = last.get(kind)
    sequence = (row.batches[-1][0] + 1) if row is not None and row.batches else 0
    return batch(
        count,
        timestamp=model.clock_ms,
        value=value,
        producer_id=kind,
        producer_epoch=0,
        base_sequence=sequence,
        is_transactional=kind == 2,
    )


async def append(log: Log, model: Model, number: int) -> None:
    data = next_batch(log, model, 1 + number % 5, number % PRODUCERS)
    if number % 11 == 0:
        model.epoch += 1 + number % 2
    base = model.end
    model.batches.append(stamped(data, base_offset=base, leader_epoch=model.epoch))
    appended = log.append(data, leader_epoch=model.epoch)
    assert (appended.base_offset, appended.last_offset) == (base, model.end - 1)


async def append_and_wait(log: Log, model: Model, number: int) -> None:
    await append(log, model, number)
    end = model.end
    await log.wait_durable(end - 1)
    if log.config.flush_mode is FlushMode.SYNC:
        model.durable = max(model.durable, end)
        assert log.durable_end >= end


async def append_replicated(log: Log, model: Model, number: int) -> None:
    joined = b""
    first = model.end
    for at in range(1 + number % 3):
        data = next_batch(log, model, 1 + (number + at) % 4, number % PRODUCERS)
        if number % 7 == at:
            model.epoch += 1
        model.batches.append(stamped(data, base_offset=model.end, leader_epoch=model.epoch))
        joined += model.batches[-1]
    appended = log.append_replicated(joined)
    assert (appended.base_offset, appended.last_offset) == (first, model.end - 1)


async def end_transaction(log: Log, model: Model, number: int) -> None:
    state, _ = replayed(model.batches)
    if state.first_open_offset is None:
        return
    kind = ControlKind.ABORT if number % 2 else ControlKind.COMMIT
    data = encode_control(kind, coordinator_epoch=0, producer_id=2, producer_epoch=0, timestamp=model.clock_ms)
    model.batches.append(stamped(data, base_offset=model.end, leader_epoch=model.epoch))
    log.append(data, leader_epoch=model.epoch, is_coordinator=True)


async def flush(log: Log, model: Model, number: int) -> None:
    end = model.end
    await log.flush()
    model.durable = max(model.durable, end)


async def checkpoint(log: Log, model: Model, number: int) -> None:
    end = model.end
    await log.checkpoint()
    if log.config.flush_mode is FlushMode.SYNC:
        model.durable = max(model.durable, end)
        assert log.recovery_point >= end


async def roll(log: Log, model: Model, number: int) -> None:
    log.roll()


async def truncate(log: Log, model: Model, number: int) -> None:
    """A record that somebody waits for may be cut: then the waiter gets an error."""
    offset = model.start + number % (model.end - model.start + 1)
    waiter = log.wait_durable(model.end - 1) if model.end > model.start else None
    kept = [data for data in model.batches if read_header(data).next_offset <= offset]
    end = read_header(kept[-1]).next_offset if kept else model.origin
    old = model.timeline()
    model.timelines = [replace(old, least_end=min(old.least_end, end))]
    was_cut = end < model.end
    if was_cut and end < model.start:
        # The batch that is cut spans the start of the log too: it is empty then, and starts where it did.
        empty = Timeline([], model.start, model.start, {model.start})
        model.timelines = [replace(old, least_end=min(old.least_end, end)), empty]
        kept, end, model.origin, model.has_dropped = [], model.start, model.start, False
    model.batches = kept
    await log.truncate(offset)
    model.forget_timelines()
    if was_cut:
        model.durable = end
    if waiter is not None and log.config.flush_mode is FlushMode.SYNC and was_cut and not waiter.done():
        raise AssertionError("a waiter for a record that was cut waits for ever")
    if waiter is not None and waiter.done() and waiter.exception() is not None:
        assert isinstance(waiter.exception(), RecordsTruncatedError)
    latest = log.epochs.latest
    assert latest <= model.epoch


async def advance_start(log: Log, model: Model, number: int) -> None:
    offset = model.start + number % (model.end - model.start + 1)
    now = model.timeline()
    model.timelines = [replace(now, starts={model.start, offset})]
    if offset > model.start:
        model.has_dropped = True
    end = model.end
    model.start = offset
    await log.advance_start(offset)
    model.forget_timelines()
    if offset > log.recovery_point:
        raise AssertionError("the start is past the recovery point")
    model.durable = max(model.durable, min(end, log.durable_end))


async def delete_segments(log: Log, model: Model, number: int) -> None:
    sealed = log.sealed_segments()
    dropped = sealed[: number % (len(sealed) + 1)]
    if not dropped:
        return
    start = max(model.start, dropped[-1].next_offset)
    now = model.timeline()
    model.timelines = [replace(now, starts={model.start, start})]
    model.has_dropped = True
    model.start = start
    await log.advance_start(start)
    model.forget_timelines()
    await log.remove_deleted(1 << 60)


async def reset_to(log: Log, model: Model, number: int) -> None:
    offset = number % (2 * model.end + 10)
    empty = Timeline([], offset, offset, {offset})
    model.timelines = [model.timeline(), empty]
    model.batches, model.origin, model.start, model.durable = [], offset, offset, offset
    model.has_dropped = False
    await log.reset_to(offset)
    model.forget_timelines()


async def assign_epoch(log: Log, model: Model, number: int) -> None:
    model.epoch += 1
    log.assign_epoch(model.epoch)
    assert log.epochs.latest == model.epoch
    assert log.end_offset_for_epoch(model.epoch) == (model.epoch, model.end)


async def checkpoint_under_traffic(log: Log, model: Model, number: int) -> None:
    end = model.end
    running = asyncio.ensure_future(log.checkpoint())
    for at in range(number % 4):
        await asyncio.sleep(0.0002 * (number % 7))
        await append(log, model, number + at)
        if number % 5 == at:
            log.roll()
    await running
    if log.config.flush_mode is FlushMode.SYNC:
        model.durable = max(model.durable, end)
        assert log.recovery_point >= end


async def fill_disk(log: Log, model: Model, number: int) -> None:
    """An append that does not fit has changed nothing."""
    assert model.device is not None
    model.device.fill(number)
    data = next_batch(log, model, 1 + number % 4, 0)
    base = model.end
    try:
        log.append(data, leader_epoch=model.epoch)
    except DiskFullError:
        assert log.end_offset == base
    else:
        model.batches.append(stamped(data, base_offset=base, leader_epoch=model.epoch))
    model.device.heal()


async def fail_sync(log: Log, model: Model, number: int) -> None:
    """The log is done with: what was past the durable end is cut when it is opened again."""
    assert model.device is not None
    await append(log, model, number)
    model.device.fail("sync")
    end = model.end
    try:
        await log.flush()
    except StorageError:
        assert log.damage_state.suspect_task is not None
        await log.damage_state.suspect_task
        raise ProcessOverError from None
    finally:
        model.device.heal()
    # A sync that was under way took the error, or none was needed.
    model.durable = max(model.durable, end)


class ProcessOverError(Exception):
    """The process gives its disk up."""


OPERATIONS = {
    operation.__name__: operation
    for operation in (
        append,
        append_and_wait,
        append_replicated,
        end_transaction,
        flush,
        checkpoint,
        roll,
        truncate,
        advance_start,
        delete_segments,
        reset_to,
        assign_epoch,
        checkpoint_under_traffic,
        fill_disk,
        fail_sync,
    )
}
WEIGHTED = [
    *["append"] * 8,
    *["append_and_wait"] * 4,
    *["append_replicated"] * 4,
    *["end_transaction"] * 2,
    *["truncate"] * 3,
    *["checkpoint"] * 3,
    *["roll"] * 2,
    "flush",
    "advance_start",
    "delete_segments",
    "reset_to",
    "assign_epoch",
    *["checkpoint_under_traffic"] * 2,
    "fill_disk",
    "fail_sync",
]


@dataclass(frozen=True)
class Process:
    """What one process does, and how it ends. `crash_disk` and `crash_store` count operations from its start,
    `crash_last` from the start of its last operation."""

    operations: list[tuple[str, int]]
    ending: str
    crash_disk: int | None
    crash_store: int | None
    loss: Loss
    verify: bool = False
    crash_last: int | None = None


processes = st.builds(
    Process,
    operations=st.lists(st.tuples(st.sampled_from(WEIGHTED), st.integers(0, 200)), max_size=12),
    ending=st.sampled_from(["close", "kill", "power"]),
    crash_disk=st.none() | st.integers(1, 120),
    crash_store=st.none() | st.integers(1, 25),
    loss=st.sampled_from(list(Loss)),
    verify=st.booleans(),
    crash_last=st.none() | st.integers(1, 15),
)
configs = st.sampled_from(
    [
        LogConfig(segment_bytes=1500, index_interval_bytes=200),
        LogConfig(segment_bytes=600, index_interval_bytes=0),
        LogConfig(segment_bytes=100_000, index_interval_bytes=4096),
        LogConfig(segment_bytes=1500, index_interval_bytes=200, flush_mode=FlushMode.PAGE_CACHE),
        LogConfig(segment_bytes=900, index_interval_bytes=100, flush_mode=FlushMode.PAGE_CACHE, flush_messages=5),
    ]
)


async def live(node: SimNode, process: Process, config: LogConfig, model: Model) -> None:
    log = await open_log(node, config, verify=process.verify)
    content = await read_all(log)
    adopt(log, content, model)
    await check(log, model)
    for at, (name, number) in enumerate(process.operations):
        if process.crash_last is not None and at == len(process.operations) - 1:
            assert model.device is not None
            model.device.crash_at_operation = model.device.operations + process.crash_last
        try:
            await OPERATIONS[name](log, model, number)
        except ProcessOverError:
            return
        log.validate()
        assert log.end_offset == model.end
    await check(log, model)
    if process.ending == "close":
        # A clean stop makes everything durable, in page-cache too; until it has, a crash may find either.
        await log.close()
        model.durable = model.end


def run(seed: int, config: LogConfig, lives: list[Process]) -> None:
    model = Model()
    with SimWorld(seed) as world:
        lab = Lab(world)
        device, store = lab.machine.disk(), lab.machine.store()
        model.device = device
        for process in lives:
            device.heal()
            lab.machine.crash_loss = process.loss
            device.crash_at_operation = process.crash_disk and device.operations + process.crash_disk
            store.crash_at_commit = process.crash_store and store.transactions + process.crash_store

            async def main(node: SimNode, process: Process = process) -> None:
                await live(node, process, config, model)

            try:
                lab.run(main)
            except SimulationError as error:
                if "died before it was done" not in str(error):
                    raise
            else:
                if process.ending == "power":
                    lab.crash(process.loss)
                else:
                    lab.kill()
        device.crash_at_operation = store.crash_at_commit = None
        device.heal()
        last = Process([], "close", None, None, Loss.ALL, verify=True)
        lab.run(lambda node: live(node, last, config, model))


@given(seed=st.integers(0, 1 << 20), config=configs, lives=st.lists(processes, min_size=1, max_size=4))
@settings(max_examples=5 * settings().max_examples)
def test_a_log_behaves_as_a_list_through_crashes_at_any_point(
    seed: int, config: LogConfig, lives: list[Process]
) -> None:
    run(seed, config, lives)
