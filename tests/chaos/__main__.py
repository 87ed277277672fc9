"""`make chaos`: minutes of faults on real nodes with real clients, and the verdict.

    MINUTES=n         how long faults strike; starting, healing and judging come on top
    SEED=k            the plan of faults; another one each time without it
    TIMELINE=1        print what happened when

build/chaos-SEED/ keeps the timeline, the histories of all clients, their logs and those of the nodes. The last line is
JSON; the exit status is 1 if anything was lost, duplicated or reordered, if a reader got stuck, or a process ended by
itself. The timeline is printed then, too. Disks can be filled by root only; other users have runs without that fault.
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
import time
from pathlib import Path
from types import FrameType

from chaos.plan import KINDS
from chaos.run import Options, Report, run
from chaos.workers import READERS


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="make chaos", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=5.0)
    parser.add_argument("--seed", type=int, default=int(time.time()))
    parser.add_argument("--timeline", action="store_true")
    parser.add_argument("--path", type=Path, help="instead of build/chaos-SEED")
    parser.add_argument("--rate", type=int, default=150, help="records a second, of all producers together")
    parser.add_argument("--alone", type=int, default=3, help="consumer-protocol readers, each alone in its group")
    parser.add_argument("--clients", default=",".join(READERS), help="readers: %(default)s")
    parser.add_argument("--kinds", default=",".join(KINDS), help="faults: %(default)s")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, _interrupt)
    chosen = Options(
        options.seed,
        options.minutes,
        options.path or Path("build") / f"chaos-{options.seed}",
        options.rate,
        options.alone,
        _names(parser, options.clients, READERS),
        _names(parser, options.kinds, KINDS),
    )
    print(f"seed {chosen.seed}, {chosen.minutes:g} minutes; {chosen.path} has what happens", flush=True)
    try:
        report = run(chosen)
    except KeyboardInterrupt:
        print("interrupted: all processes of the run are ended", file=sys.stderr)
        return 130
    return show(report, has_timeline=options.timeline)


def show(report: Report, *, has_timeline: bool) -> int:
    path = report.options.path
    (path / "report.json").write_text(json.dumps(report.row(), indent=2) + "\n", encoding="utf-8")
    if has_timeline or not report.is_good:
        print((path / "timeline.txt").read_text(encoding="utf-8"))
    print(json.dumps(report.row()))
    return 0 if report.is_good else 1


def _names(parser: argparse.ArgumentParser, text: str, known: tuple[str, ...]) -> tuple[str, ...]:
    names = tuple(text.split(","))
    if not set(names) <= set(known):
        parser.error(f"{text}: choose from {', '.join(known)}")
    return names


def _interrupt(_signal: int, _frame: FrameType | None) -> None:
    raise KeyboardInterrupt


if __name__ == "__main__":
    sys.exit(main())
