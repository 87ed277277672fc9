"""`tidelog produce TOPIC`: lines of stdin become records. Keys of the JSON document are listed in docs/cli.md.

Lines that arrive together are sent together, without a linger: a lone line is sent at once, a file in batches. Bytes
are stored as they are; only the line feed that ends a line is removed. With `--file` each file is one record. The first
Ctrl-C or SIGTERM ends the input: what was read is stored and reported. A second one does not wait for that.

A record with a key goes to the partition that every Kafka client would choose (murmur2); those without one go to the
partitions in turn. A topic that is not there is created by the first record, where the cluster allows it
(`auto.create.topics.enable`): a name that was misspelt, and nothing to send, leaves no topic behind.

It encodes its batches and sends them with a `Writer`, not with a `Producer`: lines that arrive together are one batch
of each partition, whatever the buffers of a producer hold, and a file larger than these is one record.
"""

import argparse
import asyncio
import base64
import binascii
import contextlib
import json
import os
import stat
import sys
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from tidelog.cli import session, stdin_chunks, table
from tidelog.cli.exit_codes import EXIT_FAILURE, EXIT_OK
from tidelog.cli.main import UsageError
from tidelog.cli.messages import error_text, report
from tidelog.cli.pairs import pairs_of
from tidelog.cli.progress import Progress
from tidelog.cli.records import chosen_partitions
from tidelog.cli.stopping import stop_requested_in_loop
from tidelog.client.cluster import ClusterClient
from tidelog.client.errors import UnknownTopicError
from tidelog.client.producer.writer import Acknowledged, Writer, WriterConfig
from tidelog.log.batch import encode_columns, partition_of
from tidelog.log.batch_header import Codec
from tidelog.log.columns import Headers
from tidelog.model.errors import TidelogError

BATCH_BYTES = 512 << 10
NOTICE_S = 1.0
"""From Ctrl-C to the line that says what is still waited for."""
FILE_BYTES_MAX = WriterConfig().batch_bytes_max - (1 << 10)
"""Of a file that is one record: a batch with its header must fit into one request."""
RECORD_KEYS = frozenset({"key", "value", "headers", "partition", "timestamp", "offset", "topic"})
"""What `consume --output jsonl` prints can be sent again; its offset and its topic are ignored."""


def acks_of(options: argparse.Namespace) -> int:
    return -1 if options.acks == "all" else int(options.acks)


class InputError(UsageError):
    """A line of stdin that is no record."""


@dataclass(slots=True)
class _Pending:
    """Records of one partition that go out together."""

    timestamps: list[int] = field(default_factory=list)
    keys: list[bytes | None] = field(default_factory=list)
    values: list[bytes | None] = field(default_factory=list)
    headers: list[Headers] = field(default_factory=list)
    size: int = 0


@dataclass(frozen=True, slots=True)
class Line:
    value: bytes | None
    key: bytes | None = None
    headers: Headers = ()
    partition: int | None = None
    timestamp: int | None = None


class LineReader:
    """What a line of stdin says, by the options."""

    def __init__(self, options: argparse.Namespace) -> None:
        self._is_json = options.input == "json"
        self._separator = None if options.key_separator is None else options.key_separator.encode()
        self._null = None if options.null_marker is None else options.null_marker.encode()
        self._headers = tuple((name, value.encode()) for name, value in pairs_of(options.headers, "--headers"))
        self._key = None if options.key is None else options.key.encode()
        if self._separator == b"":
            raise UsageError("--key-separator: at least one character")
        if self._is_json and self._separator is not None:
            raise UsageError("--key-separator is for lines; an object of --input json has a key")
        if self._key is not None and (self._is_json or self._separator is not None):
            raise UsageError("--key is the key of every record; --key-separator and --input json give each its own")
        if options.file and (self._is_json or self._separator is not None or self._null is not None):
            raise UsageError("--file sends files as they are; --input, --key-separator, --null-marker are for lines")
        self._number = 0

    def whole(self, data: bytes) -> Line:
        """A file as one record."""
        return Line(data, self._key, self._headers)

    def read(self, line: bytes) -> Line:
        self._number += 1
        if self._is_json:
            return self._object(line)
        if self._separator is None:
            return Line(self._or_null(line), self._key, self._headers)
        key, found, value = line.partition(self._separator)
        if not found:
            raise InputError(f"line {self._number} has no key separator {self._separator.decode()!r}")
        return Line(self._or_null(value), self._or_null(key), self._headers)

    def _or_null(self, data: bytes) -> bytes | None:
        return None if data == self._null else data

    def _object(self, line: bytes) -> Line:
        try:
            found = json.loads(line)
        except ValueError as error:
            raise InputError(f"line {self._number}: invalid JSON: {error}") from error
        if not isinstance(found, dict):
            raise InputError(f"line {self._number}: an object with value, key, headers, partition, timestamp")
        odd = sorted(found.keys() - RECORD_KEYS)
        if odd:
            raise InputError(f"line {self._number}: {odd[0]!r} is none of {', '.join(sorted(RECORD_KEYS))}")
        rows = self._header_rows(found.get("headers", {}))
        return Line(
            self._bytes(found.get("value"), "value"),
            self._bytes(found.get("key"), "key"),
            self._headers + tuple((name, self._bytes(value, "a header")) for name, value in rows),
            self._whole(found.get("partition"), "partition"),
            self._whole(found.get("timestamp"), "timestamp"),
        )

    def _header_rows(self, headers: Any) -> list[tuple[str, Any]]:
        """An object, or what `consume` prints: a list of objects with key and value, as a name may come twice."""
        if isinstance(headers, dict):
            return list(headers.items())
        if isinstance(headers, list) and all(isinstance(one, dict) and "key" in one for one in headers):
            return [(str(one["key"]), one.get("value")) for one in headers]
        raise InputError(f"line {self._number}: headers are an object, or a list of objects with key and value")

    def _bytes(self, value: Any, what: str) -> bytes | None:
        """Text, null, {"base64": ...}, or anything else as JSON text."""
        if value is None:
            return None
        if isinstance(value, str):
            return value.encode()
        if isinstance(value, dict) and value.keys() == {"base64"}:
            try:
                return base64.b64decode(value["base64"], validate=True)
            except (binascii.Error, TypeError, ValueError) as error:
                raise InputError(f"line {self._number}: {what} is no base64: {error}") from error
        return json.dumps(value, separators=(",", ":")).encode()

    def _whole(self, value: Any, what: str) -> int | None:
        if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < 0):
            raise InputError(f"line {self._number}: {what} must be an integer from 0 on")
        return value


