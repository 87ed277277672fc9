"""Encodes Raft messages as bytes. Pure.

A message is one msgpack array: its type, then its fields in the order of `messages.py`; entries and snapshot ids are
nested arrays.

    [5, epoch, sender, prev_offset, prev_epoch, [[epoch, kind, data], ...], commit, probe]      AppendRequest
    [8, epoch, sender, directory, [offset, epoch], wanted]                                      SnapshotAck

Type numbers are never reused. `decode` checks the type and bounds of every field, and what the core assumes (epochs
never fall along the entries, and none is newer than its sender; a membership entry is readable): bytes that are no
valid message raise `ProtocolError`, and nothing else.
"""

from collections.abc import Callable
from typing import Any

import msgpack

from tidelog.model.errors import CorruptStateError, ProtocolError
from tidelog.model.ids import Offset
from tidelog.raft.membership import DIRECTORY_ID_BYTES, Membership
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

MESSAGE_BYTES_MAX = 80 << 20
"""Above `RaftConfig.uncommitted_bytes_max`, which bounds the largest entry that a leader accepts."""
ENTRIES_MAX = 1 << 20
NUMBER_MAX = (1 << 63) - 1
EPOCH_MAX = (1 << 31) - 1
NODE_MAX = (1 << 31) - 1

_TYPES: tuple[type[Message], ...] = (
    PreVoteRequest,
    PreVoteResponse,
    VoteRequest,
    VoteResponse,
    AppendRequest,
    AppendResponse,
    SnapshotChunk,
    SnapshotAck,
    TimeoutNow,
)
_NUMBERS: dict[type[Message], int] = {kind: number for number, kind in enumerate(_TYPES, 1)}
_KINDS = tuple(EntryKind)

_pack = msgpack.Packer(autoreset=True).pack


def encode(message: Message) -> bytes:
    """Encodes a message; `decode` returns its equal."""
    return _pack((_NUMBERS[type(message)], *message))  # type: ignore[no-any-return]


def decode(raw: bytes | memoryview) -> Message:
    """Decodes a message; raises `ProtocolError`."""
    if len(raw) > MESSAGE_BYTES_MAX:
        raise ProtocolError(f"a Raft message of {len(raw)} bytes; at most {MESSAGE_BYTES_MAX} are allowed")
    try:
        # An array of n items takes at least n bytes: a short message cannot make msgpack allocate a large array.
        items_max = min(ENTRIES_MAX, len(raw))
        fields = msgpack.unpackb(
            raw, use_list=False, max_str_len=0, max_map_len=0, max_ext_len=0, max_array_len=items_max
        )
    except (ValueError, TypeError, OverflowError, msgpack.UnpackException) as error:
        raise ProtocolError(f"a Raft message that is not msgpack, or over a limit: {error}") from error
    if type(fields) is not tuple or not fields:
        raise ProtocolError("a Raft message is an array that begins with its type")
    number = fields[0]
    if type(number) is not int or not 1 <= number <= len(_TYPES):
        raise ProtocolError(f"there is no Raft message of type {number!r}")
    kind = _TYPES[number - 1]
    checks = _CHECKS[number - 1]
    if len(fields) != len(checks) + 1:
        raise ProtocolError(f"{kind.__name__} has {len(checks)} fields, not {len(fields) - 1}")
    for index, check in enumerate(checks, 1):
        if not check(fields[index]):
            raise ProtocolError(f"{kind.__name__}.{kind._fields[index - 1]} is not valid")
    return _BUILD[number - 1](fields)


# Fields. A bool is an int in Python, so types are compared, not tested with isinstance.


def _is_number(value: object) -> bool:
    return type(value) is int and 0 <= value <= NUMBER_MAX


def _is_epoch(value: object) -> bool:
    return type(value) is int and 0 <= value <= EPOCH_MAX


def _is_node(value: object) -> bool:
    return type(value) is int and 0 <= value <= NODE_MAX


def _is_wanted(value: object) -> bool:
    return type(value) is int and SNAPSHOT_HELD <= value <= NUMBER_MAX


def _is_flag(value: object) -> bool:
    return value is True or value is False


def _is_bytes(value: object) -> bool:
    return type(value) is bytes


def _is_directory(value: object) -> bool:
    return type(value) is bytes and len(value) == DIRECTORY_ID_BYTES


def _is_snapshot(value: object) -> bool:
    return type(value) is tuple and len(value) == 2 and _is_number(value[0]) and _is_epoch(value[1])


