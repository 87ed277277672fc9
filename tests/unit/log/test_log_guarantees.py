"""What the source documents promise of a partition's log, item by item, shown on a whole log."""

from collections.abc import Iterator
from dataclasses import replace

import pytest
from log_world import PATH, SMALL, Lab, batch, open_log, read_all, stamped

from tidelog.log import housekeeping
from tidelog.log.batch import Codec, ControlKind, Record, decode, encode, encode_control, read_header
from tidelog.log.cleaner import CleanerLimits
from tidelog.log.config import FlushMode
from tidelog.log.segment import LOG
from tidelog.model.errors import DuplicateSequenceError, OutOfOrderSequenceError
from tidelog.model.ids import Offset
from tidelog.world.simulated import SimNode, SimWorld

MIB = 1 << 20


@pytest.fixture
def lab() -> Iterator[Lab]:
    with SimWorld(seed=11) as world:
        yield Lab(world)


def from_producer(sequence: int, *, transactional: bool = False, value: bytes = b"value") -> bytes:
    return batch(producer_id=7, producer_epoch=0, base_sequence=sequence, is_transactional=transactional, value=value)


def end_of_transaction(kind: ControlKind) -> bytes:
    return encode_control(kind, coordinator_epoch=1, timestamp=1_000, producer_id=7, producer_epoch=0)


@pytest.mark.source("a:A-08")
@pytest.mark.source("a:A-11")
@pytest.mark.source("b:A-09")
@pytest.mark.source("b:A-10")
def test_a_partition_is_one_log_that_is_read_in_the_order_and_at_the_offsets_of_its_appends(lab: Lab) -> None:
    async def main(node: SimNode) -> None:
        log = await open_log(node)
        appended = [log.append(batch(count, value=b"%d" % count), leader_epoch=0) for count in (1, 3, 2)]
        assert [(one.base_offset, one.last_offset) for one in appended] == [(0, 0), (1, 3), (4, 5)]
        found = [record for data in await read_all(log) for record in decode(data, decompressed_bytes_max=MIB)]
        assert [record.offset for record in found] == [0, 1, 2, 3, 4, 5]
        assert [record.value for record in found] == [b"1", b"3", b"3", b"3", b"2", b"2"]

    lab.run(main)


@pytest.mark.source("b:B-15")
@pytest.mark.source("b:A-03")
def test_what_is_stored_is_never_changed_by_what_comes_later(lab: Lab) -> None:
    async def main(node: SimNode) -> None:
        log = await open_log(node)
        disk = node.disk()
        seen: dict[str, bytes] = {}
        for number in range(12):
            log.append(batch(3, value=b"%d" % number * 40, key=None), leader_epoch=number)
            for name in disk.list(PATH):
                if name.endswith(LOG):
                    file = disk.open(f"{PATH}/{name}")
                    data = file.read(0, file.size)
                    file.close()
                    assert data.startswith(seen.get(name, b"")), f"{name} was changed and not only continued"
                    seen[name] = data
        assert len(seen) > 1, "more than one segment was written"

    lab.run(main)


@pytest.mark.source("b:A-05")
def test_null_keys_and_null_values_are_kept_as_such(lab: Lab) -> None:
    async def main(node: SimNode) -> None:
        log = await open_log(node)
        records = [Record(0, 1, None, b"v", ()), Record(1, 1, b"k", None, ()), Record(2, 1, None, None, ())]
        log.append(encode(records), leader_epoch=0)
        [data] = await read_all(log)
        found = decode(data, decompressed_bytes_max=MIB)
        assert [(record.key, record.value) for record in found] == [(None, b"v"), (b"k", None), (None, None)]

    lab.run(main)


@pytest.mark.source("a:A-05")
@pytest.mark.source("a:A-70")
@pytest.mark.source("a:V-04")
@pytest.mark.source("b:A-07")
@pytest.mark.source("b:B-51")
@pytest.mark.parametrize("codec", [codec for codec in Codec if codec is not Codec.NONE])
def test_a_batch_is_compressed_once_by_its_producer_and_stored_and_read_as_it_came(lab: Lab, codec: Codec) -> None:
    async def main(node: SimNode) -> None:
        log = await open_log(node)
        sent = batch(50, value=b"a value that compresses well " * 4, codec=codec)
        plain = batch(50, value=b"a value that compresses well " * 4)
        assert len(sent) < len(plain) / 2
        log.append(sent, leader_epoch=4)
        assert log.size == len(sent), "the whole batch stands in one partition's file, as small as it came"
        assert await read_all(log) == [stamped(sent, base_offset=0, leader_epoch=4)]

    lab.run(main)


@pytest.mark.source("a:A-60")
def test_all_files_of_a_replica_stand_in_one_directory(lab: Lab) -> None:
    async def main(node: SimNode) -> None:
        log = await open_log(node)
        for _ in range(40):
            log.append(batch(5), leader_epoch=0)
        await log.checkpoint()
        names = node.disk().list(PATH)
        logs = [name for name in names if name.endswith(LOG)]
        assert len(logs) == len(log.sealed_segments()) + 1 > 2
        assert [name for name in node.disk().list("") if name != PATH] == [], "nothing of it lies elsewhere"

    lab.run(main)


