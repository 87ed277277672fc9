"""Batches written here are read by aiokafka and kafka-python, and theirs are read here, for every codec."""

import warnings
from collections.abc import Callable
from typing import Any

import pytest
from aiokafka.record._crecords import default_records as aiokafka_records
from aiokafka.record.control_record import ABORT_MARKER, COMMIT_MARKER, ControlRecord
from support.logs.record_codecs import FORMS, Form

from tidelog.log.batch import (
    Codec,
    ControlKind,
    Record,
    TimestampType,
    check_batch,
    decode,
    encode,
    encode_control,
    parse_control,
    recompress,
    stamp_append_time,
)

with warnings.catch_warnings():
    # kafka-python reads its schemas by a deprecated function when it is imported.
    warnings.simplefilter("ignore", DeprecationWarning)
    from kafka.record import default_records as kafka_python_records

pytestmark = pytest.mark.interop

NOW = 1_700_000_000_000
MIB = 1 << 20

PLAIN = [Record(i, NOW + i, b"key-%d" % (i % 7), b"value-%d " % i * 20) for i in range(300)]
VARIED = [
    Record(0, NOW, None, None),
    Record(1, NOW - 5_000, b"", b""),
    Record(2, NOW + 9_000_000, b"k" * 200, b"v" * 70_000),
    Record(3, NOW, None, b"v", (("name", b"value"), ("name", None), ("", b""), ("größe", b"\x00\xff" * 100))),
    Record(4, NOW + 1, b"tombstone", None),
]
SAMPLES = {"plain": PLAIN, "varied": VARIED, "one": PLAIN[:1]}


