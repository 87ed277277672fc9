"""The source without Spark: what its driver decides and its tasks read, against a cluster in this process."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from typing import Any

import pyarrow as pa
import pytest
from support.clusters.waiting import until

import tidelog
from tidelog.client.errors import OptionError
from tidelog.spark.batch_plan import plan_batch
from tidelog.spark.driver import Driver
from tidelog.spark.errors import (
    DataLossError,
    ExpiredRangeError,
    TopicDeletedError,
    TopicRecreatedError,
    TruncationError,
)
from tidelog.spark.offsets import Mark, ReadRange, SourceOffset, TopicMarks, ranges_between, read_document
from tidelog.spark.options import SourceOptions, source_options
from tidelog.spark.pushdown import Narrowing
from tidelog.spark.reading import read_ranges
from tidelog.testing import MemoryCluster

SCHEMA = pa.schema([("topic", pa.string()), ("partition", pa.int32()), ("offset", pa.int64()), ("value", pa.binary())])
NOW_MS = 1_700_000_000_000


@pytest.fixture(scope="module")
def memory() -> Iterator[MemoryCluster]:
    with MemoryCluster(seed=11) as cluster:
        yield cluster


@pytest.fixture
def admin(memory: MemoryCluster) -> Iterator[tidelog.Admin]:
    with tidelog.Admin(memory.bootstrap) as made:
        yield made


@pytest.fixture
def send(memory: MemoryCluster) -> Iterator[Any]:
    with tidelog.Producer(memory.bootstrap) as producer:

        def values(topic: str, numbers: range, *, partition: int = 0, size: int = 0) -> None:
            rows = [str(number).encode().ljust(size, b".") for number in numbers]
            producer.send_many(topic, values=rows, partition=partition).result(30)

        yield values


class Query:
    """What Spark does with a source, by hand. Documents pass through JSON, as in a checkpoint."""

    def __init__(self, memory: MemoryCluster, start: SourceOffset | None = None, /, **options: Any) -> None:
        self.options = options_of(memory, True, options)
        self.driver = Driver(self.options)
        self.start = start

    def __enter__(self) -> Query:
        return self

    def __exit__(self, *_: object) -> None:
        self.driver.close()

    def step(self, *, is_unlimited: bool = False) -> list[tuple[str, int, int, str]] | None:
        """The rows of the next batch; None if there is none."""
        if self.start is None:
            self.start = self.driver.initial()
        self.driver.report(self.start)
        end = self.driver.next_offset(self.start, is_unlimited=is_unlimited)
        if end is None:
            return None
        start, self.start = self.start, read_document(json.loads(json.dumps(end.document())))
        return self.read(start, self.start)

    def read(self, start: SourceOffset, end: SourceOffset) -> list[tuple[str, int, int, str]]:
        rows = []
        for task in self.driver.tasks(start, end):
            for batch in read_ranges(self.driver.client, self.options, task, SCHEMA):
                assert batch.schema == SCHEMA
                rows += [
                    (*row[:3], row[3].rstrip(b".").decode())
                    for row in zip(*(c.to_pylist() for c in batch), strict=True)
                ]
        return rows

    def until_rows(self, count: int) -> list[tuple[str, int, int, str]]:
        """Steps until so many rows have come."""
        rows: list[tuple[str, int, int, str]] = []

        def there() -> bool:
            rows.extend(self.step() or [])
            return len(rows) >= count

        until(there, f"{count} rows")
        return rows


def options_of(memory: MemoryCluster, is_streaming: bool, options: dict[str, str]) -> SourceOptions:
    given = {"bootstrap.servers": memory.bootstrap} | {key.replace("__", "."): one for key, one in options.items()}
    return source_options(given, is_streaming=is_streaming, now_ms=NOW_MS)


def names_of(admin: tidelog.Admin) -> list[str]:
    return [one.name for one in admin.list_topics()]


def committed(admin: tidelog.Admin, group: str) -> list[int]:
    return [one.committed.offset for one in admin.group_offsets(group).values()]


def numbers(rows: list[tuple[str, int, int, str]] | None) -> list[int]:
    assert rows is not None
    return sorted(int(value) for *_, value in rows)


def test_batches_follow_one_another_without_gap_or_repeat(memory: MemoryCluster, admin: Any, send: Any) -> None:
    admin.create_topic("follow", partitions=2)
    send("follow", range(5))
    with Query(memory, subscribe="follow", startingOffsets="earliest") as query:
        assert numbers(query.step()) == list(range(5))
        assert query.step() is None
        send("follow", range(5, 9), partition=1)
        assert numbers(query.until_rows(4)) == [5, 6, 7, 8]
        assert query.step() is None


def test_a_query_that_begins_at_the_end_does_not_move_when_it_is_started_again(
    memory: MemoryCluster, admin: Any, send: Any
) -> None:
    admin.create_topic("latest", partitions=1)
    send("latest", range(100))
    with Query(memory, subscribe="latest") as query:
        assert query.step() == []  # an empty batch, so that the beginning is in the checkpoint
        first = query.start
    assert first is not None
    send("latest", range(100, 107))
    with Query(memory, subscribe="latest") as again:
        later = again.driver.initial()
        assert later.mark("latest", 0) == Mark(107, 0)
        assert again.read(later, first) == []  # the first batch once more: it begins where it did
        again.start = first
        assert numbers(again.until_rows(7)) == list(range(100, 107))


def test_a_batch_is_bounded_by_offsets_and_shared_by_backlog(memory: MemoryCluster, admin: Any, send: Any) -> None:
    admin.create_topic("bounded", partitions=2)
    send("bounded", range(30))
    send("bounded", range(30, 40), partition=1)
    with Query(memory, subscribe="bounded", startingOffsets="earliest", maxOffsetsPerTrigger="20") as query:
        first = query.step()
        assert first is not None
        assert [sum(row[1] == number for row in first) for number in (0, 1)] == [15, 5]
        assert numbers(first + (query.step() or [])) == list(range(40))
        assert query.step() is None


def test_a_batch_is_bounded_by_bytes(memory: MemoryCluster, admin: Any, send: Any) -> None:
    admin.create_topic("bytes", partitions=1)
    for part in range(20):
        send("bytes", range(100 * part, 100 * part + 100), size=1000)
    with Query(memory, subscribe="bytes", startingOffsets="earliest", maxBytesPerTrigger="500k") as query:
        counts = [len(query.step() or []) for _ in range(3)]
        assert all(250 <= count <= 750 for count in counts), counts
        assert len(query.step(is_unlimited=True) or []) == 2000 - sum(counts)


def test_a_batch_waits_for_enough_records_or_long_enough(memory: MemoryCluster, admin: Any, send: Any) -> None:
    admin.create_topic("enough", partitions=1)
    options = {"subscribe": "enough", "startingOffsets": "earliest"}
    with Query(memory, **options, minOffsetsPerTrigger="10", maxTriggerDelay="1h") as query:
        assert query.step() == []
        send("enough", range(9))
        until(lambda: query.driver._available(query.start) == 9, "the watch tells of nine")  # type: ignore[arg-type]
        assert query.step() is None
        send("enough", range(9, 10))
        assert numbers(query.until_rows(10)) == list(range(10))
    with Query(memory, query.start, **options, minOffsetsPerTrigger="10", maxTriggerDelay="300ms") as query:
        send("enough", range(10, 11))
        assert numbers(query.until_rows(1)) == [10]


def test_a_frozen_run_ends_at_what_was_there_when_it_began(memory: MemoryCluster, admin: Any, send: Any) -> None:
    admin.create_topic("frozen", partitions=1)
    send("frozen", range(10))
    with Query(memory, subscribe="frozen", startingOffsets="earliest", maxOffsetsPerTrigger="6") as query:
        query.driver.freeze()
        send("frozen", range(10, 20))
        assert numbers(query.step()) == list(range(6))
        assert numbers(query.step()) == list(range(6, 10))
        assert query.step() is None
    with Query(memory, query.start, subscribe="frozen") as query:
        query.driver.freeze()
        assert numbers(query.step()) == list(range(10, 20))
        assert query.step() is None


def test_new_partitions_and_topics_are_read_from_their_beginning(memory: MemoryCluster, admin: Any, send: Any) -> None:
    admin.create_topic("grow-1", partitions=1)
    with Query(memory, subscribePattern="grow-.*", metadata__max__age__ms="200") as query:
        assert query.step() == []
        admin.add_partitions({"grow-1": 2})
        admin.create_topic("grow-2", partitions=1)
        admin.create_topic("other-grow-3", partitions=1)
        until(lambda: len(admin.describe_topic("grow-1").partitions) == 2, "two partitions")
        send("grow-1", range(3), partition=1)
        send("grow-2", range(3, 6))
        send("other-grow-3", range(6, 9))
        assert numbers(query.until_rows(6)) == list(range(6))


def test_an_idle_query_asks_the_brokers_nothing(memory: MemoryCluster, admin: Any, send: Any) -> None:
    admin.create_topic("idle", partitions=4)
    send("idle", range(3))
    with Query(memory, subscribe="idle", startingOffsets="earliest", groupId="idlers") as query:
        assert numbers(query.step()) == [0, 1, 2]
        assert query.step() is None
        connections = query.driver.client.cluster.connections
        calls: list[str] = []
        plain_call, plain_open = connections.call, connections.open

        async def call(address: str, method: Any, *more: Any, **named: Any) -> Any:
            calls.append(method.name)
            return await plain_call(address, method, *more, **named)

        async def opened(address: str, method: Any, *more: Any, **named: Any) -> Any:
            calls.append(method.name)
            return await plain_open(address, method, *more, **named)

        connections.call, connections.open = call, opened  # type: ignore[method-assign]
        for _ in range(500):
            assert query.step() is None
        assert [name for name in calls if name != "CommitOffsets"] == []
        connections.call, connections.open = plain_call, plain_open  # type: ignore[method-assign]


def test_progress_is_the_groups_offsets(memory: MemoryCluster, admin: Any, send: Any) -> None:
    admin.create_topic("lagging", partitions=1)
    send("lagging", range(10))
    with Query(
        memory, subscribe="lagging", startingOffsets="earliest", groupId="laggards", maxOffsetsPerTrigger="6"
    ) as query:
        query.driver.freeze()
        query.step()
        query.step()
        assert all(offset <= 6 for offset in committed(admin, "laggards"))
        assert query.step() is None  # this tells that the second batch is done, and waits for it
        assert committed(admin, "laggards") == [10]


@pytest.mark.requirement("a:H-20", "b:J-08", "a:X3-39")
def test_a_query_of_committed_records_skips_aborted_ones_and_ends_before_an_open_transaction(
    memory: MemoryCluster, admin: Any, send: Any
) -> None:
    admin.create_topic("open", partitions=1)
    committed = {"subscribe": "open", "startingOffsets": "earliest", "isolation__level": "read_committed"}
    with (
        tidelog.Producer(memory.bootstrap, transactional_id="open") as producer,
        Query(memory, **committed) as query,
        Query(memory, subscribe="open", startingOffsets="earliest") as every,
    ):
        for number in range(6):
            with contextlib.suppress(KeyError), producer.transaction():
                producer.send("open", str(number)).result(30)
                if number % 2:
                    raise KeyError
        producer.begin_transaction()
        producer.send("open", "6").result(30)
        send("open", range(7, 9))
        assert numbers(query.until_rows(3)) == [0, 2, 4]
        assert query.step() is None, "a transaction is open"
        assert numbers(every.until_rows(9)) == list(range(9))
        producer.commit_transaction()
        assert numbers(query.until_rows(3)) == [6, 7, 8]
        query.driver.freeze()
        assert query.step() is None
    # Of a batch: each marker has an offset, too.
    assert TestBatchReads().rows(memory, **committed) == [(0, offset) for offset in (0, 4, 8, 12, 13, 14)]


class TestLosses:
    def at(self, memory: MemoryCluster, topic: str) -> SourceOffset:
        with Query(memory, subscribe=topic, startingOffsets="earliest") as query:
            query.step()
            assert query.start is not None
            return query.start

    def test_a_topic_created_again_is_an_error_or_passed_over(
        self, memory: MemoryCluster, admin: Any, send: Any
    ) -> None:
        admin.create_topic("recreated", partitions=1)
        send("recreated", range(3))
        start = self.at(memory, "recreated")
        admin.delete_topic("recreated")
        until(lambda: "recreated" not in names_of(admin), "it is gone")
        with Query(memory, start, subscribe="recreated") as query, pytest.raises(TopicDeletedError):
            query.step()
        admin.create_topic("recreated", partitions=1)
        with tidelog.Producer(memory.bootstrap) as producer:  # one that does not know the old topic
            producer.send_many("recreated", values=[str(number) for number in range(50, 60)]).result(30)
        with Query(memory, start, subscribe="recreated") as query, pytest.raises(TopicRecreatedError):
            query.step()
        with Query(memory, start, subscribe="recreated", failOnDataLoss="false") as query:
            assert numbers(query.until_rows(10)) == list(range(50, 60))

    def test_an_expired_range(self, memory: MemoryCluster, admin: Any, send: Any) -> None:
        admin.create_topic("expired", partitions=1)
        send("expired", range(10))
        start = self.at(memory, "expired")
        send("expired", range(10, 20))
        send("expired", range(20, 30))
        admin.delete_records({("expired", 0): 20})
        with Query(memory, start, subscribe="expired") as query:
            with pytest.raises(ExpiredRangeError) as error:
                query.step()
            assert "offsets 10 to 19" in str(error.value)
        with Query(memory, start, subscribe="expired", failOnDataLoss="false") as query:
            assert numbers(query.until_rows(10)) == list(range(20, 30))

    def test_retention_overtakes_a_task(self, memory: MemoryCluster, admin: Any, send: Any) -> None:
        admin.create_topic("overtaken", partitions=1)
        send("overtaken", range(10))
        send("overtaken", range(10, 20))
        for choice in ("true", "false"):
            with Query(memory, subscribe="overtaken", startingOffsets="earliest", failOnDataLoss=choice) as query:
                start = query.driver.initial()
                end = query.driver.next_offset(start, is_unlimited=True)
                assert end is not None
                (one,) = ranges_between(start, end)
                if choice == "true":
                    admin.delete_records({("overtaken", 0): 10})
                planned = [ReadRange(one.topic, one.topic_id, 0, 0, 20, one.epoch)]
                read = read_ranges(query.driver.client, query.options, planned, SCHEMA)
                if choice == "true":
                    with pytest.raises(ExpiredRangeError):
                        list(read)
                else:
                    assert [number for batch in read for number in batch["offset"].to_pylist()] == list(range(10, 20))

    def test_a_record_of_a_later_epoch_than_the_driver_knew_has_replaced_another(
        self, memory: MemoryCluster, admin: Any, send: Any
    ) -> None:
        admin.create_topic("replaced", partitions=1)
        memory.wait_in_sync("replaced")
        killed = memory.kill_leader("replaced")
        send("replaced", range(5))
        memory.restart(killed)
        with Query(memory, subscribe="replaced", startingOffsets="earliest") as query:
            start = query.driver.initial()
            end = query.driver.next_offset(start, is_unlimited=True)
            assert end is not None
            (one,) = ranges_between(start, end)
            assert one.epoch > 0
            planned = [ReadRange(one.topic, one.topic_id, 0, 0, 5, 0)]
            with pytest.raises(TruncationError):
                list(read_ranges(query.driver.client, query.options, planned, SCHEMA))

    def test_a_mark_behind_the_end_of_its_epoch_was_truncated(
        self, memory: MemoryCluster, admin: Any, send: Any
    ) -> None:
        admin.create_topic("cut", partitions=1)
        send("cut", range(5))
        start = self.at(memory, "cut")
        rows = start.topics["cut"]
        beyond = SourceOffset({"cut": TopicMarks(rows.topic_id, {0: Mark(9, rows.marks[0].epoch)})})
        with Query(memory, beyond, subscribe="cut") as query:
            with pytest.raises(TruncationError) as error:
                query.step()
            assert (error.value.offset, error.value.diverges) == (9, 5)
        with Query(memory, beyond, subscribe="cut", failOnDataLoss="false") as query:
            assert query.step() == []
            send("cut", range(5, 7))
            assert numbers(query.until_rows(2)) == [5, 6]

    def test_a_range_past_the_end_of_the_log_does_not_wait_for_ever(
        self, memory: MemoryCluster, admin: Any, send: Any
    ) -> None:
        admin.create_topic("short", partitions=1)
        send("short", range(5))
        for choice in ("true", "false"):
            with Query(
                memory, subscribe="short", startingOffsets="earliest", failOnDataLoss=choice, brokerTimeoutMs="1000"
            ) as query:
                where = query.driver.initial().topics["short"]
                planned = [ReadRange("short", where.topic_id, 0, 0, 9, -1)]
                read = read_ranges(query.driver.client, query.options, planned, SCHEMA)
                if choice == "true":
                    with pytest.raises(TruncationError):
                        list(read)
                else:
                    assert [number for batch in read for number in batch["offset"].to_pylist()] == list(range(5))


def test_a_leader_that_dies_holds_up_a_batch_but_loses_nothing(memory: MemoryCluster, admin: Any, send: Any) -> None:
    admin.create_topic("dying", partitions=2)
    for part in range(10):
        send("dying", range(100 * part, 100 * part + 100), partition=part % 2, size=500)
    for partition in range(2):
        memory.wait_in_sync("dying", partition)
    with Query(
        memory, subscribe="dying", startingOffsets="earliest", client__max__partition__fetch__bytes="20000"
    ) as query:
        start = query.driver.initial()
        end = query.driver.next_offset(start, is_unlimited=True)
        assert end is not None
        (task,) = query.driver.tasks(start, end)
        found = []
        killed = 0
        for batch in read_ranges(query.driver.client, query.options, task, SCHEMA):
            found += batch["value"].to_pylist()
            if not killed:
                killed = memory.kill_leader("dying")
        memory.restart(killed)
        assert sorted(int(value.rstrip(b".")) for value in found) == list(range(1000))
        send("dying", range(1000, 1005))
        query.start = end
        assert numbers(query.until_rows(5)) == list(range(1000, 1005))


def test_the_driver_reports_how_long_a_partition_has_no_leader(memory: MemoryCluster, admin: Any, send: Any) -> None:
    admin.create_topic("alone", partitions=1, replication_factor=1)
    send("alone", range(3))
    with Query(memory, subscribe="alone", startingOffsets="earliest") as query:
        assert numbers(query.until_rows(3)) == [0, 1, 2]
        assert query.driver.failing_for() is None
        killed = memory.kill_leader("alone")
        try:
            failing = until(query.driver.failing_for, "the watch notices")
            assert failing is not None
            assert failing[0] >= 0
            assert failing[1].retriable
            assert query.step() is None
        finally:
            memory.restart(killed)
        until(lambda: query.step() is None and query.driver.failing_for() is None, "all is well again")
        send("alone", range(3, 5))
        assert numbers(query.until_rows(2)) == [3, 4]


def test_a_range_may_begin_and_end_within_a_batch_of_the_log(memory: MemoryCluster, admin: Any, send: Any) -> None:
    admin.create_topic("within", partitions=1)
    send("within", range(5))
    with Query(memory, subscribe="within", startingOffsets="earliest") as query:
        where = query.driver.initial().topics["within"]
        planned = [ReadRange("within", where.topic_id, 0, 2, 4, -1)]
        batches = list(read_ranges(query.driver.client, query.options, planned, SCHEMA))
        assert [number for batch in batches for number in batch["offset"].to_pylist()] == [2, 3]


class TestBatchReads:
    def rows(
        self, memory: MemoryCluster, narrowing: Narrowing | None = None, /, **options: Any
    ) -> list[tuple[int, int]]:
        wanted = options_of(memory, False, options)
        from tidelog.spark.client_cache import cached_client

        found = []
        for task in plan_batch(wanted, narrowing or Narrowing()):
            for batch in read_ranges(cached_client(wanted), wanted, task, SCHEMA):
                found += list(zip(batch["partition"].to_pylist(), batch["offset"].to_pylist(), strict=True))
        return sorted(found)

    @pytest.fixture
    def table(self, memory: MemoryCluster, admin: Any) -> str:
        if "table" not in names_of(admin):
            admin.create_topic("table", partitions=2)
            with tidelog.Producer(memory.bootstrap) as producer:
                for number in range(2):
                    times = [1_000_000 + 10 * one for one in range(10)]
                    producer.send_many("table", values=["x"] * 10, timestamps_ms=times, partition=number).result(30)
        return "table"

    @pytest.mark.parametrize(
        ("options", "wanted"),
        [
            ({}, [(0, 0, 10), (1, 0, 10)]),
            ({"startingOffsets": '{"table": {"0": 7}}'}, [(0, 7, 10), (1, 0, 10)]),
            ({"endingOffsets": '{"table": {"0": 3, "1": -1}}'}, [(0, 0, 3), (1, 0, 10)]),
            ({"startingOffsets": '{"table": {"0": -1, "1": -2}}'}, [(1, 0, 10)]),
            ({"startingTimestamp": "1000050", "endingTimestamp": "1000070"}, [(0, 5, 7), (1, 5, 7)]),
            ({"startingOffsetsByTimestamp": '{"table": {"1": 1000085}}'}, [(0, 0, 10), (1, 9, 10)]),
            ({"endingTimestamp": "9999999"}, [(0, 0, 10), (1, 0, 10)]),
            ({"startingTimestamp": "9999999", "startingOffsetsByTimestampStrategy": "latest"}, []),
            ({"minPartitions": "5"}, [(0, 0, 10), (1, 0, 10)]),
            ({"maxRecordsPerPartition": "3"}, [(0, 0, 10), (1, 0, 10)]),
            ({"isolation__level": "read_committed"}, [(0, 0, 10), (1, 0, 10)]),
        ],
    )
    def test_bounds(
        self, memory: MemoryCluster, table: str, options: dict[str, str], wanted: list[tuple[int, int, int]]
    ) -> None:
        found = self.rows(memory, subscribe=table, **options)
        assert found == [(number, offset) for number, start, end in wanted for offset in range(start, end)]

    def test_assigned_partitions_only(self, memory: MemoryCluster, table: str) -> None:
        assert self.rows(memory, assign='{"table": [1]}') == [(1, offset) for offset in range(10)]

    def test_filters_narrow_down_what_is_read(self, memory: MemoryCluster, table: str) -> None:
        narrowing = Narrowing(partitions=frozenset({1}), offset_to=8, since_ms=1_000_050)
        assert self.rows(memory, narrowing, subscribe=table) == [(1, 5), (1, 6), (1, 7)]

    @pytest.mark.parametrize(
        ("options", "words"),
        [
            ({"subscribe": "nowhere"}, ["subscribe", "there is no topic 'nowhere'"]),
            ({"assign": '{"table": [7]}'}, ["assign", "topic 'table' has 2 partitions; there is no partition 7"]),
            ({"subscribe": "table", "startingOffsets": '{"table": {"0": 99}}'}, ["startingOffsets=", "table-0 ends"]),
            ({"subscribe": "table", "startingOffsets": '{"other": {"0": 9}}'}, ["startingOffsets=", "other-0"]),
            (
                {"subscribe": "table", "startingTimestamp": "9999999"},
                ["startingTimestamp='9999999'", "startingOffsetsByTimestampStrategy='latest'"],
            ),
            (
                {
                    "subscribe": "table",
                    "startingOffsets": '{"table": {"0": 5}}',
                    "endingOffsets": '{"table": {"0": 3}}',
                },
                ["endingOffsets=", "table-0", "from offset 5 to 3"],
            ),
        ],
    )
    def test_bounds_that_cannot_be_meant_are_one_line(
        self, memory: MemoryCluster, table: str, options: dict[str, str], words: list[str]
    ) -> None:
        with pytest.raises(OptionError) as error:
            self.rows(memory, **options)
        text = str(error.value)
        assert "\n" not in text
        assert [word for word in words if word not in text] == []


def test_losses_are_one_kind_of_error() -> None:
    kinds = (ExpiredRangeError, TruncationError, TopicRecreatedError, TopicDeletedError)
    assert all(issubclass(kind, DataLossError) for kind in kinds)
