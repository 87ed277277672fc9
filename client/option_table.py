# ruff: noqa: RUF009 - `_option` is `field` by another name
"""The options of clients: one table, two spellings of each name.

A keyword in snake_case and Kafka's dotted name mean the same: `linger_ms=5` and `{"linger.ms": 5}`. One call may use
both; keywords win. Values are typed and have ranges, and text is parsed ("5", "true"). Contradicting options are
rejected. The client checks everything when it is created and reports all errors at once.

    option                                              result
    in the table, or another spelling of one            accepted
    without effect here (socket buffers)                ignored, with a warning that says why
    an unsupported feature (TLS, SASL)                  rejected: the program must not run without it
    anything else                                       rejected; the error names the nearest known option

The fields of the dataclasses are the table: type, default, and `_option`'s other spellings and range.
"""

from __future__ import annotations

import difflib
import logging
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import MISSING, Field, dataclass, field, fields
from typing import Any, TypeVar

from tidelog.client import serializers
from tidelog.client.durations import duration_ms
from tidelog.client.errors import OptionError
from tidelog.client.producer.partition_queue import IN_FLIGHT_MAX
from tidelog.log.batch_header import Codec
from tidelog.log.compression import compress

LOGGER = logging.getLogger(__name__)

PORT = 9292
INT_MAX = 2**31 - 1
BOOTSTRAP_MAX = 1_000

_UNSUPPORTED: tuple[tuple[str, str], ...] = (
    (r"(sasl|ssl|security|oauth\w*|enable\.ssl)\..*", "connections are not encrypted or authenticated yet"),
    (r"(message\.)?partitioner\.(class|ignore\.keys)", "set `partitioner` to a name or a function"),
    (r"(key|value)\.subject\..*|schema\.registry\..*|auto\.register\.schemas", "there is no schema registry"),
    (r"rebalance\.cb", "pass `subscribe` on_assigned, on_revoked and on_lost"),
    (r"offset\.commit\.cb|on\.commit", "pass `commit_async` on_commit, or an interceptor"),
    (r"consume\.cb", "use `poll` or iteration to receive records"),
    (r"partitioner\.cb", "set `partitioner` to a name or a function"),
    (r"default\.topic\.conf(ig)?", "put its content beside the other options"),
)
"""Rejected, with the reason."""
_IGNORED: tuple[tuple[str, str], ...] = (
    (r"socket\..*|(send|receive)\.buffer\.bytes|connections\.max\..*|broker\.address\..*", "gRPC tunes its sockets"),
    (r"client\.dns\.lookup", "gRPC tries every address that a name has"),
    (r"(socket|connect|closesocket|open|resolve)\.cb", "gRPC opens the connections"),
    (r"reconnect\.backoff(\.max|\.jitter)?\.ms", "gRPC reconnects after 50 ms to 1 s"),
    (r"(fetch\.error|fetch\.queue)\.backoff\.ms|coordinator\.query\.interval\.ms", "see retry_backoff_ms"),
    (r"api\.version\..*|broker\.version\.fallback", "there is one version of the protocol"),
    (r"metrics?\..*|metric\.reporters|auto\.include\.jmx\.reporter|statistics\..*|stats_cb", "see `metrics()`"),
    (r"log_level|log\..*|debug|logger", "logs go to Python's logging, to loggers below 'tidelog'"),
    (r"message\.send\.max\.retries|retries", "retries continue until delivery_timeout_ms"),
    (
        r"topic\.metadata\..*|metadata\.(recovery|max\.idle)\..*|enable\.metrics\.push",
        "the client refreshes metadata itself",
    ),
    (
        r"queue\.buffering\.(max\.messages|max\.kbytes|back.*)|batch\.num\.messages",
        "use buffer_memory and batch_size",
    ),
    (r"sticky\.partitioning\..*", "records without a key stick to a partition until their batch is sent"),
    (r"queued\.(min\.messages|max\.messages\.kbytes)", "use prefetch_bytes"),
    (r"(message\.copy|receive\.message)\.max\.bytes", "the broker's limit applies"),
    (
        r"partitioner\.(adaptive\.partitioning\.enable|availability\.timeout\.ms)",
        "the client prefers partitions with a leader",
    ),
    (r"group\.protocol(\.type)?", "groups always use group.protocol=consumer"),
    (r"(error|throttle|background\.event)\.cb|enabled\.events", "errors are raised, and returned by deliveries"),
    (r"offset\.store\..*|auto\.offset\.store", "the group's coordinator stores offsets"),
    (r"produce\.offset\.report|queuing\.strategy|msg\.order\.cmp", "this is always so"),
    (r"enable\.random\.seed|internal\.termination\.signal|builtin\.features", "it is specific to another library"),
    (
        r"test\.mock\..*|plugin\..*|opaque|delivery\.report\..*|linger\.backpressure\..*",
        "it is specific to another library",
    ),
)
"""Ignored with a warning: safe to run without."""
_ONLY: dict[str, tuple[bool, str]] = {
    "enable.partition.eof": (False, "the end of a partition is not a record: compare `position` with `end_offsets`"),
    "enable.auto.offset.store": (
        True,
        "there is no store_offsets: set enable_auto_commit=False and `commit` processed offsets",
    ),
}
"""Fixed behaviour: this value is accepted, the other rejected."""

