"""`MockConsumer`: `tidelog.Consumer` without a cluster. A test says what the topics hold and what goes wrong;
positions, commits, pauses, resets, deserializers and callbacks are kept as the real one keeps them.

    consumer = MockConsumer(group="billing", auto_offset_reset="earliest")
    consumer.add_topic("orders", partitions=2)
    consumer.add_record("orders", b"value", key=b"key", partition=1)
    consumer.fail_next_poll(error); consumer.at_next_poll(consumer.wakeup); consumer.rebalance([...])

`poll` never waits: what is there is given out, or nothing. Iteration ends when nothing is left, so that the loop under
test ends. A subscription gets all partitions of its topics at the first poll, unless `is_automatic=False`: then what
`rebalance` says. Which partition comes first is fixed: by name and number.
"""

from __future__ import annotations

import logging
import re
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from re import Pattern
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from tidelog.client.arrow import Part, table_of
from tidelog.client.commits import Offsets, Told
from tidelog.client.consumer import Callback
from tidelog.client.consumer_errors import (
    CommitFailedError,
    ConsumerClosedError,
    DeserializationError,
    NoOffsetError,
    SubscriptionError,
    WakeupError,
)
from tidelog.client.consumer_front import (
    CLOSE_MS,
    Partitions,
    Topics,
    When,
    read_offset,
    read_offsets,
    read_partition,
    read_partitions,
    read_times,
    read_topics,
)
from tidelog.client.counts import read_count
from tidelog.client.durations import duration_ms
from tidelog.client.errors import UnknownTopicError
from tidelog.client.names import ConsumerOptions, read_options
from tidelog.client.rebalance import Change, Listener
from tidelog.client.record import (
    ConsumerRecord,
    GroupMetadata,
    OffsetAndMetadata,
    OffsetAndTimestamp,
    TopicPartition,
)
from tidelog.client.records import headers_of
from tidelog.client.serializers import as_bytes
from tidelog.client.user_side import deserializer_of, interceptors_of
from tidelog.model.errors import InvalidRequestError, TidelogError
from tidelog.testing.mock_log import MockLog, part_of

if TYPE_CHECKING:
    import pyarrow

LOGGER = logging.getLogger(__name__)

RECORDS_MAX = 1_000_000


