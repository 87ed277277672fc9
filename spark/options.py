"""Reads and checks the options of the source. Pure.

Keys are case-insensitive, and a `kafka.` prefix is ignored, so a query for Spark's Kafka source needs only another
format and port. Each error is one line that names the option and its value. Keys with a dot that are not the source's
own (`request.timeout.ms`, also as `client.request.timeout.ms`) go to the client (`client`), which checks them.
"""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from tidelog.client.durations import duration_ms, time_ms
from tidelog.client.errors import OptionError
from tidelog.spark.admission import DELAY_MAX_MS, Limits

EARLIEST, LATEST = -2, -1
COLUMNS = ("key", "value", "topic", "partition", "offset", "timestamp", "timestampType", "headers")

TARGET_BYTES = 32 << 20
BROKER_TIMEOUT_MS = 120_000
METADATA_MAX_AGE_MS = 10_000

Places = Mapping[str, Mapping[int, int]]
"""A number for each partition of each topic."""

_OWN = {
    name.lower(): name
    for name in (
        "bootstrap.servers", "subscribe", "subscribePattern", "assign", "startingOffsets", "startingTimestamp",
        "startingOffsetsByTimestamp", "startingOffsetsByTimestampStrategy", "endingOffsets", "endingTimestamp",
        "endingOffsetsByTimestamp", "failOnDataLoss", "maxOffsetsPerTrigger", "maxBytesPerTrigger",
        "minOffsetsPerTrigger", "maxTriggerDelay", "minPartitions", "maxRecordsPerPartition", "targetBytesPerTask",
        "includeHeaders", "columns", "groupId", "isolation.level", "client.rack", "brokerTimeoutMs",
        "metadata.max.age.ms", "pushFilters",
    )
}  # fmt: skip
_ALIASES = {
    "bootstrap": "bootstrap.servers",
    "partition.metadata.cache.ttl.ms": "metadata.max.age.ms",
}
_WITHOUT_EFFECT = frozenset(
    {
        "groupidprefix", "group.id", "fetchoffset.numretries", "fetchoffset.retryintervalms",
        "kafkaconsumer.polltimeoutms", "fetch.min.bytes", "max.poll.records", "checkpointlocation",
    }
)  # fmt: skip
"""Options of Spark's Kafka source, its consumer and Spark itself that are safe to ignore. `group.id` may belong to
another application, whose offsets the query would overwrite.
"""
_REFUSED = {
    "auto.offset.reset": "set startingOffsets",
    "enable.auto.commit": "progress is in Spark's checkpoint; groupId shows it in the cluster as well",
    "key.deserializer": "keys are binary: cast them in the query",
    "value.deserializer": "values are binary: cast them in the query",
    "interceptor.classes": "the source has none",
    "group.instance.id": "a query does not join a group; set groupId to publish its offsets",
    "path": "load() takes no path: set subscribe",
}
_CLIENTS_OWN = ("client.id", "client.dns.lookup")


@dataclass(frozen=True, slots=True)
class Bound:
    """The start or end of a read. `option` is its name, for errors.

    kind        number, places
    offsets     `number` (EARLIEST or LATEST) for partitions that `places` does not name; for the others an offset,
                EARLIEST or LATEST
    times       ms since 1970, for partitions that `places` does not name; None: `default` (EARLIEST or LATEST)
    """

    kind: str
    option: str
    number: int | None
    places: Places = field(default_factory=dict)
    default: int = LATEST


