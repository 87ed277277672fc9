"""The segments of a log, in order: where an offset lies. No IO of its own; files come from the pool.

    sealed: [0, 40) [40, 97)      active: [97, end_offset)

The active segment takes the appends, sealed ones never change; cleaning replaces them, retention drops the oldest.
Whoever reads across an await notes `version` and starts anew if it has changed: the bytes at a position may be others.
"""

from bisect import bisect_right
from itertools import pairwise
from typing import NamedTuple

from tidelog.log.files import FilePool
from tidelog.log.segment import LOG, ActiveSegment, SegmentInfo, file_path

_HINTS_MAX = 8


class SegmentView(NamedTuple):
    """A segment as a reader sees it at one moment: bytes past `size` do not exist for it."""

    base_offset: int
    next_offset: int
    size: int
    is_active: bool


class Segments:
    """Invariants (`validate`): each sealed segment begins where the one before ends, the active one where the last
    sealed one ends, and `end_offset` is not below it."""

    __slots__ = ("_hints", "active", "end_offset", "files", "path", "rebuilt", "sealed", "version")

    def __init__(
        self, files: FilePool, path: str, sealed: list[SegmentInfo], active: ActiveSegment, end_offset: int
    ) -> None:
        self.files = files
        self.path = path
        self.sealed = sealed
        self.active = active
        self.end_offset = end_offset
        self.version = 0
        # Segments whose indexes were rebuilt since the log was opened: a second time would find the same.
        self.rebuilt: set[int] | None = None
        # Where the next read of a reader that goes on will begin: offset -> (base offset, position).
        self._hints: dict[int, tuple[int, int]] | None = None

    def active_path(self) -> str:
        """Of the file that is appended to, for each append: made once for each segment."""
        active = self.active
        if active.path is None:
            active.path = file_path(self.path, active.base_offset, LOG)
        return active.path

    def file_path(self, base_offset: int, suffix: str = LOG, state: str = "") -> str:
        return file_path(self.path, base_offset, suffix, state)

    @property
    def first_offset(self) -> int:
        """The first offset for which there is a segment."""
        return self.sealed[0].base_offset if self.sealed else self.active.base_offset

    @property
    def size(self) -> int:
        return sum(info.size for info in self.sealed) + self.active.size

    def view_active(self) -> SegmentView:
        return SegmentView(self.active.base_offset, self.end_offset, self.active.size, True)

    def find(self, offset: int) -> SegmentView:
        """The segment that holds `offset`, or would: the active one for the end offset."""
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
        """What is known of a segment, the active one too."""
        if base_offset == self.active.base_offset:
            return self.active.info(self.end_offset)
        at = bisect_right(self.sealed, base_offset, key=_base_offset) - 1
        assert at >= 0, f"no segment at {base_offset}"
        assert self.sealed[at].base_offset == base_offset, f"no segment at {base_offset}"
        return self.sealed[at]

    def changed(self) -> None:
        """Bytes or files have changed under the readers."""
        self.version += 1
        self._hints = None

    def hint(self, offset: int) -> tuple[int, int] | None:
        return self._hints.get(offset) if self._hints is not None else None

    def remember(self, offset: int, base_offset: int, position: int, version: int) -> None:
        """A read ended before `offset`, at this position: the next one will probably begin there.

        `version` is that of the read's beginning: after a change the position is one of bytes that are gone.
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

    def validate(self) -> None:
        for base, following in pairwise([*(info.base_offset for info in self.sealed), self.active.base_offset]):
            known = self.info(base)
            assert base < known.next_offset, f"an empty sealed segment: {known}"
            assert known.next_offset == following, f"{known} is followed by {following}"
        assert self.active.base_offset <= self.end_offset, "the log ends before its active segment"
        assert (self.active.size == 0) == (self.active.base_offset == self.end_offset), "active size and end disagree"


def _base_offset(info: SegmentInfo) -> int:
    return info.base_offset
