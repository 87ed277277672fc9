"""A log that was closed cleanly, and whose directory or stored state is not what it left."""

from dataclasses import replace

import pytest
from crc32c import crc32c
from support.logs.single_log import PAGE_CACHE, PREFIX, Lab, batch, fill, open_log, read_all, segment

from tidelog.log import stored_state as stored
from tidelog.model.ids import Offset
from tidelog.world.simulated import Loss, SimNode

RECORDS = 40


def closed(lab: Lab) -> tuple[list[bytes], list[int]]:
    """A log of several segments that was closed: its batches, and the base offsets of its sealed segments."""

    async def write(node: SimNode) -> tuple[list[bytes], list[int]]:
        log = await open_log(node)
        expected = fill(log, RECORDS)
        await log.close()
        return expected, [info.base_offset for info in log.sealed_segments()]

    written: tuple[list[bytes], list[int]] = lab.run(write)
    assert len(written[1]) >= 3
    return written


def check_damaged(lab: Lab, expected: list[bytes], good_end: int) -> None:
    async def check(node: SimNode) -> None:
        log = await open_log(node)
        assert not log.report.clean
        assert log.damaged is not None
        assert log.damaged.good_end == good_end
        assert await read_all(log) == expected[log.start_offset : good_end]

    lab.kill()
    lab.run(check)


def test_a_sealed_segment_that_is_removed_after_a_clean_stop_damages_the_log(lab: Lab) -> None:
    expected, bases = closed(lab)

    async def remove(node: SimNode) -> None:
        node.disk().remove(segment(bases[1]))

    lab.again(remove)
    check_damaged(lab, expected, bases[1])


def test_a_first_segment_that_is_removed_with_its_record_after_a_clean_stop_damages_the_log(lab: Lab) -> None:
    """The segments that are left agree with the records that are left: only the start offset shows the loss."""
    expected, _ = closed(lab)

    async def remove(node: SimNode) -> None:
        node.disk().remove(segment(0))
        await node.store().commit({stored.segment_key(PREFIX, 0): None})

    lab.again(remove)
    check_damaged(lab, expected, 0)


def test_a_gap_between_segments_damages_the_log_where_it_begins(lab: Lab) -> None:
    """A segment has lost its last batch, and its record agrees with that."""
    expected, bases = closed(lab)
    end = bases[1] - 1
    name = segment(0)

    async def shorten(node: SimNode) -> None:
        store, key = node.store(), stored.segment_key(PREFIX, 0)
        info = stored.decode_segment(store.get(key) or b"")
        data = b"".join(expected[:end])
        shorter = replace(info, next_offset=Offset(end), size=len(data), crc=crc32c(data))
        await store.commit({key: stored.encode_segment(shorter)})

    lab.again(shorten)
    lab.machine.disk().cut(name, len(b"".join(expected[:end])))
    check_damaged(lab, expected, end)


def test_a_log_that_turns_to_page_cache_says_so_before_it_acknowledges_unsynced_records(lab: Lab) -> None:
    async def turn(node: SimNode) -> None:
        log = await open_log(node)
        assert not log.is_page_cache
        await log.configure(PAGE_CACHE)
        assert log.is_page_cache

    async def check(node: SimNode) -> None:
        assert (await open_log(node)).is_page_cache

    lab.run(turn)
    lab.crash(Loss.ALL)
    lab.run(check)


@pytest.mark.parametrize("ends", [7, 9])
def test_a_truncation_of_the_batch_that_spans_the_start_empties_the_log(lab: Lab, ends: int) -> None:
    """Offsets 0 to 9 are one batch, and those below 5 are deleted: nothing readable is left."""

    async def truncate(node: SimNode) -> None:
        log = await open_log(node)
        log.append(batch(10), leader_epoch=0)
        await log.flush()
        await log.advance_start(Offset(5))
        await log.truncate(ends)
        log.validate()
        assert (log.start_offset, log.end_offset, log.durable_end) == (5, 5, 5)
        fill(log, 2)
        await log.flush()

    async def check(node: SimNode) -> None:
        log = await open_log(node)
        assert log.damaged is None
        assert (log.start_offset, log.end_offset) == (5, 7)

    lab.run(truncate)
    lab.crash(Loss.ALL)
    lab.run(check)
