"""The offset document of the Spark source: its text, how it goes on, and what a query may lose."""

import json
from collections.abc import Mapping

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidelog.client.errors import OptionError
from tidelog.spark.errors import (
    DataLossError,
    ExpiredRangeError,
    TopicDeletedError,
    TopicRecreatedError,
    TruncationError,
)
from tidelog.spark.offsets import (
    LogState,
    Mark,
    ReadRange,
    SourceOffset,
    TopicMarks,
    TopicState,
    advanced,
    beginnings,
    ranges_between,
    read_document,
)

A, B = "a" * 32, "b" * 32


def at(marks: Mapping[int, tuple[int, int]], *, topic_id: str = A, initial: bool = False) -> SourceOffset:
    return SourceOffset(
        {"t": TopicMarks(topic_id, {number: Mark(*mark) for number, mark in marks.items()})}, {}, initial
    )


def cluster(logs: Mapping[int, LogState], *, topic_id: str = A) -> dict[str, TopicState]:
    return {"t": TopicState(topic_id, logs)}


def fail(error: DataLossError) -> None:
    raise error


def step(start: SourceOffset, now: Mapping[str, TopicState], **ends: int) -> SourceOffset | None:
    """The next document, up to the ends of all logs or of those given as p0=..."""
    found = {
        (name, number): ends.get(f"p{number}", log.end)
        for name, state in now.items()
        for number, log in state.logs.items()
    }
    return advanced(start, beginnings(start, now, fail), now, found)


def texts(offset: SourceOffset) -> str:
    return json.dumps(offset.document())


class TestDocument:
    def test_it_is_compact_and_in_a_fixed_order(self) -> None:
        topics = {"b": TopicMarks(B, {10: Mark(1, 2), 9: Mark(0)}), "a": TopicMarks(A, {0: Mark(5, 1)})}
        assert texts(SourceOffset(topics, {"a": TopicMarks(A, {0: Mark(3)})}, True)) == (
            f'{{"v": 1, "t": {{"a": {{"id": "{A}", "p": {{"0": [5, 1]}}}}, '
            f'"b": {{"id": "{B}", "p": {{"9": [0, -1], "10": [1, 2]}}}}}}, '
            f'"origin": {{"a": {{"id": "{A}", "p": {{"0": [3, -1]}}}}}}, "initial": true}}'
        )

    @given(
        st.dictionaries(st.text(max_size=5), st.dictionaries(st.integers(0, 99), st.integers(0, 9), max_size=3)),
        st.booleans(),
    )
    def test_it_comes_back_as_it_was(self, rows: dict[str, dict[int, int]], initial: bool) -> None:
        topics = {name: TopicMarks(A, {n: Mark(o, o - 1) for n, o in marks.items()}) for name, marks in rows.items()}
        made = SourceOffset(topics, topics, initial)
        again = read_document(json.loads(texts(made)))
        assert again == made
        assert texts(again) == texts(made)

    @pytest.mark.parametrize(
        "document", [{}, {"v": 2, "t": {}}, {"v": 1}, {"v": 1, "t": {"t": 5}}, {"v": 1, "t": {"t": {"id": A, "p": []}}}]
    )
    def test_the_checkpoint_of_another_source_is_reported_in_one_line(self, document: dict[str, object]) -> None:
        with pytest.raises(OptionError, match="checkpointLocation") as error:
            read_document(document)
        assert "\n" not in str(error.value)


class TestGoingOn:
    def test_new_records_move_the_mark_and_its_epoch(self) -> None:
        found = step(at({0: (5, 1)}), cluster({0: LogState(0, 9, 2)}))
        assert found is not None
        assert texts(found) == texts(at({0: (9, 2)}))

    def test_nothing_new_is_no_new_document(self) -> None:
        assert step(at({0: (5, 1)}), cluster({0: LogState(0, 5, 1)})) is None

    def test_a_new_epoch_alone_is_no_news(self) -> None:
        assert step(at({0: (5, 1)}), cluster({0: LogState(0, 5, 7)})) is None

    def test_a_leader_that_knows_less_does_not_move_it_back(self) -> None:
        assert step(at({0: (5, 1)}), cluster({0: LogState(0, 3, 2)})) is None

    def test_a_partition_without_a_leader_stays_where_it_is(self) -> None:
        found = step(at({0: (5, 1), 1: (7, 1)}), cluster({0: LogState(0, 6, 1)}))
        assert found is not None
        assert texts(found) == texts(at({0: (6, 1), 1: (7, 1)}))

    def test_the_first_batch_carries_where_it_began_even_if_it_is_empty(self) -> None:
        start = at({0: (100, 3)}, initial=True)
        end = step(start, cluster({0: LogState(0, 100, 3)}))
        assert end is not None
        assert texts(end) != texts(start)
        assert end.origin == start.topics
        assert ranges_between(start, end) == []
        # A restart before the first batch is committed: what `initialOffset` says by then does not matter.
        later = at({0: (107, 3)}, initial=True)
        assert ranges_between(later, end) == []
        after = step(end, cluster({0: LogState(0, 107, 3)}))
        assert after is not None
        assert not after.origin
        assert ranges_between(end, after) == [ReadRange("t", A, 0, 100, 107, 3)]

    def test_after_the_first_batch_nothing_new_is_no_new_document(self) -> None:
        start = at({0: (100, 3)}, initial=True)
        now = cluster({0: LogState(0, 100, 3)})
        end = step(start, now)
        assert end is not None
        assert step(end, now) is None

    def test_a_new_partition_begins_where_its_log_does(self) -> None:
        start = at({0: (5, 1)})
        end = step(start, cluster({0: LogState(0, 5, 1), 1: LogState(2, 4, 0)}))
        assert end is not None
        assert ranges_between(start, end) == [ReadRange("t", A, 1, 2, 4, 0)]

    def test_a_new_partition_without_records_is_noted_at_once(self) -> None:
        start = at({0: (5, 1)})
        end = step(start, cluster({0: LogState(0, 5, 1), 1: LogState(0, 0, 0)}))
        assert end is not None
        assert end.mark("t", 1) == Mark(0)

    def test_a_new_topic_begins_where_its_logs_do(self) -> None:
        start = at({0: (5, 1)})
        now = cluster({0: LogState(0, 5, 1)}) | {"u": TopicState(B, {0: LogState(0, 3, 0)})}
        end = step(start, now)
        assert end is not None
        assert ranges_between(start, end) == [ReadRange("u", B, 0, 0, 3, 0)]


