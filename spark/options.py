"""The options of the source, read and checked. Pure.

Keys are case-insensitive, and `kafka.` before a key changes nothing, so that a query of Spark's Kafka source moves over
by its format and its port. A key that is wrong, or a value that cannot be meant, is one line that names both. What is
no option of the source itself but has a dot in it (`request.timeout.ms`, also as `client.request.timeout.ms`) is the
client's (`client`), and read by it.
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
PATIENCE_MS = 120_000
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
"""Of Spark's Kafka source and its consumer, and Spark's own: nothing is lost by going on without. Not by `group.id`
least of all: it may be another application's, whose offsets the query would overwrite."""
_REFUSED = {
    "auto.offset.reset": "give startingOffsets",
    "enable.auto.commit": "progress is in Spark's checkpoint; groupId shows it in the cluster as well",
    "key.deserializer": "keys are binary: cast them in the query",
    "value.deserializer": "values are binary: cast them in the query",
    "interceptor.classes": "the source has none",
    "group.instance.id": "a query is no member of a group; groupId shows its progress as one's offsets",
    "path": "a topic is no path: give subscribe",
}
_CLIENTS_OWN = ("client.id", "client.dns.lookup")


@dataclass(frozen=True, slots=True)
class Bound:
    """Where to begin, or to end. `text` is the option as given, for errors.

    kind        number, places
    offsets     of all partitions that `places` does not name `number`: EARLIEST or LATEST; of those it names, an
                offset or one of the two
    times       ms since 1970, of all but those that `places` names; None: they are not named, and `default` (EARLIEST
                or LATEST) holds
    """

    kind: str
    option: str
    number: int | None
    places: Places = field(default_factory=dict)
    default: int = LATEST


@dataclass(frozen=True, slots=True)
class Subscription:
    """One of the three."""

    topics: tuple[str, ...] = ()
    pattern: str = ""
    assigned: Mapping[str, tuple[int, ...]] = field(default_factory=dict)

    def takes(self, topic: str) -> bool:
        """Whether it names the topic, or takes one of that name in."""
        if self.pattern:
            return re.fullmatch(self.pattern, topic) is not None
        return topic in self.assigned or topic in self.topics

    def numbers(self, topic: str, count: int) -> tuple[int, ...]:
        """Those partitions of a topic of so many that are read."""
        return self.assigned[topic] if self.assigned else tuple(range(count))

    @property
    def names(self) -> tuple[str, ...]:
        """Topics that have to be there; none for a pattern."""
        return tuple(self.assigned) or self.topics


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceOptions:
    bootstrap: str
    subscription: Subscription
    starting: Bound
    ending: Bound
    fails_without_match: bool = True
    """A time after the last record is an error; otherwise it means the end."""
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
    patience_ms: int = PATIENCE_MS
    """How long the query waits for brokers that do not answer, or partitions that nobody leads; 0: for ever."""
    metadata_max_age_ms: int = METADATA_MAX_AGE_MS
    """How often to look for new topics and partitions."""
    pushes_filters: bool = False
    client: tuple[tuple[str, str], ...] = ()
    """What the client takes."""


def normalized(options: Mapping[str, str]) -> dict[str, str]:
    """The same by one spelling of each key: lower case, without `kafka.` and `client.` where they are prefixes only.
    Raises OptionError for one key that is given twice with different values."""
    found: dict[str, str] = {}
    for key, value in options.items():
        name = key.lower().removeprefix("kafka.")
        if name.startswith("client.") and name not in _OWN and name not in _CLIENTS_OWN:
            name = name.removeprefix("client.")
        name = _ALIASES.get(name, name)
        if name in found and found[name] != value:
            raise OptionError(f"{_spelled(name)} is given twice: '{found[name]}' and '{value}'")
        found[name] = value
    return found


def _spelled(name: str) -> str:
    return _OWN.get(name, name)


def source_options(options: Mapping[str, str], *, is_streaming: bool, now_ms: int) -> SourceOptions:
    """Raises OptionError, one line."""
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
        raise OptionError("bootstrap.servers is missing: give the addresses of brokers, as 'host:9292'")
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
        patience_ms=_or(reader.number("brokerTimeoutMs", low=0), PATIENCE_MS),
        metadata_max_age_ms=_or(reader.number("metadata.max.age.ms", low=100), METADATA_MAX_AGE_MS),
        pushes_filters=reader.flag("pushFilters", False),
        client=tuple(sorted(client.items())),
    )


def _or(value: int | None, default: int) -> int:
    return default if value is None else value


class _Reader:
    """Values of options, each checked."""

    def __init__(self, given: Mapping[str, str], now_ms: int) -> None:
        self._given = given
        self._now_ms = now_ms

    def text(self, name: str) -> str | None:
        return self._given.get(name.lower())

    def number(self, name: str, *, low: int, read: Callable[[str], int | None] | None = None) -> int | None:
        text = self.text(name)
        if text is None:
            return None
        found = (read or _whole)(text.strip())
        if found is None or found < low:
            what = {_bytes: "a size, as '16777216' or '16m'", _span: "a span, as '15m' or '90s'"}.get(read)  # type: ignore[arg-type]
            raise OptionError(f"{name}='{text}': {what or 'a whole number'}, {low} or more")
        return found

    def flag(self, name: str, default: bool) -> bool:
        return self.choice(name, ("true", "false"), str(default).lower()) == "true"

    def choice(self, name: str, choices: tuple[str, ...], default: str) -> str:
        text = self.text(name)
        found = default if text is None else text.strip().lower()
        if found not in choices:
            raise OptionError(f"{name}='{text}': one of {', '.join(choices)}")
        return found

    def when(self, name: str, text: str) -> int:
        """ms since 1970: a number, ISO 8601, or so long ago ("-2h", "2h")."""
        found = _whole(text.strip())
        if found is not None and found >= 0:
            return found
        try:
            # Before 1970 no record is, and numbers below 0 are words of the brokers.
            return max(0, time_ms(text.strip().removeprefix("-"), self._now_ms))
        except ValueError:
            raise OptionError(
                f"{name}='{text}': ms since 1970, an ISO 8601 time, or how long ago ('-2h', '-90s')"
            ) from None


def _whole(text: str) -> int | None:
    return int(text) if re.fullmatch(r"-?\d{1,19}", text) else None


def _bytes(text: str) -> int | None:
    found = re.fullmatch(r"(\d{1,18})\s*([kmgt]?)i?b?", text.lower())
    return None if found is None else int(found[1]) << 10 * " kmgt".index(found[2] or " ")


def _span(text: str) -> int | None:
    whole = _whole(text)
    return whole if whole is not None else duration_ms(text.replace(" ", "").replace("min", "m"))


def _subscription(given: Mapping[str, str]) -> Subscription:
    chosen = [name for name in ("subscribe", "subscribepattern", "assign") if name in given]
    if len(chosen) != 1:
        told = " and ".join(f"{_OWN[name]}='{given[name]}'" for name in chosen) or "none of them"
        raise OptionError(f"give one of subscribe, subscribePattern and assign, not {told}")
    (name,) = chosen
    text = given[name]
    if name == "subscribepattern":
        try:
            re.compile(text)
        except re.error as error:
            raise OptionError(f"subscribePattern='{text}': no regular expression ({error})") from None
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
    """In Kafka's order: one time for all, times, offsets."""
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
            raise OptionError(f"{name}='{text}': a read cannot end where the log begins")
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