O = TypeVar("O", bound="CommonConfig")  # noqa: E741


NAME_LENGTH_MAX = 1_024
"""Characters; as `coordinator/transactions/limits.py`."""


def _option(
    default: Any,
    *spellings: str,
    kind: str,
    low: float | None = None,
    high: float | None = None,
    choices: Sequence[str] = (),
) -> Any:
    metadata = {"spellings": spellings, "kind": kind, "low": low, "high": high, "choices": tuple(choices)}
    if isinstance(default, (list, dict)):
        raise TypeError("a default is a value, not a container")
    return field(default=default, metadata=metadata)


@dataclass(frozen=True, kw_only=True)
class CommonConfig:
    """Options of every client."""

    bootstrap: tuple[str, ...] = _option((), "bootstrap.servers", "metadata.broker.list", kind="addresses")
    """Broker addresses for the first connection: "host:port,host:port", or a list. Give at least two."""
    client_id: str = _option("", "client.id", kind="text")
    """Client name in logs and metrics."""
    request_timeout_ms: int = _option(30_000, "request.timeout.ms", kind="int", low=1, high=INT_MAX)
    """Timeout of one request in ms; then the client retries or fails it."""
    retry_backoff_ms: int = _option(100, "retry.backoff.ms", kind="int", low=1, high=INT_MAX)
    """Initial backoff in ms; doubles with each retry."""
    retry_backoff_max_ms: int = _option(1_000, "retry.backoff.max.ms", kind="int", low=1, high=INT_MAX)
    """Maximum backoff in ms."""
    metadata_max_age_ms: int = _option(300_000, "metadata.max.age.ms", kind="int", low=100, high=INT_MAX)
    """Metadata refresh interval in ms. A refresh finds new partitions."""
    bootstrap_wait_ms: int = _option(30_000, "bootstrap.wait.ms", kind="int", low=0, high=INT_MAX)
    """How long to wait for the cluster's first response, in ms, within `request_timeout_ms`. 0: fail at once. A port of
    another API fails at once in any case."""

    def contradictions(self) -> list[str]:
        if self.retry_backoff_max_ms < self.retry_backoff_ms:
            least = f"retry_backoff_ms={self.retry_backoff_ms}"
            return [f"retry_backoff_max_ms={self.retry_backoff_max_ms} is less than {least}"]
        return []


