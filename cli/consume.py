"""`tidelog consume TOPIC...`: records as they come. Keys of the JSON documents are listed in docs/cli.md."""

import argparse
import asyncio
import base64
import json
import re
import sys
from datetime import UTC, datetime
from typing import Any

from tidelog.cli import session, table
from tidelog.cli.json_stream import JsonStream
from tidelog.cli.main import EXIT_OK, RefusedError, WrongCallError
from tidelog.cli.progress import Progress
from tidelog.cli.record_format import FormatError, RecordFormat, bytes_or_null, headers_text
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
DISCOVER_S = 5.0
"""Between two looks for new topics that match a pattern."""


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


def record_document(topic: str, partition: int, record: Record | ConsumerRecord) -> dict[str, Any]:
    return {
        "topic": topic,
        "partition": partition,
        "offset": record.offset,
        "timestamp": record.timestamp,
        "key": text_of(record.key),
        "value": text_of(record.value),
        "headers": [{"key": name, "value": text_of(value)} for name, value in record.headers],
    }


class Printer:
    """Prints records to stdout as the options say. `close` ends a JSON document, however reading ended."""

    def __init__(self, options: argparse.Namespace) -> None:
        self._options = options
        self._separator: bytes = options.key_separator.encode()
        self._format = None if options.format is None else RecordFormat(options.format)
        self._out = sys.stdout.buffer
        self._json: JsonStream | None = None
        if options.output == "json":
            self._json = JsonStream(sys.stdout)
            self._json.open_object()
            self._json.put("topic", options.topic[0] if len(options.topic) == 1 else None)
            self._json.open_array("records")

    def put(self, topic: str, partition: int, record: Record | ConsumerRecord) -> None:
        if self._json is not None:
            self._json.item(record_document(topic, partition, record))
        elif self._options.output == "jsonl":
            sys.stdout.write(json.dumps(record_document(topic, partition, record)) + "\n")
        elif self._format is not None:
            self._out.write(self._format.apply(topic, partition, record))
        else:
            self._out.write(self._line(partition, record))

    def _line(self, partition: int, record: Record | ConsumerRecord) -> bytes:
        parts = []
        if self._options.offsets:
            parts += [str(partition).encode(), str(record.offset).encode(), str(record.timestamp).encode()]
        if self._options.headers:
            parts.append(headers_text(record.headers).encode())
        if self._options.keys:
            parts.append(bytes_or_null(record.key))
        parts.append(bytes_or_null(record.value))
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


async def start_offsets(
    cluster: ClusterClient, topic: TopicInfo, places: list[PartitionId], options: argparse.Namespace
) -> dict[PartitionId, int]:
    """Where to begin, by the options; a time after the last record is the end."""
    if options.offset is not None and options.offset.isdecimal():
        await _check_offset(cluster, topic, places, int(options.offset))
        return dict.fromkeys(places, int(options.offset))
    if options.offset not in (None, "earliest", "latest"):
        raise WrongCallError(f"--offset {options.offset!r}: a number, earliest or latest")
    if options.last is not None:
        starts = await _offsets(cluster, topic, places, EARLIEST)
        ends = await _offsets(cluster, topic, places, LATEST)
        return {place: max(starts[place], ends[place] - options.last) for place in places}
    asked = EARLIEST if options.from_beginning or options.offset == "earliest" else LATEST
    if options.timestamp is not None:
        asked = timestamp_of(options.timestamp)
    found = await _offsets(cluster, topic, places, asked)
    missing = [place for place in places if found[place] < 0]
    if missing:
        found |= await _offsets(cluster, topic, missing, LATEST)
    return found


