"""`Driver` decides what each batch of a streaming query reads. It runs in the process of Spark's driver.

    initial(), freeze()         the query's start; the end of a run with `Trigger.AvailableNow`
    next_offset(start) -> end     the next batch; None if there is nothing new, answered without a request to a broker
    left(start)                 what such a run has yet to read; Spark would take "nothing new" for its end
    report(start)               commits the group's offsets: `start` is what the query has finished

Transient broker errors are raised as retriable `TidelogError`s; the caller answers "nothing new" until
`brokerTimeoutMs` has passed. Data loss raises `DataLossError`, or is logged if `failOnDataLoss=false`.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Iterable, Mapping
from typing import Any

from tidelog.client.coordinators import Coordinators
from tidelog.client.errors import OptionError, UnknownTopicError
from tidelog.client.group_offsets import GroupOffsets, Nobody
from tidelog.client.offsets import FoundOffset
from tidelog.client.record import OffsetAndMetadata, TopicPartition
from tidelog.model.errors import CallTimeoutError, TidelogError
from tidelog.model.ids import PartitionId
from tidelog.spark.admission import Limits, admitted, is_due
from tidelog.spark.client_cache import CachedClient, cached_client
from tidelog.spark.errors import DataLossError, ExpiredRangeError, TruncationError
from tidelog.spark.metadata_queries import MetadataQueries, Place, partition_id
from tidelog.spark.offsets import (
    Beginnings,
    Cluster,
    LogState,
    Mark,
    Marks,
    ReadRange,
    SourceOffset,
    TopicMarks,
    TopicState,
    advanced,
    beginnings,
    ranges_between,
)
from tidelog.spark.options import EARLIEST, LATEST, Bound, SourceOptions
from tidelog.spark.ranges import plan_tasks
from tidelog.spark.watch import Watch

LOGGER = logging.getLogger(__name__)

READY_S = 5.0
"""How long a leaderless partition may delay the first batch of the others, in seconds."""
STARTS_S = 5.0
"""Maximum age of a known log start offset, in seconds. Tasks detect an outdated one."""
ASK_MS = 5_000
"""Timeout of one request, in ms: Spark calls again soon."""
COMMIT_MS = 10_000
LAST_COMMIT_S = 5.0
COMMIT_AGAIN_S = 5.0
"""Pause after a failed commit, in seconds. The next batch commits in any case."""


class Driver:
    """Methods block. Call them from one thread."""

    def __init__(self, options: SourceOptions) -> None:
        self.options = options
        self.client: CachedClient = cached_client(options)
        self._queries = MetadataQueries(
            self.client.cluster, options.subscription, is_committed_only=options.is_committed_only
        )
        self._watch: Watch | None = None
        self._groups: GroupOffsets | None = None
        self._logs: dict[PartitionId, LogState] = {}
        self._starts_s: dict[PartitionId, float] = {}
        self._checked: dict[PartitionId, int] = {}  # leader epoch at which the mark was compared with the log
        self._target: dict[Place, Mark] | None = None
        self._target_ids: dict[str, str] = {}
        self._seen: tuple[int, SourceOffset] | None = None  # watch version and start offset that had nothing new
        self._begun_s = time.monotonic()
        self._commit = _Commit()
        self._sizes: dict[Place, float] = {}  # known bytes per offset

    def close(self) -> None:
        """Close the streams. The client belongs to the process and stays open."""
        watch, self._watch = self._watch, None
        if watch is not None and self.client.is_open:
            self.client.run(watch.close(), timeout_s=READY_S)

    def _lost(self, error: DataLossError) -> None:
        if self.options.fail_on_data_loss:
            raise error
        LOGGER.warning("data loss ignored, as failOnDataLoss=false: %s", error)

    # Start and end of the query.

    def initial(self) -> SourceOffset:
        return self.client.run(self._initial())

    async def _initial(self) -> SourceOffset:
        marks = await resolve(self._queries, self.options, self.options.starting, lost=self._lost)
        return SourceOffset(marks, is_initial=True)

    def freeze(self) -> None:
        """Fix the end of the run at the current log ends. Later topics and partitions are ignored."""
        self.client.run(self._freeze())

    async def _freeze(self) -> None:
        topics = await self._queries.topics()
        ends = await self._queries.offsets(self._queries.places(topics), LATEST)
        self._target = {partition: Mark(end.offset, end.leader_epoch) for partition, end in ends.items()}
        self._target_ids = {name: topic.topic_id.hex for name, topic in topics.items()}

    @property
    def is_frozen(self) -> bool:
        return self._target is not None

    def remaining(self, start: SourceOffset) -> str:
        """Describe what a frozen run has yet to read; empty if it is finished or not frozen."""
        if self.is_frozen and start.is_initial:
            return "the checkpoint does not have the start of the query yet"
        places = self._left(start)
        if not places:
            return ""
        (topic, number), end = next(iter(places.items()))
        mark = start.mark(topic, number)
        at = "its beginning" if mark is None else f"offset {mark.offset}"
        more = f", and {len(places) - 1} partitions more" if len(places) > 1 else ""
        return f"{topic}-{number} is at {at} of {end.offset}{more}"

    def _left(self, start: SourceOffset) -> dict[Place, Mark]:
        """Return the ends that a frozen run has not reached, without deleted topics: `next_offset` reports them."""
        unreached: dict[Place, Mark] = {}
        for partition, end in (self._target or {}).items():
            topic_id = self._target_ids[partition[0]]
            if self._watch is not None and self._watch.has_topics:
                topic = self._watch.topics.get(partition[0])
                if topic is None or topic.topic_id.hex != topic_id:
                    continue
            known = start.topics.get(partition[0])
            mark = known.marks.get(partition[1]) if known is not None and known.topic_id == topic_id else None
            if end.offset > (0 if mark is None else mark.offset):
                unreached[partition] = end
        return unreached

    # The next batch.

    def next_offset(self, start: SourceOffset, *, is_unlimited: bool) -> SourceOffset | None:
        watch = self._watch
        if watch is not None and watch.failure is None and self._seen == (watch.version, start):
            return None
        return self.client.run(self._next_offset(start, Limits() if is_unlimited else self.options.limits))

    async def _next_offset(self, start: SourceOffset, limits: Limits) -> SourceOffset | None:
        watch = await self._watching()
        version = watch.version
        if limits.offsets_min is not None and not start.is_initial and self._target is None:
            available = self._available(start)
            if available and not is_due(limits, available, waited_ms=self._waited_ms()):
                return None
        await self._check_gone(start)
        now = await self._now(start)
        begin = beginnings(start, now, self._lost, self.options.subscription.takes)
        backlog = self._backlog(begin, now)
        counts = admitted(backlog, limits, await self._backlog_sizes(begin, backlog, limits))
        ends = {
            partition: begin.topics[partition[0]].marks[partition[1]].offset + count
            for partition, count in counts.items()
        }
        end = advanced(start, begin, now, ends)
        if end is None:
            await self._check_target(start)
            # The version from before the requests: a later change needs another call.
            self._seen = (version, start)
        else:
            self._begun_s = time.monotonic()
        return end

    async def _watching(self) -> Watch:
        if self._watch is None:
            self._watch = Watch(
                self.client.cluster,
                self._queries.topics,
                self._queries.places,
                is_committed_only=self.options.is_committed_only,
                max_age_ms=self.options.metadata_max_age_ms,
            )
            self._watch.start()
            await self._watch.ready(READY_S)
        if self._watch.failure is not None:
            raise self._watch.failure
        failing = self._watch.failing()
        if failing is not None and not self._watch.ends:
            raise failing[1]
        if not self._watch.has_topics:
            # No broker has listed the topics yet, so a missing topic proves nothing.
            raise CallTimeoutError("no broker has listed the topics yet: the cluster does not answer")
        return self._watch

    def failing_for(self) -> tuple[float, TidelogError] | None:
        """Return for how many seconds some partition could not be watched, and why."""
        return None if self._watch is None else self._watch.failing()

    async def _check_gone(self, start: SourceOffset) -> None:
        """Look up each missing topic by name at another broker: the first one may lag behind."""
        assert self._watch is not None, "the watch has started"
        cluster = self.client.cluster
        for name in start.topics:
            if name in self._watch.topics or not self.options.subscription.takes(name):
                continue
            cluster.ask_another()
            await cluster.refresh(name)
            try:
                await cluster.topic(name)
            except UnknownTopicError:
                continue
            raise CallTimeoutError(f"topic '{name}' exists, but some brokers do not know it yet")

    async def _check_target(self, start: SourceOffset) -> None:
        """Give up target offsets that the log has lost. Those above a new leader's high watermark stay."""
        pending: dict[Place, PartitionId] = {}
        for name, number in self._left(start):
            where = partition_id(self._target_ids[name], number)
            if where in self._logs:
                pending[name, number] = where
        if not pending:
            return
        assert self._target is not None, "a frozen run has a target"
        epochs = {place: self._target[place].epoch for place in pending}
        for place, end in (await self._queries.epoch_ends(pending, epochs, timeout_ms=ASK_MS)).items():
            if end is not None and end < self._target[place].offset:
                self._lost(TruncationError(*place, offset=self._target[place].offset, diverges=end))
                self._target[place] = Mark(end, self._target[place].epoch)

    def _waited_ms(self) -> int:
        return int((time.monotonic() - self._begun_s) * 1000)

    def _available(self, start: SourceOffset) -> int:
        """Return how many offsets wait by the last reported ends. New partitions count in full."""
        assert self._watch is not None, "the watch has started"
        waiting = 0
        for (topic, number), watched in self._watch.places.items():
            mark = start.mark(topic, number)
            waiting += max(0, self._watch.ends.get(watched, 0) - (0 if mark is None else mark.offset))
        return waiting

    async def _now(self, start: SourceOffset) -> Cluster:
        """Return the state of every partition. Asks leaders only where it may have changed."""
        assert self._watch is not None, "the watch has started"
        places = dict(self._watch.places)
        ids = {name: topic.topic_id.hex for name, topic in self._watch.topics.items()}
        if self._target is not None:
            places = {place: where for place, where in places.items() if place in self._target}
            # Ignore what came after the freeze. A topic that the query has read does exist.
            ids = {name: one for name, one in ids.items() if name in self._target_ids or name in start.topics}
        ends = self._watch.ends
        changed = {
            place: where
            for place, where in places.items()
            if where in ends and (where not in self._logs or self._logs[where].end != ends[where])
        }
        if changed:
            for place, end in (await self._queries.offsets(changed, LATEST, timeout_ms=ASK_MS)).items():
                known = self._logs.get(changed[place])
                self._logs[changed[place]] = LogState(known.start if known else 0, end.offset, end.leader_epoch)
        await self._refresh_starts(places, start)
        await self._compare(places, start)
        subscribed = set(places.values())
        for gone in [where for where in self._logs if where not in subscribed]:
            for table in (self._logs, self._starts_s, self._checked):
                table.pop(gone, None)
        topics: dict[str, dict[int, LogState]] = {name: {} for name in ids}
        for (topic, number), where in places.items():
            if where in self._logs:
                topics[topic][number] = self._logs[where]
        return {name: TopicState(ids[name], logs) for name, logs in topics.items()}

    async def _refresh_starts(self, places: Mapping[Place, PartitionId], start: SourceOffset) -> None:
        """Refresh the start offsets of partitions that have records to read."""
        now_s = time.monotonic()
        outdated = {}
        for place, where in places.items():
            mark = start.mark(*place)
            log = self._logs.get(where)
            is_read = log is not None and (mark is None or mark.offset < log.end or where not in self._starts_s)
            if is_read and now_s - self._starts_s.get(where, -STARTS_S) >= STARTS_S:
                outdated[place] = where
        if outdated:
            for place, found in (await self._queries.offsets(outdated, EARLIEST, timeout_ms=ASK_MS)).items():
                log = self._logs[outdated[place]]
                self._logs[outdated[place]] = LogState(found.offset, log.end, log.epoch)
                self._starts_s[outdated[place]] = now_s

    async def _compare(self, places: Mapping[Place, PartitionId], start: SourceOffset) -> None:
        """Compare marks with the log of each partition that has a new leader since the last comparison."""
        unchecked: dict[Place, PartitionId] = {}
        epochs: dict[Place, int] = {}
        for place, where in places.items():
            mark, log = start.mark(*place), self._logs.get(where)
            if mark is None or log is None or mark.epoch < 0 or start.topics[place[0]].topic_id != where.topic_id.hex:
                continue
            if self._checked.get(where) != log.epoch:
                unchecked[place] = where
                epochs[place] = mark.epoch
        if unchecked:
            for place, end in (await self._queries.epoch_ends(unchecked, epochs, timeout_ms=ASK_MS)).items():
                log = self._logs[unchecked[place]]
                mark = start.mark(*place)
                assert mark is not None, "only partitions with a mark were asked for"
                is_sound = end is None or end >= mark.offset
                self._logs[unchecked[place]] = LogState(log.start, log.end, log.epoch, None if is_sound else end)
                if is_sound:
                    self._checked[unchecked[place]] = log.epoch

    def _backlog(self, begin: Beginnings, now: Cluster) -> dict[Place, int]:
        backlog: dict[Place, int] = {}
        for name, state in now.items():
            for number, log in state.logs.items():
                end = log.end if self._target is None else min(log.end, self._target[name, number].offset)
                count = end - begin.topics[name].marks[number].offset
                if count > 0:
                    backlog[name, number] = count
        return backlog

    async def _backlog_sizes(
        self, begin: Beginnings, backlog: Mapping[Place, int], limits: Limits
    ) -> dict[Place, int] | None:
        if limits.bytes_max is None:
            return None
        ranges = []
        for (name, number), count in backlog.items():
            rows = begin.topics[name]
            offset = rows.marks[number].offset
            ranges.append(ReadRange(name, rows.topic_id, number, offset, offset + count))
        sizes = await self._queries.sizes(ranges, timeout_ms=ASK_MS)
        if any(place not in sizes for place in backlog):
            raise CallTimeoutError("backlog sizes are unknown: a leader does not answer")
        return sizes

    def log_ends(self) -> dict[str, Any] | None:
        """Return the known log ends as an offset document; None before the first metadata."""
        watch = self._watch
        if watch is None:
            return None
        topics: dict[str, dict[int, Mark]] = {}
        ids: dict[str, str] = {}
        for (name, number), where in dict(watch.places).items():
            end = watch.ends.get(where)
            if end is not None:
                topics.setdefault(name, {})[number] = Mark(end)
                ids[name] = where.topic_id.hex
        return SourceOffset({name: TopicMarks(ids[name], marks) for name, marks in topics.items()}).document()

    # Tasks.

    def tasks(self, start: SourceOffset, end: SourceOffset) -> list[tuple[ReadRange, ...]]:
        return self.client.run(self._tasks(ranges_between(start, end)))

    async def _tasks(self, ranges: list[ReadRange]) -> list[tuple[ReadRange, ...]]:
        return await tasks_of(self._queries, self.options, ranges, self._sizes)

    # Group offsets.

    def report(self, done: SourceOffset) -> None:
        """Commit to the group's coordinator in the background. At the end of a frozen run, wait for it."""
        if not self.options.group or done.is_initial:
            return
        is_last = self._target is not None and not self._left(done)
        if self._commit.is_due(done.topics, is_last=is_last):
            try:
                self.client.run(self._commit_now(done, is_awaited=is_last), timeout_s=LAST_COMMIT_S)
            except TidelogError as error:
                LOGGER.warning("group '%s': the last offsets may not be committed (%s)", self.options.group, error)

    async def _commit_now(self, done: SourceOffset, *, is_awaited: bool) -> None:
        if self._groups is None:
            cluster = self.client.cluster
            self._groups = GroupOffsets(cluster, Coordinators(cluster), self.options.group, Nobody)
        offsets: dict[PartitionId, OffsetAndMetadata] = {}
        names: dict[PartitionId, TopicPartition] = {}
        for name, rows in done.topics.items():
            if self._watch is not None and self._watch.has_topics and name not in self._watch.topics:
                continue  # deleted: the coordinator would wait for it
            for number, mark in rows.marks.items():
                where = partition_id(rows.topic_id, number)
                offsets[where] = OffsetAndMetadata(mark.offset)
                names[where] = TopicPartition(name, number)
        waiting = self._groups.commit(offsets, names, timeout_ms=COMMIT_MS)
        self._commit.began(done.topics, waiting, self.options.group)
        if is_awaited:
            await waiting


