"""One chaos run, from the first node to the verdict.

start      nodes, topics, producers, readers; every group has been given a record
strike     faults of the plan until the time is over; readers that are stuck are named meanwhile. Workers of pipelines
           (`pipelines`) are struck at the same time, by a plan of their own
heal       all nodes run and all replicas are in sync; producers flush and end; every group reads to the end
judge      every topic is read once more, and all histories are checked
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from random import Random
from typing import Any

from tidelog.coordinator.coordinator import OFFSETS_TOPIC
from tidelog.coordinator.transactions.peers import TRANSACTIONS_TOPIC
from tidelog.model.errors import TidelogError
from tidelog.testing.chaos.checks import Progress
from tidelog.testing.chaos.figures import FigureCounter, Figures, Window
from tidelog.testing.chaos.judge import Judgement, ReadFailedError, judge, read_events, read_last
from tidelog.testing.chaos.nemesis import TICK_S, Nemesis
from tidelog.testing.chaos.pipeline_run import PipelineRun
from tidelog.testing.chaos.plan import PAUSE_S, QUIET_SHARE, draw
from tidelog.testing.chaos.report import Page, render
from tidelog.testing.chaos.target import ClusterView, Target
from tidelog.testing.chaos.timeline import Timeline
from tidelog.testing.chaos.worker_spec import WorkerSpec
from tidelog.testing.chaos.workers import READERS, Workers, specs

START_S = 180.0
CATCH_UP_S = 240.0
STUCK_S = 60.0
RECOVERY_S = 15.0
_NAMED = ("lost", "duplicated", "reordered")


@dataclass(frozen=True, slots=True)
class Options:
    seed: int
    minutes: float
    path: Path
    """A directory that is empty, but for files of the target."""
    rate: int = 150
    alone: int = 3
    clients: Sequence[str] = READERS
    group_prefix: str = ""
    pipelines: Sequence[str] = ()
    """Clients of transactional pipelines (`pipelines.PIPELINES`)."""
    quiet_share: float = QUIET_SHARE
    """Of the time, without faults."""
    pause_s: tuple[float, float] = PAUSE_S
    """Between two faults."""


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
    figures: Figures = field(default_factory=Figures)
    groups: list[str] = field(default_factory=list)
    """Their names."""
    pipelines: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Figures of each pipeline."""
    facts: dict[str, object] = field(default_factory=dict)
    """What the target says of itself."""
    failures: list[str] = field(default_factory=list)
    """Anything else that a run must not show."""
    words: list[str] = field(default_factory=list)

    @property
    def is_good(self) -> bool:
        return not self.failures and not self.stuck and not any(self.anomalies.values())

    def row(self) -> dict[str, Any]:
        latency = self.figures.latency()
        return {
            "seed": self.options.seed,
            "minutes": self.options.minutes,
            "faults": self.faults,
            "acknowledged": self.acknowledged,
            **{kind: self.anomalies.get(kind, 0) for kind in _NAMED},
            "other": {kind: count for kind, count in self.anomalies.items() if kind not in _NAMED and count},
            "stuck_readers": self.stuck,
            "longest_gap_s": self.longest_gap_s,
            "longest_without_write_s": round(self.figures.gap.seconds, 3),
            "longest_without_write_to_a_partition_s": round(self.figures.partition_gap.seconds, 3),
            "partition_without_write": self.figures.gap_partition,
            "latency_ms": None if latency is None else asdict(latency),
            "failed_sends": self.failed_sends,
            "client_errors": self.client_errors,
            **({"pipelines": self.pipelines} if self.pipelines else {}),
            "failures": self.failures,
            **self.facts,
            "is_good": self.is_good,
        }


def run(options: Options, target: Target) -> Report:
    """One run on a cluster whose topics exist. `options.path` gets the timeline, the histories and the report."""
    options.path.mkdir(parents=True, exist_ok=True)
    report = Report(options)
    timeline = Timeline(options.path / "timeline.txt")
    judgement = Judgement()
    try:
        with ClusterView(target.operator_bootstrap, target.topics) as view:
            judgement = _run_on(target, view, options, timeline, report)
        report.failures += target.logged_failures()
        report.facts = target.facts
    finally:
        timeline.close()
    marks = [(at_s, text) for at_s, text in timeline.marks]
    marks += [(_since(timeline, at_ms), text) for at_ms, text in judgement.marks]
    # A stuck reader that went on later was marked before that.
    noted = tuple(text for _, text in marks)
    more = [text for text in (*report.stuck, *report.failures) if not text.startswith(noted)]
    marks += [(timeline.at_s, text) for text in more]
    page = Page(report.row(), timeline.spans, report.figures, marks, list(target.nodes))
    (options.path / "report.html").write_text(render(page), encoding="utf-8")
    return report


def _since(timeline: Timeline, at_ms: int | None) -> float:
    return timeline.at_s if at_ms is None else (at_ms - timeline.began_ms) / 1000


