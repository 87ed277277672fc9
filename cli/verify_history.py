"""The history file of `tidelog verify`: JSON lines, and the numbered records that go into it (`client.verify`)."""

import contextlib
from collections.abc import Iterable, Iterator
from typing import IO, Any

from tidelog.client.record import ConsumerRecord
from tidelog.client.verify import encode_event, parse_value


def numbered(records: Iterable[ConsumerRecord]) -> tuple[dict[int, list[tuple[int, str, int]]], int]:
    """Return offset, run and number of the records of each partition, and the number of foreign records."""
    rows: dict[int, list[tuple[int, str, int]]] = {}
    foreign = 0
    for record in records:
        found = parse_value(record.value)
        if found is None:
            foreign += 1
            continue
        run, partition, number = found
        # A record with another partition's number is foreign: the checker reports it.
        named = run if partition == record.partition else f"{run}@{partition}"
        rows.setdefault(record.partition, []).append((record.offset, named, number))
    return rows, foreign


class History:
    """A growing file of JSON lines; each line is flushed to the system at once, so that a kill loses none."""

    def __init__(self, path: str) -> None:
        self._file: IO[str] = open(path, "a", encoding="utf-8", buffering=1)  # noqa: SIM115 - closed by `close`

    def note(self, event: str, **fields: Any) -> None:
        self.put({"event": event, **fields})

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