@dataclass(frozen=True, kw_only=True)
class ProducerConfig(CommonConfig):
    acks: int = _option(-1, "acks", "request.required.acks", kind="acks")
    """"all" (-1): every in-sync replica has synced the batch. 1: the leader has it. 0: no response."""
    enable_idempotence: bool | None = _option(None, "enable.idempotence", kind="bool")
    """Retries cause no duplicates and no reordering. This is always so; False changes nothing. True also rejects acks
    other than "all"."""
    max_in_flight: int = _option(
        IN_FLIGHT_MAX, "max.in.flight.requests.per.connection", "max.in.flight", kind="int", low=1, high=IN_FLIGHT_MAX
    )
    """Maximum batches in flight per partition: a log remembers no more of a producer. Any value preserves order."""
    linger_ms: float = _option(0, "linger.ms", "queue.buffering.max.ms", kind="float", low=0, high=900_000)
    """How long a batch waits for more records, in ms. 0: it is sent as soon as possible."""
    batch_size: int = _option(128 << 10, "batch.size", kind="int", low=0, high=60 << 20)
    """Batch size in bytes before compression. A larger record gets its own batch. It adds no delay."""
    compression: Codec = _option(Codec.NONE, "compression.type", "compression.codec", kind="codec")
    """none, gzip, snappy, lz4 or zstd."""
    compression_level: int | None = _option(None, "compression.level", kind="int", low=-131_072, high=22)
    """Compression level of the codec. None: the codec's default."""
    buffer_memory: int = _option(64 << 20, "buffer.memory", kind="int", low=1 << 10, high=1 << 40)
    """Maximum bytes of unacknowledged records; `send` blocks while it is full. Excludes the overhead of Python
    objects."""
    max_block_ms: int = _option(60_000, "max.block.ms", kind="int", low=0, high=INT_MAX)
    """How long `send` blocks for buffer memory or metadata, in ms, before it raises."""
    delivery_timeout_ms: int = _option(
        120_000, "delivery.timeout.ms", "message.timeout.ms", kind="int", low=1, high=INT_MAX
    )
    """Time from `send` to a result or an error in ms, including all retries."""
    max_request_size: int = _option(
        1 << 20, "max.request.size", "message.max.bytes", kind="int", low=1 << 7, high=60 << 20
    )
    """Maximum record size in bytes before compression."""
    partitioner: str | Callable[..., int] = _option("default", "partitioner", kind="partitioner")
    """"default" (murmur2 of the key; sticky without a key), "round_robin", "uniform_sticky", a librdkafka name
    ("consistent_random", its default, "fnv1a", ...), or a function."""
    key_serializer: Callable[..., Any] | None = _option(None, "key.serializer", kind="serializer")
    """Like `value_serializer`, for keys."""
    value_serializer: Callable[..., Any] | None = _option(None, "value.serializer", kind="serializer")
    """A function from an object to bytes. Without one, values are bytes or str (UTF-8)."""
    interceptors: tuple[Any, ...] = _option((), "interceptor.classes", "interceptors", kind="objects")
    """Objects, or classes, with on_send(record), on_acknowledgement(error, metadata), close()."""
    on_delivery: Callable[..., Any] | None = _option(None, "on_delivery", "dr_cb", "dr_msg_cb", kind="function")
    """Called as on_delivery(error, metadata) for every record without its own callback."""
    transactional_id: str | None = _option(None, "transactional.id", kind="text")
    """Makes the producer transactional: `begin_transaction`, or `with producer.transaction()`. One instance at a time
    uses an id: a newer one fences those before it, and aborts what they have left open."""
    transaction_timeout_ms: int = _option(60_000, "transaction.timeout.ms", kind="int", low=1, high=INT_MAX)
    """A transaction that is open for longer is aborted by its coordinator, in ms. Bounded by the cluster's
    transaction.max.timeout.ms."""

    def contradictions(self) -> list[str]:
        errors = super().contradictions()
        if self.enable_idempotence and self.acks != -1:
            errors.append(f"enable_idempotence needs acks='all', not acks={self.acks}")
        if self.transactional_id is not None:
            if not self.transactional_id:
                errors.append("transactional_id is empty: name the producer, or leave it out")
            elif fault := name_fault(self.transactional_id):
                errors.append(f"transactional_id: {fault}")
            if self.acks != -1:
                errors.append(f"transactional_id needs acks='all', not acks={self.acks}")
            if self.enable_idempotence is False:
                errors.append("transactional_id needs enable_idempotence: leave enable_idempotence=False out")
        if self.delivery_timeout_ms < self.linger_ms + self.request_timeout_ms:
            errors.append(
                f"delivery_timeout_ms={self.delivery_timeout_ms} is less than linger_ms={self.linger_ms:g} and "
                f"request_timeout_ms={self.request_timeout_ms} together: there is no time for one attempt"
            )
        if self.compression_level is not None:
            try:
                compress(self.compression, b"x", self.compression_level)
            except Exception as error:
                level = f"compression_level={self.compression_level}"
                errors.append(f"{level} is not a level of {self.compression.name.lower()}: {error}")
        if self.max_request_size > self.buffer_memory:
            errors.append(f"max_request_size={self.max_request_size} exceeds buffer_memory={self.buffer_memory}")
        return errors


