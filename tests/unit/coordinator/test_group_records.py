"""Records of groups: coding, versions to come, bounds, batches; and states that any records make."""

from __future__ import annotations

import random

import msgpack
import pytest
from support.groups.machine import Groups, Member, Topics, run_until_stable, topic_id

from tidelog.coordinator import records as r
from tidelog.coordinator.machine import GroupMachine
from tidelog.coordinator.records import (
    ClassicMember,
    ClassicValue,
    CurrentValue,
    FenceValue,
    GroupRecord,
    GroupValue,
    Key,
    Kind,
    MemberValue,
    OffsetValue,
    PendingValue,
    TargetValue,
    Value,
)
from tidelog.coordinator.requests import CommitOffsets, OffsetToCommit
from tidelog.coordinator.state import EMPTY, apply, validate
from tidelog.log import batch
from tidelog.log.columns import Record
from tidelog.model.errors import CorruptStateError, PolicyViolationError
from tidelog.model.ids import Offset, PartitionId

PARTS = frozenset(PartitionId(topic_id(topic), number) for topic in (1, 2) for number in range(3))
ALL: list[tuple[Key, Value]] = [
    (r.group_key("g"), GroupValue(epoch=4, assignor="range", topics_digest=b"12345678", empty_since_ms=9)),
    (r.group_key("h"), GroupValue(epoch=4, classic_protocol="range")),
    (
        r.member_key(Kind.MEMBER, "g", "m"),
        MemberValue(
            instance_id="i",
            rack="r",
            client_id="c",
            client_host="h",
            topics=("a", "b"),
            pattern="x.*",
            assignor="uniform",
            session_timeout_ms=1,
            rebalance_timeout_ms=2,
            classic_protocols=(("range", b"meta"), ("sticky", b"")),
        ),
    ),
    (r.member_key(Kind.TARGET, "g", "m"), TargetValue(partitions=PARTS)),
    (
        r.member_key(Kind.CURRENT, "g", "m"),
        CurrentValue(epoch=3, previous_epoch=2, assigned=PARTS, revoking=frozenset(list(PARTS)[:1]), gained=PARTS),
    ),
    (
        r.member_key(Kind.CURRENT, "g", "c"),
        CurrentValue(epoch=4, previous_epoch=2, assigned=PARTS, is_joining=True, declared=frozenset(list(PARTS)[:2])),
    ),
    (r.offset_key("g", PartitionId(topic_id(1), 5)), OffsetValue(offset=9, leader_epoch=1, metadata="m", commit_ms=8)),
    (r.offset_key("g", PartitionId(topic_id(1), 6)), OffsetValue(offset=9, order=3)),
    (
        r.pending_key("g", 1 << 40, PartitionId(topic_id(1), 5)),
        PendingValue(offset=-1, epoch=3, number=12, leader_epoch=1, metadata="m", commit_ms=8, order=2),
    ),
    (r.fence_key(0), FenceValue(epoch=3, number=12, coordinator_epoch=1, updated_ms=8)),
    (
        r.classic_key("g"),
        ClassicValue(
            generation=2,
            protocol_type="consumer",
            protocol="range",
            leader="m",
            members=(ClassicMember("m", "i", "c", "h", 1, 2, b"meta", b"mine", 4),),
            topics=("a",),
        ),
    ),
]


@pytest.mark.parametrize(("key", "value"), ALL)
def test_records_survive_their_coding(key: Key, value: Value) -> None:
    assert r.decode_key(r.encode_key(key)) == key
    assert r.decode_value(r.encode_value(value)) == value
    made = r.decision([GroupRecord(key, value), GroupRecord(Key(Kind.GROUP, "other"), None)], 77)
    data = r.encode_batch([made])
    assert r.decode_batch(data) == made.records
    assert batch.decode(data, decompressed_bytes_max=1 << 20)[0].timestamp == 77


def test_a_generation_and_members_of_an_older_version_are_read() -> None:
    """Written before groups changed their protocol: without the fields that were added for it."""
    member = ["m", "i", "c", "h", 1, 2, b"meta", b"mine"]
    data = msgpack.packb([int(Kind.CLASSIC), 0, {0: 3, 1: "consumer", 4: [member]}])
    value = r.decode_value(data)
    assert isinstance(value, ClassicValue)
    assert value.members == (ClassicMember("m", "i", "c", "h", 1, 2, b"meta", b"mine", -1),)
    data = msgpack.packb([int(Kind.MEMBER), 0, {4: ["t"]}])
    old = r.decode_value(data)
    assert isinstance(old, MemberValue)
    assert not old.is_classic
    assert r.encode_value(old) == data, "what is not used is not written"