def _run_on(target: Target, view: ClusterView, options: Options, timeline: Timeline, report: Report) -> Judgement:
    rows = specs(
        target,
        options.path,
        rate=options.rate,
        alone=options.alone,
        clients=options.clients,
        prefix=options.group_prefix,
    )
    pipelines = PipelineRun(target, options.path, options.pipelines, options.group_prefix)
    pipelines.create_topics(view)
    groups = sorted({spec.group for spec in rows if spec.group})
    report.groups = sorted({*groups, *pipelines.groups.values()})
    progress = Progress(groups, target.topics, stuck_s=STUCK_S, recovery_s=RECOVERY_S)
    with (
        Workers.started([*rows, *pipelines.readers], options.path, progress, target.wrapper) as workers,
        pipelines.started(timeline.note),
    ):

        def pause() -> None:
            for stuck in workers.look(healthy_s=nemesis.healthy_s, at_s=timeline.at_s):
                timeline.mark(str(stuck))

        coordinated = [(OFFSETS_TOPIC, group) for group in report.groups]
        coordinated += [(TRANSACTIONS_TOPIC, spec.transactional_id) for spec in pipelines.rows]
        nemesis = Nemesis(target, view, coordinated, timeline, pause)
        _start(nemesis, progress, pipelines, timeline, report)
        began_s = timeline.at_s
        pipelines.begin_faults(Random(f"{options.seed} clients"))
        _strike(options, target, nemesis, timeline)
        pipelines.end_faults()
        ended_s = timeline.at_s
        ends = _heal(target, view, nemesis, workers, progress, timeline, report)
        report.failures += pipelines.finish(view, workers, ends)
        _describe(report, nemesis, workers, progress)
        report.faults |= dict(sorted(pipelines.processes.counts.items()))
    report.figures = _figures(rows, timeline, ended_s)
    judgement = _judge(target, options, rows, ends, timeline, report)
    pipelines.judge(judgement, ends, _window(timeline, began_s, ended_s), _majority_lost(timeline))
    report.pipelines = {client: asdict(figures) for client, figures in pipelines.figures.items()}
    _conclude(judgement, timeline, report)
    return judgement


def _start(nemesis: Nemesis, progress: Progress, pipelines: PipelineRun, timeline: Timeline, report: Report) -> None:
    end_s = time.monotonic() + START_S
    while silent := progress.silent_groups() + pipelines.silent():
        if time.monotonic() > end_s:
            report.failures.append(f"not-started: {', '.join(silent)} have done nothing in {START_S:.0f} s")
            break
        nemesis.wait(TICK_S)
    timeline.note("all groups read")


def _strike(options: Options, target: Target, nemesis: Nemesis, timeline: Timeline) -> None:
    end_s = time.monotonic() + options.minutes * 60
    plan = draw(Random(options.seed), target.kinds, quiet_share=options.quiet_share, pause_s=options.pause_s)
    for fault in plan:
        if time.monotonic() + fault.seconds > end_s:
            break
        nemesis.strike(fault)
    nemesis.wait(end_s - time.monotonic())
    timeline.note("the faults are over")


def _heal(
    target: Target,
    view: ClusterView,
    nemesis: Nemesis,
    workers: Workers,
    progress: Progress,
    timeline: Timeline,
    report: Report,
) -> dict[tuple[str, int], int]:
    """The end of every partition, which every group has been given; those that have not are stuck."""
    nemesis.recover()
    nemesis.wait_for_sync()
    workers.stop("producer")
    end_s = time.monotonic() + CATCH_UP_S
    try:
        ends = view.ends(target.topics)
    except TidelogError as error:
        report.failures.append(f"not-readable: the ends of the partitions: {error}")
        ends, end_s = progress.ends, time.monotonic()
    timeline.note(f"producers have ended; {sum(ends.values())} records are stored")
    for (topic, partition), end in ends.items():
        progress.acked(topic, partition, end - 1)
    while (late := progress.behind(ends)) and time.monotonic() < end_s:
        nemesis.wait(TICK_S)
    if late:
        report.failures.append(f"not-at-end: {', '.join(late)} did not read to the end in {CATCH_UP_S:.0f} s")
    timeline.note(f"groups that are not at the end: {late or 'none'}")
    workers.stop("reader")
    return ends


def _describe(report: Report, nemesis: Nemesis, workers: Workers, progress: Progress) -> None:
    report.faults = dict(sorted(nemesis.counts.items()))
    report.acknowledged = dict(sorted(workers.acknowledged.items()))
    report.failed_sends = dict(sorted(workers.failed.items()))
    report.client_errors = dict(sorted(workers.errors.items()))
    report.longest_gap_s = {name: gap_ms / 1000 for name, gap_ms in sorted(workers.gaps.longest_ms.items())}
    report.stuck = [str(one) for one in progress.stuck]
    report.failures += nemesis.failures + workers.failures


def _figures(rows: Iterable[WorkerSpec], timeline: Timeline, ended_s: float) -> Figures:
    counter = FigureCounter(timeline.began_ms, timeline.began_ms + int(ended_s * 1000))
    for spec in rows:
        for event in read_events(Path(spec.history)):
            counter.feed(spec.group or spec.name, event)
    return counter.figures(_majority_lost(timeline))


def _majority_lost(timeline: Timeline) -> list[Window]:
    return [_window(timeline, span.begin_s, span.ready_s) for span in timeline.spans if span.loses_majority]


def _window(timeline: Timeline, begin_s: float, end_s: float) -> Window:
    return timeline.began_ms + int(begin_s * 1000), timeline.began_ms + int(end_s * 1000)


def _judge(
    target: Target,
    options: Options,
    rows: Sequence[WorkerSpec],
    ends: dict[tuple[str, int], int],
    timeline: Timeline,
    report: Report,
) -> Judgement:
    for topic in target.topics:
        try:
            read_last(target.operator_bootstrap, topic, options.path / f"{topic}-last.jsonl")
        except ReadFailedError as error:
            report.failures.append(f"not-readable: {error}")
    judgement: Judgement = judge(options.path, rows, ends)
    return judgement


def _conclude(judgement: Judgement, timeline: Timeline, report: Report) -> None:
    if not judgement.is_complete:
        report.failures.append("not-complete: a topic was not read from start to end")
    if not any(report.acknowledged.values()):
        report.failures.append("nothing-written: no record was acknowledged")
    report.anomalies = dict(judgement.counts)
    report.words = judgement.words
    for text in judgement.words:
        timeline.note(text)
