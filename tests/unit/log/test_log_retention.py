"""Retention deletes old segments of the logs of a node, below the bound."""

from dataclasses import replace

import pytest
from support.logs.node_logs import Host, SimSite, log_id, pass_time, records_of, replicate_all, write
from support.logs.single_log import batch

from tidelog.log.batch import ControlKind, encode_control
from tidelog.log.config import LogConfig
from tidelog.log.log import Log
from tidelog.log.logs import Logs
from tidelog.log.retention import ExpiryReason
from tidelog.model.ids import Offset
from tidelog.world.simulated import SimWorld

HOUR_MS = 3_600_000
DELETE = LogConfig(segment_bytes=500, index_interval_bytes=100, retention_ms=HOUR_MS)


@pytest.fixture
def sim(world: SimWorld) -> SimSite:
    return SimSite(world, directories=1)


async def create(logs: Logs, topic: int = 1, config: LogConfig = DELETE) -> Log:
    return await logs.create(log_id(topic), label="t", config=config)


def names(host: Host, log: Log) -> list[str]:
    return host.places[0][0].list(log.path)


@pytest.mark.requirement("a:A-90", "a:A-62", "a:A-64")
async def test_expired_segments_are_dropped_and_their_files_removed_later(sim: SimSite, host: Host) -> None:
    logs = await host.open()
    log = await create(logs)
    await write(log, 40)
    segments = log.sealed_segments()
    assert len(segments) > 4
    replicate_all(logs)
    assert await logs.housekeeping.expire() == {}
    pass_time(sim, HOUR_MS + 1)
    await write(log, 1)
    expired = await logs.housekeeping.expire()
    assert [gone.base_offset for gone in expired[log_id(1)]] == [info.base_offset for info in segments]
    assert {gone.reason for gone in expired[log_id(1)]} == {ExpiryReason.TIME}
    assert log.start_offset == segments[-1].next_offset
    assert [record.offset for record in await records_of(log)] == list(range(log.start_offset, 41))
    assert sum(name.endswith(".deleted") for name in names(host, log)) >= 2 * len(segments)
    pass_time(sim, DELETE.file_delete_delay_ms)
    assert await logs.housekeeping.expire() == {}
    assert not [name for name in names(host, log) if name.endswith(".deleted")]
    assert log.sealed_segments() == []
    await logs.close()


async def test_an_idle_log_rolls_when_it_is_due_and_then_expires_too(sim: SimSite, host: Host) -> None:
    logs = await host.open()
    log = await create(logs, config=replace(DELETE, segment_ms=HOUR_MS))
    await write(log, 2)
    replicate_all(logs)
    pass_time(sim, HOUR_MS + 1)
    assert list(await logs.housekeeping.expire()) == [log_id(1)]
    assert log.start_offset == log.end_offset == 2
    assert await write(log) == 3
    await logs.close()


async def test_retention_stops_at_the_high_watermark_and_at_the_first_open_transaction(
    sim: SimSite, host: Host
) -> None:
    logs = await host.open()
    log, other = await create(logs), await create(logs, 2)
    await write(log, 40)
    await write(other, 12)
    await write(other, producer_id=4, producer_epoch=0, base_sequence=0, is_transactional=True)
    await write(other, 40)
    bound = log.sealed_segments()[2].next_offset - 1
    logs.note_high_watermark(log_id(1), Offset(bound))
    logs.note_high_watermark(log_id(2), other.end_offset)
    pass_time(sim, HOUR_MS + 1)
    await logs.housekeeping.expire()
    assert log.start_offset == log.sealed_segments()[0].base_offset <= bound
    assert log.sealed_segments()[0].next_offset == bound + 1
    assert 0 < other.start_offset <= 12
    # A bound that ignores the transaction is lowered by the log.
    logs.housekeeping._bound_of = lambda _: Offset(1 << 40)
    await logs.housekeeping.expire()
    assert other.start_offset <= 12
    assert log.start_offset == log.segments.active.base_offset
    await logs.close()


@pytest.mark.requirement("a:A-46")
async def test_retention_by_bytes_keeps_at_least_that_much(host: Host) -> None:
    logs = await host.open()
    log = await create(logs, config=replace(DELETE, retention_ms=-1, retention_bytes=1200))
    await write(log, 60)
    replicate_all(logs)
    expired = await logs.housekeeping.expire()
    assert {gone.reason for gone in expired[log_id(1)]} == {ExpiryReason.BYTES}
    assert 1200 <= log.size < 1200 + DELETE.segment_bytes
    await logs.close()


async def test_a_log_whose_retention_fails_delays_no_other(sim: SimSite, host: Host) -> None:
    logs = await host.open()
    for topic in (1, 2):
        await write(await create(logs, topic), 40)
    replicate_all(logs, 1, 2)
    pass_time(sim, HOUR_MS + 1)
    sim.machine.disk("disk-0").fail("rename")
    assert list(await logs.housekeeping.expire()) == [log_id(2)]


async def test_the_last_stable_offset_is_not_below_the_log_start_if_records_of_an_open_transaction_are_deleted(
    sim: SimSite, host: Host
) -> None:
    logs = await host.open()
    log = await create(logs)
    await write(log, 3)
    log.append(batch(producer_id=7, producer_epoch=0, base_sequence=0, is_transactional=True), leader_epoch=1)
    await write(log, 6)
    replicate_all(logs)
    assert log.last_stable_offset(log.end_offset) == 3
    await log.advance_start(8)
    assert log.last_stable_offset(log.end_offset) == 8, "a reader that begins at the end would be out of range"
    assert log.last_stable_offset(Offset(8)) == 8
    control = encode_control(ControlKind.COMMIT, coordinator_epoch=0, timestamp=1, producer_id=7, producer_epoch=1)
    log.append(control, leader_epoch=1, is_coordinator=True)
    assert log.last_stable_offset(log.end_offset) == log.end_offset
    await logs.close()
