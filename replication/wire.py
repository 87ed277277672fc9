"""The bytes of `replication.messages`. Pure; integers are big endian, batches stand behind the table as they are.

    frame        version (1)  kind (1)  rest
    Pushed       kind 1       count (4)  count x [number (8)  high watermark (8)  bytes (4)]  the batches
    Ended        kind 2       number (8)  reason (1)  epoch (4)  offset (8)
    Subscribe    kind 3       topic id (16)  partition (4)  number (8)  leader epoch (4)  broker epoch (8)
                              next offset (8)  last epoch (4)  durable end (8)  flags (1)
    Unsubscribe  kind 4       number (8)
    Acks         kind 5       received bytes (8)  count (4)  count x [number (8)  leader epoch (4)  durable end (8)]
    Subscribes   kind 6       count (4)  count x [as Subscribe]

A version that is not known is refused: the nodes of a cluster agree on one before (`metadata.version`). Bytes that are
no frame raise `InvalidRequestError`; the batches are checked by the log that takes them.
"""

import struct
from struct import Struct
from typing import Any
from uuid import UUID

from tidelog.model.errors import InvalidRequestError, UnsupportedVersionError
from tidelog.model.ids import PartitionId, TopicId
from tidelog.replication.messages import (
    Ack,
    Acks,
    Ended,
    FromFollower,
    FromLeader,
    Push,
    Pushed,
    Reason,
    Subscribe,
    Subscribes,
    Unsubscribe,
)
from tidelog.world.disk import Buffer

VERSION = 1
_PUSHED, _ENDED, _SUBSCRIBE, _UNSUBSCRIBE, _ACKS, _SUBSCRIBES = 1, 2, 3, 4, 5, 6

_HEAD = Struct(">BB")
_COUNT = Struct(">I")
_PUSH = Struct(">QqI")
_ENDED_BODY = Struct(">QBiq")
_SUBSCRIBE_BODY = Struct(">16siQiqqiqB")
_NUMBER = Struct(">Q")
_ACKS_HEAD = Struct(">QI")
_ACK = Struct(">Qiq")
_TAKES_GAPS = 0x01

MESSAGE_OVERHEAD_BYTES = _HEAD.size + _COUNT.size
PUSH_OVERHEAD_BYTES = _PUSH.size
"""Of each partition in a `Pushed`, beside its batches."""


def encode(message: FromFollower | FromLeader) -> bytes:
    match message:
        case Pushed(pushes):
            parts: list[Buffer] = [_HEAD.pack(VERSION, _PUSHED), _COUNT.pack(len(pushes))]
            parts += [_PUSH.pack(push.number, push.high_watermark, len(push.batches)) for push in pushes]
            parts += [push.batches for push in pushes]
            return b"".join(parts)
        case Ended():
            body = _ENDED_BODY.pack(message.number, message.reason, message.epoch, message.offset)
            return _HEAD.pack(VERSION, _ENDED) + body
        case Subscribe():
            return _HEAD.pack(VERSION, _SUBSCRIBE) + _subscribe_body(message)
        case Subscribes(asked):
            head = _HEAD.pack(VERSION, _SUBSCRIBES) + _COUNT.pack(len(asked))
            return head + b"".join([_subscribe_body(one) for one in asked])
        case Unsubscribe():
            return _HEAD.pack(VERSION, _UNSUBSCRIBE) + _NUMBER.pack(message.number)
        case Acks(received_bytes, acks):
            head = _HEAD.pack(VERSION, _ACKS) + _ACKS_HEAD.pack(received_bytes, len(acks))
            return head + b"".join([_ACK.pack(ack.number, ack.leader_epoch, ack.durable_end) for ack in acks])


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
        _TAKES_GAPS if message.takes_gaps else 0,
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
    )


def decode_from_leader(frame: bytes) -> FromLeader:
    """The batches of a push are views of the frame."""
    kind = _kind(frame)
    try:
        if kind == _PUSHED:
            return _pushed(frame)
        if kind == _ENDED:
            _check_length(frame, _HEAD.size + _ENDED_BODY.size)
            number, reason, epoch, offset = _ENDED_BODY.unpack_from(frame, _HEAD.size)
            return Ended(number=number, reason=Reason(reason), epoch=epoch, offset=offset)
    except (struct.error, ValueError) as error:
        raise InvalidRequestError(f"a replication frame of kind {kind} cannot be read: {error}") from error
    raise InvalidRequestError(f"a leader does not send replication frames of kind {kind}")


def _pushed(frame: bytes) -> Pushed:
    (count,) = _COUNT.unpack_from(frame, _HEAD.size)
    table = _HEAD.size + _COUNT.size
    position = table + count * _PUSH.size
    if position > len(frame):
        raise InvalidRequestError(f"a replication frame of {len(frame)} bytes speaks of {count} partitions")
    view = memoryview(frame)
    pushes: list[Push] = []
    for number, high_watermark, size in _PUSH.iter_unpack(view[table:position]):
        pushes.append(Push(number, high_watermark, view[position : position + size]))
        position += size
    _check_length(frame, position)
    return Pushed(pushes)


def _kind(frame: bytes) -> int:
    if len(frame) < _HEAD.size:
        raise InvalidRequestError(f"a replication frame of {len(frame)} bytes")
    version, kind = _HEAD.unpack_from(frame)
    if version != VERSION:
        raise UnsupportedVersionError(f"a replication frame of version {version}, known is {VERSION}")
    return int(kind)


def _check_length(frame: bytes, expected: int) -> None:
    if len(frame) != expected:
        raise InvalidRequestError(f"a replication frame of {len(frame)} bytes where {expected} are expected")