class _Commit:
    """Tracks the group's offset commits. Retries a failed one after a pause, also if the query has no new offsets."""

    def __init__(self) -> None:
        self._done: Marks = {}
        self._under_way: Marks | None = None
        self._failed: Marks | None = None
        self._failed_s = 0.0

    def is_due(self, marks: Marks, *, is_last: bool) -> bool:
        if marks == self._done:
            return False
        if is_last:  # wait for a commit in flight as well, by sending another behind it
            return True
        if marks == self._under_way:
            return False
        return marks != self._failed or time.monotonic() >= self._failed_s + COMMIT_AGAIN_S

    def began(self, marks: Marks, waiting: asyncio.Future[None], group: str) -> None:
        """Register a commit in flight. Runs on the IO loop."""
        self._under_way = marks

        def ended(_: asyncio.Future[None]) -> None:
            if self._under_way is marks:
                self._under_way = None
            if waiting.cancelled():
                return
            error = waiting.exception()
            if error is None:
                self._done, self._failed = marks, None
                return
            if self._failed is None:
                LOGGER.warning("group '%s': offsets are not committed (%s)", group, error)
            self._failed, self._failed_s = marks, time.monotonic()

        waiting.add_done_callback(ended)


# Shared with batch reads.


async def tasks_of(
    queries: MetadataQueries, options: SourceOptions, ranges: list[ReadRange], known: dict[Place, float]
) -> list[tuple[ReadRange, ...]]:
    """Split the ranges into tasks of about equal size. `known` caches bytes per offset; ranges that are small by it are
    not measured again."""
    guess = {
        (one.topic, one.partition): known[one.topic, one.partition] * one.count
        for one in ranges
        if (one.topic, one.partition) in known
    }
    sizes = {place: int(size) for place, size in guess.items()}
    if ranges and (len(guess) < len(ranges) or sum(guess.values()) > options.target_bytes / 2):
        measured = await queries.sizes(ranges, timeout_ms=ASK_MS)
        counts = {(one.topic, one.partition): one.count for one in ranges}
        known |= {place: size / counts[place] for place, size in measured.items()}
        sizes |= measured
    return plan_tasks(
        ranges,
        sizes,
        leaders=queries.leaders(ranges),
        target_bytes=options.target_bytes,
        tasks_min=options.tasks_min,
        records_max=options.records_max,
    )


