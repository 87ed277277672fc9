"""Checkers of a chaos run. Pure.

`tidelog.verify` has the checkers of logs (`Checker`) and of what groups were given (`GroupChecker`). Here are:

    Progress        reader-stuck     a group has not been given an acknowledged record, though the cluster was healthy
                                     for long enough
    CommitOrder     commit-back      a commit took a group's offset back, and no newer assignment explains it
    AckGaps         the longest time without an acknowledged write, of each producer
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

TopicPartition = tuple[str, int]


@dataclass(frozen=True, slots=True)
class StuckReader:
    group: str
    reader: str
    """The member that was given the partition's records last; empty if there was none."""
    topic: str
    partition: int
    position: int
    """The next offset that the group has not been given."""
    log_end: int
    """The end of what was acknowledged."""
    at_s: float
    """When it was found, since the run began."""
    has_recovered: bool = False

    def __str__(self) -> str:
        then = ", and it went on later" if self.has_recovered else ""
        return (
            f"reader-stuck: group={self.group} reader={self.reader or 'none'} {self.topic}-{self.partition}"
            f" position={self.position} log_end={self.log_end} at={self.at_s:.0f} s{then}"
        )


@dataclass(slots=True)
class _Position:
    next_offset: int = 0
    reader: str = ""
    stalled_s: float = 0.0
    """Healthy time in which nothing came, though something was waiting."""


class Progress:
    """Every group must be given what is acknowledged. Only time counts in which all nodes have run undisturbed for
    `recovery_s`; a partition of a group that stands still for `stuck_s` of it, with records waiting, is stuck."""

    def __init__(self, groups: Iterable[str], topics: Mapping[str, int], *, stuck_s: float, recovery_s: float) -> None:
        self._stuck_s, self._recovery_s = stuck_s, recovery_s
        self._places = [(topic, number) for topic, count in topics.items() for number in range(count)]
        self._ends: dict[TopicPartition, int] = dict.fromkeys(self._places, 0)
        self._positions = {(group, *one): _Position() for group in groups for one in self._places}
        self._stuck: dict[tuple[str, str, int], StuckReader] = {}

    def acked(self, topic: str, partition: int, offset: int) -> None:
        self._ends[topic, partition] = max(self._ends[topic, partition], offset + 1)

    def read(self, group: str, reader: str, topic: str, partition: int, offset: int) -> None:
        position = self._positions[group, topic, partition]
        position.reader = reader
        if offset >= position.next_offset:
            position.next_offset = offset + 1
            position.stalled_s = 0.0
            found = self._stuck.get((group, topic, partition))
            if found is not None and not found.has_recovered:
                self._stuck[group, topic, partition] = StuckReader(
                    found.group, found.reader, topic, partition, found.position, found.log_end, found.at_s, True
                )

    def tick(self, elapsed_s: float, *, healthy_s: float, at_s: float) -> list[StuckReader]:
        """`elapsed_s` have passed since the last tick, the cluster has been healthy for `healthy_s`. Returns those that
        are found now."""
        counted_s = min(elapsed_s, healthy_s - self._recovery_s)
        found: list[StuckReader] = []
        for key, position in self._positions.items():
            group, topic, partition = key
            end = self._ends[topic, partition]
            if position.next_offset >= end:
                position.stalled_s = 0.0
                continue
            if counted_s <= 0:
                continue
            position.stalled_s += counted_s
            before = self._stuck.get(key)
            if position.stalled_s >= self._stuck_s and (before is None or before.has_recovered):
                row = StuckReader(group, position.reader, topic, partition, position.next_offset, end, at_s)
                self._stuck[key] = row
                found.append(row)
        return found

    def behind(self, ends: Mapping[TopicPartition, int]) -> list[str]:
        """Groups that have not been given everything up to these ends."""
        late = {
            group
            for (group, topic, partition), position in self._positions.items()
            if position.next_offset < ends[topic, partition]
        }
        return sorted(late)

    @property
    def ends(self) -> dict[TopicPartition, int]:
        return dict(self._ends)

    @property
    def stuck(self) -> list[StuckReader]:
        return list(self._stuck.values())

    def silent_groups(self) -> list[str]:
        """Groups that have been given nothing yet."""
        heard = {group for (group, _, _), position in self._positions.items() if position.next_offset}
        return sorted({group for group, _, _ in self._positions} - heard)


@dataclass(frozen=True, slots=True)
class _Commit:
    began_ms: int
    at_ms: int
    assigned_ms: int
    offset: int
    member: str


class CommitOrder:
    """Feed it the events of all members of one group and one topic, each file in its order; then `verdict`.

    A commit may be below the one before only if its member was assigned the partition later than the member of that
    one: it was given records again. Commits that do not say when they began (`began_ms`) are left out: the client made
    them in the background, and librdkafka repeats those that fail in any order.
    """

    def __init__(self) -> None:
        self._assigned: dict[tuple[str, int], int] = {}
        self._commits: dict[int, list[_Commit]] = {}

    def feed(self, event: Mapping[str, Any]) -> None:
        kind = event["event"]
        if kind not in ("assigned", "committed"):
            return
        key = str(event["member"]), int(event["partition"])
        at_ms = int(event["at_ms"])
        if kind == "assigned":
            self._assigned[key] = at_ms
            return
        if "began_ms" not in event:
            return
        row = _Commit(int(event["began_ms"]), at_ms, self._assigned.get(key, -1), int(event["offset"]), key[0])
        self._commits.setdefault(key[1], []).append(row)

    def verdict(self) -> list[str]:
        found: list[str] = []
        for partition, commits in sorted(self._commits.items()):
            before: list[_Commit] = []
            for commit in sorted(commits, key=lambda row: row.at_ms):
                higher = next((row for row in reversed(before) if _goes_back(row, commit)), None)
                if higher is not None:
                    found.append(
                        f"commit-back: partition {partition}: {commit.member} committed {commit.offset} after"
                        f" {higher.member} had committed {higher.offset}"
                    )
                # Only the highest of each assignment can be gone back behind.
                before = [row for row in before if row.assigned_ms != commit.assigned_ms or row.offset > commit.offset]
                before.append(commit)
        return found


def _goes_back(earlier: _Commit, later: _Commit) -> bool:
    is_lower = later.offset < earlier.offset
    return is_lower and later.assigned_ms <= earlier.assigned_ms and later.began_ms >= earlier.at_ms


class AckGaps:
    """The longest time between two acknowledgements of each producer."""

    def __init__(self) -> None:
        self._last_ms: dict[str, int] = {}
        self.longest_ms: dict[str, int] = {}

    def acked(self, producer: str, at_ms: int) -> None:
        gap_ms = at_ms - self._last_ms.get(producer, at_ms)
        self._last_ms[producer] = max(at_ms, self._last_ms.get(producer, at_ms))
        self.longest_ms[producer] = max(gap_ms, self.longest_ms.get(producer, 0))
