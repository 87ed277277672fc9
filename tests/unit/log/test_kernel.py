"""The kernel: varints, murmur2, and the agreement of all forms of encoding and decoding."""

import random
import sys
from array import array
from typing import Any

import pytest
from support.logs.record_codecs import FORMS, KERNELS, SOURCE, Form, load_source

from tidelog.log import kernel, kernel_bulk
from tidelog.model.errors import CorruptBatchError

every_kernel = pytest.mark.parametrize("module", KERNELS, ids=lambda module: f"compiled={module.COMPILED}")
every_form = pytest.mark.parametrize("form", FORMS, ids=lambda form: form.name)

VARINTS = {
    0: "00",
    -1: "01",
    1: "02",
    63: "7e",
    -64: "7f",
    64: "8001",
    8191: "fe7f",
    8192: "808001",
    2**31 - 1: "feffffff0f",
    -(2**31): "ffffffff0f",
    2**63 - 1: "feffffffffffffffff01",
    -(2**63): "ffffffffffffffffff01",
}


def columns(result: Any) -> Any:
    """The result of a form of decoding, comparable."""
    offsets, stamps, keys, values, headers = result
    flat = [None if layout is None else _flat(layout) for layout in (keys, values, headers)]
    return offsets.tolist(), stamps.tolist(), flat


def _flat(layout: Any) -> Any:
    ends, data, present = layout
    return ends.tolist(), bytes(data), None if present is None else bytes(present)


@every_kernel
@pytest.mark.parametrize(("value", "expected"), VARINTS.items())
def test_a_varint_is_zigzag_with_seven_bits_to_a_byte(module: Any, value: int, expected: str) -> None:
    assert module.varint(value).hex() == expected
    assert kernel_bulk.varint(value).hex() == expected


@every_kernel
@pytest.mark.parametrize("value", [2**63, -(2**63) - 1])
def test_a_varint_of_more_than_64_bits_is_rejected(module: Any, value: int) -> None:
    with pytest.raises(OverflowError):
        module.varint(value)
    with pytest.raises(OverflowError):
        kernel_bulk.varint(value)


@pytest.mark.requirement("a:D-51", "a:A-04", "b:F-21", "a:D-41")
@every_kernel
@pytest.mark.parametrize(
    ("key", "expected"),
    [
        (b"21", -973932308),
        (b"foobar", -790332482),
        (b"a-little-bit-long-string", -985981536),
        (b"a-little-bit-longer-string", -1486304829),
        (b"lkjh234lh9fiuh90y23oiuhsafujhadof229phr9h19h89h8", -58897971),
        (b"abc", 479470107),
        (b"", 275646681),
    ],
)
def test_murmur2_is_that_of_the_java_clients(module: Any, key: bytes, expected: int) -> None:
    assert module.murmur2(key) == expected
    assert module.partition_of(key, 12) == (expected & 0x7FFFFFFF) % 12


@pytest.mark.filterwarnings("ignore:(read|open)_text is deprecated:DeprecationWarning")  # at the import of kafka-python
@every_kernel
def test_murmur2_agrees_with_two_other_implementations(module: Any) -> None:
    from aiokafka.partitioner import murmur2 as by_aiokafka
    from kafka.partitioner.default import murmur2 as by_kafka_python

    draw = random.Random(7)
    for size in [*range(40), 100, 1000]:
        key = draw.randbytes(size)
        ours = module.murmur2(key) & 0xFFFFFFFF
        assert ours == by_aiokafka(key) & 0xFFFFFFFF
        assert ours == by_kafka_python(key) & 0xFFFFFFFF


@every_kernel
def test_a_partition_is_never_negative_and_null_keys_are_left_to_the_caller(module: Any) -> None:
    # This key's hash is negative; Java's Math.abs would still leave one value negative, so the sign bit is dropped.
    assert module.murmur2(b"21") < 0
    assert module.partition_of(b"21", 7) == (-973932308 & 0x7FFFFFFF) % 7
    keys = [b"21", None, b"foobar", b""]
    places = [-1 if key is None else module.partition_of(key, 7) for key in keys]
    assert module.partitions_of(keys, 7) == array("i", places)


