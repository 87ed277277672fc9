"""The checkers of groups: each anomaly is found in a history that has it, and none in one that has not."""

from __future__ import annotations

from typing import Any

import pytest
from support.clients.cluster import BROKERS
from support.clients.consumers import ConsumerWorld, Program

import tidelog
from tidelog.client.record import ConsumerRecord, TopicPartition
from tidelog.client.verify import GROUP_KINDS, GroupRecorder, HistoryChecker, Verdict, check, encode_event
from tidelog.model.errors import InvalidRequestError
from tidelog.model.ids import NodeId

Event = dict[str, Any]


def acked(count: int, *, base: int = 0, first: int = 0) -> Event:
    return {"event": "ack", "run": "r", "partition": 0, "first": first, "count": count, "offset": base}


def assigned(member: str, offset: int, at_ms: int = 0) -> Event:
    return {"event": "assigned", "member": member, "partition": 0, "offset": offset, "at_ms": at_ms}


def polled(member: str, *offsets: int, number: int | None = None) -> Event:
    """Records whose number is their offset."""
    rows = [[offset, "r", offset if number is None else number] for offset in offsets]
    return {"event": "poll", "member": member, "partition": 0, "records": rows}


def committed(offset: int, at_ms: int) -> Event:
    return {"event": "committed", "member": "a", "partition": 0, "offset": offset, "at_ms": at_ms}


def revoked(member: str) -> Event:
    return {"event": "revoked", "member": member, "partition": 0}


def drained(end: int) -> Event:
    return {"event": "drained", "partition": 0, "end": end}


def found(*events: Event) -> dict[str, int]:
    return {kind: count for kind, count in check(events).counts.items() if count}


GOOD = [acked(10), assigned("a", 0), polled("a", 0, 1, 2, 3), committed(3, 50), revoked("a"), assigned("b", 3, 100),
        polled("b", 3, 4, 5, 6, 7, 8, 9), drained(10)]  # fmt: skip


def test_at_least_once_is_good() -> None:
    verdict = check(GOOD)
    assert verdict.is_good
    assert (verdict.acknowledged, verdict.read, verdict.checked_complete) == (10, 11, True)
    assert set(verdict.counts) == set(GROUP_KINDS)
    assert check([encode_event(event) for event in GOOD]).is_good
    assert tidelog.verify.check is check


@pytest.mark.parametrize(
    ("kind", "events"),
    [
        ("lost-write", [acked(5), assigned("a", 0), polled("a", 0, 1), assigned("b", 3), polled("b", 3, 4)]),
        ("unseen", [acked(5), assigned("a", 0), polled("a", 0, 1, 2, 3), drained(5)]),
        ("duplicate", [acked(5), assigned("a", 0), polled("a", 0, 1, 2, 3, 4), polled("a", 5, number=2)]),
        ("inconsistent-offsets", [acked(3), polled("a", 0, 1, 2), polled("b", 0, number=9), acked(1, base=9, first=9)]),
        ("inconsistent-offsets", [acked(3, base=5), assigned("a", 5), polled("a", 6, number=0)]),
        ("nonmonotonic-poll", [acked(5), assigned("a", 0), polled("a", 0, 1, 2), polled("a", 2, 3, 4)]),
        ("poll-skip", [acked(5), assigned("a", 0), polled("a", 0, 1, 3, 4), assigned("b", 2), polled("b", 2)]),
        ("poll-skip", [acked(5), assigned("a", 0), polled("a", 1, 2, 3, 4), assigned("b", 0), polled("b", 0)]),
        ("lost-commit", [acked(5), assigned("a", 0), polled("a", 0, 1, 2), committed(3, 50), assigned("b", 2, 60)]),
        ("unexpected", [acked(2), assigned("a", 0), polled("a", 0, 1, 2)]),
    ],
)  # fmt: skip
def test_each_anomaly_is_found_under_its_name(kind: str, events: list[Event]) -> None:
    assert found(*events).get(kind, 0) >= 1, found(*events)
    assert kind in {one.kind for one in check(events).anomalies}


