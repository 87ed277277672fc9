# ruff: noqa: RUF009 - `_option` is `field` by another name
"""The options of clients: one table, two spellings of each name.

A keyword in snake_case and Kafka's dotted name mean the same: `linger_ms=5` and `{"linger.ms": 5}`. Both may be
given in one call, keywords win. Values are typed and have ranges, text is read as what the option is ("5", "true"), and
options that contradict each other are refused; all of it when the client is made, with all errors at once.

    given                                               what happens
    a name of the table, or another spelling of it      taken
    a name that means nothing here (buffers of sockets) ignored, with a warning that says why
    a name that asks for what is not there (TLS, SASL,  refused: to go on without would be worse than to stop
      transactions)
    anything else                                       refused; the error names the nearest known one

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
from tidelog.client.lane import IN_FLIGHT_MAX
from tidelog.log.batch_header import Codec
from tidelog.log.compression import compress

LOGGER = logging.getLogger(__name__)

PORT = 9292
INT_MAX = 2**31 - 1
BOOTSTRAP_MAX = 1_000

_NOT_HERE: tuple[tuple[str, str], ...] = (
    (r"(sasl|ssl|security|oauth\w*|enable\.ssl)\..*", "connections are not encrypted or authenticated yet"),
    (r"transactional\.id|transaction\.timeout\.ms", "there are no transactions yet"),
    (r"(message\.)?partitioner\.(class|ignore\.keys)", "give `partitioner` a name or a function"),
    (r"(key|value)\.subject\..*|schema\.registry\..*|auto\.register\.schemas", "there is no schema registry"),
    (r"rebalance\.cb", "give `subscribe` on_assigned, on_revoked and on_lost"),
    (r"offset\.commit\.cb|on\.commit", "give `commit_async` on_commit, or an interceptor"),
    (r"consume\.cb", "records are given out by `poll` and by iteration"),
    (r"partitioner\.cb", "give `partitioner` a name or a function"),
    (r"default\.topic\.conf(ig)?", "put what stands in it beside the other options"),
)
"""Refused, with the reason."""
_IGNORED: tuple[tuple[str, str], ...] = (
    (r"socket\..*|(send|receive)\.buffer\.bytes|connections\.max\..*|broker\.address\..*", "gRPC tunes its sockets"),
    (r"client\.dns\.lookup", "gRPC tries every address that a name has"),
    (r"(socket|connect|closesocket|open|resolve)\.cb", "gRPC makes its connections by itself"),
    (r"reconnect\.backoff(\.max|\.jitter)?\.ms", "gRPC connects anew by itself, after 50 ms to 1 s"),
    (r"(fetch\.error|fetch\.queue)\.backoff\.ms|coordinator\.query\.interval\.ms", "see retry_backoff_ms"),
    (r"api\.version\..*|broker\.version\.fallback", "there is one version of the protocol"),
    (r"metrics?\..*|metric\.reporters|auto\.include\.jmx\.reporter|statistics\..*|stats_cb", "see `metrics()`"),
    (r"log_level|log\..*|debug|logger", "logs go to Python's logging, to loggers below 'tidelog'"),
    (r"message\.send\.max\.retries|retries", "attempts go on until delivery_timeout_ms"),
    (r"topic\.metadata\..*|metadata\.(recovery|max\.idle)\..*|enable\.metrics\.push", "metadata is kept fresh anyway"),
    (
        r"queue\.buffering\.(max\.messages|max\.kbytes|back.*)|batch\.num\.messages",
        "buffer_memory and batch_size bound it",
    ),
    (r"sticky\.partitioning\..*", "records without a key stick until their batch goes"),
    (r"queued\.(min\.messages|max\.messages\.kbytes)", "prefetch_bytes bounds what is fetched ahead"),
    (r"(message\.copy|receive\.message)\.max\.bytes", "messages of any size that a broker takes are taken"),
    (r"partitioner\.(adaptive\.partitioning\.enable|availability\.timeout\.ms)", "a leader is looked for anyway"),
    (r"group\.protocol(\.type)?", "there is one protocol of groups, that of group.protocol=consumer"),
    (r"(error|throttle|background\.event)\.cb|enabled\.events", "errors are raised, and told by deliveries"),
    (r"offset\.store\..*|auto\.offset\.store", "offsets are stored by the group's coordinator"),
    (r"produce\.offset\.report|queuing\.strategy|msg\.order\.cmp", "it is so anyway"),
    (r"enable\.random\.seed|internal\.termination\.signal|builtin\.features", "it is another library's"),
    (r"test\.mock\..*|plugin\..*|opaque|delivery\.report\..*|linger\.backpressure\..*", "it is another library's"),
)
"""Not taken, and told once: nothing is lost by going on without."""
_ONLY: dict[str, tuple[bool, str]] = {
    "enable.partition.eof": (False, "the end of a partition is no record: compare `position` with `end_offsets`"),
    "enable.auto.offset.store": (
        True,
        "there is no store_offsets: enable_auto_commit=False, and `commit` what is done",
    ),
}
"""What is so here by nature: this value is taken, the other refused."""

O = TypeVar("O", bound="CommonOptions")  # noqa: E741


def _option(
    default: Any,
    *spellings: str,
    kind: str,
    low: float | None = None,
    high: float | None = None,
    choices: Sequence[str] = (),
) -> Any:
    facts = {"spellings": spellings, "kind": kind, "low": low, "high": high, "choices": tuple(choices)}
    if isinstance(default, (list, dict)):
        raise TypeError("a default is a value, not a container")
    return field(default=default, metadata=facts)


@dataclass(frozen=True, kw_only=True)
class CommonOptions:
    """What every client takes."""

    bootstrap: tuple[str, ...] = _option((), "bootstrap.servers", "metadata.broker.list", kind="addresses")
    """Where to find the cluster: "host:port,host:port", or a list of them. Two are better than one."""
    client_id: str = _option("", "client.id", kind="text")
    """A name for logs and metrics."""
    request_timeout_ms: int = _option(30_000, "request.timeout.ms", kind="int", low=1, high=INT_MAX)
    """How long one request may take, before it is sent again or given up."""
    retry_backoff_ms: int = _option(100, "retry.backoff.ms", kind="int", low=1, high=INT_MAX)
    """The first pause before another attempt; they double,"""
    retry_backoff_max_ms: int = _option(1_000, "retry.backoff.max.ms", kind="int", low=1, high=INT_MAX)
    """up to this."""
    metadata_max_age_ms: int = _option(300_000, "metadata.max.age.ms", kind="int", low=100, high=INT_MAX)
    """After so long metadata is asked for again, so that new partitions are seen."""
    bootstrap_wait_ms: int = _option(30_000, "bootstrap.wait.ms", kind="int", low=0, high=INT_MAX)
    """How long to wait for the first answer of the cluster, within `request_timeout_ms`. 0 makes no answer an error at
    once. A port of another API is an error at once in any case."""

    def contradictions(self) -> list[str]:
        if self.retry_backoff_max_ms < self.retry_backoff_ms:
            least = f"retry_backoff_ms={self.retry_backoff_ms}"
            return [f"retry_backoff_max_ms={self.retry_backoff_max_ms} is less than {least}"]
        return []


@dataclass(frozen=True, kw_only=True)
class ProducerOptions(CommonOptions):
    acks: int = _option(-1, "acks", "request.required.acks", kind="acks")
    """"all" (-1): every in-sync replica has synced it. 1: the leader has it. 0: it was sent, and nobody knows more."""
    enable_idempotence: bool | None = _option(None, "enable.idempotence", kind="bool")
    """No duplicates and no other order by retries. It is always so, and False changes nothing; True insists on it, and
    is refused where acks leaves open what was stored."""
    max_in_flight: int = _option(
        IN_FLIGHT_MAX, "max.in.flight.requests.per.connection", "max.in.flight", kind="int", low=1, high=INT_MAX
    )
    """Batches of one partition that may be on their way at once. Order holds with any number of them."""
    linger_ms: float = _option(0, "linger.ms", "queue.buffering.max.ms", kind="float", low=0, high=900_000)
    """How long a batch waits for more records. 0: it goes as soon as it can, with what has come meanwhile."""
    batch_size: int = _option(128 << 10, "batch.size", kind="int", low=0, high=60 << 20)
    """Bytes of a batch before compression; a larger record is a batch of its own. It delays nothing."""
    compression: Codec = _option(Codec.NONE, "compression.type", "compression.codec", kind="codec")
    """none, gzip, snappy, lz4 or zstd."""
    compression_level: int | None = _option(None, "compression.level", kind="int", low=-131_072, high=22)
    """Of the codec; None is its usual one."""
    buffer_memory: int = _option(64 << 20, "buffer.memory", kind="int", low=1 << 10, high=1 << 40)
    """Bytes of records that are not answered yet; when it is full, `send` waits. Python's objects come on top of it."""
    max_block_ms: int = _option(60_000, "max.block.ms", kind="int", low=0, high=INT_MAX)
    """How long `send` waits for room or for metadata, before it raises."""
    delivery_timeout_ms: int = _option(
        120_000, "delivery.timeout.ms", "message.timeout.ms", kind="int", low=1, high=INT_MAX
    )
    """From `send` to a result or an error, with all retries."""
    max_request_size: int = _option(
        1 << 20, "max.request.size", "message.max.bytes", kind="int", low=1 << 7, high=60 << 20
    )
    """The largest record, before compression."""
    partitioner: str | Callable[..., int] = _option("default", "partitioner", kind="partitioner")
    """"default" (murmur2 of the key, sticky without one), "round_robin", "uniform_sticky", a name of librdkafka's
    ("consistent_random", which is its default, "fnv1a", ...), or a function."""
    key_serializer: Callable[..., Any] | None = _option(None, "key.serializer", kind="serializer")
    """As `value_serializer`, for keys."""
    value_serializer: Callable[..., Any] | None = _option(None, "value.serializer", kind="serializer")
    """A function from an object to bytes; without one bytes and str (UTF-8) are taken."""
    interceptors: tuple[Any, ...] = _option((), "interceptor.classes", "interceptors", kind="objects")
    """Objects, or classes, with on_send(record), on_acknowledgement(metadata, error), close()."""
    on_delivery: Callable[..., Any] | None = _option(None, "on_delivery", "dr_cb", "dr_msg_cb", kind="function")
    """Called as on_delivery(error, metadata) for every record that has no callback of its own."""

    def contradictions(self) -> list[str]:
        found = super().contradictions()
        if self.enable_idempotence and self.acks != -1:
            found.append(f"enable_idempotence needs acks='all', not acks={self.acks}")
        if self.max_in_flight > IN_FLIGHT_MAX:
            found.append(
                f"max_in_flight={self.max_in_flight}: at most {IN_FLIGHT_MAX}, so many a log remembers of a producer"
            )
        if self.delivery_timeout_ms < self.linger_ms + self.request_timeout_ms:
            found.append(
                f"delivery_timeout_ms={self.delivery_timeout_ms} is less than linger_ms={self.linger_ms:g} and "
                f"request_timeout_ms={self.request_timeout_ms} together: no time for one attempt"
            )
        if self.compression_level is not None:
            try:
                compress(self.compression, b"x", self.compression_level)
            except Exception as error:
                level = f"compression_level={self.compression_level}"
                found.append(f"{level} is none of {self.compression.name.lower()}'s: {error}")
        if self.max_request_size > self.buffer_memory:
            found.append(
                f"max_request_size={self.max_request_size} is more than buffer_memory={self.buffer_memory} holds"
            )
        return found


