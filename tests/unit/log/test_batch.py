"""Record batches: the header byte by byte, encoding and decoding, control batches, a changed codec."""

from dataclasses import replace
from struct import pack_into

import pytest
from crc32c import crc32c
from support.logs.record_codecs import FORMS, Form

from tidelog.log.batch import (
    HEADER,
    HEADER_BYTES,
    LENGTH_PREFIX_BYTES,
    BatchHeader,
    Codec,
    ControlKind,
    ControlMarker,
    Record,
    TimestampType,
    check_batch,
    decode,
    decode_columns,
    encode,
    encode_columns,
    encode_control,
    parse_control,
    read_header,
    recompress,
    seal,
    split_batches,
    stamp,
    stamp_append_time,
    validate_records,
)
from tidelog.model.errors import (
    CorruptBatchError,
    InvalidRecordError,
    RecordTooLargeError,
    UnsupportedCompressionError,
    UnsupportedMagicError,
)

MIB = 1 << 20
RECORDS = [
    Record(10, 1_000, b"k", b"v"),
    Record(11, 1_005, None, b"w", (("h", b"x"), ("h", None))),
    Record(12, 990, b"", None),
]


@pytest.fixture(params=FORMS, ids=lambda form: form.name, autouse=True)
def form(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Form:
    chosen: Form = request.param
    chosen.use(monkeypatch)
    return chosen


def changed(batch: bytes, layout: str, position: int, *values: int, reseal: bool = True) -> bytes:
    """The batch with other numbers at `position`, and by default a CRC that fits."""
    out = bytearray(batch)
    pack_into(layout, out, position, *values)
    if reseal:
        seal(out, size=len(out))
    return bytes(out)


@pytest.mark.requirement("a:A-66", "b:A-04")
def test_every_header_field_is_at_its_position() -> None:
    batch = encode(
        RECORDS,
        base_offset=10,
        leader_epoch=7,
        producer_id=2**40,
        producer_epoch=5,
        base_sequence=99,
        is_transactional=True,
    )
    body = bytes.fromhex("12000000026b027600")
    body = bytes([len(body[1:]) * 2]) + body[1:]
    assert batch[HEADER_BYTES:].startswith(body)
    expected = (
        (10).to_bytes(8, "big")
        + (len(batch) - 12).to_bytes(4, "big")
        + (7).to_bytes(4, "big")
        + b"\x02"
        + crc32c(batch[21:]).to_bytes(4, "big")
        + b"\x00\x10"
        + (2).to_bytes(4, "big")
        + (1_000).to_bytes(8, "big")
        + (1_005).to_bytes(8, "big")
        + (2**40).to_bytes(8, "big")
        + (5).to_bytes(2, "big")
        + (99).to_bytes(4, "big")
        + (3).to_bytes(4, "big")
    )
    assert batch[:HEADER_BYTES] == expected
    assert LENGTH_PREFIX_BYTES == 12
    header = check_batch(batch, size_max=MIB)
    assert header == BatchHeader(
        base_offset=10,
        size=len(batch),
        leader_epoch=7,
        attributes=0x10,
        last_offset_delta=2,
        base_timestamp=1_000,
        max_timestamp=1_005,
        producer_id=2**40,
        producer_epoch=5,
        base_sequence=99,
        count=3,
        crc=crc32c(batch[21:]),
    )
    assert (header.last_offset, header.next_offset, header.last_sequence) == (12, 13, 101)
    assert header.is_transactional
    assert header.has_producer
    assert not header.is_control
    assert header.delete_horizon_ms is None


def test_the_checksum_is_crc_32c() -> None:
    assert crc32c(b"123456789") == 0xE3069283


@pytest.mark.requirement("a:A-01", "a:A-02", "a:A-03", "a:A-06", "a:A-67")
@pytest.mark.parametrize("codec", list(Codec))
def test_decode_returns_the_encoded_records(codec: Codec) -> None:
    batch = encode(RECORDS, codec=codec, base_offset=10)
    header = check_batch(batch, size_max=MIB, from_client=True)
    assert header.codec is codec
    assert decode(batch, decompressed_bytes_max=MIB) == RECORDS


@pytest.mark.parametrize("kind", [bytes, bytearray, memoryview])
def test_a_batch_is_found_at_its_position_in_any_buffer(kind: type) -> None:
    batch = encode(RECORDS, base_offset=10)
    buffer = kind(b"before" + batch + b"after")
    assert check_batch(buffer, 6, size_max=MIB).size == len(batch)
    assert decode(buffer, 6, decompressed_bytes_max=MIB) == RECORDS
    packed = encode(RECORDS, base_offset=10, codec=Codec.LZ4)
    assert decode(kind(b"before" + packed + b"after"), 6, decompressed_bytes_max=MIB) == RECORDS


@pytest.mark.requirement("a:A-69")
def test_a_record_costs_few_bytes_beside_its_own() -> None:
    count = 1_000
    batch = encode_columns([1] * count, [None] * count, [b"v" * 100] * count)
    assert len(batch) - HEADER_BYTES - 100 * count < 10 * count


def test_a_batch_without_records_keeps_its_header_only() -> None:
    with pytest.raises(ValueError, match="last_offset_delta"):
        encode([])
    batch = encode([], last_offset_delta=4, base_offset=20, codec=Codec.ZSTD, max_timestamp=77)
    assert len(batch) == HEADER_BYTES
    header = check_batch(batch, size_max=MIB)
    assert (header.count, header.next_offset, header.max_timestamp) == (0, 25, 77)
    assert decode(batch, decompressed_bytes_max=MIB) == []
    with pytest.raises(InvalidRecordError, match="without records"):
        check_batch(batch, size_max=MIB, from_client=True)


def test_gaps_that_compaction_left_are_kept() -> None:
    kept = [RECORDS[0], RECORDS[2]]
    batch = encode(kept, base_offset=5, last_offset_delta=20, base_timestamp=500)
    header = check_batch(batch, size_max=MIB)
    assert (header.base_offset, header.next_offset, header.base_timestamp, header.count) == (5, 26, 500, 2)
    assert decode(batch, decompressed_bytes_max=MIB) == kept
    with pytest.raises(InvalidRecordError, match="last offset delta"):
        check_batch(batch, size_max=MIB, from_client=True)


@pytest.mark.parametrize(("deltas", "last"), [([1, 1], None), ([1, 0], None), ([-1, 0], None), ([0, 5], 4)], ids=str)
def test_descending_offsets_are_rejected_as_a_caller_error(deltas: list[int], last: int | None) -> None:
    with pytest.raises(ValueError, match="offset delta"):
        encode_columns([1, 1], [None, None], [b"", b""], None, deltas, last_offset_delta=last)


def test_a_delete_horizon_replaces_the_base_timestamp() -> None:
    batch = encode(RECORDS, base_offset=10, delete_horizon_ms=5_000_000)
    header = check_batch(batch, size_max=MIB)
    assert header.delete_horizon_ms == header.base_timestamp == 5_000_000
    assert decode(batch, decompressed_bytes_max=MIB) == RECORDS


def test_sequences_start_again_at_zero() -> None:
    header = read_header(encode(RECORDS, base_offset=10, producer_id=1, base_sequence=2**31 - 2))
    assert header.last_sequence == 0
    assert replace(header, base_sequence=-1).last_sequence == -1


@pytest.mark.requirement("a:A-52", "b:B-40")
def test_the_size_limit_is_on_the_batch_as_compressed() -> None:
    records = [Record(0, 1, None, b"x" * 100_000)]
    packed = encode(records, codec=Codec.GZIP)
    assert check_batch(packed, size_max=10_000).count == 1
    with pytest.raises(RecordTooLargeError):
        check_batch(encode(records), size_max=10_000)


@pytest.mark.requirement("a:A-68")
@pytest.mark.parametrize("codec", [Codec.NONE, Codec.SNAPPY])
def test_log_append_time_is_the_time_of_all_records(codec: Codec) -> None:
    batch = bytearray(b"12" + encode(RECORDS, base_offset=10, codec=codec))
    assert read_header(batch, 2).timestamp_type is TimestampType.CREATE
    stamp_append_time(batch, 123_456, position=2)
    header = check_batch(batch, 2, size_max=MIB)
    assert header.timestamp_type is TimestampType.LOG_APPEND
    assert header.max_timestamp == 123_456
    assert header.codec is codec
    found = decode(batch, 2, decompressed_bytes_max=MIB)
    assert found == [replace(record, timestamp=123_456) for record in RECORDS]
    again = encode(found, base_offset=10, timestamp_type=TimestampType.LOG_APPEND, max_timestamp=123_456)
    assert decode(again, decompressed_bytes_max=MIB) == found


def test_the_leader_stamps_offset_and_epoch_outside_of_the_crc() -> None:
    batch = bytearray(encode(RECORDS, base_offset=10))
    before = check_batch(batch, size_max=MIB)
    stamp(batch, base_offset=9_000_000_000, leader_epoch=31)
    after = check_batch(batch, size_max=MIB)
    assert after == replace(before, base_offset=9_000_000_000, leader_epoch=31)
    assert [r.offset for r in decode(batch, decompressed_bytes_max=MIB)] == [9_000_000_000 + i for i in range(3)]


@pytest.mark.parametrize("magic", [0, 1])
def test_old_message_formats_are_rejected_by_name(magic: int) -> None:
    # Offset, size, CRC, magic, attributes, key, value: shorter than the header of a batch.
    old = bytes(8) + (18).to_bytes(4, "big") + bytes(4) + bytes([magic]) + bytes(13)
    for check in (read_header, lambda buffer: check_batch(buffer, size_max=MIB), lambda b: list(split_batches(b))):
        with pytest.raises(UnsupportedMagicError, match=f"format {magic} is not taken"):
            check(old)


def test_an_unknown_magic_is_rejected() -> None:
    batch = changed(encode(RECORDS, base_offset=10), ">b", 16, 3)
    with pytest.raises(UnsupportedMagicError, match="does not exist"):
        read_header(batch)


def test_a_flipped_bit_under_the_crc_is_detected() -> None:
    batch = encode(RECORDS, base_offset=10)
    for position in range(17, len(batch)):
        broken = bytearray(batch)
        broken[position] ^= 0x10
        with pytest.raises((CorruptBatchError, UnsupportedCompressionError)):
            check_batch(broken, size_max=MIB)


def test_a_truncated_batch_is_corrupt_at_every_length() -> None:
    batch = encode(RECORDS, base_offset=10)
    for size in range(len(batch)):
        with pytest.raises(CorruptBatchError):
            check_batch(batch[:size], size_max=MIB)
        with pytest.raises(CorruptBatchError):
            decode(batch[:size], decompressed_bytes_max=MIB)


@pytest.mark.parametrize(
    ("layout", "position", "value"),
    [
        (">q", 0, -1),
        (">q", 0, 2**63 - 1),
        (">i", 8, 48),
        (">i", 8, -1),
        (">i", 8, 2**31 - 1),
        (">i", 23, -1),
        (">i", 23, 1),
        (">i", 57, -1),
        (">i", 57, 2**31 - 1),
    ],
)
def test_impossible_numbers_are_corrupt(layout: str, position: int, value: int) -> None:
    batch = changed(encode(RECORDS, base_offset=10), layout, position, value)
    with pytest.raises((CorruptBatchError, RecordTooLargeError)):
        check_batch(batch, size_max=MIB)
    with pytest.raises(CorruptBatchError):
        decode(batch, decompressed_bytes_max=MIB)


def test_a_count_that_the_bytes_cannot_hold_is_corrupt() -> None:
    batch = changed(encode(RECORDS, base_offset=10, last_offset_delta=2**31 - 1), ">i", 57, 2**31 - 1)
    with pytest.raises(CorruptBatchError, match="do not fit"):
        check_batch(batch, size_max=MIB)
    with pytest.raises(CorruptBatchError, match="do not fit"):
        decode_columns(batch, decompressed_bytes_max=MIB)


@pytest.mark.parametrize("codec", [5, 6, 7])
def test_an_unknown_codec_is_rejected(codec: int) -> None:
    batch = changed(encode(RECORDS, base_offset=10), ">h", 21, codec)
    with pytest.raises(UnsupportedCompressionError):
        check_batch(batch, size_max=MIB)
    with pytest.raises(UnsupportedCompressionError):
        decode(batch, decompressed_bytes_max=MIB)


def test_batches_that_clients_may_not_send_are_rejected() -> None:
    def refused(batch: bytes, why: str) -> None:
        check_batch(batch, size_max=MIB)
        with pytest.raises(InvalidRecordError, match=why):
            check_batch(batch, size_max=MIB, from_client=True)

    refused(encode(RECORDS, base_offset=10, producer_id=1, producer_epoch=0), "sequence -1")
    refused(encode(RECORDS, base_offset=10, producer_id=1, base_sequence=0), "epoch -1")
    refused(encode(RECORDS, base_offset=10, is_transactional=True), "without a producer id")
    marker = encode_control(
        ControlKind.COMMIT, coordinator_epoch=0, timestamp=1, producer_id=1, producer_epoch=0, base_offset=4
    )
    refused(marker, "control batches")
    sound = encode(RECORDS, base_offset=10, producer_id=1, producer_epoch=0, base_sequence=0, is_transactional=True)
    assert check_batch(sound, size_max=MIB, from_client=True).count == 3


def test_a_buffer_is_split_into_its_whole_batches() -> None:
    codecs = [Codec.NONE, Codec.SNAPPY, Codec.ZSTD]
    batches = [encode(RECORDS[: i + 1], base_offset=10, codec=codec) for i, codec in enumerate(codecs)]
    buffer = b"".join(batches)
    found = list(split_batches(buffer))
    assert [position for position, _ in found] == [0, len(batches[0]), len(batches[0]) + len(batches[1])]
    assert [header.count for _, header in found] == [1, 2, 3]
    for cut in range(len(batches[2])):
        assert len(list(split_batches(buffer[: len(buffer) - len(batches[2]) + cut]))) == 2
    assert next(split_batches(buffer, len(batches[0])))[1].count == 2
    assert list(split_batches(b"")) == []


def test_split_batches_stops_at_bytes_that_are_no_batch() -> None:
    batch = encode(RECORDS, base_offset=10)
    parts = split_batches(batch + changed(batch, ">i", 8, 20)[:40])
    assert next(parts)[0] == 0
    with pytest.raises(CorruptBatchError):
        next(parts)


@pytest.mark.parametrize("before", list(Codec))
@pytest.mark.parametrize("after", list(Codec))
def test_a_changed_codec_changes_nothing_else(before: Codec, after: Codec) -> None:
    batch = encode(RECORDS, base_offset=10, codec=before, leader_epoch=3, producer_id=8, producer_epoch=1)
    other = recompress(b"xy" + batch, after, 2, decompressed_bytes_max=MIB)
    was, now = read_header(batch), check_batch(other, size_max=MIB)
    assert now.codec is after
    assert replace(was, size=0, crc=0, attributes=0) == replace(now, size=0, crc=0, attributes=0)
    assert decode(other, decompressed_bytes_max=MIB) == RECORDS
    empty = encode([], last_offset_delta=1)
    assert len(recompress(empty, after, decompressed_bytes_max=MIB)) == HEADER_BYTES


def test_a_changed_codec_finds_broken_records() -> None:
    batch = bytearray(encode(RECORDS, base_offset=10))
    batch[HEADER_BYTES + 3] = 0x20
    seal(batch, size=len(batch))
    check_batch(batch, size_max=MIB)
    with pytest.raises(CorruptBatchError):
        recompress(batch, Codec.GZIP, decompressed_bytes_max=MIB)


def test_a_compacted_topic_rejects_records_without_a_key() -> None:
    batch = encode(RECORDS, base_offset=10, codec=Codec.LZ4)
    assert len(validate_records(batch, decompressed_bytes_max=MIB)) == 3
    with pytest.raises(InvalidRecordError, match="1 records without a key"):
        validate_records(batch, decompressed_bytes_max=MIB, needs_keys=True)
    keyed = encode([RECORDS[0], RECORDS[2]], base_offset=10)
    assert len(validate_records(keyed, decompressed_bytes_max=MIB, needs_keys=True)) == 2


@pytest.mark.parametrize("codec", list(Codec))
def test_records_over_the_decompressed_limit_are_rejected(codec: Codec) -> None:
    batch = encode([Record(0, 1, None, b"z" * 50_000)], codec=codec)
    assert decode(batch, decompressed_bytes_max=50_020)
    with pytest.raises(RecordTooLargeError):
        decode(batch, decompressed_bytes_max=50_000)


@pytest.mark.requirement("a:H-34")
@pytest.mark.parametrize("kind", [ControlKind.ABORT, ControlKind.COMMIT])
def test_the_end_of_a_transaction_is_a_control_batch(kind: ControlKind) -> None:
    batch = encode_control(
        kind, coordinator_epoch=9, timestamp=55, producer_id=3, producer_epoch=2, base_offset=70, leader_epoch=4
    )
    header = check_batch(batch, size_max=MIB)
    assert header.is_control
    assert header.is_transactional
    assert (header.producer_id, header.producer_epoch, header.base_sequence) == (3, 2, -1)
    assert (header.base_offset, header.count, header.leader_epoch, header.max_timestamp) == (70, 1, 4, 55)
    (record,) = decode(batch, decompressed_bytes_max=MIB)
    assert record.key == bytes([0, 0, 0, kind])
    assert record.value == bytes([0, 0, 0, 0, 0, 9])
    marker = parse_control(b"-" + batch, 1)
    assert marker == ControlMarker(kind, 9)
    assert marker.is_abort is (kind is ControlKind.ABORT)
    assert marker.ends_transaction


def control(key: bytes | None, value: bytes | None) -> bytes:
    return encode_columns([1], [key], [value], is_control=True)


def test_control_records_of_other_kinds_and_later_versions_are_read() -> None:
    assert parse_control(control(b"\x00\x00\x00\x02", b"")) == ControlMarker(ControlKind.LEADER_CHANGE)
    assert parse_control(control(b"\x00\x00\x7f\xff", None)) == ControlMarker(ControlKind.UNKNOWN)
    later = control(b"\x00\x01\x00\x01more", b"\x00\x01\x00\x00\x00\x05more")
    assert parse_control(later) == ControlMarker(ControlKind.COMMIT, 5)
    assert parse_control(encode([], last_offset_delta=0, is_control=True)) is None


@pytest.mark.parametrize(
    ("key", "value"),
    [(None, b""), (b"\x00\x00\x00", b""), (b"\xff\xff\x00\x01", bytes(6)), (bytes(4), None), (bytes(4), bytes(5))],
)
def test_broken_control_records_are_corrupt(key: bytes | None, value: bytes | None) -> None:
    with pytest.raises(CorruptBatchError):
        parse_control(control(key, value))


def test_data_is_no_control_batch() -> None:
    with pytest.raises(CorruptBatchError, match="not a control batch"):
        parse_control(encode(RECORDS, base_offset=10))


def test_the_header_structure_has_the_size_of_the_header() -> None:
    assert HEADER.size == HEADER_BYTES
