"""`make chaos`: minutes of faults on real nodes with real clients, and the verdict.

    MINUTES=n         how long faults strike; starting, healing and judging come on top
    SEED=k            the plan of faults; another one each time without it
    TIMELINE=1        print what happened when

build/chaos-SEED/ keeps report.html, the timeline, the histories of all clients, their logs and those of the nodes. The
last line is JSON; the exit status is 1 if anything was lost, duplicated or reordered, if a reader got stuck, or a
process ended by itself. The timeline is printed then, too. Faults of the network, of disks and of clocks take root,
/dev/net/tun, /dev/fuse and gcc (`tests/chaos/setup.sh`); what is missing is printed, and the run goes without it.
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
import time
from pathlib import Path
from types import FrameType

from chaos.lab import KINDS, LabOptions, lab
from tidelog.testing.chaos.pipelines import PIPELINES
from tidelog.testing.chaos.plan import PAUSE_S, QUIET_SHARE
from tidelog.testing.chaos.run import Options, Report, run
from tidelog.testing.chaos.workers import READERS


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
    parser.add_argument("--clients", default=",".join(READERS), help="readers, or none: %(default)s")
    parser.add_argument("--pipelines", default="", help=f"transactional pipelines, with {','.join(PIPELINES)}")
    parser.add_argument("--quiet", type=float, default=QUIET_SHARE, help="share of the time without faults")
    parser.add_argument("--pause", type=float, default=PAUSE_S[1], help="longest pause between two faults, in s")
    parser.add_argument("--kinds", default=",".join(KINDS), help="faults: %(default)s")
    parser.add_argument("--small", action="store_true", help="three nodes on loopback, faults of processes only")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, _interrupt)
    path = options.path or Path("build") / f"chaos-{options.seed}"
    kinds = _names(parser, options.kinds, tuple(KINDS))
    clients = () if options.clients == "none" else _names(parser, options.clients, READERS)
    pipelines = _names(parser, options.pipelines, PIPELINES) if options.pipelines else ()
    chosen = Options(
        options.seed,
        options.minutes,
        path,
        options.rate,
        options.alone,
        clients,
        pipelines=pipelines,
        quiet_share=options.quiet,
        pause_s=(min(PAUSE_S[0], options.pause), options.pause),
    )
    print(f"seed {chosen.seed}, {chosen.minutes:g} minutes; {chosen.path} has what happens", flush=True)
    try:
        with lab(LabOptions(path, options.seed, kinds, options.small)) as target:
            report = run(chosen, target)
    except KeyboardInterrupt:
        print("interrupted: all processes of the run are ended", file=sys.stderr)
        return 130
    return show(report, has_timeline=options.timeline)


def show(report: Report, *, has_timeline: bool) -> int:
    path = report.options.path
    (path / "report.json").write_text(json.dumps(report.row(), indent=2) + "\n", encoding="utf-8")
    if has_timeline or not report.is_good:
        print((path / "timeline.txt").read_text(encoding="utf-8"))
    print(f"report: {path / 'report.html'}")
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
