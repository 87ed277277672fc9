"""`tidelog verify produce|consume|check`: see `client.verify` for the history's form and what is found."""

import argparse
import asyncio
import contextlib
import json
import sys
from collections.abc import Iterator
from typing import IO, Any

from tidelog.cli import session, table
from tidelog.cli.consume import PATIENCE_MS
from tidelog.cli.main import EXIT_OK, EXIT_REFUSED, WrongCallError
from tidelog.cli.produce import acks_of
from tidelog.client.cluster import ClusterClient
from tidelog.client.errors import DeliveryTimeoutError, TruncatedError, WriterClosedError
from tidelog.client.offsets import EARLIEST, LATEST, list_offsets
from tidelog.client.reader import Fetched, Reader, ReaderConfig
from tidelog.client.verify import HistoryChecker, Verdict, encode_event, parse_value, value_of
from tidelog.client.writer import Acknowledged, Writer, WriterConfig
from tidelog.log.batch import encode_columns
from tidelog.model.errors import TidelogError
from tidelog.model.ids import PartitionId

SHOWN_MAX = 20


class History:
    """A file of JSON lines that grows; each line is handed to the system at once, so that a kill loses none."""

    def __init__(self, path: str) -> None:
        self._file: IO[str] = open(path, "a", encoding="utf-8", buffering=1)  # noqa: SIM115 - closed by `close`

    def note(self, event: str, **facts: Any) -> None:
        self.put({"event": event, **facts})

    def put(self, event: dict[str, Any]) -> None:
        self._file.write(encode_event(event))

    def close(self) -> None:
        self._file.close()


@contextlib.contextmanager
def open_history(path: str) -> Iterator[History]:
    history = History(path)
    try:
        yield history
    finally:
        history.close()


class Stand:
    """How long a partition stood still: records were sent, and none was acknowledged."""

    def __init__(self) -> None:
        self.longest_s = 0.0
        self._since_s: float | None = None
        self._waiting = 0

    def sent(self, now_s: float) -> None:
        self._waiting += 1
        if self._since_s is None:
            self._since_s = now_s

    def acknowledged(self, now_s: float) -> None:
        self._waiting -= 1
        self.look(now_s)
        self._since_s = now_s if self._waiting else None

    def failed(self) -> None:
        """It stands until something is acknowledged."""
        self._waiting -= 1

    def look(self, now_s: float) -> None:
        if self._since_s is not None:
            self.longest_s = max(self.longest_s, now_s - self._since_s)


class NumberedWriter:
    """Writes numbered batches to the partitions in turn, and notes what became of each."""

    def __init__(self, cluster: ClusterClient, writer: Writer, topic: str, partitions: int, history: History) -> None:
        self._cluster = cluster
        self._writer = writer
        self._topic = topic
        self._next = [0] * partitions
        self._turn = 0
        self._history = history
        self._is_replicated = writer.config.acks == -1
        self.run = f"{cluster.random.getrandbits(48):012x}"
        self.sent = self.acknowledged = self.failed = 0
        self.longest_gap_s = 0.0
        """Between two acknowledgements."""
        self._acked_s: float | None = None
        self._stands = [Stand() for _ in range(partitions)]
        self.last_error: TidelogError | None = None

    async def write(self, count: int) -> None:
        partition = self._turn
        self._turn = (self._turn + 1) % len(self._next)
        first = self._next[partition]
        self._next[partition] += count
        values: list[bytes | None] = [value_of(self.run, partition, first + index) for index in range(count)]
        batch = encode_columns([self._cluster.clock.now_ms()] * count, [None] * count, values)
        self._history.note("send", run=self.run, partition=partition, first=first, count=count)
        self.sent += count
        self._stands[partition].sent(asyncio.get_running_loop().time())
        try:
            result = await self._writer.send(self._topic, partition, batch)
        except TidelogError as error:
            self._failed(partition, first, count, error)
            return
        result.add_done_callback(lambda done: self._done(partition, first, count, done))

    def _done(self, partition: int, first: int, count: int, result: asyncio.Future[Acknowledged]) -> None:
        if result.cancelled():
            return
        error = result.exception()
        if isinstance(error, TidelogError):
            self._failed(partition, first, count, error)
            return
        facts = {"run": self.run, "partition": partition, "first": first, "count": count}
        if self._is_replicated:
            facts["at_ms"] = self._cluster.clock.now_ms()
        self._history.note("ack", **facts, offset=result.result().base_offset)
        self.acknowledged += count
        now_s = asyncio.get_running_loop().time()
        self._stands[partition].acknowledged(now_s)
        if self._acked_s is not None:
            self.longest_gap_s = max(self.longest_gap_s, now_s - self._acked_s)
        self._acked_s = now_s

    def _failed(self, partition: int, first: int, count: int, error: TidelogError) -> None:
        # Only these say for sure that nothing was sent; after any other error the records may be there.
        is_sure = isinstance(error, DeliveryTimeoutError | WriterClosedError) and not error.was_sent
        facts = {"run": self.run, "partition": partition, "first": first, "count": count}
        self._history.note("fail", **facts, was_sent=not is_sure, error=error.code.name)
        self.failed += count
        self.last_error = error
        self._stands[partition].failed()

    def longest_stand(self) -> tuple[int, float]:
        """The partition that stood still the longest, and for how many seconds."""
        now_s = asyncio.get_running_loop().time()
        for stand in self._stands:
            stand.look(now_s)
        return max(enumerate(stand.longest_s for stand in self._stands), key=lambda row: row[1])


