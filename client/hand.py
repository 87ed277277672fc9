"""`Hand`: what the reader's side has handed over to the user's, and the user has not been given yet.

    pieces    whole fetches, as they came
    rows      the records of one batch, of which some were given out

Used by the user's thread alone, but for two things that the core does from its own: it sets `attention` (something is
due: a partition is to be given up, a sign of life; look at it before the next record is given out), and it looks at the
record that the user works on (`in_work`). Both are single loads and stores.
"""

from __future__ import annotations

import logging
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from itertools import islice
from operator import length_hint
from typing import Any

from tidelog.client.consumer_errors import DeserializationError
from tidelog.client.fetched import Fetched
from tidelog.client.record import ConsumerRecord, TopicPartition, make_records
from tidelog.log.columns import Columns
from tidelog.model.errors import CorruptBatchError
from tidelog.model.ids import PartitionId

LOGGER = logging.getLogger(__name__)

Deserializer = Callable[[str, Any], Any]
"""(topic, bytes) -> value; not asked for null."""
Interceptor = Callable[[list[ConsumerRecord]], Iterable[ConsumerRecord]]


class Hand:
    def __init__(
        self,
        key: Deserializer | None = None,
        value: Deserializer | None = None,
        *,
        checks: bool = True,
        interceptors: Sequence[Interceptor] = (),
    ) -> None:
        """`interceptors` see the records of each batch before the user, and may give others in their place."""
        self.attention = False
        self.rows: Iterator[ConsumerRecord] = iter(())
        """Give them out by way of `last`: `hand.last = row` for the last one of what is given."""
        self.last: ConsumerRecord | None = None
        self.is_one_by_one = False
        """The user gets records one by one, so that all before `last` are done."""
        self.records = self.bytes = 0
        self.received = 0
        """The number of the handover that arrived last."""
        self._key = key
        self._value = value
        self._checks = checks
        self._interceptors = interceptors
        self._pieces: deque[Fetched] = deque()
        self._piece: Fetched | None = None
        self._batches: Iterator[Columns] = iter(())
        self._columns: Columns | None = None
        self._row = 0  # the first of `_columns` that is not in `rows`
        self._at, self._epoch = 0, -1  # the next offset of the piece, and the epoch before it
        self._moved: dict[PartitionId, tuple[int, int]] = {}

    def put(self, pieces: Sequence[Fetched], number: int = 0) -> None:
        """They have arrived, and so says the number. Ctrl-C comes between calls: not between these two."""
        extend = self._pieces.extend
        self.received = number
        extend(pieces)

    def drop(self, partitions: Collection[PartitionId]) -> None:
        """Nothing more of these is given out; what `marks` has not told of them is forgotten."""
        self._pieces = deque(piece for piece in self._pieces if piece.partition not in partitions)
        if self._piece is not None and self._piece.partition in partitions:
            self._close_piece()
        for partition in partitions:
            self._moved.pop(partition, None)
        self.attention = True

    def _close_piece(self) -> None:
        self._piece = self._columns = self.last = None
        self._batches = iter(())
        self.rows = iter(())

    # Positions.

    def _note_given(self) -> None:
        """What was given out of the rows, without an end of the batch that was not seen."""
        if self.last is not None:
            assert self._piece is not None and self._columns is not None, "rows have a batch"  # noqa: PT018
            self._at = self.last.offset + 1
            self._epoch = self._columns.batch.leader_epoch
            self._moved[self._piece.partition] = (self._at, self._epoch)

    def marks(self) -> dict[PartitionId, tuple[int, int]]:
        """How far the user has been given each partition, of those that have moved since the last call."""
        self._note_given()
        moved, self._moved = self._moved, {}
        return moved

    # Out.

    @property
    def is_empty(self) -> bool:
        return not length_hint(self.rows) and self._piece is None and not self._pieces

    def load(self) -> bool:
        """See to it that `rows` has records; False if there are none in the hand. Raises what is wrong with the next
        batch, each time until it is dropped."""
        while not length_hint(self.rows):
            columns = self._next_columns()
            if columns is None:
                return False
            assert self._piece is not None, "columns come from a piece"
            found = self._converted(self._piece, columns, self._row)
            self._row += len(found)
            self.records += len(found)
            for interceptor in self._interceptors:
                try:
                    found = list(interceptor(found))
                except Exception:
                    LOGGER.exception("an interceptor failed: on_consume of %s", self._piece.topic)
            self.rows = iter(found)
        return True

    def in_work(self) -> ConsumerRecord | None:
        """The record that the user has, if he was given one: those before it are done. From any thread."""
        last = self.last
        return last if self.is_one_by_one else None  # looked at in this order: `take` clears it before it sets `last`

    def take(self, count: int) -> list[ConsumerRecord]:
        """Up to so many of what is in the hand; an error of a batch comes when what is before it was taken."""
        self.is_one_by_one = False
        found: list[ConsumerRecord] = []
        while len(found) < count:
            try:
                if not self.load():
                    break
            except Exception:
                if found:
                    break
                raise
            found += islice(self.rows, count - len(found))
            self.last = found[-1]
        return found

    def take_columns(self, count: int) -> list[tuple[str, int, Columns, int, int]]:
        """(topic, partition, columns, first row, end row) of up to so many records. Rows that were made already, by
        another call, are given as they lie in their batch."""
        found: list[tuple[str, int, Columns, int, int]] = []
        left = count
        while left > 0:
            waiting = length_hint(self.rows)
            if waiting:  # made for iteration: take them back
                self._row -= waiting
                self.records -= waiting
                self.rows = iter(())
            try:
                columns = self._next_columns()
            except Exception:
                if found:
                    break
                raise
            if columns is None:
                break
            assert self._piece is not None, "columns come from a piece"
            end = min(len(columns), self._row + left)
            found.append((self._piece.topic, self._piece.partition.partition, columns, self._row, end))
            left -= end - self._row
            self.records += end - self._row
            self._row = end
            self._at, self._epoch = columns.offsets[end - 1] + 1, columns.batch.leader_epoch
            self._moved[self._piece.partition] = (self._at, self._epoch)
        return found

    def _next_columns(self) -> Columns | None:
        """The batch in which `_row` is the next record; None if nothing is left."""
        while True:
            self._note_given()
            self.last = None
            if self._columns is not None and self._row < len(self._columns):
                return self._columns
            self._columns = None
            if self._piece is None:
                if not self._pieces:
                    return None
                self._piece = self._pieces.popleft()
                self._at, self._epoch = self._piece.position, -1
                self._batches = self._piece.batches(checks=self._checks)
                self.bytes += len(self._piece.data)
            piece = self._piece
            try:
                self._columns = next(self._batches, None)
            except CorruptBatchError as error:
                self._batches = piece.batches(checks=self._checks)  # so that the next look finds the same
                where = TopicPartition(piece.topic, piece.partition.partition)
                raise CorruptBatchError(f"{where}, at or after offset {self._at}: {error}") from error
            if self._columns is None:
                self._moved[piece.partition] = (piece.next_offset, self._epoch)
                self._close_piece()
            else:
                self._row = bisect_left(self._columns.offsets, self._at)

    def _converted(self, piece: Fetched, columns: Columns, start: int) -> list[ConsumerRecord]:
        keys: Sequence[Any] = columns.keys.to_list()
        values: Sequence[Any] = columns.values.to_list()
        headers = columns.headers()
        offsets: Sequence[int] = columns.offsets
        timestamps: Sequence[int] = columns.timestamps
        if start:
            keys, values, offsets, timestamps = keys[start:], values[start:], offsets[start:], timestamps[start:]
            headers = None if headers is None else headers[start:]
        failure: DeserializationError | None = None
        for what, convert in (("key", self._key), ("value", self._value)):
            if convert is None:
                continue
            column = keys if what == "key" else values
            made: list[Any] = []
            try:
                made.extend(None if one is None else convert(piece.topic, one) for one in column)
            except Exception as error:
                # A list that is extended keeps what came before the error.
                offset = offsets[len(made)]
                where = TopicPartition(piece.topic, piece.partition.partition)
                failure = DeserializationError(
                    f"the {what} of {where} at offset {offset} cannot be deserialized "
                    f"({type(error).__name__}: {error}); seek to {offset + 1} to pass over it",
                    partition=where,
                    offset=offset,
                )
                failure.__cause__ = error
            if what == "key":
                keys = made
                values = values[: len(made)]
            else:
                values = made
                keys = keys[: len(made)]
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