@dataclass(frozen=True, kw_only=True)
class ConsumerOptions(CommonOptions):
    group: str | None = _option(None, "group.id", kind="text")
    """The group to be a member of; without one there is `assign`, and no commits."""
    group_instance_id: str | None = _option(None, "group.instance.id", kind="text")
    """A static member keeps its partitions over a restart within the session."""
    client_rack: str = _option("", "client.rack", kind="text")
    """Read from a replica in this rack, where there is one."""
    auto_offset_reset: str = _option("latest", "auto.offset.reset", kind="reset")
    """Where to begin without a committed offset: earliest, latest, none (an error), or so long ago: "1h",
    "by_duration:PT1H"."""
    enable_auto_commit: bool = _option(True, "enable.auto.commit", "auto.commit.enable", kind="bool")
    """Commit what the program has come back for, by itself."""
    auto_commit_interval_ms: int = _option(5_000, "auto.commit.interval.ms", kind="int", low=1, high=INT_MAX)
    """How often."""
    session_timeout_ms: int = _option(45_000, "session.timeout.ms", kind="int", low=1, high=INT_MAX)
    """After so long without a heartbeat a member is out of its group; one whose connection
    breaks after 2 s, unless it is static."""
    heartbeat_interval_ms: int = _option(3_000, "heartbeat.interval.ms", kind="int", low=1, high=INT_MAX)
    """How often a member says that it is there. The program need not run for that."""
    max_poll_interval_ms: int = _option(300_000, "max.poll.interval.ms", kind="int", low=1, high=INT_MAX)
    """A member that does not poll for so long leaves its group; its next poll joins again."""
    max_poll_records: int = _option(500, "max.poll.records", kind="int", low=1, high=INT_MAX)
    """Records that one `poll` gives at most."""
    fetch_min_bytes: int = _option(1, "fetch.min.bytes", kind="int", low=0, high=INT_MAX)
    """A broker waits until it has so much to answer with,"""
    fetch_max_wait_ms: int = _option(500, "fetch.max.wait.ms", "fetch.wait.max.ms", kind="int", low=0, high=INT_MAX)
    """but not longer than this."""
    fetch_max_bytes: int = _option(50 << 20, "fetch.max.bytes", kind="int", low=1, high=INT_MAX)
    """Of one answer, all partitions together; one batch comes whatever its size."""
    max_partition_fetch_bytes: int = _option(
        1 << 20, "max.partition.fetch.bytes", "fetch.message.max.bytes", kind="int", low=1, high=INT_MAX
    )
    """Of one answer, for each partition; one batch comes whatever its size."""
    prefetch_bytes: int = _option(32 << 20, "prefetch.bytes", kind="int", low=1, high=1 << 40)
    """Fetched ahead of the program, at most; a program that does not poll holds up only itself."""
    isolation: str = _option(
        "read_uncommitted", "isolation.level", kind="choice", choices=("read_uncommitted", "read_committed")
    )
    """With read_committed records of transactions that were aborted, or are under way, are not given out."""
    assignor: str = _option("uniform", "group.remote.assignor", "partition.assignment.strategy", kind="assignor")
    """How the coordinator shares out partitions: uniform, range or roundrobin. Sticky and cooperative-sticky are
    uniform, which is both; Java's names of classes are known; of a list the first that is known counts."""
    key_deserializer: Callable[..., Any] | None = _option(None, "key.deserializer", kind="deserializer")
    """As `value_deserializer`, for keys."""
    value_deserializer: Callable[..., Any] | None = _option(None, "value.deserializer", kind="deserializer")
    """A function from bytes to an object, or a serializer of `tidelog.serializers`; without one there are bytes."""
    interceptors: tuple[Any, ...] = _option((), "interceptor.classes", "interceptors", kind="objects")
    """Objects, or classes, with on_consume(records), on_commit(offsets), close()."""
    check_crcs: bool = _option(True, "check.crcs", kind="bool")
    """Whether the checksum of each batch is compared."""
    allow_auto_create_topics: bool = _option(False, "allow.auto.create.topics", kind="bool")
    """Whether a topic that is not there is created, if the cluster allows it."""
    exclude_internal_topics: bool = _option(True, "exclude.internal.topics", kind="bool")
    """Whether a pattern leaves out internal topics."""
    default_api_timeout_ms: int = _option(60_000, "default.api.timeout.ms", kind="int", low=1, high=INT_MAX)
    """How long a call other than `poll` may take, with all retries."""

    def contradictions(self) -> list[str]:
        found = super().contradictions()
        if self.heartbeat_interval_ms >= self.session_timeout_ms:
            found.append(
                f"heartbeat_interval_ms={self.heartbeat_interval_ms} has to be less than "
                f"session_timeout_ms={self.session_timeout_ms}, a third of it as a rule"
            )
        if self.group_instance_id is not None and self.group is None:
            found.append("group_instance_id is a place in a group: give the group as well")
        if not self.exclude_internal_topics:
            found.append("exclude_internal_topics=False: a pattern never takes in internal topics; name them")
        if self.fetch_min_bytes > self.fetch_max_bytes:
            found.append(f"fetch_min_bytes={self.fetch_min_bytes} is more than fetch_max_bytes={self.fetch_max_bytes}")
        return found