def run_produce(options: argparse.Namespace) -> int:
    if options.rate <= 0 or options.batch < 1:
        raise WrongCallError("--rate and --batch are above 0")

    async def job(cluster: ClusterClient) -> int:
        topic = await cluster.topic(options.topic)
        config = WriterConfig(acks=acks_of(options), delivery_timeout_ms=options.timeout_ms)
        writer = Writer(cluster, config)
        with open_history(options.history) as history:
            numbered = NumberedWriter(cluster, writer, topic.name, len(topic.partitions), history)
            try:
                await _write_all(options, numbered)
                await writer.flush()
            except asyncio.CancelledError:
                # Ctrl-C ends the run; what is under way is still noted.
                if options.records is not None:
                    raise
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(options.timeout_ms / 1000):
                        await writer.flush()
            finally:
                await writer.close(is_flushed=False)
                await asyncio.sleep(0)  # the callbacks of what was just closed
        worst, stood_s = numbered.longest_stand()
        document = {
            "topic": topic.name,
            "run": numbered.run,
            "sent": numbered.sent,
            "acknowledged": numbered.acknowledged,
            "failed": numbered.failed,
            "retries": writer.retries,
            "longest_gap_ms": round(numbered.longest_gap_s * 1000),
            "longest_partition_gap_ms": round(stood_s * 1000),
            "longest_gap_partition": worst,
        }
        if options.output == "json":
            print(json.dumps(document, indent=2))
        else:
            print(", ".join(f"{key.replace('_', ' ')} {value}" for key, value in document.items()))
        if numbered.last_error is not None:
            session.tell(f"{numbered.failed} records failed; the last: {session.error_text(numbered.last_error)}")
        return EXIT_OK if numbered.failed == 0 else EXIT_REFUSED

    return session.run(options, job)


async def _write_all(options: argparse.Namespace, numbered: NumberedWriter) -> None:
    loop = asyncio.get_running_loop()
    start_s = loop.time()
    while options.records is None or numbered.sent < options.records:
        left = options.batch if options.records is None else min(options.batch, options.records - numbered.sent)
        await numbered.write(left)
        ahead_s = start_s + numbered.sent / options.rate - loop.time()
        if ahead_s > 0:
            await asyncio.sleep(ahead_s)


class NumberedReader:
    """Reads every partition from its start, and notes every record."""

    def __init__(self, reader: Reader, history: History, name: str) -> None:
        self.reader = reader
        self._history = history
        self._name = name
        self.read = 0
        self.foreign = 0

    async def poll(self, timeout_ms: int) -> int:
        """How many it got; a truncated log is noted, and read again from there."""
        try:
            pieces = await self.reader.poll(timeout_ms)
        except TruncatedError as error:
            number, offset = error.partition.partition, error.diverging_offset
            self._history.note("cut", reader=self._name, partition=number, offset=offset)
            self.reader.seek(error.partition, offset)
            return 0
        return sum(self._note(piece) for piece in pieces)

    def _note(self, piece: Fetched) -> int:
        number = piece.partition.partition
        rows: list[tuple[int, str, int]] = []
        for record in piece.records():
            found = parse_value(record.value)
            if found is None:
                self.foreign += 1
                continue
            run, partition, value = found
            # A record of another partition is nobody's here: the checker says so.
            rows.append((record.offset, run if partition == number else f"{run}@{partition}", value))
        if rows:
            self._history.note("read", reader=self._name, partition=number, records=rows)
        self.read += len(rows)
        return len(rows)


