"""Reads a compacted partition from its start to its end, again and again, and checks each complete read.

A read takes several fetches, perhaps of several replicas, and is complete when it has reached the largest high
watermark that any of them named: what was removed while it went on has a later record below that. Every acknowledged
value must then be there. A deleted key may be seen once where its tombstone went in the middle of a read; a key that
`READS_MAX` reads in a row show is back.
"""

from support.brokers.compacted_history import Pair

from simulation.broker_checker import Fail, KnownPartition

READS_MAX = 3


class TableRead:
    """One client's reads of a partition."""

    def __init__(self, known: KnownPartition, fail: Fail) -> None:
        self.is_complete = True
        self.completed = 0
        self._known = known
        self._fail = fail
        self._pairs: dict[int, Pair] = {}
        self._due: dict[bytes, int] = {}
        """By key: the offset of its latest acknowledged record when the read began."""
        self._end = 0
        self._returned: dict[bytes, int] = {}
        """By key: in how many reads in a row it was seen although it was deleted."""

    @property
    def is_in_doubt(self) -> bool:
        return bool(self._returned)

    def begin(self) -> None:
        history = self._known.history
        assert history is not None, "a compacted partition"
        self.is_complete = False
        self._pairs, self._due, self._end = {}, dict(history.latest), 0

    def took(self, who: str, pairs: dict[int, Pair], next_offset: int, high_watermark: int) -> None:
        """What one fetch has brought, and where the next one begins."""
        history = self._known.history
        assert history is not None, "a compacted partition"
        if self.is_complete:
            return
        self._pairs.update(pairs)
        self._end = max(self._end, high_watermark)
        if high_watermark < 0 or next_offset < self._end:
            return  # below 0: a new leader that has not confirmed its epoch does not tell
        self.is_complete = True
        self.completed += 1
        due = {key: offset for key, offset in self._due.items() if offset < next_offset}
        for wrong in history.lost(self._pairs, due):
            self._fail(who, f"{self._known}: {wrong}")
        returned = history.returned(self._pairs, due)
        self._returned = {key: self._returned.get(key, 0) + 1 for key in returned}
        for key, count in self._returned.items():
            if count >= READS_MAX:
                self._fail(who, f"{self._known}: {returned[key]}")