@dataclass(frozen=True, kw_only=True)
class ConsumerConfig(CommonConfig):
    group: str | None = _option(None, "group.id", kind="text")
    """Consumer group to join. Without one use `assign`; there are no commits."""
    group_instance_id: str | None = _option(None, "group.instance.id", kind="text")
    """Makes the member static: it keeps its partitions across a restart within the session timeout."""
    client_rack: str = _option("", "client.rack", kind="text")
    """Read from a replica in this rack if there is one."""
    auto_offset_reset: str = _option("latest", "auto.offset.reset", kind="reset")
    """Start position without a committed offset: earliest, latest, none (raises), or a duration ago: "1h",
    "by_duration:PT1H"."""
    enable_auto_commit: bool = _option(True, "enable.auto.commit", "auto.commit.enable", kind="bool")
    """Commit periodically: offsets of records returned before the last `poll`."""
    auto_commit_interval_ms: int = _option(5_000, "auto.commit.interval.ms", kind="int", low=1, high=INT_MAX)
    """Auto-commit interval in ms."""
    session_timeout_ms: int = _option(45_000, "session.timeout.ms", kind="int", low=1, high=INT_MAX)
    """Session timeout in ms: without a heartbeat for this long the group removes the member. A dynamic member whose
    connection breaks is removed after 2 s."""
    heartbeat_interval_ms: int = _option(3_000, "heartbeat.interval.ms", kind="int", low=1, high=INT_MAX)
    """Heartbeat interval in ms. Heartbeats do not depend on `poll`."""
    max_poll_interval_ms: int = _option(300_000, "max.poll.interval.ms", kind="int", low=1, high=INT_MAX)
    """Maximum time between polls in ms. A slower member leaves its group; its next poll joins again."""
    max_poll_records: int = _option(500, "max.poll.records", kind="int", low=1, high=INT_MAX)
    """Maximum records per `poll`."""
    fetch_min_bytes: int = _option(1, "fetch.min.bytes", kind="int", low=0, high=INT_MAX)
    """Minimum bytes of a fetch response: the broker waits for them."""
    fetch_max_wait_ms: int = _option(500, "fetch.max.wait.ms", "fetch.wait.max.ms", kind="int", low=0, high=INT_MAX)
    """Maximum time that a broker waits for `fetch_min_bytes`, in ms."""
    fetch_max_bytes: int = _option(50 << 20, "fetch.max.bytes", kind="int", low=1, high=INT_MAX)
    """Maximum bytes per fetch response. The first batch is returned whatever its size."""
    max_partition_fetch_bytes: int = _option(
        1 << 20, "max.partition.fetch.bytes", "fetch.message.max.bytes", kind="int", low=1, high=INT_MAX
    )
    """Maximum bytes per partition in a fetch response. The first batch is returned whatever its size."""
    prefetch_bytes: int = _option(32 << 20, "prefetch.bytes", kind="int", low=1, high=1 << 40)
    """Maximum prefetched bytes. A slow program delays only itself."""
    isolation: str = _option(
        "read_uncommitted", "isolation.level", kind="choice", choices=("read_uncommitted", "read_committed")
    )
    """read_committed skips records of aborted transactions and stops at open ones; read_uncommitted returns all. At
    either level a consumer begins at offsets of transactions that have ended."""
    assignor: str = _option("uniform", "group.remote.assignor", "partition.assignment.strategy", kind="assignor")
    """Assignor of the coordinator: uniform, range or roundrobin. Sticky and cooperative-sticky mean uniform, which is
    both. Java class names are accepted; the first known name of a list is used."""
    key_deserializer: Callable[..., Any] | None = _option(None, "key.deserializer", kind="deserializer")
    """Like `value_deserializer`, for keys."""
    value_deserializer: Callable[..., Any] | None = _option(None, "value.deserializer", kind="deserializer")
    """A function from bytes to an object, or a serializer of `tidelog.serializers`. Without one, values are bytes."""
    interceptors: tuple[Any, ...] = _option((), "interceptor.classes", "interceptors", kind="objects")
    """Objects, or classes, with on_consume(records), on_commit(error, offsets), close()."""
    check_crcs: bool = _option(True, "check.crcs", kind="bool")
    """Check the checksum of each batch."""
    allow_auto_create_topics: bool = _option(False, "allow.auto.create.topics", kind="bool")
    """Create missing topics if the cluster allows it."""
    exclude_internal_topics: bool = _option(True, "exclude.internal.topics", kind="bool")
    """Exclude internal topics from patterns."""
    default_api_timeout_ms: int = _option(60_000, "default.api.timeout.ms", kind="int", low=1, high=INT_MAX)
    """Timeout of calls other than `poll` and `close` in ms, including all retries. Each of them that asks the cluster
    also takes `timeout`, in seconds."""

    def contradictions(self) -> list[str]:
        errors = super().contradictions()
        if self.heartbeat_interval_ms >= self.session_timeout_ms:
            errors.append(
                f"heartbeat_interval_ms={self.heartbeat_interval_ms} must be less than "
                f"session_timeout_ms={self.session_timeout_ms}, usually a third of it"
            )
        if self.group_instance_id is not None and self.group is None:
            errors.append("group_instance_id needs a group: set group too")
        if not self.exclude_internal_topics:
            errors.append("exclude_internal_topics=False: a pattern never matches internal topics; name them")
        if self.fetch_min_bytes > self.fetch_max_bytes:
            errors.append(f"fetch_min_bytes={self.fetch_min_bytes} is more than fetch_max_bytes={self.fetch_max_bytes}")
        return errors