@pytest.mark.source("a:A-75")
@pytest.mark.source("b:B-13")
def test_with_page_cache_an_append_is_in_the_file_at_once_and_waits_for_no_sync(lab: Lab) -> None:
    async def main(node: SimNode) -> None:
        log = await open_log(node, replace(SMALL, flush_mode=FlushMode.PAGE_CACHE))
        appended = log.append(batch(), leader_epoch=0)
        assert log.wait_durable(appended.last_offset).done()
        assert log.durable_end == 0, "nothing claims to be on the device"
        file = node.disk().open(f"{PATH}/00000000000000000000.log")
        assert file.size == log.size > 0, "the bytes are in the file, not in a cache of ours"
        file.close()

    lab.run(main)


@pytest.mark.source("a:A-101")
@pytest.mark.source("b:N-04")
def test_cleaning_needs_rolled_segments_and_is_slowed_by_its_throttle(lab: Lab) -> None:
    config = replace(SMALL, cleanup_compact=True, cleanup_delete=False, min_cleanable_dirty_ratio=0.0)

    async def main(node: SimNode) -> None:
        log = await open_log(node, config)
        log.append(batch(value=b"old"), leader_epoch=0)
        log.append(batch(value=b"new"), leader_epoch=0)
        assert housekeeping.plan(log, bound=log.end_offset) is None, "the active segment is never cleaned"
        log.roll()
        plan = housekeeping.plan(log, bound=log.end_offset)
        assert plan is not None
        began = node.loop.time()
        limits = CleanerLimits(io_bytes_per_second=100)
        report = await housekeeping.clean(log, plan, limits)
        assert report is not None
        assert (report.records_read, report.records_kept) == (2, 1)
        assert [decode(data, decompressed_bytes_max=MIB)[-1].value for data in await read_all(log)] == [b"new"]
        assert node.loop.time() - began >= report.bytes_read / 100, "read and written no faster than the limit"
        assert housekeeping.plan(log, bound=log.end_offset) is None, "what is clean is left alone"

    lab.run(main)


@pytest.mark.source("a:H-05")
@pytest.mark.source("a:H-21")
def test_aborted_records_are_in_the_log_and_an_open_transaction_holds_back_the_last_stable_offset(lab: Lab) -> None:
    async def main(node: SimNode) -> None:
        log = await open_log(node)
        log.append(batch(), leader_epoch=0)
        log.append(from_producer(0, transactional=True), leader_epoch=0)
        log.append(batch(), leader_epoch=0)
        assert log.last_stable_offset(log.end_offset) == 1
        log.append(end_of_transaction(ControlKind.ABORT), leader_epoch=0, is_coordinator=True)
        assert log.last_stable_offset(log.end_offset) == log.end_offset == 4
        headers = [read_header(data) for data in await read_all(log)]
        assert [header.is_transactional for header in headers] == [False, True, False, True]
        [aborted] = await log.aborted_transactions(0, 4)
        assert (aborted.producer_id, aborted.first_offset, aborted.last_offset) == (7, 1, 3)

    lab.run(main)


@pytest.mark.source("a:T-15")
def test_a_gap_is_refused_and_a_repeat_is_answered_with_its_first_offset(lab: Lab) -> None:
    async def main(node: SimNode) -> None:
        log = await open_log(node)
        for sequence in range(8):
            log.append(from_producer(sequence), leader_epoch=0)
        with pytest.raises(OutOfOrderSequenceError):
            log.append(from_producer(27), leader_epoch=0)
        again = log.append(from_producer(5), leader_epoch=0)
        assert (again.duplicate, again.base_offset, log.end_offset) == (True, 5, 8)
        with pytest.raises(DuplicateSequenceError):
            log.append(from_producer(0), leader_epoch=0)

    lab.run(main)


@pytest.mark.source("a:T-17")
@pytest.mark.parametrize("is_clean", [True, False])
def test_a_leader_that_returns_knows_its_producers_from_snapshot_and_log(lab: Lab, *, is_clean: bool) -> None:
    async def before(node: SimNode) -> None:
        log = await open_log(node)
        for sequence in range(30):
            log.append(from_producer(sequence), leader_epoch=0)
            if sequence == 20:
                await log.checkpoint()
        await log.wait_durable(Offset(29))
        if is_clean:
            await log.close()

    async def after(node: SimNode) -> None:
        log = await open_log(node)
        again = log.append(from_producer(29), leader_epoch=1)
        assert (again.duplicate, again.base_offset) == (True, 29)
        assert log.append(from_producer(30), leader_epoch=1).base_offset == 30

    lab.run(before)
    lab.crash()
    lab.run(after)
