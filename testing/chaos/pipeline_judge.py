"""The verdict on the pipelines of a run: their histories, and a last reading of what they have written.

`tidelog.verify.TransactionChecker` has most of it. Added here:

    not-processed    a group has not committed the offsets of all inputs within the deadline
    hanging          a transaction is still open in an output when all pipelines have ended
    unseen           a reader of committed data did not get a record of the last reading
"""

from __future__ import annotations

import heapq
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import tidelog
from tidelog.model.errors import TidelogError
from tidelog.testing.chaos.figures import Window, longest_gap
from tidelog.testing.chaos.history import TopicPartition, parse_output, place_of
from tidelog.testing.chaos.judge import Event, Judgement, read_events
from tidelog.verify import TRANSACTION_EVENTS, TransactionChecker

LOOK_S = 0.2
POLL_S = 0.5
READ_S = 120.0
LAST_READER = "the last reading"

Ends = Mapping[TopicPartition, int]
Rows = dict[TopicPartition, list[tuple[int, str, int]]]
"""(offset, transaction, number) in the order of the log."""


@dataclass(slots=True)
class PipelineFigures:
    committed: int = 0
    aborted: int = 0
    unknown: int = 0
    """Their worker was killed or replaced before it noted the end."""
    records: int = 0
    """Outputs that readers of committed data see."""
    reads: int = 0
    """Records that readers got meanwhile, each reader counted."""
    longest_without_commit_s: float = 0.0


@dataclass(slots=True)
class Outcome:
    """What is left when all processes of a pipeline have ended."""

    outputs: Rows = field(default_factory=dict)
    group_offsets: dict[TopicPartition, int] = field(default_factory=dict)
    failures: list[str] = field(default_factory=list)


def wait_for_inputs(admin: tidelog.Admin, groups: Iterable[str], ends: Ends, end_s: float) -> list[str]:
    """Wait until these groups have committed the offsets of all inputs, at most until `end_s` of the monotonic clock.
    Return the failures of those that have not."""
    waiting = dict.fromkeys(groups, "no answer")
    while waiting:
        for group in list(waiting):
            try:
                found = admin.group_offsets(group)
                behind = {one: end for one, end in ends.items() if end and _committed(found, one) < end}
            except TidelogError as error:
                waiting[group] = str(error)
                continue
            if not behind:
                del waiting[group]
                continue
            rows = [f"{place_of(*one)} {_committed(found, one)} of {end}" for one, end in sorted(behind.items())]
            waiting[group] = ", ".join(rows)
        if time.monotonic() > end_s:
            break
        time.sleep(LOOK_S)
    return [f"not-processed: group {group}: {words}" for group, words in waiting.items()]


def _committed(found: Mapping[Any, Any], one: TopicPartition) -> int:
    offset = found.get(tidelog.TopicPartition(*one))
    return 0 if offset is None else offset.committed.offset


def read_outcome(bootstrap: str, admin: tidelog.Admin, group: str, outputs: Mapping[str, int]) -> Outcome:
    """Read all outputs once more as committed data, and the group's offsets."""
    outcome = Outcome()
    places = [(topic, number) for topic, count in outputs.items() for number in range(count)]
    outcome.outputs = {place: [] for place in places}
    try:
        found = admin.group_offsets(group)
        outcome.group_offsets = {(one.topic, one.partition): row.committed.offset for one, row in found.items()}
        _read(bootstrap, outcome)
    except TidelogError as error:
        outcome.failures.append(f"not-readable: {', '.join(outputs)}: {error}")
    return outcome


def _read(bootstrap: str, outcome: Outcome) -> None:
    named = {tidelog.TopicPartition(*place): place for place in outcome.outputs}
    end_s = time.monotonic() + READ_S
    with (
        tidelog.Consumer(bootstrap) as plain,
        tidelog.Consumer(bootstrap, isolation="read_committed", auto_offset_reset="earliest") as consumer,
    ):
        ends = plain.end_offsets(*named)
        consumer.assign(named)
        while left := [one for one in named if consumer.position(one) < ends[one]]:
            for record in consumer.poll(POLL_S):
                place = record.topic, record.partition
                outcome.outputs[place].append((record.offset, *parse_output(record.value)))
            if time.monotonic() > end_s:
                stable = consumer.end_offsets(*left)
                outcome.failures += [
                    f"hanging: {place_of(*named[one])} ends at {ends[one]}, and readers of committed data are at"
                    f" {consumer.position(one)} (last stable offset {stable[one]})"
                    for one in left
                ]
                return


