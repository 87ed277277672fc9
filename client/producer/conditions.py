"""What the log must be like for a record to be stored: `expected_offset`, `fencing_token` and `claim` of `send`.

A record with a condition is a batch of its own, behind those that were sent to its partition before.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Condition:
    expected_offset: int | None = None
    fencing_token: int | None = None
    is_claim: bool = False


def condition_of(
    expected_offset: object,
    fencing_token: object,
    claim: object,
    *,
    partition: object,
    acks: int,
    is_transactional: bool = False,
) -> Condition:
    """Check the arguments of `send` or `send_many`."""
    if isinstance(partition, bool) or not isinstance(partition, int):
        raise TypeError("a condition is one of a partition: pass partition=, the number of one")
    if acks != -1:
        raise ValueError(
            f"acks={acks}: a record with a condition could be lost after it was acknowledged; use acks='all'"
        )
    if not isinstance(claim, bool):
        raise TypeError(f"claim is True or False, not {claim!r}")
    if claim and is_transactional:
        raise ValueError("claim=True: a claim is no part of a transaction: use a producer without transactional_id")
    return Condition(
        expected_offset=_offset("expected_offset", expected_offset),
        fencing_token=_offset("fencing_token", fencing_token),
        is_claim=claim,
    )


def _offset(name: str, value: object) -> int | None:
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name} is an int, not {value!r}")
    if not 0 <= value < 1 << 63:
        raise ValueError(f"{name}={value}: an offset of the partition, from 0 on")
    return value
