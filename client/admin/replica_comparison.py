"""Compares the replicas of one partition by digests, range by range, down to the first batch that differs.

    layout --> describe each replica: leader, and followers that follow it in its epoch
           --> from the latest log start on: the leader's digest of a range, then the others' of the same range
           --> equal: the next range.  Not equal: list the batches of the range, compare one by one, list again
           --> the same difference twice in one epoch: reported

In one leader epoch the log of a follower is a prefix of its leader's, and what lies below both high watermarks does not
change. So a difference there is rot or a defect, not a matter of time. A replica whose leader, epoch or log generation
changes meanwhile is compared again from where it may have changed, a few times; then it is reported as unverified.

Records of compacted logs are compared where both replicas keep them.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Protocol

from tidelog.client.admin.verification import (
    AGREE,
    DIFFER,
    UNVERIFIED,
    DifferingReplica,
    PartitionVerification,
    ReplicaDifference,
    advice,
)
from tidelog.log.range_digests import DigestQuery, ReplicaDigest, Unit, decode_units
from tidelog.model.errors import TidelogError

ATTEMPTS_MAX = 12
"""In a row that bring the comparison no further."""
CHANGES_MAX = 4
"""Changes of one replica before it is left out."""
PAUSE_MIN_S, PAUSE_MAX_S = 0.1, 1.0
NO_BROKER = -1


@dataclass(frozen=True, slots=True)
class Layout:
    leader: int | None
    leader_epoch: int
    replicas: tuple[int, ...]


class ReplicaSource(Protocol):
    """The way to the replicas of one partition. Both raise errors of the catalogue."""

    async def layout(self) -> Layout: ...

    async def digest(self, broker: int, query: DigestQuery) -> ReplicaDigest: ...


class _ChangedError(Exception):
    """A replica has changed: what was compared may be void."""

    def __init__(self, broker: int, reason: str) -> None:
        super().__init__(reason)
        self.broker = broker


class Comparison:
    """See the module. `run` is called once."""

    def __init__(
        self, topic: str, partition: int, source: ReplicaSource, on_progress: Callable[[int], None] | None = None
    ) -> None:
        """`on_progress` is called with the number of offsets that were compared since the last call."""
        self._topic, self._partition = topic, partition
        self._source = source
        self._on_progress = on_progress or (lambda _offsets: None)
        self._layout = Layout(None, -1, ())
        self._states: dict[int, ReplicaDigest] = {}
        """The leader and the followers that are compared, as they were when this attempt began."""
        self._by_record = False
        self._unverified: dict[int, str] = {}
        self._excluded: dict[int, str] = {}
        self._verified: dict[int, int] = {}
        self._start = self._cursor = 0
        self._bytes = 0
        self._compared: tuple[bool, int, dict[int, int]] = (False, 0, {})
        """Of the last attempt: by record, cursor, generation of each replica."""

    async def run(self) -> PartitionVerification:
        changes: Counter[int] = Counter()
        pause_s, attempts, furthest = PAUSE_MIN_S, 0, -1
        while attempts < ATTEMPTS_MAX:
            attempts += 1
            try:
                await self._begin()
                return self._result(await self._compare())
            except _ChangedError as change:
                changes[change.broker] += 1
                if changes[change.broker] >= CHANGES_MAX and change.broker not in (NO_BROKER, self._layout.leader):
                    self._excluded[change.broker] = str(change)
                reason = str(change)
            except TidelogError as error:
                reason = str(error)
                if not error.retriable:
                    break
            if self._cursor > furthest:  # brokers are slow, or busy: it goes on
                furthest, attempts = self._cursor, 0
                changes.clear()
            generations = {broker: state.generation for broker, state in self._states.items()}
            self._compared = self._by_record, self._cursor, generations
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, PAUSE_MAX_S)
        self._unverified[NO_BROKER] = reason
        return self._result(None)

    def _result(self, difference: ReplicaDifference | None) -> PartitionVerification:
        state = AGREE if difference is None else DIFFER
        if difference is None and self._unverified:
            state = UNVERIFIED
        return PartitionVerification(
            topic=self._topic,
            partition=self._partition,
            state=state,
            start=self._start,
            end=self._cursor,
            verified=dict(sorted(self._verified.items())),
            unverified=dict(sorted(self._unverified.items())),
            difference=difference,
            by_record=self._by_record,
            bytes=self._bytes,
        )

    # The beginning of an attempt.

    async def _begin(self) -> None:
        self._states, self._unverified, self._verified = {}, dict(self._excluded), {}
        self._layout = layout = await self._source.layout()
        if layout.leader is None:
            raise _ChangedError(NO_BROKER, "the partition has no leader")
        for left_out in (self._excluded, self._unverified):
            left_out.pop(layout.leader, None)  # a follower that was left out leads by now
        asked = [broker for broker in layout.replicas if broker not in self._excluded]
        states = await self._ask(asked, DigestQuery())
        for broker, state in states.items():
            if isinstance(state, TidelogError):
                if broker == layout.leader:
                    raise _ChangedError(NO_BROKER, str(state))
                self._unverified[broker] = str(state)
            elif state.damage:
                if broker == layout.leader:
                    raise _ChangedError(NO_BROKER, f"the leader's log is damaged: {state.damage}")
                self._unverified[broker] = f"its log is damaged, and waits for its repair: {state.damage}"
            else:
                self._states[broker] = state
        for broker, state in self._states.items():
            self._check_role(broker, state)
        starts = [state.start_offset for state in self._states.values()]
        self._by_record = any(state.has_gaps for state in self._states.values())
        by_record, cursor, generations = self._compared
        self._cursor = max(starts)
        is_same = all(generations.get(broker) == state.generation for broker, state in self._states.items())
        if is_same and by_record == self._by_record and cursor > self._cursor:
            self._cursor = cursor
        else:
            self._start, self._bytes = self._cursor, 0

    async def _ask(self, brokers: list[int], query: DigestQuery) -> dict[int, ReplicaDigest | TidelogError]:
        async def ask(broker: int) -> ReplicaDigest | TidelogError:
            try:
                return await self._source.digest(broker, query)
            except TidelogError as error:
                return error

        answers = await asyncio.gather(*(ask(broker) for broker in brokers))
        return dict(zip(brokers, answers, strict=True))

    def _check_role(self, broker: int, state: ReplicaDigest) -> None:
        layout = self._layout
        if (state.leader, state.leader_epoch) != (layout.leader, layout.leader_epoch):
            raise _ChangedError(
                broker, f"it does not have the leader {layout.leader} of epoch {layout.leader_epoch} yet"
            )
        if not state.follows:
            raise _ChangedError(broker, f"it does not follow leader {layout.leader} in epoch {layout.leader_epoch} yet")

    # Comparing.

    async def _compare(self) -> ReplicaDifference | None:
        leader = self._layout.leader
        assert leader is not None, "an attempt has a leader"
        end = self._states[leader].high_watermark
        ends = {broker: min(state.high_watermark, end) for broker, state in self._states.items()}
        while True:
            left = {broker: limit for broker, limit in ends.items() if limit > self._cursor and broker != leader}
            for broker, limit in ends.items():
                if broker not in left and broker != leader:
                    self._verified[broker] = limit
            if self._cursor >= end:
                break
            until = min(left.values(), default=end)
            compared = [leader, *left]
            digests = await self._digest_range(compared, until)
            if digests is None:
                continue
            reached = min(digest.reached for digest in digests.values())
            faults = {broker: digest.fault for broker, digest in digests.items() if digest.fault}
            if reached == self._cursor and not faults:
                raise _ChangedError(NO_BROKER, f"no replica reads on from offset {reached}")
            if reached == self._cursor or len({digest.digest for digest in digests.values()}) > 1:
                cursor = self._cursor
                difference = await self._locate(compared, until if reached == cursor else reached)
                if difference is not None:
                    return difference
                if self._cursor != cursor:
                    continue
                if reached == cursor or not self._by_record:
                    raise _ChangedError(NO_BROKER, f"a difference from offset {cursor} on was gone when asked again")
            self._bytes += digests[leader].size
            self._on_progress(reached - self._cursor)
            self._cursor = reached
        self._verified[leader] = max(end, self._cursor)
        return None

    async def _digest_range(self, brokers: list[int], end: int) -> dict[int, ReplicaDigest] | None:
        """Return digests of one range that begins at the cursor; None if the cursor has moved with a log start.

        They end at the same offset. If that is the cursor, some are missing: the first one has a fault there.
        """
        digests = await self._digests(brokers[:1], DigestQuery(start=self._cursor, end=end, by_record=self._by_record))
        if digests is None:
            return None
        while True:
            end = min(digest.reached for digest in digests.values())
            behind = [broker for broker in brokers if broker not in digests or digests[broker].reached != end]
            if not behind or end == self._cursor:
                return digests
            query = DigestQuery(start=self._cursor, end=end, by_record=self._by_record)
            more = await self._digests(behind, query)
            if more is None:
                return None
            digests |= more

    async def _digests(self, brokers: list[int], query: DigestQuery) -> dict[int, ReplicaDigest] | None:
        answers: dict[int, ReplicaDigest] = {}
        for broker, answer in (await self._ask(brokers, query)).items():
            if isinstance(answer, TidelogError):
                raise _ChangedError(broker, str(answer))
            before = self._states[broker]
            if answer.damage:
                raise _ChangedError(broker, f"its log is damaged: {answer.damage}")
            self._check_role(broker, answer)
            if answer.generation != before.generation or (answer.has_gaps and not self._by_record):
                raise _ChangedError(broker, "its log was truncated, or is compacted from now on")
            answers[broker] = answer
        start = max(answer.start_offset for answer in answers.values())
        if start > self._cursor:
            self._cursor = start
            return None
        return answers

    # The place of a difference.

    async def _locate(self, brokers: list[int], end: int) -> ReplicaDifference | None:
        """Return the first difference in [cursor, end), which is there twice; None if there is none: a log start has
        passed it, or the replicas of a compacted log keep other records. A list of units may end before `end`."""
        start = self._cursor
        while start < end:
            query = DigestQuery(start=start, end=end, by_record=self._by_record, lists_units=True)
            first = await self._digests(brokers, query)
            if first is None:
                return None
            if self._difference(first, end) is not None:
                again = await self._digests(brokers, replace(query, is_suspect=True))
                return None if again is None else self._difference(again, end)
            reached = min(digest.reached for digest in first.values())
            if reached <= start:
                return None
            start = reached
        return None

    def _difference(self, digests: dict[int, ReplicaDigest], end: int) -> ReplicaDifference | None:
        """The first one below `end` that these lists of units show, as far as all of them go."""
        lists = {broker: decode_units(digest.units) for broker, digest in digests.items()}
        faults = {broker: digest for broker, digest in digests.items() if digest.fault}
        readable = min([end, *(digest.reached for digest in digests.values())])
        start = _first_record(lists, readable) if self._by_record else _first_batch(lists, readable)
        if start is None:
            if not any(digest.reached == readable for digest in faults.values()):
                return None
            start = readable
        units = {broker: _unit_at(units, start) for broker, units in lists.items()}
        next_end = min(
            (unit.offset for units_of in lists.values() for unit in units_of if unit.offset > start), default=end
        )
        here = {broker: digest.fault for broker, digest in faults.items() if digest.reached <= start}
        copies = {
            broker: DifferingReplica(
                None if unit is None else unit.epoch, "" if unit is None else unit.digest.hex(), here.get(broker, "")
            )
            for broker, unit in units.items()
        }
        suspects = tuple(sorted(here)) or _minority(copies)
        until = start + 1 if self._by_record else max(next_end, start + 1)
        return ReplicaDifference(start, until, copies, suspects, advice(here, suspects, len(copies)))


def _first_batch(lists: dict[int, list[Unit]], end: int) -> int | None:
    """The offset of the first batch below `end` that is not the same in all lists."""
    readable = [[unit for unit in units if unit.offset < end] for units in lists.values()]
    for row in zip(*readable, strict=False):
        if len(set(row)) > 1:
            first: int = min(unit.offset for unit in row)
            return first
    least = min(map(len, readable))
    more: list[int] = [units[least].offset for units in readable if len(units) > least]
    return min(more) if more else None


def _first_record(lists: dict[int, list[Unit]], end: int) -> int | None:
    """The offset of the first record below `end` that two lists have, and not the same."""
    known: dict[int, Unit] = {}
    differing = [
        unit.offset
        for units in lists.values()
        for unit in units
        if unit.offset < end and known.setdefault(unit.offset, unit) != unit
    ]
    return min(differing, default=None)


def _unit_at(units: list[Unit], offset: int) -> Unit | None:
    return next((unit for unit in units if unit.offset == offset), None)


def _minority(copies: dict[int, DifferingReplica]) -> tuple[int, ...]:
    """The brokers whose copy is not that of the majority; all, if there is no majority."""
    (digest, votes), *_ = Counter(copy.digest for copy in copies.values()).most_common(1)
    if 2 * votes <= len(copies):
        return tuple(sorted(copies))
    return tuple(sorted(broker for broker, copy in copies.items() if copy.digest != digest))
