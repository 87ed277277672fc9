"""Sends the markers of ended transactions to the leaders of their partitions, until every partition has its marker.

    PREPARE is committed --> begin --> one entry for each partition --> the queue of the broker that leads it
                                                                         |
        first attempt   up to `CALLS_MAX` calls at once, up to `PARTITIONS_PER_CALL` entries in each
        failed          one call at a time, after a pause that doubles; by the newest metadata, so perhaps to another
                        broker. A change of the metadata ends the pause
        no leader, or no such topic in the metadata: queue `NOWHERE`, the same pauses, no calls
                                                                         |
    every entry is written, or its topic is deleted --> `EndingTransaction.on_written`

Only the controller's word counts for a deletion: this broker's metadata may be old. A broker that never answers holds
up nothing but its own partitions. A call of a broker that is fenced meanwhile ends at once.

Markers are repeated for ever, so this survives lost answers, moved leaders and a restart: the next coordinator begins
with all transactions in PREPARE. What a transaction costs here is bounded by its record: one entry for each partition.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from random import Random
from uuid import UUID

from tidelog.coordinator.transactions.wire import WRITE_MARKERS, decode_written, encode_markers
from tidelog.metadata.image import ClusterImage
from tidelog.model.errors import RequestTimedOutError, TidelogError
from tidelog.model.ids import NodeId, TopicId
from tidelog.replication.transaction_messages import (
    MarkedPartition,
    Marker,
    MarkerReceiver,
    MarkersWritten,
    WriteMarkers,
)
from tidelog.world.slicing import sliced
from tidelog.world.transport import Transport

LOGGER = logging.getLogger(__name__)

PARTITIONS_PER_CALL = 1_000
ENTRIES_PER_SLICE = 500
"""Entries put into queues in one turn of the event loop."""
CALLS_MAX = 4
"""First attempts to one broker at the same time."""
CALL_TIMEOUT_S = 5.0
"""Longer than a leader waits for the replication of markers."""
PAUSE_MIN_S = 0.02
PAUSE_MAX_S = 1.0
NOWHERE = -1
"""The queue of partitions without a leader."""


class EndingTransaction:
    """A transaction whose markers are being written."""

    __slots__ = ("begun_s", "is_over", "left", "number", "on_written", "transactional_id")

    def __init__(
        self, transactional_id: str, number: int, on_written: Callable[[EndingTransaction], None], *, begun_s: float
    ) -> None:
        self.transactional_id = transactional_id
        self.number = number
        self.on_written = on_written
        self.begun_s = begun_s
        """Time of the event loop."""
        self.left = 0
        """Partitions that have no marker yet."""
        self.is_over = False
        """It is complete, or this broker does not coordinate it any more: nothing is sent."""


class _Entry:
    """A marker for one partition."""

    __slots__ = ("ending", "marker", "partition", "topic_id")

    def __init__(self, ending: EndingTransaction, marker: Marker, topic_id: UUID, partition: int) -> None:
        self.ending = ending
        self.marker = marker
        """Its `partitions` are not used."""
        self.topic_id = topic_id
        self.partition = partition


def _entries(ending: EndingTransaction, markers: Iterable[Marker]) -> Iterator[_Entry]:
    for marker in markers:
        for marked in marker.partitions:
            yield _Entry(ending, marker, marked.topic_id, marked.partition)


class _BrokerQueue:
    """The entries of partitions that one broker leads."""

    def __init__(self, broker: int) -> None:
        self.broker = broker
        self.fresh: deque[_Entry] = deque()
        self.failed: deque[_Entry] = deque()
        self.calls = 0
        self.timeouts: dict[asyncio.Timeout, None] = {}
        """Of the calls in flight."""
        self.is_retrying = False
        self.failures = 0
        """Rounds of retries in a row without success."""
        self.changed = asyncio.Event()
        """The metadata has changed."""

    def end_calls(self) -> None:
        for timeout in self.timeouts:
            if not timeout.expired():  # else the call is ending already
                timeout.reschedule(asyncio.get_running_loop().time())


class MarkerSender:
    """One for each broker, shared by its shards."""

    def __init__(
        self,
        *,
        transport: Transport,
        receiver: MarkerReceiver,
        image: Callable[[], ClusterImage],
        spawn: Callable[..., asyncio.Task[None]],
        deleted_topics: Callable[[Sequence[TopicId]], Awaitable[list[TopicId]]],
        random: Random,
    ) -> None:
        """`receiver` writes markers to the partitions that this broker leads itself. `spawn(work, name=...)`."""
        self.written = 0
        """Markers that were written, for metrics."""
        self.failures = 0
        """Attempts of one partition that failed, for metrics."""
        self._transport = transport
        self._receiver = receiver
        self._image = image
        self._spawn = spawn
        self._deleted_topics = deleted_topics
        self._random = random
        self._queues: dict[int, _BrokerQueue] = {}
        self._endings: dict[EndingTransaction, None] = {}
        """Those that are not over, the oldest first."""
        self._send_is_due = False
        self._asked: frozenset[UUID] = frozenset()
        """Topics of the question to the controller that waits for its answer."""

    # Transactions.

    def begin(self, ending: EndingTransaction, markers: Iterable[Marker], count: int) -> None:
        """Send these markers until `ending.is_over`. `count` is that of their partitions; with 0 `on_written` is
        called at once."""
        ending.left = count
        self._endings[ending] = None
        entries = _entries(ending, markers)
        if count > ENTRIES_PER_SLICE:
            self._spawn(self._begin_in_slices(ending, entries), name="begin-markers")
            return
        image = self._image()
        for entry in entries:
            self._route(entry, image)
        if not count:
            ending.on_written(ending)

    async def _begin_in_slices(self, ending: EndingTransaction, entries: Iterator[_Entry]) -> None:
        async for entry in sliced(entries, ENTRIES_PER_SLICE):
            if ending.is_over:
                return
            self._route(entry, self._image())

    def end(self, ending: EndingTransaction) -> None:
        """Send nothing more of it."""
        ending.is_over = True
        self._endings.pop(ending, None)

    @property
    def waiting(self) -> int:
        """Partitions that have no marker yet."""
        return sum(ending.left for ending in self._endings)

    @property
    def oldest(self) -> EndingTransaction | None:
        return next(iter(self._endings), None)

    def metadata_changed(self) -> None:
        """Try again by the new metadata; wait no longer for brokers that were fenced."""
        brokers = self._image().brokers
        for queue in self._queues.values():
            queue.changed.set()
            registered = brokers.get(queue.broker)
            if registered is None or not registered.is_live:
                queue.end_calls()

    # Routes.

    def _route(self, entry: _Entry, image: ClusterImage) -> None:
        """Put the entry into the queue of its leader."""
        found = image.partition(entry.topic_id, entry.partition)
        leader = NOWHERE if found is None or found.leader < 0 else found.leader
        queue = self._queues.get(leader)
        if queue is None:
            queue = self._queues[leader] = _BrokerQueue(leader)
        if leader == NOWHERE:
            queue.failed.append(entry)
            self._start_retries(queue)
            return
        queue.fresh.append(entry)
        if not self._send_is_due:
            # At the end of this turn of the event loop: entries of one turn share calls.
            self._send_is_due = True
            asyncio.get_running_loop().call_soon(self._send_all)

    def _send_all(self) -> None:
        self._send_is_due = False
        for queue in list(self._queues.values()):
            self._send_fresh(queue)

    def _send_fresh(self, queue: _BrokerQueue) -> None:
        while queue.fresh and queue.calls < CALLS_MAX:
            entries = self._take(queue, queue.fresh, PARTITIONS_PER_CALL)
            if entries:
                queue.calls += 1
                self._spawn(self._first_attempt(queue, deque(entries)), name=f"markers-{queue.broker}")

    def _take(self, queue: _BrokerQueue, source: deque[_Entry], count: int) -> list[_Entry]:
        """Take entries that this queue's broker still leads; others go to their queues, and those that are over go."""
        image, taken = self._image(), []
        for _ in range(min(count, len(source))):
            entry = source.popleft()
            if entry.ending.is_over:
                continue
            found = image.partition(entry.topic_id, entry.partition)
            if found is not None and found.leader == queue.broker:
                taken.append(entry)
            else:
                self._route(entry, image)
        return taken

    # Calls.

    async def _first_attempt(self, queue: _BrokerQueue, taken: deque[_Entry]) -> None:
        try:
            # The metadata may have changed since the entries were taken: a topic may be gone.
            entries = self._take(queue, taken, len(taken))
            if entries:
                await self._attempt(queue, entries)
        finally:
            queue.calls -= 1
        self._send_fresh(queue)
        self._forget_idle(queue)

    async def _attempt(self, queue: _BrokerQueue, entries: Sequence[_Entry]) -> int:
        """Send the entries; those that fail wait for a retry. Return how many were written."""
        request, order = self._request(entries)
        problem: object = ""
        try:
            reply = await self._call(queue, request)
            codes = [code for row in reply.errors for code in row]
        except TidelogError as error:
            codes, problem = [error.code] * len(order), error
        written = 0
        for entry, code in zip(order, codes, strict=True):
            if code is None:
                written += 1
                self._written(entry)
            elif not entry.ending.is_over:
                problem = problem or code.name
                queue.failed.append(entry)
        self.failures += len(order) - written
        if queue.failed:
            self._report(queue, problem)
            self._start_retries(queue)
        return written

    def _request(self, entries: Sequence[_Entry]) -> tuple[WriteMarkers, list[_Entry]]:
        """Return the request, and the entries in its order."""
        image = self._image()
        by_marker: dict[int, list[_Entry]] = {}
        for entry in entries:
            by_marker.setdefault(id(entry.marker), []).append(entry)
        markers = []
        for group in by_marker.values():
            partitions = []
            for entry in group:
                found = image.partition(entry.topic_id, entry.partition)
                assert found is not None, "it was taken by this image"
                partitions.append(MarkedPartition(entry.topic_id, entry.partition, found.leader_epoch))
            markers.append(replace(group[0].marker, partitions=tuple(partitions)))
        return WriteMarkers(markers=tuple(markers)), [entry for group in by_marker.values() for entry in group]

    async def _call(self, queue: _BrokerQueue, request: WriteMarkers) -> MarkersWritten:
        broker = NodeId(queue.broker)
        try:
            async with asyncio.timeout(CALL_TIMEOUT_S) as timeout:
                queue.timeouts[timeout] = None
                try:
                    if broker == self._transport.me:
                        return await self._receiver.write_markers(request)
                    data = encode_markers(request)
                    call_ms = int(CALL_TIMEOUT_S * 1000)
                    reply = await self._transport.call(broker, WRITE_MARKERS, data, timeout_ms=call_ms)
                    return decode_written(reply, request)
                finally:
                    del queue.timeouts[timeout]
        except TimeoutError:
            raise RequestTimedOutError(f"broker {broker} has not answered, or is fenced") from None

    def _written(self, entry: _Entry) -> None:
        ending = entry.ending
        if ending.is_over:
            return
        self.written += 1
        ending.left -= 1
        assert ending.left >= 0, "each entry is written once"
        if ending.left == 0:
            ending.on_written(ending)

    def _report(self, queue: _BrokerQueue, problem: object) -> None:
        if queue.failures & (queue.failures - 1) == 0:  # less and less often
            where = "without a leader" if queue.broker == NOWHERE else f"of broker {queue.broker}"
            LOGGER.info("%d markers of partitions %s wait: %s", len(queue.failed), where, problem)

    # Retries.

    def _start_retries(self, queue: _BrokerQueue) -> None:
        if not queue.is_retrying:
            queue.is_retrying = True
            self._spawn(self._retry(queue), name=f"markers-again-{queue.broker}")

    async def _retry(self, queue: _BrokerQueue) -> None:
        while queue.failed:
            await self._pause(queue)
            has_progress = await self._retry_round(queue)
            queue.failures = 0 if has_progress else queue.failures + 1
        queue.is_retrying, queue.failures = False, 0
        self._forget_idle(queue)

    async def _retry_round(self, queue: _BrokerQueue) -> bool:
        """Try each entry that has failed before once; return whether one was written, or has another leader now."""
        left, has_progress = len(queue.failed), False
        while left > 0:
            count = min(left, PARTITIONS_PER_CALL)
            left -= count
            if queue.broker == NOWHERE:
                has_progress |= self._find_leaders(queue, count)
                await asyncio.sleep(0)
                continue
            entries = self._take(queue, queue.failed, count)
            has_progress |= len(entries) < count
            if entries:
                written = await self._attempt(queue, entries)
                has_progress |= written > 0
                if not written:
                    break  # probably a broker that does not answer: pause
        return has_progress

    async def _pause(self, queue: _BrokerQueue) -> None:
        pause_s = min(PAUSE_MIN_S * 2 ** min(queue.failures, 10), PAUSE_MAX_S)
        await asyncio.sleep(self._random.uniform(PAUSE_MIN_S / 2, PAUSE_MIN_S))
        queue.changed.clear()
        if pause_s > PAUSE_MIN_S:
            with suppress(TimeoutError):
                async with asyncio.timeout(self._random.uniform(pause_s / 2, pause_s)):
                    await queue.changed.wait()

    def _find_leaders(self, queue: _BrokerQueue, count: int) -> bool:
        image, has_progress = self._image(), False
        unknown: set[UUID] = set()
        for _ in range(min(count, len(queue.failed))):  # `_drop_deleted` may have taken some in between
            entry = queue.failed.popleft()
            if entry.ending.is_over:
                continue
            found = image.partition(entry.topic_id, entry.partition)
            if found is not None and found.leader >= 0:
                has_progress = True
                self._route(entry, image)
                continue
            queue.failed.append(entry)
            if entry.topic_id not in image.topics:
                unknown.add(entry.topic_id)
        if unknown and not self._asked:
            self._asked = frozenset(unknown)
            self._spawn(self._drop_deleted(queue, sorted(unknown, key=lambda topic: topic.int)), name="marker-topics")
        return has_progress

    async def _drop_deleted(self, queue: _BrokerQueue, unknown: Sequence[UUID]) -> None:
        """Ask the controller which of these topics are deleted: their markers have no place any more."""
        try:
            deleted = {UUID(int=topic.int) for topic in await self._deleted_topics([TopicId(each) for each in unknown])}
        except TidelogError as error:
            LOGGER.info("cannot ask which topics are deleted: %s", error)
            deleted = set()
        finally:
            self._asked = frozenset()
        left = len(queue.failed)
        while left > 0 and deleted:
            for _ in range(min(left, PARTITIONS_PER_CALL, len(queue.failed))):
                entry = queue.failed.popleft()
                if entry.topic_id in deleted:
                    self._written(entry)
                else:
                    queue.failed.append(entry)
            left -= PARTITIONS_PER_CALL
            await asyncio.sleep(0)

    def _forget_idle(self, queue: _BrokerQueue) -> None:
        """A broker that was removed leaves nothing behind."""
        if not (queue.fresh or queue.failed or queue.calls or queue.is_retrying):
            self._queues.pop(queue.broker, None)
