"""The producer's core on the IO loop: moves batches from the accumulator to the sender, and reports their outcome.

`run` is called when the accumulator wakes it, when the linger of an open batch is over, and after responses:

    open, its linger over      sealed, if fewer than `PARTIAL_MAX` batches of the partition are pending; else it goes on
                               filling until one is answered, so that a busy producer sends large batches without
                               waiting
    sealed                     encoded and given to the sender, in order
    ended                      reported in the order of the partition

Every batch ends once, `delivery_timeout_ms` after its first record at the latest; `close` ends the rest.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tidelog.client.bridge import run_logged, wait_async
from tidelog.client.cluster import ClusterClient
from tidelog.client.errors import (
    BufferFullError,
    CallTimeoutError,
    FlushTimeoutError,
    NoClusterError,
    ProducerClosedError,
)
from tidelog.client.metadata import TopicInfo
from tidelog.client.option_table import ProducerConfig
from tidelog.client.producer.accumulator import Accumulator
from tidelog.client.producer.fast_path import EMPTY, Delivery, ProducerBatch, split_rows
from tidelog.client.producer.partition_queue import Stored
from tidelog.client.producer.sender import Queue, Sender, SenderConfig
from tidelog.client.producer.transactions import Transactions
from tidelog.client.tasks import Ending
from tidelog.log.batch import encode_columns_unsealed
from tidelog.model.errors import TidelogError, TransportError, UnknownTopicOrPartitionError

LOGGER = logging.getLogger(__name__)

PARTIAL_MAX = 2
"""Pending batches of a partition behind which a batch that is not full may go."""
BATCHES_PER_TURN = 8
"""Batches that are encoded before other work of the loop runs."""

METRICS = (
    "records_stored",
    "records_failed",
    "records_buffered",
    "batches",
    "batch_bytes",
    "batch_bytes_mean",
    "ack_latency_ms_mean",
    "retries",
    "buffer_bytes",
    "buffer_bytes_max",
    "brokers",
    "topics",
)

RunCallbacks = Callable[[Callable[[], None]], None]


@dataclass(slots=True)
class Counts:
    stored: int = 0
    failed: int = 0
    batches: int = 0
    batch_bytes: int = 0
    answer_s: float = 0.0
    """From the first record of a batch to its outcome, summed."""


class ProducerCore:
    """`run_callbacks` runs user code on the thread, or the loop, of the callbacks, in order."""

    def __init__(
        self, cluster: ClusterClient, config: ProducerConfig, accumulator: Accumulator, run_callbacks: RunCallbacks
    ) -> None:
        self.cluster = cluster
        self.config = config
        self.accumulator = accumulator
        self.counts = Counts()
        self._run_callbacks = run_callbacks
        self._is_finishing = False
        self._callbacks_started = self._callbacks_run = 0
        self._interceptors = acknowledgement_interceptors(config)
        self.sender = Sender(
            cluster,
            SenderConfig(
                acks=config.acks, request_timeout_ms=config.request_timeout_ms, in_flight_max=config.max_in_flight
            ),
            self._report,
        )
        self.transactions = Transactions(
            *(cluster, config, self.sender, accumulator),
            flush=lambda: self.flush(waits_for_callbacks=False),
            drop=self._fail_pending,
            batches=lambda: self.counts.batches,
        )
        self._metadata_error: TidelogError | None = None
        self._due: dict[tuple[str, int], ProducerBatch] = {}
        """Open batches whose linger is over, behind `PARTIAL_MAX` pending ones."""
        self._topics: dict[str, TopicInfo] = {}
        self._seen_metadata = (-1, "")
        self._timer: asyncio.TimerHandle | None = None
        self._has_next_turn = False
        self._is_closed = False
        self._ending = Ending()
        self._refreshing = asyncio.get_running_loop().create_task(self._refresh_metadata())

    # Topics.

    async def ready(self, topic: str, partition: int | None, size: int, timeout: float) -> None:
        """Wait until the topic and the partition are known, or, if they are, until there is memory for `size` bytes.
        Raises BufferFullError, CallTimeoutError or NoClusterError."""
        buffers = self.accumulator.topics.get(topic)
        try:
            async with asyncio.timeout(max(0.0, timeout)):
                if buffers is None:
                    await self._locate(topic)
                elif partition is not None and partition >= buffers.count:
                    await self._find_partition(topic, partition)
                else:
                    await wait_async(lambda signal: self.accumulator.on_free(signal, size), self.accumulator.off_free)
        except TimeoutError:
            if buffers is None or (partition is not None and partition >= buffers.count):
                raise self._no_metadata(topic) from None
            raise self.buffer_full(topic, size) from None

    def buffer_full(self, topic: str, size: int) -> BufferFullError:
        return BufferFullError(
            f"no memory for {size} bytes to '{topic}' in {self.config.max_block_ms} ms: {self.accumulator.reserved} of "
            f"buffer_memory={self.accumulator.buffer_memory} bytes are not acknowledged"
        )

    def _no_metadata(self, topic: str) -> CallTimeoutError:
        error = self._metadata_error or self.cluster.last_error
        cause = ("" if error is None else f": {error}") + self.cluster.controller_hint()
        return CallTimeoutError(f"no metadata of '{topic}' in {self.config.max_block_ms} ms (max_block_ms){cause}")

    async def _locate(self, topic: str) -> None:
        """Raises if the topic does not exist, and at once if no cluster was ever reached; else retries."""
        backoff = self.cluster.backoff()
        while not self._is_closed:
            try:
                self._learn(await self.cluster.topic(topic, may_create=True))
                return
            except TransportError as error:
                self._metadata_error = error
                if isinstance(error, NoClusterError) and not self.cluster.answered:
                    raise
            await asyncio.sleep(backoff.next_s())

    async def _find_partition(self, topic: str, partition: int) -> None:
        """The topic may have this partition by now. Raises UnknownTopicOrPartitionError if not, after a short wait."""
        loop = asyncio.get_running_loop()
        end_s = loop.time() + self.cluster.config.unknown_topic_wait_ms / 1000
        backoff = self.cluster.backoff()
        while True:
            await self.cluster.refresh(topic)
            self._update_topics()
            info = self._topics.get(topic)
            if info is None or partition < len(info.partitions):
                return
            if loop.time() >= end_s:
                raise UnknownTopicOrPartitionError(
                    f"topic '{topic}' has {len(info.partitions)} partitions; there is no partition {partition}"
                )
            await asyncio.sleep(backoff.next_s())

    def _learn(self, info: TopicInfo) -> None:
        if self._is_closed:
            return
        self._topics[info.name] = info
        leaders = [self.cluster.leader(partition) for partition in info.partitions]
        available = tuple(index for index, leader in enumerate(leaders) if leader is not None and leader.node >= 0)
        self.accumulator.set_topic(info.name, len(info.partitions), available)

    def _update_topics(self) -> None:
        view = self.cluster.view
        seen = (view.offset, view.cluster_id)
        if seen == self._seen_metadata:
            return
        self._seen_metadata = seen
        for name in list(self._topics):
            info = view.topics.get(name)
            if info is not None:
                self._learn(info)

    async def _refresh_metadata(self) -> None:
        while True:
            await asyncio.sleep(self.config.metadata_max_age_ms / 1000)
            if self._topics:
                error = await self.cluster.refresh_quietly(*self._topics)
                if error is not None:
                    LOGGER.info("metadata refresh failed: %s", error)
                else:
                    self._forget_deleted()
                self._update_topics()

    def _forget_deleted(self) -> None:
        """Drop topics that do not exist any more and have nothing pending: programs create topics for a day."""
        for name in [name for name in self._topics if name not in self.cluster.view.topics]:
            if self.accumulator.forget_topic(name):
                del self._topics[name]
        self.sender.forget_deleted()

    async def locate(self, topic: str) -> None:
        """Wait until the partitions of the topic are known."""
        if topic not in self.accumulator.topics:
            await self._locate(topic)
        if topic not in self.accumulator.topics:
            raise ProducerClosedError("this producer is closed")

    # Batches.

    def run(self) -> None:
        accumulator = self.accumulator
        if self._is_closed:
            return
        accumulator.is_woken = False  # first: a later change wakes it again
        self._update_topics()
        now_s = accumulator.now_s()
        has_freed = False
        with accumulator.lock:
            if accumulator.is_memory_short:
                accumulator.is_memory_short = False
                before = accumulator.reserved
                accumulator.seal_all()
                has_freed = accumulator.reserved < before
            else:
                self._seal_due(now_s)
        if has_freed:
            accumulator.notify_free()
        self._send_sealed()
        self._set_timer(now_s)

    def _seal_due(self, now_s: float) -> None:
        """Seal open batches whose linger is over. Under the lock."""
        linger_s = self.config.linger_ms / 1000
        opened = self.accumulator.opened
        while opened and (opened[0].is_sealed or opened[0].opened_s + linger_s <= now_s):
            batch = opened.popleft()
            if batch.is_sealed:
                continue
            if self._is_busy(batch):
                self._due[batch.topic, batch.partition] = batch
            else:
                self.accumulator.seal(batch)

    def _is_busy(self, batch: ProducerBatch) -> bool:
        queue = self._queue(batch)
        return queue is not None and len(queue.unreported) >= PARTIAL_MAX

    def _queue(self, batch: ProducerBatch) -> Queue | None:
        info = self._topics.get(batch.topic)
        if info is None or batch.partition >= len(info.partitions):
            return None
        return self.sender.queues.get(info.partitions[batch.partition])

    def _set_timer(self, now_s: float) -> None:
        opened = self.accumulator.opened
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if opened:
            wait_s = opened[0].opened_s + self.config.linger_ms / 1000 - now_s
            self._timer = asyncio.get_running_loop().call_later(max(0.0, wait_s), self.run)

    def _send_sealed(self) -> None:
        if self._has_next_turn:
            return
        sealed = self.accumulator.sealed
        for _ in range(BATCHES_PER_TURN):
            if not sealed:
                return
            self._send(sealed.popleft())
        if sealed:
            self._has_next_turn = True
            asyncio.get_running_loop().call_soon(self._take_turn)

    def _take_turn(self) -> None:
        self._has_next_turn = False
        if not self._is_closed:
            self._send_sealed()

    def _send(self, batch: ProducerBatch) -> None:
        batch.deadline_s = batch.opened_s + self.config.delivery_timeout_ms / 1000
        try:
            if batch.outcome is None:
                if not batch.data:
                    self._encode(batch)
                self.counts.batches += 1
                self.counts.batch_bytes += len(batch.data)
        except (TidelogError, ValueError, OverflowError) as error:
            batch.outcome = error
        try:
            info = self._topics.get(batch.topic)
            if info is None:
                raise UnknownTopicOrPartitionError(f"there is no topic '{batch.topic}'")
            self.sender.add(info, batch)
        except TidelogError as error:
            batch.outcome = batch.outcome or error
            # Later: the caller of `send` may be on this loop.
            asyncio.get_running_loop().call_soon(self._report, batch)

    def _fail_pending(self, error: TidelogError) -> None:
        """Every record without an outcome fails, in the order of its partition; none of them is sent any more."""
        with self.accumulator.lock:
            self.accumulator.seal_all()
            sealed = list(self.accumulator.sealed)
            self.accumulator.sealed.clear()
        for batch in sealed:
            batch.outcome = error
            self._send(batch)
        self.sender.fail_pending(error)

    def _encode(self, batch: ProducerBatch) -> None:
        """Of its rows only the timestamps stay."""
        rows, batch.rows = batch.rows, []
        stamps, keys, values, headers = split_rows(rows)
        batch.timestamps = stamps
        codec, level = self.config.compression, self.config.compression_level
        batch.data = encode_columns_unsealed(stamps, keys, values, headers, codec=codec, level=level)

    # Outcomes.

    def _report(self, batch: ProducerBatch) -> None:
        if batch.is_done:
            return
        self._finish(batch)
        if self._due:
            due = self._due.get((batch.topic, batch.partition))
            if due is not None and not self._is_busy(due):
                del self._due[due.topic, due.partition]
                asyncio.get_running_loop().call_soon(self._seal_and_send, due)

    def _seal_and_send(self, batch: ProducerBatch) -> None:
        if self._is_closed:
            return
        with self.accumulator.lock:
            if not batch.is_sealed:
                self.accumulator.seal(batch)
        self._send_sealed()

    def _finish(self, batch: ProducerBatch) -> None:
        outcome = batch.outcome
        if isinstance(outcome, Stored):
            batch.base_offset, batch.append_time_ms = outcome.base_offset, outcome.append_time_ms
            self.counts.stored += batch.count
        else:
            batch.error = outcome
            batch.rows = []
            self.counts.failed += batch.count
            self.transactions.record_failed(outcome)
        batch.data = EMPTY
        self.counts.answer_s += max(0.0, self.accumulator.now_s() - batch.opened_s)
        self._is_finishing = True  # its callbacks are not counted yet
        for waiter in self.accumulator.finish(batch):
            waiter()
        if batch.callbacks is None and not self._interceptors:
            self._is_finishing = False
            self.accumulator.free(batch.size)
            return

        def run_callbacks() -> None:
            # Its bytes are free only now, so that the memory also bounds callbacks that have not run.
            self.accumulator.free(batch.size)
            run_delivery_callbacks(batch, self._interceptors)
            self._callbacks_run += 1

        self._callbacks_started += 1
        self._is_finishing = False
        self._run_callbacks(run_callbacks)

    # The end.

    async def flush(self, *, waits_for_callbacks: bool = True) -> None:
        """Wait until everything sent so far is stored or failed, and its callbacks have run."""
        accumulator = self.accumulator
        with accumulator.lock:
            accumulator.seal_all()
            unfinished = list(accumulator.unfinished)
        self.run()
        for batch in unfinished:
            await batch.wait_async()
        if waits_for_callbacks and self._callbacks_started:
            await wait_async(self._after_callbacks, lambda _: None)

    def _after_callbacks(self, signal: Callable[[], object]) -> bool:
        def run() -> None:
            signal()

        self._run_callbacks(run)
        return True

    @property
    def is_idle(self) -> bool:
        """Whether every record has its outcome, and every callback has run. From any thread."""
        is_done = not self.accumulator.count_unfinished() and not self._is_finishing
        return is_done and self._callbacks_run == self._callbacks_started

    def flush_timed_out(self) -> FlushTimeoutError:
        left = self.accumulator.count_unfinished()
        message = f"{left} records are neither stored nor failed yet" if left else "callbacks have not run yet"
        return FlushTimeoutError(message, left=left)

    async def close(self, timeout: float | None = None, *, waits_for_callbacks: bool = True) -> None:
        """Flush for up to `timeout` seconds; then the rest fails."""
        await self._ending.run(lambda: self._close(timeout, waits_for_callbacks))

    async def _close(self, timeout: float | None, waits_for_callbacks: bool) -> None:
        try:
            await self.transactions.close(timeout)
            async with asyncio.timeout(timeout):
                await self.flush(waits_for_callbacks=waits_for_callbacks)
        except TimeoutError:
            if left := self.accumulator.count_unfinished():
                LOGGER.warning("closed with %d records that are neither stored nor failed", left)
        finally:  # also if the loop ends: Ctrl-C in `close` of the last client
            await self._end()

    async def _end(self) -> None:
        self._is_closed = True
        if self._timer is not None:
            self._timer.cancel()
        self._refreshing.cancel()
        self.accumulator.close()
        with self.accumulator.lock:
            self.accumulator.seal_all()
        try:
            await self.sender.close()
        finally:
            for batch in list(self.accumulator.unfinished):
                batch.outcome = batch.outcome or ProducerClosedError(
                    "the producer was closed before this was sent", was_sent=batch.was_sent
                )
                self._finish(batch)
        await self.cluster.close()

    def metrics(self) -> dict[str, float]:
        """By the names of `METRICS`."""
        counts = self.counts
        batches = max(1, counts.batches)
        figures = (
            counts.stored,
            counts.failed,
            self.accumulator.count_unfinished(),
            counts.batches,
            counts.batch_bytes,
            counts.batch_bytes / batches,
            counts.answer_s * 1000 / batches,
            self.sender.retries,
            self.accumulator.reserved,
            self.accumulator.buffer_memory,
            len(self.cluster.view.brokers),
            len(self._topics),
        )
        return dict(zip(METRICS, figures, strict=True))


def acknowledgement_interceptors(config: ProducerConfig) -> list[Callable[..., object]]:
    methods = (getattr(interceptor, "on_acknowledgement", None) for interceptor in config.interceptors)
    return [method for method in methods if method is not None]


def run_delivery_callbacks(batch: ProducerBatch, interceptors: list[Callable[..., object]]) -> None:
    """Run the callbacks of a batch that is done, in the order of its records; their errors are logged."""
    for index in range(batch.count if interceptors else 0):
        metadata = batch.metadata(index)
        for method in interceptors:
            run_logged(method, batch.error, metadata)
    for index, on_delivery, callback in sorted(batch.callbacks or (), key=_index):
        if on_delivery is not None:
            run_logged(on_delivery, batch.error, batch.metadata(index))
        elif callback is not None:
            run_logged(callback, Delivery(batch, index))


def _index(entry: tuple[int, Any, Any]) -> int:
    return entry[0]
