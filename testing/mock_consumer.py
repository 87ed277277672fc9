"""`MockConsumer`: `tidelog.Consumer` without a cluster. The test scripts the records and the failures; positions,
commits, pauses, resets, deserializers and callbacks work as in the real consumer.

    consumer = MockConsumer(group="billing", auto_offset_reset="earliest")
    consumer.add_topic("orders", partitions=2)
    consumer.add_record("orders", b"value", key=b"key", partition=1)
    consumer.fail_next_poll(error); consumer.on_next_poll(consumer.wakeup); consumer.rebalance([...])

`poll` never waits: it returns what there is. Iteration ends when no record is left, so that the loop under test ends. A
subscription gets all partitions of its topics at the first poll; after `consumer.auto_assign = False` it gets those of
`rebalance`. Partitions are read in a fixed order: by name and number.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from functools import partial
from re import Pattern
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from tidelog.client.arrow import Part, table_of
from tidelog.client.bridge import run_logged
from tidelog.client.consumer.arguments import (
    ByPartition,
    PartitionLike,
    Topics,
    interceptor_methods,
    read_count,
    read_deserializer,
    read_offset,
    read_offsets,
    read_partition,
    read_partitions,
    read_times,
    read_topics,
)
from tidelog.client.consumer.commits import CommitCallback, Offsets
from tidelog.client.consumer.errors import (
    CommitFailedError,
    ConsumerClosedError,
    DeserializationError,
    NoOffsetForPartitionError,
    SubscriptionError,
    WakeupError,
)
from tidelog.client.consumer.fetch_buffer import intercept
from tidelog.client.consumer.lookups import unknown_partition
from tidelog.client.consumer.metrics import GROUP_NAMES, NAMES
from tidelog.client.consumer.rebalance import Change, RebalanceCallback, RebalanceListener
from tidelog.client.consumer.typed_options import TypedConsumer
from tidelog.client.durations import TimeLike, check_timeout, duration_ms
from tidelog.client.errors import UnknownTopicError
from tidelog.client.producer.records import headers_of
from tidelog.client.record import (
    ConsumerRecord,
    GroupMetadata,
    K,
    OffsetAndMetadata,
    OffsetAndTimestamp,
    TopicPartition,
    V,
)
from tidelog.client.serializers import as_bytes
from tidelog.model.errors import InvalidRequestError, TidelogError
from tidelog.testing.mock_log import MockLog, converted, part_of
from tidelog.world.real.clock import SystemClock

if TYPE_CHECKING:
    import pyarrow


_now_ms = SystemClock().now_ms
RECORDS_MAX = 1_000_000


class MockConsumer(TypedConsumer[K, V]):
    """See the module's docstring. Options are those of `tidelog.Consumer`."""

    _bootstrap = "mock:9292"

    def _start(self) -> None:
        self.auto_assign = True
        """False: a subscription gets the partitions of `rebalance`, and no others."""
        self.commits: list[dict[TopicPartition, OffsetAndMetadata]] = []
        """Every successful commit, in order."""
        self.polls = 0
        self._logs: dict[TopicPartition, MockLog] = {}
        self._counts: dict[str, int] = {}
        self._positions: dict[TopicPartition, int | None] = {}
        """Positions of assigned partitions; None: unknown before the first poll."""
        self._given: dict[TopicPartition, int] = {}
        """Offsets after the last returned records, to be committed."""
        self._done: dict[TopicPartition, int] = {}
        """The same, for records that were returned before the last poll."""
        self._committed: dict[TopicPartition, OffsetAndMetadata] = {}
        self._paused: set[TopicPartition] = set()
        self._topics: tuple[str, ...] = ()
        self._pattern = ""
        self._listener = RebalanceListener()
        self._is_subscribed = self._is_assigned = self._is_joined = self._is_closed = False
        self._is_in_callback = self._is_woken = False
        self._jobs: deque[Callable[[], object]] = deque()
        self._poll_errors: deque[BaseException] = deque()
        self._commit_errors: deque[TidelogError] = deque()
        self._target: list[TopicPartition] | None = None
        self._is_lost = False
        self._ended_commits: deque[Callable[[], object]] = deque()
        self._key = read_deserializer(self.options.key_deserializer)
        self._value = read_deserializer(self.options.value_deserializer)
        self._consumed = 0

    # For tests.

    @property
    def is_closed(self) -> bool:
        return self._is_closed

    def subscription(self) -> tuple[str, ...]:
        """Return the topics of `subscribe`; those of a pattern as far as they exist."""
        return tuple(topic for topic in (*self._topics, *sorted(self._counts)) if self._is_wanted(topic))

    def add_topic(self, topic: str, partitions: int = 1, *, start: int = 0) -> None:
        """Add a topic with this many partitions, which start at `start`; or add partitions to it."""
        for number in range(self._counts.get(topic, 0), partitions):
            log = self._logs[TopicPartition(topic, number)] = MockLog()
            log.start = log.end = start
        self._counts[topic] = max(partitions, self._counts.get(topic, 0))

    def add_record(
        self,
        topic: str,
        value: Any = None,
        key: Any = None,
        *,
        partition: int = 0,
        offset: int | None = None,
        timestamp_ms: int | None = None,
        headers: Any = None,
        leader_epoch: int = 0,
    ) -> ConsumerRecord:
        """Append a record to a partition, or leave a gap before `offset`, as compaction does. Creates the topic and the
        partition. Key and value are stored as bytes, str or None."""
        place = TopicPartition(topic, partition)
        self.add_topic(topic, partition + 1)
        log = self._logs[place]
        if offset is not None and offset < log.end:
            raise ValueError(f"{place} ends at {log.end}: offset {offset} is taken")
        assert len(log.records) < RECORDS_MAX, f"{RECORDS_MAX:,} records in one partition of a mock"
        record = ConsumerRecord(
            topic,
            partition,
            log.end if offset is None else offset,
            _now_ms() if timestamp_ms is None else timestamp_ms,
            as_bytes(key, "key"),
            as_bytes(value, "value"),
            headers_of(headers) or (),
            leader_epoch,
        )
        log.records.append(record)
        log.end = record.offset + 1
        return record

    def delete_records(self, partition: PartitionLike, before: int) -> None:
        """Move the log start to this offset, as retention does."""
        log = self._log(read_partition(partition))
        log.start, log.end = max(log.start, before), max(log.end, before)
        del log.records[: log.at(log.start)]

    def fail_next_poll(self, error: BaseException, *, times: int = 1) -> None:
        """Make the next polls raise `error` and return nothing."""
        self._poll_errors.extend([error] * times)

    def fail_next_commit(self, error: TidelogError, *, times: int = 1) -> None:
        """Make the next commits, manual or automatic, fail with `error`."""
        self._commit_errors.extend([error] * times)

    def on_next_poll(self, callback: Callable[[], object]) -> None:
        """Run `callback` at the start of a poll; each call is for one further poll."""
        self._jobs.append(callback)

    def rebalance(self, partitions: Iterable[PartitionLike], *, lost: bool = False) -> None:
        """At the next poll revoke partitions that are not among these, and assign new ones, with the callbacks. `lost`:
        the revoked ones belong to others already."""
        wanted = read_partitions(partitions)
        for place in wanted:
            self.add_topic(place.topic, place.partition + 1)
        self._target, self._is_lost = wanted, lost

    # Subscription and assignment, as in `tidelog.Consumer`.

    def subscribe(
        self,
        topics: Topics = None,
        *,
        pattern: str | Pattern[str] | None = None,
        on_assigned: RebalanceCallback | None = None,
        on_revoked: RebalanceCallback | None = None,
        on_lost: RebalanceCallback | None = None,
    ) -> None:
        names, text = read_topics(topics, pattern)
        self._check()
        if self.options.group is None:
            raise SubscriptionError("subscribe needs a group: set `group`, or use assign")
        if self._is_assigned:
            raise SubscriptionError("this consumer uses assign: call unsubscribe before subscribe")
        if not names and not text:
            raise SubscriptionError("no topics to subscribe to; unsubscribe ends a subscription")
        self._topics, self._pattern = names, text
        self._listener = RebalanceListener(on_assigned, on_revoked, on_lost)
        self._is_subscribed, self._is_joined = True, False

    def assign(self, partitions: Iterable[PartitionLike], *, timeout: float | None = None) -> None:
        wanted = read_partitions(partitions)
        self._check(timeout)
        if self._is_subscribed:
            raise SubscriptionError("this consumer has subscribed: call unsubscribe before assign")
        for place in wanted:
            self._log(place)
        self._give_up([place for place in self._positions if place not in wanted])
        for place in wanted:
            self._positions.setdefault(place, None)
        self._is_assigned = bool(wanted)

    def unsubscribe(self) -> None:
        self._check()
        self._leave(is_done=True)
        self._is_subscribed = self._is_assigned = self._is_joined = False
        self._topics, self._pattern, self._listener = (), "", RebalanceListener()

    def assignment(self) -> set[TopicPartition]:
        self._check()
        return set(self._positions)

    # Records.

    def poll(self, timeout: float = 1.0, max_records: int | None = None) -> list[ConsumerRecord[K, V]]:
        """Return available records at once."""
        self._check(timeout)
        count = read_count(max_records, self.options.max_poll_records)
        self._begin_poll()
        found: list[ConsumerRecord] = []
        for place in sorted(self._positions):
            if place not in self._paused and len(found) < count:
                found += self._read(place, count - len(found), is_first=not found)
        self._consumed += len(found)
        return intercept(interceptor_methods(self.options.interceptors, "on_consume"), found) if found else []

    def __iter__(self) -> Iterator[ConsumerRecord[K, V]]:
        """Iterate until no record is left; the real consumer never ends."""
        while records := self.poll(0, 1):
            yield records[0]

    def poll_arrow(self, timeout: float = 1.0, max_records: int | None = None) -> pyarrow.Table:
        return table_of(self._poll_parts(timeout, max_records))

    def _poll_parts(self, timeout: float = 1.0, max_records: int | None = None) -> list[Part]:
        key, value = self._key, self._value
        self._key = self._value = None  # deserializers are not called
        try:
            records = self.poll(timeout, read_count(max_records, RECORDS_MAX))
        finally:
            self._key, self._value = key, value
        return [part_of(record) for record in records]

    def wakeup(self) -> None:
        self._is_woken = True

    # Positions.

    def position(self, partition: PartitionLike, *, timeout: float | None = None) -> int:
        place = self._held(partition, timeout)
        found = self._positions[place]
        return self._first(place) if found is None else found

    def seek(self, partition: PartitionLike, offset: int, *, leader_epoch: int = -1) -> None:
        place = self._held(partition)
        self._move(place, read_offset(place, offset))

    def seek_to_beginning(self, *partitions: PartitionLike, timeout: float | None = None) -> None:
        for place in self._chosen(partitions, timeout):
            self._move(place, self._logs[place].start)

    def seek_to_end(self, *partitions: PartitionLike, timeout: float | None = None) -> None:
        for place in self._chosen(partitions, timeout):
            self._move(place, self._logs[place].end)

    def seek_to_time(
        self, when: TimeLike | ByPartition[TimeLike], *partitions: PartitionLike, timeout: float | None = None
    ) -> None:
        self._check(timeout)
        times = read_times(when, partitions, self.assignment(), _now_ms())
        for place, found in self.offsets_for_times(times).items():
            self._move(self._held(place), self._logs[place].end if found is None else found.offset)

    def pause(self, *partitions: PartitionLike) -> None:
        self._paused.update(self._chosen(partitions))

    def resume(self, *partitions: PartitionLike) -> None:
        self._paused.difference_update(self._chosen(partitions))

    def paused(self) -> set[TopicPartition]:
        self._check()
        return set(self._paused)

    # Commits.

    def commit(self, offsets: Offsets | None = None, *, timeout: float | None = None) -> None:
        self._check(timeout)
        try:
            self._commit(self._to_commit(offsets))
        finally:
            while self._ended_commits:
                run_logged(self._ended_commits.popleft())

    def commit_async(self, offsets: Offsets | None = None, on_commit: CommitCallback | None = None) -> None:
        self._check()
        wanted = self._to_commit(offsets)
        error = None
        try:
            self._commit(wanted)
        except TidelogError as failed:
            error = failed
        if on_commit is not None:
            self._ended_commits.append(partial(on_commit, error, wanted))

    def committed(
        self, *partitions: PartitionLike, timeout: float | None = None
    ) -> dict[TopicPartition, OffsetAndMetadata | None]:
        self._check(timeout)
        self._check_group()
        places = read_partitions(partitions)
        for place in places:
            self._log(place)
        return {place: self._committed.get(place) for place in places}

    # Queries.

    def beginning_offsets(self, *partitions: PartitionLike, timeout: float | None = None) -> dict[TopicPartition, int]:
        self._check(timeout)
        return {place: self._log(place).start for place in read_partitions(partitions)}

    def end_offsets(self, *partitions: PartitionLike, timeout: float | None = None) -> dict[TopicPartition, int]:
        self._check(timeout)
        return {place: self._log(place).end for place in read_partitions(partitions)}

    def offsets_for_times(
        self, times: ByPartition[TimeLike], *, timeout: float | None = None
    ) -> dict[TopicPartition, OffsetAndTimestamp | None]:
        self._check(timeout)
        found: dict[TopicPartition, OffsetAndTimestamp | None] = {}
        for place, wanted_ms in read_times(times, (), (), _now_ms()).items():
            later = (one for one in self._log(place).records if one.timestamp >= wanted_ms)
            first = next(later, None)
            found[place] = None if first is None else OffsetAndTimestamp(first.offset, first.timestamp)
        return found

    def partitions_for(self, topic: str, timeout: float | None = None) -> list[TopicPartition]:
        self._check(timeout)
        if topic not in self._counts:
            raise UnknownTopicError(topic)
        return [TopicPartition(topic, number) for number in range(self._counts[topic])]

    def group_metadata(self) -> GroupMetadata:
        self._check()
        self._check_group()
        is_member = self._is_subscribed and self._is_joined
        if self._is_subscribed and not is_member:
            raise CommitFailedError(f"this consumer is not a member of group '{self.options.group}' now: poll first")
        return GroupMetadata(self.options.group or "", "mock-member" if is_member else "", 1 if is_member else -1)

    def metrics(self) -> dict[str, float]:
        names = NAMES if self.options.group is None else NAMES + GROUP_NAMES
        counts = {"records_consumed": self._consumed, "polls": self.polls, "commits": len(self.commits)}
        counts["assigned_partitions"] = len(self._positions)
        return {name: counts.get(name, 0) for name in names}

    # Close.

    def close(self, timeout: float | None = None) -> None:
        check_timeout(timeout)
        self._close(is_done=True)

    def _close(self, *, is_done: bool) -> None:
        if self._is_closed:
            return
        if self._is_in_callback:
            raise SubscriptionError("a rebalance callback cannot close its consumer: return from it first")
        try:
            self._leave(is_done=is_done)
            self._run_ended_commits()
        finally:
            self._is_closed = True
            for method in interceptor_methods(self.options.interceptors, "close"):
                run_logged(method)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._close(is_done=error is None)

    # Internals.

    def _check(self, timeout: float | None = None) -> None:
        check_timeout(timeout)
        if self._is_closed:
            raise ConsumerClosedError("this consumer is closed")

    def _check_group(self) -> None:
        if self.options.group is None:
            raise InvalidRequestError("commits need a group: set `group` when you create the consumer")

    def _log(self, place: TopicPartition) -> MockLog:
        found = self._logs.get(place)
        if found is None:
            if place.topic not in self._counts:
                raise UnknownTopicError(place.topic)
            raise unknown_partition(place, self._counts[place.topic])
        return found

    def _held(self, partition: PartitionLike, timeout: float | None = None) -> TopicPartition:
        self._check(timeout)
        place = read_partition(partition)
        if place not in self._positions:
            raise SubscriptionError(f"{place} is not assigned to this consumer")
        return place

    def _chosen(self, partitions: Iterable[PartitionLike], timeout: float | None = None) -> list[TopicPartition]:
        self._check(timeout)
        return [self._held(one) for one in partitions] or sorted(self._positions)

    def _move(self, place: TopicPartition, offset: int) -> None:
        """Forget returned records: the next commit is for the new position."""
        self._positions[place] = self._given[place] = self._done[place] = offset

    def _is_wanted(self, topic: str) -> bool:
        return topic in self._topics or (bool(self._pattern) and re.fullmatch(self._pattern, topic) is not None)

    def _begin_poll(self) -> None:
        self._check()
        if self._is_in_callback:
            raise SubscriptionError("a rebalance callback cannot poll: return from it first")
        if not (self._is_subscribed or self._is_assigned):
            raise SubscriptionError("nothing to read: subscribe or assign first")
        self.polls += 1
        self._done.update(self._given)
        self._run_ended_commits()
        if self._jobs:
            self._jobs.popleft()()
        if self._is_woken:
            self._is_woken = False
            raise WakeupError("woken by wakeup()")
        if self._poll_errors:
            raise self._poll_errors.popleft()
        if self.options.enable_auto_commit and self.options.group is not None:
            self._auto_commit(self._positions)
        self._join()

    def _join(self) -> None:
        if not self._is_subscribed:
            return
        if self._target is None and self.auto_assign:
            mine = [place for place in sorted(self._logs) if self._is_wanted(place.topic)]
            if not self._is_joined or set(mine) != set(self._positions):
                self._target = mine
        if self._target is None:
            return
        target, self._target = self._target, None
        is_lost, self._is_lost = self._is_lost, False
        gone = sorted(place for place in self._positions if place not in target)
        new = [place for place in target if place not in self._positions]
        if gone:
            self._give_up(gone, Change.LOST if is_lost else Change.REVOKED)
        for place in new:
            self._positions[place] = None
        self._is_joined = True
        self._run_rebalance_callback(Change.ASSIGNED, new)

    def _give_up(self, places: Iterable[TopicPartition], change: Change | None = None) -> None:
        gone = list(places)
        if change is Change.REVOKED:
            if self.options.enable_auto_commit:
                self._auto_commit(gone)
            self._run_rebalance_callback(change, gone)
        for place in gone:
            del self._positions[place]
            self._given.pop(place, None)
            self._done.pop(place, None)
            self._paused.discard(place)
        if change is Change.LOST:
            self._run_rebalance_callback(change, gone)

    def _leave(self, *, is_done: bool) -> None:
        if is_done:
            self._done.update(self._given)
        if self.options.enable_auto_commit and self.options.group is not None:
            self._auto_commit(self._positions)
        self._give_up(list(self._positions), Change.REVOKED if self._is_subscribed and self._positions else None)

    def _run_rebalance_callback(self, change: Change, places: list[TopicPartition]) -> None:
        callback = self._listener.callback(change)
        if callback is None:
            return
        self._is_in_callback = True
        try:
            callback(list(places))
        finally:
            self._is_in_callback = False

    def _first(self, place: TopicPartition) -> int:
        """Return the start: the committed offset, or by `auto_offset_reset`."""
        committed = self._committed.get(place)
        return self._reset(place, None) if committed is None else committed.offset

    def _reset(self, place: TopicPartition, outside: int | None) -> int:
        log, how = self._logs[place], self.options.auto_offset_reset
        if how in ("earliest", "latest"):
            return log.start if how == "earliest" else log.end
        ago_ms = duration_ms(how)
        if ago_ms is not None:
            return next((one.offset for one in log.records if one.timestamp >= _now_ms() - ago_ms), log.end)
        why = "has no committed offset" if outside is None else f"has {log.start} to {log.end}, not {outside}"
        raise NoOffsetForPartitionError(f"{place} {why}, and auto_offset_reset is 'none'", partitions=[place])

    def _read(self, place: TopicPartition, count: int, *, is_first: bool) -> list[ConsumerRecord]:
        log = self._logs[place]
        at = self._positions[place]
        if at is None:
            at = self._first(place)
        if not log.start <= at <= log.end:
            at = self._reset(place, at)
        self._positions[place] = at
        self._given.setdefault(place, at)
        index = log.at(at)
        found: list[ConsumerRecord] = []
        for record in log.records[index : index + count]:
            try:
                found.append(converted(record, self._key, self._value))
            except DeserializationError:
                if found or not is_first:
                    break  # the next poll starts here and reports it
                raise
        if found:
            self._positions[place] = self._given[place] = found[-1].offset + 1
        return found

    def _to_commit(self, offsets: Offsets | None) -> dict[TopicPartition, OffsetAndMetadata]:
        self._check_group()
        if offsets is None:
            given = {place: OffsetAndMetadata(offset) for place, offset in sorted(self._given.items())}
            return {place: offset for place, offset in given.items() if self._committed.get(place) != offset}
        wanted = read_offsets(offsets) or {}
        for place in wanted:
            if self._is_subscribed and place not in self._positions:
                raise CommitFailedError(f"{place} is not assigned to this member now")
            self._log(place)
        return wanted

    def _commit(self, offsets: dict[TopicPartition, OffsetAndMetadata]) -> None:
        if self._commit_errors:
            error = self._commit_errors.popleft()
            self._report(error, offsets)
            raise error
        if not offsets:
            return
        self._committed.update(offsets)
        self.commits.append(dict(offsets))
        self._report(None, offsets)

    def _report(self, error: TidelogError | None, offsets: dict[TopicPartition, OffsetAndMetadata]) -> None:
        for method in interceptor_methods(self.options.interceptors, "on_commit"):
            self._ended_commits.append(partial(run_logged, method, error, dict(offsets)))

    def _auto_commit(self, places: Iterable[TopicPartition]) -> None:
        """Commit records returned before the last poll. A failure only causes records to be read again."""
        wanted = {place: OffsetAndMetadata(self._done[place]) for place in places if place in self._done}
        new = {place: offset for place, offset in wanted.items() if self._committed.get(place) != offset}
        if not new:
            return
        with suppress(TidelogError):
            self._commit(new)

    def _run_ended_commits(self) -> None:
        while self._ended_commits:
            self._ended_commits.popleft()()