def test_a_newer_version_can_add_fields_and_kinds() -> None:
    raw = msgpack.packb([int(Kind.OFFSET), 3, {0: 5, 99: "new"}])
    value = r.decode_value(raw)
    assert value == OffsetValue(offset=5, extra=((99, "new"),))
    assert msgpack.unpackb(r.encode_value(value), strict_map_key=False)[2] == {0: 5, 99: "new"}
    unknown_key, unknown_value = msgpack.packb([77, "g"]), msgpack.packb([77, 0, {}])
    known = r.encode_key(r.group_key("g"))
    data = batch.encode(
        [
            Record(0, 1, unknown_key, unknown_value),
            Record(1, 1, known, msgpack.packb([99, 0, {}])),
            Record(2, 1, known, None),
        ]
    )
    assert r.decode_batch(data) == (GroupRecord(r.group_key("g"), None),)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        (None, b""),
        (b"\xc1", None),
        (msgpack.packb([]), None),
        (msgpack.packb([5, "g", b"short", 1]), None),
        (msgpack.packb([7, "g", b"x" * 16, 1]), None),
        (msgpack.packb([7, "g", b"x" * 16, 1, -1]), None),
        (msgpack.packb([8, "producer"]), None),
        (r.encode_key(r.fence_key(1)), msgpack.packb([7, 0, {0: 1, 1: 1, 2: 1}])),
        (r.encode_key(r.pending_key("g", 1, next(iter(PARTS)))), msgpack.packb([7, 0, {0: 1}])),
        (r.encode_key(r.group_key("g")), b"\xc1"),
        (r.encode_key(r.group_key("g")), msgpack.packb([1, 0, {}])),
        (r.encode_key(r.group_key("g")), msgpack.packb([1, 0, {0: "four"}])),
        (r.encode_key(r.group_key("g")), msgpack.packb([1, 0, {0: 1, 1: 2}])),
        (r.encode_key(r.group_key("g")), msgpack.packb([5, 0, {0: 1}])),
        (r.encode_key(r.group_key("g")), msgpack.packb("text")),
        (r.encode_key(r.member_key(Kind.TARGET, "g", "m")), msgpack.packb([3, 0, {0: [[b"x" * 16, ["a"]]]}])),
    ],
)
def test_values_that_are_no_group_records_are_rejected(key: bytes | None, value: bytes | None) -> None:
    data = batch.encode([Record(0, 1, key, value)])
    with pytest.raises(CorruptStateError):
        r.decode_batch(data)


def test_control_batches_and_the_abort_entry_change_nothing() -> None:
    machine = GroupMachine()
    assert machine.replay(EMPTY, machine.abort()) is EMPTY
    control = batch.encode([Record(0, 1, b"\0\0\0\0", b"\0\0\0\0\0\0")], is_control=True)
    assert machine.replay(EMPTY, control) is EMPTY


def test_a_decision_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    source = random.Random(1)
    texts = [source.randbytes(500).hex() for _ in range(400)]
    big = [
        GroupRecord(r.offset_key("g", PartitionId(topic_id(1), number)), OffsetValue(offset=1, metadata=text))
        for number, text in enumerate(texts)
    ]
    assert r.decision(big).records == tuple(big)
    monkeypatch.setattr(r, "DECISION_BYTES_MAX", 50_000)
    assert len(r.encode_batch([r.decision(big[:60])])) < 50_000, "what counts is the size on disk"
    with pytest.raises(PolicyViolationError, match="of one decision"):
        r.decision(big)
    monkeypatch.setattr(r, "RECORDS_BYTES_MAX", 60_000)
    with pytest.raises(PolicyViolationError, match="of one decision"):
        r.decision(big[:60])


def test_entries_are_cut_between_decisions() -> None:
    machine = GroupMachine()
    decisions: list[r.Decision] = []
    state = EMPTY
    for number in range(30):
        request = CommitOffsets(
            group=f"g{number}",
            member_id="",
            member_epoch=-1,
            offsets={PartitionId(topic_id(1), n): OffsetToCommit(n, metadata="x" * 1_000) for n in range(100)},
            now_ms=1,
        )
        made, _ = machine.decide(state, request, offset=Offset(0))
        decisions += made
        state = machine.apply(state, made)
    entries = machine.encode(decisions)
    assert 1 < len(entries) < 10
    counts = [len(r.decode_batch(entry)) for entry in entries]
    assert sum(counts) == 3_000
    assert all(count % 100 == 0 for count in counts)
    replayed = EMPTY
    for entry in entries:
        replayed = machine.replay(replayed, entry)
    assert replayed == state


@pytest.mark.case("C6")
def test_a_half_compacted_log_replays_to_the_same_state() -> None:
    groups = Groups(view=Topics.of(t=6))
    members = [Member(groups, "a", "t"), Member(groups, "b", "t", instance_id="one")]
    run_until_stable(members)
    groups.commit({next(iter(members[0].owned)): 3}, "a", members[0].epoch)
    groups.heartbeat("b", -2, instance_id="one")
    groups.join("b2", "t", instance_id="one")
    groups.heartbeat("a", -1)
    groups.heartbeat("b2", groups.group().currents["b2"].epoch)
    assert groups.replayed() == groups.state
    for below in range(len(groups.records) + 1):
        assert groups.compacted(below) == groups.state
        validate(groups.compacted(below))


def test_replay_takes_any_sequence_of_records() -> None:
    """Of a member without a group, of two owners, of tombstones of nothing: odd, but a state."""
    one, two = frozenset(list(PARTS)[:2]), frozenset(list(PARTS)[1:3])
    odd = [
        GroupRecord(r.member_key(Kind.CURRENT, "g", "m"), CurrentValue(epoch=1, assigned=one)),
        GroupRecord(r.member_key(Kind.CURRENT, "g", "n"), CurrentValue(epoch=1, assigned=two)),
        GroupRecord(r.member_key(Kind.CURRENT, "g", "m"), CurrentValue(epoch=1, assigned=one - two)),
        GroupRecord(r.member_key(Kind.MEMBER, "g", "x"), None),
        GroupRecord(r.group_key("h"), None),
        GroupRecord(Key(99, "h"), GroupValue(epoch=1)),
    ]
    state = apply(EMPTY, odd)
    group = state.group("g")
    assert group is not None
    assert {group.owners[part] for part in two} == {"n"}
    assert {group.owners[part] for part in one - two} == {"m"}
    assert state.group("h") is None
    gone = [GroupRecord(r.member_key(Kind.CURRENT, "g", name), None) for name in "mn"]
    assert apply(state, gone) == EMPTY
    assert apply(EMPTY, []) is EMPTY
