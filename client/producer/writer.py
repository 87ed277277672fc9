"""`Writer`: encoded batches to partitions, on one event loop. For tools that encode batches themselves.

    writer = Writer(cluster)
    acknowledged = await (await writer.send("orders", 0, batch))

`send` waits while `buffer_bytes_max` bytes are not acknowledged. The future that it returns has the outcome after
`delivery_timeout_ms` at the latest.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, fields

from tidelog.client.cluster import ClusterClient
from tidelog.client.errors import DeliveryTimeoutError
from tidelog.client.producer.fast_path import ProducerBatch
from tidelog.client.producer.partition_queue import Stored
from tidelog.client.producer.sender import Sender, SenderConfig
from tidelog.log.batch_header import Buffer, read_header
from tidelog.model.errors import RecordTooLargeError
from tidelog.model.ids import PartitionId


@dataclass(frozen=True, slots=True, kw_only=True)
class WriterConfig(SenderConfig):
    delivery_timeout_ms: int = 120_000
    batch_bytes_max: int = 60 << 20
    buffer_bytes_max: int = 32 << 20
    """Bytes that are not acknowledged yet; one batch may always enter."""

    def __post_init__(self) -> None:
        SenderConfig.__post_init__(self)
        if self.delivery_timeout_ms <= 0:
            raise ValueError("timeouts are above 0 ms")

    def for_sender(self) -> SenderConfig:
        return SenderConfig(**{option.name: getattr(self, option.name) for option in fields(SenderConfig)})


@dataclass(frozen=True, slots=True)
class Acknowledged:
    topic: str
    partition: PartitionId
    base_offset: int
    """-1 if the log does not say: acks=0, or a repeat of a batch that it stored long before."""
    count: int
    append_time_ms: int
    """The time that the leader has set, or -1."""


class Writer:
    """Used on one event loop. `close` when done; `flush` waits for what was sent."""

    def __init__(self, cluster: ClusterClient, config: WriterConfig | None = None) -> None:
        self.cluster = cluster
        self.config = config or WriterConfig()
        self.sender = Sender(cluster, self.config.for_sender(), self._done)
        self.buffered_bytes = 0
        self._results: dict[ProducerBatch, tuple[PartitionId, asyncio.Future[Acknowledged]]] = {}
        self._entering = asyncio.Lock()
        self._freed = asyncio.Event()

    async def send(self, topic: str, partition: int, batch: Buffer) -> asyncio.Future[Acknowledged]:
        """Send one encoded batch; batches of a partition are stored in the order of the calls. Raises if the topic does
        not exist and is not created by the first batch to it (`ClusterClient.topic`), if the batch is too large, or if
        the buffer was full for the whole delivery timeout."""
        header = read_header(batch)
        if header.size != len(batch):
            raise ValueError(f"one whole batch at a time: {len(batch)} bytes, the batch has {header.size}")
        if header.size > self.config.batch_bytes_max:
            raise RecordTooLargeError(f"a batch of {header.size} bytes, at most {self.config.batch_bytes_max}")
        loop = asyncio.get_running_loop()
        made = ProducerBatch(topic, partition, header.size, loop.time())
        made.deadline_s = made.opened_s + self.config.delivery_timeout_ms / 1000
        made.data, made.size, made.count = bytearray(batch), header.size, header.count
        async with self._entering:
            self.sender.check_open()
            info = await self.cluster.topic(topic, may_create=True)
            if not 0 <= partition < len(info.partitions):
                await self.cluster.refresh(topic)  # it may have more partitions now
                info = await self.cluster.topic(topic)
            queue = self.sender.queue_of(info, partition)
            await self._wait_for_memory(made)
            result: asyncio.Future[Acknowledged] = loop.create_future()
            result.add_done_callback(_retrieve_error)
            self.sender.add(info, made)
            self._results[made] = (queue.partition, result)
            self.buffered_bytes += made.size
            return result

    @property
    def retries(self) -> int:
        """Attempts that were not the first one of their batch."""
        return self.sender.retries

    async def _wait_for_memory(self, batch: ProducerBatch) -> None:
        while self.buffered_bytes and self.buffered_bytes + batch.size > self.config.buffer_bytes_max:
            self._freed.clear()
            try:
                async with asyncio.timeout_at(batch.deadline_s):
                    await self._freed.wait()
            except TimeoutError:
                error = self.sender.last_error
                message = f"buffer full: no space for {batch.size} bytes in {self.config.delivery_timeout_ms} ms"
                cause = f"; last error: {error}" if error is not None else ""
                raise DeliveryTimeoutError(message + cause, was_sent=False) from None
            self.sender.check_open()

    def _done(self, batch: ProducerBatch) -> None:
        partition, result = self._results.pop(batch)
        self.buffered_bytes -= batch.size
        self._freed.set()
        if result.done():  # cancelled by the caller
            return
        outcome = batch.outcome
        if isinstance(outcome, Stored):
            result.set_result(
                Acknowledged(batch.topic, partition, outcome.base_offset, batch.count, outcome.append_time_ms)
            )
        else:
            result.set_exception(outcome)

    async def flush(self) -> None:
        """Wait until everything sent before is stored or failed."""
        results = [result for _, result in self._results.values()]
        if results:
            await asyncio.wait(results)

    async def close(self, *, is_flushed: bool = True) -> None:
        """Batches that are not acknowledged then fail."""
        try:
            if is_flushed and not self.sender.is_closed:
                await self.flush()
        finally:
            self._freed.set()
            await self.sender.close()


def _retrieve_error(result: asyncio.Future[Acknowledged]) -> None:
    """Not every caller awaits each of many results."""
    if not result.cancelled():
        result.exception()