def random_rows(draw: random.Random, count: int) -> tuple[list[int], list[bytes | None], list[bytes | None], Any, Any]:
    """Columns of different kinds by seed: steady or not, with and without nulls, headers, gaps."""

    def column() -> list[bytes | None]:
        size_max = draw.choice([0, 3, 70, 9000])
        is_steady, null_share = draw.random() < 0.5, draw.choice([0, 0, 0.3, 1])
        return [
            None if draw.random() < null_share else draw.randbytes(size_max if is_steady else draw.randint(0, size_max))
            for _ in range(count)
        ]

    span = draw.choice([0, 1, 50, 10**5, 10**12])
    stamps = [10**12 + (row * span if draw.random() < 0.9 else draw.randint(-span, span)) for row in range(count)]
    blocks = None
    if draw.random() < 0.3:
        some = [b"\x00", b"\x02\x02a\x01", b"\x04\x02b\x04xy\x04zz\x00"]
        blocks = [draw.choice(some) for _ in range(count)]
    deltas = None
    if draw.random() < 0.3:
        deltas = sorted(draw.sample(range(count * 3 + 3), count))
    return stamps, column(), column(), blocks, deltas


@pytest.mark.parametrize("seed", range(60))
def test_all_forms_write_the_same_bytes_and_read_the_same_columns(seed: int) -> None:
    draw = random.Random(seed)
    count = draw.choice([1, 2, 9, 70, 300])
    if seed % 20 == 0:
        count = 9000
    stamps, keys, values, blocks, deltas = random_rows(draw, count)
    if count == 9000:
        keys, values = [b"k"] * count, [b"v" * 9] * count
    base = draw.choice([stamps[0], 0, -1, 2 * 10**12])
    encoded = [bytes(form.encode(stamps, keys, values, blocks, deltas, base, 5)) for form in FORMS]
    assert len(set(encoded)) == 1
    last = count - 1 if deltas is None else deltas[-1]
    data = encoded[0]
    decoded = [columns(form.decode(data, 5, len(data), count, 1000, base, last)) for form in FORMS]
    for one in decoded[1:]:
        assert one == decoded[0]
    offsets, timestamps, (key_layout, value_layout, header_layout) = decoded[0]
    assert offsets == [1000 + delta for delta in (deltas or range(count))]
    assert timestamps == stamps
    for layout, rows in ((key_layout, keys), (value_layout, values)):
        ends, piece, present = layout
        assert SOURCE.slice_rows(array("i", ends), piece, present) == rows
    assert (header_layout is not None) == (blocks is not None and set(blocks) != {b"\x00"})


@every_form
def test_columns_of_different_lengths_are_rejected(form: Form) -> None:
    good = ([1, 2], [b"a", b"b"], [b"a", b"b"], [b"\x00", b"\x00"], [0, 1])
    form.encode(*good, 0, 0)
    for number in range(5):
        bad = [list(column) for column in good]
        bad[number].pop()
        with pytest.raises(ValueError, match="columns of"):
            form.encode(*bad, 0, 0)


@every_form
def test_a_timestamp_too_far_from_the_base_is_rejected(form: Form) -> None:
    assert form.encode([2**63 - 1], [None], [None], None, None, 0, 0)
    with pytest.raises(OverflowError):
        form.encode([2**63 - 1], [None], [None], None, None, -1, 0)
    with pytest.raises(OverflowError):
        form.encode([-(2**63)], [None], [None], None, None, 1, 0)


@every_form
def test_a_timestamp_out_of_64_bits_is_corrupt(form: Form) -> None:
    data = bytes(form.encode([2**63 - 1], [None], [None], None, None, 0, 0))
    with pytest.raises(CorruptBatchError):
        form.decode(data, 0, len(data), 1, 0, 1, 0)
    low = bytes(form.encode([-1], [None], [None], None, None, 0, 0))
    with pytest.raises(CorruptBatchError):
        form.decode(low, 0, len(low), 1, 0, -(2**63), 0)


# length 8 | attributes | timestamp delta 0 | offset delta 0 | key "A" | value "B" | no headers
RECORD = "100000000241024200"
# length 11 | ... | one header, "a" = null
WITH_HEADER = "160000000241024202026101"


@pytest.mark.requirement("a:A-67")
@every_form
def test_a_record_has_the_documented_bytes(form: Form) -> None:
    assert bytes(form.encode([5], [b"A"], [b"B"], None, None, 5, 0)).hex() == RECORD
    block = kernel.encode_headers([("a", None)])
    assert bytes(form.encode([5], [b"A"], [b"B"], [block], None, 5, 0)).hex() == WITH_HEADER
    for record, headers in ((RECORD, None), (WITH_HEADER, ([0, 4], block, None))):
        data = bytes.fromhex(record)
        found = columns(form.decode(data, 0, len(data), 1, 40, 5, 0))
        assert found == ([40], [5], [([0, 1], b"A", None), ([0, 1], b"B", None), headers])