class TestLosses:
    @pytest.mark.parametrize(
        ("now", "kind", "words"),
        [
            ({}, TopicDeletedError, ["'t'", "deleted"]),
            (cluster({0: LogState(0, 99, 0)}, topic_id=B), TopicRecreatedError, ["'t'", A, B]),
            (cluster({0: LogState(50, 99, 1)}), ExpiredRangeError, ["t-0", "offsets 10 to 49", "begins at 50"]),
            (cluster({0: LogState(0, 99, 5, epoch_end=8)}), TruncationError, ["t-0", "offset 10", "offset 8 on"]),
        ],
    )
    def test_each_has_its_name_and_tells_what_to_do(
        self, now: Mapping[str, TopicState], kind: type[DataLossError], words: list[str]
    ) -> None:
        with pytest.raises(kind) as error:
            beginnings(at({0: (10, 1)}), now, fail)
        text = str(error.value)
        assert "\n" not in text
        assert [word for word in [*words, "failOnDataLoss=false", "new checkpoint"] if word not in text] == []

    def choose(self, now: Mapping[str, TopicState]) -> tuple[SourceOffset, SourceOffset, list[DataLossError]]:
        start = at({0: (10, 1)})
        losses: list[DataLossError] = []
        begin = beginnings(start, now, losses.append)
        ends = {(name, number): log.end for name, state in now.items() for number, log in state.logs.items()}
        end = advanced(start, begin, now, ends)
        assert end is not None
        return start, end, losses

    def test_an_expired_range_is_passed_over(self) -> None:
        start, end, losses = self.choose(cluster({0: LogState(50, 99, 1)}))
        assert len(losses) == 1
        assert ranges_between(start, end) == [ReadRange("t", A, 0, 50, 99, 1)]

    def test_a_topic_created_again_is_read_from_its_beginning(self) -> None:
        start, end, losses = self.choose(cluster({0: LogState(0, 99, 0), 1: LogState(0, 2, 0)}, topic_id=B))
        assert len(losses) == 1
        assert ranges_between(start, end) == [ReadRange("t", B, 0, 0, 99, 0), ReadRange("t", B, 1, 0, 2, 0)]

    def test_a_truncated_log_is_read_from_where_it_departs(self) -> None:
        start, end, losses = self.choose(cluster({0: LogState(0, 12, 5, epoch_end=8)}))
        assert len(losses) == 1
        assert ranges_between(start, end) == [ReadRange("t", A, 0, 8, 12, 5)]

    def test_a_deleted_topic_is_left_out(self) -> None:
        start, end, losses = self.choose({})
        assert len(losses) == 1
        assert end.topics == {}
        assert ranges_between(start, end) == []

    def test_an_epoch_that_goes_on_is_no_truncation(self) -> None:
        beginnings(at({0: (10, 1)}), cluster({0: LogState(0, 99, 5, epoch_end=10)}), fail)

    def test_a_replay_reads_the_same(self) -> None:
        start, end, _ = self.choose(cluster({0: LogState(50, 99, 1)}))
        again = read_document(json.loads(texts(end)))
        assert ranges_between(read_document(json.loads(texts(start))), again) == ranges_between(start, end)


@given(
    st.lists(st.tuples(st.integers(0, 50), st.integers(0, 50), st.integers(0, 3)), min_size=1, max_size=6),
    st.integers(0, 20),
)
def test_batches_join_without_gap_or_overlap_and_never_go_back(steps: list[tuple[int, int, int]], first: int) -> None:
    start = at({0: (first, 0)}, initial=True)
    read_to = first
    for number, (end, _, epoch) in enumerate(steps):
        following = step(start, cluster({0: LogState(0, end, epoch)}))
        if following is None:
            continue
        for one in ranges_between(start, following):
            assert one.start == read_to
            read_to = one.end
        start = following
        mark = start.mark("t", 0)
        assert mark is not None, number
        assert mark.offset == read_to
