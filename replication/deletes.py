"""Which deletes a leader keeps for its replicas, and which replicas it has copied from the start. Pure.

A *delete* is a tombstone, or the marker that ends a transaction. A replica that is away while a delete is written, and
comes back after the delete was compacted away, still holds what was deleted and never sees that it was: it would bring
the key back, or keep the transaction open, when it leads. Two rules prevent this (decision 0019):

1. The leader alone decides which deletes may go. It keeps every delete at or past `bound`: the smallest end of the
   replicas that it still waits for. Followers remove only what lies below the leader's `deletes_end`, which it sends
   them.
2. A replica that comes back with records and ends below `deletes_end` is copied from the start (`must_copy`).

    replica of the partition                          the leader keeps deletes from
    subscribed                                        its durable end
    left less than `hold_ms` ago                      its durable end when it left
    not heard of, for less than `hold_ms`             the start of the log
    otherwise                                         does not count: rule 2 applies to it

So a replica that is gone for ever holds deletes for `hold_ms` and no longer, and one that is reassigned not at all.

A copy from the start may break off and go on. What it has was copied from a log that lacked the deletes below
`deletes_end` and everything that they had deleted; so it may go on as long as it is copied from the same log (this
leader, in this epoch) and no more deletes went meanwhile.

One object is one leader epoch.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from tidelog.model.ids import Offset


@dataclass(frozen=True, slots=True)
class _Heard:
    durable_end: int
    left_ms: int | None
    """None while it is subscribed."""


class ReplicaDeletes:
    """See the module. Times are of one monotonic clock, in ms."""

    __slots__ = ("_began_ms", "_copied_at", "_heard")

    def __init__(self, now_ms: int) -> None:
        self._began_ms = now_ms
        self._heard: dict[int, _Heard] = {}
        self._copied_at: dict[int, int] = {}
        """By follower: `deletes_end` when its copy from the start began."""

    def must_copy(self, follower: int, *, has_records: bool, next_offset: int, deletes_end: int) -> bool:
        """Whether the follower may hold what was deleted by a delete that it will never see."""
        if not has_records or next_offset >= deletes_end:
            return False
        return self._copied_at.get(follower) != deletes_end

    def subscribed(self, follower: int, durable_end: int, *, has_records: bool, deletes_end: int) -> None:
        """It is pushed to from here on."""
        if not has_records:
            self._copied_at[follower] = deletes_end
        self._heard[follower] = _Heard(durable_end, None)

    def acked(self, follower: int, durable_end: int) -> None:
        known = self._heard.get(follower)
        assert known is not None, f"an ack of {follower}, which was never subscribed"
        assert known.left_ms is None, f"an ack of {follower}, which has left"
        if durable_end != known.durable_end:
            self._heard[follower] = _Heard(durable_end, None)

    def left(self, follower: int, now_ms: int) -> None:
        """Its subscription is over, for whatever reason."""
        known = self._heard.get(follower)
        if known is not None and known.left_ms is None:
            self._heard[follower] = _Heard(known.durable_end, now_ms)

    def bound(self, followers: Iterable[int], *, log_end: Offset, now_ms: int, hold_ms: int) -> Offset:
        """Deletes at or past this stay. `followers` are the assigned replicas but for the leader."""
        bound = log_end
        for follower in followers:
            heard = self._heard.get(follower, _Heard(0, self._began_ms))
            if heard.left_ms is None or now_ms - heard.left_ms < hold_ms:
                bound = min(bound, Offset(heard.durable_end))
        return bound
