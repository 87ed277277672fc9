"""The wire format of `replication.messages`. Pure; integers are big endian, batches follow the table unchanged.

    frame        version (1)  kind (1)  rest
    Pushed       kind 1       count (4)  count x [number (8)  high watermark (8)  bytes (4)]  the batches
    Ended        kind 2       number (8)  reason (1)  epoch (4)  offset (8)
    Subscribe    kind 3       topic id (16)  partition (4)  number (8)  leader epoch (4)  broker epoch (8)
                              next offset (8)  last epoch (4)  durable end (8)  flags (1)
    Unsubscribe  kind 4       number (8)
    Acks         kind 5       received bytes (8)  count (4)  count x [number (8)  leader epoch (4)  durable end (8)]
    Subscribes   kind 6       count (4)  count x [as Subscribe]
    Histories    kind 7       count (4)  count x [number (8)  deletes end (8)  entries (4)
                              entries x [epoch (4)  start (8)]]
    Pushed       kind 8       count (4)  count x [number (8)  high watermark (8)  offset (8)  bytes (4)]  the batches

Kinds 7 and 8 go only to a follower that sent `takes_history` (a flag that older leaders ignore); an older follower gets
pushes of kind 1.

An unknown version is rejected: the nodes of a cluster agree on one before (`metadata.version`). Invalid frames raise
`InvalidRequestError`; the log that appends the batches checks them.
"""

import struct
from collections.abc import Sequence
from struct import Struct
from typing import Any
from uuid import UUID

from tidelog.log.epochs import sound_entries
from tidelog.model.errors import InvalidRequestError, UnsupportedVersionError
from tidelog.model.ids import PartitionId, TopicId
from tidelog.replication.messages import (
    NO_PUSH_OFFSET,
    Ack,
    Acks,
    Ended,
    FromFollower,
    FromLeader,
    Histories,
    History,
    Push,
    Pushed,
    Reason,
    Subscribe,
    Subscribes,
    Unsubscribe,
)
from tidelog.world.disk import Buffer

VERSION = 1
_PUSHED, _ENDED, _SUBSCRIBE, _UNSUBSCRIBE, _ACKS, _SUBSCRIBES, _HISTORIES, _PUSHED_AT = 1, 2, 3, 4, 5, 6, 7, 8

_HEAD = Struct(">BB")
_COUNT = Struct(">I")
_PUSH = Struct(">QqI")
_PUSH_AT = Struct(">QqqI")
_HISTORY = Struct(">QqI")
_ENTRY = Struct(">iq")
_ENDED_BODY = Struct(">QBiq")
_SUBSCRIBE_BODY = Struct(">16siQiqqiqB")
_NUMBER = Struct(">Q")
_ACKS_HEAD = Struct(">QI")
_ACK = Struct(">Qiq")
_TAKES_GAPS = 0x01
_TAKES_HISTORY = 0x02

MESSAGE_OVERHEAD_BYTES = _HEAD.size + _COUNT.size
PUSH_OVERHEAD_BYTES = _PUSH_AT.size
"""Bytes of each partition in a `Pushed`, besides its batches."""


def encode(message: FromFollower | FromLeader) -> bytes:
    match message:
        case Pushed(pushes):
            return _encode_pushed(pushes)
        case Histories(histories):
            head = _HEAD.pack(VERSION, _HISTORIES) + _COUNT.pack(len(histories))
            return head + b"".join([_history_body(history) for history in histories])
        case Ended():
            body = _ENDED_BODY.pack(message.number, message.reason, message.epoch, message.offset)
            return _HEAD.pack(VERSION, _ENDED) + body
        case Subscribe():
            return _HEAD.pack(VERSION, _SUBSCRIBE) + _subscribe_body(message)
        case Subscribes(requests):
            head = _HEAD.pack(VERSION, _SUBSCRIBES) + _COUNT.pack(len(requests))
            return head + b"".join([_subscribe_body(request) for request in requests])
        case Unsubscribe():
            return _HEAD.pack(VERSION, _UNSUBSCRIBE) + _NUMBER.pack(message.number)
        case Acks(received_bytes, acks):
            head = _HEAD.pack(VERSION, _ACKS) + _ACKS_HEAD.pack(received_bytes, len(acks))
            return head + b"".join([_ACK.pack(ack.number, ack.leader_epoch, ack.durable_end) for ack in acks])


def _encode_pushed(pushes: Sequence[Push]) -> bytes:
    """Use the older form if no push has an offset: all pushes of a frame go to one follower, of one version."""
    if any(push.offset != NO_PUSH_OFFSET for push in pushes):
        parts: list[Buffer] = [_HEAD.pack(VERSION, _PUSHED_AT), _COUNT.pack(len(pushes))]
        parts += [_PUSH_AT.pack(push.number, push.high_watermark, push.offset, len(push.batches)) for push in pushes]
    else:
        parts = [_HEAD.pack(VERSION, _PUSHED), _COUNT.pack(len(pushes))]
        parts += [_PUSH.pack(push.number, push.high_watermark, len(push.batches)) for push in pushes]
    parts += [push.batches for push in pushes]
    return b"".join(parts)


def _history_body(history: History) -> bytes:
    head = _HISTORY.pack(history.number, history.deletes_end, len(history.entries))
    return head + b"".join([_ENTRY.pack(epoch, start) for epoch, start in history.entries])


