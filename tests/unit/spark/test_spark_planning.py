"""Admission, tasks and filters of the Spark source."""

from datetime import UTC, datetime

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidelog.spark.admission import Limits, admitted, is_due, shares
from tidelog.spark.offsets import ReadRange
from tidelog.spark.pushdown import Narrowing
from tidelog.spark.ranges import plan_tasks


class TestAdmission:
    def test_a_limit_is_shared_by_backlog(self) -> None:
        assert admitted({"a": 300, "b": 100, "c": 0}, Limits(offsets_max=100)) == {"a": 75, "b": 25}

    def test_less_than_the_limit_is_taken_whole(self) -> None:
        assert admitted({"a": 3, "b": 1}, Limits(offsets_max=100)) == {"a": 3, "b": 1}

    @given(st.dictionaries(st.integers(0, 20), st.integers(0, 1000), min_size=1), st.integers(1, 500))
    def test_shares_add_up_and_none_is_more_than_there_is(self, backlog: dict[int, int], limit: int) -> None:
        found = shares(backlog, limit)
        assert sum(found.values()) == min(limit, sum(backlog.values()))
        assert all(0 <= found[place] <= count for place, count in backlog.items())

    @given(st.dictionaries(st.integers(0, 20), st.integers(0, 1000), min_size=1), st.integers(1, 500))
    def test_a_backlog_is_worked_off(self, backlog: dict[int, int], limit: int) -> None:
        limits = Limits(offsets_max=limit)
        batches = 0
        while any(backlog.values()):
            for place, count in admitted(backlog, limits).items():
                backlog[place] -= count
            batches += 1
            assert batches <= 21_000
        assert all(count == 0 for count in backlog.values())

    def test_bytes_bound_each_partition_by_its_own_density(self) -> None:
        limits = Limits(bytes_max=1000)
        assert admitted({"a": 100, "b": 10}, limits, {"a": 1000, "b": 1000}) == {"a": 50, "b": 5}

    def test_of_two_limits_the_smaller_counts(self) -> None:
        assert admitted({"a": 100}, Limits(offsets_max=10, bytes_max=500), {"a": 1000}) == {"a": 10}
        assert admitted({"a": 100}, Limits(offsets_max=90, bytes_max=500), {"a": 1000}) == {"a": 50}

    def test_a_record_over_the_limit_stops_nothing(self) -> None:
        assert admitted({"a": 1, "b": 3}, Limits(bytes_max=10), {"a": 1000, "b": 9000}) == {"b": 1}

    def test_a_batch_waits_for_the_least_but_not_for_ever(self) -> None:
        limits = Limits(offsets_min=10, delay_max_ms=1000)
        assert not is_due(limits, 9, waited_ms=999)
        assert is_due(limits, 10, waited_ms=0)
        assert is_due(limits, 1, waited_ms=1000)
        assert not is_due(limits, 0, waited_ms=5000)
        assert is_due(Limits(), 1, waited_ms=0)


def ranges(*counts: int) -> list[ReadRange]:
    return [ReadRange("t", "a" * 32, number, 10, 10 + count) for number, count in enumerate(counts)]