class _Producing:
    def __init__(
        self, options: argparse.Namespace, cluster: ClusterClient, writer: Writer, on_error: Callable[[], None]
    ) -> None:
        self._options = options
        self._on_error = on_error
        self._cluster = cluster
        self._writer = writer
        self._count = 0
        """Of partitions; 0: the topic is not there yet."""
        self.waiting = 0
        """Records that were read and are neither stored nor failed."""
        self._codec = Codec[options.compression.upper()]
        self._turn = 0
        self._pending: dict[int, _Pending] = {}
        self.sent: list[asyncio.Future[Acknowledged]] = []
        self.rows: dict[int, list[int]] = {}
        self.records = 0
        self.failed = 0
        self.error: BaseException | None = None

    @property
    def is_located(self) -> bool:
        return self._count > 0

    async def locate(self, *, may_create: bool) -> None:
        topic = await self._cluster.topic(self._options.topic, may_create=may_create)
        if self._options.partition is not None:
            chosen_partitions(topic.name, len(topic.partitions), [self._options.partition])
        self._count = len(topic.partitions)
        self._turn = self._cluster.random.randrange(self._count)

    async def add(self, line: Line) -> None:
        self.waiting += 1
        if not self.is_located:
            await self.locate(may_create=True)
            report(f"created topic '{self._options.topic}', {table.count(self._count, 'partition')}")
        partition = line.partition if line.partition is not None else self._options.partition
        if partition is None:
            partition = self._turn if line.key is None else partition_of(line.key, self._count)
        pending = self._pending.setdefault(partition, _Pending())
        pending.timestamps.append(self._cluster.clock.now_ms() if line.timestamp is None else line.timestamp)
        pending.keys.append(line.key)
        pending.values.append(line.value)
        pending.headers.append(line.headers)
        pending.size += 64 + len(line.key or b"") + len(line.value or b"")
        if pending.size >= BATCH_BYTES:
            await self.send()

    async def send(self) -> None:
        """What is gathered; keyless records go to the next partition then."""
        pending, self._pending = self._pending, {}
        for partition, part in pending.items():
            batch = encode_columns(
                part.timestamps,
                part.keys,
                part.values,
                part.headers if any(part.headers) else None,
                codec=self._codec,
            )
            result = await self._writer.send(self._options.topic, partition, batch)
            self.sent.append(result)
            result.add_done_callback(partial(self._ended, len(part.keys)))
        self._turn = (self._turn + 1) % max(1, self._count)
        self.collect_results()

    def _ended(self, count: int, result: asyncio.Future[Acknowledged]) -> None:
        """A batch that failed ends the input: stdin may be silent for a long time."""
        self.waiting -= count
        if result.cancelled() or result.exception() is not None:
            self._on_error()

    def report_waiting(self) -> None:
        if self.waiting:
            report(f"waiting for {table.count(self.waiting, 'record')}; Ctrl-C again ends at once")

    def collect_results(self) -> None:
        """Count what has ended."""
        left = []
        for result in self.sent:
            if not result.done():
                left.append(result)
            elif (error := result.exception()) is not None:
                self.error = self.error or error
                self.failed += 1
            else:
                done = result.result()
                self.records += done.count
                row = self.rows.setdefault(done.partition.partition, [0, -1, -1])
                row[0] += done.count
                if done.base_offset >= 0:
                    row[1] = done.base_offset if row[1] < 0 else min(row[1], done.base_offset)
                    row[2] = max(row[2], done.base_offset + done.count - 1)
        self.sent = left


