"""Batches of a fetched piece, decoded many at a time."""

from __future__ import annotations

from typing import Any
from uuid import UUID

import pytest

from tidelog.client.consumer.fetched import Fetched
from tidelog.log import kernel
from tidelog.log.batch import ControlKind, encode_columns, encode_control
from tidelog.log.batch_header import Codec, TimestampType
from tidelog.log.columns import Columns, Record
from tidelog.model.errors import CorruptBatchError
from tidelog.model.ids import PartitionId, TopicId
from tidelog.spark.batch_coalescing import columns_of

PLACE = PartitionId(TopicId(UUID(int=7)), 0)
compiled_only = pytest.mark.skipif(not kernel.COMPILED, reason="without a compiled kernel batches go one by one")


def batch(first: int, count: int, *, epoch: int = 3, stamp: int = 1_000, **fields: Any) -> bytes:
    values: list[bytes | None] = [b"v%d" % (first + at) for at in range(count)]
    keys: list[bytes | None] = [None if at % 2 else b"k" for at in range(count)]
    stamps = [stamp + at if stamp >= 0 else -1 for at in range(count)]
    return encode_columns(stamps, keys, values, base_offset=first, leader_epoch=epoch, **fields)


def piece(*batches: bytes, **more: Any) -> Fetched:
    return Fetched("t", PLACE, b"".join(batches), 0, 1 << 40, 1 << 40, 1 << 40, 0, **more)


def found(given: Fetched, *, checks: bool = True, rows_max: int = 1000, bytes_max: int = 1 << 20) -> list[Columns]:
    return list(columns_of(given, checks=checks, rows_max=rows_max, bytes_max=bytes_max))


def records(columns: list[Columns]) -> list[Record]:
    return [record for one in columns for record in one.to_list()]


MIXED = (
    batch(0, 5),
    batch(5, 5),
    batch(10, 5, codec=Codec.ZSTD),
    encode_control(
        ControlKind.COMMIT,
        coordinator_epoch=1,
        timestamp=5,
        producer_id=1,
        producer_epoch=0,
        base_offset=15,
        leader_epoch=3,
    ),
    batch(16, 5, is_transactional=True, producer_id=1, producer_epoch=0),
    batch(21, 5, timestamp_type=TimestampType.LOG_APPEND),
    batch(30, 5, epoch=4, headers=[(("a", b"1"),)] * 5),
    batch(35, 5, epoch=4),
    batch(40, 5, epoch=4, stamp=-1),
)


@pytest.mark.parametrize("checks", [True, False])
def test_the_records_are_those_of_the_batches_one_by_one(checks: bool) -> None:
    given = piece(*MIXED)
    assert records(found(given, checks=checks)) == records(list(given.batches()))


@compiled_only
def test_batches_that_are_alike_become_one() -> None:
    sizes = [(len(one), one.batch.leader_epoch, one.batch.timestamp_type) for one in found(piece(*MIXED))]
    own, broker = TimestampType.CREATE, TimestampType.LOG_APPEND
    assert sizes == [(10, 3, own), (5, 3, own), (5, 3, own), (5, 3, broker), (10, 4, own), (5, 4, own)]


@compiled_only
def test_a_control_batch_ends_no_run() -> None:
    marker = MIXED[3]
    (one,) = found(piece(batch(0, 15), marker, batch(16, 4)))
    assert list(one.offsets) == [*range(15), *range(16, 20)]


@compiled_only
def test_a_run_ends_when_it_has_rows_or_bytes_enough() -> None:
    given = piece(*(batch(10 * number, 10) for number in range(7)))
    assert [len(one) for one in found(given, rows_max=25)] == [30, 30, 10]
    assert [len(one) for one in found(given, bytes_max=1)] == [10] * 7


def test_what_was_aborted_is_left_out() -> None:
    open_one = batch(5, 5, is_transactional=True, producer_id=9, producer_epoch=0)
    given = piece(batch(0, 5), open_one, batch(10, 5), aborted=((9, 5),))
    assert [record.offset for record in records(found(given))] == [*range(5), *range(10, 15)]


@compiled_only
def test_offsets_that_do_not_rise_are_not_put_into_one_column() -> None:
    assert [list(one.offsets) for one in found(piece(batch(5, 2), batch(0, 2)))] == [[5, 6], [0, 1]]


def test_a_broken_batch_is_refused() -> None:
    whole = batch(0, 5) + batch(5, 5)
    for place in (len(whole) - 3, len(whole) // 2 + 70):
        broken = bytearray(whole)
        broken[place] ^= 1
        with pytest.raises(CorruptBatchError):
            found(piece(bytes(broken)))
    for checks in (True, False):
        with pytest.raises(CorruptBatchError):
            found(piece(whole[:-1]), checks=checks)


def test_without_a_compiled_kernel_it_is_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    given = piece(*MIXED)
    monkeypatch.setattr("tidelog.spark.batch_coalescing.IS_HERE", False)
    assert records(found(given)) == records(list(given.batches()))
    assert len(found(given)) == 8
