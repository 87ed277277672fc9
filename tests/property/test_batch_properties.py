"""Round trips of batches for any records, by every form of encoding and decoding."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.logs.record_codecs import FORMS, KERNELS

from tidelog.log import kernel_bulk
from tidelog.log.batch import (
    Codec,
    Record,
    check_batch,
    decode,
    decode_columns,
    encode,
    encode_columns,
    read_header,
    recompress,
    split_batches,
)
from tidelog.log.compression import compress, decompress
from tidelog.model.errors import CorruptBatchError, RecordTooLargeError, TidelogError

MIB = 1 << 20
INT64 = st.integers(-(2**63), 2**63 - 1)
PIECES = st.none() | st.binary(max_size=40) | st.integers(0, 300).map(lambda size: b"x" * size)
NAMES = st.text(max_size=8)
STAMPS = st.integers(-1, 2**62) | st.integers(1_600_000_000_000, 1_600_000_010_000)


@st.composite
def record_lists(draw: st.DrawFn) -> list[Record]:
    """Up to 40 records with rising offsets, some with gaps, some with headers; and now and then a run of equal ones."""
    count = draw(st.integers(1, 40))
    gaps = draw(st.lists(st.integers(1, 3) if draw(st.booleans()) else st.just(1), min_size=count, max_size=count))
    one = draw(st.none() | st.tuples(STAMPS, PIECES, PIECES))
    records, offset = [], draw(st.integers(0, 5))
    for gap in gaps:
        stamp, key, value = one if one is not None else draw(st.tuples(STAMPS, PIECES, PIECES))
        headers = draw(st.just(()) | st.lists(st.tuples(NAMES, PIECES), max_size=3).map(tuple))
        records.append(Record(offset, stamp, key, value, headers))
        offset += gap
    return records


@given(record_lists(), st.sampled_from(Codec))
def test_every_codec_restores_any_records(records: list[Record], codec: Codec) -> None:
    for form in FORMS:
        with pytest.MonkeyPatch.context() as patch:
            form.use(patch)
            encoded = encode(records, codec=codec)
            assert check_batch(encoded, size_max=MIB).last_offset == records[-1].offset
            assert decode(encoded, decompressed_bytes_max=MIB) == records
        # By the form that is in use here.
        assert decode(encoded, decompressed_bytes_max=MIB) == records
        assert encode(records, codec=codec) == encoded


@given(record_lists(), st.sampled_from(Codec), st.sampled_from(Codec))
def test_a_changed_codec_keeps_the_records(records: list[Record], before: Codec, after: Codec) -> None:
    encoded = encode(records, codec=before)
    other = recompress(encoded, after, decompressed_bytes_max=MIB)
    assert decode(other, decompressed_bytes_max=MIB) == records
    fields = {"size": 0, "crc": 0, "attributes": 0}
    assert replace(read_header(other), **fields) == replace(read_header(encoded), **fields)


@given(record_lists(), st.integers(0, 2**31 - 1))
def test_columns_encode_to_the_same_bytes(records: list[Record], leader_epoch: int) -> None:
    encoded = encode(records, leader_epoch=leader_epoch)
    columns = decode_columns(encoded, decompressed_bytes_max=MIB)
    again = encode_columns(
        columns.timestamps,
        columns.keys,
        columns.values,
        columns.header_blocks,
        list(columns.offsets),
        leader_epoch=leader_epoch,
    )
    assert again == encoded


@given(INT64)
def test_varints_are_the_same_in_every_form_and_come_back(value: int) -> None:
    encoded = {module.varint(value) for module in KERNELS} | {kernel_bulk.varint(value)}
    assert len(encoded) == 1
    (only,) = encoded
    raw, after = kernel_bulk._long_varint(only, 0)
    assert after == len(only)
    assert (raw >> 1) ^ -(raw & 1) == value


@given(st.binary(max_size=300), st.integers(0, 20))
def test_any_bytes_are_records_to_all_forms_or_to_none(data: bytes, count: int) -> None:
    outcomes: list[object] = []
    for form in FORMS:
        try:
            offsets, stamps, keys, values, headers = form.decode(data, 0, len(data), count, 0, 0, 2**31 - 1)
            layouts = [None if one is None else (one[0].tolist(), bytes(one[1])) for one in (keys, values, headers)]
            outcomes.append((offsets.tolist(), stamps.tolist(), layouts))
        except CorruptBatchError:
            outcomes.append(None)
    assert all(outcome == outcomes[0] for outcome in outcomes)


@given(st.binary(max_size=300))
def test_any_bytes_split_into_batches_or_give_an_error_of_the_catalogue(data: bytes) -> None:
    try:
        for position, header in split_batches(data):
            assert position + header.size <= len(data)
    except TidelogError:
        pass


@given(st.binary(max_size=2000), st.sampled_from(Codec), st.integers(0, 2000))
def test_no_codec_gives_more_than_its_limit(data: bytes, codec: Codec, limit: int) -> None:
    packed = compress(codec, data)
    try:
        assert decompress(codec, packed, bytes_max=limit) == data
        assert len(data) <= limit
    except RecordTooLargeError:
        assert len(data) > limit
