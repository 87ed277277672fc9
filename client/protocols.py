"""`ProducerProtocol`, `ConsumerProtocol`, `AdminProtocol`: what a real client and its mock have in common.

Annotate a function with `ProducerProtocol` and pass it a `tidelog.Producer` in production and a
`tidelog.testing.MockProducer` in a test. The asyncio clients satisfy `AsyncProducerProtocol`, `AsyncConsumerProtocol`
and `AsyncAdminProtocol`. `DeliveryProtocol` is what `send` and `send_many` return.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Generator, Iterator
from contextlib import AbstractAsyncContextManager, AbstractContextManager
from typing import Any, Protocol, TypeVar, runtime_checkable

from tidelog.client.admin.protocol import AdminProtocol, AsyncAdminProtocol
from tidelog.client.closing import AsyncClosingProtocol, ClosingProtocol
from tidelog.client.consumer.core import ConsumerCore
from tidelog.client.operations import declared_awaited, declared_blocking
from tidelog.client.producer.bulk import BulkMetadata
from tidelog.client.producer.fast_path import DeliveryCallback, RecordMetadata
from tidelog.client.producer.transactions import Transactions
from tidelog.client.record import ConsumerRecord, TopicPartition

__all__ = [
    "AdminProtocol",
    "AsyncAdminProtocol",
    "AsyncConsumerProtocol",
    "AsyncProducerProtocol",
    "ConsumerProtocol",
    "DeliveryProtocol",
    "ProducerProtocol",
]

R_co = TypeVar("R_co", covariant=True)
K = TypeVar("K")
V = TypeVar("V")


class DeliveryProtocol(Protocol[R_co]):
    """The outcome of records that were sent. It can also be awaited."""

    def done(self) -> bool: ...

    def result(self, timeout: float | None = None) -> R_co: ...

    def exception(self, timeout: float | None = None) -> Exception | None: ...

    def add_done_callback(self, callback: Callable[[Any], object], /) -> None: ...

    def __await__(self) -> Generator[Any, None, R_co]: ...


@runtime_checkable
class ProducerProtocol(ClosingProtocol, Protocol):
    """`tidelog.Producer` and `tidelog.testing.MockProducer`."""

    client_id: str

    def send(
        self,
        topic: str,
        value: Any = None,
        key: Any = None,
        *,
        partition: int | None = None,
        headers: Any = None,
        timestamp_ms: int | None = None,
        on_delivery: DeliveryCallback | None = None,
    ) -> DeliveryProtocol[RecordMetadata]: ...

    def send_many(
        self,
        topic: str,
        records: Any = None,
        *,
        values: Any = None,
        keys: Any = None,
        headers: Any = None,
        timestamps_ms: Any = None,
        partition: Any = None,
    ) -> DeliveryProtocol[BulkMetadata]: ...

    def partitions_for(self, topic: str, timeout: float | None = None) -> list[TopicPartition]: ...

    def flush(self, timeout: float | None = None) -> None: ...

    @declared_blocking(Transactions.init_transactions)
    def init_transactions(self) -> None: ...

    @declared_blocking(Transactions.begin_transaction)
    def begin_transaction(self) -> None: ...

    @declared_blocking(Transactions.send_offsets)
    def send_offsets(self) -> None: ...

    @declared_blocking(Transactions.prepare_transaction)
    def prepare_transaction(self) -> None: ...

    @declared_blocking(Transactions.commit_transaction)
    def commit_transaction(self) -> None: ...

    @declared_blocking(Transactions.abort_transaction)
    def abort_transaction(self) -> None: ...

    @declared_blocking(Transactions.last_token)
    def last_token(self) -> None: ...

    @declared_blocking(Transactions.join_transaction)
    def join_transaction(self) -> None: ...

    @declared_blocking(Transactions.leave_transaction)
    def leave_transaction(self) -> None: ...

    def transaction(self) -> AbstractContextManager[None]: ...

    def metrics(self) -> dict[str, float]: ...


@runtime_checkable
class AsyncProducerProtocol(AsyncClosingProtocol, Protocol):
    """`tidelog.aio.Producer`."""

    client_id: str

    def send(
        self,
        topic: str,
        value: Any = None,
        key: Any = None,
        *,
        partition: int | None = None,
        headers: Any = None,
        timestamp_ms: int | None = None,
        on_delivery: DeliveryCallback | None = None,
    ) -> Awaitable[DeliveryProtocol[RecordMetadata]]: ...

    def send_and_wait(
        self,
        topic: str,
        value: Any = None,
        key: Any = None,
        *,
        partition: int | None = None,
        headers: Any = None,
        timestamp_ms: int | None = None,
        on_delivery: DeliveryCallback | None = None,
    ) -> Awaitable[RecordMetadata]: ...

    def send_many(
        self,
        topic: str,
        records: Any = None,
        *,
        values: Any = None,
        keys: Any = None,
        headers: Any = None,
        timestamps_ms: Any = None,
        partition: Any = None,
    ) -> Awaitable[DeliveryProtocol[BulkMetadata]]: ...

    def partitions_for(self, topic: str, timeout: float | None = None) -> Awaitable[list[TopicPartition]]: ...

    def flush(self, timeout: float | None = None) -> Awaitable[None]: ...

    @declared_awaited(Transactions.init_transactions)
    def init_transactions(self) -> None: ...

    @declared_awaited(Transactions.begin_transaction)
    def begin_transaction(self) -> None: ...

    @declared_awaited(Transactions.send_offsets)
    def send_offsets(self) -> None: ...

    @declared_awaited(Transactions.prepare_transaction)
    def prepare_transaction(self) -> None: ...

    @declared_awaited(Transactions.commit_transaction)
    def commit_transaction(self) -> None: ...

    @declared_awaited(Transactions.abort_transaction)
    def abort_transaction(self) -> None: ...

    @declared_awaited(Transactions.last_token)
    def last_token(self) -> None: ...

    @declared_awaited(Transactions.join_transaction)
    def join_transaction(self) -> None: ...

    @declared_awaited(Transactions.leave_transaction)
    def leave_transaction(self) -> None: ...

    def transaction(self) -> AbstractAsyncContextManager[None]: ...

    def metrics(self) -> dict[str, float]: ...


@runtime_checkable
class ConsumerProtocol(ClosingProtocol, Protocol[K, V]):
    """`tidelog.Consumer` and `tidelog.testing.MockConsumer`."""

    @declared_blocking(ConsumerCore.subscribe)
    def subscribe(self) -> None: ...

    @declared_blocking(ConsumerCore.assign)
    def assign(self) -> None: ...

    @declared_blocking(ConsumerCore.unsubscribe)
    def unsubscribe(self) -> None: ...

    @declared_blocking(ConsumerCore.assignment)
    def assignment(self) -> None: ...

    def poll(self, timeout: float = 1.0, max_records: int | None = None) -> list[ConsumerRecord[K, V]]: ...

    def poll_arrow(self, timeout: float = 1.0, max_records: int | None = None) -> Any: ...

    def wakeup(self) -> None: ...

    @declared_blocking(ConsumerCore.position)
    def position(self) -> None: ...

    @declared_blocking(ConsumerCore.seek)
    def seek(self) -> None: ...

    @declared_blocking(ConsumerCore.seek_to_beginning)
    def seek_to_beginning(self) -> None: ...

    @declared_blocking(ConsumerCore.seek_to_end)
    def seek_to_end(self) -> None: ...

    @declared_blocking(ConsumerCore.seek_to_time)
    def seek_to_time(self) -> None: ...

    @declared_blocking(ConsumerCore.pause)
    def pause(self) -> None: ...

    @declared_blocking(ConsumerCore.resume)
    def resume(self) -> None: ...

    @declared_blocking(ConsumerCore.paused)
    def paused(self) -> None: ...

    @declared_blocking(ConsumerCore.commit)
    def commit(self) -> None: ...

    @declared_blocking(ConsumerCore.commit_async)
    def commit_async(self) -> None: ...

    @declared_blocking(ConsumerCore.committed)
    def committed(self) -> None: ...

    @declared_blocking(ConsumerCore.beginning_offsets)
    def beginning_offsets(self) -> None: ...

    @declared_blocking(ConsumerCore.end_offsets)
    def end_offsets(self) -> None: ...

    @declared_blocking(ConsumerCore.offsets_for_times)
    def offsets_for_times(self) -> None: ...

    @declared_blocking(ConsumerCore.partitions_for)
    def partitions_for(self) -> None: ...

    @declared_blocking(ConsumerCore.group_metadata)
    def group_metadata(self) -> None: ...

    def metrics(self) -> dict[str, float]: ...

    def __iter__(self) -> Iterator[ConsumerRecord[K, V]]: ...


@runtime_checkable
class AsyncConsumerProtocol(AsyncClosingProtocol, Protocol[K, V]):
    """`tidelog.aio.Consumer`."""

    @declared_awaited(ConsumerCore.subscribe)
    def subscribe(self) -> None: ...

    @declared_awaited(ConsumerCore.assign)
    def assign(self) -> None: ...

    @declared_awaited(ConsumerCore.unsubscribe)
    def unsubscribe(self) -> None: ...

    @declared_awaited(ConsumerCore.assignment)
    def assignment(self) -> None: ...

    def poll(self, timeout: float = 1.0, max_records: int | None = None) -> Awaitable[list[ConsumerRecord[K, V]]]: ...

    def poll_arrow(self, timeout: float = 1.0, max_records: int | None = None) -> Awaitable[Any]: ...

    def wakeup(self) -> None: ...

    @declared_awaited(ConsumerCore.position)
    def position(self) -> None: ...

    @declared_awaited(ConsumerCore.seek)
    def seek(self) -> None: ...

    @declared_awaited(ConsumerCore.seek_to_beginning)
    def seek_to_beginning(self) -> None: ...

    @declared_awaited(ConsumerCore.seek_to_end)
    def seek_to_end(self) -> None: ...

    @declared_awaited(ConsumerCore.seek_to_time)
    def seek_to_time(self) -> None: ...

    @declared_awaited(ConsumerCore.pause)
    def pause(self) -> None: ...

    @declared_awaited(ConsumerCore.resume)
    def resume(self) -> None: ...

    @declared_awaited(ConsumerCore.paused)
    def paused(self) -> None: ...

    @declared_awaited(ConsumerCore.commit)
    def commit(self) -> None: ...

    @declared_awaited(ConsumerCore.commit_async)
    def commit_async(self) -> None: ...

    @declared_awaited(ConsumerCore.committed)
    def committed(self) -> None: ...

    @declared_awaited(ConsumerCore.beginning_offsets)
    def beginning_offsets(self) -> None: ...

    @declared_awaited(ConsumerCore.end_offsets)
    def end_offsets(self) -> None: ...

    @declared_awaited(ConsumerCore.offsets_for_times)
    def offsets_for_times(self) -> None: ...

    @declared_awaited(ConsumerCore.partitions_for)
    def partitions_for(self) -> None: ...

    @declared_awaited(ConsumerCore.group_metadata)
    def group_metadata(self) -> None: ...

    def metrics(self) -> dict[str, float]: ...

    def __aiter__(self) -> AsyncIterator[ConsumerRecord[K, V]]: ...