def _is_array(value: object) -> bool:
    return type(value) is tuple


_CHECKS: tuple[tuple[Callable[[object], bool], ...], ...] = (
    (_is_epoch, _is_node, _is_directory, _is_directory, _is_number, _is_epoch),
    (_is_epoch, _is_node, _is_directory, _is_flag),
    (_is_epoch, _is_node, _is_directory, _is_directory, _is_number, _is_epoch),
    (_is_epoch, _is_node, _is_directory, _is_flag),
    (_is_epoch, _is_node, _is_number, _is_epoch, _is_array, _is_number, _is_number),
    (_is_epoch, _is_node, _is_directory, _is_number, _is_flag, _is_epoch, _is_number, _is_number, _is_flag),
    (_is_epoch, _is_node, _is_snapshot, _is_number, _is_bytes, _is_number),
    (_is_epoch, _is_node, _is_directory, _is_snapshot, _is_wanted),
    (_is_epoch, _is_node),
)
"""One check for each field of each type."""


# Whole messages.


def _vote_request(fields: tuple[Any, ...]) -> PreVoteRequest | VoteRequest:
    number, epoch, *_, last_epoch = fields
    if last_epoch > epoch:
        raise ProtocolError("a vote is asked for by a node whose log is newer than itself")
    return PreVoteRequest(*fields[1:]) if number == _NUMBERS[PreVoteRequest] else VoteRequest(*fields[1:])


def _append_request(fields: tuple[Any, ...]) -> AppendRequest:
    _, epoch, sender, prev_offset, prev_epoch, raw_entries, commit, probe = fields
    if prev_epoch > epoch:
        raise ProtocolError("the entry before an append is newer than its sender")
    entries = _entries(raw_entries, prev_epoch, epoch) if raw_entries else ()
    if prev_offset + len(entries) > NUMBER_MAX:
        raise ProtocolError("an append runs past the last offset there is")
    return AppendRequest(epoch, sender, prev_offset, prev_epoch, entries, commit, probe)


def _entries(raw: tuple[Any, ...], oldest: int, newest: int) -> tuple[Entry, ...]:
    entries: list[Entry] = []
    for item in raw:
        if type(item) is not tuple or len(item) != 3:
            raise ProtocolError("an entry is an epoch, a kind and data")
        epoch, kind, data = item
        if type(epoch) is not int or not oldest <= epoch <= newest:
            raise ProtocolError("the epochs of entries never fall, and are not newer than their sender")
        if type(kind) is not int or not 0 <= kind < len(_KINDS) or type(data) is not bytes:
            raise ProtocolError("an entry is of no known kind, or its data are no bytes")
        if kind == EntryKind.MEMBERSHIP:
            try:
                Membership.decode(data)
            except CorruptStateError as error:
                raise ProtocolError(f"a membership entry cannot be read: {error}") from error
        oldest = epoch
        entries.append(Entry(epoch, _KINDS[kind], data))  # type: ignore[arg-type]
    return tuple(entries)


def _snapshot_chunk(fields: tuple[Any, ...]) -> SnapshotChunk:
    _, epoch, sender, snapshot, position, data, total_bytes = fields
    if position + len(data) > max(total_bytes, position):
        raise ProtocolError("a piece of a snapshot lies outside of it")
    return SnapshotChunk(epoch, sender, _snapshot(snapshot, epoch), position, data, total_bytes)


def _snapshot_ack(fields: tuple[Any, ...]) -> SnapshotAck:
    _, epoch, sender, directory, snapshot, wanted = fields
    return SnapshotAck(epoch, sender, directory, _snapshot(snapshot, epoch), wanted)


def _snapshot(raw: tuple[int, int], epoch: int) -> SnapshotId:
    if raw[1] > epoch:
        raise ProtocolError("a snapshot is newer than its sender")
    return SnapshotId(Offset(raw[0]), raw[1])  # type: ignore[arg-type]


_BUILD: tuple[Callable[[tuple[Any, ...]], Message], ...] = (
    _vote_request,
    lambda fields: PreVoteResponse(*fields[1:]),
    _vote_request,
    lambda fields: VoteResponse(*fields[1:]),
    _append_request,
    lambda fields: AppendResponse(*fields[1:]),
    _snapshot_chunk,
    _snapshot_ack,
    lambda fields: TimeoutNow(*fields[1:]),
)
