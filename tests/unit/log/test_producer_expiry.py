"""A log dates a producer by the time of its append, however old its records are, after every kind of recovery."""

from dataclasses import replace

import pytest
from support.logs.single_log import SMALL, Lab, idempotent, open_log

from tidelog.log import stored_state as stored
from tidelog.log.log import Log
from tidelog.world.simulated import SimNode

DAY_MS = 86_400_000
CONFIG = replace(SMALL, producer_expiry_ms=DAY_MS)


def append_old(log: Log, first: int, count: int) -> None:
    """Records of a back-fill: two days old when they are appended."""
    for sequence in range(first, first + count):
        data = idempotent(sequence, timestamp=log.clock.now_ms() - 2 * DAY_MS, value=b"v" * 200)
        log.append(data, leader_epoch=1)


def check_that_a_repeat_is_found(log: Log, sequence: int) -> None:
    assert log.expire_producers() == 0, "it wrote just now"
    data = idempotent(sequence, timestamp=0, value=b"v" * 200)
    assert log.append(data, leader_epoch=1).duplicate


def test_recovered_producer_is_dated_by_the_recovery_not_by_its_records(lab: Lab) -> None:
    async def write(node: SimNode) -> None:
        log = await open_log(node, CONFIG)
        append_old(log, 0, 5)
        await log.flush()

    async def repeat(node: SimNode) -> None:
        check_that_a_repeat_is_found(await open_log(node, CONFIG), 4)

    lab.run(write)
    lab.crash()
    lab.run(repeat)


def test_producer_whose_snapshot_is_lost_is_dated_by_the_recovery(lab: Lab) -> None:
    async def write(node: SimNode) -> None:
        log = await open_log(node, CONFIG)
        append_old(log, 0, 5)
        await log.close()
        snapshots = log.store.keys(log.prefix + stored.PRODUCERS)
        assert snapshots
        await log.store.commit(dict.fromkeys(snapshots))

    async def repeat(node: SimNode) -> None:
        log = await open_log(node, CONFIG)
        assert "producers" in log.report.rebuilt
        check_that_a_repeat_is_found(log, 4)

    lab.run(write)
    lab.kill()
    lab.run(repeat)


@pytest.mark.parametrize("has_snapshots", [True, False])
async def test_producer_that_a_truncation_reads_again_is_not_expired(node: SimNode, has_snapshots: bool) -> None:
    log = await open_log(node, replace(CONFIG, segment_bytes=1_000))
    append_old(log, 0, 10)
    await log.checkpoint()
    assert log.segments.sealed
    if not has_snapshots:
        await log.store.commit(dict.fromkeys(log.store.keys(log.prefix + stored.PRODUCERS)))
    await log.truncate(6)
    check_that_a_repeat_is_found(log, 5)


def test_recovered_producer_expires_after_its_time(lab: Lab) -> None:
    async def write(node: SimNode) -> None:
        log = await open_log(node, CONFIG)
        append_old(log, 0, 5)
        await log.flush()

    async def wait(node: SimNode) -> None:
        began_ms = node.clock.now_ms()
        log = await open_log(node, CONFIG)
        assert log.producers.expire(began_ms + DAY_MS - 1, DAY_MS) == []
        assert log.producers.expire(log.clock.now_ms() + DAY_MS, DAY_MS) == [7]

    lab.run(write)
    lab.crash()
    lab.run(wait)
