"""How many records a call may give. Pure."""

from __future__ import annotations

from tidelog.model.errors import InvalidRequestError


def read_count(asked: int | None, usual: int) -> int:
    if asked is None:
        return usual
    if isinstance(asked, bool) or not isinstance(asked, int) or asked < 1:
        raise InvalidRequestError(f"max_records={asked!r}: a number from 1 on, or None")
    return asked
