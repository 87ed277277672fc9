"""Raft messages survive the wire, and nothing that is not one does."""

import os
import random
from typing import Any

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.raft.core_cluster import membership_of

from tidelog.model.errors import ErrorCode, ProtocolError
from tidelog.raft import wire
from tidelog.raft.messages import (
    SNAPSHOT_HELD,
    AppendRequest,
    AppendResponse,
    Entry,
    EntryKind,
    Message,
    PreVoteRequest,
    PreVoteResponse,
    SnapshotAck,
    SnapshotChunk,
    SnapshotId,
    TimeoutNow,
    VoteRequest,
    VoteResponse,
)

Draw = st.DrawFn
directories = st.binary(min_size=16, max_size=16)
nodes = st.integers(0, wire.NODE_MAX)
numbers = st.integers(0, 1 << 62)
epochs = st.integers(0, wire.EPOCH_MAX)
memberships = st.sets(st.integers(1, 12), min_size=1, max_size=5).map(lambda ids: membership_of(*sorted(ids)).encode())


@st.composite
def votes(draw: Draw) -> Message:
    epoch = draw(epochs)
    kind = draw(st.sampled_from([PreVoteRequest, VoteRequest]))
    last_epoch = draw(st.integers(0, epoch))
    return kind(epoch, draw(nodes), draw(directories), draw(directories), draw(numbers), last_epoch)  # type: ignore


@st.composite
def appends(draw: Draw) -> Message:
    order = sorted(draw(st.lists(epochs, min_size=2, max_size=8)))
    entries = []
    for epoch in order[1:-1]:
        kind = draw(st.sampled_from(EntryKind))
        data = draw(memberships if kind is EntryKind.MEMBERSHIP else st.binary(max_size=40))
        entries.append(Entry(epoch, kind, data))  # type: ignore[arg-type]
    offset, commit, probe = draw(numbers), draw(numbers), draw(numbers)
    return AppendRequest(order[-1], draw(nodes), offset, order[0], tuple(entries), commit, probe)  # type: ignore


@st.composite
def pieces(draw: Draw) -> Message:
    epoch = draw(epochs)
    snapshot = SnapshotId(draw(numbers), draw(st.integers(0, epoch)))  # type: ignore[arg-type]
    if draw(st.booleans()):
        wanted = draw(st.integers(SNAPSHOT_HELD, 1 << 60))
        return SnapshotAck(epoch, draw(nodes), draw(directories), snapshot, wanted)  # type: ignore[arg-type]
    data, position = draw(st.binary(max_size=64)), draw(st.integers(0, 1 << 40))
    total = position + len(data) + draw(st.integers(0, 100))
    return SnapshotChunk(epoch, draw(nodes), snapshot, position, data, total)  # type: ignore[arg-type]


answers: st.SearchStrategy[Message] = st.one_of(
    st.builds(PreVoteResponse, epochs, nodes, directories, st.booleans()),
    st.builds(VoteResponse, epochs, nodes, directories, st.booleans()),
    st.builds(
        AppendResponse,
        epochs,
        nodes,
        directories,
        numbers,
        st.booleans(),
        epochs,
        numbers,
        numbers,
        st.booleans(),
    ),
    st.builds(TimeoutNow, epochs, nodes),
)
messages: st.SearchStrategy[Message] = st.one_of(votes(), appends(), pieces(), answers)


@given(messages)
def test_every_message_is_equal_after_a_round_trip(message: Message) -> None:
    decoded = wire.decode(wire.encode(message))
    assert decoded == message
    assert type(decoded) is type(message)


@given(messages)
def test_a_message_is_read_from_a_memoryview_too(message: Message) -> None:
    assert wire.decode(memoryview(wire.encode(message))) == message