def _subscribe_body(message: Subscribe) -> bytes:
    return _SUBSCRIBE_BODY.pack(
        message.partition.topic_id.bytes,
        message.partition.partition,
        message.number,
        message.leader_epoch,
        message.broker_epoch,
        message.next_offset,
        message.last_epoch,
        message.durable_end,
        (_TAKES_GAPS if message.takes_gaps else 0) | (_TAKES_HISTORY if message.takes_history else 0),
    )


def decode_from_follower(frame: bytes) -> FromFollower:
    kind = _kind(frame)
    try:
        if kind == _SUBSCRIBE:
            _check_length(frame, _HEAD.size + _SUBSCRIBE_BODY.size)
            return _subscribe(_SUBSCRIBE_BODY.unpack_from(frame, _HEAD.size))
        if kind == _SUBSCRIBES:
            (count,) = _COUNT.unpack_from(frame, _HEAD.size)
            start = _HEAD.size + _COUNT.size
            _check_length(frame, start + count * _SUBSCRIBE_BODY.size)
            rows = _SUBSCRIBE_BODY.iter_unpack(memoryview(frame)[start:])
            return Subscribes(tuple(_subscribe(row) for row in rows))
        if kind == _UNSUBSCRIBE:
            _check_length(frame, _HEAD.size + _NUMBER.size)
            return Unsubscribe(number=_NUMBER.unpack_from(frame, _HEAD.size)[0])
        if kind == _ACKS:
            received, count = _ACKS_HEAD.unpack_from(frame, _HEAD.size)
            start = _HEAD.size + _ACKS_HEAD.size
            _check_length(frame, start + count * _ACK.size)
            return Acks(received, tuple(Ack(*row) for row in _ACK.iter_unpack(memoryview(frame)[start:])))
    except struct.error as error:
        raise InvalidRequestError(f"a replication frame of kind {kind} is cut short: {error}") from error
    raise InvalidRequestError(f"a follower does not send replication frames of kind {kind}")


def _subscribe(row: tuple[Any, ...]) -> Subscribe:
    topic, partition, number, epoch, broker_epoch, offset, last_epoch, durable, flags = row
    if partition < 0 or epoch < 0 or last_epoch < -1 or offset < 0 or not 0 <= durable <= offset:
        raise InvalidRequestError(
            f"a subscription to partition {partition}, epoch {epoch}, offset {offset}, durable {durable}"
        )
    return Subscribe(
        partition=PartitionId(TopicId(UUID(bytes=topic)), partition),
        number=number,
        leader_epoch=epoch,
        broker_epoch=broker_epoch,
        next_offset=offset,
        last_epoch=last_epoch,
        durable_end=durable,
        takes_gaps=bool(flags & _TAKES_GAPS),
        takes_history=bool(flags & _TAKES_HISTORY),
    )


def decode_from_leader(frame: bytes) -> FromLeader:
    """The batches of a push are views of the frame."""
    kind = _kind(frame)
    try:
        if kind == _PUSHED:
            return _pushed(frame, _PUSH)
        if kind == _PUSHED_AT:
            return _pushed(frame, _PUSH_AT)
        if kind == _HISTORIES:
            return _histories(frame)
        if kind == _ENDED:
            _check_length(frame, _HEAD.size + _ENDED_BODY.size)
            number, reason, epoch, offset = _ENDED_BODY.unpack_from(frame, _HEAD.size)
            return Ended(number=number, reason=Reason(reason), epoch=epoch, offset=offset)
    except (struct.error, ValueError) as error:
        raise InvalidRequestError(f"a replication frame of kind {kind} cannot be read: {error}") from error
    raise InvalidRequestError(f"a leader does not send replication frames of kind {kind}")


def _pushed(frame: bytes, row: Struct) -> Pushed:
    (count,) = _COUNT.unpack_from(frame, _HEAD.size)
    table = _HEAD.size + _COUNT.size
    position = table + count * row.size
    if position > len(frame):
        raise InvalidRequestError(f"a replication frame of {len(frame)} bytes is too short for {count} partitions")
    view = memoryview(frame)
    pushes: list[Push] = []
    for number, high_watermark, *offset, size in row.iter_unpack(view[table:position]):
        pushes.append(Push(number, high_watermark, view[position : position + size], *offset))
        position += size
    _check_length(frame, position)
    return Pushed(pushes)


def _histories(frame: bytes) -> Histories:
    (count,) = _COUNT.unpack_from(frame, _HEAD.size)
    position = _HEAD.size + _COUNT.size
    histories: list[History] = []
    for _ in range(count):
        number, deletes_end, length = _HISTORY.unpack_from(frame, position)
        position += _HISTORY.size
        end = position + length * _ENTRY.size
        if end > len(frame):
            raise InvalidRequestError(f"a replication frame of {len(frame)} bytes has a history of {length} epochs")
        entries = tuple(_ENTRY.iter_unpack(memoryview(frame)[position:end]))
        if deletes_end < 0 or not sound_entries(entries):
            raise InvalidRequestError(f"a leader's history has deletes to {deletes_end} and epochs {entries[:10]}")
        histories.append(History(number, deletes_end, entries))
        position = end
    _check_length(frame, position)
    return Histories(tuple(histories))


def _kind(frame: bytes) -> int:
    if len(frame) < _HEAD.size:
        raise InvalidRequestError(f"a replication frame of {len(frame)} bytes")
    version, kind = _HEAD.unpack_from(frame)
    if version != VERSION:
        raise UnsupportedVersionError(f"a replication frame has version {version}; version {VERSION} is supported")
    return int(kind)


def _check_length(frame: bytes, expected: int) -> None:
    if len(frame) != expected:
        raise InvalidRequestError(f"a replication frame of {len(frame)} bytes where {expected} are expected")
