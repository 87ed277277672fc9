"""Parses durations and timestamps as users write them. Pure."""

from __future__ import annotations

import re
from datetime import UTC, datetime, timedelta

from tidelog.model.errors import InvalidRequestError

TimeLike = str | int | float | datetime | timedelta
_UNITS_MS = {"ms": 1, "s": 1_000, "m": 60_000, "h": 3_600_000, "d": 86_400_000, "w": 604_800_000}
_SHORT = re.compile(r"(?:\d+(?:\.\d+)?(?:ms|[smhdw]))+")
_SHORT_PART = re.compile(r"(\d+(?:\.\d+)?)(ms|[smhdw])")
_ISO = re.compile(r"P(?=.)(?:(\d+)D)?(?:T(?=.)(?:(\d+)H)?(?:(\d+)M)?(?:(\d+(?:\.\d+)?)S)?)?")
BY_DURATION = "by_duration:"


def duration_ms(text: str) -> int | None:
    """Parse "90s", "1h30m", "2d", or ISO 8601 ("PT1H"), also after Kafka's "by_duration:"; None for anything else."""
    text = text.strip().removeprefix(BY_DURATION)
    if _SHORT.fullmatch(text):
        return round(sum(float(count) * _UNITS_MS[unit] for count, unit in _SHORT_PART.findall(text)))
    match = _ISO.fullmatch(text)
    if match is None:
        return None
    days, hours, minutes, seconds = (float(part or 0) for part in match.groups())
    return round(1000 * (seconds + 60 * (minutes + 60 * (hours + 24 * days))))


def check_timeout(timeout: float | None) -> None:
    """Raise InvalidRequestError for what is not a timeout: seconds from 0 on, or None."""
    if timeout is not None and (isinstance(timeout, bool) or not isinstance(timeout, (int, float)) or not timeout >= 0):
        raise InvalidRequestError(f"timeout={timeout!r}: use seconds from 0 on")


def time_ms(when: TimeLike, now_ms: int) -> int:
    """Return ms since 1970: for a duration ago ("1h", a timedelta), ms since 1970, a datetime, or ISO 8601 text.

    A datetime without a zone is UTC. Raises ValueError for anything else.
    """
    if isinstance(when, timedelta):
        return now_ms - round(when.total_seconds() * 1000)
    if isinstance(when, str):
        ago = duration_ms(when)
        if ago is not None:
            return now_ms - ago
        try:
            when = datetime.fromisoformat(when)
        except ValueError:
            raise ValueError(
                f"'{when}' is not a time: use a duration ('90s', '1h', '2d'), ISO 8601, a datetime, or ms since 1970"
            ) from None
    if isinstance(when, datetime):
        zoned = when if when.tzinfo is not None else when.replace(tzinfo=UTC)
        return round(zoned.timestamp() * 1000)
    if isinstance(when, bool) or not isinstance(when, (int, float)):
        raise ValueError(f"{when!r} is not a time")
    return int(when)