def test_entries_and_snapshot_ids_come_back_with_their_own_types() -> None:
    append = wire.decode(wire.encode(EXAMPLES[4]))
    assert isinstance(append, AppendRequest)
    assert all(type(entry) is Entry and type(entry.kind) is EntryKind for entry in append.entries)
    chunk = wire.decode(wire.encode(EXAMPLES[6]))
    assert isinstance(chunk, SnapshotChunk)
    assert type(chunk.snapshot) is SnapshotId


def example(kind: Any, *fields: Any) -> Message:
    made: Message = kind(*fields)
    return made


DIRECTORY = b"d" * 16
EXAMPLES = [
    example(PreVoteRequest, 4, 1, DIRECTORY, DIRECTORY, 17, 3),
    example(PreVoteResponse, 4, 2, DIRECTORY, True),
    example(VoteRequest, 5, 1, DIRECTORY, DIRECTORY, 17, 3),
    example(VoteResponse, 5, 2, DIRECTORY, False),
    example(
        AppendRequest,
        5,
        1,
        17,
        3,
        (
            Entry(5, EntryKind.NO_OP, b""),  # type: ignore[arg-type]
            Entry(5, EntryKind.DATA, b"payload"),  # type: ignore[arg-type]
            Entry(5, EntryKind.MEMBERSHIP, membership_of(1, 2, 3, learners=[4]).encode()),  # type: ignore[arg-type]
        ),
        16,
        9,
    ),
    example(AppendResponse, 5, 2, DIRECTORY, 20, False, 0, 0, 9, True),
    example(SnapshotChunk, 5, 1, SnapshotId(10, 2), 64, b"piece", 200),  # type: ignore[arg-type]
    example(SnapshotAck, 5, 2, DIRECTORY, SnapshotId(10, 2), SNAPSHOT_HELD),  # type: ignore[arg-type]
    example(TimeoutNow, 5, 1),
]


def test_the_bytes_of_each_type_are_fixed() -> None:
    """Nodes of two versions talk to each other: a type keeps its number and the order of its fields."""
    assert [msgpack.unpackb(wire.encode(message))[0] for message in EXAMPLES] == [1, 2, 3, 4, 5, 6, 7, 8, 9]
    assert wire.encode(EXAMPLES[8]).hex() == "930905" + "01"
    assert wire.encode(EXAMPLES[3]).hex() == "95040502c410" + DIRECTORY.hex() + "c2"


def mutated(draw: random.Random, raw: bytes) -> bytes:
    """The bytes of a message with something wrong about them; now and then it is still a message."""
    broken = bytearray(raw)
    kind = draw.randrange(6)
    at = draw.randrange(len(broken))
    if kind == 0:
        broken[at] ^= 1 << draw.randrange(8)
    elif kind == 1:
        broken[at] = draw.choice([0x00, 0x7F, 0x80, 0x90, 0xC0, 0xC2, 0xC4, 0xC6, 0xCF, 0xD3, 0xDD, 0xDF, 0xFF])
    elif kind == 2:
        del broken[at:]
    elif kind == 3:
        broken[at:at] = draw.randbytes(draw.randint(1, 9))
    elif kind == 4:
        del broken[at : at + draw.randint(1, 9)]
    else:
        other = wire.encode(draw.choice(EXAMPLES))
        broken[at:] = other[draw.randrange(len(other)) :]
    return bytes(broken)


def test_mutated_bytes_raise_the_protocol_error_and_nothing_else() -> None:
    draw = random.Random(20_11)
    rejected = 0
    count = int(os.environ.get("FUZZ_MUTATIONS", "8000"))
    for _ in range(count):
        raw = mutated(draw, wire.encode(draw.choice(EXAMPLES)))
        try:
            message = wire.decode(raw)
        except ProtocolError:
            rejected += 1
        else:
            assert wire.decode(wire.encode(message)) == message, "what is taken is a whole message"
    assert rejected > count // 2, "most mutations break a message"


