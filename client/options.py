"""`ProducerOptions`, `ConsumerOptions` and `AdminOptions`: the options as types, which mypy and pyright check.

    options: ProducerOptions = {"bootstrap": "localhost:9292", "linger_ms": 5}
    tidelog.Producer(**options)

`CommonOptions` are those of every client, `PlainConsumerOptions` those of a consumer without deserializers. A
serializer is a function, a `SerializerLike` or a `DeserializerLike` (objects with `serialize` and `deserialize`), or a
name.

Each option has its own name and Kafka's name in snake case (`group` and `group_id`). `option_table.py` has the
defaults, the ranges and what each option does; a test compares both. Options with one sensible value are read, and not
in these types: `enable_idempotence`, which is always so, and `exclude_internal_topics`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, Protocol, TypedDict, TypeVar

from tidelog.client.producer.fast_path import DeliveryCallback

S_contra = TypeVar("S_contra", contravariant=True)
D_co = TypeVar("D_co", covariant=True)


class SerializerLike(Protocol[S_contra]):
    """A serializer as Kafka has it. `tidelog.serializers` are of this kind."""

    def serialize(self, topic: str, data: S_contra, /) -> bytes | None: ...


class DeserializerLike(Protocol[D_co]):
    """A deserializer as Kafka has it. `tidelog.serializers` are of this kind."""

    def deserialize(self, topic: str, data: bytes, /) -> D_co: ...


SerializerName = Literal["bytes", "str", "json", "int", "long", "double"]
Serializer = Callable[[Any], bytes | str | None] | SerializerLike[Any] | SerializerName
Deserializer = Callable[[bytes], Any] | DeserializerLike[Any] | SerializerName
Compression = Literal["none", "gzip", "snappy", "lz4", "zstd"]
Isolation = Literal["read_uncommitted", "read_committed"]
Addresses = str | Sequence[str]
Bootstrap = Addresses | Mapping[str, object] | None
"""Addresses, or a dict of options by Kafka's names."""
Partitioner = str | Callable[[str, Any, Any, int], int]


class CommonOptions(TypedDict, total=False):
    """Options of every client."""

    bootstrap: Addresses
    bootstrap_servers: Addresses
    client_id: str
    request_timeout_ms: int
    retry_backoff_ms: int
    retry_backoff_max_ms: int
    metadata_max_age_ms: int
    bootstrap_wait_ms: int


class ProducerOptions(CommonOptions, total=False):
    acks: Literal["all", -1, 0, 1]
    max_in_flight: int
    max_in_flight_requests_per_connection: int
    linger_ms: float
    batch_size: int
    compression: Compression
    compression_type: Compression
    compression_level: int | None
    buffer_memory: int
    max_block_ms: int
    delivery_timeout_ms: int
    max_request_size: int
    partitioner: Partitioner
    key_serializer: Serializer | None
    value_serializer: Serializer | None
    interceptors: Sequence[object]
    interceptor_classes: Sequence[object]
    on_delivery: DeliveryCallback | None
    transactional_id: str | None
    transaction_timeout_ms: int


class PlainConsumerOptions(CommonOptions, total=False):
    """Options of a consumer without deserializers: keys and values are bytes."""

    group: str | None
    group_id: str | None
    group_instance_id: str | None
    client_rack: str
    auto_offset_reset: str
    enable_auto_commit: bool
    auto_commit_interval_ms: int
    session_timeout_ms: int
    heartbeat_interval_ms: int
    max_poll_interval_ms: int
    max_poll_records: int
    fetch_min_bytes: int
    fetch_max_wait_ms: int
    fetch_max_bytes: int
    max_partition_fetch_bytes: int
    prefetch_bytes: int
    isolation: Isolation
    isolation_level: Isolation
    assignor: str | Sequence[str]
    group_remote_assignor: str | Sequence[str]
    interceptors: Sequence[object]
    interceptor_classes: Sequence[object]
    check_crcs: bool
    allow_auto_create_topics: bool
    default_api_timeout_ms: int


class ConsumerOptions(PlainConsumerOptions, total=False):
    key_deserializer: Deserializer | None
    value_deserializer: Deserializer | None


class AdminOptions(CommonOptions, total=False):
    default_api_timeout_ms: int