class TestTasks:
    def test_small_ranges_share_a_task(self) -> None:
        found = plan_tasks(ranges(*[1] * 64), {("t", n): 100 for n in range(64)}, target_bytes=1 << 20)
        assert len(found) == 1
        assert len(found[0]) == 64

    def test_a_large_range_is_split(self) -> None:
        found = plan_tasks(ranges(1000), {("t", 0): 10_000}, target_bytes=1000)
        assert [[(one.start, one.end) for one in task] for task in found] == [
            [(10 + 100 * n, 110 + 100 * n)] for n in range(10)
        ]

    def test_ranges_of_a_leader_stand_together(self) -> None:
        leaders = {("t", n): n % 2 for n in range(4)}
        found = plan_tasks(ranges(10, 10, 10, 10), {("t", n): 100 for n in range(4)}, leaders=leaders, target_bytes=200)
        assert [[one.partition for one in task] for task in found] == [[0, 2], [1, 3]]

    def test_at_least_so_many_tasks(self) -> None:
        assert len(plan_tasks(ranges(1000), {("t", 0): 10}, target_bytes=1000, tasks_min=7)) == 7
        assert len(plan_tasks(ranges(3), {("t", 0): 10}, target_bytes=1000, tasks_min=7)) == 3

    def test_no_task_has_more_records_than_allowed(self) -> None:
        found = plan_tasks(ranges(100, 7), {}, target_bytes=1000, records_max=30)
        assert [sum(one.count for one in task) for task in found] == [30, 30, 30, 17]

    def test_a_sliver_is_not_cut_off(self) -> None:
        sizes = {("t", 0): 1000, ("t", 1): 1050}
        found = plan_tasks(ranges(100, 105), sizes, target_bytes=1025)
        assert [[(one.partition, one.count) for one in task] for task in found] == [[(0, 100)], [(1, 105)]]

    def test_nothing_to_read_is_no_task(self) -> None:
        assert plan_tasks(ranges(0, 0), {}, target_bytes=1) == []

    @given(
        st.lists(st.tuples(st.integers(0, 300), st.integers(0, 5000)), max_size=8),
        st.integers(1, 3000),
        st.integers(1, 9),
        st.none() | st.integers(1, 100),
    )
    def test_every_offset_is_in_one_task_and_in_order(
        self, logs: list[tuple[int, int]], target: int, least: int, records_max: int | None
    ) -> None:
        wanted = ranges(*[count for count, _ in logs])
        sizes = {("t", number): size for number, (_, size) in enumerate(logs)}
        tasks = plan_tasks(wanted, sizes, target_bytes=target, tasks_min=least, records_max=records_max)
        seen: dict[int, int] = {}
        for one in (one for task in tasks for one in task):
            assert one.count > 0
            assert one.start == seen.get(one.partition, 10)
            seen[one.partition] = one.end
        assert seen == {one.partition: one.end for one in wanted if one.count}
        assert all(task for task in tasks)
        if records_max is not None:
            assert all(sum(one.count for one in task) <= records_max for task in tasks)


class TestFilters:
    def test_a_partition_and_offsets_are_narrowed_down_exactly(self) -> None:
        found = Narrowing()
        assert found.take("partition", "in", (1, 2))
        assert found.take("partition", "=", 1)
        assert found.take("offset", ">=", 12)
        assert found.take("offset", "<", 15)
        assert found.narrowed(ranges(10, 10, 10)) == [ReadRange("t", "a" * 32, 1, 12, 15)]

    @pytest.mark.parametrize(
        ("comparison", "left"), [("=", [15]), (">", [16, 17, 18, 19]), ("<=", [10, 11, 12, 13, 14, 15]), ("<=>", [15])]
    )
    def test_comparisons_of_offsets(self, comparison: str, left: list[int]) -> None:
        found = Narrowing()
        assert found.take("offset", comparison, 15)
        (one,) = found.narrowed(ranges(10))
        assert list(range(one.start, one.end)) == left

    def test_times_only_spare_what_lies_before_and_spark_looks_again(self) -> None:
        found = Narrowing()
        assert not found.take("timestamp", ">=", datetime(2020, 1, 1, tzinfo=UTC))
        assert not found.take("timestamp", "<", datetime(2021, 1, 1, tzinfo=UTC))
        assert found.since_ms == 1_577_836_800_000

    def test_what_cannot_be_pushed_stays_with_spark(self) -> None:
        found = Narrowing()
        assert not found.take("value", "=", b"x")
        assert not found.take("offset", ">", "15")
        assert not found.take("offset", "in", (1, 2))
        assert not found.take("partition", ">", 1)
        assert not found.take("timestamp", ">=", datetime(2020, 1, 1))  # noqa: DTZ001 - as Spark may give it
        assert found == Narrowing()
