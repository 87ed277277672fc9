"""Offset resets of groups: targets, the plan, and the file of offsets.

    target          the new offset
    earliest        the log start offset
    latest          the end offset
    an offset       that offset
    a time          the first record at or after it; the end offset if there is none
    a shift         the committed offset plus the shift
    a table         (a file, a mapping) the offset of each partition

An offset outside of the log becomes its start or end, with a note in the plan.

The file has lines of `topic,partition,offset`, the form that Kafka's tool exports and reads.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta

from tidelog.client.admin.values import OffsetChange
from tidelog.client.durations import TimeLike, duration_ms, time_ms
from tidelog.client.offsets import EARLIEST, LATEST, MAX_TIMESTAMP
from tidelog.client.record import OffsetAndMetadata, TopicPartition
from tidelog.model.errors import InvalidRequestError

Table = Mapping[TopicPartition, int]
_WORDS = {"earliest": EARLIEST, "latest": LATEST, "max_timestamp": MAX_TIMESTAMP}


@dataclass(frozen=True, slots=True)
class Target:
    """Exactly one field is set. `time_ms` is a time, EARLIEST or LATEST."""

    time_ms: int | None = None
    offset: int | None = None
    shift: int | None = None
    table: Table | None = None


def read_time(at: TimeLike, now_ms: int) -> int:
    """Returns the timestamp of a lookup: a time, EARLIEST, LATEST or MAX_TIMESTAMP. Raises InvalidRequestError."""
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
    to_time: TimeLike | None = None,
    shift_by: int | None = None,
    by_duration: str | timedelta | None = None,
) -> Target:
    """Raises InvalidRequestError unless exactly one of the four is given, and is valid."""
    targets = {"to": to, "to_time": to_time, "shift_by": shift_by, "by_duration": by_duration}
    names = [name for name, value in targets.items() if value is not None]
    if len(names) != 1:
        wrong = f"{' and '.join(names)} exclude each other" if names else "no target"
        raise InvalidRequestError(f"{wrong}: use one of {', '.join(targets)}")
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
            raise InvalidRequestError(
                f"by_duration={by_duration!r} is not a duration: write it like '90s', '1h30m', 'PT1H'"
            )
        return Target(time_ms=max(0, now_ms - span_ms))
    if isinstance(to, Mapping):
        return Target(table=_checked(to))
    if to in ("earliest", "latest"):
        return Target(time_ms=EARLIEST if to == "earliest" else LATEST)
    if isinstance(to, int) and not isinstance(to, bool) and to >= 0:
        return Target(offset=to)
    known = "'earliest', 'latest', an offset, or {partition: offset}"
    raise InvalidRequestError(f"to={to!r} is not a target: use {known}")


def _checked(table: Mapping[TopicPartition, int]) -> Table:
    if not table:
        raise InvalidRequestError("no partition is named")
    for partition, offset in table.items():
        if not isinstance(offset, int) or isinstance(offset, bool) or offset < 0:
            raise InvalidRequestError(
                f"{TopicPartition(*partition)}: {offset!r} is not an offset: use a number from 0 on"
            )
    return {TopicPartition(*partition): offset for partition, offset in table.items()}


def plan_reset(
    target: Target,
    partitions: Sequence[TopicPartition],
    *,
    committed: Mapping[TopicPartition, OffsetAndMetadata],
    starts: Mapping[TopicPartition, int],
    ends: Mapping[TopicPartition, int],
    found: Mapping[TopicPartition, int],
) -> list[OffsetChange]:
    """`found` has the results of a lookup by the target's time; -1: no such record. Raises InvalidRequestError if a
    shift has no committed offset to start from."""
    if target.shift is not None and (missing := [row for row in partitions if row not in committed]):
        names = ", ".join(map(str, missing[:10])) + (", ..." if len(missing) > 10 else "")
        raise InvalidRequestError(f"nothing is committed of {names}: there is no offset to shift")
    changes: list[OffsetChange] = []
    for partition in partitions:
        before = committed[partition].offset if partition in committed else None
        if target.table is not None:
            requested = target.table[partition]
        elif target.offset is not None:
            requested = target.offset
        elif target.shift is not None:
            assert before is not None, "checked above"
            requested = before + target.shift
        else:
            requested = found[partition] if found[partition] >= 0 else ends[partition]
        start, end = starts[partition], ends[partition]
        after = min(max(requested, start), end)
        note = "" if after == requested else f"the log has {start} to {end}, not {requested}"
        changes.append(OffsetChange(partition, before, after, note))
    return changes


# The file.


def encode_table(table: Mapping[TopicPartition, int]) -> str:
    return "".join(f"{partition.topic},{partition.partition},{offset}\n" for partition, offset in sorted(table.items()))


def decode_table(text: str, *, where: str) -> dict[TopicPartition, int]:
    """Raises InvalidRequestError, which names the wrong line."""
    table: dict[TopicPartition, int] = {}
    for number, line in enumerate(text.splitlines(), start=1):
        if not line.strip():
            continue
        parts = [part.strip().strip('"') for part in line.split(",")]
        if len(parts) != 3 or not parts[0] or not parts[1].isdecimal() or not parts[2].isdecimal():
            raise InvalidRequestError(f"{where}:{number}: {line!r} is not topic,partition,offset")
        partition = TopicPartition(parts[0], int(parts[1]))
        if partition in table:
            raise InvalidRequestError(f"{where}:{number}: {partition} is there twice: remove one line")
        table[partition] = int(parts[2])
    if not table:
        raise InvalidRequestError(f"{where}: has no line of topic,partition,offset")
    return table