@dataclass(frozen=True, slots=True)
class Subscription:
    """Exactly one of `topics`, `pattern` and `assigned` is set."""

    topics: tuple[str, ...] = ()
    pattern: str = ""
    assigned: Mapping[str, tuple[int, ...]] = field(default_factory=dict)

    def takes(self, topic: str) -> bool:
        """Return whether the topic is subscribed."""
        if self.pattern:
            return re.fullmatch(self.pattern, topic) is not None
        return topic in self.assigned or topic in self.topics

    def numbers(self, topic: str, count: int) -> tuple[int, ...]:
        """Return the subscribed partitions of a topic with `count` partitions."""
        return self.assigned[topic] if self.assigned else tuple(range(count))

    @property
    def names(self) -> tuple[str, ...]:
        """Topics that must exist; none for a pattern."""
        return tuple(self.assigned) or self.topics


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceOptions:
    bootstrap: str
    subscription: Subscription
    starting: Bound
    ending: Bound
    fails_without_match: bool = True
    """A timestamp after the last record is an error; otherwise it means the log end."""
    fail_on_data_loss: bool = True
    limits: Limits = field(default_factory=Limits)
    tasks_min: int = 1
    records_max: int | None = None
    target_bytes: int = TARGET_BYTES
    include_headers: bool = False
    columns: tuple[str, ...] | None = None
    group: str = ""
    is_committed_only: bool = False
    rack: str = ""
    broker_timeout_ms: int = BROKER_TIMEOUT_MS
    """How long the query waits for unresponsive brokers or leaderless partitions, in ms; 0: forever."""
    metadata_max_age_ms: int = METADATA_MAX_AGE_MS
    """How often to check for new topics and partitions, in ms."""
    pushes_filters: bool = False
    client: tuple[tuple[str, str], ...] = ()
    """Options for the client."""


def normalized(options: Mapping[str, str]) -> dict[str, str]:
    """Normalize keys: lower case, without the prefixes `kafka.` and `client.`. Raises OptionError for a key with two
    different values."""
    normal: dict[str, str] = {}
    for key, value in options.items():
        name = key.lower().removeprefix("kafka.")
        if name.startswith("client.") and name not in _OWN and name not in _CLIENTS_OWN:
            name = name.removeprefix("client.")
        name = _ALIASES.get(name, name)
        if name in normal and normal[name] != value:
            raise OptionError(f"{_spelled(name)} is given twice: '{normal[name]}' and '{value}'")
        normal[name] = value
    return normal


def _spelled(name: str) -> str:
    return _OWN.get(name, name)


def source_options(options: Mapping[str, str], *, is_streaming: bool, now_ms: int) -> SourceOptions:
    """Parse the options. Raises OptionError with one line."""
    given = normalized(options)
    client: dict[str, str] = {}
    for name, value in given.items():
        if name in _REFUSED:
            raise OptionError(f"{name}='{value}': {_REFUSED[name]}")
        if name in _OWN or name in _WITHOUT_EFFECT:
            continue
        if "." not in name:
            near = difflib.get_close_matches(name, _OWN, n=1, cutoff=0.6)
            hint = f"; did you mean '{_OWN[near[0]]}'?" if near else ""
            raise OptionError(f"no option '{name}' of the source (its value is '{value}'){hint}")
        client[name] = value
    reader = _Reader(given, now_ms)
    if not given.get("bootstrap.servers", "").strip():
        raise OptionError("bootstrap.servers is missing: set it to addresses of brokers, as 'host:9292'")
    default = LATEST if is_streaming else EARLIEST
    if is_streaming and (ending := next((name for name in given if name.startswith("ending")), None)):
        raise OptionError(f"{_spelled(ending)}='{given[ending]}': a streaming query has no end; use it in a batch read")
    limits = Limits(
        offsets_max=reader.number("maxOffsetsPerTrigger", low=1),
        bytes_max=reader.number("maxBytesPerTrigger", low=1, read=_bytes),
        offsets_min=reader.number("minOffsetsPerTrigger", low=1),
        delay_max_ms=reader.number("maxTriggerDelay", low=1, read=_span) or DELAY_MAX_MS,
    )
    if limits.offsets_min and limits.offsets_max and limits.offsets_min > limits.offsets_max:
        raise OptionError(
            f"minOffsetsPerTrigger='{limits.offsets_min}' is more than maxOffsetsPerTrigger='{limits.offsets_max}'"
        )
    strategy = reader.choice("startingOffsetsByTimestampStrategy", ("error", "latest"), "error")
    return SourceOptions(
        bootstrap=given["bootstrap.servers"],
        subscription=_subscription(given),
        starting=_bound(reader, "starting", default),
        ending=_bound(reader, "ending", LATEST),
        fails_without_match=strategy == "error",
        fail_on_data_loss=reader.flag("failOnDataLoss", True),
        limits=limits,
        tasks_min=reader.number("minPartitions", low=1) or 1,
        records_max=reader.number("maxRecordsPerPartition", low=1),
        target_bytes=reader.number("targetBytesPerTask", low=1, read=_bytes) or TARGET_BYTES,
        include_headers=reader.flag("includeHeaders", False),
        columns=_columns(given),
        group=given.get("groupid", ""),
        is_committed_only=reader.choice("isolation.level", ("read_uncommitted", "read_committed"), "read_uncommitted")
        == "read_committed",
        rack=given.get("client.rack", ""),
        broker_timeout_ms=_or(reader.number("brokerTimeoutMs", low=0), BROKER_TIMEOUT_MS),
        metadata_max_age_ms=_or(reader.number("metadata.max.age.ms", low=100), METADATA_MAX_AGE_MS),
        pushes_filters=reader.flag("pushFilters", False),
        client=tuple(sorted(client.items())),
    )


