"""Figures and the report of a chaos run."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

from tidelog.testing.chaos.figures import FigureCounter, Figures, longest_gap
from tidelog.testing.chaos.report import Page, render
from tidelog.testing.chaos.spans import Span


def ack(at_ms: int, partition: int = 0, took_ms: int = 5) -> dict[str, Any]:
    return {"event": "ack", "topic": "t", "partition": partition, "count": 1, "at_ms": at_ms, "took_ms": took_ms}


def test_gap_leaves_out_the_time_without_a_majority() -> None:
    gap = longest_gap([1_000, 9_000, 12_000], [(2_000, 8_000)], began_ms=1_000)
    assert (gap.seconds, gap.began_s) == (3.0, 8.0), "2 s of the 8 s count, so the other gap is longer"


def test_gap_without_acknowledgements_is_zero() -> None:
    assert longest_gap([5], [], began_ms=0).seconds == 0.0


def figures() -> Figures:
    counter = FigureCounter(0, 4_000)
    for at_ms, partition in ((100, 0), (200, 1), (1_100, 0), (3_900, 0), (3_950, 1), (9_000, 0)):
        counter.feed("producer", ack(at_ms, partition, took_ms=at_ms // 100))
    counter.feed("group", {"event": "poll", "records": [[0, "r", 0], [1, "r", 1]], "at_ms": 2_500})
    counter.feed("group", {"event": "alive", "at_ms": 1})
    return counter.figures([])


def test_figures_count_each_second_of_the_run_and_nothing_after_it() -> None:
    found = figures()
    assert found.acknowledged == {"producer": [2, 1, 0, 2]}
    assert found.read == {"group": [0, 0, 2, 0]}
    assert found.latencies[2] is None
    assert [None if one is None else one.worst for one in found.latencies] == [2, 11, None, 39]


def test_gap_of_a_partition_can_be_longer_than_that_of_all_writes() -> None:
    found = figures()
    assert found.gap.seconds == 2.8
    assert (found.gap_partition, found.partition_gap.seconds) == ("t-1", 3.75)


def page(marks: list[tuple[float, str]], *, is_good: bool) -> Page:
    row = {
        "seed": 7,
        "minutes": 1,
        "is_good": is_good,
        "faults": {"kill": 1, "kill of leader": 1},
        "acknowledged": {"producer": 5},
        "lost": len(marks),
        "duplicated": 0,
        "reordered": 0,
        "other": {},
        "stuck_readers": [],
        "failures": [],
    }
    spans = [
        Span("kill", 2, "leader", 1.0, 2.0, 3.0, notes=["<exit> & code"]),
        Span("blackout", None, "any", 3.0, 3.5, 4),
    ]
    return Page(row, spans, figures(), marks, [1, 2])


def test_report_draws_and_lists_every_anomaly() -> None:
    marks = [(3.0, "lost: t-0: record 4 of run a, acknowledged at 9"), (1.5, "reader-stuck: <g>")]
    html = render(page(marks, is_good=False))
    assert "Chaos run 7: bad" in html
    assert html.count("<title>1: reader-stuck: &lt;g&gt;</title>") == 3, "in each of the three plots, in order of time"
    assert html.count("<title>2: lost: t-0: record 4 of run a, acknowledged at 9</title>") == 3
    assert "<td>reader-stuck: &lt;g&gt;</td>" in html
    assert "Anomalies: 2" in html


def test_report_has_a_row_for_each_node_with_its_faults() -> None:
    html = render(page([], is_good=True))
    assert "Chaos run 7: good" in html
    assert all(f">{name}</text>" in html for name in ("node 1", "node 2", "cluster"))
    assert "<title>kill (leader), 1.0 s; &lt;exit&gt; &amp; code</title>" in html
    assert "<p>None.</p>" in html


def test_report_needs_no_network() -> None:
    html = render(page([], is_good=True))
    assert re.findall(r"(?:src|href)=|https?:|@import|url\(", html) == []


def test_report_has_the_transactions_of_each_pipeline() -> None:
    good = page([], is_good=True)
    assert "pipeline" not in render(good)
    figures_of_one = {"committed": 1_234, "aborted": 5, "unknown": 6, "longest_without_commit_s": 7.89}
    html = render(replace(good, row={**good.row, "pipelines": {"tidelog": figures_of_one}}))
    assert "<b>1,234, 5, 6</b><span>tidelog pipeline: committed, aborted, unknown</span>" in html
    assert "<b>7.9 s</b><span>tidelog pipeline: longest without a commit*</span>" in html
