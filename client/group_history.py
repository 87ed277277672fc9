"""Histories of consumer groups, and the checker of what members received. Pure.

In addition to writer events (`send`, `ack`, `fail`: see `client.history`) a history has member events. Each member of
the group logs, in order:

    {"event": "assigned", "member", "partition", "offset", "at_ms"}        the member owns the partition and starts here
    {"event": "poll",     "member", "partition", "records": [[offset, run, number], ...]}
    {"event": "seek",     "member", "partition", "offset"}                 the member moves its position
    {"event": "committed", "member", "partition", "offset", "at_ms"}       the commit was acknowledged at that time
    {"event": "revoked",  "member", "partition"}                           the member has given up or lost the partition
    {"event": "reset",    "partition", "offset", "at_ms"}                  the group's offset was reset
    {"event": "drained",  "partition", "end"}                              the group has received everything before end

The checker reports, with the names of Jepsen's checkers, for each partition:

    lost-write            acknowledged, never received by the group, but something behind it was
    unseen                acknowledged, never received, nothing behind it either, although the group drained past it
    duplicate             one number at two offsets
    inconsistent-offsets  two records at one offset, or one at another offset than was acknowledged
    nonmonotonic-poll     an owner of the partition received an offset that is not above the previous one
    poll-skip             an owner of the partition did not receive a record that is known to lie in between
    lost-commit           a member started below the last offset whose commit was acknowledged before
    unexpected            a record that nobody sent, or that was rejected before it was sent

Receiving a record twice is no anomaly: delivery is at least once. Records before the group's first position, or skipped
by `seek` or `reset`, are not the group's. The checker compares times of members: their clocks should agree.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from tidelog.client.history import Number, Verdict

GROUP_KINDS = (
    "lost-write",
    "unseen",
    "duplicate",
    "inconsistent-offsets",
    "nonmonotonic-poll",
    "poll-skip",
    "lost-commit",
    "unexpected",
)


class _Partition:
    """Everything known about one partition."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.sent: set[Number] = set()
        self.acked: dict[Number, int] = {}
        self.refused: set[Number] = set()
        self.at: dict[int, Number] = {}
        self.places: dict[Number, int] = {}
        self.last: dict[str, int] = {}  # member -> last received offset while it owns the partition
        self.gaps: list[tuple[str, int, int]] = []  # (member, first, end) that it did not receive
        self.jumped: list[tuple[int, int]] = []
        self.begun: list[tuple[int, str, int]] = []  # (at_ms, member, offset)
        self.commits: list[tuple[int, int]] = []  # (at_ms, offset); resets too
        self.drained = -1


