"""One chaos run, from the first node to the verdict.

start      nodes, topics, producers, readers; every group has been given a record
strike     faults of the plan until the time is over; readers that are stuck are named meanwhile
heal       all nodes run and all replicas are in sync; producers flush and end; every group reads to the end
judge      every topic is read once more, and all histories are checked
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

from chaos.checks import Progress
from chaos.judge import Judgement, judge, read_last
from chaos.nemesis import TICK_S, Nemesis, Timeline
from chaos.plan import FULL_DISK, KINDS, draw
from chaos.scene import Scene, scene
from chaos.worker import WorkerSpec
from chaos.workers import READERS, Workers, specs

TOPICS = {"events": 6, "orders": 3}
START_S = 180.0
CATCH_UP_S = 240.0
STUCK_S = 60.0
RECOVERY_S = 15.0


@dataclass(frozen=True, slots=True)
class Options:
    seed: int
    minutes: float
    path: Path
    rate: int = 150
    alone: int = 3
    clients: Sequence[str] = READERS
    kinds: Sequence[str] = KINDS


@dataclass(slots=True)
class Report:
    options: Options
    faults: dict[str, int] = field(default_factory=dict)
    acknowledged: dict[str, int] = field(default_factory=dict)
    failed_sends: dict[str, int] = field(default_factory=dict)
    client_errors: dict[str, int] = field(default_factory=dict)
    anomalies: dict[str, int] = field(default_factory=dict)
    stuck: list[str] = field(default_factory=list)
    longest_gap_s: dict[str, float] = field(default_factory=dict)
    failures: list[str] = field(default_factory=list)
    """Anything else that a run must not show."""
    words: list[str] = field(default_factory=list)

    @property
    def is_good(self) -> bool:
        return not self.failures and not self.stuck and not any(self.anomalies.values())

    def row(self) -> dict[str, Any]:
        other = {kind: count for kind, count in self.anomalies.items() if kind not in _NAMED and count}
        return {
            "seed": self.options.seed,
            "minutes": self.options.minutes,
            "faults": self.faults,
            "acknowledged": self.acknowledged,
            **{kind: self.anomalies.get(kind, 0) for kind in _NAMED},
            "other": other,
            "stuck_readers": self.stuck,
            "longest_gap_s": self.longest_gap_s,
            "failed_sends": self.failed_sends,
            "client_errors": self.client_errors,
            "failures": self.failures,
            "is_good": self.is_good,
        }


_NAMED = ("lost", "duplicated", "reordered")


def run(options: Options) -> Report:
    """Whatever there was at `options.path` is removed first."""
    shutil.rmtree(options.path, ignore_errors=True)
    options.path.mkdir(parents=True)
    report = Report(options)
    timeline = Timeline(options.path / "timeline.txt")
    try:
        with scene(options.path / "cluster", TOPICS) as made:
            _run_on(made, options, timeline, report)
            report.failures += [f"traceback: in the log of {node}" for node in made.tracebacks()]
    finally:
        timeline.close()
    return report


def _run_on(made: Scene, options: Options, timeline: Timeline, report: Report) -> None:
    rows = specs(made.cluster, options.path, TOPICS, rate=options.rate, alone=options.alone, clients=options.clients)
    groups = sorted({spec.group for spec in rows if spec.group})
    progress = Progress(groups, TOPICS, stuck_s=STUCK_S, recovery_s=RECOVERY_S)
    with Workers.started(rows, options.path, progress) as workers:

        def pause() -> None:
            for stuck in workers.look(healthy_s=nemesis.healthy_s, at_s=timeline.at_s):
                timeline.note(str(stuck))

        nemesis = Nemesis(made, groups, timeline, pause)
        _start(nemesis, progress, timeline, report)
        _strike(options, made, nemesis, timeline)
        ends = _heal(made, nemesis, workers, progress, timeline, report)
        _tell(report, nemesis, workers, progress)
    _judge(made, options, rows, ends, timeline, report)


def _start(nemesis: Nemesis, progress: Progress, timeline: Timeline, report: Report) -> None:
    end_s = time.monotonic() + START_S
    while silent := progress.silent_groups():
        if time.monotonic() > end_s:
            report.failures.append(f"not-started: {', '.join(silent)} were given nothing in {START_S:.0f} s")
            break
        nemesis.wait(TICK_S)
    timeline.note("all groups read")


def _strike(options: Options, made: Scene, nemesis: Nemesis, timeline: Timeline) -> None:
    kinds = tuple(kind for kind in options.kinds if made.disks or kind != FULL_DISK)
    end_s = time.monotonic() + options.minutes * 60
    for fault in draw(Random(options.seed), kinds):
        if time.monotonic() + fault.seconds > end_s:
            break
        nemesis.strike(fault)
    timeline.note("the faults are over")


def _heal(
    made: Scene, nemesis: Nemesis, workers: Workers, progress: Progress, timeline: Timeline, report: Report
) -> dict[tuple[str, int], int]:
    """The end of every partition, which every group has been given; those that have not are stuck."""
    nemesis.recover()
    nemesis.wait_for_sync()
    workers.stop("producer")
    ends = made.ends()
    timeline.note(f"producers have ended; {sum(ends.values())} records are stored")
    for (topic, partition), end in ends.items():
        progress.acked(topic, partition, end - 1)
    end_s = time.monotonic() + CATCH_UP_S
    while (late := progress.behind(ends)) and time.monotonic() < end_s:
        nemesis.wait(TICK_S)
    if late:
        report.failures.append(f"not-at-end: {', '.join(late)} did not read to the end in {CATCH_UP_S:.0f} s")
    timeline.note(f"groups that are not at the end: {late or 'none'}")
    workers.stop("reader")
    return ends


def _tell(report: Report, nemesis: Nemesis, workers: Workers, progress: Progress) -> None:
    report.faults = dict(sorted(nemesis.counts.items()))
    report.acknowledged = dict(sorted(workers.acknowledged.items()))
    report.failed_sends = dict(sorted(workers.failed.items()))
    report.client_errors = dict(sorted(workers.errors.items()))
    report.longest_gap_s = {name: gap_ms / 1000 for name, gap_ms in sorted(workers.gaps.longest_ms.items())}
    report.stuck = [str(one) for one in progress.stuck]
    report.failures += nemesis.failures + workers.failures


def _judge(
    made: Scene,
    options: Options,
    rows: Sequence[WorkerSpec],
    ends: dict[tuple[str, int], int],
    timeline: Timeline,
    report: Report,
) -> None:
    for topic in TOPICS:
        read_last(made.at, topic, options.path / f"{topic}-last.jsonl")
    judgement: Judgement = judge(options.path, rows, ends)
    if not judgement.is_complete:
        report.failures.append("not-complete: a topic was not read from start to end")
    if not any(report.acknowledged.values()):
        report.failures.append("nothing-written: no record was acknowledged")
    report.anomalies = dict(judgement.counts)
    report.words = judgement.words
    for text in judgement.words:
        timeline.note(text)
