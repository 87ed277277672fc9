"""The pure parts of a consumer: fetch buffer, positions, tables of records, durations."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import UUID

import pytest

from tidelog.client.arrow import schema_of, table_of
from tidelog.client.consumer.errors import DeserializationError
from tidelog.client.consumer.fetch_buffer import FetchBuffer
from tidelog.client.consumer.fetched import Fetched
from tidelog.client.consumer.reconciler import topic_of
from tidelog.client.consumer.subscription_state import PartitionState, Position, SubscriptionState
from tidelog.client.durations import duration_ms, time_ms
from tidelog.client.record import ConsumerRecord, OffsetAndMetadata, TopicPartition
from tidelog.log.batch import ControlKind, encode_columns, encode_control
from tidelog.model.errors import CorruptBatchError, InvalidRequestError
from tidelog.model.ids import PartitionId, TopicId

ID = TopicId(UUID(int=1))
P0, P1 = PartitionId(ID, 0), PartitionId(ID, 1)


def batch(first: int, count: int, **fields: Any) -> bytes:
    values: list[bytes | None] = [b"v%d" % (first + at) for at in range(count)]
    return encode_columns(
        [1_000 + first + at for at in range(count)], [None] * count, values, base_offset=first, leader_epoch=3, **fields
    )


def piece(*batches: bytes, place: PartitionId = P0, position: Position, end: int = 0, **more: Any) -> Fetched:
    at = position.fetch_offset
    position.fetch_offset = end
    generation = position.fetch_generation
    return Fetched(
        "t", place, b"".join(batches), at, end, end, end, 0, **more, position=position, fetch_generation=generation
    )


def test_fetch_buffer_returns_records_in_order_and_advances_the_positions() -> None:
    buffer, at0, at1 = FetchBuffer(), Position(3), Position(0)
    buffer.put(
        [piece(batch(0, 5), batch(5, 5), position=at0, end=10), piece(batch(0, 2), place=P1, position=at1, end=2)]
    )
    assert [record.offset for record in buffer.take(4)] == [3, 4, 5, 6]
    assert (at0.consumed, at0.processed, at1.consumed) == ((7, 3), (3, -1), (0, -1))
    buffer.acknowledge()
    assert at0.processed == (7, 3)
    assert [(record.partition, record.offset) for record in buffer.take(100)] == [
        (0, 7),
        (0, 8),
        (0, 9),
        (1, 0),
        (1, 1),
    ]
    assert (at0.consumed, at1.consumed) == ((10, 3), (2, 3))
    assert buffer.take(5) == []
    assert buffer.is_empty


def test_position_counts_the_record_in_iteration_as_consumed_and_not_as_processed() -> None:
    buffer, at = FetchBuffer(), Position(0)
    buffer.put([piece(batch(0, 5), position=at, end=5)])
    assert buffer.load()
    for record in buffer.rows:
        buffer.position.record = record
        if record.offset == 2:
            break
    assert (at.consumed, at.processed) == ((3, 3), (2, 3))
    buffer.acknowledge()
    assert at.processed == (3, 3)
    assert [record.offset for record in buffer.take(10)] == [3, 4]
    assert at.processed == (3, 3)


def test_fetch_buffer_returns_nothing_stale() -> None:
    buffer, at0, at1 = FetchBuffer(), Position(0), Position(0)
    buffer.put(
        [
            piece(batch(0, 5), position=at0, end=5),
            piece(batch(0, 2), place=P1, position=at1, end=2),
            piece(batch(5, 5), position=at0, end=10),
        ]
    )
    assert len(buffer.take(2)) == 2
    at0.drop_fetched()
    assert at0.fetch_offset == 2
    assert [(record.partition, record.offset) for record in buffer.take(10)] == [(1, 0), (1, 1)]
    assert at0.consumed == (2, 3)
    # Fetched again with records that the user received meanwhile: they are skipped.
    at0.fetch_offset = 0
    buffer.put([piece(batch(0, 5), position=at0, end=5)])
    assert [record.offset for record in buffer.take(10)] == [2, 3, 4]


def test_columns_and_records_can_be_mixed_and_nothing_is_returned_twice() -> None:
    buffer, at = FetchBuffer(), Position(0)
    buffer.put([piece(batch(0, 6), batch(6, 6), position=at, end=12)])
    assert [record.offset for record in buffer.take(2)] == [0, 1]
    ((topic, number, columns, start, end),) = buffer.take_columns(3)
    assert (topic, number, list(columns.offsets[start:end])) == ("t", 0, [2, 3, 4])
    assert at.consumed == (5, 3)
    assert [record.offset for record in buffer.take(2)] == [5, 6]
    (last,) = buffer.take_columns(100)
    assert list(last[2].offsets[last[3] : last[4]]) == [7, 8, 9, 10, 11]
    assert buffer.records == 12


@pytest.mark.requirement("a:E-38")
def test_read_committed_skips_aborted_transactions() -> None:
    mine = {"is_transactional": True, "producer_epoch": 0, "base_sequence": 0}
    end = {"coordinator_epoch": 0, "timestamp": 1, "producer_epoch": 0, "leader_epoch": 3}
    data = [
        batch(0, 2, producer_id=7, **mine),
        batch(2, 2, producer_id=8, **mine),
        batch(4, 1),
        encode_control(ControlKind.ABORT, producer_id=7, base_offset=5, **end),
        encode_control(ControlKind.COMMIT, producer_id=8, base_offset=6, **end),
        batch(7, 1, producer_id=7, **mine),
    ]
    buffer, at = FetchBuffer(), Position(0)
    buffer.put([piece(*data, position=at, end=8, aborted=((7, 0),))])
    assert [record.offset for record in buffer.take(100)] == [2, 3, 4, 7]
    assert not buffer.load()
    assert at.consumed == (8, 3)
    everything = FetchBuffer()
    everything.put([piece(*data, position=Position(0), end=8)])
    assert [record.offset for record in everything.take(100)] == [0, 1, 2, 3, 4, 7]


def test_fetch_buffer_raises_for_a_corrupt_batch_each_time_after_the_records_before_it() -> None:
    broken = bytearray(batch(5, 5))
    broken[-1] ^= 1
    buffer, at = FetchBuffer(), Position(0)
    buffer.put([piece(batch(0, 5), bytes(broken), position=at, end=10)])
    assert [record.offset for record in buffer.take(100)] == [0, 1, 2, 3, 4]
    for _ in range(2):
        with pytest.raises(CorruptBatchError, match="t-0, at or after offset 5"):
            buffer.take(100)
    assert at.consumed == (5, 3)
    at.drop_fetched()
    assert buffer.take(100) == []


@pytest.mark.requirement("a:E-16")
def test_a_key_that_cannot_be_deserialized_stops_the_partition_after_the_records_before_it() -> None:
    def key(_topic: str, data: bytes) -> int:
        return int(data)

    data = encode_columns([1] * 3, [b"1", b"x", b"3"], [b"a", b"b", b"c"])
    buffer, at = FetchBuffer(key=key), Position(0)
    buffer.put([piece(data, position=at, end=3)])
    assert [(record.key, record.value) for record in buffer.take(100)] == [(1, b"a")]
    with pytest.raises(DeserializationError, match="the key of t-0 at offset 1"):
        buffer.take(100)
    at.drop_fetched()
    buffer.put([piece(data, position=Position(2), end=3)])
    assert [record.key for record in buffer.take(100)] == [3]


@pytest.mark.requirement("a:E-50", "b:H-22")
def test_automatic_commits_take_processed_offsets_and_commits_of_the_user_consumed_ones() -> None:
    subscription, state = SubscriptionState(), PartitionState(topic_of("t", P0), P0)
    subscription.add(state)
    assert subscription.to_commit() == subscription.to_auto_commit() == {}
    state.seek(10)
    assert state.position is not None
    state.position.advance(15, 2)
    assert subscription.to_commit() == {P0: OffsetAndMetadata(15, "", 2)}
    assert subscription.to_auto_commit() == {P0: OffsetAndMetadata(10, "", -1)}
    state.position.acknowledge()
    assert subscription.to_auto_commit() == {P0: OffsetAndMetadata(15, "", 2)}
    subscription.note_commit({P0: OffsetAndMetadata(15), P1: OffsetAndMetadata(3)})  # the second is not assigned now
    assert subscription.to_auto_commit() == subscription.to_commit() == {}
    # The user processes the record at 17: 15 and 16 are processed.
    state.position.record = ConsumerRecord("t", 0, 17, 0, b"", b"", (), 2)
    assert subscription.to_auto_commit() == {P0: OffsetAndMetadata(17, "", 2)}
    # The user commits the record that it processes: no older automatic commit follows.
    subscription.note_commit(subscription.to_commit())
    assert subscription.to_auto_commit() == {}
    # A seek back: a late write of the former position changes nothing.
    former = state.position
    state.seek(4)
    former.advance(30, 2)
    assert subscription.to_commit() == {P0: OffsetAndMetadata(4)}
    assert [removed.name for removed in subscription.remove([P0, P1])] == [TopicPartition("t", 0)]
    assert subscription.named(TopicPartition("t", 0)) is None


def test_records_are_tuples_with_names() -> None:
    buffer = FetchBuffer()
    data = encode_columns(
        [5], [b"k"], [None], headers=[(("trace", b"1"), ("trace", None))], base_offset=9, leader_epoch=4
    )
    buffer.put([piece(data, position=Position(9), end=10)])
    (record,) = buffer.take(1)
    assert record == ConsumerRecord("t", 0, 9, 5, b"k", None, (("trace", b"1"), ("trace", None)), 4)
    assert isinstance(record, ConsumerRecord)
    assert record.topic_partition == TopicPartition("t", 0)
    assert str(record.topic_partition) == "t-0"


def test_a_table_has_all_columns_of_all_batches() -> None:
    pa = pytest.importorskip("pyarrow")
    with_headers = encode_columns(
        [7, 8], [None, b"k"], [b"a", None], headers=[(("h", b"1"), ("n", None)), ()], base_offset=3
    )
    untimed = encode_columns([-1], [b"z"], [b""], base_offset=5)
    buffer = FetchBuffer()
    buffer.put([piece(batch(0, 3), with_headers, untimed, position=Position(1), end=6)])
    table = table_of(buffer.take_columns(100))
    assert table.schema == schema_of()
    assert table["offset"].to_pylist() == [1, 2, 3, 4, 5]
    assert table["key"].to_pylist() == [None, None, None, b"k", b"z"]
    assert table["value"].to_pylist() == [b"v1", b"v2", b"a", None, b""]
    assert table["topic"].to_pylist() == ["t"] * 5
    assert table["partition"].to_pylist() == [0] * 5
    assert table["headers"].to_pylist() == [
        [], [], [{"name": "h", "value": b"1"}, {"name": "n", "value": None}], [], []
    ]  # fmt: skip
    assert table["timestamp"].cast(pa.int64()).to_pylist() == [1_001, 1_002, 7, 8, None]
    table.validate(full=True)
    assert table_of([]).num_rows == 0
    assert schema_of(["value", "offset"]).names == ["value", "offset"]
    with pytest.raises(InvalidRequestError, match="no column 'colour'"):
        schema_of(["colour"])


def test_spans_and_points_of_time_are_read_as_people_write_them() -> None:
    assert [duration_ms(text) for text in ("90s", "1h", "1h30m", "2d", "1w", "250ms", "1.5h")] == [
        90_000, 3_600_000, 5_400_000, 172_800_000, 604_800_000, 250, 5_400_000
    ]  # fmt: skip
    assert duration_ms("PT1H") == duration_ms("by_duration:PT1H") == duration_ms("by_duration:1h") == 3_600_000
    assert duration_ms("P1DT2M3.5S") == 86_400_000 + 123_500
    assert [duration_ms(text) for text in ("", "h", "P", "PT", "1 hour", "-1h", "yesterday")] == [None] * 7
    assert time_ms("1h", 10_000_000) == 6_400_000
    assert time_ms(timedelta(seconds=1), 5_000) == 4_000
    assert time_ms(123, 5_000) == 123
    assert time_ms(datetime(1970, 1, 1, 0, 0, 2, tzinfo=UTC), 5_000) == 2_000
    assert time_ms(datetime(1970, 1, 1, 0, 0, 2), 5_000) == 2_000  # noqa: DTZ001 - without a zone it is UTC
    assert time_ms("1970-01-01T00:00:03+00:00", 5_000) == 3_000
    with pytest.raises(ValueError, match="'soon' is not a time"):
        time_ms("soon", 0)
    with pytest.raises(ValueError, match="not a time"):
        time_ms(None, 0)  # type: ignore[arg-type]


def test_interceptors_receive_each_batch_first_and_may_drop_records() -> None:
    seen: list[int] = []

    def count(records: list[ConsumerRecord]) -> list[ConsumerRecord]:
        seen.append(len(records))
        return records

    def even(records: list[ConsumerRecord]) -> list[ConsumerRecord]:
        return [record for record in records if not record.offset % 2]

    def broken(records: list[ConsumerRecord]) -> list[ConsumerRecord]:
        raise RuntimeError("an interceptor")

    buffer = FetchBuffer(interceptors=[count, broken, even])
    at = Position(0)
    buffer.put([piece(batch(0, 5), batch(5, 1), position=at, end=6)])
    assert [record.offset for record in buffer.take(100)] == [0, 2, 4]
    assert seen == [5, 1]
    assert at.consumed == (6, 3)


def test_fetch_buffer_checks_crcs_unless_check_crcs_is_off() -> None:
    data = bytearray(batch(0, 2))
    data[-2] ^= 1  # a byte of the last value
    careless = FetchBuffer(checks=False)
    careless.put([piece(bytes(data), position=Position(0), end=2)])
    assert len(careless.take(10)) == 2
    careful = FetchBuffer()
    careful.put([piece(bytes(data), position=Position(0), end=2)])
    with pytest.raises(CorruptBatchError):
        careful.take(10)