async def there(queries: MetadataQueries, options: SourceOptions) -> dict[Place, PartitionId]:
    """Return the partitions to read. Raises OptionError for a named topic that does not exist."""
    topics = await queries.topics()
    missing = [name for name in options.subscription.names if name not in topics]
    if missing:
        option = "assign" if options.subscription.assigned else "subscribe"
        raise OptionError(f"{option}: {UnknownTopicError(missing[0])}")
    return queries.places(topics)


async def resolve(
    queries: MetadataQueries, options: SourceOptions, bound: Bound, *, lost: object = None
) -> dict[str, TopicMarks]:
    """Resolve the bound to an offset for every partition to read."""
    places = await there(queries, options)
    _check_named(bound, places)
    numbers = {place: bound.places.get(place[0], {}).get(place[1], bound.number) for place in places}
    offsets: dict[Place, FoundOffset] = {}
    by_word: dict[int, dict[Place, PartitionId]] = {}
    times: dict[Place, int] = {}
    for place, number in numbers.items():
        if bound.kind == "times" and number is not None:
            times[place] = number
        elif number is None or number in (EARLIEST, LATEST):
            word = bound.default if number is None else number
            by_word.setdefault(word, {})[place] = places[place]
    for word, some in by_word.items():
        offsets |= await queries.offsets(some, word)
    if times:
        offsets |= await _by_time(queries, options, bound, {place: places[place] for place in times}, times)
    exact = {place: number for place, number in numbers.items() if place not in offsets and number is not None}
    if exact:
        offsets |= await _exact(queries, bound, {place: places[place] for place in exact}, exact, lost)
    topics: dict[str, dict[int, Mark]] = {}
    for (name, number), one in offsets.items():
        topics.setdefault(name, {})[number] = Mark(one.offset, one.leader_epoch)
    ids = {name: where.topic_id.hex for (name, _), where in places.items()}
    return {name: TopicMarks(ids[name], marks) for name, marks in topics.items()}


