"""A progress bar for long work: on stderr, only on a terminal, removed at the end.

    orders-0 [##########..............]  41%  12 of 29 files, 0:08 left

It fits into one line of the terminal, and is drawn at most ten times a second, and once more when the work is done.
Only the bar has colour, and not with NO_COLOR.
"""

import os
import sys
import time
from collections.abc import Callable
from types import TracebackType
from typing import Self, TextIO

REDRAW_S = 0.1
BAR_CELLS_MAX = 30
BAR_CELLS_MIN = 5
TELLS_TIME_AFTER_S = 2.0
_GREEN, _PLAIN = "\x1b[32m", "\x1b[0m"


class Progress:
    """Call `show` as often as there is progress; `close`, or leaving the context, removes it."""

    def __init__(
        self,
        what: str,
        *,
        unit: str = "",
        stream: TextIO | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._what = what
        self._unit = unit
        self._stream = sys.stderr if stream is None else stream
        self._clock = clock
        self._began = clock()
        self._drawn_at: float | None = None
        self._drawn_part = 0.0
        self._drawn_cells = 0
        self.is_on = self._stream.isatty() and os.environ.get("TERM", "") != "dumb"

    def show(self, done: float, total: float, *, says: str | None = None) -> None:
        """Show `done` of `total`; `says` replaces the numbers if they are not for people."""
        now = self._clock()
        part = min(1.0, max(0.0, done / total)) if total > 0 else 0.0
        is_early = self._drawn_at is not None and now - self._drawn_at < REDRAW_S
        is_first_whole = part == 1.0 > self._drawn_part
        if not self.is_on or (is_early and not is_first_whole):
            return
        self._drawn_at, self._drawn_part = now, part
        numbers = says if says is not None else f"{done:,.0f} of {total:,.0f}{self._unit and ' ' + self._unit}"
        elapsed = now - self._began
        if elapsed >= TELLS_TIME_AFTER_S and 0 < part < 1:
            left_s = int(elapsed / part - elapsed)
            numbers += f", {left_s // 60}:{left_s % 60:02} left"
        self._draw(part, numbers)

    def _draw(self, part: float, numbers: str) -> None:
        width = self._width() - 1  # a full last cell would wrap on some terminals
        percent = f"{part * 100:3.0f}%"
        around = len(self._what) + len(numbers) + len(percent) + len(" []    ")
        cells = min(BAR_CELLS_MAX, width - around)
        full = int(part * max(cells, 0))
        if cells >= BAR_CELLS_MIN:
            bar = "#" * full + "." * (cells - full)
            plain = f"{self._what} [{bar}] {percent}  {numbers}"
            shown = plain if "NO_COLOR" in os.environ else plain.replace(f"[{bar}]", f"[{_GREEN}{bar}{_PLAIN}]", 1)
        else:
            plain = shown = f"{self._what} {percent}  {numbers}"[:width]
        blank = " " * max(0, min(self._drawn_cells, width) - len(plain))
        self._drawn_cells = len(plain)
        self._stream.write(f"\r{shown}{blank}")
        self._stream.flush()

    def _width(self) -> int:
        try:
            return os.get_terminal_size(self._stream.fileno()).columns or 80
        except (OSError, ValueError):
            return 80

    def close(self) -> None:
        if self._drawn_cells:
            self._stream.write("\r" + " " * min(self._drawn_cells, self._width() - 1) + "\r")
            self._stream.flush()
            self._drawn_cells = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
