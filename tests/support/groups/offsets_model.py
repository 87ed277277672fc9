"""Commits of transactions and others, markers that are late or repeated, deletions and expiry; and what a list of all
writes says about them.

Checked after each step: what is committed is the newest write of no transaction or of a committed one; a partition is
unstable while an open transaction has written to it; nothing of an ended transaction is accepted. The log, whole or
compacted up to anywhere, replays to the very state, also when the coordinator restarts from it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, field

from support.groups.machine import Groups, Topics
from tidelog.coordinator.limits import GroupLimits
from tidelog.coordinator.machine import fetch_offsets
from tidelog.coordinator.queries import unstable_partitions
from tidelog.coordinator.requests import DeleteGroup, DeleteOffsets, ExpireOffsets, ForgetFences
from tidelog.model.errors import TidelogError
from tidelog.model.ids import PartitionId

GROUPS = ("g", "h")
RETENTION_MS = 1_000
NO_PRODUCER = -1


@dataclass
class Write:
    offset: int
    commit_ms: int
    producer: int = NO_PRODUCER
    number: int = 0
    is_committed: bool = True


@dataclass
class Producer:
    """Of version 2, where the epoch rises with each end, or of version 1, where only the number does."""

    producer: int
    version: int
    epoch: int = 0
    number: int = 1
    is_known_here: bool = False
    markers: list[dict[str, int | bool]] = field(default_factory=list)
    """All that were sent: each may come again."""


class OffsetsModel:
    def __init__(self) -> None:
        self.groups = Groups(view=Topics.of(a=3), limits=GroupLimits(expired_per_decision_max=2))
        self.writes: dict[tuple[str, PartitionId], list[Write]] = {}
        self.producers = [Producer(0, 2), Producer(1, 2), Producer(2, 1)]
        self.offset = 0
        self.steps: list[Callable[[int], None]] = [
            *[self.commit] * 3,
            *[self.commit_in_transaction] * 6,
            self.commit_late,
            *[self.end] * 4,
            *[self.repeat_marker] * 2,
            self.delete_offsets,
            self.delete_group,
            *[self.expire] * 2,
            self.forget_fences,
            self.restart,
            self.pass_time,
        ]

    def run(self, history: Iterable[int]) -> None:
        for number in history:
            self.steps[number % len(self.steps)](number // len(self.steps))
            self.check()
        for producer in self.producers:
            self.finish(producer, is_commit=True)
        self.check()
        assert not self.groups.state.open, "every transaction has ended"
        assert self.groups.replayed() == self.groups.compacted() == self.groups.state

    # Steps. Each takes a number for its choices.

    def pick(self, number: int) -> tuple[str, PartitionId]:
        return GROUPS[number % 2], self.groups.view.part("a", number // 2 % 3)

    def write(self, group: str, partition: PartitionId, producer: Producer | None = None) -> None:
        made = Write(self.offset, self.groups.now_ms)
        if producer is not None:
            made.producer, made.number, made.is_committed = producer.producer, producer.number, False
        self.writes.setdefault((group, partition), []).append(made)

    def commit(self, number: int) -> None:
        group, partition = self.pick(number)
        self.offset += 1
        assert self.groups.commit({partition: self.offset}, group=group) == {partition: None}
        self.write(group, partition)

    def commit_in_transaction(self, number: int) -> None:
        producer = self.producers[number % 3]
        group, partition = self.pick(number // 3)
        self.offset += 1
        is_open = producer.producer in self.groups.state.open
        asks = not is_open or number % 5 == 0
        self.groups.pend(
            {partition: self.offset},
            group=group,
            producer=producer.producer,
            epoch=producer.epoch,
            number=producer.number if asks else None,
        )
        self.write(group, partition, producer)

    def commit_late(self, number: int) -> None:
        """A commit of a transaction that has ended, with the coordinator's answer of then."""
        producer = self.producers[number % 3]
        if producer.number == 1 or not producer.is_known_here:
            return
        group, partition = self.pick(number // 3)
        before = self.groups.state
        epoch = producer.epoch - (1 if producer.version == 2 else 0)
        try:
            self.groups.pend(
                {partition: 999_999},
                group=group,
                producer=producer.producer,
                epoch=epoch,
                number=None if number % 2 and producer.producer not in before.open else producer.number - 1,
            )
        except TidelogError:
            assert self.groups.state is before
        else:
            raise AssertionError(f"a commit of transaction {producer.number - 1} was accepted")

    def end(self, number: int) -> None:
        self.finish(self.producers[number % 3], is_commit=bool(number // 3 % 3))

    def finish(self, producer: Producer, *, is_commit: bool) -> None:
        marker = {
            "producer": producer.producer,
            "epoch": producer.epoch + (1 if producer.version == 2 else 0),
            "number": producer.number,
            "is_commit": is_commit,
            "is_strict": producer.version == 2,
        }
        self.groups.mark(**marker)  # type: ignore[arg-type]
        producer.markers.append(marker)
        for writes in self.writes.values():
            kept = [write for write in writes if write.producer != producer.producer or write.is_committed or is_commit]
            for write in kept:
                write.is_committed = write.is_committed or write.producer == producer.producer
            writes[:] = kept
        producer.epoch += 1 if producer.version == 2 else 0
        producer.number += 1
        producer.is_known_here = True

    def repeat_marker(self, number: int) -> None:
        """Any marker that was ever sent comes again, or its opposite."""
        producer = self.producers[number % 3]
        if not producer.markers or not producer.is_known_here:
            return
        before = self.groups.state
        marker = dict(producer.markers[number // 3 % len(producer.markers)])
        marker["is_commit"] = bool(number % 2)
        with suppress(TidelogError):  # it may be an earlier one than that of the open transaction
            self.groups.mark(**marker)  # type: ignore[arg-type]
        assert self.groups.state is before, f"marker {marker} changed something when it came again"

    def delete_offsets(self, number: int) -> None:
        group, partition = self.pick(number)
        if self.groups.state.group(group) is None:
            return
        view, now_ms = self.groups.view, self.groups.now_ms
        self.groups.submit(DeleteOffsets(group=group, partitions=(partition,), view=view, now_ms=now_ms))
        self.writes.pop((group, partition), None)

    def delete_group(self, number: int) -> None:
        group = GROUPS[number % 2]
        if number % 3 or self.groups.state.group(group) is None:
            return
        self.groups.submit(DeleteGroup(group=group))
        self.writes = {key: writes for key, writes in self.writes.items() if key[0] != group}

    def expire(self, number: int) -> None:
        request = ExpireOffsets(now_ms=self.groups.now_ms, retention_ms=RETENTION_MS)
        for _ in range(20):
            if not self.groups.submit(request):
                break
        horizon = self.groups.now_ms - RETENTION_MS
        for key, writes in list(self.writes.items()):
            newest = self.newest(key)
            if newest is not None and newest.commit_ms <= horizon and all(write.is_committed for write in writes):
                del self.writes[key]

    def forget_fences(self, number: int) -> None:
        self.groups.submit(ForgetFences(now_ms=self.groups.now_ms, retention_ms=RETENTION_MS))
        for producer in self.producers:
            is_known = producer.producer in self.groups.state.fences or producer.producer in self.groups.state.open
            producer.is_known_here = producer.is_known_here and is_known

    def restart(self, number: int) -> None:
        replayed = self.groups.compacted(number % (len(self.groups.records) + 1))
        assert replayed == self.groups.state
        self.groups.state = replayed

    def pass_time(self, number: int) -> None:
        self.groups.now_ms += number % (2 * RETENTION_MS)

    # What must hold.

    def newest(self, key: tuple[str, PartitionId]) -> Write | None:
        return next((write for write in reversed(self.writes.get(key, [])) if write.is_committed), None)

    def check(self) -> None:
        for group in GROUPS:
            held = fetch_offsets(self.groups.state, group)
            unstable = set(unstable_partitions(self.groups.state, group))
            for number in range(3):
                partition = self.groups.view.part("a", number)
                newest = self.newest((group, partition))
                found = held[partition].offset if partition in held else None
                assert found == (None if newest is None else newest.offset), f"{group} {partition}: {found}, {newest}"
                is_open = any(not write.is_committed for write in self.writes.get((group, partition), []))
                assert (partition in unstable) == is_open, f"{group} {partition} is not {is_open} unstable"