@every_form
@pytest.mark.parametrize(
    "broken",
    [
        pytest.param("", id="nothing"),
        pytest.param("1000000002410242", id="cut off"),
        pytest.param("10000000024102420000", id="a byte after the last record"),
        pytest.param("0e0000000241024200", id="length one too small"),
        pytest.param("120000000241024200", id="length one too large"),
        pytest.param("0f0000000241024200", id="negative length"),
        pytest.param("100000000341024200", id="key size -2"),
        pytest.param("100000000241034200", id="value size -2"),
        pytest.param("1000000002417e4200", id="value longer than the record"),
        pytest.param("100000007e41024200", id="key longer than the record"),
        pytest.param("100000010241024200", id="negative offset delta"),
        pytest.param("100000020241024200", id="offset delta past the last"),
        pytest.param("100000000241024201", id="negative count of headers"),
        pytest.param("10000000024102427e", id="more headers than bytes"),
        pytest.param("1400000002410242020100", id="header name of size -1"),
        pytest.param("160000000241024202026103", id="header value of size -2"),
        pytest.param("160000000241024202026102", id="header value longer than the record"),
        pytest.param("160000000241024202046101", id="header name longer than the record"),
        pytest.param("ffffffffffffffffffff01" + "00" * 8, id="varint of 11 bytes"),
        pytest.param("ffffffffffffffffff02" + "00" * 8, id="varint of 65 bits"),
        pytest.param("1000ffffffffffffffffff", id="varint that never ends"),
    ],
)
def test_a_broken_record_is_a_corrupt_batch(form: Form, broken: str) -> None:
    data = bytes.fromhex(broken)
    with pytest.raises(CorruptBatchError):
        form.decode(data, 0, len(data), 1, 0, 0, 0)


@every_form
@pytest.mark.parametrize("count", [2**31 - 1, 2, -1])
def test_an_impossible_record_count_is_rejected_before_any_allocation(form: Form, count: int) -> None:
    data = bytes.fromhex(RECORD)
    with pytest.raises(CorruptBatchError, match="do not fit"):
        form.decode(data, 0, len(data), count, 0, 0, 2**31 - 1)


@every_form
def test_offsets_must_rise(form: Form) -> None:
    data = bytes(form.encode([0], [b"A"], [b"B"], None, [3], 0, 0)) * 2
    with pytest.raises(CorruptBatchError, match="offset"):
        form.decode(data, 0, len(data), 2, 0, 0, 9)


@every_form
def test_a_run_of_equal_records_is_read_up_to_the_one_that_differs(form: Form) -> None:
    count = 200
    data = bytearray(form.encode([7] * count, [b"key"] * count, [b"value"] * count, None, None, 7, 0))
    sound = columns(form.decode(bytes(data), 0, len(data), count, 0, 7, count - 1))
    assert sound[0] == list(range(count))
    at = data.rindex(b"value") - 1
    data[at] += 2
    with pytest.raises(CorruptBatchError):
        form.decode(bytes(data), 0, len(data), count, 0, 7, count - 1)


@every_form
def test_bounds_that_are_not_in_the_data_are_the_callers_error(form: Form) -> None:
    for start, end in ((-1, 5), (3, 2), (0, 6)):
        with pytest.raises(ValueError, match="records from"):
            form.decode(b"12345", start, end, 0, 0, 0, 0)


@every_kernel
def test_headers_that_are_not_utf8_are_decoded_to_the_same_bytes(module: Any) -> None:
    block = bytes.fromhex("0204fffe046162")
    headers = module.decode_headers(block)
    assert headers == (("\udcff\udcfe", b"ab"),)
    assert module.encode_headers(headers) == block
    assert module.decode_headers(b"") == ()


def test_the_compiled_kernel_is_used_where_there_is_one() -> None:
    from tidelog.log import batch

    if kernel.COMPILED:
        assert kernel.__file__.endswith(".so")
        assert batch.encode_records is kernel.encode_loop
    else:
        assert batch.encode_records is kernel_bulk.encode_bulk


def test_the_source_runs_where_cython_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cython", None)
    module = load_source()
    assert module.COMPILED is False
    assert module.murmur2(b"foobar") == -790332482
