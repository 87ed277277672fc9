"""Decides which deletes a leader keeps for its replicas, and which replicas copy the log from its start. Pure.

A *delete* is a tombstone, or the marker that ends a transaction. A replica may be away while a delete is written, and
return after compaction removed the delete. It still has the deleted records and never sees the delete: as a leader it
would bring the key back, or keep the transaction open. Two rules prevent this (decision 0019):

1. Only the leader decides which deletes compaction may remove. It keeps every delete at or past `bound`: the smallest
   durable end of the replicas that it waits for. Followers remove only deletes below the leader's `deletes_end`, which
   it sends to them.
2. A replica that returns with records and ends below `deletes_end` copies the log from its start (`must_copy`).

    replica of the partition                          the leader keeps deletes from
    subscribed                                        its durable end
    left less than `hold_ms` ago                      its durable end when it left
    never subscribed, for less than `hold_ms`         the start of the log
    otherwise                                         does not count: rule 2 applies to it

So a replica that never returns holds deletes for `hold_ms` at most, and one that is reassigned does not hold any.

A copy from the start may be interrupted and continued. Its records come from a log without the deletes below
`deletes_end` and without everything that they deleted. So it may continue while it copies from the same log (this
leader, this epoch) and no more deletes were removed meanwhile.

One object serves one leader epoch.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from tidelog.model.ids import Offset


@dataclass(frozen=True, slots=True)
class _FollowerEnd:
    durable_end: int
    left_ms: int | None
    """None while the follower is subscribed."""


class ReplicaDeletes:
    """See the module. Times are milliseconds of one monotonic clock."""

    __slots__ = ("_began_ms", "_copied_at", "_ends")

    def __init__(self, now_ms: int) -> None:
        self._began_ms = now_ms
        self._ends: dict[int, _FollowerEnd] = {}
        self._copied_at: dict[int, int] = {}
        """By follower: `deletes_end` when its copy from the start began."""

    def must_copy(self, follower: int, *, has_records: bool, next_offset: int, deletes_end: int) -> bool:
        """Return whether the follower may have records whose delete it will never see."""
        if not has_records or next_offset >= deletes_end:
            return False
        return self._copied_at.get(follower) != deletes_end

    def subscribed(self, follower: int, durable_end: int, *, has_records: bool, deletes_end: int) -> None:
        """Note that the leader pushes to the follower from now on."""
        if not has_records:
            self._copied_at[follower] = deletes_end
        self._ends[follower] = _FollowerEnd(durable_end, None)

    def acked(self, follower: int, durable_end: int) -> None:
        known = self._ends.get(follower)
        assert known is not None, f"follower {follower} acks without a subscription"
        assert known.left_ms is None, f"follower {follower} acks after its subscription ended"
        if durable_end != known.durable_end:
            self._ends[follower] = _FollowerEnd(durable_end, None)

    def left(self, follower: int, now_ms: int) -> None:
        """Note that the subscription of the follower has ended."""
        known = self._ends.get(follower)
        if known is not None and known.left_ms is None:
            self._ends[follower] = _FollowerEnd(known.durable_end, now_ms)

    def bound(self, followers: Iterable[int], *, log_end: Offset, now_ms: int, hold_ms: int) -> Offset:
        """Return the offset from which deletes are kept. `followers` are the assigned replicas except the leader."""
        bound = log_end
        for follower in followers:
            follower_end = self._ends.get(follower, _FollowerEnd(0, self._began_ms))
            if follower_end.left_ms is None or now_ms - follower_end.left_ms < hold_ms:
                bound = min(bound, Offset(follower_end.durable_end))
        return bound