def _or(value: int | None, default: int) -> int:
    return default if value is None else value


class _Reader:
    """Reads and checks option values."""

    def __init__(self, given: Mapping[str, str], now_ms: int) -> None:
        self._given = given
        self._now_ms = now_ms

    def text(self, name: str) -> str | None:
        return self._given.get(name.lower())

    def number(self, name: str, *, low: int, read: Callable[[str], int | None] | None = None) -> int | None:
        text = self.text(name)
        if text is None:
            return None
        number = (read or _whole)(text.strip())
        if number is None or number < low:
            what = {_bytes: "a size, as '16777216' or '16m'", _span: "a span, as '15m' or '90s'"}.get(read)  # type: ignore[arg-type]
            raise OptionError(f"{name}='{text}': {what or 'an integer'}, {low} or more")
        return number

    def flag(self, name: str, default: bool) -> bool:
        return self.choice(name, ("true", "false"), str(default).lower()) == "true"

    def choice(self, name: str, choices: tuple[str, ...], default: str) -> str:
        text = self.text(name)
        choice = default if text is None else text.strip().lower()
        if choice not in choices:
            raise OptionError(f"{name}='{text}': one of {', '.join(choices)}")
        return choice

    def when(self, name: str, text: str) -> int:
        """Return ms since 1970: from a number, ISO 8601, or a duration ago ("-2h", "2h")."""
        number = _whole(text.strip())
        if number is not None and number >= 0:
            return number
        try:
            # No record predates 1970, and brokers reserve negative numbers.
            return max(0, time_ms(text.strip().removeprefix("-"), self._now_ms))
        except ValueError:
            raise OptionError(
                f"{name}='{text}': ms since 1970, an ISO 8601 time, or how long ago ('-2h', '-90s')"
            ) from None


def _whole(text: str) -> int | None:
    return int(text) if re.fullmatch(r"-?\d{1,19}", text) else None


def _bytes(text: str) -> int | None:
    match = re.fullmatch(r"(\d{1,18})\s*([kmgt]?)i?b?", text.lower())
    return None if match is None else int(match[1]) << 10 * " kmgt".index(match[2] or " ")


def _span(text: str) -> int | None:
    whole = _whole(text)
    return whole if whole is not None else duration_ms(text.replace(" ", "").replace("min", "m"))


