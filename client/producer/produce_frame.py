"""A `ProduceRequest` whose bytes are joined by hand around the batches (`rpc.grpc.raw_protobuf`)."""

from __future__ import annotations

from tidelog.client.producer.conditions import Condition
from tidelog.model.ids import PartitionId
from tidelog.rpc.grpc import raw_protobuf
from tidelog.rpc.v1 import log_pb2 as pb

_ROW_TAG = raw_protobuf.tag(pb.ProduceRequest.PARTITIONS_FIELD_NUMBER)
_BATCHES_TAG = raw_protobuf.tag(pb.ProducePartition.BATCHES_FIELD_NUMBER)


class ProduceFrame:
    """Has the one method of a message that connections use. The batches are not to be changed until it was sent."""

    __slots__ = ("_parts", "count", "size")

    def __init__(self, *, acks: int, timeout_ms: int, transactional_id: str = "") -> None:
        self._parts: list[raw_protobuf.Payload] = [
            pb.ProduceRequest(acks=acks, timeout_ms=timeout_ms, transactional_id=transactional_id).SerializeToString()
        ]
        self.count = 0
        self.size = 0
        """Bytes of the batches."""

    def add(
        self, topic: str, partition: PartitionId, batches: bytes | bytearray, condition: Condition | None = None
    ) -> None:
        row = pb.ProducePartition(topic=topic, topic_id=partition.topic_id.bytes, partition=partition.partition)
        if condition is not None and condition.expected_offset is not None:
            row.expected_offset = condition.expected_offset
        if condition is not None and condition.fencing_token is not None:
            row.fencing_token = condition.fencing_token
        self._parts += raw_protobuf.row(_ROW_TAG, row.SerializeToString(), _BATCHES_TAG, batches)
        self.count += 1
        self.size += len(batches)

    @property
    def message_bytes(self) -> int:
        """Of all of it."""
        return sum(map(len, self._parts))

    def SerializeToString(self) -> bytes:  # noqa: N802 - as messages have it
        return b"".join(self._parts)
