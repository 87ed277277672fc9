"""The producer's core: parcels from the accumulator to the writer, and how they ended back to whoever sent them.

On one event loop, that of the IO thread (or of a test). `look` runs when the accumulator wakes it, when the linger of
an open parcel is over, and after each answer:

    open, its linger over      sealed, if fewer than two batches of the partition are on their way; else it goes on
                               filling until one is answered (so a busy producer sends large batches without waiting)
    sealed                     encoded and handed to the writer, in order
    answered                   told in the order of the partition: a parcel waits for those before it

Every parcel ends once, after `delivery_timeout_ms` from its first record at the latest; `close` ends what is left.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from tidelog.client.accumulator import Accumulator, TopicPlace
from tidelog.client.cluster import ClusterClient
from tidelog.client.errors import NoClusterError, WriterClosedError
from tidelog.client.hot import Delivery, Parcel, split_rows
from tidelog.client.metadata import TopicInfo
from tidelog.client.names import ProducerOptions
from tidelog.client.tasks import Ending
from tidelog.client.writer import Acknowledged, Writer, WriterConfig
from tidelog.log.batch import encode_columns
from tidelog.model.errors import TidelogError, TransportError, UnknownTopicOrPartitionError

LOGGER = logging.getLogger(__name__)

PARTIAL_MAX = 2
"""So many batches of a partition may be on their way when one that is not full follows them."""
SLICE = 8
"""Parcels that are encoded before other work of the loop gets its turn."""

METRICS = (
    "records_stored",
    "records_failed",
    "records_waiting",
    "batches",
    "batch_bytes",
    "batch_bytes_mean",
    "answer_ms_mean",
    "retries",
    "buffer_bytes",
    "buffer_bytes_max",
    "brokers",
    "topics",
)

Tell = Callable[[Callable[[], None]], None]


@dataclass(slots=True)
class Track:
    """The parcels of one partition that are on their way, in order. There is none for an idle partition."""

    parcels: deque[Parcel] = field(default_factory=deque)
    due: Parcel | None = None
    """Open, its linger over, and held back because enough are on their way."""


@dataclass(slots=True)
class Counts:
    stored: int = 0
    failed: int = 0
    batches: int = 0
    batch_bytes: int = 0
    answer_s: float = 0.0
    """From the first record of a batch to its answer, of all together."""


class ProducerCore:
    def __init__(self, cluster: ClusterClient, options: ProducerOptions, accumulator: Accumulator, tell: Tell) -> None:
        self.cluster = cluster
        self.options = options
        self.accumulator = accumulator
        self.counts = Counts()
        self._tell = tell
        self._acknowledged: list[Callable[..., object]] = []
        for interceptor in options.interceptors:
            if (method := getattr(interceptor, "on_acknowledgement", None)) is not None:
                self._acknowledged.append(method)
        self.writer = Writer(
            cluster,
            WriterConfig(
                acks=options.acks,
                delivery_timeout_ms=options.delivery_timeout_ms,
                request_timeout_ms=options.request_timeout_ms,
                in_flight_max=options.max_in_flight,
            ),
        )
        self.locate_error: TidelogError | None = None
        """Why the last attempt to find a topic was in vain."""
        self._tracks: dict[tuple[str, int], Track] = {}
        self._infos: dict[str, TopicInfo] = {}
        self._seen = (-1, "")
        self._timer: asyncio.TimerHandle | None = None
        self._is_slicing = False
        self._is_closed = False
        self._ending = Ending()
        self._refreshing = asyncio.get_running_loop().create_task(self._keep_fresh())

    # Topics.

    async def locate(self, topic: str) -> None:
        """The topic's place in the accumulator, from now on kept up to date. Raises if there is no such topic, and at
        once if no cluster was ever met; otherwise it asks as long as its caller waits."""
        backoff = self.cluster.backoff()
        while not self._is_closed:
            try:
                self._know(await self.cluster.topic(topic, may_create=True))
                return
            except TransportError as error:
                self.locate_error = error
                if isinstance(error, NoClusterError) and not self.cluster.answered:
                    raise
            await asyncio.sleep(backoff.next_s())

    async def grow(self, topic: str, partition: int) -> None:
        """The topic may have got this partition just now: look for it, for a moment."""
        loop = asyncio.get_running_loop()
        end_s = loop.time() + self.cluster.config.unknown_topic_wait_ms / 1000
        backoff = self.cluster.backoff()
        while True:
            await self.cluster.refresh(topic)
            self._update()
            info = self._infos.get(topic)
            if info is None or partition < len(info.partitions) or loop.time() >= end_s:
                return
            await asyncio.sleep(backoff.next_s())

    def _know(self, info: TopicInfo) -> None:
        if self._is_closed:
            return
        self._infos[info.name] = info
        leads = [self.cluster.leader(place) for place in info.partitions]
        available = tuple(number for number, one in enumerate(leads) if one is not None and one.node >= 0)
        self.accumulator.set_place(info.name, len(info.partitions), available)

    def _update(self) -> None:
        """Places as the newest metadata has them."""
        view = self.cluster.view
        seen = (view.offset, view.cluster_id)
        if seen == self._seen:
            return
        self._seen = seen
        for name in list(self._infos):
            info = view.topics.get(name)
            if info is not None:
                self._know(info)

    async def _keep_fresh(self) -> None:
        while True:
            await asyncio.sleep(self.options.metadata_max_age_ms / 1000)
            if self._infos:
                error = await self.cluster.refresh_quietly(*self._infos)
                if error is not None:
                    LOGGER.info("metadata was not refreshed: %s", error)
                else:
                    self._forget_gone()
                self._update()

    def _forget_gone(self) -> None:
        """Topics that the cluster has no more, once nothing of them is on its way: programs make topics for a day."""
        for name in [name for name in self._infos if name not in self.cluster.view.topics]:
            if self.accumulator.forget_place(name):
                del self._infos[name]
        self.writer.forget_gone()

    # Out.

    def look(self) -> None:
        accumulator = self.accumulator
        if self._is_closed:
            return
        accumulator.looked()
        self._update()
        now_s = accumulator.now_s()
        has_more_room = False
        with accumulator.lock:
            if accumulator.is_pressed:
                accumulator.is_pressed = False
                before = accumulator.reserved
                accumulator.seal_all()
                has_more_room = accumulator.reserved < before
            else:
                self._take_due(now_s)
        if has_more_room:
            accumulator.rouse()
        self._launch_some()
        self._set_timer(now_s)

    def _take_due(self, now_s: float) -> None:
        """Open parcels whose linger is over, under the lock."""
        linger_s = self.options.linger_ms / 1000
        opened = self.accumulator.opened
        while opened and (opened[0].is_sealed or opened[0].opened_s + linger_s <= now_s):
            parcel = opened.popleft()
            if parcel.is_sealed:
                continue
            track = self._track(parcel)
            if len(track.parcels) < PARTIAL_MAX:
                self.accumulator.seal(parcel)
            else:
                track.due = parcel

    def _seal_due(self, track: Track) -> None:
        """Under the lock."""
        parcel, track.due = track.due, None
        if parcel is not None and not parcel.is_sealed:
            self.accumulator.seal(parcel)

    def _track(self, parcel: Parcel) -> Track:
        return self._tracks.setdefault((parcel.topic, parcel.partition), Track())

    def _set_timer(self, now_s: float) -> None:
        opened = self.accumulator.opened
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if opened:
            wait_s = opened[0].opened_s + self.options.linger_ms / 1000 - now_s
            self._timer = asyncio.get_running_loop().call_later(max(0.0, wait_s), self.look)

    def _launch_some(self) -> None:
        if self._is_slicing:
            return
        sealed = self.accumulator.sealed
        for _ in range(SLICE):
            if not sealed:
                return
            self._launch(sealed.popleft())
        if sealed:
            self._is_slicing = True
            asyncio.get_running_loop().call_soon(self._go_on)

    def _go_on(self) -> None:
        self._is_slicing = False
        if not self._is_closed:
            self._launch_some()

    def _launch(self, parcel: Parcel) -> None:
        track = self._track(parcel)
        track.parcels.append(parcel)
        try:
            data = self._encoded(parcel)
            info = self._infos.get(parcel.topic)
            if info is None:
                raise UnknownTopicOrPartitionError(f"there is no topic '{parcel.topic}'")
            deadline_s = parcel.opened_s + self.options.delivery_timeout_ms / 1000
            future = self.writer.put(info, parcel.partition, data, count=parcel.count, deadline_s=deadline_s)
        except (TidelogError, ValueError, OverflowError) as error:
            # Told later: whoever sent it may be in `send` on this very loop.
            asyncio.get_running_loop().call_soon(self._ended, parcel, error)
            return
        self.counts.batches += 1
        self.counts.batch_bytes += len(data)
        future.add_done_callback(partial(self._answered, parcel))

    def _encoded(self, parcel: Parcel) -> bytes:
        """Its bytes; of its rows only the timestamps are kept."""
        if parcel.data is not None:
            data, parcel.data = parcel.data, None
            return data
        rows, parcel.rows = parcel.rows, []
        stamps, keys, values, headers = split_rows(rows)
        parcel.timestamps = stamps
        codec, level = self.options.compression, self.options.compression_level
        return encode_columns(stamps, keys, values, headers, codec=codec, level=level)

    # Answers.

    def _answered(self, parcel: Parcel, future: asyncio.Future[Acknowledged]) -> None:
        if future.cancelled():
            self._ended(parcel, WriterClosedError("the producer was closed before this was stored"))
            return
        self._ended(parcel, future.exception() or future.result())

    def _ended(self, parcel: Parcel, outcome: Acknowledged | BaseException) -> None:
        """Tell it, and what waited behind it; but not before those in front of it."""
        parcel.outcome = outcome
        key = (parcel.topic, parcel.partition)
        track = self._tracks.get(key)
        if track is None:
            return
        while track.parcels and track.parcels[0].outcome is not None:
            self._finish(track.parcels.popleft())
        if track.due is not None and len(track.parcels) < PARTIAL_MAX and not self._is_closed:
            with self.accumulator.lock:
                self._seal_due(track)
            self._launch_some()
        if not track.parcels and track.due is None:
            del self._tracks[key]

    def _finish(self, parcel: Parcel) -> None:
        outcome, parcel.outcome = parcel.outcome, None
        if isinstance(outcome, Acknowledged):
            parcel.base_offset, parcel.append_time_ms = outcome.base_offset, outcome.append_time_ms
            self.counts.stored += parcel.count
        else:
            parcel.error = outcome
            parcel.rows = []
            self.counts.failed += parcel.count
        self.counts.answer_s += max(0.0, self.accumulator.now_s() - parcel.opened_s)
        size = parcel.size
        for waiter in self.accumulator.finish(parcel):
            waiter()
        if parcel.callbacks is None and not self._acknowledged:
            self.accumulator.free(size)
            return

        def tell() -> None:
            # Its bytes are free only now: callbacks that are not yet run are bounded by the memory, too.
            self.accumulator.free(size)
            tell_all(parcel, self._acknowledged)

        self._tell(tell)

    # The end.

    async def close(self) -> None:
        """What is not answered yet fails. `flush` before, if it shall not."""
        await self._ending.run(self._close)

    async def _close(self) -> None:
        self._is_closed = True
        if self._timer is not None:
            self._timer.cancel()
        self._refreshing.cancel()
        self.accumulator.close()
        with self.accumulator.lock:
            self.accumulator.seal_all()
        try:
            await self.writer.close(is_flushed=False)
            await asyncio.sleep(0)  # the writer's answers are told
        finally:
            self._fail_all()
        await self.cluster.close()

    def _fail_all(self) -> None:
        while self.accumulator.sealed:
            parcel = self.accumulator.sealed.popleft()
            self._track(parcel).parcels.append(parcel)
            self._ended(parcel, WriterClosedError("the producer was closed before this was sent"))
        for track in list(self._tracks.values()):
            for parcel in list(track.parcels):
                if parcel.outcome is None:
                    parcel.outcome = WriterClosedError("the producer was closed before this was stored", was_sent=True)
            while track.parcels:
                self._finish(track.parcels.popleft())
        self._tracks.clear()

    def metrics(self) -> dict[str, Any]:
        """By the names of `METRICS`."""
        counts = self.counts
        answered = max(1, counts.batches)
        figures = (
            counts.stored,
            counts.failed,
            sum(max(one.count, len(one.rows)) for one in list(self.accumulator.unfinished)),
            counts.batches,
            counts.batch_bytes,
            counts.batch_bytes / answered,
            counts.answer_s * 1000 / answered,
            self.writer.retries,
            self.accumulator.reserved,
            self.accumulator.buffer_memory,
            len(self.cluster.view.brokers),
            len(self._infos),
        )
        return dict(zip(METRICS, figures, strict=True))


def tell_all(parcel: Parcel, acknowledged: list[Callable[..., object]]) -> None:
    """The callbacks of a parcel that is done, by the order of its records; what one raises is logged."""
    for index in range(parcel.count if acknowledged else 0):
        metadata = parcel.metadata(index)
        for method in acknowledged:
            try:
                method(metadata, parcel.error)
            except Exception:
                LOGGER.exception("an interceptor failed: on_acknowledgement of %s", metadata)
    for index, told, callback in sorted(parcel.callbacks or (), key=_index):
        try:
            if told is not None:
                told(parcel.error, parcel.metadata(index))
            elif callback is not None:
                callback(Delivery(parcel, index))
        except BaseException:  # sys.exit there would keep those behind it from hearing
            LOGGER.exception("a delivery callback failed for %s-%d", parcel.topic, parcel.partition)


def _index(entry: tuple[int, Any, Any]) -> int:
    return entry[0]


def place_of(accumulator: Accumulator, topic: str) -> TopicPlace | None:
    found = accumulator.places.get(topic)
    assert found is None or isinstance(found, TopicPlace)
    return found