def _subscription(given: Mapping[str, str]) -> Subscription:
    chosen = [name for name in ("subscribe", "subscribepattern", "assign") if name in given]
    if len(chosen) != 1:
        values = " and ".join(f"{_OWN[name]}='{given[name]}'" for name in chosen) or "none of them"
        raise OptionError(f"use one of subscribe, subscribePattern and assign, not {values}")
    (name,) = chosen
    text = given[name]
    if name == "subscribepattern":
        try:
            re.compile(text)
        except re.error as error:
            raise OptionError(f"subscribePattern='{text}': not a regular expression ({error})") from None
        if not text:
            raise OptionError("subscribePattern='': a regular expression")
        return Subscription(pattern=text)
    if name == "subscribe":
        topics = tuple(dict.fromkeys(part.strip() for part in text.split(",") if part.strip()))
        if not topics:
            raise OptionError(f"subscribe='{text}': names of topics, with commas between them")
        return Subscription(topics=topics)
    rows = _json(name, text)
    try:
        assigned = {str(topic): tuple(sorted({_partition(one) for one in numbers})) for topic, numbers in rows.items()}
    except (TypeError, ValueError, AttributeError):
        assigned = {}
    if not assigned or not all(assigned.values()):
        raise OptionError(f"""assign='{text}': partitions of topics as JSON, as {{"orders": [0, 1]}}""")
    return Subscription(assigned=assigned)


def _partition(value: object) -> int:
    number = _whole(str(value))
    if isinstance(value, bool) or number is None or number < 0:
        raise ValueError(value)
    return number


def _json(name: str, text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError as error:
        raise OptionError(f"{_spelled(name)}='{text}': no JSON ({error})") from None


def _bound(reader: _Reader, side: str, default: int) -> Bound:
    """Read a bound in Kafka's precedence: one timestamp, timestamps per partition, offsets."""
    name = f"{side}Timestamp"
    if (text := reader.text(name)) is not None:
        return Bound("times", f"{name}='{text}'", reader.when(name, text))
    name = f"{side}OffsetsByTimestamp"
    if (text := reader.text(name)) is not None:
        places = _places(name, text, lambda one: reader.when(name, str(one)))
        return Bound("times", f"{name}='{text}'", None, places, default)
    name = f"{side}Offsets"
    text = reader.text(name)
    words = {"earliest": EARLIEST, "latest": LATEST}
    if text is None or text.strip().lower() in words:
        number = default if text is None else words[text.strip().lower()]
        if side == "ending" and number == EARLIEST:
            raise OptionError(f"{name} cannot be earliest")
        return Bound("offsets", f"{name}='{text}'", number)
    if not text.strip().startswith("{"):
        raise OptionError(f"{name}='{text}': earliest, latest, or offsets as JSON")
    return Bound("offsets", f"{name}='{text}'", default, _places(name, text, lambda one: _offset(one, side)))


def _offset(value: object, side: str) -> int:
    number = _whole(str(value))
    lowest = LATEST if side == "ending" else EARLIEST
    if isinstance(value, bool) or number is None or number < lowest:
        raise ValueError(value)
    return number


def _places(name: str, text: str, read: Callable[[object], int]) -> Places:
    rows = _json(name, text)
    try:
        return {
            str(topic): {_partition(number): read(value) for number, value in numbers.items()}
            for topic, numbers in rows.items()
        }
    except (TypeError, ValueError, AttributeError):
        raise OptionError(
            f"""{name}='{text}': a number for each partition as JSON, as {{"orders": {{"0": 23}}}}"""
        ) from None


def _columns(given: Mapping[str, str]) -> tuple[str, ...] | None:
    text = given.get("columns")
    if text is None:
        return None
    spelled = {name.lower(): name for name in COLUMNS}
    names = [part.strip().lower() for part in text.split(",") if part.strip()]
    unknown = [name for name in names if name not in spelled]
    if unknown or not names or len(set(names)) < len(names):
        raise OptionError(f"columns='{text}': some of {', '.join(COLUMNS)}, each once")
    return tuple(spelled[name] for name in names)
