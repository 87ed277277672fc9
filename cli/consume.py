"""`tidelog consume TOPIC`: records as they come. Keys of the JSON documents are listed in docs/cli.md."""

import argparse
import asyncio
import base64
import json
import sys
from datetime import UTC, datetime
from typing import Any

from tidelog.cli import session, table
from tidelog.cli.json_stream import JsonStream
from tidelog.cli.main import EXIT_OK, WrongCallError
from tidelog.cli.records import chosen_partitions
from tidelog.client.cluster import ClusterClient
from tidelog.client.errors import PositionError, TruncatedError
from tidelog.client.metadata import TopicInfo
from tidelog.client.offsets import EARLIEST, LATEST, list_offsets
from tidelog.client.reader import Fetched, Reader, ReaderConfig
from tidelog.client.record import ConsumerRecord
from tidelog.log.columns import Record
from tidelog.model.ids import PartitionId

POLL_MS = 500
PATIENCE_MS = 15_000


def timestamp_of(text: str, option: str = "--timestamp") -> int:
    """Milliseconds since 1970, or a date and time; without a zone it is that of this machine."""
    if text.isdecimal():
        return int(text)
    try:
        return int(datetime.fromisoformat(text).astimezone(UTC).timestamp() * 1000)
    except ValueError as error:
        raise WrongCallError(f"{option} {text!r}: ms since 1970, or like 2026-01-31T12:00:00Z") from error


def text_of(data: bytes | None) -> Any:
    """For JSON: text where it is UTF-8, else an object with base64."""
    if data is None:
        return None
    try:
        return data.decode()
    except UnicodeDecodeError:
        return {"base64": base64.b64encode(data).decode()}


def record_document(partition: int, record: Record | ConsumerRecord) -> dict[str, Any]:
    return {
        "partition": partition,
        "offset": record.offset,
        "timestamp": record.timestamp,
        "key": text_of(record.key),
        "value": text_of(record.value),
        "headers": [{"key": name, "value": text_of(value)} for name, value in record.headers],
    }


class Printer:
    def __init__(self, options: argparse.Namespace) -> None:
        self._options = options
        self._separator: bytes = options.key_separator.encode()
        self._out = sys.stdout.buffer
        self._json: JsonStream | None = None
        if options.output == "json":
            self._json = JsonStream(sys.stdout)
            self._json.open_object()
            self._json.put("topic", options.topic)
            self._json.open_array("records")

    def put(self, partition: int, record: Record | ConsumerRecord) -> None:
        if self._json is not None:
            self._json.item(record_document(partition, record))
        elif self._options.output == "jsonl":
            sys.stdout.write(json.dumps(record_document(partition, record)) + "\n")
        else:
            self._out.write(self._line(partition, record))

    def _line(self, partition: int, record: Record | ConsumerRecord) -> bytes:
        parts = []
        if self._options.offsets:
            parts += [str(partition).encode(), str(record.offset).encode(), str(record.timestamp).encode()]
        if self._options.headers:
            parts.append(",".join(f"{name}={_shown(value)}" for name, value in record.headers).encode())
        if self._options.keys:
            parts.append(b"null" if record.key is None else record.key)
        parts.append(b"null" if record.value is None else record.value)
        return self._separator.join(parts) + b"\n"

    def flush(self) -> None:
        sys.stdout.flush()
        self._out.flush()

    def close(self, count: int) -> None:
        if self._json is not None:
            self._json.close()
            self._json.put("count", count)
            self._json.close()
        self.flush()


def _shown(value: bytes | None) -> str:
    return "null" if value is None else value.decode(errors="backslashreplace")


async def start_offsets(
    cluster: ClusterClient, topic: TopicInfo, places: list[PartitionId], options: argparse.Namespace
) -> dict[PartitionId, int]:
    """Where to begin, by the options; a time after the last record is the end."""
    if options.offset is not None and options.offset.isdecimal():
        return dict.fromkeys(places, int(options.offset))
    if options.offset not in (None, "earliest", "latest"):
        raise WrongCallError(f"--offset {options.offset!r}: a number, earliest or latest")
    asked = EARLIEST if options.from_beginning or options.offset == "earliest" else LATEST
    if options.timestamp is not None:
        asked = timestamp_of(options.timestamp)
    found = await _offsets(cluster, topic, places, asked)
    missing = [place for place in places if found[place] < 0]
    if missing:
        found |= await _offsets(cluster, topic, missing, LATEST)
    return found


