"""A log with very many producers: their state is bounded, and its checkpoint does not block the loop."""

from dataclasses import replace

import pytest
from support.logs.node_logs import Host, SimSite, create, log_id
from support.logs.single_log import batch

from tidelog.log import recovery_checkpoint
from tidelog.log.batch import read_header
from tidelog.log.config import LogConfig
from tidelog.log.log import AppendInfo, Log
from tidelog.log.producers import PRODUCERS_MAX, ProducerState
from tidelog.log.stored_state import MARK, decode_mark, key_prefix


def stored_point(host: Host, log: Log) -> int:
    data = host.places[0][1].get(key_prefix(log.log_id) + MARK)
    assert data is not None
    return decode_mark(data).offset


def append(log: Log, producer: int) -> AppendInfo:
    data = batch(value=bytes(1_000), producer_id=producer, producer_epoch=0, base_sequence=0)
    return log.append(data, leader_epoch=0)


def test_the_least_recently_active_producers_are_evicted_also_after_a_snapshot() -> None:
    state = ProducerState(producers_max=32)
    for number in (*range(31, -1, -1), 31):  # 31 is the oldest by id order, and the newest by offset
        fill_one(state, number, offset=len(state) if number != 31 or len(state) < 32 else 99)
    state.validate()
    again = ProducerState.from_snapshot(state.to_snapshot(), producers_max=32)
    for one in (state, again):
        fill_one(one, 77, offset=100)
        assert {row.producer_id for row in one.rows()} == {*range(29), 31, 77}
        one.validate()


def fill_one(state: ProducerState, producer: int, *, offset: int) -> None:
    header = read_header(batch(1, producer_id=producer, producer_epoch=0, base_sequence=0))
    state.apply(replace(header, base_offset=offset), now_ms=1)


def test_a_snapshot_over_the_limit_is_trimmed_with_the_next_producer() -> None:
    state = ProducerState(producers_max=100)
    for number in range(100):
        fill_one(state, number, offset=number)
    fewer = ProducerState.from_snapshot(state.to_snapshot(), producers_max=16)
    fill_one(fewer, 1_000, offset=1_000)
    assert len(fewer) == 17
    fill_one(fewer, 1_001, offset=1_001)
    assert len(fewer) <= 17
    assert PRODUCERS_MAX <= 10_000


def test_snapshot_rows_are_encoded_a_few_at_a_time_if_they_changed() -> None:
    state = ProducerState()
    for number in range(1_000):
        fill_one(state, number, offset=number)
    assert state.pack(400) == 600
    state.validate()
    assert state.pack(600) == 0
    before = state.to_snapshot()
    fill_one(state, 7, offset=5_000)
    assert state.pack(0) == 1
    after = state.to_snapshot()
    assert after != before
    assert ProducerState.from_snapshot(after).rows() == state.rows()
    state.validate()


def test_the_mark_of_many_producers_waits_for_enough_appends(sim: SimSite, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recovery_checkpoint, "PRODUCERS_FEW", 20)

    async def job(host: Host) -> None:
        logs = await host.open()
        log = await create(logs, 1, config=LogConfig())
        for producer in range(30):
            append(log, producer)
        await log.store_mark()
        point = stored_point(host, log)
        assert point == 30
        append(log, 30)
        await log.checkpoint()
        assert stored_point(host, log) == point, "one more is not worth a snapshot of 31"
        assert log.has_news
        for producer in range(31, 300):
            append(log, producer)
        await log.checkpoint()
        assert stored_point(host, log) == 300, "after as much was written as makes up for it"
        append(log, 300)
        await log.checkpoint()
        assert stored_point(host, log) == 300

    async def after(host: Host) -> None:
        logs = await host.open()
        log = await logs.wait_open(log_id(1))
        assert log is not None
        assert log.end_offset >= 300
        assert len(log.producers) == log.end_offset, "recovery reads what lies behind the mark"
        for producer in (0, 299):
            assert append(log, producer).duplicate

    sim.run(job)
    sim.lose_power()
    sim.run(after)