@dataclass(frozen=True, kw_only=True)
class AdminConfig(CommonConfig):
    default_api_timeout_ms: int = _option(60_000, "default.api.timeout.ms", kind="int", low=1, high=INT_MAX)
    """Timeout of a call in ms, including all retries. Each method also takes `timeout`, in seconds."""


def name_fault(name: str) -> str:
    """What a coordinator rejects in a transactional id or a label; empty: nothing."""
    if len(name) > NAME_LENGTH_MAX:
        return f"{len(name)} characters; at most {NAME_LENGTH_MAX}"
    try:
        name.encode()
    except UnicodeEncodeError as error:
        return f"not UTF-8: {error}"
    return ""


def read_options(kind: type[O], first: object, keywords: Mapping[str, object]) -> O:
    """Parse the options of one client. `first` is the first positional argument: addresses, or a mapping of names.

    Raises OptionError with all errors.
    """
    errors: list[str] = []
    given: dict[str, tuple[str, object]] = {}
    names = _spellings(kind)
    sources: list[Mapping[str, object]] = []
    if isinstance(first, Mapping):
        sources.append(first)
    elif first is not None:
        sources.append({"bootstrap": first})
    for source in [*sources, keywords]:
        seen: dict[str, str] = {}
        for spelling, value in source.items():
            name = names.get(spelling)
            if name is None:
                errors += _unknown(kind, spelling, value, names)
            elif name in seen and source[seen[name]] != value:
                errors.append(f"{spelling} and {seen[name]} are the same option with two values")
            else:
                seen[name] = spelling
                given[name] = (spelling, value)
    values: dict[str, Any] = {}
    for one in fields(kind):
        if one.name in given:
            spelling, value = given[one.name]
            try:
                values[one.name] = _read(one, value)
            except ValueError as error:
                errors.append(f"{spelling}={value!r}: {error}")
    if "bootstrap" not in given:
        errors.append(f"no bootstrap address: set bootstrap='host:{PORT}'")
    if errors:
        raise OptionError("; ".join(errors))
    made = kind(**values)
    if contradictions := made.contradictions():
        raise OptionError("; ".join(contradictions))
    return made


def spellings_of(kind: type[CommonConfig]) -> dict[str, tuple[str, ...]]:
    """Return every option and its dotted names, for documentation."""
    return {one.name: tuple(one.metadata["spellings"]) for one in fields(kind)}


def _spellings(kind: type[CommonConfig]) -> dict[str, str]:
    """Map every spelling of an option to its name: the name, the dotted ones, and these with underscores."""
    spellings: dict[str, str] = {}
    for one in fields(kind):
        for spelling in (one.name, *one.metadata["spellings"]):
            spellings[spelling] = spellings[spelling.replace(".", "_")] = one.name
        spellings[one.name.replace("_", ".")] = one.name
    return spellings