async def _check_offset(cluster: ClusterClient, topic: TopicInfo, places: list[PartitionId], offset: int) -> None:
    """An offset outside of the log is refused: reading would wait for ever, or begin elsewhere."""
    starts = await _offsets(cluster, topic, places, EARLIEST)
    ends = await _offsets(cluster, topic, places, LATEST)
    for place in places:
        name = f"{topic.name}-{place.partition}"
        if offset > ends[place]:
            raise RefusedError(
                f"--offset {offset} is past the end of {name}, whose next record gets offset {ends[place]} "
                "(OFFSET_OUT_OF_RANGE); --offset latest waits for it"
            )
        if offset < starts[place]:
            raise RefusedError(
                f"--offset {offset} is before the start of {name}, whose first offset is {starts[place]} "
                "(OFFSET_OUT_OF_RANGE); --offset earliest begins there"
            )


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
        self._known: set[PartitionId] = set()

    @property
    def is_full(self) -> bool:
        return self._options.max_messages is not None and self.count >= self._options.max_messages

    @property
    def is_at_end(self) -> bool:
        return self._options.exit_at_end and all(
            self._reader.position(place) >= end for place, end in self.ends.items()
        )

    async def add_topic(self, topic: TopicInfo, positions: dict[PartitionId, int]) -> None:
        """Read these partitions too."""
        if self._options.exit_at_end:
            self.ends |= await _offsets(self._reader.cluster, topic, list(positions), LATEST)
        self._known.update(positions)
        self._reader.add_all([(topic, place, offset, -1) for place, offset in positions.items()])

    async def run(self) -> None:
        loop = asyncio.get_running_loop()
        heard_s = looked_s = loop.time()
        total = self._options.max_messages or sum(
            max(0, end - self._reader.position(place)) for place, end in self.ends.items()
        )
        with Progress("reading", unit="records") as progress:
            while not self.is_full and not self.is_at_end:
                pieces = await self._poll()
                for piece in pieces:
                    self._print(piece)
                self._printer.flush()
                if total and not sys.stdout.isatty():
                    progress.show(self.count, total)
                if pieces:
                    heard_s = loop.time()
                elif self._options.timeout_ms is not None and loop.time() - heard_s >= self._options.timeout_ms / 1000:
                    return
                if self._options.pattern is not None and loop.time() - looked_s >= DISCOVER_S:
                    await self._discover()
                    looked_s = loop.time()

    async def _discover(self) -> None:
        """Topics and partitions that were created since: from their first record on."""
        if self._options.exit_at_end:
            return
        for topic in await chosen_topics(self._reader.cluster, self._options):
            fresh = [place for place in topic.partitions if place not in self._known]
            if fresh:
                await self.add_topic(topic, await _offsets(self._reader.cluster, topic, fresh, EARLIEST))

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
            self._printer.put(piece.topic, piece.partition.partition, record)
            self.count += 1


async def chosen_topics(cluster: ClusterClient, options: argparse.Namespace) -> list[TopicInfo]:
    """Those that the options name, or those that match the pattern now."""
    if options.pattern is None:
        return [await cluster.topic(name) for name in dict.fromkeys(options.topic)]
    pattern = re.compile(options.pattern)
    return [topic for topic in await cluster.all_topics() if not topic.is_internal and pattern.fullmatch(topic.name)]


def check_options(options: argparse.Namespace) -> None:
    if bool(options.topic) == (options.pattern is not None):
        raise WrongCallError("give names of topics, or --pattern REGEX that matches them, and not both")
    if options.pattern is not None:
        try:
            re.compile(options.pattern)
        except re.error as error:
            raise WrongCallError(f"--pattern {options.pattern!r}: no regular expression: {error}") from error
    if options.partition and len(set(options.topic)) != 1:
        raise WrongCallError("--partition goes with one topic")
    if options.offset is not None and options.offset.isdecimal() and not options.partition and options.group is None:
        raise WrongCallError("a number as --offset belongs to a --partition")
    if options.format is not None:
        if options.output != "lines" or options.keys or options.headers or options.offsets:
            raise WrongCallError("--format says all that is printed: leave --output, --keys, --headers, --offsets out")
        try:
            RecordFormat(options.format)
        except FormatError as error:
            raise WrongCallError(f"--format: {error}") from error


def run(options: argparse.Namespace) -> int:
    check_options(options)
    if options.group is not None:
        return _run_group(options)

    async def job(cluster: ClusterClient) -> int:
        topics = await chosen_topics(cluster, options)
        if not topics:
            session.tell(f"no topic matches {options.pattern!r} yet")
        begin = []
        for topic in topics:
            places = chosen_partitions(topic, options.partition)
            begin.append((topic, await start_offsets(cluster, topic, places, options)))
        reader = Reader(cluster, ReaderConfig(patience_ms=PATIENCE_MS))
        printer = Printer(options)
        consuming = _Consuming(options, reader, printer)
        try:
            for topic, positions in begin:
                await consuming.add_topic(topic, positions)
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
