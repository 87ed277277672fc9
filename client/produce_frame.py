"""A `ProduceRequest` whose bytes are joined by hand around the batches: valid protobuf, one copy of the data.

A field may stand anywhere in a message, so a row is the encoding of the row without its batches, followed by them.
"""

from __future__ import annotations

from tidelog.model.ids import PartitionId
from tidelog.rpc.v1 import log_pb2 as pb

_ROW_TAG = bytes([pb.ProduceRequest.PARTITIONS_FIELD_NUMBER << 3 | 2])
_BATCHES_TAG = bytes([pb.ProducePartition.BATCHES_FIELD_NUMBER << 3 | 2])


def _varint(value: int) -> bytes:
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


class ProduceFrame:
    """Has the one method of a message that connections use. The batches are not to be changed until it was sent."""

    __slots__ = ("_parts", "count", "size")

    def __init__(self, *, acks: int, timeout_ms: int) -> None:
        self._parts: list[bytes | bytearray] = [pb.ProduceRequest(acks=acks, timeout_ms=timeout_ms).SerializeToString()]
        self.count = 0
        self.size = 0
        """Bytes of the batches."""

    def add(self, topic: str, partition: PartitionId, batches: bytes | bytearray) -> None:
        row = pb.ProducePartition(topic=topic, topic_id=partition.topic_id.bytes, partition=partition.partition)
        head = row.SerializeToString()
        before = _BATCHES_TAG + _varint(len(batches))
        self._parts += (_ROW_TAG, _varint(len(head) + len(before) + len(batches)), head, before, batches)
        self.count += 1
        self.size += len(batches)

    def SerializeToString(self) -> bytes:  # noqa: N802 - as messages have it
        return b"".join(self._parts)
