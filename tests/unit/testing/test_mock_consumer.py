from __future__ import annotations

from typing import Any

import pytest

import tidelog
from tidelog.client.consumer.errors import (
    CommitFailedError,
    ConsumerClosedError,
    DeserializationError,
    NoOffsetForPartitionError,
    SubscriptionError,
    WakeupError,
)
from tidelog.client.record import OffsetAndMetadata, TopicPartition
from tidelog.testing import MockConsumer

P0, P1 = TopicPartition("orders", 0), TopicPartition("orders", 1)


def consumer(**options: Any) -> MockConsumer:
    made = MockConsumer(**{"group": "billing", "auto_offset_reset": "earliest", **options})
    made.add_topic("orders", partitions=2)
    for number in range(3):
        made.add_record("orders", b"%d" % number, key=b"k", partition=number % 2, timestamp_ms=1_000 + number)
    return made


def test_scheduled_records_are_given_out_in_order_and_committed() -> None:
    with consumer(enable_auto_commit=False) as found:
        found.subscribe(["orders"])
        assert found.assignment() == set()
        records = found.poll()
        assert [(one.partition, one.offset, one.value) for one in records] == [(0, 0, b"0"), (0, 1, b"2"), (1, 0, b"1")]
        assert found.assignment() == {P0, P1}
        assert (found.position(P0), found.position(P1)) == (2, 1)
        assert found.committed(P0) == {P0: None}
        found.commit()
        assert found.committed(P0, P1) == {P0: OffsetAndMetadata(2), P1: OffsetAndMetadata(1)}
        assert found.poll() == []
    assert found.is_closed
    assert len(found.commits) == 1
    with pytest.raises(ConsumerClosedError):
        found.poll()


def test_iteration_ends_when_nothing_is_left() -> None:
    found = consumer()
    found.subscribe("orders")
    assert [record.value for record in found] == [b"0", b"2", b"1"]
    found.add_record("orders", b"3")
    assert [record.value for record in found] == [b"3"]


def test_auto_commit_takes_what_the_program_has_come_back_for() -> None:
    found = consumer()
    found.subscribe("orders")
    found.poll(max_records=1)
    assert found.commits == []
    found.poll(max_records=1)
    assert found.commits[-1][P0].offset == 1
    found.close()
    assert found.commits[-1][P0].offset == 2


def test_an_error_in_a_with_block_commits_nothing_that_was_in_hand() -> None:
    found = consumer()

    def program() -> None:
        with found:
            found.subscribe("orders")
            found.poll()
            raise KeyError

    with pytest.raises(KeyError):
        program()
    assert found.commits == []


def test_errors_and_wakeups_come_when_they_are_scheduled() -> None:
    found = consumer(enable_auto_commit=False)
    found.assign([P0])
    found.on_next_poll(found.wakeup)
    with pytest.raises(WakeupError):
        found.poll()
    found.fail_next_poll(tidelog.TidelogError("broken"))
    with pytest.raises(tidelog.TidelogError, match="broken"):
        found.poll()
    assert len(found.poll()) == 2
    found.fail_next_commit(CommitFailedError("fenced"))
    with pytest.raises(CommitFailedError):
        found.commit()
    found.commit()
    assert found.commits == [{P0: OffsetAndMetadata(2)}]
    reported: list[Any] = []
    found.fail_next_commit(CommitFailedError("fenced"))
    found.commit_async({P0: 1}, on_commit=lambda error, offsets: reported.append((offsets, type(error))))
    assert reported == []
    found.poll()
    assert reported == [({P0: OffsetAndMetadata(1)}, CommitFailedError)]


def test_rebalances_call_back_in_the_next_poll() -> None:
    found = consumer(enable_auto_commit=False)
    found.auto_assign = False
    reported: list[tuple[str, list[TopicPartition]]] = []
    found.subscribe(
        ["orders"],
        on_assigned=lambda places: reported.append(("assigned", places)),
        on_revoked=lambda places: reported.append(("revoked", places)),
        on_lost=lambda places: reported.append(("lost", places)),
    )
    assert found.poll() == []
    found.rebalance([P0, P1])
    assert len(found.poll()) == 3
    found.rebalance([P1])
    found.poll()
    found.rebalance([P0], lost=True)
    found.poll()
    assert reported == [("assigned", [P0, P1]), ("revoked", [P0]), ("assigned", []), ("lost", [P1]), ("assigned", [P0])]
    with pytest.raises(SubscriptionError):
        found.position(P1)


def test_new_topics_of_a_pattern_are_taken_in() -> None:
    found = consumer()
    found.subscribe(pattern="ord.*")
    assert len(found.poll()) == 3
    found.add_record("order-lines", b"new")
    assert [one.topic for one in found.poll()] == ["order-lines"]
    assert found.subscription() == ("order-lines", "orders")


def test_positions_pauses_and_look_ups() -> None:
    found = consumer(enable_auto_commit=False)
    found.assign([P0, P1])
    found.pause(P1)
    assert {one.partition for one in found.poll()} == {0}
    found.resume(P1)
    found.seek(P0, 1)
    assert [(one.partition, one.offset) for one in found.poll()] == [(0, 1), (1, 0)]
    found.seek_to_beginning(P0)
    found.seek_to_end(P1)
    assert (found.position(P0), found.position(P1)) == (0, 1)
    found.seek_to_time(1_002)
    assert (found.position(P0), found.position(P1)) == (1, 1)
    assert found.end_offsets(P0) == {P0: 2}
    assert found.beginning_offsets(P0) == {P0: 0}
    assert found.offsets_for_times({P0: 1_001, P1: 9_999}) == {P0: (1, 1_002), P1: None}
    assert found.partitions_for("orders") == [P0, P1]
    with pytest.raises(SubscriptionError):
        found.subscribe("orders")


def test_offset_resets_are_those_of_the_options() -> None:
    latest = consumer(auto_offset_reset="latest")
    latest.subscribe("orders")
    assert latest.poll() == []
    latest.add_record("orders", b"new")
    assert [one.value for one in latest.poll()] == [b"new"]
    strict = consumer(auto_offset_reset="none")
    strict.subscribe("orders")
    with pytest.raises(NoOffsetForPartitionError):
        strict.poll()
    trimmed = consumer()
    trimmed.assign([P0])
    trimmed.seek(P0, 0)
    trimmed.delete_records(P0, 1)
    assert [one.offset for one in trimmed.poll()] == [1]


def test_a_record_that_cannot_be_deserialized_stays_until_it_is_passed_over() -> None:
    found = MockConsumer(group="g", auto_offset_reset="earliest", value_deserializer=tidelog.serializers.json)
    found.add_record("orders", b"1")
    found.add_record("orders", b"{")
    found.subscribe("orders")
    assert [one.value for one in found.poll()] == [1]
    for _ in range(2):
        with pytest.raises(DeserializationError) as failure:
            found.poll()
    found.seek(failure.value.partition, failure.value.offset + 1)
    assert found.poll() == []


def test_records_come_as_a_table_too() -> None:
    pytest.importorskip("pyarrow")
    found = consumer()
    found.subscribe("orders")
    table = found.poll_arrow()
    assert table.column("value").to_pylist() == [b"0", b"2", b"1"]
    assert table.column("offset").to_pylist() == [0, 1, 0]
