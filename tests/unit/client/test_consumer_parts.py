"""The pure parts of a consumer: what is in the user's hand, where he stands, tables of records, spans of time."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import UUID

import pytest

from tidelog.client.arrow import schema_of, table_of
from tidelog.client.consumer_errors import DeserializationError
from tidelog.client.durations import duration_ms, time_ms
from tidelog.client.fetched import Fetched
from tidelog.client.hand import Hand
from tidelog.client.lookups import topic_of
from tidelog.client.positions import Held, Positions
from tidelog.client.record import ConsumerRecord, OffsetAndMetadata, TopicPartition
from tidelog.client.user_side import Asked, drive
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


def piece(*batches: bytes, place: PartitionId = P0, position: int = 0, end: int = 0, **more: Any) -> Fetched:
    return Fetched("t", place, b"".join(batches), position, end, end, end, 0, **more)


def test_records_come_out_in_order_from_the_position_on_and_marks_tell_how_far() -> None:
    hand = Hand()
    hand.put([piece(batch(0, 5), batch(5, 5), position=3, end=10), piece(batch(0, 2), place=P1, end=2)])
    assert [record.offset for record in hand.take(4)] == [3, 4, 5, 6]
    assert hand.marks() == {P0: (7, 3)}
    assert [(record.partition, record.offset) for record in hand.take(100)] == [(0, 7), (0, 8), (0, 9), (1, 0), (1, 1)]
    assert hand.marks() == {P0: (10, 3), P1: (2, 3)}
    assert hand.take(5) == []
    assert hand.is_empty
    assert hand.marks() == {}


def test_iteration_can_be_left_and_taken_up_again_and_the_record_in_work_is_known() -> None:
    hand = Hand()
    hand.put([piece(batch(0, 5), end=5)])
    assert hand.load()
    hand.is_one_by_one = True
    for record in hand.rows:
        hand.last = record
        if record.offset == 2:
            break
    found = hand.in_work()
    assert found is not None
    assert found.offset == 2
    assert hand.marks() == {P0: (3, 3)}
    assert hand.in_work() is not None  # telling the marks changes nothing about it
    assert [record.offset for record in hand.take(10)] == [3, 4]
    assert hand.in_work() is None  # many at once: nobody knows which


def test_a_partition_that_is_dropped_gives_nothing_more() -> None:
    hand = Hand()
    hand.put([piece(batch(0, 5), end=5), piece(batch(0, 2), place=P1, end=2), piece(batch(5, 5), position=5, end=10)])
    assert len(hand.take(2)) == 2
    hand.drop({P0})
    assert hand.attention
    assert [(record.partition, record.offset) for record in hand.take(10)] == [(1, 0), (1, 1)]
    assert P0 not in hand.marks()


def test_columns_and_rows_can_be_mixed_and_nothing_is_given_twice() -> None:
    hand = Hand()
    hand.put([piece(batch(0, 6), batch(6, 6), end=12)])
    assert [record.offset for record in hand.take(2)] == [0, 1]
    ((topic, number, columns, start, end),) = hand.take_columns(3)
    assert (topic, number, list(columns.offsets[start:end])) == ("t", 0, [2, 3, 4])
    assert hand.marks() == {P0: (5, 3)}
    assert [record.offset for record in hand.take(2)] == [5, 6]
    (last,) = hand.take_columns(100)
    assert list(last[2].offsets[last[3] : last[4]]) == [7, 8, 9, 10, 11]
    assert hand.records == 12


@pytest.mark.source("a:E-38")
def test_committed_readers_see_nothing_of_an_aborted_transaction() -> None:
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
    hand = Hand()
    hand.put([piece(*data, end=8, aborted=((7, 0),))])
    assert [record.offset for record in hand.take(100)] == [2, 3, 4, 7]
    assert not hand.load()
    assert hand.marks() == {P0: (8, 3)}
    everything = Hand()
    everything.put([piece(*data, end=8)])
    assert [record.offset for record in everything.take(100)] == [0, 1, 2, 3, 4, 7]


def test_a_broken_batch_is_told_with_its_place_each_time_and_what_came_before_it_is_given() -> None:
    broken = bytearray(batch(5, 5))
    broken[-1] ^= 1
    hand = Hand()
    hand.put([piece(batch(0, 5), bytes(broken), end=10)])
    assert [record.offset for record in hand.take(100)] == [0, 1, 2, 3, 4]
    for _ in range(2):
        with pytest.raises(CorruptBatchError, match="t-0, at or after offset 5"):
            hand.take(100)
    assert hand.marks() == {P0: (5, 3)}
    hand.drop({P0})
    assert hand.take(100) == []


@pytest.mark.source("a:E-16")
def test_a_key_that_cannot_be_read_stops_there_and_the_values_before_it_are_given() -> None:
    def key(_topic: str, data: bytes) -> int:
        return int(data)

    data = encode_columns([1] * 3, [b"1", b"x", b"3"], [b"a", b"b", b"c"])
    hand = Hand(key=key)
    hand.put([piece(data, end=3)])
    assert [(record.key, record.value) for record in hand.take(100)] == [(1, b"a")]
    with pytest.raises(DeserializationError, match="the key of t-0 at offset 1"):
        hand.take(100)
    hand.drop({P0})
    hand.put([piece(data, position=2, end=3)])
    assert [record.key for record in hand.take(100)] == [3]


def held(partition: PartitionId = P0, offset: int = 10) -> Held:
    made = Held(topic_of("t", partition), partition)
    made.place(offset)
    return made


@pytest.mark.source("a:E-50", "b:H-22")
def test_automatic_commits_follow_what_is_processed_and_others_what_was_given_out() -> None:
    positions = Positions()
    positions.add(held())
    positions.note({P0: (15, 2), P1: (3, 0)})  # the second is not held: its mark came late
    assert positions.to_commit() == {P0: OffsetAndMetadata(15, "", 2)}
    assert positions.to_auto_commit() == {P0: OffsetAndMetadata(10, "", -1)}
    positions.came_back()
    assert positions.to_auto_commit() == {P0: OffsetAndMetadata(15, "", 2)}
    positions.committed({P0: OffsetAndMetadata(15)})
    assert positions.to_auto_commit() == positions.to_commit() == {}
    # At work on the record at 17: 15 and 16 are done.
    positions.done_up_to(positions.held[P0], 17, 2)
    assert positions.to_auto_commit() == {P0: OffsetAndMetadata(17, "", 2)}
    # Who commits the record in hand himself is not overtaken by an older automatic commit.
    positions.note({P0: (18, 2)})
    positions.committed(positions.to_commit())
    assert positions.to_auto_commit() == {}
    # Back by a seek: an older mark says nothing any more.
    positions.held[P0].place(4)
    assert positions.to_commit() == {P0: OffsetAndMetadata(4)}
    assert [one.name for one in positions.remove([P0, P1])] == [TopicPartition("t", 0)]
    assert positions.named(TopicPartition("t", 0)) is None


def test_records_are_tuples_with_names() -> None:
    hand = Hand()
    data = encode_columns(
        [5], [b"k"], [None], headers=[(("trace", b"1"), ("trace", None))], base_offset=9, leader_epoch=4
    )
    hand.put([piece(data, position=9, end=10)])
    (record,) = hand.take(1)
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
    hand = Hand()
    hand.put([piece(batch(0, 3), with_headers, untimed, position=1, end=6)])
    table = table_of(hand.take_columns(100))
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
    with pytest.raises(ValueError, match="'soon' is no time"):
        time_ms("soon", 0)
    with pytest.raises(ValueError, match="no time"):
        time_ms(None, 0)  # type: ignore[arg-type]


def test_coroutines_driven_by_hand_get_results_and_errors_and_clean_up() -> None:
    steps: list[str] = []

    async def job(text: str) -> str:
        return text

    async def work() -> str:
        steps.append(await Asked(job("one")))
        try:
            await Asked(job("bad"))
        except KeyboardInterrupt:
            steps.append("interrupted")
            steps.append(await Asked(job("after")))
        return "done"

    def run(waiting: Any) -> Any:
        try:
            waiting.send(None)
        except StopIteration as end:
            if end.value == "bad":
                raise KeyboardInterrupt from None
            return end.value

    assert drive(work(), run) == "done"
    assert steps == ["one", "interrupted", "after"]


def test_interceptors_see_each_batch_first_and_may_leave_records_out() -> None:
    seen: list[int] = []

    def count(records: list[ConsumerRecord]) -> list[ConsumerRecord]:
        seen.append(len(records))
        return records

    def even(records: list[ConsumerRecord]) -> list[ConsumerRecord]:
        return [record for record in records if not record.offset % 2]

    def broken(records: list[ConsumerRecord]) -> list[ConsumerRecord]:
        raise RuntimeError("an interceptor")

    hand = Hand(interceptors=[count, broken, even])
    hand.put([piece(batch(0, 5), batch(5, 1), end=6)])
    assert [record.offset for record in hand.take(100)] == [0, 2, 4]
    assert seen == [5, 1]
    assert hand.marks() == {P0: (6, 3)}


def test_a_crc_is_looked_at_unless_the_program_does_not_want_it() -> None:
    data = bytearray(batch(0, 2))
    data[-2] ^= 1  # a byte of the last value
    careless = Hand(checks=False)
    careless.put([piece(bytes(data), end=2)])
    assert len(careless.take(10)) == 2
    careful = Hand()
    careful.put([piece(bytes(data), end=2)])
    with pytest.raises(CorruptBatchError):
        careful.take(10)