@dataclass(frozen=True, kw_only=True)
class AdminOptions(CommonOptions):
    default_api_timeout_ms: int = _option(60_000, "default.api.timeout.ms", kind="int", low=1, high=INT_MAX)
    """How long a call may take, with all retries; each has `timeout_ms` too."""


def read_options(kind: type[O], first: object, keywords: Mapping[str, object]) -> O:
    """The options of one client. `first` is what stands first in its call: addresses, or a mapping of names.

    Raises OptionError with everything that is wrong.
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
        taken: dict[str, str] = {}
        for spelling, value in source.items():
            name = names.get(spelling)
            if name is None:
                errors += _unknown(kind, spelling, value, names)
            elif name in taken and source[taken[name]] != value:
                errors.append(f"{spelling} and {taken[name]} are the same option with two values")
            else:
                taken[name] = spelling
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
        errors.append(f"no address to begin with: give bootstrap='host:{PORT}'")
    if errors:
        raise OptionError("; ".join(errors))
    made = kind(**values)
    if contradictions := made.contradictions():
        raise OptionError("; ".join(contradictions))
    return made


def spellings_of(kind: type[CommonOptions]) -> dict[str, tuple[str, ...]]:
    """Every option and its dotted names, for documentation."""
    return {one.name: tuple(one.metadata["spellings"]) for one in fields(kind)}


def _spellings(kind: type[CommonOptions]) -> dict[str, str]:
    """Every way to write an option -> its name: the name, the dotted ones, and these with underscores."""
    found: dict[str, str] = {}
    for one in fields(kind):
        for spelling in (one.name, *one.metadata["spellings"]):
            found[spelling] = found[spelling.replace(".", "_")] = one.name
        found[one.name.replace("_", ".")] = one.name
    return found


def _unknown(kind: type[CommonOptions], spelling: str, value: object, names: Mapping[str, str]) -> list[str]:
    """What is wrong with a name that is not in the table; nothing, if it may be ignored."""
    dotted = str(spelling).replace("_", ".")
    if dotted == "security.protocol" and str(value).upper() == "PLAINTEXT":
        return []
    if dotted in ("retries", "message.send.max.retries") and str(value) == "0":
        return [f"{spelling}=0: there are always retries; delivery_timeout_ms bounds them"]
    if dotted in _ONLY:
        natural, why = _ONLY[dotted]
        return [] if str(value).lower() == str(natural).lower() else [f"{spelling}={value!r}: {why}"]
    for pattern, why in _NOT_HERE:
        if re.fullmatch(pattern, dotted):
            return [f"{spelling}: {why}"]
    for pattern, why in _IGNORED:
        if re.fullmatch(pattern, dotted) or re.fullmatch(pattern, str(spelling)):
            LOGGER.warning("option %s has no effect: %s", spelling, why)
            return []
    for other in (ProducerOptions, ConsumerOptions, AdminOptions):
        if other is not kind and spelling in _spellings(other):
            return [f"{spelling} is no option of a {_client(kind)}, but of a {_client(other)}"]
    near = difflib.get_close_matches(str(spelling), names, n=1, cutoff=0.6)
    return [f"no option '{spelling}'" + (f"; did you mean '{near[0]}'?" if near else "")]


def _client(kind: type[CommonOptions]) -> str:
    return kind.__name__.removesuffix("Options").lower()


def _read(one: Field[Any], value: object) -> Any:
    """The value as the option has it; ValueError says what it should be."""
    if value is None and one.default is None:
        return None
    facts = one.metadata
    read = _READERS[facts["kind"]]
    found = read(value, facts)
    if facts["low"] is not None and not facts["low"] <= found <= facts["high"]:
        raise ValueError(f"from {facts['low']:,} to {facts['high']:,}")
    return found


def _int(value: object, _: Mapping[str, Any]) -> int:
    if isinstance(value, bool) or not isinstance(value, (int, float, str)):
        raise ValueError("a whole number")
    try:
        number = float(value)
        exact = int(value)
    except ValueError:
        raise ValueError("a whole number") from None
    if number != exact:
        raise ValueError("a whole number")
    return exact


def _float(value: object, _: Mapping[str, Any]) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float, str)):
        raise ValueError("a number")
    try:
        return float(value)
    except ValueError:
        raise ValueError("a number") from None


def _bool(value: object, _: Mapping[str, Any]) -> bool:
    if isinstance(value, bool):
        return value
    if isinstance(value, str) and value.lower() in ("true", "false"):
        return value.lower() == "true"
    raise ValueError("True or False")


def _text(value: object, _: Mapping[str, Any]) -> str:
    if not isinstance(value, str):
        raise ValueError("text")
    return value


def _choice(value: object, facts: Mapping[str, Any]) -> str:
    if isinstance(value, str) and value.lower() in facts["choices"]:
        return value.lower()
    raise ValueError(f"one of {', '.join(facts['choices'])}")


def _acks(value: object, _: Mapping[str, Any]) -> int:
    found = {"all": -1, "-1": -1, "0": 0, "1": 1}.get(str(value).lower())
    if found is None or isinstance(value, bool):
        raise ValueError("'all', 1 or 0")
    return found


def _codec(value: object, _: Mapping[str, Any]) -> Codec:
    if isinstance(value, Codec):
        return value
    if value is None:
        return Codec.NONE
    if isinstance(value, str) and value.upper() in Codec.__members__:
        return Codec[value.upper()]
    raise ValueError(f"one of {', '.join(codec.name.lower() for codec in Codec)}")


def _reset(value: object, _: Mapping[str, Any]) -> str:
    known = {"earliest": "earliest", "smallest": "earliest", "beginning": "earliest", "latest": "latest"}
    known |= {"largest": "latest", "end": "latest", "none": "none", "error": "none"}
    if isinstance(value, str):
        if value.lower() in known:
            return known[value.lower()]
        if duration_ms(value) is not None:
            return value
    raise ValueError("earliest, latest, none, or how long ago ('1h', 'by_duration:PT1H')")


def addresses_of(value: object, _: Mapping[str, Any] | None = None) -> tuple[str, ...]:
    """ "a:9292,b" or a list of such, as addresses with ports."""
    parts: Iterable[object] = value.split(",") if isinstance(value, str) else value  # type: ignore[assignment]
    if not isinstance(parts, (list, tuple)):
        raise ValueError(f"'host:{PORT}', several with commas between, or a list of them")
    found: dict[str, None] = {}
    for part in parts:
        if not isinstance(part, str):
            raise ValueError(f"'host:{PORT}', several with commas between, or a list of them")
        text = part.strip()
        if not text:
            continue
        match = re.fullmatch(r"(?P<host>\[[0-9a-fA-F:.%\w]+\]|[^\s:/\[\]]+)(:(?P<port>\d{1,5}))?", text)
        if match is None or (match["port"] is not None and not 1 <= int(match["port"]) <= 65_535):
            raise ValueError(f"'{text}' is no host:port")
        found[text if match["port"] else f"{text}:{PORT}"] = None
    if not 1 <= len(found) <= BOOTSTRAP_MAX:
        raise ValueError(f"1 to {BOOTSTRAP_MAX:,} addresses")
    return tuple(found)


def _partitioner(value: object, _: Mapping[str, Any]) -> object:
    from tidelog.client.partitioners import NAMES

    if callable(value):
        return value
    if isinstance(value, str) and value.lower() in NAMES:
        return NAMES[value.lower()]
    raise ValueError(f"one of {', '.join(sorted(set(NAMES)))}, or a function (topic, key, value, partitions) -> int")


_ASSIGNORS = {name: name for name in ("uniform", "range", "roundrobin")}
_ASSIGNORS |= {"sticky": "uniform", "cooperative-sticky": "uniform", "cooperativesticky": "uniform"}
_ASSIGNOR_CLASS = re.compile(r"(?:org\.apache\.kafka\.clients\.consumer\.)?(\w+)assignor")


def _assignor(value: object, _: Mapping[str, Any]) -> str:
    parts = value.split(",") if isinstance(value, str) else value
    for part in parts if isinstance(parts, (list, tuple)) else ():
        name = part.strip().lower() if isinstance(part, str) else ""
        match = _ASSIGNOR_CLASS.fullmatch(name)
        if (found := _ASSIGNORS.get(match[1] if match else name)) is not None:
            return found
    raise ValueError("uniform (also called sticky and cooperative-sticky), range or roundrobin, or a list of them")


_SERIALIZERS = {"bytes": "plain", "str": "string", "json": "json", "int": "integer", "long": "long", "double": "double"}
"""Names of those in `serializers`."""


def _serializer(value: object, facts: Mapping[str, Any]) -> object:
    method = "serialize" if facts["kind"] == "serializer" else "deserialize"
    if isinstance(value, str) and value in _SERIALIZERS:
        return getattr(serializers, _SERIALIZERS[value])
    if callable(value) or callable(getattr(value, method, None)):
        return value
    raise ValueError(
        f"a function, an object with {method}(topic, data), or one of {', '.join(_SERIALIZERS)} (tidelog.serializers)"
    )


def _function(value: object, _: Mapping[str, Any]) -> object:
    if not callable(value):
        raise ValueError("a function")
    return value


def _objects(value: object, _: Mapping[str, Any]) -> tuple[object, ...]:
    if isinstance(value, (str, bytes)):
        raise ValueError("a list of objects (or of their classes), not of names")
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
    for kind in (ProducerOptions, ConsumerOptions, AdminOptions)
    for one in fields(kind)
), "every option can be read"