class MockConsumer:
    """See the module's docstring. Options are those of `tidelog.Consumer`."""

    def __init__(self, bootstrap: object = "mock:9292", /, *, is_automatic: bool = True, **options: Any) -> None:
        self.options = read_options(ConsumerOptions, bootstrap, options)
        self.is_automatic = is_automatic
        self.commits: list[dict[TopicPartition, OffsetAndMetadata]] = []
        """Every commit that went well, in order."""
        self.polls = 0
        self._logs: dict[TopicPartition, MockLog] = {}
        self._counts: dict[str, int] = {}
        self._positions: dict[TopicPartition, int | None] = {}
        """Of what is assigned; None: not known before the first poll."""
        self._given: dict[TopicPartition, int] = {}
        """Behind the last record that was given out, of those to be committed."""
        self._done: dict[TopicPartition, int] = {}
        """The same of records that the program has come back for."""
        self._committed: dict[TopicPartition, OffsetAndMetadata] = {}
        self._paused: set[TopicPartition] = set()
        self._topics: tuple[str, ...] = ()
        self._pattern = ""
        self._listener = Listener()
        self._is_subscribed = self._is_assigned = self._is_joined = self._is_closed = False
        self._is_in_callback = self._is_woken = False
        self._jobs: deque[Callable[[], object]] = deque()
        self._poll_errors: deque[BaseException] = deque()
        self._commit_errors: deque[TidelogError] = deque()
        self._target: list[TopicPartition] | None = None
        self._is_lost = False
        self._ended_commits: deque[Callable[[], None]] = deque()
        self._key = deserializer_of(self.options.key_deserializer)
        self._value = deserializer_of(self.options.value_deserializer)
        self._consumed = 0

    # What a test does with it.

    @property
    def is_closed(self) -> bool:
        return self._is_closed

    def subscription(self) -> tuple[str, ...]:
        """The topics of `subscribe`; those of a pattern too, as far as there are any."""
        return tuple(topic for topic in (*self._topics, *sorted(self._counts)) if self._is_wanted(topic))

    def add_topic(self, topic: str, partitions: int = 1, *, start: int = 0) -> None:
        """A topic with so many partitions, which begin at an offset; more of them if it is there already."""
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
        """At the end of a partition, or at an offset behind it, as after compaction. Topic and partition are made if
        they are not there. Key and value as they lie in the log: bytes, str or None."""
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
            int(time.time() * 1000) if timestamp_ms is None else timestamp_ms,
            as_bytes(key, "key"),
            as_bytes(value, "value"),
            headers_of(headers) or (),
            leader_epoch,
        )
        log.records.append(record)
        log.end = record.offset + 1
        return record

    def delete_records(self, partition: Partitions, before: int) -> None:
        """The log begins at this offset now, as after retention."""
        log = self._log(read_partition(partition))
        log.start, log.end = max(log.start, before), max(log.end, before)
        del log.records[: log.at(log.start)]

    def fail_next_poll(self, error: BaseException, *, times: int = 1) -> None:
        """The next polls raise it, and give out nothing."""
        self._poll_errors.extend([error] * times)

    def fail_next_commit(self, error: TidelogError, *, times: int = 1) -> None:
        """The next commits, by hand or automatic, fail with it."""
        self._commit_errors.extend([error] * times)

    def at_next_poll(self, job: Callable[[], object]) -> None:
        """Run it at the beginning of a poll; several calls are for as many polls."""
        self._jobs.append(job)

    def rebalance(self, partitions: Iterable[Partitions], *, lost: bool = False) -> None:
        """The next poll gives up what is not among these and takes over what is new, with the callbacks. `lost`: what
        goes has gone to others already."""
        wanted = read_partitions(partitions)
        for place in wanted:
            self.add_topic(place.topic, place.partition + 1)
        self._target, self._is_lost = wanted, lost

    # What to read, as the real one.

    def subscribe(
        self,
        topics: Topics = None,
        *,
        pattern: str | Pattern[str] | None = None,
        on_assigned: Callback | None = None,
        on_revoked: Callback | None = None,
        on_lost: Callback | None = None,
    ) -> None:
        names, text = read_topics(topics, pattern)
        self._check()
        if self.options.group is None:
            raise SubscriptionError("to subscribe is to be a member of a group: give `group`, or use assign")
        if self._is_assigned:
            raise SubscriptionError("partitions were assigned by hand: call unsubscribe before subscribe")
        if not names and not text:
            raise SubscriptionError("no topics to subscribe to; unsubscribe ends a subscription")
        self._topics, self._pattern = names, text
        self._listener = Listener(on_assigned, on_revoked, on_lost)
        self._is_subscribed, self._is_joined = True, False

    def assign(self, partitions: Iterable[Partitions]) -> None:
        wanted = read_partitions(partitions)
        self._check()
        if self._is_subscribed:
            raise SubscriptionError("this consumer has subscribed: call unsubscribe before assign")
        for place in wanted:
            self._log(place)
        self._give_up([place for place in self._positions if place not in wanted])
        for place in wanted:
            self._positions.setdefault(place, None)
        self._is_assigned = True

    def unsubscribe(self) -> None:
        self._check()
        self._leave(is_done=True)
        self._is_subscribed = self._is_assigned = self._is_joined = False
        self._topics, self._pattern, self._listener = (), "", Listener()

    def assignment(self) -> set[TopicPartition]:
        self._check()
        return set(self._positions)

    # Records.

    def poll(self, timeout_ms: float = 1_000, max_records: int | None = None) -> list[ConsumerRecord]:
        """What is there, at once."""
        self._begin_poll()
        found: list[ConsumerRecord] = []
        count = read_count(max_records, self.options.max_poll_records)
        for place in sorted(self._positions):
            if place not in self._paused and len(found) < count:
                found += self._read(place, count - len(found), is_first=not found)
        self._consumed += len(found)
        for method in interceptors_of(self.options.interceptors, "on_consume") if found else ():
            changed = _heard(method, "on_consume", found)
            found = found if changed is None else list(changed)
        return found

    def __iter__(self) -> Iterator[ConsumerRecord]:
        """Ends when nothing is left, which the real one never does."""
        while records := self.poll(0, 1):
            yield records[0]

    def poll_arrow(self, timeout_ms: float = 1_000, max_records: int | None = None) -> pyarrow.Table:
        return table_of(self.poll_parts(timeout_ms, max_records))

    def poll_parts(self, timeout_ms: float = 1_000, max_records: int | None = None) -> list[Part]:
        key, value = self._key, self._value
        self._key = self._value = None  # deserializers are not asked
        try:
            records = self.poll(timeout_ms, read_count(max_records, RECORDS_MAX))
        finally:
            self._key, self._value = key, value
        return [part_of(record) for record in records]

    def wakeup(self) -> None:
        self._is_woken = True

    # Positions.

    def position(self, partition: Partitions) -> int:
        place = self._held(partition)
        found = self._positions[place]
        return self._first(place) if found is None else found

    def seek(self, partition: Partitions, offset: int, *, leader_epoch: int = -1) -> None:
        place = self._held(partition)
        self._move(place, read_offset(place, offset))

    def seek_to_beginning(self, *partitions: Partitions) -> None:
        for place in self._chosen(partitions):
            self._move(place, self._logs[place].start)

    def seek_to_end(self, *partitions: Partitions) -> None:
        for place in self._chosen(partitions):
            self._move(place, self._logs[place].end)

    def seek_to_time(self, when: When | Mapping[TopicPartition, When], *partitions: Partitions) -> None:
        times = read_times(when, partitions or tuple(self.assignment()), _now_ms())
        for place, found in self.offsets_for_times(times).items():
            self._move(self._held(place), self._logs[place].end if found is None else found.offset)

    def pause(self, *partitions: Partitions) -> None:
        self._paused.update(self._held(one) for one in partitions)

    def resume(self, *partitions: Partitions) -> None:
        self._paused.difference_update([self._held(one) for one in partitions])

    def paused(self) -> set[TopicPartition]:
        self._check()
        return set(self._paused)

    # Commits.

    def commit(self, offsets: Offsets | None = None, *, timeout_ms: int | None = None) -> None:
        self._check()
        self._commit(self._to_commit(offsets))
        self._run_ended_commits()

    def commit_async(self, offsets: Offsets | None = None, on_commit: Told | None = None) -> None:
        self._check()
        wanted = self._to_commit(offsets)
        error: TidelogError | None = None
        try:
            self._commit(wanted)
        except TidelogError as failed:
            error = failed
        if on_commit is not None:
            self._ended_commits.append(lambda: on_commit(wanted, error))

    def committed(self, *partitions: Partitions) -> dict[TopicPartition, OffsetAndMetadata | None]:
        self._check()
        self._check_group()
        return {place: self._committed.get(place) for place in read_partitions(partitions)}

    # Questions.

    def beginning_offsets(self, *partitions: Partitions) -> dict[TopicPartition, int]:
        self._check()
        return {place: self._log(place).start for place in read_partitions(partitions)}

    def end_offsets(self, *partitions: Partitions) -> dict[TopicPartition, int]:
        self._check()
        return {place: self._log(place).end for place in read_partitions(partitions)}

    def offsets_for_times(
        self, times: Mapping[TopicPartition, When]
    ) -> dict[TopicPartition, OffsetAndTimestamp | None]:
        self._check()
        found: dict[TopicPartition, OffsetAndTimestamp | None] = {}
        for place, wanted_ms in read_times(times, (), _now_ms()).items():
            later = (one for one in self._log(place).records if one.timestamp >= wanted_ms)
            first = next(later, None)
            found[place] = None if first is None else OffsetAndTimestamp(first.offset, first.timestamp)
        return found

    def partitions_for(self, topic: str) -> list[TopicPartition]:
        self._check()
        if topic not in self._counts:
            raise UnknownTopicError(topic)
        return [TopicPartition(topic, number) for number in range(self._counts[topic])]

    def group_metadata(self) -> GroupMetadata:
        self._check()
        self._check_group()
        is_member = self._is_subscribed and self._is_joined
        return GroupMetadata(self.options.group or "", "mock-member" if is_member else "", 1 if is_member else -1)

    def metrics(self) -> dict[str, float]:
        self._check()
        return {"records_consumed": self._consumed, "assigned_partitions": len(self._positions)}

    # The end.

    def close(self, *, timeout_ms: int = CLOSE_MS) -> None:
        self._close(is_done=True)

    def _close(self, *, is_done: bool) -> None:
        if self._is_closed:
            return
        try:
            self._leave(is_done=is_done)
            self._run_ended_commits()
        finally:
            self._is_closed = True
            for method in interceptors_of(self.options.interceptors, "close"):
                _heard(method, "close")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._close(is_done=error is None)

    def at_exit(self, deadline_s: float) -> None:
        """Nothing is under way anywhere."""

    def forked(self) -> None:
        """It belongs to nobody."""

    # Within.

    def _check(self) -> None:
        if self._is_closed:
            raise ConsumerClosedError("this consumer was closed")

    def _check_group(self) -> None:
        if self.options.group is None:
            raise InvalidRequestError("a consumer without a group has nothing committed: give `group`")

    def _log(self, place: TopicPartition) -> MockLog:
        found = self._logs.get(place)
        if found is None:
            raise UnknownTopicError(place.topic)
        return found

    def _held(self, partition: Partitions) -> TopicPartition:
        self._check()
        place = read_partition(partition)
        if place not in self._positions:
            raise SubscriptionError(f"{place} is not assigned to this consumer")
        return place

    def _chosen(self, partitions: Iterable[Partitions]) -> list[TopicPartition]:
        self._check()
        return [self._held(one) for one in partitions] or sorted(self._positions)

    def _move(self, place: TopicPartition, offset: int) -> None:
        """What was given out is committed no more: the next commit is of the new position."""
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
        if self._target is None and self.is_automatic:
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
        self._tell(Change.ASSIGNED, new)

    def _give_up(self, places: Iterable[TopicPartition], change: Change | None = None) -> None:
        gone = list(places)
        if change is Change.REVOKED:
            if self.options.enable_auto_commit:
                self._auto_commit(gone)
            self._tell(change, gone)
        for place in gone:
            del self._positions[place]
            self._given.pop(place, None)
            self._done.pop(place, None)
            self._paused.discard(place)
        if change is Change.LOST:
            self._tell(change, gone)

    def _leave(self, *, is_done: bool) -> None:
        if is_done:
            self._done.update(self._given)
        if self.options.enable_auto_commit and self.options.group is not None:
            self._auto_commit(self._positions)
        self._give_up(list(self._positions), Change.REVOKED if self._is_subscribed and self._positions else None)

    def _tell(self, change: Change, places: list[TopicPartition]) -> None:
        callback = self._listener.callback(change)
        if callback is None:
            return
        self._is_in_callback = True
        try:
            callback(list(places))
        finally:
            self._is_in_callback = False

    def _first(self, place: TopicPartition) -> int:
        """Where to begin: what is committed, or as `auto_offset_reset` says."""
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
        raise NoOffsetError(f"{place} {why}, and auto_offset_reset is 'none'", partitions=[place])

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
                found.append(self._converted(record))
            except DeserializationError:
                if found or not is_first:
                    break  # told by the next poll, which begins here
                raise
        if found:
            self._positions[place] = self._given[place] = found[-1].offset + 1
        return found

    def _converted(self, record: ConsumerRecord) -> ConsumerRecord:
        for what, convert in (("key", self._key), ("value", self._value)):
            data = getattr(record, what)
            if convert is None or data is None:
                continue
            try:
                record = record._replace(**{what: convert(record.topic, data)})
            except Exception as error:
                where = TopicPartition(record.topic, record.partition)
                raise DeserializationError(
                    f"the {what} of {where} at offset {record.offset} cannot be deserialized "
                    f"({type(error).__name__}: {error}); seek to {record.offset + 1} to pass over it",
                    partition=where,
                    offset=record.offset,
                ) from error
        return record

    def _to_commit(self, offsets: Offsets | None) -> dict[TopicPartition, OffsetAndMetadata]:
        self._check_group()
        if offsets is None:
            given = {place: OffsetAndMetadata(offset) for place, offset in sorted(self._given.items())}
            return {place: told for place, told in given.items() if self._committed.get(place) != told}
        wanted = read_offsets(offsets) or {}
        for place in wanted:
            if self._is_subscribed and place not in self._positions:
                raise CommitFailedError(f"{place} is not assigned to this member now: others have it, or nobody")
        return wanted

    def _commit(self, offsets: dict[TopicPartition, OffsetAndMetadata]) -> None:
        if self._commit_errors:
            raise self._commit_errors.popleft()
        for place in offsets:
            self._log(place)
        if not offsets:
            return
        self._committed.update(offsets)
        self.commits.append(dict(offsets))
        for method in interceptors_of(self.options.interceptors, "on_commit"):
            self._ended_commits.append(partial(_heard, method, "on_commit", dict(offsets)))

    def _auto_commit(self, places: Iterable[TopicPartition]) -> None:
        """What the program has come back for; a failure costs nothing but records that are read again."""
        wanted = {place: OffsetAndMetadata(self._done[place]) for place in places if place in self._done}
        new = {place: told for place, told in wanted.items() if self._committed.get(place) != told}
        if not new:
            return
        if self._commit_errors:
            self._commit_errors.popleft()
            return
        self._commit(new)

    def _run_ended_commits(self) -> None:
        while self._ended_commits:
            self._ended_commits.popleft()()


def _heard(method: Callable[..., Any], name: str, *arguments: Any) -> Any:
    """What an interceptor raises is logged, as by the real one."""
    try:
        return method(*arguments)
    except Exception:
        LOGGER.exception("an interceptor failed: %s", name)
        return None


def _now_ms() -> int:
    return int(time.time() * 1000)