def _check_named(bound: Bound, places: Iterable[Place]) -> None:
    known = set(places)
    for topic, numbers in bound.places.items():
        for number in numbers:
            if (topic, number) not in known:
                raise OptionError(
                    f"{bound.option}: {topic}-{number} is not subscribed; name only partitions that are read"
                )


async def _by_time(
    queries: MetadataQueries,
    options: SourceOptions,
    bound: Bound,
    places: Mapping[Place, PartitionId],
    times: Mapping[Place, int],
) -> dict[Place, FoundOffset]:
    offsets = await queries.offsets(places, times)
    ends = {place: where for place, where in places.items() if offsets[place].offset < 0}
    if not ends:
        return offsets
    # No record is that recent: use the log end, unless the user wants an error.
    if bound is options.starting and options.fails_without_match:
        (topic, number), when = next((place, times[place]) for place in ends)
        raise OptionError(
            f"{bound.option}: {topic}-{number} has no record at or after {when} ms; "
            "set startingOffsetsByTimestampStrategy='latest' to begin at its end"
        )
    return offsets | await queries.offsets(ends, LATEST)


async def _exact(
    queries: MetadataQueries,
    bound: Bound,
    places: Mapping[Place, PartitionId],
    exact: Mapping[Place, int],
    lost: object,
) -> dict[Place, FoundOffset]:
    """Check the user's offsets against the logs."""
    starts = await queries.offsets(places, EARLIEST)
    ends = await queries.offsets(places, LATEST)
    offsets = {}
    for place, offset in exact.items():
        topic, number = place
        if offset > ends[place].offset:
            raise OptionError(f"{bound.option}: {topic}-{number} ends at offset {ends[place].offset}, before {offset}")
        start = starts[place].offset
        if offset < start:
            if callable(lost):
                lost(ExpiredRangeError(topic, number, offset=offset, start=start))
            offset = start
        offsets[place] = FoundOffset(offset, -1, ends[place].leader_epoch)
    return offsets
