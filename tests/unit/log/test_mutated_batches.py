"""Bad bytes: mutated batches give records or a documented error, in bounded memory, and the same by every form.

10,000 mutations in all; `FUZZ_MUTATIONS` raises the number (`make fuzz`). Each part has its own seed, printed as the
test's name; a failure also prints the number of the mutation, and `mutation(seed, number)` makes it again.
"""

import os
import random
import tracemalloc
from collections import Counter
from collections.abc import Callable
from struct import pack_into

import pytest
from support.logs.record_codecs import FORMS

from tidelog.log.batch import (
    HEADER_BYTES,
    Codec,
    ControlKind,
    Record,
    check_batch,
    decode,
    decode_columns,
    encode,
    encode_control,
    parse_control,
    recompress,
    seal,
    split_batches,
    stamp_append_time,
    validate_records,
)
from tidelog.log.compression import compress, decompress
from tidelog.model.errors import (
    CorruptBatchError,
    InvalidRecordError,
    RecordTooLargeError,
    TidelogError,
    UnsupportedCompressionError,
    UnsupportedMagicError,
)

PARTS = 10
MUTATIONS = max(10_000, int(os.environ.get("FUZZ_MUTATIONS", "0")))
LIMIT = 64 * 1024
DOCUMENTED = (
    CorruptBatchError,
    InvalidRecordError,
    RecordTooLargeError,
    UnsupportedCompressionError,
    UnsupportedMagicError,
)
EXTREMES = [0, 1, -1, 2, 7, 127, 128, 2**15, 2**31 - 1, -(2**31), 2**31 - 13, 2**62, 2**63 - 1, -(2**63)]
NUMBERS = {"length": (8, 4), "delta": (23, 4), "base": (27, 8), "max": (35, 8), "producer": (43, 8), "count": (57, 4)}
VARINTS = [bytes([0xFF]) * n + bytes([last]) for n in (1, 4, 9, 10) for last in (0, 1, 0x7F)] + [b"\x01", b"\x03"]


def corpus() -> list[bytes]:
    draw = random.Random(11)
    steady = [Record(i, 1_000 + i, b"key-%02d" % i, b"value" * 3) for i in range(20)]
    varied = [
        Record(
            i * 2,
            draw.randrange(10**12),
            draw.choice([None, b"", draw.randbytes(9)]),
            draw.choice([None, draw.randbytes(draw.randrange(90))]),
            tuple((f"h{n}", draw.choice([None, b"x" * n])) for n in range(draw.randrange(3))),
        )
        for i in range(12)
    ]
    batches = []
    for codec in Codec:
        batches.append(encode(steady, codec=codec, producer_id=4, producer_epoch=0, base_sequence=5))
        batches.append(encode(varied, codec=codec, base_offset=0, is_transactional=True, producer_id=9))
        batches.append(encode(steady[:1], codec=codec))
        # Zeros that would pack a thousandfold: more than the limit below.
        batches.append(encode([Record(0, 1, None, bytes(10 * LIMIT))], codec=codec))
    batches.append(encode([], last_offset_delta=7))
    return batches + [
        encode_control(kind, coordinator_epoch=1, timestamp=9, producer_id=4, producer_epoch=0)
        for kind in (ControlKind.COMMIT, ControlKind.ABORT)
    ]


CORPUS = corpus()
SMALL = [batch for batch in CORPUS if len(batch) < LIMIT]


def flip_bits(draw: random.Random, batch: bytearray) -> None:
    for _ in range(draw.choice([1, 1, 2, 8])):
        batch[draw.randrange(len(batch))] ^= 1 << draw.randrange(8)


def change_length(draw: random.Random, batch: bytearray) -> None:
    match draw.randrange(4):
        case 0:
            del batch[draw.randrange(len(batch)) :]
        case 1:
            batch += draw.randbytes(draw.randrange(1, 100))
        case 2:
            at = draw.randrange(len(batch))
            del batch[at : at + draw.randrange(1, 20)]
        case _:
            at = draw.randrange(len(batch))
            batch[at:at] = draw.randbytes(draw.randrange(1, 20))


def set_number(draw: random.Random, batch: bytearray) -> None:
    position, size = draw.choice(list(NUMBERS.values()))
    value = draw.choice(EXTREMES) + draw.choice([0, 0, 1, -1])
    batch[position : position + size] = (value % 2 ** (8 * size)).to_bytes(size, "big")


def set_attributes(draw: random.Random, batch: bytearray) -> None:
    pack_into(">h", batch, 21, draw.choice([draw.randrange(128), draw.randrange(-(2**15), 2**15)]))


def put_varint(draw: random.Random, batch: bytearray) -> None:
    if len(batch) > HEADER_BYTES:
        at = draw.randrange(HEADER_BYTES, len(batch))
        batch[at : at + draw.randrange(3)] = draw.choice(VARINTS)


def put_noise(draw: random.Random, batch: bytearray) -> None:
    at = draw.randrange(len(batch))
    batch[at:] = draw.randbytes(len(batch) - at)


