"""Shared by all benchmarks: results, fair timing, tables.

A benchmark is a module of `bench/` with a function `run() -> Iterable[Result]`. Speed is reported as a ratio to an
anchor measured in the same run (a bare system call, a peer's library), since raw figures of two machines, or of one
machine on two days, do not compare; the raw figure is shown too.

    from bench.harness import Result, best_seconds, alternate, at_least

    def run() -> Iterator[Result]:
        ours, theirs = alternate(encode_ours, encode_theirs)
        yield at_least("encode, 100-byte records", RECORDS / ours, "records/s", target=1.0,
                       ratio=theirs / ours, anchor="aiokafka's compiled builder")

The target applies to the ratio if there is one, else to the value.
"""

import gc
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass


@dataclass(frozen=True, slots=True)
class Result:
    """One figure. `build/bench.json` is a list of these."""

    name: str
    value: float
    unit: str
    ratio: float | None = None
    """Ours against `anchor`."""
    anchor: str = ""
    target: float | None = None
    met: bool | None = None
    """None: no target."""

    def as_dict(self) -> dict[str, str | float | bool | None]:
        return asdict(self)


def at_least(
    name: str, value: float, unit: str, *, target: float, ratio: float | None = None, anchor: str = ""
) -> Result:
    """Return a result that meets its target if the ratio (or else the value) is at least `target`."""
    measured = value if ratio is None else ratio
    return Result(name, value, unit, ratio, anchor, target, measured >= target)


def at_most(
    name: str, value: float, unit: str, *, target: float, ratio: float | None = None, anchor: str = ""
) -> Result:
    """Return a result that meets its target if the ratio (or else the value) is at most `target`."""
    measured = value if ratio is None else ratio
    return Result(name, value, unit, ratio, anchor, target, measured <= target)


def seconds(work: Callable[[], object]) -> float:
    """Return the wall time of one call, without garbage collection."""
    was_enabled = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        started = time.perf_counter()
        work()
        return time.perf_counter() - started
    finally:
        if was_enabled:
            gc.enable()


def best_seconds(work: Callable[[], object], *, repeat: int = 5, prepare: Callable[[], object] | None = None) -> float:
    """Return the shortest wall time of `repeat` calls; `prepare` runs before each, outside the clock.

    The shortest, not the mean: noise on a shared machine only adds.
    """
    assert repeat >= 1, "at least one call"
    best = float("inf")
    for _ in range(repeat):
        if prepare is not None:
            prepare()
        best = min(best, seconds(work))
    return best


def alternate(*works: Callable[[], object], repeat: int = 5) -> tuple[float, ...]:
    """Return the best time of each contestant, called in turn, so that a slow phase of the machine affects all."""
    assert repeat >= 1, "at least one round"
    best = [float("inf")] * len(works)
    for _ in range(repeat):
        for number, work in enumerate(works):
            best[number] = min(best[number], seconds(work))
    return tuple(best)


def figure(value: float) -> str:
    """Format with 3 significant digits and thousands separators."""
    if value != value or value in (float("inf"), float("-inf")):
        return str(value)
    magnitude = abs(value)
    if magnitude >= 1000 or value == int(value):
        return f"{value:,.0f}"
    if magnitude >= 100:
        return f"{value:.0f}"
    if magnitude >= 10:
        return f"{value:.1f}"
    if magnitude >= 1:
        return f"{value:.2f}"
    return f"{value:.3g}"


HEADINGS = ("name", "value", "unit", "ratio", "anchor", "target", "met")


def cells(result: Result) -> tuple[str, ...]:
    """Return the cells of a table row, in the order of `HEADINGS`."""
    met = "" if result.met is None else ("yes" if result.met else "MISSED")
    return (
        result.name,
        figure(result.value),
        result.unit,
        "" if result.ratio is None else f"{result.ratio:.2f}x",
        result.anchor,
        "" if result.target is None else figure(result.target),
        met,
    )


def table(results: Iterable[Result]) -> str:
    """Format the results as text; figures are right-aligned."""
    rows = [HEADINGS, *(cells(result) for result in results)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(HEADINGS))]
    right = {1, 3, 5}
    lines = [
        "  ".join(
            cell.rjust(width) if column in right else cell.ljust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]
    lines.insert(1, "  ".join("-" * width for width in widths))
    return "\n".join(lines)


def markdown(results: Iterable[Result]) -> str:
    """Format the results as a Markdown table for docs/performance.md."""
    rows = [cells(result) for result in results]
    ruler = ["--:" if column in (1, 3, 5) else "---" for column in range(len(HEADINGS))]
    return "\n".join("| " + " | ".join(row) + " |" for row in [list(HEADINGS), ruler, *map(list, rows)])
