"""Several batches decoded into the same columns give the joined columns of each."""

import random
from array import array
from itertools import accumulate, pairwise
from typing import Any

import pytest
from support.logs.record_codecs import KERNELS

from tidelog.model.errors import CorruptBatchError

every_kernel = pytest.mark.parametrize("module", KERNELS, ids=lambda module: f"compiled={module.COMPILED}")

Row = tuple[bytes | None, bytes | None, bytes]


def some_rows(draw: random.Random, *, has_headers: bool) -> list[Row]:
    def field() -> bytes | None:
        return None if draw.random() < 0.2 else draw.randbytes(draw.choice([0, 1, 70, 300]))

    blocks = [b"\x00", b"\x02\x02a\x01"] if has_headers else [b"\x00"]
    return [(field(), field(), draw.choice(blocks)) for _ in range(draw.choice([0, 1, 5, 200]))]


def written(module: Any, rows: list[Row], stamp: int) -> bytes:
    keys, values, blocks = (list(column) for column in zip(*rows, strict=True)) if rows else ([], [], [])
    return bytes(module.encode_loop([stamp + n for n in range(len(rows))], keys, values, blocks, None, stamp, 0))


def read(module: Any, found: Any) -> list[tuple[int, int, bytes | None, bytes | None, bytes]]:
    offsets, stamps, keys, values, headers = found
    blocks = [b""] * len(offsets) if headers is None else module.slice_rows(*headers)
    return list(zip(offsets, stamps, module.slice_rows(*keys), module.slice_rows(*values), blocks, strict=True))


@every_kernel
@pytest.mark.parametrize("seed", range(20))
def test_a_run_is_its_batches_joined(module: Any, seed: int) -> None:
    draw = random.Random(seed)
    batches = [some_rows(draw, has_headers=seed % 2 == 0) for _ in range(draw.randint(1, 6))]
    gap = b"header" * draw.choice([0, 1, 10])
    bodies = [written(module, rows, 10**12 + number) for number, rows in enumerate(batches)]
    ends = list(accumulate((len(gap) + len(body) for body in bodies), initial=0))
    data = b"".join(gap + body for body in bodies)
    spans = [
        (start + len(gap), end, len(rows), 1000 * number, 10**12 + number, 999)
        for number, ((start, end), rows) in enumerate(zip(pairwise(ends), batches, strict=True))
    ]
    found = read(module, module.decode_run(data, spans))
    apart = [row for span in spans for row in read(module, module.decode_loop(data, *span))]
    assert [(*row[:4], row[4] or b"") for row in found] == [(*row[:4], row[4] or b"") for row in apart]
    assert [row[2:4] for row in found] == [row[:2] for rows in batches for row in rows]
    assert [row[0] for row in found] == [1000 * at + n for at, rows in enumerate(batches) for n in range(len(rows))]


@every_kernel
def test_a_column_has_nulls_only_if_a_batch_of_the_run_has_one(module: Any) -> None:
    body = written(module, [(None, b"v", b"\x00")], 5)
    (_, _, keys, values, headers) = module.decode_run(body * 2, [(0, len(body), 1, 0, 5, 0), at_second(body)])
    assert bytes(keys[2]) == b"\x00\x00"
    assert values[2] is None
    assert headers is None


def at_second(body: bytes) -> tuple[int, int, int, int, int, int]:
    return len(body), 2 * len(body), 1, 1, 5, 0


@every_kernel
def test_a_run_of_nothing_has_no_rows(module: Any) -> None:
    offsets, stamps, keys, values, headers = module.decode_run(b"", [])
    assert (list(offsets), list(stamps), headers) == ([], [], None)
    assert keys[0] == values[0] == array("i", [0])


@every_kernel
def test_a_broken_batch_of_a_run_is_reported_by_its_own_rows(module: Any) -> None:
    body = written(module, [(b"k", b"v", b"\x00")] * 3, 5)
    spans = [(0, len(body), 3, 0, 5, 2), (len(body), 2 * len(body), 3, 3, 5, 2)]
    module.decode_run(body * 2, spans)
    with pytest.raises(CorruptBatchError, match="record 0 of the batch is broken: its length"):
        module.decode_run(body + b"\xff" * len(body), spans)
    with pytest.raises(CorruptBatchError, match="after the last record"):
        module.decode_run(body * 2, [spans[0], (len(body), 2 * len(body), 2, 3, 5, 2)])
    with pytest.raises(CorruptBatchError, match="do not fit"):
        module.decode_run(body * 2, [spans[0], (len(body), 2 * len(body), 1000, 3, 5, 2)])


@every_kernel
@pytest.mark.parametrize("second", [(5, 40), (30, 70), (-1, 20), (60, 50)], ids=str)
def test_spans_overlap_nothing_and_stay_within_the_data(module: Any, second: tuple[int, int]) -> None:
    body = written(module, [(b"k", b"v", b"\x00")] * 3, 5)
    assert len(body) < 60
    data = body.ljust(60)
    with pytest.raises(ValueError, match="records from"):
        module.decode_run(data, [(0, len(body), 3, 0, 5, 2), (*second, 1, 3, 5, 0)])
