"""`tidelog produce TOPIC`: lines of stdin become records. Keys of the JSON document are listed in docs/cli.md.

Lines that come together go together: what is typed is sent at once, a file in batches. A record with a key goes to the
partition that every Kafka client would choose (murmur2); those without one go to the partitions in turn. A topic that
is not there is created by the first record, where the cluster allows it (`auto.create.topics.enable`): a name that was
misspelt, and nothing to send, leaves no topic behind.
"""

import argparse
import asyncio
import base64
import binascii
import contextlib
import json
import os
import sys
from dataclasses import dataclass, field
from typing import Any

from tidelog.cli import session, table
from tidelog.cli.main import EXIT_OK, EXIT_REFUSED, WrongCallError
from tidelog.cli.records import chosen_partitions
from tidelog.cli.stdin_chunks import lines
from tidelog.cli.topics import pairs_of
from tidelog.client.cluster import ClusterClient
from tidelog.client.errors import UnknownTopicError
from tidelog.client.writer import Acknowledged, Writer, WriterConfig
from tidelog.log.batch import encode_columns, partition_of
from tidelog.log.batch_header import Codec
from tidelog.log.columns import Headers
from tidelog.model.errors import TidelogError

BATCH_BYTES = 512 << 10
RECORD_KEYS = frozenset({"key", "value", "headers", "partition", "timestamp", "offset"})
"""What `consume --output jsonl` prints can be sent again; its offset says nothing then."""


def acks_of(options: argparse.Namespace) -> int:
    return -1 if options.acks == "all" else int(options.acks)


class InputError(WrongCallError):
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
        if self._separator == b"":
            raise WrongCallError("--key-separator: at least one character")
        if self._is_json and self._separator is not None:
            raise WrongCallError("--key-separator is for lines; an object of --input json has a key")
        self._number = 0

    def read(self, line: bytes) -> Line:
        self._number += 1
        if self._is_json:
            return self._object(line)
        if self._separator is None:
            return Line(self._or_null(line), headers=self._headers)
        key, found, value = line.partition(self._separator)
        if not found:
            raise InputError(f"line {self._number}: no {self._separator.decode()!r} in it, which --key-separator names")
        return Line(self._or_null(value), self._or_null(key), self._headers)

    def _or_null(self, data: bytes) -> bytes | None:
        return None if data == self._null else data

    def _object(self, line: bytes) -> Line:
        try:
            found = json.loads(line)
        except ValueError as error:
            raise InputError(f"line {self._number}: no JSON: {error}") from error
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
            raise InputError(f"line {self._number}: {what} is a whole number from 0 on")
        return value


class _Producing:
    def __init__(self, options: argparse.Namespace, cluster: ClusterClient, writer: Writer) -> None:
        self._options = options
        self._cluster = cluster
        self._writer = writer
        self._count = 0
        """Of partitions; 0: the topic is not there yet."""
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
            chosen_partitions(topic, [self._options.partition])
        self._count = len(topic.partitions)
        self._turn = self._cluster.random.randrange(self._count)

    async def add(self, line: Line) -> None:
        if not self.is_located:
            await self.locate(may_create=True)
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
        self._turn = (self._turn + 1) % max(1, self._count)
        self.settle()

    def settle(self) -> None:
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


def run(options: argparse.Namespace) -> int:
    reader = LineReader(options)
    if options.timeout_ms <= 0:
        raise WrongCallError(f"--timeout-ms {options.timeout_ms}: above 0")

    async def job(cluster: ClusterClient) -> int:
        config = WriterConfig(acks=acks_of(options), delivery_timeout_ms=options.timeout_ms)
        writer = Writer(cluster, config)
        producing = _Producing(options, cluster, writer)
        with contextlib.suppress(UnknownTopicError):
            await producing.locate(may_create=False)
        wrong: InputError | None = None
        try:
            async for rows in lines(sys.stdin.fileno()):
                try:
                    for row in rows:
                        await producing.add(reader.read(row))
                except InputError as error:
                    wrong = error  # what came before it is stored
                await producing.send()
                if wrong is not None or producing.error is not None:
                    break
            await writer.flush()
            producing.settle()
        finally:
            await writer.close(is_flushed=False)
            producing.settle()
            if producing.is_located:
                _report(options, producing)
        if wrong is not None:
            raise wrong
        if not producing.is_located:
            _report(options, producing)
            session.tell(f"nothing was read, and there is no topic '{options.topic}' yet")
        return EXIT_OK if producing.error is None else EXIT_REFUSED

    return session.run(options, job)


def _report(options: argparse.Namespace, producing: _Producing) -> None:
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
    elif os.isatty(sys.stderr.fileno()) or error is not None:
        session.tell(f"{table.count(producing.records, 'record')} stored in {options.topic}")
    if error is not None:
        told = session.error_text(error) if isinstance(error, TidelogError) else repr(error)
        session.tell(f"{table.count(producing.failed, 'batch')} failed; the first: {told}")
