"""Tables for a person: columns as wide as they must be, figures flush right, rows printed as they come.

A table of unknown length is laid out by its first rows; a later cell that is wider pushes its own row only. Bold and
red are used on a terminal, unless NO_COLOR is set (https://no-color.org).
"""

import os
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from typing import IO

_LAYOUT_ROWS = 200


def has_color(stream: IO[str]) -> bool:
    """Whether to colour what goes to `stream`."""
    return stream.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


def bold(text: str, stream: IO[str]) -> str:
    return f"\x1b[1m{text}\x1b[0m" if has_color(stream) else text


def red(text: str, stream: IO[str]) -> str:
    return f"\x1b[31m{text}\x1b[0m" if has_color(stream) else text


def count(number: int, one: str) -> str:
    """`1 replica`, `2 replicas`."""
    return f"{number} {one}" if number == 1 else f"{number} {one}{'es' if one.endswith('ch') else 's'}"


def lines(headings: Sequence[str], rows: Iterable[Sequence[object]], *, right: Iterable[str] = ()) -> Iterator[str]:
    """The table line by line, headings first; columns named in `right` stand flush right. None is an empty cell."""
    source = iter(rows)
    first = [[_cell(value) for value in row] for row in islice(source, _LAYOUT_ROWS)]
    flush_right = set(right)
    assert flush_right <= set(headings), "a column that does not exist"
    widths = [max([len(heading), *(len(row[column]) for row in first)]) for column, heading in enumerate(headings)]

    def line(row: Sequence[str]) -> str:
        assert len(row) == len(headings), "a row has one cell for each heading"
        cells = (
            cell.rjust(width) if heading in flush_right else cell.ljust(width)
            for cell, width, heading in zip(row, widths, headings, strict=True)
        )
        return "  ".join(cells).rstrip()

    yield line(list(headings))
    for row in first:
        yield line(row)
    for later in source:
        yield line([_cell(value) for value in later])


def write(
    stream: IO[str],
    headings: Sequence[str],
    rows: Iterable[Sequence[object]],
    *,
    right: Iterable[str] = (),
    indent: str = "",
) -> None:
    """Print a table; its heading line is bold on a terminal."""
    for number, line in enumerate(lines(headings, rows, right=right)):
        stream.write(f"{indent}{bold(line, stream) if number == 0 else line}\n")


def _cell(value: object) -> str:
    if value is None:
        return ""
    if isinstance(value, bool):
        return "yes" if value else "no"
    return str(value)