@given(st.binary(max_size=200))
def test_arbitrary_bytes_raise_the_protocol_error_or_are_a_message(raw: bytes) -> None:
    try:
        message = wire.decode(raw)
    except ProtocolError:
        return
    assert wire.decode(wire.encode(message)) == message


WRONG: list[tuple[str, Any]] = [
    ("nothing", ()),
    ("no array", 5),
    ("no known type", (0, 1, 2)),
    ("a type past the last", (10, 1, 2)),
    ("a type that is a bool", (True, 1, 2)),
    ("a field too few", (9, 5)),
    ("a field too many", (9, 5, 1, 1)),
    ("a negative epoch", (9, -1, 1)),
    ("an epoch past 31 bits", (9, 1 << 31, 1)),
    ("an epoch that is a bool", (9, True, 1)),
    ("an epoch that is a float", (9, 1.0, 1)),
    ("a node that is nil", (9, 5, None)),
    ("a directory of 15 bytes", (4, 5, 2, b"d" * 15, True)),
    ("a flag that is a number", (4, 5, 2, DIRECTORY, 1)),
    ("a candidate whose log is newer than itself", (3, 5, 1, DIRECTORY, DIRECTORY, 17, 6)),
    ("an offset past 63 bits", (3, 5, 1, DIRECTORY, DIRECTORY, 1 << 63, 5)),
    ("entries that are no array", (5, 5, 1, 17, 3, b"", 16, 0)),
    ("an entry of two fields", (5, 5, 1, 17, 3, [[5, 0]], 16, 0)),
    ("an entry of no known kind", (5, 5, 1, 17, 3, [[5, 3, b""]], 16, 0)),
    ("an entry whose data are nil", (5, 5, 1, 17, 3, [[5, 0, None]], 16, 0)),
    ("an entry newer than its sender", (5, 5, 1, 17, 3, [[6, 0, b""]], 16, 0)),
    ("an entry older than the one before", (5, 5, 1, 17, 3, [[5, 0, b""], [4, 0, b""]], 16, 0)),
    ("an entry older than the previous one", (5, 5, 1, 17, 3, [[2, 0, b""]], 16, 0)),
    ("a previous entry newer than its sender", (5, 5, 1, 17, 6, [], 16, 0)),
    ("a membership that cannot be read", (5, 5, 1, 17, 3, [[5, 2, b"?"]], 16, 0)),
    ("an append past the last offset", (5, 5, 1, (1 << 63) - 1, 3, [[5, 0, b""]], 16, 0)),
    ("a snapshot id of three fields", (8, 5, 2, DIRECTORY, [10, 2, 0], 0)),
    ("a snapshot newer than its sender", (8, 5, 2, DIRECTORY, [10, 6], 0)),
    ("a position below -1", (8, 5, 2, DIRECTORY, [10, 2], -2)),
    ("a piece outside of its snapshot", (7, 5, 1, [10, 2], 190, b"piece-piece", 200)),
    ("a string", (9, "5", 1)),
    ("a map", {9: 5}),
]


@pytest.mark.parametrize("fields", [fields for _, fields in WRONG], ids=[name for name, _ in WRONG])
def test_a_wrong_field_is_refused(fields: Any) -> None:
    with pytest.raises(ProtocolError):
        wire.decode(msgpack.packb(fields))


def test_bytes_behind_a_message_are_refused() -> None:
    with pytest.raises(ProtocolError):
        wire.decode(wire.encode(EXAMPLES[0]) + b"\0")


def test_deeply_nested_arrays_are_refused() -> None:
    with pytest.raises(ProtocolError):
        wire.decode(b"\x91" * 100_000 + b"\0")


def test_a_message_over_the_limit_is_refused_before_it_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wire, "MESSAGE_BYTES_MAX", 10)
    with pytest.raises(ProtocolError, match="at most 10") as caught:
        wire.decode(b"\0" * 11)
    assert caught.value.code is ErrorCode.INVALID_REQUEST
