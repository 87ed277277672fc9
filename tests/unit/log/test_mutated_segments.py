"""Bad bytes on the disk: mutated files and stored values of small logs.

Opening a log that was mutated gives the right data, or says what is wrong (cut, damaged, an error of the catalogue);
never another exception, never bytes that pass their CRC and are not what was written, never an end that is lower than
what was safe without saying so. Reads by offset and timestamp, scrubbing, repair and further appends are part of it.

2,520 mutations in all; `FUZZ_MUTATIONS` raises the number (`make fuzz`). A failure prints `mutation(image, seed,
number)`, which makes it again.
"""

import os
import random
import time
import tracemalloc
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import pairwise
from typing import Any

import pytest
from support.logs.single_log import LOG_ID, PATH, batch, open_log, read_all

from tidelog.log import housekeeping
from tidelog.log.batch import ControlKind, Record, check_batch, decode, encode, encode_control, read_header
from tidelog.log.cleaner import CleanerLimits
from tidelog.log.config import FlushMode, LogConfig
from tidelog.log.log import Log
from tidelog.log.log_scan import BATCH_BYTES_MAX
from tidelog.log.stored_state import key_prefix
from tidelog.model.errors import (
    CorruptBatchError,
    DamagedLogError,
    OffsetOutOfRangeError,
    StorageError,
    TidelogError,
    UnsupportedMagicError,
)
from tidelog.model.ids import Offset
from tidelog.world.simulated import SimMachine, SimNode, SimWorld

MUTATIONS = max(2_520, int(os.environ.get("FUZZ_MUTATIONS", "0")))
PARTS = 3
WORLD_MUTATIONS = 25
SECONDS_MAX = 20.0
"""Limit for one mutation on a busy machine: a guard against an endless loop."""

PLAIN = LogConfig(segment_bytes=900, index_interval_bytes=150)
COMPACT = replace(PLAIN, cleanup_compact=True, cleanup_delete=False, min_cleanable_dirty_ratio=0.0)
PAGES = LogConfig(segment_bytes=700, index_interval_bytes=0, flush_mode=FlushMode.PAGE_CACHE)

READ_ERRORS = (CorruptBatchError, UnsupportedMagicError, DamagedLogError, OffsetOutOfRangeError)


@dataclass(frozen=True)
class Image:
    """A log on disk: files, stored values (sealed), and the expected batches."""

    name: str
    config: LogConfig
    files: dict[str, bytes]
    stored: dict[bytes, bytes]
    stale: dict[bytes, bytes]
    """Earlier values of the same keys."""
    batches: list[bytes]
    safe_end: int
    """The recovery point: nothing below it may be missing unreported."""
    is_clean: bool

    @property
    def end(self) -> int:
        return read_header(self.batches[-1]).next_offset


# The images


async def fill(log: Log, count: int, *, seed: int) -> None:
    """Records without and with producers, transactions of both endings."""
    draw = random.Random(seed)
    for row in range(count):
        kind = row % 5
        epoch = max(0, int(log.epochs.latest)) + (row % 15 == 14)
        value = draw.randbytes(draw.randrange(10, 60))
        now = log.clock.now_ms() + row * 10
        if kind < 3:
            log.append(batch(1 + row % 3, timestamp=now, key=b"key-%d" % (row % 4), value=value), leader_epoch=epoch)
            continue
        producer = 1000 * seed + row
        fields: dict[str, Any] = {"producer_id": producer, "producer_epoch": 0, "base_sequence": 0}
        log.append(
            encode([Record(0, now, b"t%d" % (row % 3), value, ())], is_transactional=True, **fields),
            leader_epoch=epoch,
        )
        marker = encode_control(
            ControlKind.ABORT if kind == 3 else ControlKind.COMMIT,
            coordinator_epoch=1,
            timestamp=now,
            producer_id=producer,
            producer_epoch=0,
        )
        log.append(marker, leader_epoch=epoch, is_coordinator=True)


async def closed_log(node: SimNode, stale: dict[bytes, bytes]) -> Log:
    log = await open_log(node, PLAIN)
    await fill(log, 30, seed=1)
    await log.checkpoint()
    stale.update(node.machine.store().stored)
    await fill(log, 12, seed=2)
    await log.close()
    return log


async def crashed_log(node: SimNode, stale: dict[bytes, bytes]) -> Log:
    log = await open_log(node, PLAIN)
    await fill(log, 25, seed=3)
    await log.checkpoint()
    stale.update(node.machine.store().stored)
    await fill(log, 6, seed=4)
    await log.checkpoint()
    await fill(log, 8, seed=5)
    await log.flush()
    return log


