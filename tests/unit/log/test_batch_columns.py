"""Decoding into columns, Arrow's layout, and encoding from the same columns."""

from array import array

import pytest
from support.logs.record_codecs import FORMS, Form

from tidelog.log.batch import BinaryColumn, Codec, Record, decode_columns, encode, encode_columns

MIB = 1 << 20
ROWS = [
    Record(100, 5, b"one", None, (("a", b"1"),)),
    Record(101, 6, None, b"two"),
    Record(103, 4, b"", b"", (("b", None), ("a", b""))),
]


@pytest.fixture(params=FORMS, ids=lambda form: form.name, autouse=True)
def form(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Form:
    chosen: Form = request.param
    chosen.use(monkeypatch)
    return chosen


@pytest.mark.parametrize("codec", list(Codec))
def test_columns_have_the_records(codec: Codec) -> None:
    columns = decode_columns(encode(ROWS, base_offset=100, codec=codec), decompressed_bytes_max=MIB)
    assert columns.offsets == array("q", [100, 101, 103])
    assert columns.timestamps == array("q", [5, 6, 4])
    assert columns.keys.to_list() == [b"one", None, b""]
    assert list(columns.values) == [None, b"two", b""]
    assert columns.headers() == [(("a", b"1"),), (), (("b", None), ("a", b""))]
    assert columns.to_list() == ROWS
    assert columns.batch.base_offset == 100
    assert len(columns) == 3


def test_a_column_has_the_layout_of_arrow() -> None:
    columns = decode_columns(encode(ROWS, base_offset=100), decompressed_bytes_max=MIB)
    validity, ends, data = columns.keys.arrow_buffers()
    assert validity == bytes([0b101])
    assert memoryview(ends).format == "i"
    assert ends.itemsize == 4
    assert ends.tolist() == [0, 3, 3, 3]
    assert bytes(data) == b"one"
    assert columns.keys.null_count == 1
    assert memoryview(columns.offsets).nbytes == 24


@pytest.mark.parametrize("count", [1, 7, 8, 9, 64, 65])
def test_the_validity_bitmap_has_its_bits_in_arrows_order(count: int) -> None:
    rows = [None if row % 3 == 1 else b"x" for row in range(count)]
    columns = decode_columns(encode_columns([1] * count, rows, [None] * count), decompressed_bytes_max=MIB)
    bitmap = columns.keys.validity()
    if count == 1:
        assert bitmap is None
    else:
        assert bitmap is not None
        assert len(bitmap) == (count + 7) // 8
        assert [bitmap[row // 8] >> row % 8 & 1 for row in range(count)] == [int(row is not None) for row in rows]
    nulls = columns.values.validity()
    assert nulls == bytes((count + 7) // 8)


def test_a_column_without_nulls_needs_no_bitmap_and_one_without_headers_no_headers() -> None:
    columns = decode_columns(encode_columns([1, 2], [b"a", b"b"], [b"", b"c"]), decompressed_bytes_max=MIB)
    assert columns.keys.validity() is None
    assert columns.values.validity() is None
    assert columns.header_blocks is None
    assert columns.headers() is None


def test_a_column_is_a_sequence() -> None:
    column = BinaryColumn(array("i", [0, 1, 1, 3]), bytearray(b"abc"), b"\x01\x00\x01")
    assert len(column) == 3
    assert [column[0], column[1], column[2], column[-1]] == [b"a", None, b"bc", b"bc"]
    assert column[1:] == [None, b"bc"]
    assert b"bc" in column
    for row in (3, -4):
        with pytest.raises(IndexError):
            column[row]


@pytest.mark.parametrize("codec", [Codec.NONE, Codec.ZSTD])
def test_decoded_columns_are_encoded_as_they_are(codec: Codec) -> None:
    batch = encode(ROWS, base_offset=100, codec=codec)
    columns = decode_columns(batch, decompressed_bytes_max=MIB)
    again = encode_columns(
        columns.timestamps,
        columns.keys,
        columns.values,
        columns.header_blocks,
        array("i", [offset - 100 for offset in columns.offsets]),
        base_offset=100,
        codec=codec,
    )
    assert again == batch


def test_a_long_batch_with_every_width_of_offset_is_decoded() -> None:
    count = 20_000
    stamps = [1_000 + (row * 37) % 70_000 for row in range(count)]
    batch = encode_columns(stamps, [b"k"] * count, [b"%07d" % row for row in range(count)], base_timestamp=1_000)
    columns = decode_columns(batch, decompressed_bytes_max=MIB)
    assert columns.offsets == array("q", range(count))
    assert columns.timestamps == array("q", stamps)
    assert columns.values.to_list() == [b"%07d" % row for row in range(count)]
    assert columns.keys.to_list() == [b"k"] * count


def test_a_batch_without_records_has_no_rows() -> None:
    columns = decode_columns(encode([], last_offset_delta=3), decompressed_bytes_max=MIB)
    assert len(columns) == 0
    assert columns.to_list() == []
    assert columns.keys.arrow_buffers()[1].tolist() == [0]