@pytest.mark.parametrize(
    "events",
    [
        # Before the group began; not known whether it was read; jumped over by its own will; moved by an operator.
        [acked(5), assigned("a", 3), polled("a", 3, 4), drained(5)],
        [acked(5), assigned("a", 0), polled("a", 0, 1)],
        [acked(5), assigned("a", 0), polled("a", 0), {"event": "seek", "member": "a", "partition": 0, "offset": 3},
         polled("a", 3, 4), drained(5)],
        [acked(5), assigned("a", 0), polled("a", 0, 1), committed(2, 5), revoked("a"),
         {"event": "reset", "partition": 0, "offset": 4, "at_ms": 10}, assigned("a", 4, 20), polled("a", 4)],
        # A gap where nothing is known to be: compaction, markers.
        [acked(2), acked(1, base=7, first=7), assigned("a", 0), polled("a", 0, 1, 7), drained(8)],
        # Another commit on top, lower: the member's own will.
        [acked(5), assigned("a", 0), polled("a", 0, 1, 2), committed(3, 5), committed(1, 6), assigned("b", 1, 9)],
        # A new member goes back to what is committed: at least once.
        [acked(5), assigned("a", 0), polled("a", 0, 1, 2), assigned("b", 0, 9), polled("b", 0, 1, 2, 3, 4)],
    ],
)  # fmt: skip
def test_what_is_allowed_is_not_found(events: list[Event]) -> None:
    assert found(*events) == {}


def test_readers_and_members_of_one_history_are_judged_together() -> None:
    read = {"event": "read", "reader": "x", "partition": 0, "records": [[0, "r", 0], [1, "r", 1]]}
    end = {"event": "end", "reader": "x", "partition": 0, "start": 0, "end": 5}
    counts = check([*GOOD[:3], read, end]).counts
    assert counts["lost"] == 3  # 2 to 4 of the reader's range
    assert counts["lost-write"] == 0
    assert "lost-write" not in check([acked(1), read]).counts
    checker = HistoryChecker()
    for wrong in ("no json", '{"event": "poll"}', '{"event": "what", "partition": 0}'):
        with pytest.raises(InvalidRequestError, match="file:7: no line of a history"):
            checker.feed_line(wrong, where="file:7")


class Recorded:
    """A member that notes what it is given, and commits each record."""

    def __init__(self, world: ConsumerWorld, program: Program, name: str, events: list[Event]) -> None:
        self.program = program
        self.recorder = GroupRecorder(name, events.append, lambda: int(world.now_s() * 1000))
        program.task = program.machine.spawn(self._work())

    async def _work(self) -> None:
        consumer = self.program.consumer

        async def on_assigned(places: list[TopicPartition]) -> None:
            self.recorder.assigned({place.partition: await consumer.position(place) for place in places})

        def on_gone(places: list[TopicPartition]) -> None:
            self.recorder.revoked(place.partition for place in places)

        await consumer.subscribe(["t"], on_assigned=on_assigned, on_revoked=on_gone, on_lost=on_gone)
        while True:
            records = await consumer.poll(0.5, 5)
            for record in records:
                self._note(record)
            if records:
                offsets = {record.topic_partition: record.offset + 1 for record in records}
                await consumer.commit(offsets)
                self.recorder.committed({place.partition: offset for place, offset in offsets.items()})

    def _note(self, record: ConsumerRecord) -> None:
        assert record.value is not None
        number = int(record.value.decode().partition(":")[2])
        self.recorder.polled(record.partition, [(record.offset, "r", number)])


@pytest.mark.parametrize("seed", range(3))
def test_a_group_whose_members_and_coordinator_are_killed_is_good(seed: int) -> None:
    with ConsumerWorld(seed + 30) as world:
        world.make_topic("t", partitions=3)
        events: list[Event] = [
            {"event": "ack", "run": "r", "partition": number, "first": 0, "count": 40, "offset": 0}
            for number in range(3)
        ]

        def member(name: str) -> Recorded:
            return Recorded(world, world.consumer("g", enable_auto_commit=False), name, events)

        members = [member("one"), member("two")]
        world.fill("t", dict.fromkeys(range(3), 20))
        world.until(lambda: any(event["event"] == "committed" for event in events), timeout=60)
        members[0].program.kill()
        members.append(member("three"))
        world.kill(NodeId(BROKERS[seed]))
        world.fill("t", dict.fromkeys(range(3), 20), first=20)

        def seen() -> set[tuple[int, int]]:
            rows = [event for event in events if event["event"] == "poll"]
            return {(event["partition"], row[0]) for event in rows for row in event["records"]}

        world.until(lambda: len(seen()) == 120, timeout=120)
        events += [{"event": "drained", "partition": number, "end": 40} for number in range(3)]
        verdict: Verdict = check(events)
        assert verdict.is_good, verdict.anomalies
        assert verdict.acknowledged == 120
