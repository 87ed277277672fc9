"""The files of a log as rows of plain values: what both forms of `tidelog log dump` print."""

from base64 import b64encode
from collections.abc import Iterable, Iterator
from datetime import UTC, datetime, timedelta

from tidelog.cli.group_records import group_document
from tidelog.log.dump import (
    FileKind,
    OffsetEntry,
    Problem,
    Source,
    StoredBatch,
    TimeEntry,
    TransactionEntry,
    read_offset_index,
    read_time_index,
    read_transaction_index,
)
from tidelog.model.errors import TidelogError
from tidelog.model.ids import Offset

Row = dict[str, object]
_TEXT_CHARACTERS_MAX = 60
_BEGINNING = datetime(1970, 1, 1, tzinfo=UTC)


def batch_row(batch: StoredBatch) -> Row:
    header = batch.header
    try:
        codec = header.codec.name.lower()
    except TidelogError:
        codec = f"unknown ({header.attributes & 7})"
    return {
        "position": batch.position,
        "size": header.size,
        "base_offset": header.base_offset,
        "last_offset": header.last_offset,
        "count": header.count,
        "leader_epoch": header.leader_epoch,
        "codec": codec,
        "timestamp_type": header.timestamp_type.name.lower(),
        "base_timestamp": header.base_timestamp,
        "max_timestamp": header.max_timestamp,
        "producer_id": header.producer_id,
        "producer_epoch": header.producer_epoch,
        "base_sequence": header.base_sequence,
        "is_transactional": header.is_transactional,
        "is_control": header.is_control,
        "marker": batch.marker,
        "crc": header.crc,
    }


def record_rows(batch: StoredBatch, *, decodes_groups: bool = False) -> list[Row]:
    """The records of a batch; a `TidelogError` if they do not decode. With `decodes_groups` also what they say of
    consumer groups."""
    return [
        {
            "offset": record.offset,
            "timestamp": record.timestamp,
            "key": bytes_document(record.key),
            "value": bytes_document(record.value),
            "headers": [{"key": key, "value": bytes_document(value)} for key, value in record.headers],
            **({"group": group_document(record.key, record.value)} if decodes_groups else {}),
        }
        for record in batch.records()
    ]


def entry_rows(kind: FileKind, base: Offset, file: Source, name: str) -> Iterator[Row | Problem]:
    """Entries of an index of any kind."""
    found: Iterable[OffsetEntry | TimeEntry | TransactionEntry | Problem]
    if kind is FileKind.OFFSET_INDEX:
        found = read_offset_index(file, name, base)
    elif kind is FileKind.TIME_INDEX:
        found = read_time_index(file, name, base)
    else:
        assert kind is FileKind.TRANSACTION_INDEX, "a segment has batches"
        found = read_transaction_index(file, name)
    for entry in found:
        match entry:
            case Problem():
                yield entry
            case OffsetEntry():
                yield {"offset": entry.offset, "position": entry.position}
            case TimeEntry():
                yield {"timestamp": entry.timestamp, "offset": entry.offset}
            case TransactionEntry(aborted=aborted):
                yield {
                    "producer_id": aborted.producer_id,
                    "first_offset": aborted.first_offset,
                    "last_offset": aborted.last_offset,
                    "last_stable_offset": aborted.last_stable_offset,
                }


def bytes_document(data: bytes | None) -> dict[str, str] | None:
    """Bytes for JSON: as text where they are text, else in base64."""
    if data is None:
        return None
    try:
        return {"text": data.decode()}
    except UnicodeDecodeError:
        return {"base64": b64encode(data).decode("ascii")}


def bytes_text(data: bytes | None) -> str:
    """Bytes for a person: one line, cut where it is long; null is not the same as empty."""
    if data is None:
        return "null"
    try:
        text = data.decode()
        shown = text if text.isprintable() else ascii(text)[1:-1]
    except UnicodeDecodeError:
        shown = "0x" + data[:_TEXT_CHARACTERS_MAX].hex()
    if len(shown) > _TEXT_CHARACTERS_MAX:
        return f"{shown[: _TEXT_CHARACTERS_MAX - 3]}... ({len(data)} bytes)"
    return shown


def time_text(timestamp_ms: int) -> str:
    """A timestamp for a person; one outside of the calendar stays a number."""
    if timestamp_ms < 0:
        return "-"
    try:
        moment = _BEGINNING + timedelta(milliseconds=timestamp_ms)
    except OverflowError:
        return str(timestamp_ms)
    return moment.strftime("%Y-%m-%d %H:%M:%S.") + f"{timestamp_ms % 1000:03d}"