def _unknown(kind: type[CommonConfig], spelling: str, value: object, names: Mapping[str, str]) -> list[str]:
    """Return the errors of a name that is not in the table; none if it is ignored."""
    dotted = str(spelling).replace("_", ".")
    if dotted == "security.protocol" and str(value).upper() == "PLAINTEXT":
        return []
    if dotted in ("retries", "message.send.max.retries") and str(value) == "0":
        return [f"{spelling}=0: there are always retries; delivery_timeout_ms bounds them"]
    if dotted in _ONLY:
        natural, why = _ONLY[dotted]
        return [] if str(value).lower() == str(natural).lower() else [f"{spelling}={value!r}: {why}"]
    for pattern, why in _UNSUPPORTED:
        if re.fullmatch(pattern, dotted):
            return [f"{spelling}: {why}"]
    for pattern, why in _IGNORED:
        if re.fullmatch(pattern, dotted) or re.fullmatch(pattern, str(spelling)):
            LOGGER.warning("option %s has no effect: %s", spelling, why)
            return []
    for other in (ProducerConfig, ConsumerConfig, AdminConfig):
        if other is not kind and spelling in _spellings(other):
            return [f"{spelling} belongs to {_client(other)}, not to {_client(kind)}"]
    near = difflib.get_close_matches(str(spelling), names, n=1, cutoff=0.6)
    return [f"no option '{spelling}'" + (f"; did you mean '{near[0]}'?" if near else "")]


def _client(kind: type[CommonConfig]) -> str:
    name = kind.__name__.removesuffix("Config").lower()
    return f"an {name}" if name == "admin" else f"a {name}"


def _read(one: Field[Any], value: object) -> Any:
    """Convert the value to the option's type. Raises ValueError with what it should be."""
    if value is None and one.default is None:
        return None
    metadata = one.metadata
    read = _READERS[metadata["kind"]]
    parsed = read(value, metadata)
    if metadata["low"] is not None and not metadata["low"] <= parsed <= metadata["high"]:
        raise ValueError(f"must be from {metadata['low']:,} to {metadata['high']:,}")
    return parsed


def _int(value: object, _: Mapping[str, Any]) -> int:
    if isinstance(value, bool) or not isinstance(value, (int, float, str)):
        raise ValueError("must be an integer")
    try:
        number = float(value)
        exact = int(value)
    except ValueError:
        raise ValueError("must be an integer") from None
    if number != exact:
        raise ValueError("must be an integer")
    return exact


def _float(value: object, _: Mapping[str, Any]) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float, str)):
        raise ValueError("must be a number")
    try:
        return float(value)
    except ValueError:
        raise ValueError("must be a number") from None


def _bool(value: object, _: Mapping[str, Any]) -> bool:
    if isinstance(value, bool):
        return value
    if isinstance(value, str) and value.lower() in ("true", "false"):
        return value.lower() == "true"
    raise ValueError("must be True or False")


def _text(value: object, _: Mapping[str, Any]) -> str:
    if not isinstance(value, str):
        raise ValueError("must be a str")
    return value


def _choice(value: object, metadata: Mapping[str, Any]) -> str:
    if isinstance(value, str) and value.lower() in metadata["choices"]:
        return value.lower()
    raise ValueError(f"must be one of {', '.join(metadata['choices'])}")


def _acks(value: object, _: Mapping[str, Any]) -> int:
    acks = {"all": -1, "-1": -1, "0": 0, "1": 1}.get(str(value).lower())
    if acks is None or isinstance(value, bool):
        raise ValueError("must be 'all', 1 or 0")
    return acks


def _codec(value: object, _: Mapping[str, Any]) -> Codec:
    if isinstance(value, Codec):
        return value
    if value is None:
        return Codec.NONE
    if isinstance(value, str) and value.upper() in Codec.__members__:
        return Codec[value.upper()]
    raise ValueError(f"must be one of {', '.join(codec.name.lower() for codec in Codec)}")


def _reset(value: object, _: Mapping[str, Any]) -> str:
    known = {"earliest": "earliest", "smallest": "earliest", "beginning": "earliest", "latest": "latest"}
    known |= {"largest": "latest", "end": "latest", "none": "none", "error": "none"}
    if isinstance(value, str):
        if value.lower() in known:
            return known[value.lower()]
        if duration_ms(value) is not None:
            return value
    raise ValueError("must be earliest, latest, none, or how long ago ('1h', 'by_duration:PT1H')")


