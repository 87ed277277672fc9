"""The report of a chaos run: one HTML file that needs nothing else. Pure."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

from tidelog.testing.chaos.figures import Figures
from tidelog.testing.chaos.plots import MARK_COLOR, Axis, Curve, faults_plot, legend, log_plot
from tidelog.testing.chaos.spans import Span

MARKS_MAX = 200
"""Anomalies that are drawn and listed; all are counted."""
COLORS = ("#2563a8", "#c2571a", "#3c8a4e", "#7a4fa3", "#8a6d1f", "#3a8f99")


@dataclass(frozen=True, slots=True)
class Page:
    row: Mapping[str, Any]
    """`Report.row`."""
    spans: Sequence[Span]
    figures: Figures
    marks: Sequence[tuple[float, str]]
    """When, since the run began, and what."""
    nodes: Sequence[int]


def render(page: Page) -> str:
    marks = sorted(page.marks)[:MARKS_MAX]
    axis = Axis(max([page.figures.seconds, *(span.ready_s for span in page.spans), *(at_s for at_s, _ in marks), 1.0]))
    verdict = "good" if page.row["is_good"] else "bad"
    sections = [
        f"<header class={verdict}><h1>Chaos run {page.row['seed']}: {verdict}</h1>{_summary(page)}</header>",
        _section("Faults", faults_plot(page.spans, page.nodes, marks, axis)),
        _section("Records in each second", _throughput(page.figures, marks, axis)),
        _section("Time to acknowledgement, ms", _latency(page.figures, marks, axis)),
        _section(f"Anomalies: {len(page.marks)}", _anomalies(marks, len(page.marks))),
        _section(f"Faults, one by one: {len(page.spans)}", _fault_table(page.spans)),
        _section("All figures", f"<pre>{escape(json.dumps(page.row, indent=2))}</pre>"),
    ]
    title = escape(f"Chaos run {page.row['seed']}: {verdict}")
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><meta name="viewport" '
        f'content="width=device-width"><title>{title}</title><style>{_STYLE}</style></head>\n<body>\n'
        + "\n".join(sections)
        + "\n</body></html>\n"
    )


def _section(title: str, body: str) -> str:
    return f"<section><h2>{escape(title)}</h2>{body}</section>"


def _summary(page: Page) -> str:
    row, figures = page.row, page.figures
    latency = figures.latency()
    faults = sum(count for kind, count in row["faults"].items() if " of " not in kind and kind != "quiet")
    tiles = [
        ("acknowledged", f"{sum(row['acknowledged'].values()):,}"),
        ("lost, duplicated, reordered", f"{row['lost']}, {row['duplicated']}, {row['reordered']}"),
        ("stuck readers", str(len(row["stuck_readers"]))),
        ("other failures", str(len(row["failures"]) + sum(row["other"].values()))),
        ("faults", f"{faults} in {row['minutes']:g} min"),
        ("longest without a write*", f"{figures.gap.seconds:.1f} s"),
        (
            f"longest of a partition*{f' ({figures.gap_partition})' if figures.gap_partition else ''}",
            f"{figures.partition_gap.seconds:.1f} s",
        ),
        ("median latency, p99", "none" if latency is None else f"{latency.median:.0f}, {latency.p99:.0f} ms"),
    ]
    for client, pipeline in row.get("pipelines", {}).items():
        ends = f"{pipeline['committed']:,}, {pipeline['aborted']}, {pipeline['unknown']}"
        tiles.append((f"{client} pipeline: committed, aborted, unknown", ends))
        tiles.append((f"{client} pipeline: longest without a commit*", f"{pipeline['longest_without_commit_s']:.1f} s"))
    cells = "".join(f"<div><b>{escape(value)}</b><span>{escape(name)}</span></div>" for name, value in tiles)
    return f"<div class=tiles>{cells}</div><p class=small>* without the time in which no majority of the nodes ran</p>"


def _total(rows: Iterable[Sequence[int]], seconds: int) -> list[float | None]:
    total = [0] * seconds
    for row in rows:
        for second, count in enumerate(row):
            total[second] += count
    return [float(count) for count in total]


def _throughput(figures: Figures, marks: Sequence[tuple[float, str]], axis: Axis) -> str:
    rows = sorted(figures.acknowledged.items())
    curves = [
        Curve(name, [float(count) for count in counts], COLORS[index % len(COLORS)])
        for index, (name, counts) in enumerate(rows)
    ]
    curves.append(Curve("acknowledged, all", _total(figures.acknowledged.values(), figures.seconds), "currentColor"))
    groups = max(1, len(figures.read))
    read = [None if value is None else value / groups for value in _total(figures.read.values(), figures.seconds)]
    curves.append(Curve("read, mean of the groups", read, "#9aa3ad"))
    return legend(curves) + log_plot(curves, marks, axis)


def _latency(figures: Figures, marks: Sequence[tuple[float, str]], axis: Axis) -> str:
    seconds = figures.latencies
    curves = [
        Curve("worst", [None if one is None else one.worst for one in seconds], COLORS[1]),
        Curve("99%", [None if one is None else one.p99 for one in seconds], COLORS[3]),
        Curve("median", [None if one is None else one.median for one in seconds], COLORS[0]),
    ]
    return legend(curves) + log_plot(curves, marks, axis)


def _anomalies(marks: Sequence[tuple[float, str]], count: int) -> str:
    if not marks:
        return "<p>None.</p>"
    rows = "".join(
        f"<tr><td class=number>{index}</td><td class=number>{at_s:.1f} s</td><td>{escape(text)}</td></tr>"
        for index, (at_s, text) in enumerate(marks, start=1)
    )
    more = f"<p>... and {count - len(marks)} more</p>" if count > len(marks) else ""
    return f'<table style="border-color:{MARK_COLOR}"><tr><th>#<th>at<th>what</tr>{rows}</table>{more}'


def _fault_table(spans: Sequence[Span]) -> str:
    rows = "".join(
        f"<tr><td class=number>{span.begin_s:.1f} s</td><td>{escape(span.kind)}</td>"
        f"<td class=number>{'' if span.node is None else span.node}</td><td>{escape(span.why)}</td>"
        f"<td class=number>{max(0.0, span.end_s - span.begin_s):.1f} s</td>"
        f"<td class=number>{max(0.0, span.ready_s - span.end_s):.1f} s</td>"
        f"<td>{escape('; '.join(span.notes))}</td></tr>"
        for span in spans
    )
    heads = "<tr><th>at<th>fault<th>node<th>chosen as<th>lasted<th>ready after<th>details</tr>"
    return f"<details><summary>show</summary><table>{heads}{rows}</table></details>"


_STYLE = """
:root { color-scheme: light dark; --line: #8884; --soft: #8882; }
body { font: 15px/1.45 system-ui, sans-serif; max-width: 1180px; margin: 0 auto; padding: 0 20px 60px; }
h1 { font-size: 22px; margin: 0 0 12px } h2 { font-size: 16px; margin: 28px 0 8px }
header { border-left: 6px solid #3c8a4e; padding: 4px 0 4px 16px; margin-top: 24px }
header.bad { border-color: #c62828 }
.tiles { display: grid; grid-template-columns: repeat(4, 1fr); gap: 10px }
.tiles div { border: 1px solid var(--line); border-radius: 6px; padding: 8px 12px }
.tiles b { display: block; font-size: 20px } .tiles span, .small { opacity: .75; font-size: 13px }
.legend { font-size: 13px } .legend span { margin-right: 16px; white-space: nowrap }
.legend i { display: inline-block; width: 12px; height: 12px; border-radius: 2px; margin-right: 5px }
svg { display: block; width: 100%; height: auto } svg text { font: 11px system-ui, sans-serif; fill: currentColor }
table { border-collapse: collapse; font-size: 13px; width: 100% }
td, th { text-align: left; padding: 3px 10px 3px 0; border-bottom: 1px solid var(--soft); vertical-align: top }
td.number { text-align: right; white-space: nowrap } pre { font-size: 12px; overflow-x: auto }
"""
