"""Deadlines of all groups of a broker: one heap, one timer of the event loop.

A deadline that only moves later (by a heartbeat) costs one assignment: its heap entry stays and is checked again when
it is reached. An idle member holds nothing else.

    Timers          the heap, of the broker
      TimerSet      the deadlines of one shard, by key; removed at once with `clear`

A timer that fires more than `LATE_S` late means that the process was stopped (a frozen machine, SIGSTOP) or the event
loop was blocked. Heartbeats of members wait in the sockets meanwhile. So all deadlines are postponed by the delay, at
most `LATE_MAX_S`, and once: a loop that is always late still expires sessions.
"""

from __future__ import annotations

import asyncio
import heapq
from collections.abc import Callable, Hashable, Iterator

_SLACK = 64
DUE_MAX = 500
"""Deadlines handled in one turn of the event loop."""
LATE_S = 1.0
LATE_MAX_S = 10.0
"""About three default heartbeat intervals of a member."""


class Timers:
    """Belongs to one event loop; `close` at the end."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, TimerSet, Hashable]] = []
        self._number = 0
        self._live = 0
        self._handle: asyncio.Handle | None = None
        self._armed_s = 0.0
        """When `_handle` is called; not every loop's handle shows it."""
        self._expected_s = 0.0
        """When `_handle` is called if the loop is not late: a deadline may be set after it has passed."""
        self._put_off_s = 0.0
        """No deadline is due before this time."""
        self._was_put_off = False
        self._is_closed = False

    def __len__(self) -> int:
        """Return the number of deadlines."""
        return self._live

    def new_set(self, on_due: Callable[[Hashable], None]) -> TimerSet:
        """Create a set. `on_due` is called with the key of each passed deadline, after it is removed."""
        return TimerSet(self, on_due)

    def close(self) -> None:
        self._is_closed = True
        self._heap.clear()
        if self._handle is not None:
            self._handle.cancel()

    # For the sets.

    def changed(self, by: int) -> None:
        self._live += by

    def push(self, at_s: float, owner: TimerSet, key: Hashable) -> None:
        if self._is_closed:
            return
        self._number += 1
        heapq.heappush(self._heap, (at_s, self._number, owner, key))
        if len(self._heap) > 2 * self._live + _SLACK:
            self._rebuild()
        self._arm()

    def _rebuild(self) -> None:
        """Drop heap entries of removed deadlines."""
        kept: dict[tuple[TimerSet, Hashable], tuple[float, int, TimerSet, Hashable]] = {}
        for entry in sorted(self._heap):
            _, _, owner, key = entry
            if owner.at(key) is not None:
                kept.setdefault((owner, key), entry)
        self._heap = list(kept.values())  # a sorted list is a heap

    def _arm(self) -> None:
        first = max(self._heap[0][0], self._put_off_s) if self._heap else None
        if self._handle is not None:
            if first is not None and self._armed_s <= first and not self._handle.cancelled():
                return
            self._handle.cancel()
            self._handle = None
        if first is not None:
            loop = asyncio.get_running_loop()
            self._handle = loop.call_at(first, self._fire)
            self._armed_s, self._expected_s = first, max(first, loop.time())

    def _fire(self) -> None:
        self._handle = None
        now_s = asyncio.get_running_loop().time()
        late_s = now_s - self._expected_s
        if late_s > LATE_S and not self._was_put_off:
            self._was_put_off, self._put_off_s = True, now_s + min(late_s, LATE_MAX_S)
            self._arm()
            return
        self._was_put_off = False
        heap, left = self._heap, DUE_MAX
        while heap and heap[0][0] <= now_s and left > 0:
            left -= 1
            _, _, owner, key = heapq.heappop(heap)
            at_s = owner.at(key)
            if at_s is None:
                continue
            if at_s > now_s:
                self.push(at_s, owner, key)
            else:
                owner.due(key)
        self._arm()


class TimerSet:
    """The deadlines of one owner, in seconds of the event loop."""

    __slots__ = ("_at", "_on_due", "_timers")

    def __init__(self, timers: Timers, on_due: Callable[[Hashable], None]) -> None:
        self._timers = timers
        self._on_due = on_due
        self._at: dict[Hashable, float] = {}

    def __len__(self) -> int:
        return len(self._at)

    def __iter__(self) -> Iterator[Hashable]:
        return iter(self._at)

    def at(self, key: Hashable) -> float | None:
        return self._at.get(key)

    def set(self, key: Hashable, at_s: float) -> None:
        """Set or replace the deadline of a key."""
        before = self._at.get(key)
        self._at[key] = at_s
        if before is None:
            self._timers.changed(1)
        if before is None or at_s < before:
            self._timers.push(at_s, self, key)

    def cancel(self, key: Hashable) -> None:
        if self._at.pop(key, None) is not None:
            self._timers.changed(-1)

    def clear(self) -> None:
        count = len(self._at)
        self._at.clear()
        self._timers.changed(-count)

    def due(self, key: Hashable) -> None:
        self.cancel(key)
        self._on_due(key)