async def cleaned_log(node: SimNode, stale: dict[bytes, bytes]) -> Log:
    log = await open_log(node, COMPACT)
    await fill(log, 30, seed=6)
    await log.checkpoint()
    stale.update(node.machine.store().stored)
    plan = housekeeping.plan(log, bound=log.end_offset)
    assert plan is not None
    assert await housekeeping.clean(log, plan, CleanerLimits()) is not None
    await fill(log, 10, seed=7)
    await log.close()
    return log


async def unsynced_log(node: SimNode, stale: dict[bytes, bytes]) -> Log:
    log = await open_log(node, PAGES)
    await fill(log, 8, seed=8)
    await log.flush()
    await log.checkpoint()
    stale.update(node.machine.store().stored)
    await fill(log, 25, seed=9)
    return log


IMAGES = {"closed": closed_log, "crashed": crashed_log, "cleaned": cleaned_log, "unsynced": unsynced_log}


@cache
def image(name: str) -> Image:
    stale: dict[bytes, bytes] = {}
    with SimWorld(17) as world:
        machine = world.machine("a")

        async def make(node: SimNode) -> tuple[Log, list[bytes]]:
            log = await IMAGES[name](node, stale)
            return log, [] if log.is_closed else await read_all(log)

        log, batches = world.run(machine.boot(), make)
        safe_end = int(log.recovery_point)
        if not batches:
            machine.kill()

            async def look(node: SimNode) -> list[bytes]:
                again = await open_log(node, log.config)
                assert again.report.clean
                found = await read_all(again)
                await again.close()
                return found

            batches = world.run(machine.boot(), look)
        files = {path: machine.disk().raw(path) for path, _ in machine.disk().files() if not path.endswith(".deleted")}
        return Image(name, log.config, files, dict(machine.store().stored), stale, batches, safe_end, log.is_closed)


# Mutations


@dataclass
class Mutated:
    image: Image
    files: dict[str, bytes]
    stored: dict[bytes, bytes]
    what: str = ""
    touched: set[str] = field(default_factory=set)
    lies: bool = False
    """Whether the store lost fields or has older ones with valid CRCs: no reader can detect that."""

    @property
    def has_log(self) -> bool:
        return any(path.endswith(".log") for path in self.touched)

    @property
    def has_store(self) -> bool:
        return "store" in self.touched

    def changes(self) -> list[int]:
        """For each mutated segment, the number of changes."""
        counts = []
        for path in self.touched:
            if path.endswith(".log"):
                before, after = self.image.files.get(path, b""), self.files.get(path, b"")
                differing = sum(1 for one, two in zip(before, after, strict=False) if one != two)
                counts.append(differing + abs(len(before) - len(after)))
        return counts


def flip(draw: random.Random, data: bytearray) -> None:
    for _ in range(draw.choice([1, 1, 1, 2, 8])):
        if data:
            data[draw.randrange(len(data))] ^= 1 << draw.randrange(8)


def cut(draw: random.Random, data: bytearray) -> None:
    del data[draw.choice([0, draw.randrange(len(data) + 1), max(0, len(data) - draw.randrange(1, 40))]) :]