def merged(paths: Iterable[Path]) -> Iterator[Event]:
    """The events of transactions in the order in which they happened."""
    return heapq.merge(*(_timed(path) for path in paths), key=lambda event: int(event["at_ns"]))


def _timed(path: Path) -> Iterator[Event]:
    """A worker that was killed before it wrote anything has no file."""
    if path.exists():
        yield from (event for event in read_events(path) if "at_ns" in event)


def judge_pipeline(
    judgement: Judgement,
    name: str,
    histories: Sequence[Path],
    readers: Sequence[Path],
    inputs: Ends,
    outcome: Outcome,
    group: str,
) -> PipelineFigures:
    """Check everything that the workers of a pipeline and the readers of its outputs have noted."""
    checker, figures = TransactionChecker(), PipelineFigures()
    outputs = {place_of(*place): place for place in outcome.outputs}
    seen: Counter[tuple[str, str]] = Counter()
    ended: Counter[str] = Counter()
    for event in merged([*histories, *readers]):
        kind = event["event"]
        if kind not in TRANSACTION_EVENTS or (kind == "saw" and event["place"] not in outputs):
            continue
        checker.feed(event)
        figures.unknown += kind == "txn-begin"
        if kind == "saw":
            seen[event["reader"], event["place"]] += len(event["records"])
        elif kind == "txn-end":
            ended[event["outcome"]] += 1
    for place, rows in outcome.outputs.items():
        checker.feed({"event": "saw", "reader": LAST_READER, "place": place_of(*place), "records": rows})
        checker.feed({"event": "saw-all", "place": place_of(*place)})
    for place, end in inputs.items():
        checker.feed({"event": "inputs", "place": place_of(*place), "start": 0, "end": end})
    for place, offset in outcome.group_offsets.items():
        checker.feed({"event": "offset", "group": group, "place": place_of(*place), "offset": offset})
    verdict = checker.verdict()
    judgement.is_complete = judgement.is_complete and verdict.checked_complete
    judgement.counts.update({kind: count for kind, count in verdict.counts.items() if count})
    for anomaly in verdict.anomalies:
        judgement.say(f"{anomaly.kind}: {name}: {anomaly.what}")
    judgement.add_words("unseen", _unseen(name, seen, readers, outcome))
    figures.committed, figures.aborted = ended["committed"], ended["aborted"]
    figures.unknown -= ended.total()
    figures.records = sum(map(len, outcome.outputs.values()))
    figures.reads = seen.total()
    return figures


def _unseen(name: str, seen: Mapping[tuple[str, str], int], readers: Iterable[Path], outcome: Outcome) -> Iterator[str]:
    """Readers never go back, and the checker knows what each offset holds: so counts say enough."""
    for reader in sorted(path.stem for path in readers):
        for place, rows in sorted(outcome.outputs.items()):
            got = seen.get((reader, place_of(*place)), 0)
            if got != len(rows):
                yield f"unseen: {name}: {reader} got {got} records of {place_of(*place)}; it has {len(rows)}"


def longest_without_commit_s(histories: Iterable[Path], faults: Window, majority_lost: Sequence[Window]) -> float:
    """While faults strike, of all workers of a pipeline together."""
    begin_ms, end_ms = faults
    times = [
        event["at_ns"] // 1_000_000
        for event in merged(histories)
        if event["event"] == "txn-end" and event["outcome"] == "committed"
    ]
    inside = [at_ms for at_ms in times if begin_ms <= at_ms <= end_ms]
    return round(longest_gap([begin_ms, *inside, end_ms], majority_lost, begin_ms).seconds, 3)