def run_consume(options: argparse.Namespace) -> int:
    if options.group is not None:
        from tidelog.cli import verify_group

        return verify_group.run(options)

    async def job(cluster: ClusterClient) -> int:
        topic = await cluster.topic(options.topic)
        starts = {place: row.offset for place, row in (await list_offsets(cluster, topic, EARLIEST)).items()}
        reader = Reader(cluster, ReaderConfig(patience_ms=PATIENCE_MS if not options.follow else 600_000))
        ends: dict[PartitionId, dict[str, int]] = {}
        with open_history(options.history) as history:
            name = f"{cluster.random.getrandbits(48):012x}"
            numbered = NumberedReader(reader, history, name)
            reader.assign_topic(topic, starts)
            try:
                if options.follow:
                    while options.records is None or numbered.read < options.records:
                        await numbered.poll(500)
                else:
                    ends = await _log_ends(cluster, topic)
                    await _read_to_end(options, numbered, ends)
            finally:
                for place, start in starts.items():
                    facts = {"partition": place.partition, "start": start, "end": reader.position(place)}
                    history.note("end", reader=name, **facts, **ends.get(place, {}))
                await reader.close()
                _tell_read(options, topic.name, name, numbered)
        return EXIT_OK

    return session.run(options, job)


async def _log_ends(cluster: ClusterClient, topic: Any) -> dict[PartitionId, dict[str, int]]:
    """Where each partition ends now, as a history notes it."""
    asked_ms = cluster.clock.now_ms()
    found = await list_offsets(cluster, topic, LATEST)
    for row in found.values():
        if row.error is not None:
            raise row.error
    return {place: {"log_end": row.offset, "asked_ms": asked_ms} for place, row in found.items()}


async def _read_to_end(
    options: argparse.Namespace, numbered: NumberedReader, ends: dict[PartitionId, dict[str, int]]
) -> None:
    while any(numbered.reader.position(place) < known["log_end"] for place, known in ends.items()):
        if options.records is not None and numbered.read >= options.records:
            return
        await numbered.poll(500)


def _tell_read(options: argparse.Namespace, topic: str, name: str, numbered: NumberedReader) -> None:
    document = {"topic": topic, "reader": name, "read": numbered.read, "foreign": numbered.foreign}
    if options.output == "json":
        print(json.dumps(document, indent=2))
    else:
        print(f"{numbered.read} records read, {numbered.foreign} that are not numbered")


def run_check(options: argparse.Namespace) -> int:
    checker = HistoryChecker()
    for path in options.history:
        try:
            with open(path, encoding="utf-8") as file:
                _feed(checker, file, path)
        except FileNotFoundError as error:
            raise WrongCallError(f"{path}: no such file") from error
    verdict = checker.verdict()
    bad = {kind: count for kind, count in verdict.counts.items() if count and kind not in options.allow}
    if options.output == "json":
        print(json.dumps(check_document(verdict, is_good=not bad), indent=2))
    else:
        _print_verdict(verdict, bad)
    if not verdict.checked_complete:
        session.tell("nobody has read a partition to its end: a loss could not be seen")
    return EXIT_REFUSED if bad else EXIT_OK


def _feed(checker: HistoryChecker, file: IO[str], path: str) -> None:
    for number, line in enumerate(file, start=1):
        if not line.endswith("\n"):
            session.tell(f"{path}:{number}: the last line is cut off, and left out")
            return
        checker.feed_line(line, where=f"{path}:{number}")


def check_document(verdict: Verdict, *, is_good: bool) -> dict[str, Any]:
    return {
        "is_good": is_good,
        "sent": verdict.sent,
        "acknowledged": verdict.acknowledged,
        "refused": verdict.refused,
        "unknown": verdict.unknown,
        "read": verdict.read,
        "is_complete": verdict.checked_complete,
        "counts": verdict.counts,
        "anomalies": [{"kind": one.kind, "partition": one.partition, "what": one.what} for one in verdict.anomalies],
    }


def _print_verdict(verdict: Verdict, bad: dict[str, int]) -> None:
    print(
        f"{verdict.sent} sent, {verdict.acknowledged} acknowledged, {verdict.refused} refused, {verdict.unknown} of "
        f"unknown outcome, {verdict.read} read"
    )
    print(", ".join(f"{kind} {count}" for kind, count in verdict.counts.items()))
    if verdict.anomalies:
        rows = [[one.kind, one.partition, one.what] for one in verdict.anomalies[:SHOWN_MAX]]
        table.write(sys.stdout, ["kind", "partition", "what"], rows, right=["partition"])
        if len(verdict.anomalies) > SHOWN_MAX:
            print(f"... and {sum(verdict.counts.values()) - SHOWN_MAX} more")
    print(
        table.red("BAD", sys.stdout) if bad else "good: every acknowledged record is there once, in order, in its place"
    )