@pytest.fixture(params=FORMS, ids=lambda form: form.name, autouse=True)
def form(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Form:
    chosen: Form = request.param
    chosen.use(monkeypatch)
    return chosen


def read_aiokafka(batch: bytes) -> Any:
    return aiokafka_records.DefaultRecordBatch(batch)


def read_kafka_python(batch: bytes) -> Any:
    return kafka_python_records.DefaultRecordBatch(batch)


def build_aiokafka(codec: Codec, records: list[Record], **producer: int) -> bytes:
    builder = aiokafka_records.DefaultRecordBatchBuilder(2, codec, 0, -1, -1, -1, 1 << 24)
    return _build(builder, records, producer)


def build_kafka_python(codec: Codec, records: list[Record], **producer: int) -> bytes:
    builder = kafka_python_records.DefaultRecordBatchBuilder(2, codec, False, -1, -1, -1, 1 << 24)
    if producer:
        producer["is_transactional"] = False
    return _build(builder, records, producer)


def _build(builder: Any, records: list[Record], producer: dict[str, int]) -> bytes:
    if producer:
        builder.set_producer_state(**producer)
    for record in records:
        assert builder.append(record.offset, record.timestamp, record.key, record.value, list(record.headers))
    return bytes(builder.build())


READERS: dict[str, Callable[[bytes], Any]] = {"aiokafka": read_aiokafka, "kafka-python": read_kafka_python}
BUILDERS: dict[str, Callable[..., bytes]] = {"aiokafka": build_aiokafka, "kafka-python": build_kafka_python}

every_codec = pytest.mark.parametrize("codec", list(Codec), ids=lambda codec: codec.name.lower())
every_reader = pytest.mark.parametrize("read", READERS.values(), ids=READERS.keys())
every_builder = pytest.mark.parametrize("build", BUILDERS.values(), ids=BUILDERS.keys())
every_sample = pytest.mark.parametrize("records", SAMPLES.values(), ids=SAMPLES.keys())


def as_records(batch: Any) -> list[Record]:
    return [
        Record(found.offset, found.timestamp, found.key, found.value, tuple(map(tuple, found.headers)))
        for found in batch
    ]


@pytest.mark.requirement("a:A-66")
@pytest.mark.requirement("b:B-52")
@every_codec
@every_reader
@every_sample
def test_they_read_what_is_written_here(codec: Codec, read: Callable[[bytes], Any], records: list[Record]) -> None:
    written = encode(
        [Record(r.offset + 5_000_000_000, r.timestamp, r.key, r.value, r.headers) for r in records],
        codec=codec,
        base_offset=5_000_000_000,
        leader_epoch=9,
        producer_id=77,
        producer_epoch=3,
        base_sequence=2**31 - 2,
        is_transactional=True,
    )
    theirs = read(written)
    assert theirs.validate_crc()
    assert theirs.magic == 2
    assert theirs.base_offset == 5_000_000_000
    assert theirs.next_offset == 5_000_000_000 + len(records)
    assert theirs.first_timestamp == records[0].timestamp
    assert theirs.max_timestamp == max(record.timestamp for record in records)
    assert (theirs.producer_id, theirs.producer_epoch, theirs.base_sequence) == (77, 3, 2**31 - 2)
    assert theirs.is_transactional
    assert not theirs.is_control_batch
    assert theirs.compression_type == codec
    found = as_records(theirs)
    assert [record.offset - 5_000_000_000 for record in found] == [record.offset for record in records]
    assert [(r.timestamp, r.key, r.value, r.headers) for r in found] == [
        (r.timestamp, r.key, r.value, r.headers) for r in records
    ]


@every_codec
@every_builder
@every_sample
def test_what_they_write_is_read_here(codec: Codec, build: Callable[..., bytes], records: list[Record]) -> None:
    batch = build(codec, records, producer_id=12, producer_epoch=1, base_sequence=40)
    header = check_batch(batch, size_max=MIB, from_client=True)
    # They leave out the compression where it does not make the batch smaller.
    assert header.codec is codec or len(records) == 1
    assert header.count == len(records)
    assert (header.producer_id, header.producer_epoch, header.base_sequence) == (12, 1, 40)
    assert header.last_sequence == 40 + len(records) - 1
    assert decode(batch, decompressed_bytes_max=MIB) == records


@every_builder
@every_sample
def test_without_compression_all_write_the_same_bytes(build: Callable[..., bytes], records: list[Record]) -> None:
    ours, theirs = encode(records), build(Codec.NONE, records)
    # But for the leader epoch, where a producer may write what it likes: the leader stamps it.
    assert (ours[:12], ours[16:]) == (theirs[:12], theirs[16:])


@every_codec
@every_builder
@every_reader
def test_a_changed_codec_is_read_by_them(
    codec: Codec, build: Callable[..., bytes], read: Callable[[bytes], Any]
) -> None:
    batch = recompress(build(Codec.GZIP, PLAIN), codec, decompressed_bytes_max=MIB)
    theirs = read(batch)
    assert theirs.validate_crc()
    assert theirs.compression_type == codec
    assert as_records(theirs) == PLAIN


@pytest.mark.requirement("a:A-68")
@every_codec
@every_reader
def test_log_append_time_is_read_by_them(codec: Codec, read: Callable[[bytes], Any]) -> None:
    batch = bytearray(encode(PLAIN, codec=codec))
    stamp_append_time(batch, NOW + 123_456)
    theirs = read(bytes(batch))
    assert theirs.validate_crc()
    assert theirs.timestamp_type == TimestampType.LOG_APPEND
    assert {record.timestamp for record in theirs} == {NOW + 123_456}


@pytest.mark.requirement("a:H-34")
@pytest.mark.parametrize(("kind", "marker"), [(ControlKind.COMMIT, COMMIT_MARKER), (ControlKind.ABORT, ABORT_MARKER)])
def test_markers_are_read_by_them(kind: ControlKind, marker: ControlRecord) -> None:
    batch = encode_control(kind, coordinator_epoch=4, timestamp=NOW, producer_id=6, producer_epoch=2, base_offset=90)
    theirs = read_aiokafka(batch)
    assert theirs.is_control_batch
    assert theirs.is_transactional
    (record,) = theirs
    assert ControlRecord.parse(record.key) == marker
    (other,) = read_kafka_python(batch)
    assert (other.commit, other.abort) == (kind is ControlKind.COMMIT, kind is ControlKind.ABORT)
    assert parse_control(batch) is not None


@every_reader
def test_batches_with_gaps_are_read_by_them(read: Callable[[bytes], Any]) -> None:
    kept = [PLAIN[3], PLAIN[50], PLAIN[299]]
    theirs = read(encode(kept, codec=Codec.ZSTD, base_timestamp=NOW, last_offset_delta=310))
    assert theirs.validate_crc()
    assert as_records(theirs) == kept
    assert theirs.next_offset == 311
