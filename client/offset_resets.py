"""Where a group shall begin anew: what can be asked for, the file that holds offsets, and the plan. Pure.

    asked for       becomes
    earliest        the start of the log
    latest          its end
    an offset       that offset
    a time          the first record at or after it; its end if there is none
    a shift         what is committed, plus so many (less, if negative)
    a table         (a file, a mapping) what it says of each partition

What lies outside of the log is moved to its start or end, and the plan says so.

The file is lines of `topic,partition,offset`, the form that Kafka's tool exports and reads.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta

from tidelog.client.admin_values import OffsetChange
from tidelog.client.durations import duration_ms, time_ms
from tidelog.client.offsets import EARLIEST, LATEST, MAX_TIMESTAMP
from tidelog.client.record import OffsetAndMetadata, TopicPartition
from tidelog.model.errors import InvalidRequestError

When = str | int | float | datetime | timedelta
Table = Mapping[TopicPartition, int]
_WORDS = {"earliest": EARLIEST, "latest": LATEST, "max_timestamp": MAX_TIMESTAMP}


@dataclass(frozen=True, slots=True)
class Target:
    """One of them is set. `time_ms` is a time, EARLIEST or LATEST."""

    time_ms: int | None = None
    offset: int | None = None
    shift: int | None = None
    table: Table | None = None


def read_time(at: When, now_ms: int) -> int:
    """What leaders are asked: a time, EARLIEST, LATEST or MAX_TIMESTAMP. Raises InvalidRequestError."""
    if isinstance(at, str) and at.lower() in _WORDS:
        return _WORDS[at.lower()]
    try:
        return max(0, time_ms(at, now_ms))
    except ValueError as error:
        raise InvalidRequestError(f"{error}; or one of {', '.join(_WORDS)}") from None


def read_target(
    *,
    now_ms: int,
    to: str | int | Mapping[TopicPartition, int] | None = None,
    to_time: When | None = None,
    shift_by: int | None = None,
    by_duration: str | timedelta | None = None,
) -> Target:
    """Raises InvalidRequestError unless exactly one of them is given, and means something."""
    given = [name for name, one in (("to", to), ("to_time", to_time), ("shift_by", shift_by),
                                    ("by_duration", by_duration)) if one is not None]  # fmt: skip
    if len(given) != 1:
        told = " and ".join(given) or "nothing"
        raise InvalidRequestError(f"{told} is given: one of to, to_time, shift_by, by_duration says where to go")
    if to_time is not None:
        try:
            return Target(time_ms=max(0, time_ms(to_time, now_ms)))
        except ValueError as error:
            raise InvalidRequestError(f"to_time: {error}") from None
    if shift_by is not None:
        return Target(shift=shift_by)
    if by_duration is not None:
        span_ms = (
            round(by_duration.total_seconds() * 1000)
            if isinstance(by_duration, timedelta)
            else duration_ms(str(by_duration))
        )
        if span_ms is None or span_ms < 0:
            raise InvalidRequestError(f"by_duration={by_duration!r}: a span like '90s', '1h30m', 'PT1H'")
        return Target(time_ms=max(0, now_ms - span_ms))
    if isinstance(to, Mapping):
        return Target(table=_checked(to))
    if to in ("earliest", "latest"):
        return Target(time_ms=EARLIEST if to == "earliest" else LATEST)
    if isinstance(to, int) and not isinstance(to, bool) and to >= 0:
        return Target(offset=to)
    raise InvalidRequestError(f"to={to!r}: 'earliest', 'latest', an offset from 0 on, or {{partition: offset}}")


def _checked(table: Mapping[TopicPartition, int]) -> Table:
    if not table:
        raise InvalidRequestError("no partition is named")
    for place, offset in table.items():
        if not isinstance(offset, int) or isinstance(offset, bool) or offset < 0:
            raise InvalidRequestError(f"{TopicPartition(*place)}: {offset!r} is no offset; it is a number from 0 on")
    return {TopicPartition(*place): offset for place, offset in table.items()}


def planned(
    target: Target,
    places: Iterable[TopicPartition],
    *,
    committed: Mapping[TopicPartition, OffsetAndMetadata],
    starts: Mapping[TopicPartition, int],
    ends: Mapping[TopicPartition, int],
    found: Mapping[TopicPartition, int],
) -> list[OffsetChange]:
    """`found` has what a look-up by the target's time has given, -1 where there is no such record. Raises
    InvalidRequestError if there is nothing to shift."""
    changes: list[OffsetChange] = []
    places = list(places)
    if target.shift is not None and (missing := [place for place in places if place not in committed]):
        told = ", ".join(map(str, missing[:10])) + (", ..." if len(missing) > 10 else "")
        raise InvalidRequestError(f"nothing is committed of {told}: there is nothing to shift")
    for place in places:
        before = committed[place].offset if place in committed else None
        if target.table is not None:
            wanted = target.table[place]
        elif target.offset is not None:
            wanted = target.offset
        elif target.shift is not None:
            assert before is not None, "looked at above"
            wanted = before + target.shift
        else:
            wanted = found[place] if found[place] >= 0 else ends[place]
        after = min(max(wanted, starts[place]), ends[place])
        note = "" if after == wanted else f"the log has {starts[place]} to {ends[place]}, not {wanted}"
        changes.append(OffsetChange(place, before, after, note))
    return changes


# The file.


def encode_table(table: Mapping[TopicPartition, int]) -> str:
    return "".join(f"{place.topic},{place.partition},{offset}\n" for place, offset in sorted(table.items()))


def decode_table(text: str, *, where: str) -> dict[TopicPartition, int]:
    """Raises InvalidRequestError, which names the line."""
    table: dict[TopicPartition, int] = {}
    for number, line in enumerate(text.splitlines(), start=1):
        if not line.strip():
            continue
        parts = [part.strip().strip('"') for part in line.split(",")]
        if len(parts) != 3 or not parts[0] or not parts[1].isdecimal() or not parts[2].isdecimal():
            raise InvalidRequestError(f"{where}:{number}: {line!r} is not topic,partition,offset")
        place = TopicPartition(parts[0], int(parts[1]))
        if place in table:
            raise InvalidRequestError(f"{where}:{number}: {place} is there twice")
        table[place] = int(parts[2])
    if not table:
        raise InvalidRequestError(f"{where}: has no line of topic,partition,offset")
    return table