async def _offsets(
    cluster: ClusterClient, topic: TopicInfo, places: list[PartitionId], asked: int
) -> dict[PartitionId, int]:
    rows = await list_offsets(cluster, topic, asked, partitions=places)
    for row in rows.values():
        if row.error is not None:
            raise row.error
    return {place: row.offset for place, row in rows.items()}


class _Consuming:
    """One run: what was read, and when to stop."""

    def __init__(self, options: argparse.Namespace, reader: Reader, printer: Printer) -> None:
        self._options = options
        self._reader = reader
        self._printer = printer
        self.count = 0
        self.ends: dict[PartitionId, int] = {}

    @property
    def is_full(self) -> bool:
        return self._options.max_messages is not None and self.count >= self._options.max_messages

    @property
    def is_at_end(self) -> bool:
        return self._options.exit_at_end and all(
            self._reader.position(place) >= end for place, end in self.ends.items()
        )

    async def run(self) -> None:
        loop = asyncio.get_running_loop()
        heard_s = loop.time()
        while not self.is_full and not self.is_at_end:
            pieces = await self._poll()
            for piece in pieces:
                self._print(piece)
            self._printer.flush()
            if pieces:
                heard_s = loop.time()
            elif self._options.timeout_ms is not None and loop.time() - heard_s >= self._options.timeout_ms / 1000:
                return

    async def _poll(self) -> list[Fetched]:
        wait_ms = POLL_MS if self._options.timeout_ms is None else min(POLL_MS, self._options.timeout_ms)
        try:
            return await self._reader.poll(wait_ms)
        except TruncatedError as error:
            session.tell(f"{error}; going on from there")
            self._reader.seek(error.partition, error.diverging_offset)
        except PositionError as error:
            if self._options.offset is not None and self.count == 0:
                raise
            where = await self._start_of(error)
            session.tell(f"{error}; going on from {where}")
            self._reader.seek(error.partition, where)
        return []

    async def _start_of(self, error: PositionError) -> int:
        topic = await self._reader.cluster.topic(error.topic)
        found = await _offsets(self._reader.cluster, topic, [error.partition], EARLIEST)
        return found[error.partition]

    def _print(self, piece: Fetched) -> None:
        end = self.ends.get(piece.partition) if self._options.exit_at_end else None
        for record in piece.records():
            if self.is_full or (end is not None and record.offset >= end):
                return
            self._printer.put(piece.partition.partition, record)
            self.count += 1


def run(options: argparse.Namespace) -> int:
    if options.max_messages is not None and options.max_messages < 0:
        raise WrongCallError(f"--max-messages {options.max_messages}: from 0 on")
    if options.group is not None:
        return _run_group(options)
    if options.offset is not None and options.offset.isdecimal() and not options.partition:
        raise WrongCallError("a number as --offset belongs to a --partition")

    async def job(cluster: ClusterClient) -> int:
        topic = await cluster.topic(options.topic)
        places = chosen_partitions(topic, options.partition)
        positions = await start_offsets(cluster, topic, places, options)
        reader = Reader(cluster, ReaderConfig(patience_ms=PATIENCE_MS))
        printer = Printer(options)
        consuming = _Consuming(options, reader, printer)
        if options.exit_at_end:
            consuming.ends = await _offsets(cluster, topic, places, LATEST)
        reader.assign_topic(topic, positions)
        try:
            await consuming.run()
        except asyncio.CancelledError:
            session.tell(f"{table.count(consuming.count, 'record')} read")
            raise
        finally:
            await reader.close()
            printer.close(consuming.count)
        return EXIT_OK

    return session.run(options, job)


def _run_group(options: argparse.Namespace) -> int:
    from tidelog.cli import consume_group

    return consume_group.run(options)
