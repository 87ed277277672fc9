"""Tables for a person: columns as wide as they must be, figures flush right, rows printed as they come.

A table of unknown length is laid out by its first rows; a later cell that is wider pushes its own row only. On a
terminal, or where COLUMNS is set, a table is never wider than that. Bold and
red are used on a terminal, unless NO_COLOR is set (https://no-color.org).
"""

import os
import textwrap
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain, islice, zip_longest
from typing import IO

WIDTH_MIN = 20
TEXT_CELLS_MIN = 8
"""A column of text is not made narrower."""
HEADING_CELLS_MIN = 5
WORD_CELLS_MAX = 16
"""A longer word may be broken, like an address or an id."""
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


def printable(text: str) -> str:
    """The text without line feeds, and without characters that command a terminal: these become escapes."""
    if text.isprintable():
        return text
    return "".join(each if each.isprintable() else ascii(each)[1:-1] for each in text)


def width_of(stream: IO[str]) -> int | None:
    """Columns that a line may have: COLUMNS if it is set, else those of a terminal; None where nothing limits them."""
    given = os.environ.get("COLUMNS", "")
    if given.isdecimal() and int(given) > 0:
        return int(given)
    if not stream.isatty():
        return None
    try:
        return os.get_terminal_size(stream.fileno()).columns or None
    except (AttributeError, OSError, ValueError):
        return None


def wrapped(text: str, stream: IO[str], *, indent: str = "  ") -> str:
    """A sentence in as many lines as it needs; those after the first are indented."""
    width = width_of(stream)
    if width is None or len(text) <= width:
        return text
    return "\n".join(textwrap.wrap(text, max(width, WIDTH_MIN), subsequent_indent=indent, break_on_hyphens=False))


def lines(
    headings: Sequence[str],
    rows: Iterable[Sequence[object]],
    *,
    right: Iterable[str] = (),
    width: int | None = None,
) -> Iterator[str]:
    """The table line by line, headings first; columns named in `right` stand flush right. None is an empty cell.

    With a `width` no line is longer: columns of text become narrower and their cells continue on the next line;
    headings are cut with an ellipsis. If not even that fits, each row becomes a paragraph with a line for each cell. No
    cell is left out or cut.
    """
    source = iter(rows)
    first = [[_cell(value) for value in row] for row in islice(source, _LAYOUT_ROWS)]
    flush_right = set(right)
    assert flush_right <= set(headings), "a column that does not exist"
    all_rows = chain(first, ([_cell(value) for value in later] for later in source))
    natural = [max([len(heading), *(len(row[column]) for row in first)]) for column, heading in enumerate(headings)]
    if width is None:
        fitted: tuple[list[int], str] | None = natural, "  "
    else:
        fitted = _fitted(headings, natural, first, flush_right, width)
    if fitted is None:
        assert width is not None, "only a width makes a table too wide"
        yield from _paragraphs(headings, all_rows, width)
        return
    widths, gap = fitted
    heading_row = [_cut(*pair) for pair in zip(headings, widths, strict=True)]
    for row in chain([heading_row], all_rows):
        assert len(row) == len(headings), "a row has one cell for each heading"
        is_whole = [width is None or (row is not heading_row and heading in flush_right) for heading in headings]
        columns = zip(row, widths, is_whole, strict=True)
        parts = [[cell] if whole else _split(cell, limit) for cell, limit, whole in columns]
        for cells in zip_longest(*parts, fillvalue=""):
            yield gap.join(
                cell.rjust(limit) if heading in flush_right else cell.ljust(limit)
                for cell, limit, heading in zip(cells, widths, headings, strict=True)
            ).rstrip()


def _fitted(
    headings: Sequence[str], natural: list[int], rows: list[list[str]], flush_right: set[str], width: int
) -> tuple[list[int], str] | None:
    """(widths of the columns, what is between them) that fit together; None if there are none.

    First the widest columns of text become narrower, then headings, then the gap.
    """
    whole_words = [
        max((len(word) for row in rows for word in row[column].split() if len(word) <= WORD_CELLS_MAX), default=1)
        for column in range(len(headings))
    ]
    cells = [max([1, *(len(row[column]) for row in rows)]) for column in range(len(headings))]
    words = [
        size if heading in flush_right else min(size, max(TEXT_CELLS_MIN, word, *map(len, heading.split())))
        for heading, size, word in zip(headings, natural, whole_words, strict=True)
    ]
    cut = [
        min(size, max(most if heading in flush_right else min(most, TEXT_CELLS_MIN), HEADING_CELLS_MIN))
        for heading, size, most in zip(headings, natural, cells, strict=True)
    ]
    for least, gap in ((words, "  "), (cut, "  "), (cut, " ")):
        available = width - len(gap) * (len(headings) - 1)
        if sum(least) <= available:
            return _narrowed(natural, least, available), gap
    return None


def _narrowed(widths: list[int], least: list[int], available: int) -> list[int]:
    """One cell after the other from the column that has most to spare."""
    widths = list(widths)
    for _ in range(sum(widths) - available):
        _, column = max((size - least[number], number) for number, size in enumerate(widths))
        widths[column] -= 1
    return widths


def _cut(heading: str, width: int) -> str:
    """A heading that fits: a word that cannot, ends with an ellipsis."""
    if all(len(word) <= width for word in heading.split()):
        return heading
    return heading[: width - 1] + "…"


def _split(cell: str, width: int) -> list[str]:
    """At spaces and commas where that is possible, else where it must be."""
    parts = []
    while len(cell) > width:
        space = max(cell.rfind(" ", 0, width + 1), cell.rfind(",", 0, width) + 1)
        at = space if space > 0 else width
        parts.append(cell[:at].rstrip())
        cell = cell[at:].lstrip()
    return [*parts, cell]


def _paragraphs(headings: Sequence[str], rows: Iterable[Sequence[str]], width: int) -> Iterator[str]:
    for number, row in enumerate(rows):
        if number:
            yield ""
        for heading, cell in zip(headings, row, strict=True):
            if cell:
                yield from textwrap.wrap(
                    f"{heading}: {cell}", max(width, WIDTH_MIN), subsequent_indent="  ", break_on_hyphens=False
                )


def write(
    stream: IO[str],
    headings: Sequence[str],
    rows: Iterable[Sequence[object]],
    *,
    right: Iterable[str] = (),
    indent: str = "",
) -> None:
    """Print a table that fits the terminal; its heading line is bold there."""
    width = width_of(stream)
    if width is not None:
        width = max(width - len(indent), WIDTH_MIN)
    for number, line in enumerate(lines(headings, rows, right=right, width=width)):
        stream.write(f"{indent}{bold(line, stream) if number == 0 else line}\n")


def _cell(value: object) -> str:
    if value is None:
        return ""
    if isinstance(value, bool):
        return "yes" if value else "no"
    return printable(str(value))
