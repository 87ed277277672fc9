"""`FetchBuffer`: fetched data on its way to the user.

    pieces    whole fetches, put by the IO loop
    rows      the records of one batch, of which the user received some

The user's thread takes from it. The IO loop does two things: it puts pieces at the end, and it sets `attention` when
the user's thread has to call the core before it returns another record (a rebalance, a seek, a commit callback). Stale
pieces are dropped when their turn comes.
"""

from __future__ import annotations

import logging
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
from operator import length_hint
from typing import Any

from tidelog.client.consumer.errors import DeserializationError
from tidelog.client.consumer.fetched import Fetched
from tidelog.client.consumer.subscription_state import UNKNOWN, Position
from tidelog.client.record import ConsumerRecord, TopicPartition, make_records
from tidelog.log.columns import Columns
from tidelog.model.errors import CorruptBatchError

LOGGER = logging.getLogger(__name__)

Deserializer = Callable[[str, Any], Any]
"""(topic, bytes) -> value; not called for null."""
Interceptor = Callable[[list[ConsumerRecord[Any, Any]]], Iterable[ConsumerRecord[Any, Any]]]
ColumnSlice = tuple[str, int, Columns, int, int]
"""Topic, partition, the columns of a batch, its first row and the row after the last one."""


class FetchBuffer:
    def __init__(
        self,
        key: Deserializer | None = None,
        value: Deserializer | None = None,
        *,
        checks: bool = True,
        interceptors: Sequence[Interceptor] = (),
    ) -> None:
        """`interceptors` receive the records of each batch before the user and may return others."""
        self.attention = False
        self.rows: Iterator[ConsumerRecord[Any, Any]] = iter(())
        """Set `position.record` to each record before you return it."""
        self.position = Position(0)
        """The position of the partition of `rows`."""
        self.records = self.bytes = 0
        self._key = key
        self._value = value
        self._checks = checks
        self._interceptors = interceptors
        self._pieces: deque[Fetched] = deque()
        self._piece: Fetched | None = None
        self._batches: Iterator[Columns] = iter(())
        self._columns: Columns | None = None
        self._row = 0
        """The first row of `_columns` that is not in `rows`."""
        self._epoch = UNKNOWN
        self._consumed: set[Position] = set()
        """Positions that advanced since `acknowledge`."""

    def put(self, pieces: Sequence[Fetched]) -> None:
        """Called on the IO loop; a single call of `extend`, which no other thread can interrupt."""
        self._pieces.extend(pieces)

    def acknowledge(self) -> None:
        """The user asks for more: it has processed the records that it received."""
        for position in self._consumed:
            position.acknowledge()
        self._consumed.clear()

    @property
    def is_empty(self) -> bool:
        return not length_hint(self.rows) and self._piece is None and not self._pieces

    def load(self) -> bool:
        """Fills `rows`; False if the buffer is empty. Raises the error of the next batch each time, until a seek."""
        self._drop_stale()
        while not length_hint(self.rows):
            columns = self._next_columns()
            if columns is None:
                return False
            assert self._piece is not None, "columns belong to a piece"
            records = self._decode(self._piece, columns, self._row)
            self._row += len(records)
            self.records += len(records)
            self.rows = iter(intercept(self._interceptors, records))
        self._consumed.add(self.position)
        return True

    def take(self, count: int) -> list[ConsumerRecord[Any, Any]]:
        """Up to `count` records. The error of a batch is raised when the records before it were taken."""
        taken: list[ConsumerRecord[Any, Any]] = []
        while len(taken) < count:
            try:
                if not self.load():
                    break
            except Exception:
                if taken:
                    break
                raise
            taken += islice(self.rows, count - len(taken))
            self.position.advance(taken[-1].offset + 1, taken[-1].leader_epoch)
        return taken

    def take_columns(self, count: int) -> list[ColumnSlice]:
        """Up to `count` records as columns. Records that `load` decoded are returned as columns too."""
        taken: list[ColumnSlice] = []
        left = count
        while left > 0:
            self._drop_stale()
            decoded = length_hint(self.rows)
            self._row -= decoded
            self.records -= decoded
            self.rows = iter(())
            try:
                columns = self._next_columns()
            except Exception:
                if taken:
                    break
                raise
            if columns is None:
                break
            assert self._piece is not None, "columns belong to a piece"
            end = min(len(columns), self._row + left)
            taken.append((self._piece.topic, self._piece.partition.partition, columns, self._row, end))
            left -= end - self._row
            self.records += end - self._row
            self._row = end
            self.position.advance(columns.offsets[end - 1] + 1, columns.batch.leader_epoch)
            self._consumed.add(self.position)
        return taken

    def _drop_stale(self) -> None:
        if self._piece is not None and self._piece.is_stale:
            self._close_piece()
        while self._piece is None and self._pieces and self._pieces[0].is_stale:
            self._pieces.popleft()

    def _close_piece(self) -> None:
        self._piece = self._columns = None
        self._batches = iter(())
        self.rows = iter(())

    def _next_columns(self) -> Columns | None:
        """The batch in which `_row` is the next record; None if nothing is left."""
        while True:
            if self._columns is not None and self._row < len(self._columns):
                return self._columns
            self._columns = None
            if self._piece is None:
                self._drop_stale()
                if not self._pieces:
                    return None
                self._open_piece(self._pieces.popleft())
            piece = self._piece
            assert piece is not None, "a piece is open"
            try:
                self._columns = next(self._batches, None)
            except CorruptBatchError as error:
                self._batches = piece.batches(checks=self._checks)  # the next call fails the same way
                name = TopicPartition(piece.topic, piece.partition.partition)
                offset = self.position.consumed[0]
                raise CorruptBatchError(f"{name}, at or after offset {offset}: {error}") from error
            if self._columns is None:
                self.position.advance(max(piece.next_offset, self.position.consumed[0]), self._epoch)
                self._consumed.add(self.position)
                self._close_piece()
            else:
                self._epoch = self._columns.batch.leader_epoch
                self._row = bisect_left(self._columns.offsets, self.position.consumed[0])

    def _open_piece(self, piece: Fetched) -> None:
        assert piece.position is not None, "the fetcher sets the position"
        self._piece, self.position, self._epoch = piece, piece.position, piece.position.consumed[1]
        self._batches = piece.batches(checks=self._checks)
        self.bytes += len(piece.data)

    def _decode(self, piece: Fetched, columns: Columns, start: int) -> list[ConsumerRecord[Any, Any]]:
        keys: Sequence[Any] = columns.keys.to_list()
        values: Sequence[Any] = columns.values.to_list()
        headers = columns.headers()
        offsets: Sequence[int] = columns.offsets
        timestamps: Sequence[int] = columns.timestamps
        if start:
            keys, values, offsets, timestamps = keys[start:], values[start:], offsets[start:], timestamps[start:]
            headers = None if headers is None else headers[start:]
        failure: DeserializationError | None = None
        for part, deserialize in (("key", self._key), ("value", self._value)):
            if deserialize is None:
                continue
            column = keys if part == "key" else values
            decoded: list[Any] = []
            try:
                decoded.extend(None if data is None else deserialize(piece.topic, data) for data in column)
            except Exception as error:
                # `extend` keeps what came before the error.
                name = TopicPartition(piece.topic, piece.partition.partition)
                failure = DeserializationError.of(part, name, offsets[len(decoded)], error)
            if part == "key":
                keys, values = decoded, values[: len(decoded)]
            else:
                keys, values = keys[: len(decoded)], decoded
        if failure is not None and not values:
            raise failure
        return make_records(
            piece.topic,
            piece.partition.partition,
            columns.batch.leader_epoch,
            offsets,
            timestamps,
            keys,
            values,
            headers,
        )


def intercept(
    interceptors: Iterable[Callable[..., Any]], records: list[ConsumerRecord[Any, Any]]
) -> list[ConsumerRecord[Any, Any]]:
    """What the interceptors' `on_consume` return; None: unchanged. Their errors are logged."""
    for interceptor in interceptors:
        try:
            changed = interceptor(records)
            records = records if changed is None else list(changed)
        except Exception:
            LOGGER.exception("interceptor failed in on_consume")
    return records