def mutate_inside(draw: random.Random, batch: bytearray) -> None:
    """Mutate the records of a compressed batch before compression, so that the inner decoder reads them."""
    codec = Codec(batch[22] & 7)
    body = bytearray(decompress(codec, bytes(batch[HEADER_BYTES:]), bytes_max=11 * LIMIT))
    if body:
        draw.choice([flip_bits, change_length, put_noise])(draw, body)
        batch[HEADER_BYTES:] = compress(codec, bytes(body))


MUTATIONS_OF_A_BATCH: list[Callable[[random.Random, bytearray], None]] = [
    flip_bits,
    change_length,
    set_number,
    set_attributes,
    put_varint,
    put_noise,
    mutate_inside,
]


def mutation(seed: int, number: int) -> bytes:
    draw = random.Random(f"{seed}/{number}")
    batch = bytearray(draw.choice(CORPUS if draw.random() < 0.1 else SMALL))
    kind = draw.choice(MUTATIONS_OF_A_BATCH)
    kind(draw, batch)
    if kind is not mutate_inside and draw.random() < 0.2 and len(batch) >= HEADER_BYTES:
        draw.choice(MUTATIONS_OF_A_BATCH[:-1])(draw, batch)
    if draw.random() < 0.8 and len(batch) >= HEADER_BYTES:
        if draw.random() < 0.8 and kind is not set_number:
            pack_into(">i", batch, 8, len(batch) - 12)
        seal(batch, size=len(batch))
    return bytes(batch)


def outcome(work: Callable[[], object]) -> object:
    """The result of a call: a value, or the class of a documented error; anything else is raised."""
    try:
        return work()
    except DOCUMENTED as error:
        return type(error)


def exercise(batch: bytes, patch: pytest.MonkeyPatch) -> type[TidelogError] | None:
    """Calls everything that takes bytes from outside. Returns the error of decoding, if any."""
    checked = outcome(lambda: check_batch(batch, size_max=LIMIT, from_client=True))
    outcome(lambda: list(split_batches(batch)))
    decoded: list[object] = []
    for form in FORMS:
        form.use(patch)
        decoded.append(outcome(lambda: decode(batch, decompressed_bytes_max=LIMIT)))
    assert all(one == decoded[0] for one in decoded), "all forms agree"
    outcome(lambda: parse_control(batch))
    outcome(lambda: validate_records(batch, decompressed_bytes_max=LIMIT, needs_keys=True))
    again = outcome(lambda: recompress(batch, Codec.LZ4, decompressed_bytes_max=LIMIT))
    if isinstance(again, bytes):
        assert decode(again, decompressed_bytes_max=LIMIT) == decoded[0]
    outcome(lambda: stamp_append_time(bytearray(batch), 5))
    if isinstance(decoded[0], list):
        columns = decode_columns(batch, decompressed_bytes_max=LIMIT)
        assert len(columns) == len(decoded[0]) == columns.batch.count
        return None
    assert isinstance(decoded[0], type)
    assert issubclass(decoded[0], TidelogError)
    assert decoded[0] is not UnsupportedMagicError or checked is UnsupportedMagicError
    return decoded[0]


@pytest.mark.timeout(3600 if MUTATIONS > 10_000 else 120)
@pytest.mark.parametrize("seed", range(PARTS))
def test_mutated_batches_give_records_or_a_documented_error(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: Counter[type[TidelogError] | None] = Counter()
    for number in range(MUTATIONS // PARTS):
        try:
            seen[exercise(mutation(seed, number), monkeypatch)] += 1
        except BaseException:
            print(f"mutation({seed}, {number})")
            raise
    # The mutations reach everything: a test that only ever sees a wrong CRC would prove little.
    assert set(seen) == {
        None,
        CorruptBatchError,
        RecordTooLargeError,
        UnsupportedCompressionError,
        UnsupportedMagicError,
    }
    assert seen[None] > MUTATIONS // PARTS // 20


def test_mutated_batches_take_bounded_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    # Python's own memory, which holds all that the decoders allocate by counts and sizes from the bytes; the memory of
    # the compression libraries is measured in test_compression.py.
    batches = [mutation(99, number) for number in range(500)]
    huge = bytearray(encode([Record(0, 1, None, b"")], last_offset_delta=2**31 - 1))
    pack_into(">i", huge, 57, 2**31 - 1)
    seal(huge, size=len(huge))
    batches.append(bytes(huge))
    for batch in batches[:20]:
        exercise(batch, monkeypatch)
    tracemalloc.start()
    try:
        for number, batch in enumerate(batches):
            tracemalloc.reset_peak()
            before = tracemalloc.get_traced_memory()[0]
            exercise(batch, monkeypatch)
            used = tracemalloc.get_traced_memory()[1] - before
            assert used < 20 * LIMIT + 4 * len(batch), f"mutation(99, {number}) took {used} bytes"
    finally:
        tracemalloc.stop()