class GroupChecker:
    """Feed events in the order of each file, then call `verdict`."""

    def __init__(self) -> None:
        self._partitions: dict[int, _Partition] = {}
        self._verdict = Verdict(counts=dict.fromkeys(GROUP_KINDS, 0))

    def feed(self, event: Mapping[str, Any]) -> None:
        """Feed one event. Raises KeyError, TypeError or ValueError for a malformed one."""
        kind = event["event"]
        if kind not in _FEEDS:
            raise ValueError(f"no such event: {kind!r}")
        number = int(event["partition"])
        _FEEDS[kind](self, self._partitions.setdefault(number, _Partition(number)), event)

    # Writers.

    def _numbers(self, event: Mapping[str, Any]) -> list[Number]:
        first, count = int(event["first"]), int(event["count"])
        return [(str(event["run"]), number) for number in range(first, first + count)]

    def _send(self, partition: _Partition, event: Mapping[str, Any]) -> None:
        partition.sent.update(self._numbers(event))

    def _ack(self, partition: _Partition, event: Mapping[str, Any]) -> None:
        base = int(event["offset"])
        for index, number in enumerate(self._numbers(event)):
            partition.sent.add(number)
            partition.acked[number] = base + index if base >= 0 else -1

    def _fail(self, partition: _Partition, event: Mapping[str, Any]) -> None:
        numbers = self._numbers(event)
        partition.sent.update(numbers)
        if not event["was_sent"]:
            partition.refused.update(numbers)

    # Members.

    def _assigned(self, partition: _Partition, event: Mapping[str, Any]) -> None:
        member, offset = str(event["member"]), int(event["offset"])
        partition.last[member] = offset - 1
        partition.begun.append((int(event["at_ms"]), member, offset))

    def _poll(self, partition: _Partition, event: Mapping[str, Any]) -> None:
        member = str(event["member"])
        verdict = self._verdict
        for row, run, number in event["records"]:
            offset, record = int(row), (str(run), int(number))
            verdict.read += 1
            last = partition.last.get(member)
            if last is not None and offset <= last:
                verdict.found("nonmonotonic-poll", partition.number, f"{member} was given {offset} after {last}")
            elif last is not None and offset > last + 1:
                partition.gaps.append((member, last + 1, offset))
            partition.last[member] = offset
            before = partition.at.setdefault(offset, record)
            if before != record:
                what = f"offset {offset} was {_describe(before)} and then {_describe(record)}"
                verdict.found("inconsistent-offsets", partition.number, what)
            known_offset = partition.places.setdefault(record, offset)
            if known_offset != offset:
                verdict.found("duplicate", partition.number, f"{_describe(record)} at {known_offset} and at {offset}")

    def _seek(self, partition: _Partition, event: Mapping[str, Any]) -> None:
        member, offset = str(event["member"]), int(event["offset"])
        last = partition.last.get(member)
        if last is not None and offset > last + 1:
            partition.jumped.append((last + 1, offset))
        partition.last[member] = offset - 1

    def _committed(self, partition: _Partition, event: Mapping[str, Any]) -> None:
        partition.commits.append((int(event["at_ms"]), int(event["offset"])))

    def _revoked(self, partition: _Partition, event: Mapping[str, Any]) -> None:
        partition.last.pop(str(event["member"]), None)

    def _reset(self, partition: _Partition, event: Mapping[str, Any]) -> None:
        at_ms, offset = int(event["at_ms"]), int(event["offset"])
        earlier = [commit for commit in partition.commits if commit[0] <= at_ms]
        if earlier and max(earlier)[1] < offset:
            partition.jumped.append((max(earlier)[1], offset))
        partition.commits.append((at_ms, offset))

    def _drained(self, partition: _Partition, event: Mapping[str, Any]) -> None:
        partition.drained = max(partition.drained, int(event["end"]))
        self._verdict.checked_complete = True

    # The verdict.

    def verdict(self) -> Verdict:
        """Return the verdict on all events so far. You may call it repeatedly."""
        verdict = self._verdict.copy()
        for _, partition in sorted(self._partitions.items()):
            self._judge_writes(partition, verdict)
            self._judge_polls(partition, verdict)
            self._judge_commits(partition, verdict)
        return verdict

    def _judge_writes(self, partition: _Partition, verdict: Verdict) -> None:
        verdict.sent += len(partition.sent)
        verdict.acknowledged += len(partition.acked)
        verdict.refused += len(partition.refused - partition.acked.keys())
        verdict.unknown += len(partition.sent - partition.acked.keys() - partition.refused)
        first = min([offset for _, _, offset in partition.begun] or partition.at or [0])
        highest = max(partition.at, default=-1)
        for number, offset in partition.acked.items():
            found_offset = partition.places.get(number)
            if found_offset is not None:
                if offset >= 0 and found_offset != offset:
                    what = f"{_describe(number)}, acknowledged at {offset}, was given out at {found_offset}"
                    verdict.found("inconsistent-offsets", partition.number, what)
                continue
            if offset < first if offset >= 0 else first > 0:
                continue
            if any(start <= offset < end for start, end in partition.jumped):
                continue
            what = f"{_describe(number)}, acknowledged at {offset}, was given to nobody"
            if 0 <= offset < highest:
                verdict.found("lost-write", partition.number, f"{what}, and {highest} was")
            elif offset < partition.drained:
                verdict.found("unseen", partition.number, what)
        if partition.sent:
            for offset, number in sorted(partition.at.items()):
                if number not in partition.sent:
                    verdict.found("unexpected", partition.number, f"{_describe(number)} at {offset} was not sent")
                elif number in partition.refused and number not in partition.acked:
                    verdict.found("unexpected", partition.number, f"{_describe(number)} at {offset} was refused")

    def _judge_polls(self, partition: _Partition, verdict: Verdict) -> None:
        known = sorted({*partition.at, *(offset for offset in partition.acked.values() if offset >= 0)})
        for member, first, end in partition.gaps:
            index = bisect_right(known, first - 1)
            if index < len(known) and known[index] < end:
                what = f"{member} was given {end} after {first - 1}; a record is at {known[index]}"
                verdict.found("poll-skip", partition.number, what)

    def _judge_commits(self, partition: _Partition, verdict: Verdict) -> None:
        # Of two commits in one millisecond the one logged later counts. A member that started in it may not know it.
        commits = sorted(partition.commits, key=lambda commit: commit[0])
        times = [at_ms for at_ms, _ in commits]
        for at_ms, member, offset in partition.begun:
            index = bisect_right(times, at_ms - 1)
            if index and offset < commits[index - 1][1]:
                what = f"{member} began at {offset}; {commits[index - 1][1]} had been committed before"
                verdict.found("lost-commit", partition.number, what)


_FEEDS: dict[str, Callable[[GroupChecker, _Partition, Mapping[str, Any]], None]] = {
    "send": GroupChecker._send,
    "ack": GroupChecker._ack,
    "fail": GroupChecker._fail,
    "assigned": GroupChecker._assigned,
    "poll": GroupChecker._poll,
    "seek": GroupChecker._seek,
    "committed": GroupChecker._committed,
    "revoked": GroupChecker._revoked,
    "reset": GroupChecker._reset,
    "drained": GroupChecker._drained,
}
MEMBER_EVENTS = frozenset(_FEEDS) - {"send", "ack", "fail"}


class GroupRecorder:
    """Logs a member's events from the callbacks and calls of its consumer."""

    def __init__(self, member: str, note: Callable[[dict[str, Any]], None], now_ms: Callable[[], int]) -> None:
        self.member = member
        self._note = note
        self._now_ms = now_ms

    def assigned(self, positions: Mapping[int, int]) -> None:
        """Log {partition: start offset}; call it in `on_assigned`."""
        for partition, offset in positions.items():
            self._member("assigned", partition, offset=offset, at_ms=self._now_ms())

    def revoked(self, partitions: Iterable[int]) -> None:
        """Call it in `on_revoked` and `on_lost`."""
        for partition in partitions:
            self._member("revoked", partition)

    def polled(self, partition: int, records: Iterable[tuple[int, str, int]]) -> None:
        """Log (offset, run, number) of the received records, in order."""
        self._member("poll", partition, records=[list(row) for row in records])

    def committed(self, offsets: Mapping[int, int]) -> None:
        """Call it after a commit has returned."""
        for partition, offset in offsets.items():
            self._member("committed", partition, offset=offset, at_ms=self._now_ms())

    def drained(self, ends: Mapping[int, int]) -> None:
        for partition, end in ends.items():
            self._note({"event": "drained", "partition": partition, "end": end})

    def _member(self, event: str, partition: int, **fields: Any) -> None:
        self._note({"event": event, "member": self.member, "partition": partition, **fields})


def _describe(number: Number) -> str:
    return f"record {number[1]} of run {number[0]}"