def zero(draw: random.Random, data: bytearray) -> None:
    page = draw.choice([16, 64, 256, 4096])
    at = draw.randrange(len(data) // page + 1) * page
    size = len(data[at : at + page])
    data[at : at + page] = bytes(size)


def swap_chunks(draw: random.Random, data: bytearray) -> None:
    size = draw.choice([8, 34, 64, 128])
    if len(data) >= 2 * size:
        one, two = sorted((draw.randrange(len(data) // size), draw.randrange(len(data) // size)))
        if one != two:
            first, second = data[one * size : (one + 1) * size], data[two * size : (two + 1) * size]
            data[one * size : (one + 1) * size], data[two * size : (two + 1) * size] = second, first


def extend(draw: random.Random, data: bytearray) -> None:
    count = draw.randrange(1, 300)
    data += draw.choice([draw.randbytes(count), bytes(count), bytes(data[-count:]), bytes(data[:count])])


def noise(draw: random.Random, data: bytearray) -> None:
    at = draw.randrange(len(data) + 1)
    data[at:] = draw.randbytes(len(data) - at)


BYTES: list[Callable[[random.Random, bytearray], None]] = [flip, flip, cut, zero, swap_chunks, extend, noise]


def mutate_file(draw: random.Random, mutated: Mutated) -> None:
    suffix = draw.choice([".log", ".log", ".log", ".index", ".timeindex", ".txnindex"])
    paths = sorted(path for path in mutated.files if path.endswith(suffix))
    if not paths:
        return
    path = draw.choice(paths)
    mutated.touched.add(path)
    kind = draw.randrange(12)
    if kind == 0:
        del mutated.files[path]
        mutated.what += f"remove {path}; "
    elif kind == 1:
        other = draw.choice(paths)
        mutated.touched.add(other)
        mutated.files[path], mutated.files[other] = mutated.files[other], mutated.files[path]
        mutated.what += f"swap {path} and {other}; "
    elif kind == 2:
        base = draw.choice([0, 1, 7, 10**6, int(path[-len(suffix) - 20 : -len(suffix)]) + draw.randrange(1, 9)])
        stray = f"{PATH}/{base:020d}{suffix}{draw.choice(['', '.cleaned', '.swap', '.deleted'])}"
        if stray not in mutated.files:
            mutated.touched.add(stray)
            mutated.files[stray] = mutated.files[path]
            mutated.what += f"copy {path} to {stray}; "
    else:
        data = bytearray(mutated.files[path])
        change = draw.choice(BYTES)
        change(draw, data)
        mutated.files[path] = bytes(data)
        mutated.what += f"{change.__name__} {path}; "


def mutate_store(draw: random.Random, mutated: Mutated) -> None:
    prefix = key_prefix(LOG_ID)
    keys = sorted(key for key in mutated.stored if key.startswith(prefix))
    key = draw.choice(keys)
    name = key[len(prefix) :]
    mutated.touched.add("store")
    match draw.randrange(8):
        case 0:
            del mutated.stored[key]
            mutated.lies = True
            mutated.what += f"forget {name!r}; "
        case 1:
            if key in mutated.image.stale:
                mutated.stored[key] = mutated.image.stale[key]
                mutated.lies = True
                mutated.what += f"stale {name!r}; "
        case 2:
            other = draw.choice(keys)
            mutated.stored[key], mutated.stored[other] = mutated.stored[other], mutated.stored[key]
            mutated.what += f"swap {name!r} and {other[len(prefix) :]!r}; "
        case _:
            data = bytearray(mutated.stored[key])
            change = draw.choice(BYTES)
            change(draw, data)
            mutated.stored[key] = bytes(data)
            mutated.what += f"{change.__name__} {name!r}; "


def mutation(name: str, seed: int, number: int) -> Mutated:
    draw = random.Random(f"{name}/{seed}/{number}")
    whole = image(name)
    mutated = Mutated(whole, dict(whole.files), dict(whole.stored))
    for _ in range(draw.choice([1, 1, 1, 2, 3])):
        draw.choice([mutate_file, mutate_file, mutate_file, mutate_store])(draw, mutated)
    if draw.random() < 0.02:
        mutated.stored.clear()
        mutated.touched.add("store")
        mutated.lies = True
        mutated.what += "an empty store; "
    return mutated


# Checks


async def put_on_disk(node: SimNode, mutated: Mutated) -> None:
    """The mutated files and values, all of them durable, instead of what the machine had."""
    node.machine.disk().wipe()
    disk = node.disk()
    disk.make_directory(PATH)
    for path, data in mutated.files.items():
        file = disk.open(path, create=True)
        file.append(data)
        disk.sync([file], [PATH])
        file.close()
    disk.sync([], [""])
    store = node.machine.store()
    store.wipe()
    store.stored.update(mutated.stored)


def is_sound(data: bytes) -> bool:
    try:
        check_batch(data, size_max=BATCH_BYTES_MAX)
    except TidelogError:
        return False
    return True


async def exercise(node: SimNode, mutated: Mutated, *, verify: bool) -> str:
    """Open the log and use it in every way; returns its final state."""
    try:
        log = await open_log(node, mutated.image.config, verify=verify)
    except StorageError as error:
        return type(error).__name__
    end = int(log.end_offset)
    check_end(log, mutated)
    await check_reads(log, mutated, verify=verify)
    await check_timestamps(log, mutated)
    await check_transactions(log)
    await check_scrub(log, mutated)
    outcome = "damaged" if log.damaged is not None else "cut" if end < mutated.image.end else "whole"
    await go_on(log, mutated)
    return outcome


def check_end(log: Log, mutated: Mutated) -> None:
    """An end below the safe end is reported as damage; a truncation is in the report."""
    image = mutated.image
    end = int(log.end_offset)
    if log.damaged is not None:
        assert log.damaged.good_end <= log.end_offset
        assert log.damaged.reason
        return
    if end < image.safe_end or log.start_offset > 0:
        # Only a store that lost its recovery point, or has an older one, can hide it.
        assert mutated.lies, f"the log is [{log.start_offset}, {end}), not [0, {image.safe_end}), and does not say so"
    if end < image.end:
        gone = mutated.has_store or log.report.bytes_truncated or log.report.files_removed or log.report.fault
        assert gone or mutated.has_log, "a log that is shorter says so"


async def check_reads(log: Log, mutated: Mutated, *, verify: bool) -> None:
    """Each batch that is read is as written, fails its CRC, or differs outside of the batch CRCs."""
    image = mutated.image
    originals = {read_header(data).base_offset: data for data in image.batches}
    rests = {data[16:] for data in image.batches}
    # One fault in a sealed file is found, wherever it is; of several the one that no CRC of a batch covers may be
    # taken for good if it stands in front of the others.
    is_exact = verify and not mutated.has_store and all(count <= 1 for count in mutated.changes())
    good: list[bytes] = []
    offset: int = log.start_offset
    end = log.end_offset if log.damaged is None else log.damaged.good_end
    while offset < end:
        try:
            part = await log.read(offset, bytes_max=600)
        except READ_ERRORS:
            assert not verify or log.damaged is not None, "everything was checked when it was opened"
            break
        if not part.data:
            break
        assert part.next_offset > offset, "a read makes progress"
        position = 0
        while position < len(part.data):
            try:
                header = read_header(part.data, position)
            except (CorruptBatchError, UnsupportedMagicError):
                assert not verify, "verified, and no batch"
                return
            data = bytes(part.data[position : position + header.size])
            position += header.size
            if is_sound(data):
                assert data[16:] in rests, "bytes that pass their CRC and were never written"
                # Past the recovery point only offsets, epochs and the batch's own CRC are checked.
                if is_exact and header.base_offset < image.safe_end:
                    assert data == originals.get(header.base_offset), "verified, and not what was written"
            else:
                assert mutated.has_log
                assert not verify, "verified, and its CRC is wrong"
            good.append(data)
        offset = part.next_offset
    if not mutated.has_log and not mutated.lies and log.damaged is None:
        assert good == image.batches, "no batch was mutated, and nothing is said to be wrong"
    if is_exact:
        below = min(end, image.safe_end)
        assert [data for data in good if read_header(data).next_offset <= below] == [
            data for data in image.batches if read_header(data).next_offset <= below
        ]


async def check_timestamps(log: Log, mutated: Mutated) -> None:
    """With sound batches the result is right for any index; an unsound batch is never decoded."""
    records = [
        (record.offset, record.timestamp)
        for data in mutated.image.batches
        for record in decode(data, decompressed_bytes_max=1 << 20)
    ]
    stamps = sorted({timestamp for _, timestamp in records})
    bound = log.end_offset if log.damaged is None else log.damaged.good_end
    for timestamp in (0, stamps[0], stamps[len(stamps) // 2] + 1, stamps[-1], stamps[-1] + 1):
        try:
            answer = await log.offset_for_timestamp(timestamp)
            await log.offset_of_largest_timestamp()
        except READ_ERRORS:
            assert mutated.has_log or mutated.has_store
            continue
        if mutated.has_log or mutated.has_store:
            if answer is not None and not mutated.has_store:
                assert log.start_offset <= answer.offset < bound
            continue
        expected = next((o for o, t in records if t >= timestamp and log.start_offset <= o < bound), None)
        assert (None if answer is None else answer.offset) == expected


async def check_transactions(log: Log) -> None:
    try:
        aborted = await log.aborted_transactions(log.start_offset, log.end_offset)
    except READ_ERRORS:
        return
    assert all(one.last_offset < two.last_offset for one, two in pairwise(aborted))


async def check_scrub(log: Log, mutated: Mutated) -> None:
    """The CRC of the whole file detects rot anywhere in a sealed segment."""
    if mutated.has_store:
        return
    for info in log.sealed_segments():
        path = f"{PATH}/{info.base_offset:020d}.log"
        before = mutated.image.files.get(path)
        if before is None or info.crc is None or info.size != len(before):
            continue
        result = await log.scrub(info.base_offset)
        if mutated.files.get(path) != before:
            assert result.fault is not None, f"{path} was mutated and scrubs as sound"
            assert log.damaged is not None
        else:
            assert result.fault is None, "a sound segment does not scrub"


async def go_on(log: Log, mutated: Mutated) -> None:
    """A damaged log rejects appends until it is repaired; then it works, and the next start is sound."""
    if log.damaged is not None:
        with pytest.raises(DamagedLogError):
            log.append(batch(), leader_epoch=max(0, log.epochs.latest))
        try:
            await log.repair()
        except DamagedLogError:
            # More rot below the good end: repair again, until nothing is left.
            await log.reset_to(log.end_offset)
        except (CorruptBatchError, UnsupportedMagicError):
            await log.reset_to(log.end_offset)
        log.validate()
        assert log.damaged is None
    end = int(log.end_offset)
    try:
        appended = log.append(batch(2), leader_epoch=max(0, log.epochs.latest))
    except TidelogError as error:
        raise AssertionError(f"a log that is open and sound takes appends: {error}") from error
    assert appended.base_offset == end
    await log.wait_durable(appended.last_offset)
    try:
        found = bytes((await log.read(end, bytes_max=1)).data)
        # Rot in a base offset of the active segment is covered by no CRC until the segment is sealed.
        assert mutated.has_log or found[61:] == batch(2)[61:]
    except READ_ERRORS:
        assert mutated.has_log, "the way to it leads over rot"
    log.validate()
    await log.close()


async def open_again(node: SimNode, mutated: Mutated) -> None:
    log = await open_log(node, mutated.image.config)
    assert log.report.clean or log.damaged is None
    log.validate()


def run(machine: SimMachine, mutated: Mutated, *, verify: bool) -> str:
    world = machine.world

    async def main(node: SimNode) -> str:
        await put_on_disk(node, mutated)
        return await exercise(node, mutated, verify=verify)

    async def again(node: SimNode) -> None:
        await open_again(node, mutated)

    outcome = world.run(machine.boot(), main)
    machine.kill()
    if outcome in ("whole", "cut", "damaged"):
        world.run(machine.boot(), again)
        machine.kill()
    return outcome


def test_images_have_the_files_and_recovery_points_that_mutations_need() -> None:
    for name in IMAGES:
        whole = image(name)
        assert len([path for path in whole.files if path.endswith(".log")]) >= 3, name
        assert any(path.endswith(".txnindex") for path in whole.files), name
        with SimWorld(1) as world:
            assert (
                run(world.machine("a"), Mutated(whole, dict(whole.files), dict(whole.stored)), verify=True) == "whole"
            )
    assert image("crashed").safe_end < image("crashed").end
    assert image("unsynced").safe_end < image("unsynced").end
    assert image("closed").safe_end == image("closed").end
    assert Offset(image("cleaned").safe_end) == image("cleaned").end


@pytest.mark.requirement("a:A-73", "a:T-21")
@pytest.mark.case("S2")
@pytest.mark.timeout(3600 if MUTATIONS > 2_520 else 300)
@pytest.mark.parametrize("seed", range(PARTS))
@pytest.mark.parametrize("name", sorted(IMAGES))
def test_mutated_segments_give_the_right_data_or_say_what_is_wrong(name: str, seed: int) -> None:
    seen: Counter[str] = Counter()
    count = MUTATIONS // PARTS // len(IMAGES)
    for first in range(0, count, WORLD_MUTATIONS):
        with SimWorld(first) as world:
            for number in range(first, min(first + WORLD_MUTATIONS, count)):
                mutated = mutation(name, seed, number)
                began = time.perf_counter()
                try:
                    seen[run(world.machine("a"), mutated, verify=number % 4 == 3)] += 1
                except BaseException:
                    print(f'mutation("{name}", {seed}, {number}): {mutated.what}')
                    raise
                took = time.perf_counter() - began
                assert took < SECONDS_MAX, f'mutation("{name}", {seed}, {number}) took {took:.1f} s'
    # The mutations reach everything.
    assert seen["whole"] > count // 20, seen
    assert seen["damaged"] > count // 20, seen
    if not image(name).is_clean:
        assert seen["cut"] > count // 50, seen


def test_mutated_segments_take_bounded_memory() -> None:
    mutations = [mutation("crashed", 77, number) for number in range(100)]
    for length in (2**31 - 1, -(2**31), 2**24, 0):
        whole = image("crashed")
        files = dict(whole.files)
        for path in sorted(path for path in files if path.endswith(".log")):
            data = bytearray(files[path])
            data[8:12] = length.to_bytes(4, "big", signed=True)
            files = {**files, path: bytes(data)}
            mutations.append(Mutated(whole, files, dict(whole.stored), f"length {length} in {path}", {path}))
    with SimWorld(3) as world:
        run(world.machine("a"), mutations[0], verify=True)
        tracemalloc.start()
        try:
            for mutated in mutations:
                tracemalloc.reset_peak()
                before = tracemalloc.get_traced_memory()[0]
                run(world.machine("a"), mutated, verify=True)
                used = tracemalloc.get_traced_memory()[1] - before
                assert used < 8 << 20, f"{mutated.what} took {used} bytes"
        finally:
            tracemalloc.stop()
