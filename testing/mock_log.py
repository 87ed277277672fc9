"""One partition of a `MockConsumer`."""

from __future__ import annotations

import bisect
from collections.abc import Callable
from typing import Any

from tidelog.client.arrow import Part
from tidelog.client.consumer.errors import DeserializationError
from tidelog.client.record import ConsumerRecord
from tidelog.log.batch import decode_columns, encode_columns


class MockLog:
    """Records in offset order; offsets may have gaps."""

    def __init__(self) -> None:
        self.start = 0
        self.end = 0
        self.records: list[ConsumerRecord] = []

    def at(self, offset: int) -> int:
        """Return the index of the first record at or after the offset."""
        return bisect.bisect_left(self.records, offset, key=lambda record: record.offset)


def part_of(record: ConsumerRecord[Any, Any]) -> Part:
    """Return the record as a fetched batch of one."""
    headers = [record.headers] if record.headers else None
    data = encode_columns([record.timestamp], [record.key], [record.value], headers, base_offset=record.offset)
    columns = decode_columns(data, decompressed_bytes_max=len(data))
    return record.topic, record.partition, columns, 0, 1


Deserialize = Callable[[str, bytes], Any]


def converted(record: ConsumerRecord, key: Deserialize | None, value: Deserialize | None) -> ConsumerRecord:
    """Return the record with its key and value as objects."""
    for what, convert in (("key", key), ("value", value)):
        data = getattr(record, what)
        if convert is None or data is None:
            continue
        try:
            record = record._replace(**{what: convert(record.topic, data)})
        except Exception as error:
            raise DeserializationError.of(what, record.topic_partition, record.offset, error) from error
    return record
