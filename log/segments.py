"""The segments of a log, in order: finds the segment of an offset. No IO of its own; files come from the pool.

    sealed: [0, 40) [40, 97)      active: [97, end_offset)

Appends go to the active segment. Sealed segments never change; cleaning replaces them, retention drops the oldest. A
reader notes `version` before an await and starts again if it has changed: the bytes at a position may be others.
"""

from bisect import bisect_right
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

from tidelog.log.file_pool import FilePool
from tidelog.log.segment import LOG, ActiveSegment, SegmentInfo, file_path

_HINTS_MAX = 8


class SegmentView(NamedTuple):
    """A segment as a reader sees it: bytes past `size` do not exist for it."""

    base_offset: int
    next_offset: int
    size: int
    is_active: bool


@dataclass(slots=True, eq=False)
class Segments:
    """Owns the list of sealed segments, the active segment, the end offset and the read hints.

    Invariants (`validate`): each sealed segment begins where the one before ends, the active one where the last sealed
    one ends, and `end_offset` is not below it; what waits for the indexes of the active one lies inside of it.
    """

    files: FilePool
    path: str
    sealed: list[SegmentInfo]
    active: ActiveSegment
    end_offset: int
    version: int = 0
    _rebuilt: set[int] | None = None
    _hints: dict[int, tuple[int, int]] | None = None
    """Where the next read of a sequential reader begins: offset -> (base offset, position)."""

    def active_path(self) -> str:
        """The path of the active segment's file, built once for each segment."""
        active = self.active
        if active.path is None:
            active.path = file_path(self.path, active.base_offset, LOG)
        return active.path

    def file_path(self, base_offset: int, suffix: str = LOG, state: str = "") -> str:
        return file_path(self.path, base_offset, suffix, state)

    @property
    def first_offset(self) -> int:
        """The base offset of the first segment."""
        return self.sealed[0].base_offset if self.sealed else self.active.base_offset

    @property
    def size(self) -> int:
        return sum(info.size for info in self.sealed) + self.active.size

    def view_active(self) -> SegmentView:
        return SegmentView(self.active.base_offset, self.end_offset, self.active.size, True)

    def find(self, offset: int) -> SegmentView:
        """The segment of `offset`: the active one for the end offset."""
        if offset >= self.active.base_offset or not self.sealed:
            return self.view_active()
        at = max(bisect_right(self.sealed, offset, key=_base_offset) - 1, 0)
        info = self.sealed[at]
        return SegmentView(info.base_offset, info.next_offset, info.size, False)

    def from_offset(self, offset: int) -> list[SegmentView]:
        """The segments from the one that holds `offset` to the active one."""
        first = self.find(offset)
        views = [
            SegmentView(info.base_offset, info.next_offset, info.size, False)
            for info in self.sealed
            if info.base_offset >= first.base_offset
        ]
        return [*views, self.view_active()]

    def info(self, base_offset: int) -> SegmentInfo:
        """The info of a segment, also of the active one."""
        if base_offset == self.active.base_offset:
            return self.active.info(self.end_offset)
        at = bisect_right(self.sealed, base_offset, key=_base_offset) - 1
        assert at >= 0, f"no segment at {base_offset}"
        assert self.sealed[at].base_offset == base_offset, f"no segment at {base_offset}"
        return self.sealed[at]

    # Changes

    def advance(self, end_offset: int) -> None:
        """Batches were appended: the log ends here now."""
        self.end_offset = end_offset

    def seal(self, *, created_ms: int, index_interval_bytes: int) -> SegmentInfo:
        """Seal the active segment and begin an empty one at the log end."""
        info = self.active.info(self.end_offset)
        self.sealed.append(info)
        self.active = ActiveSegment(info.next_offset, created_ms=created_ms, index_interval_bytes=index_interval_bytes)
        return info

    def replace_info(self, info: SegmentInfo) -> None:
        """The CRC of a sealed segment was computed after it was sealed, or its transaction index was rebuilt."""
        for at, known in enumerate(self.sealed):
            if known.base_offset == info.base_offset:
                self.sealed[at] = info

    def truncate(self, active: ActiveSegment, end_offset: int) -> None:
        """The log ends at `end_offset`, in the segment `active`; later segments are gone."""
        self.sealed = [info for info in self.sealed if info.base_offset < active.base_offset]
        self.active = active
        self.end_offset = end_offset
        if self._rebuilt is not None:
            self._rebuilt = {base for base in self._rebuilt if base < active.base_offset}
        self.changed()

    def reset(self, active: ActiveSegment) -> None:
        """All segments are gone; the log is empty and begins with `active`."""
        self.sealed = []
        self.active = active
        self.end_offset = active.base_offset
        self._rebuilt = None
        self.changed()

    def drop(self, dropped: list[SegmentInfo]) -> None:
        """The oldest segments are gone. Readers that have them open go on."""
        bases = {info.base_offset for info in dropped}
        self.sealed = [info for info in self.sealed if info.base_offset not in bases]
        if dropped:
            self._hints = None

    def swap(self, old: list[int], new: list[SegmentInfo]) -> None:
        """Cleaned segments have replaced others."""
        kept = [info for info in self.sealed if info.base_offset not in set(old)]
        self.sealed = sorted([*kept, *new], key=_base_offset)
        if self._rebuilt is not None:
            self._rebuilt.difference_update(old)
        self.changed()

    def index_rebuilt(self, base_offset: int) -> None:
        if self._rebuilt is None:
            self._rebuilt = set()
        self._rebuilt.add(base_offset)
        self.changed()

    def was_rebuilt(self, base_offset: int) -> bool:
        """Whether the index of this segment was rebuilt since the log was opened: again would give the same."""
        return self._rebuilt is not None and base_offset in self._rebuilt

    def changed(self) -> None:
        """Bytes or files have changed under the readers."""
        self.version += 1
        self._hints = None

    # Hints

    def hint(self, offset: int) -> tuple[int, int] | None:
        return self._hints.get(offset) if self._hints is not None else None

    def remember(self, offset: int, base_offset: int, position: int, version: int) -> None:
        """A read ended before `offset`, at this position: the next one will probably begin there.

        `version` is that when the read began: after a change the position is not valid.
        """
        if version != self.version:
            return
        if self._hints is None:
            self._hints = {}
        elif len(self._hints) >= _HINTS_MAX and offset not in self._hints:
            del self._hints[next(iter(self._hints))]
        self._hints[offset] = (base_offset, position)

    def forget_hints(self) -> None:
        self._hints = None

    def validate(self, *, thorough: bool = True) -> None:
        """Assert the invariants; without `thorough` only of the newest sealed segment and the active one."""
        sealed = self.sealed if thorough else self.sealed[-1:]
        for base, following in pairwise([*(info.base_offset for info in sealed), self.active.base_offset]):
            known = self.info(base)
            assert base < known.next_offset, f"an empty sealed segment: {known}"
            assert known.next_offset == following, f"{known} is followed by {following}"
            assert known.largest_offset < known.next_offset, f"its largest timestamp is past its end: {known}"
        active = self.active
        assert active.base_offset <= self.end_offset, "the log ends before its active segment"
        assert (active.size == 0) == (active.base_offset == self.end_offset), "active size and end disagree"
        active.index.validate(next_offset=self.end_offset, size=active.size, thorough=thorough)
        assert active.index.base_offset == active.base_offset, "an index of another segment"


def _base_offset(info: SegmentInfo) -> int:
    return info.base_offset
