"""Encodes an image as bytes: its records, in small chunks with chained CRCs. Pure.

    +----------------+--------+------+---------------------------------+
    | payload length | CRC    | kind | payload                         |   one chunk
    | u32, big endian| u32    | u8   | kind 0: magic and version       |
    +----------------+--------+------+ kind 1: records (`records`)     |
                                     | kind 2: [chunks, records]       |   the last one
                                     +---------------------------------+

The CRC-32C covers kind and payload, and continues from the CRC of the chunk before: a chunk that is damaged, missing,
duplicated or out of order is detected, and so is a missing end. An unreadable snapshot is an error of the
reader's copy; it never produces an image, and nothing is deleted for it.

The records are those of the log, so older and newer versions read each other's snapshots: unknown records and fields
are in the image (`unknown`, `unknown_fields`) and are written back unchanged.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from uuid import UUID

import msgpack
from crc32c import crc32c

from tidelog.metadata import records as r
from tidelog.metadata.image import ClusterImage, Partition
from tidelog.metadata.records import BeginDecision, Record, UnknownFields, decode_records, encode_records
from tidelog.model.errors import CorruptStateError
from tidelog.model.maps import sorted_items

MAGIC = b"tidelog image"
VERSION = 1
RECORDS_PER_CHUNK = 1024
"""Also the slice size for reading a snapshot on the event loop: some 15 ms."""
CHUNK_BYTES_MAX = 64 << 20
_FRAME = struct.Struct(">II")
_HEADER, RECORDS, _END = b"\0", b"\1", b"\2"


@dataclass(frozen=True, slots=True)
class Snapshot:
    image: ClusterImage
    pending: tuple[Record, ...] | None = None
    """The records of an open decision."""


# Image to records.


def image_records(image: ClusterImage) -> Iterator[Record]:
    """Yields the records that produce this image from an empty one, in an order that does not depend on hashes."""
    unknown_fields = image.unknown_fields

    def extra(*key: object) -> UnknownFields:
        return unknown_fields.get(key, ()) if unknown_fields else ()

    for name, level in sorted_items(image.features):
        yield r.FeatureLevel(name=name, level=level, extra=extra(r.FeatureLevel.TYPE, name))
    yield from _broker_records(image)
    for topic_id, topic in sorted_items(image.topics):
        yield r.CreateTopic(topic_id=topic_id, name=topic.name, extra=extra(r.CreateTopic.TYPE, topic_id))
        for number, partition in sorted_items(topic.partitions):
            yield from _partition_records(image, topic_id, number, partition)
    for (kind, resource), values in sorted_items(image.configs):
        for key, value in sorted_items(values):
            yield r.SetConfig(
                resource_type=kind,
                resource=resource,
                key=key,
                value=value,
                extra=extra(r.SetConfig.TYPE, kind, resource, key),
            )
    for entity, quotas in sorted(image.quotas.items(), key=lambda item: str(item[0])):
        for key, quota in sorted_items(quotas):
            yield r.SetQuota(entity=entity, key=key, value=quota, extra=extra(r.SetQuota.TYPE, entity, key))
    for (user, mechanism), credential in sorted_items(image.users):
        yield r.SetUser(
            user=user,
            mechanism=mechanism,
            salt=credential.salt,
            stored_key=credential.stored_key,
            server_key=credential.server_key,
            iterations=credential.iterations,
            extra=extra(r.SetUser.TYPE, user, mechanism),
        )
    for _, acl in sorted_items(image.acls):
        yield acl
    kept = extra(r.AllocateProducerIds.TYPE)
    if image.next_producer_id or kept:
        yield r.AllocateProducerIds(broker=-1, broker_epoch=-1, next_producer_id=image.next_producer_id, extra=kept)
    yield from image.unknown


def _broker_records(image: ClusterImage) -> Iterator[Record]:
    for number, broker in sorted_items(image.brokers):
        yield r.RegisterBroker(
            broker=number,
            broker_epoch=broker.broker_epoch,
            incarnation=broker.incarnation,
            endpoints=broker.endpoints,
            rack=broker.rack,
            directories=broker.directories,
            features=broker.features,
            extra=image.unknown_fields.get((r.RegisterBroker.TYPE, number), ()),
        )
        kept = image.unknown_fields.get((r.ChangeBroker.TYPE, number), ())
        state = (broker.fenced, broker.in_controlled_shutdown, broker.draining, broker.offline, broker.full)
        if state != (True, False, False, (), ()) or kept:
            yield r.ChangeBroker(
                broker=number,
                broker_epoch=broker.broker_epoch,
                fenced=broker.fenced,
                in_controlled_shutdown=broker.in_controlled_shutdown,
                draining=broker.draining,
                offline=broker.offline,
                full=broker.full,
                extra=kept,
            )


def _partition_records(image: ClusterImage, topic_id: UUID, number: int, partition: Partition) -> Iterator[Record]:
    made: UnknownFields = ()
    changed: UnknownFields = ()
    if image.unknown_fields:
        made = image.unknown_fields.get((r.CreatePartition.TYPE, topic_id, number), ())
        changed = image.unknown_fields.get((r.ChangePartition.TYPE, topic_id, number), ())
    yield r.CreatePartition(
        topic_id=topic_id,
        partition=number,
        replicas=partition.replicas,
        directories=partition.directories,
        isr=partition.isr,
        leader=partition.leader,
        leader_epoch=partition.leader_epoch,
        # A change that carries unknown fields follows, and every change raises this by one.
        partition_epoch=partition.partition_epoch - (1 if changed else 0),
        eligible=partition.eligible,
        adding=partition.adding,
        removing=partition.removing,
        start_offset=partition.start_offset,
        target=partition.target,
        recovering=partition.recovering,
        unclean_epoch=partition.unclean_epoch,
        extra=made,
    )
    if changed:
        yield r.ChangePartition(topic_id=topic_id, partition=number, extra=changed)


# Records to bytes and back.


def _chunk(kind: bytes, payload: bytes, crc: int) -> tuple[bytes, int]:
    crc = crc32c(payload, crc32c(kind, crc))
    return _FRAME.pack(len(payload), crc) + kind + payload, crc


def encode_snapshot(image: ClusterImage, pending: Iterable[Record] | None = None) -> Iterator[bytes]:
    """Yields the snapshot chunk by chunk; joined they are what `decode_snapshot` reads."""
    chunk, crc = _chunk(_HEADER, MAGIC + bytes([VERSION]), 0)
    yield chunk
    chunks = records = 0

    def everything() -> Iterator[Record]:
        yield from image_records(image)
        if pending is not None:
            yield BeginDecision()
            yield from pending

    part: list[Record] = []
    for record in everything():
        part.append(record)
        if len(part) == RECORDS_PER_CHUNK:
            chunk, crc = _chunk(RECORDS, encode_records(part), crc)
            yield chunk
            chunks, records, part = chunks + 1, records + len(part), []
    if part:
        chunk, crc = _chunk(RECORDS, encode_records(part), crc)
        yield chunk
        chunks, records = chunks + 1, records + len(part)
    chunk, _ = _chunk(_END, msgpack.packb([chunks, records]), crc)
    yield chunk


def snapshot_bytes(image: ClusterImage, pending: tuple[Record, ...] | None = None) -> bytes:
    """Returns the whole snapshot; for work in another process (`raft.state_machine.SnapshotJob`)."""
    return b"".join(encode_snapshot(image, pending))


def chunks(data: bytes) -> Iterator[tuple[bytes, bytes]]:
    """Yields (kind, payload) of each chunk, checked; `CorruptStateError` at the first invalid one."""
    view = memoryview(data)
    position, crc = 0, 0
    while position < len(view):
        body = position + _FRAME.size
        if body + 1 > len(view):
            raise CorruptStateError(f"metadata snapshot is cut off at byte {position}")
        length, stored = _FRAME.unpack_from(view, position)
        end = body + 1 + length
        if length > CHUNK_BYTES_MAX or end > len(view):
            raise CorruptStateError(f"metadata snapshot is cut off or damaged at byte {position}")
        kind, payload = bytes(view[body : body + 1]), bytes(view[body + 1 : end])
        crc = crc32c(payload, crc32c(kind, crc))
        if crc != stored:
            raise CorruptStateError(f"metadata snapshot fails its CRC at byte {position}")
        yield kind, payload
        position = end


class SnapshotReader:
    """Reads the chunks of a snapshot one by one: `take` each in order, then `finish`."""

    __slots__ = ("_chunks", "_has_begun", "_has_ended", "_image", "_pending", "_records")

    def __init__(self) -> None:
        self._image = ClusterImage()
        self._pending: list[Record] | None = None
        self._chunks = self._records = 0
        self._has_begun = self._has_ended = False

    def take(self, kind: bytes, payload: bytes) -> None:
        if self._has_ended:
            raise CorruptStateError("metadata snapshot continues after its end")
        if not self._has_begun:
            if kind != _HEADER or payload[:-1] != MAGIC or payload[-1] != VERSION:
                raise CorruptStateError("not a metadata snapshot of a known version")
            self._has_begun = True
        elif kind == RECORDS:
            self._take_records(decode_records(payload))
        elif kind == _END:
            if msgpack.unpackb(payload) != [self._chunks, self._records]:
                raise CorruptStateError("metadata snapshot has lost chunks")
            self._has_ended = True
        else:
            raise CorruptStateError(f"metadata snapshot has a chunk of unknown kind {kind!r}")

    def _take_records(self, part: tuple[Record, ...]) -> None:
        self._chunks, self._records = self._chunks + 1, self._records + len(part)
        begin = next((at for at, record in enumerate(part) if isinstance(record, BeginDecision)), None)
        if self._pending is not None:
            self._pending += part
        elif begin is None:
            self._image = _applied(self._image, part)
        else:
            self._image = _applied(self._image, part[:begin])
            self._pending = list(part[begin + 1 :])

    def finish(self) -> Snapshot:
        if not self._has_ended:
            raise CorruptStateError("metadata snapshot has no end")
        return Snapshot(self._image, None if self._pending is None else tuple(self._pending))


def decode_snapshot(data: bytes) -> Snapshot:
    """Decodes a snapshot; raises `CorruptStateError` if any of it is damaged or missing."""
    reader = SnapshotReader()
    for kind, payload in chunks(data):
        reader.take(kind, payload)
    return reader.finish()


def _applied(image: ClusterImage, records: tuple[Record, ...]) -> ClusterImage:
    try:
        return image.apply_all(records)
    except (KeyError, AssertionError, TypeError, AttributeError, IndexError) as error:
        raise CorruptStateError(f"the records of a metadata snapshot are inconsistent: {error!r}") from error
