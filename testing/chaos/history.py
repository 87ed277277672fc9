"""What workers write down while they run: files of JSON lines, one for each worker.

Events have the form that `tidelog.verify` reads, with the topic beside the partition, and three more:

    {"event": "alive", "at_ms"}                 the worker's loop runs
    {"event": "error", "at_ms", "what"}         the client has reported an error
    {"event": "end", "at_ms"}                   the worker has closed its client and ends

`at_ms` is the machine's monotonic clock, which all processes share. Workers of pipelines and readers of committed data
note the events of `tidelog.client.transaction_history` with `at_ns`, by which they are merged (`TransactionLog`).
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import IO, Any

from tidelog.verify import parse_value

TopicPartition = tuple[str, int]
Read = tuple[str, int, int, bytes | None]
"""Topic, partition, offset, value."""

ALIVE_MS = 1_000


def now_ms() -> int:
    return time.monotonic_ns() // 1_000_000


class Log:
    """A file that grows; each line goes to the system at once, so that a kill loses none."""

    def __init__(self, path: Path) -> None:
        self._file: IO[str] = path.open("a", encoding="utf-8", buffering=1)
        self._alive_ms = 0

    def note(self, event: str, **facts: Any) -> None:
        self._file.write(json.dumps({"event": event, **facts}, separators=(",", ":")) + "\n")

    def alive(self) -> None:
        at_ms = now_ms()
        if at_ms - self._alive_ms >= ALIVE_MS:
            self._alive_ms = at_ms
            self.note("alive", at_ms=at_ms)

    def error(self, what: object) -> None:
        self.note("error", at_ms=now_ms(), what=str(what))

    def close(self) -> None:
        self.note("end", at_ms=now_ms())
        self._file.close()


class WriterLog(Log):
    """Notes what a producer sends; `run` is its name."""

    def __init__(self, path: Path, run: str) -> None:
        super().__init__(path)
        self._run = run

    def sent(self, topic: str, partition: int, number: int) -> None:
        self._event("send", topic, partition, number)

    def acked(self, topic: str, partition: int, number: int, offset: int, *, began_ms: int) -> None:
        """`began_ms` is when it was sent."""
        at_ms = now_ms()
        self._event("ack", topic, partition, number, offset=offset, at_ms=at_ms, took_ms=at_ms - began_ms)

    def failed(self, topic: str, partition: int, number: int, error: object, *, was_sent: bool) -> None:
        self._event("fail", topic, partition, number, was_sent=was_sent, what=str(error), at_ms=now_ms())

    def _event(self, event: str, topic: str, partition: int, number: int, **facts: Any) -> None:
        self.note(event, run=self._run, topic=topic, partition=partition, first=number, count=1, **facts)


class MemberLog(Log):
    """Notes what a member of a group is given. Clients do not say where a partition begins, so that `assigned` is
    written with its first record, under the time of the assignment."""

    def __init__(self, path: Path, member: str) -> None:
        super().__init__(path)
        self._member = member
        self._assigned_ms: dict[TopicPartition, int] = {}
        self.positions: dict[TopicPartition, int] = {}
        """The next offset to read, of partitions that have given records since they were assigned."""

    def assigned(self, partitions: Iterable[TopicPartition]) -> None:
        at_ms = now_ms()
        for one in partitions:
            self._assigned_ms[one] = at_ms
            self.positions.pop(one, None)

    def revoked(self, partitions: Iterable[TopicPartition]) -> None:
        for one in partitions:
            self._assigned_ms.pop(one, None)
            self.positions.pop(one, None)
            self._event("revoked", one)

    def polled(self, records: Iterable[Read]) -> None:
        rows: dict[TopicPartition, list[tuple[int, str, int]]] = {}
        for topic, partition, offset, value in records:
            run, where, number = parse_value(value) or (f"unreadable-{value!r}", partition, offset)
            named = run if where == partition else f"{run}@{where}"
            rows.setdefault((topic, partition), []).append((offset, named, number))
        for one, found in rows.items():
            assigned_ms = self._assigned_ms.pop(one, None)
            if assigned_ms is not None:
                self._event("assigned", one, offset=found[0][0], at_ms=assigned_ms)
            self._event("poll", one, records=found, at_ms=now_ms())
            self.positions[one] = found[-1][0] + 1

    def committed(self, offsets: Mapping[TopicPartition, int], *, began_ms: int | None = None) -> None:
        """`began_ms` is when the commit began, if that is known."""
        facts = {"at_ms": now_ms()} if began_ms is None else {"at_ms": now_ms(), "began_ms": began_ms}
        for one, offset in offsets.items():
            self._event("committed", one, offset=offset, **facts)

    def _event(self, event: str, one: TopicPartition, **facts: Any) -> None:
        self.note(event, member=self._member, topic=one[0], partition=one[1], **facts)


class TransactionLog(Log):
    """Notes what a worker of a pipeline does, each before it is done or after it is confirmed; and what a reader of
    committed data gets. A worker that is killed leaves a transaction without an end: its outcome is unknown."""

    def __init__(self, path: Path, name: str) -> None:
        super().__init__(path)
        self._name = name

    def _event(self, event: str, **facts: Any) -> None:
        self.note(event, at_ns=time.monotonic_ns(), **facts)

    def begin(self, txn: str, owner: str) -> None:
        self._event("txn-begin", txn=txn, owner=owner)

    def sending(self, txn: str, number: int, place: str, source: tuple[str, int]) -> None:
        self._event("txn-send", txn=txn, number=number, place=place, source=source)

    def offsets(self, txn: str, group: str, offsets: Mapping[str, int]) -> None:
        self._event("txn-offsets", txn=txn, group=group, offsets=offsets)

    def ended(self, txn: str, outcome: str) -> None:
        self._event("txn-end", txn=txn, outcome=outcome)

    def saw(self, records: Iterable[Read]) -> None:
        rows: dict[TopicPartition, list[tuple[int, str, int]]] = {}
        for topic, partition, offset, value in records:
            rows.setdefault((topic, partition), []).append((offset, *parse_output(value)))
        for (topic, partition), found in rows.items():
            self._event("saw", reader=self._name, place=place_of(topic, partition), records=found)


def place_of(topic: str, partition: int) -> str:
    return f"{topic}-{partition}"


def output_of(txn: str, number: int) -> bytes:
    """The value of record `number` of a transaction."""
    return f"{txn} {number}".encode()


def parse_output(value: bytes | None) -> tuple[str, int]:
    """Return transaction and number; a foreign value gets a name that no transaction has."""
    txn, _, number = (value or b"").partition(b" ")
    return (txn.decode(), int(number)) if number.isdigit() and txn.isascii() else (f"unreadable-{value!r}", 0)


class Tail:
    """Reads the lines that a worker has completed since the last look."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._at = 0

    def events(self) -> Iterator[dict[str, Any]]:
        if not self._path.exists():
            return
        with self._path.open("rb") as file:
            file.seek(self._at)
            for line in file:
                if not line.endswith(b"\n"):
                    return  # the worker is in the middle of it
                self._at += len(line)
                yield json.loads(line)
