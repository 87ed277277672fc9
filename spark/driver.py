"""`Driver`: the side of a streaming query that decides what a batch reads. It lives in the process of Spark's driver.

    initial(), freeze()         where the query begins; where a run with `Trigger.AvailableNow` ends
    following(start) -> end     the next batch; None: nothing new. Without a question to any broker while that is so
    left(start)                 what such a run has still to read: with "nothing new" Spark would take it to be over
    report(start)               the group's offsets: `start` is what the query has done

Broker trouble that may pass is told as `TidelogError`s that are retriable, and the caller says "nothing new" for as
long as its patience lasts. Losses are `DataLossError`s, or logged where the user has chosen to go on.
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
from tidelog.spark.access import Access, access
from tidelog.spark.admission import Limits, admitted, is_due
from tidelog.spark.errors import DataLossError, ExpiredRangeError, TruncationError
from tidelog.spark.facts import Facts, Place, partition_id
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
"""How long a partition without a leader holds up the others of the first batch."""
STARTS_S = 5.0
"""How old it may be what is known of where a log begins; who reads finds out anyway."""
ASK_MS = 5_000
"""Of one question: a query that has nothing to read is asked again soon."""
COMMIT_MS = 10_000
LAST_COMMIT_S = 5.0
COMMIT_AGAIN_S = 5.0
"""After a commit that has failed; the next batch commits anyway."""


class Driver:
    """Its methods wait, and are called from one thread."""

    def __init__(self, options: SourceOptions) -> None:
        self.options = options
        self.access: Access = access(options)
        self._facts = Facts(self.access.cluster, options.subscription, is_committed_only=options.is_committed_only)
        self._watch: Watch | None = None
        self._groups: GroupOffsets | None = None
        self._logs: dict[PartitionId, LogState] = {}
        self._starts_s: dict[PartitionId, float] = {}
        self._checked: dict[PartitionId, int] = {}  # the leader's epoch at which a mark was compared with the log
        self._target: dict[Place, Mark] | None = None
        self._target_ids: dict[str, str] = {}
        self._seen: tuple[int, SourceOffset] | None = None  # what was looked at, and had nothing new
        self._begun_s = time.monotonic()
        self._commit = _Commit()
        self._sizes: dict[Place, float] = {}  # bytes of an offset, as far as known

    def close(self) -> None:
        """Streams end; the client is the process's, and stays."""
        watch, self._watch = self._watch, None
        if watch is not None and self.access.is_open:
            self.access.run(watch.close(), timeout_s=READY_S)

    def _lost(self, error: DataLossError) -> None:
        if self.options.fail_on_data_loss:
            raise error
        LOGGER.warning("data loss, passed over as failOnDataLoss=false: %s", error)

    # Where it begins, and ends.

    def initial(self) -> SourceOffset:
        return self.access.run(self._initial())

    async def _initial(self) -> SourceOffset:
        marks = await resolve(self._facts, self.options, self.options.starting, lost=self._lost)
        return SourceOffset(marks, is_initial=True)

    def freeze(self) -> None:
        """From now on batches end at what is there at this moment, and new topics and partitions are left out."""
        self.access.run(self._freeze())

    async def _freeze(self) -> None:
        topics = await self._facts.topics()
        ends = await self._facts.offsets(self._facts.places(topics), LATEST)
        self._target = {place: Mark(found.offset, found.leader_epoch) for place, found in ends.items()}
        self._target_ids = {name: topic.topic_id.hex for name, topic in topics.items()}

    @property
    def is_frozen(self) -> bool:
        return self._target is not None

    def left(self, start: SourceOffset) -> str:
        """What a frozen run has still to read, for the user; empty if it is done, or has no end."""
        if self.is_frozen and start.is_initial:
            return "where the query begins is not in its checkpoint"
        places = self._left(start)
        if not places:
            return ""
        (topic, number), end = next(iter(places.items()))
        mark = start.mark(topic, number)
        at = "its beginning" if mark is None else f"offset {mark.offset}"
        more = f", and {len(places) - 1} partitions more" if len(places) > 1 else ""
        return f"{topic}-{number} is at {at} of {end.offset}{more}"

    def _left(self, start: SourceOffset) -> dict[Place, Mark]:
        """Ends that a frozen run has not reached. What is gone is not among them: `following` has told of it."""
        found: dict[Place, Mark] = {}
        for place, end in (self._target or {}).items():
            topic_id = self._target_ids[place[0]]
            if self._watch is not None and self._watch.has_looked:
                topic = self._watch.topics.get(place[0])
                if topic is None or topic.topic_id.hex != topic_id:
                    continue
            known = start.topics.get(place[0])
            mark = known.marks.get(place[1]) if known is not None and known.topic_id == topic_id else None
            if end.offset > (0 if mark is None else mark.offset):
                found[place] = end
        return found

    # The next batch.

    def following(self, start: SourceOffset, *, is_unlimited: bool) -> SourceOffset | None:
        watch = self._watch
        if watch is not None and watch.failure is None and self._seen == (watch.version, start):
            return None
        return self.access.run(self._following(start, Limits() if is_unlimited else self.options.limits))

    async def _following(self, start: SourceOffset, limits: Limits) -> SourceOffset | None:
        watch = await self._watching()
        version = watch.version
        if limits.offsets_min is not None and not start.is_initial and self._target is None:
            available = self._told(start)
            if available and not is_due(limits, available, waited_ms=self._waited_ms()):
                return None
        await self._check_gone(start)
        now = await self._now(start)
        begin = beginnings(start, now, self._lost, self.options.subscription.takes)
        backlog = self._backlog(begin, now)
        taken = admitted(backlog, limits, await self._backlog_sizes(begin, backlog, limits))
        ends = {place: begin.topics[place[0]].marks[place[1]].offset + count for place, count in taken.items()}
        found = advanced(start, begin, now, ends)
        if found is None:
            await self._check_target(start)
            # Only what was known before the look: what came since then is looked at by the next one.
            self._seen = (version, start)
        else:
            self._begun_s = time.monotonic()
        return found

    async def _watching(self) -> Watch:
        if self._watch is None:
            self._watch = Watch(
                self.access.cluster,
                self._facts.topics,
                self._facts.places,
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
        if not self._watch.has_looked:
            # That a topic is not there would mean nothing: nobody was asked yet who has answered.
            raise CallTimeoutError("which topics there are is not known yet: the cluster does not answer")
        return self._watch

    def failing_s(self) -> tuple[float, TidelogError] | None:
        """For how long some partition cannot be watched, and why."""
        return None if self._watch is None else self._watch.failing()

    async def _check_gone(self, start: SourceOffset) -> None:
        """A topic that is not among those found is asked for by its name, at another broker: the one that was asked may
        not have heard of it yet."""
        assert self._watch is not None, "a watch is there"
        cluster = self.access.cluster
        for name in start.topics:
            if name in self._watch.topics or not self.options.subscription.takes(name):
                continue
            cluster.ask_another()
            await cluster.refresh(name)
            try:
                await cluster.topic(name)
            except UnknownTopicError:
                continue
            raise CallTimeoutError(f"topic '{name}' is there, but not all brokers have heard of it")

    async def _check_target(self, start: SourceOffset) -> None:
        """An end that the log has lost is given up: it will not be reached. One that a new leader does not know to be
        stored yet will be."""
        asked: dict[Place, PartitionId] = {}
        for name, number in self._left(start):
            where = partition_id(self._target_ids[name], number)
            if where in self._logs:
                asked[name, number] = where
        if not asked:
            return
        assert self._target is not None, "there is something left of it"
        epochs = {place: self._target[place].epoch for place in asked}
        for place, end in (await self._facts.epoch_ends(asked, epochs, timeout_ms=ASK_MS)).items():
            if end is not None and end < self._target[place].offset:
                self._lost(TruncationError(*place, offset=self._target[place].offset, departs=end))
                self._target[place] = Mark(end, self._target[place].epoch)

    def _waited_ms(self) -> int:
        return int((time.monotonic() - self._begun_s) * 1000)

    def _told(self, start: SourceOffset) -> int:
        """Offsets that wait, by what the watch has told; partitions that are new count with all they have."""
        assert self._watch is not None, "a watch is there"
        waiting = 0
        for (topic, number), where in self._watch.places.items():
            mark = start.mark(topic, number)
            waiting += max(0, self._watch.ends.get(where, 0) - (0 if mark is None else mark.offset))
        return waiting

    async def _now(self, start: SourceOffset) -> Cluster:
        """What the leaders say of every partition, asked only where it may have changed."""
        assert self._watch is not None, "a watch is there"
        places = dict(self._watch.places)
        ids = {name: topic.topic_id.hex for name, topic in self._watch.topics.items()}
        if self._target is not None:
            places = {place: where for place, where in places.items() if place in self._target}
            # What came after the freeze is left out; but that the query knows it means that it is there.
            ids = {name: one for name, one in ids.items() if name in self._target_ids or name in start.topics}
        told = self._watch.ends
        asked = {
            place: where
            for place, where in places.items()
            if where in told and (where not in self._logs or self._logs[where].end != told[where])
        }
        if asked:
            for place, found in (await self._facts.offsets(asked, LATEST, timeout_ms=ASK_MS)).items():
                known = self._logs.get(asked[place])
                self._logs[asked[place]] = LogState(known.start if known else 0, found.offset, found.leader_epoch)
        await self._look_at_starts(places, start)
        await self._compare(places, start)
        wanted = set(places.values())
        for gone in [where for where in self._logs if where not in wanted]:
            for table in (self._logs, self._starts_s, self._checked):
                table.pop(gone, None)
        topics: dict[str, dict[int, LogState]] = {name: {} for name in ids}
        for (topic, number), where in places.items():
            if where in self._logs:
                topics[topic][number] = self._logs[where]
        return {name: TopicState(ids[name], logs) for name, logs in topics.items()}

    async def _look_at_starts(self, places: Mapping[Place, PartitionId], start: SourceOffset) -> None:
        """Of those that have something to read."""
        now_s = time.monotonic()
        asked = {}
        for place, where in places.items():
            mark = start.mark(*place)
            log = self._logs.get(where)
            is_read = log is not None and (mark is None or mark.offset < log.end or where not in self._starts_s)
            if is_read and now_s - self._starts_s.get(where, -STARTS_S) >= STARTS_S:
                asked[place] = where
        if asked:
            for place, found in (await self._facts.offsets(asked, EARLIEST, timeout_ms=ASK_MS)).items():
                log = self._logs[asked[place]]
                self._logs[asked[place]] = LogState(found.offset, log.end, log.epoch)
                self._starts_s[asked[place]] = now_s

    async def _compare(self, places: Mapping[Place, PartitionId], start: SourceOffset) -> None:
        """Whether what was read is what the log has, of those that have a new leader since that was looked at."""
        asked: dict[Place, PartitionId] = {}
        epochs: dict[Place, int] = {}
        for place, where in places.items():
            mark, log = start.mark(*place), self._logs.get(where)
            if mark is None or log is None or mark.epoch < 0 or start.topics[place[0]].topic_id != where.topic_id.hex:
                continue
            if self._checked.get(where) != log.epoch:
                asked[place] = where
                epochs[place] = mark.epoch
        if asked:
            for place, end in (await self._facts.epoch_ends(asked, epochs, timeout_ms=ASK_MS)).items():
                log = self._logs[asked[place]]
                mark = start.mark(*place)
                assert mark is not None, "it was asked for"
                is_sound = end is None or end >= mark.offset
                self._logs[asked[place]] = LogState(log.start, log.end, log.epoch, None if is_sound else end)
                if is_sound:
                    self._checked[asked[place]] = log.epoch

    def _backlog(self, begin: Beginnings, now: Cluster) -> dict[Place, int]:
        found: dict[Place, int] = {}
        for name, state in now.items():
            for number, log in state.logs.items():
                end = log.end if self._target is None else min(log.end, self._target[name, number].offset)
                count = end - begin.topics[name].marks[number].offset
                if count > 0:
                    found[name, number] = count
        return found

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
        found = await self._facts.sizes(ranges, timeout_ms=ASK_MS)
        if any(place not in found for place in backlog):
            raise CallTimeoutError("the sizes of what waits are not known: a leader does not answer")
        return found

    def reached(self) -> dict[str, Any] | None:
        """A document of how far the logs reach, as far as is known; None before the first look."""
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
        return self.access.run(self._tasks(ranges_between(start, end)))

    async def _tasks(self, ranges: list[ReadRange]) -> list[tuple[ReadRange, ...]]:
        return await tasks_of(self._facts, self.options, ranges, self._sizes)

    # The group.

    def report(self, done: SourceOffset) -> None:
        """Told to the group's coordinator, in the background; at the end of a run with a target it is waited for."""
        if not self.options.group or done.is_initial:
            return
        is_last = self._target is not None and not self._left(done)
        if self._commit.is_due(done.topics, is_last=is_last):
            try:
                self.access.run(self._commit_now(done, is_awaited=is_last), timeout_s=LAST_COMMIT_S)
            except TidelogError as error:
                LOGGER.warning("group '%s': its last offsets may not be committed (%s)", self.options.group, error)

    async def _commit_now(self, done: SourceOffset, *, is_awaited: bool) -> None:
        if self._groups is None:
            cluster = self.access.cluster
            self._groups = GroupOffsets(cluster, Coordinators(cluster), self.options.group, Nobody)
        offsets: dict[PartitionId, OffsetAndMetadata] = {}
        names: dict[PartitionId, TopicPartition] = {}
        for name, rows in done.topics.items():
            if self._watch is not None and self._watch.has_looked and name not in self._watch.topics:
                continue  # it is gone, and the coordinator would wait for it
            for number, mark in rows.marks.items():
                where = partition_id(rows.topic_id, number)
                offsets[where] = OffsetAndMetadata(mark.offset)
                names[where] = TopicPartition(name, number)
        waiting = self._groups.commit(offsets, names, timeout_ms=COMMIT_MS)
        self._commit.began(done.topics, waiting, self.options.group)
        if is_awaited:
            await waiting


class _Commit:
    """What of the group's offsets is stored, or on its way. One that has failed is made again after a pause, also if
    the query has nothing new to say."""

    def __init__(self) -> None:
        self._done: Marks = {}
        self._under_way: Marks | None = None
        self._failed: Marks | None = None
        self._failed_s = 0.0

    def is_due(self, marks: Marks, *, is_last: bool) -> bool:
        if marks == self._done:
            return False
        if is_last:  # also what is on its way is waited for, by another that goes behind it
            return True
        if marks == self._under_way:
            return False
        return marks != self._failed or time.monotonic() >= self._failed_s + COMMIT_AGAIN_S

    def began(self, marks: Marks, waiting: asyncio.Future[None], group: str) -> None:
        """On the IO loop, as what follows."""
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
                LOGGER.warning("group '%s': its offsets are not committed (%s)", group, error)
            self._failed, self._failed_s = marks, time.monotonic()

        waiting.add_done_callback(ended)


# What batch reads need, too.


async def tasks_of(
    facts: Facts, options: SourceOptions, ranges: list[ReadRange], known: dict[Place, float]
) -> list[tuple[ReadRange, ...]]:
    """Tasks of about one size. `known` are bytes of an offset; what is small by these is not asked for again."""
    guess = {
        (one.topic, one.partition): known[one.topic, one.partition] * one.count
        for one in ranges
        if (one.topic, one.partition) in known
    }
    sizes = {place: int(size) for place, size in guess.items()}
    if ranges and (len(guess) < len(ranges) or sum(guess.values()) > options.target_bytes / 2):
        found = await facts.sizes(ranges, timeout_ms=ASK_MS)
        counts = {(one.topic, one.partition): one.count for one in ranges}
        known |= {place: size / counts[place] for place, size in found.items()}
        sizes |= found
    return plan_tasks(
        ranges,
        sizes,
        leaders=facts.leaders(ranges),
        target_bytes=options.target_bytes,
        tasks_min=options.tasks_min,
        records_max=options.records_max,
    )


async def there(facts: Facts, options: SourceOptions) -> dict[Place, PartitionId]:
    """What is to be read; UnknownTopicError for a topic that is named and not there."""
    topics = await facts.topics()
    missing = [name for name in options.subscription.names if name not in topics]
    if missing:
        option = "assign" if options.subscription.assigned else "subscribe"
        raise OptionError(f"{option}: {UnknownTopicError(missing[0])}")
    return facts.places(topics)


async def resolve(facts: Facts, options: SourceOptions, bound: Bound, *, lost: object = None) -> dict[str, TopicMarks]:
    """The bound as offsets of every partition that is to be read."""
    places = await there(facts, options)
    _check_named(bound, places)
    numbers = {place: bound.places.get(place[0], {}).get(place[1], bound.number) for place in places}
    found: dict[Place, FoundOffset] = {}
    by_word: dict[int, dict[Place, PartitionId]] = {}
    times: dict[Place, int] = {}
    for place, number in numbers.items():
        if bound.kind == "times" and number is not None:
            times[place] = number
        elif number is None or number in (EARLIEST, LATEST):
            word = bound.default if number is None else number
            by_word.setdefault(word, {})[place] = places[place]
    for word, some in by_word.items():
        found |= await facts.offsets(some, word)
    if times:
        found |= await _by_time(facts, options, bound, {place: places[place] for place in times}, times)
    exact = {place: number for place, number in numbers.items() if place not in found and number is not None}
    if exact:
        found |= await _exact(facts, bound, {place: places[place] for place in exact}, exact, lost)
    topics: dict[str, dict[int, Mark]] = {}
    for (name, number), one in found.items():
        topics.setdefault(name, {})[number] = Mark(one.offset, one.leader_epoch)
    ids = {name: where.topic_id.hex for (name, _), where in places.items()}
    return {name: TopicMarks(ids[name], marks) for name, marks in topics.items()}


def _check_named(bound: Bound, places: Iterable[Place]) -> None:
    known = set(places)
    for topic, numbers in bound.places.items():
        for number in numbers:
            if (topic, number) not in known:
                raise OptionError(f"{bound.option}: {topic}-{number} is not among the partitions that are read")


async def _by_time(
    facts: Facts,
    options: SourceOptions,
    bound: Bound,
    places: Mapping[Place, PartitionId],
    times: Mapping[Place, int],
) -> dict[Place, FoundOffset]:
    found = await facts.offsets(places, times)
    ends = {place: where for place, where in places.items() if found[place].offset < 0}
    if not ends:
        return found
    # No record is as young: the end of the log, unless the user wants to hear of it.
    if bound is options.starting and options.fails_without_match:
        (topic, number), when = next((place, times[place]) for place in ends)
        raise OptionError(
            f"{bound.option}: {topic}-{number} has no record at or after {when} ms; "
            "startingOffsetsByTimestampStrategy='latest' begins at its end then"
        )
    return found | await facts.offsets(ends, LATEST)


async def _exact(
    facts: Facts, bound: Bound, places: Mapping[Place, PartitionId], exact: Mapping[Place, int], lost: object
) -> dict[Place, FoundOffset]:
    """Offsets that the user has given lie within the logs, or he hears of it."""
    starts = await facts.offsets(places, EARLIEST)
    ends = await facts.offsets(places, LATEST)
    found = {}
    for place, offset in exact.items():
        topic, number = place
        if offset > ends[place].offset:
            raise OptionError(f"{bound.option}: {topic}-{number} ends at offset {ends[place].offset}, before {offset}")
        start = starts[place].offset
        if offset < start:
            if callable(lost):
                lost(ExpiredRangeError(topic, number, offset=offset, start=start))
            offset = start
        found[place] = FoundOffset(offset, -1, ends[place].leader_epoch)
    return found