class _Input:
    """The records that a call asks for: lines of stdin, or files."""

    def __init__(self, options: argparse.Namespace) -> None:
        self._parsed = LineReader(options)
        self._files = [(path, _opened(path)) for path in options.file]
        self.lines = stdin_chunks.LineReader(sys.stdin.fileno())
        self.signal: int | None = None
        self.wrong: InputError | None = None
        """What is no record; everything before it is stored."""

    def stop(self, number: int | None = None) -> None:
        self.signal = number if self.signal is None else self.signal
        self.lines.stop()

    async def batches(self) -> AsyncIterator[list[Line]]:
        """Records that arrived together; those before a wrong line, then no more."""
        if self._files:
            for path, descriptor in self._files:
                data = await _contents(path, descriptor)
                if data is None:
                    self.wrong = InputError(_too_large(path, f"more than {FILE_BYTES_MAX}"))
                    return
                yield [self._parsed.whole(data)]
            return
        try:
            async for lines in self.lines.batches():
                found: list[Line] = []
                try:
                    for line in lines:
                        found.append(self._parsed.read(line))  # noqa: PERF401  those before a wrong line are kept
                except InputError as error:
                    self.wrong = error
                yield found
                if self.wrong is not None:
                    return
        except stdin_chunks.LineTooLongError as error:
            self.wrong = InputError(str(error))


async def _contents(path: str, descriptor: int) -> bytes | None:
    try:
        return await stdin_chunks.read_all(descriptor, bytes_max=FILE_BYTES_MAX)
    finally:
        if path != "-":
            os.close(descriptor)


def _too_large(path: str, size: str) -> str:
    return f"--file {path}: it has {size} bytes; a record may have {FILE_BYTES_MAX} at most"


def _opened(path: str) -> int:
    if path == "-":
        return sys.stdin.fileno()
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        raise UsageError(f"--file {path}: {error.strerror}") from error
    status = os.fstat(descriptor)
    if stat.S_ISDIR(status.st_mode):
        raise UsageError(f"--file {path}: is a directory")
    if status.st_size > FILE_BYTES_MAX:
        raise UsageError(_too_large(path, str(status.st_size)))
    return descriptor


def run(options: argparse.Namespace) -> int:
    if options.timeout_ms <= 0:
        raise UsageError(f"--timeout-ms {options.timeout_ms}: above 0")
    source = _Input(options)

    async def job(cluster: ClusterClient) -> int:
        config = WriterConfig(acks=acks_of(options), delivery_timeout_ms=options.timeout_ms)
        writer = Writer(cluster, config)
        producing = _Producing(options, cluster, writer, source.stop)
        with contextlib.suppress(UnknownTopicError):
            await producing.locate(may_create=False)
        notices: list[asyncio.TimerHandle] = []

        def stop(number: int) -> None:
            source.stop(number)
            notices.append(asyncio.get_running_loop().call_later(NOTICE_S, producing.report_waiting))

        with stop_requested_in_loop(stop):
            try:
                await _produce(source, producing)
                await writer.flush()
            finally:
                for notice in notices:
                    notice.cancel()
                await writer.close(is_flushed=False)
                producing.collect_results()
                if producing.is_located:
                    _report(options, producing, source)
        if source.wrong is not None:
            raise source.wrong
        if not producing.is_located:
            _report(options, producing, source)
            report(f"nothing was read, and there is no topic '{options.topic}' yet")
        if source.signal is not None:
            return 128 + source.signal
        return EXIT_OK if producing.error is None else EXIT_FAILURE

    return session.run(options, job)


async def _produce(source: _Input, producing: _Producing) -> None:
    """Sends what comes until the input ends, a line is wrong, or something could not be stored."""
    status = os.fstat(sys.stdin.fileno())
    total = status.st_size if stat.S_ISREG(status.st_mode) else 0
    with Progress("producing") as progress:
        async for rows in source.batches():
            for row in rows:
                await producing.add(row)
            await producing.send()
            if total:
                done = source.lines.bytes_read
                progress.show(done, total, says=f"{done / 1e6:,.1f} of {total / 1e6:,.1f} MB")
            if producing.error is not None:
                return


def _report(options: argparse.Namespace, producing: _Producing, source: _Input) -> None:
    error = producing.error
    if options.output == "json":
        document = {
            "topic": options.topic,
            "records": producing.records,
            "failed_batches": producing.failed,
            "error": None if error is None else str(error),
            "partitions": [
                {
                    "partition": partition,
                    "records": count,
                    "first_offset": first if first >= 0 else None,
                    "last_offset": last if last >= 0 else None,
                }
                for partition, (count, first, last) in sorted(producing.rows.items())
            ],
        }
        print(json.dumps(document, indent=2))
    elif os.isatty(sys.stderr.fileno()) or any((error, source.signal, source.wrong)):
        report(f"{table.count(producing.records, 'record')} stored in {options.topic}")
    if source.signal is not None and source.lines.incomplete_bytes:
        report(f"the last line had no end yet and was not stored ({source.lines.incomplete_bytes} bytes)")
    if error is not None:
        text = error_text(error) if isinstance(error, TidelogError) else repr(error)
        report(f"{table.count(producing.failed, 'batch')} failed; the first: {text}")
