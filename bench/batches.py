"""Record batches against aiokafka's compiled builder and reader: 100-byte records, batches of half a megabyte.

Ours works on whole columns, theirs record by record; that is the point of the comparison, since both turn the same
records into the same bytes. Their reader is driven to its end without looking at the records, which is the least it
can be asked for, and then, as a second anchor, asked for the same columns. Neither side checks a CRC when it reads;
both compute it when they write. The interpreted rows run `kernel_bulk`, which is in use where nothing was compiled.
"""

import gc
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from aiokafka.record._crecords.default_records import DefaultRecordBatch, DefaultRecordBatchBuilder

from bench.harness import Result, at_least
from tidelog.log import batch, kernel, kernel_bulk
from tidelog.log.batch import Codec, check_batch, decode_columns, encode_columns, partitions_of

RECORDS = 5_000
VALUE_BYTES = 100
ROUNDS = 150
BATCH_BYTES_MAX = 1 << 20
NOW = 1_700_000_000_000

BUILDER = "aiokafka's compiled builder"
READER = "aiokafka's compiled reader"
COLLECTED = "the same, records gathered into lists"

Encode = Callable[..., bytearray]
Decode = Callable[..., Any]


def alternate(*works: Callable[[], object], rounds: int = ROUNDS) -> tuple[float, ...]:
    """Least CPU time of each contestant, called in turn.

    CPU time and many short calls, unlike the harness's: this is work of one thread without any IO, and on a busy
    machine a wall clock would mostly measure the neighbours. No collection of garbage in between, so memory is warm,
    as it is for a client at work.
    """
    gc.collect()
    gc.disable()
    try:
        best = [float("inf")] * len(works)
        for _ in range(rounds):
            for number, work in enumerate(works):
                started = time.thread_time()
                work()
                best[number] = min(best[number], time.thread_time() - started)
        return tuple(best)
    finally:
        gc.enable()


@contextmanager
def form(encode: Encode, decode: Decode) -> Iterator[None]:
    """Let batches be encoded and decoded by these two functions."""
    before = batch.encode_records, batch.decode_records
    batch.encode_records, batch.decode_records = encode, decode
    try:
        yield
    finally:
        batch.encode_records, batch.decode_records = before


def run() -> list[Result]:
    timestamps = [NOW + row for row in range(RECORDS)]
    values: list[bytes | None] = [b"%06d" % row + b"." * (VALUE_BYTES - 6) for row in range(RECORDS)]
    keys: list[bytes | None] = [None] * RECORDS

    def encode_ours() -> bytes:
        return encode_columns(timestamps, keys, values)

    def encode_theirs() -> Any:
        builder = DefaultRecordBatchBuilder(2, 0, 0, -1, -1, -1, BATCH_BYTES_MAX)
        append = builder.append
        for row, (timestamp, value) in enumerate(zip(timestamps, values, strict=True)):
            append(row, timestamp, None, value, [])
        return builder.build()

    encoded = encode_ours()
    # But for the leader epoch, where a producer may write what it likes.
    assert encoded[16:] == encode_theirs()[16:], "both write the same batch"

    forms: list[tuple[str, Encode, Decode, float, float]] = [
        ("interpreted", kernel_bulk.encode_bulk, kernel_bulk.decode_bulk, 0.6, 0.3)
    ]
    if kernel.COMPILED:
        forms.insert(0, ("compiled", kernel.encode_loop, kernel.decode_loop, 1.0, 1.0))
    results = []
    for name, encode, decode, encode_target, decode_target in forms:
        with form(encode, decode):
            ours, theirs = alternate(encode_ours, encode_theirs)
            ratio = theirs / ours
            results.append(
                at_least(
                    f"encode, {name}", RECORDS / ours, "records/s", target=encode_target, ratio=ratio, anchor=BUILDER
                )
            )
            results += _decoding(encoded, name, decode_target)
    return results + _codecs(timestamps, keys, values) + _keys(encoded)


def _decoding(encoded: bytes, name: str, target: float) -> list[Result]:
    def decode_ours() -> object:
        return decode_columns(encoded, decompressed_bytes_max=BATCH_BYTES_MAX)

    def decode_theirs() -> object:
        return deque(DefaultRecordBatch(encoded), maxlen=0)

    def collect_theirs() -> object:
        offsets, stamps, their_keys, their_values = [], [], [], []
        for record in DefaultRecordBatch(encoded):
            offsets.append(record.offset)
            stamps.append(record.timestamp)
            their_keys.append(record.key)
            their_values.append(record.value)
        return offsets, stamps, their_keys, their_values

    ours, theirs, gathered = alternate(decode_ours, decode_theirs, collect_theirs)
    rate, title = RECORDS / ours, f"decode into columns, {name}"
    return [
        at_least(title, rate, "records/s", target=target, ratio=theirs / ours, anchor=READER),
        Result(title, rate, "records/s", gathered / ours, COLLECTED),
    ]


def _codecs(timestamps: list[int], keys: list[bytes | None], values: list[bytes | None]) -> list[Result]:
    """Encode and decode under each codec; the ratio is how much smaller the batch is."""
    results = []
    plain = len(encode_columns(timestamps, keys, values))
    for codec in Codec:
        packed = encode_columns(timestamps, keys, values, codec=codec)

        def encode(codec: Codec = codec) -> object:
            return encode_columns(timestamps, keys, values, codec=codec)

        def decode(packed: bytes = packed) -> object:
            return decode_columns(packed, decompressed_bytes_max=BATCH_BYTES_MAX)

        writing, reading = alternate(encode, decode, rounds=10)
        label = codec.name.lower()
        results += [
            Result(f"encode, {label}", RECORDS / writing, "records/s", plain / len(packed), "size without codec"),
            Result(f"decode, {label}", RECORDS / reading, "records/s"),
        ]
    return results


def _keys(encoded: bytes) -> list[Result]:
    names: list[bytes | None] = [b"customer-%08d" % row for row in range(RECORDS)]
    placing, checking = alternate(
        lambda: partitions_of(names, 12), lambda: check_batch(encoded, size_max=BATCH_BYTES_MAX), rounds=20
    )
    return [
        Result("murmur2 of 17-byte keys", RECORDS / placing, "keys/s"),
        Result("validate a batch", len(encoded) / checking / 1e9, "GB/s"),
    ]