def addresses_of(value: object, _: Mapping[str, Any] | None = None) -> tuple[str, ...]:
    """Parse "a:9292,b", or a list of such, into addresses with ports."""
    parts: Iterable[object] = value.split(",") if isinstance(value, str) else value  # type: ignore[assignment]
    if not isinstance(parts, (list, tuple)):
        raise ValueError(f"must be 'host:{PORT}', several with commas between, or a list of them")
    addresses: dict[str, None] = {}
    for part in parts:
        if not isinstance(part, str):
            raise ValueError(f"must be 'host:{PORT}', several with commas between, or a list of them")
        text = part.strip()
        if not text:
            continue
        match = re.fullmatch(r"(?P<host>\[[0-9a-fA-F:.%\w]+\]|[^\s:/\[\]]+)(:(?P<port>\d{1,5}))?", text)
        if match is None or (match["port"] is not None and not 1 <= int(match["port"]) <= 65_535):
            raise ValueError(f"'{text}' is not host:port")
        addresses[text if match["port"] else f"{text}:{PORT}"] = None
    if not 1 <= len(addresses) <= BOOTSTRAP_MAX:
        raise ValueError(f"must be 1 to {BOOTSTRAP_MAX:,} addresses")
    return tuple(addresses)


def _partitioner(value: object, _: Mapping[str, Any]) -> object:
    from tidelog.client.producer.partitioners import NAMES

    if callable(value):
        return value
    if isinstance(value, str) and value.lower() in NAMES:
        return NAMES[value.lower()]
    names = ", ".join(sorted(set(NAMES)))
    raise ValueError(f"must be one of {names}, or a function (topic, key, value, partitions) -> int")


_ASSIGNORS = {name: name for name in ("uniform", "range", "roundrobin")}
_ASSIGNORS |= {"sticky": "uniform", "cooperative-sticky": "uniform", "cooperativesticky": "uniform"}
_ASSIGNOR_CLASS = re.compile(r"(?:org\.apache\.kafka\.clients\.consumer\.)?(\w+)assignor")


def _assignor(value: object, _: Mapping[str, Any]) -> str:
    parts = value.split(",") if isinstance(value, str) else value
    for part in parts if isinstance(parts, (list, tuple)) else ():
        name = part.strip().lower() if isinstance(part, str) else ""
        match = _ASSIGNOR_CLASS.fullmatch(name)
        if (assignor := _ASSIGNORS.get(match[1] if match else name)) is not None:
            return assignor
    raise ValueError("must be uniform (or sticky, cooperative-sticky), range or roundrobin, or a list of them")


_SERIALIZERS = {"bytes": "plain", "str": "string", "json": "json", "int": "integer", "long": "long", "double": "double"}
"""Names of the serializers in `serializers`."""


def _serializer(value: object, metadata: Mapping[str, Any]) -> object:
    method = "serialize" if metadata["kind"] == "serializer" else "deserialize"
    if isinstance(value, str) and value in _SERIALIZERS:
        return getattr(serializers, _SERIALIZERS[value])
    if callable(value) or callable(getattr(value, method, None)):
        return value
    raise ValueError(
        f"must be a function, an object with {method}(topic, data), or one of {', '.join(_SERIALIZERS)} "
        "(tidelog.serializers)"
    )


def _function(value: object, _: Mapping[str, Any]) -> object:
    if not callable(value):
        raise ValueError("must be a function")
    return value


def _objects(value: object, _: Mapping[str, Any]) -> tuple[object, ...]:
    if isinstance(value, (str, bytes)):
        raise ValueError("must be a list of objects (or of their classes), not of names")
    parts = value if isinstance(value, (list, tuple)) else (value,)
    return tuple(part() if isinstance(part, type) else part for part in parts)


_READERS: dict[str, Callable[[object, Mapping[str, Any]], Any]] = {
    "int": _int,
    "float": _float,
    "bool": _bool,
    "text": _text,
    "choice": _choice,
    "acks": _acks,
    "codec": _codec,
    "reset": _reset,
    "addresses": addresses_of,
    "partitioner": _partitioner,
    "assignor": _assignor,
    "serializer": _serializer,
    "deserializer": _serializer,
    "function": _function,
    "objects": _objects,
}
assert all(
    one.metadata["kind"] in _READERS and one.default is not MISSING
    for kind in (ProducerConfig, ConsumerConfig, AdminConfig)
    for one in fields(kind)
), "every option can be read"
