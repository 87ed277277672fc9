"""The codecs: framings byte by byte, broken streams, and bombs."""

import gzip
import random
import subprocess
import sys
import zlib

import cramjam
import lz4.frame  # type: ignore[import-untyped]
import pytest
import zstandard

from tidelog.log.batch import Codec
from tidelog.log.compression import compress, decompress
from tidelog.model.errors import CorruptBatchError, RecordTooLargeError

PACKED = [codec for codec in Codec if codec is not Codec.NONE]
every_codec = pytest.mark.parametrize("codec", list(Codec), ids=lambda codec: codec.name.lower())
packing_codec = pytest.mark.parametrize("codec", PACKED, ids=lambda codec: codec.name.lower())

MIB = 1 << 20
TEXT = b"the same words again and again, " * 5_000
NOISE = random.Random(3).randbytes(100_000)
XERIAL_HEADER = b"\x82SNAPPY\x00\x00\x00\x00\x01\x00\x00\x00\x01"


@pytest.mark.requirement("b:B-52")
@every_codec
@pytest.mark.parametrize("data", [b"", b"a", TEXT, NOISE], ids=["nothing", "a byte", "text", "noise"])
def test_decompress_returns_the_compressed_data(codec: Codec, data: bytes) -> None:
    for kind in (bytes, bytearray, memoryview):
        packed = compress(codec, kind(data))
        assert isinstance(packed, bytes)
        assert decompress(codec, kind(packed), bytes_max=len(data)) == data
    if codec is not Codec.NONE and data is TEXT:
        assert len(packed) < len(data) // 10


@pytest.mark.parametrize("codec", [Codec.GZIP, Codec.LZ4, Codec.ZSTD])
def test_a_level_can_be_chosen(codec: Codec) -> None:
    words = [b"%d " % (number * number) for number in range(500)]
    data = b"".join(random.Random(1).choices(words, k=20_000))
    fast, small = compress(codec, data, 1), compress(codec, data, 9)
    assert len(small) < len(fast)
    assert decompress(codec, small, bytes_max=MIB) == data


@every_codec
def test_one_byte_over_the_limit_is_too_large(codec: Codec) -> None:
    for data in (TEXT, NOISE):
        packed = compress(codec, data)
        assert decompress(codec, packed, bytes_max=len(data)) == data
        with pytest.raises(RecordTooLargeError, match=f"more than the limit of {len(data) - 1} bytes"):
            decompress(codec, packed, bytes_max=len(data) - 1)


@packing_codec
def test_a_truncated_stream_is_corrupt(codec: Codec) -> None:
    packed = compress(codec, NOISE[:5_000])
    for size in [*range(1, 60), len(packed) // 2, len(packed) - 5, len(packed) - 1]:
        if codec is Codec.SNAPPY and size == len(XERIAL_HEADER):
            # The framing has no end mark: after its header a stream may stop at any block.
            assert decompress(codec, packed[:size], bytes_max=MIB) == b""
            continue
        with pytest.raises(CorruptBatchError):
            decompress(codec, packed[:size], bytes_max=MIB)


@packing_codec
def test_noise_is_not_a_stream(codec: Codec) -> None:
    for start in range(50):
        with pytest.raises((CorruptBatchError, RecordTooLargeError)):
            decompress(codec, NOISE[start : start + 500], bytes_max=MIB)
    with pytest.raises(CorruptBatchError):
        decompress(codec, b"", bytes_max=MIB)


def test_snappy_is_written_in_the_framing_of_java() -> None:
    packed = compress(Codec.SNAPPY, TEXT)
    assert packed.startswith(XERIAL_HEADER)
    position, blocks = len(XERIAL_HEADER), []
    while position < len(packed):
        size = int.from_bytes(packed[position : position + 4], "big")
        blocks.append(bytes(cramjam.snappy.decompress_raw(packed[position + 4 : position + 4 + size])))
        position += 4 + size
    assert b"".join(blocks) == TEXT
    assert {len(block) for block in blocks[:-1]} == {32 * 1024}


def test_snappy_is_read_raw_as_well_and_with_headers_in_between() -> None:
    assert decompress(Codec.SNAPPY, bytes(cramjam.snappy.compress_raw(TEXT)), bytes_max=MIB) == TEXT
    joined = compress(Codec.SNAPPY, TEXT) + compress(Codec.SNAPPY, NOISE)
    assert decompress(Codec.SNAPPY, joined, bytes_max=MIB) == TEXT + NOISE
    little_endian = XERIAL_HEADER[:8] + b"\x01\x00\x00\x00\x01\x00\x00\x00"
    assert decompress(Codec.SNAPPY, little_endian + compress(Codec.SNAPPY, TEXT)[16:], bytes_max=MIB) == TEXT


@pytest.mark.parametrize("size", [-1, -(2**31), 2**31 - 1, 100])
def test_a_snappy_block_of_an_impossible_size_is_corrupt(size: int) -> None:
    with pytest.raises(CorruptBatchError):
        decompress(Codec.SNAPPY, XERIAL_HEADER + size.to_bytes(4, "big", signed=True) + b"abc", bytes_max=MIB)


def test_the_limit_counts_all_snappy_blocks_together() -> None:
    packed = compress(Codec.SNAPPY, bytes(100 * 1024))
    with pytest.raises(RecordTooLargeError):
        decompress(Codec.SNAPPY, packed, bytes_max=99 * 1024)


def test_lz4_is_a_frame_of_independent_blocks() -> None:
    packed = compress(Codec.LZ4, TEXT)
    assert packed[:4] == b"\x04\x22\x4d\x18"
    assert packed[4] & 0b1110_0000 == 0b0110_0000, "version 1, blocks independent"
    assert lz4.frame.decompress(packed) == TEXT


@pytest.mark.parametrize(
    "options", [{"block_linked": True}, {"content_checksum": True}, {"block_size": 7}, {"store_size": False}]
)
def test_lz4_frames_of_other_kinds_are_read(options: dict[str, int]) -> None:
    assert decompress(Codec.LZ4, lz4.frame.compress(TEXT, **options), bytes_max=MIB) == TEXT


def test_gzip_members_form_one_stream_up_to_a_limit() -> None:
    packed = gzip.compress(TEXT) + gzip.compress(b"more")
    assert decompress(Codec.GZIP, packed, bytes_max=MIB) == TEXT + b"more"
    with pytest.raises(RecordTooLargeError):
        decompress(Codec.GZIP, packed, bytes_max=len(TEXT) + 3)
    with pytest.raises(CorruptBatchError, match="members"):
        decompress(Codec.GZIP, gzip.compress(b"") * 100_000, bytes_max=MIB)
    with pytest.raises(CorruptBatchError):
        decompress(Codec.GZIP, gzip.compress(TEXT) + b"garbage", bytes_max=MIB)


def test_gzip_is_read_by_the_standard_library() -> None:
    assert zlib.decompress(compress(Codec.GZIP, TEXT), wbits=31) == TEXT


def test_zstd_frames_with_and_without_their_size_are_read() -> None:
    for has_size in (True, False):
        packed = zstandard.ZstdCompressor(write_content_size=has_size).compress(TEXT)
        assert decompress(Codec.ZSTD, packed, bytes_max=len(TEXT)) == TEXT
        with pytest.raises(RecordTooLargeError):
            decompress(Codec.ZSTD, packed, bytes_max=len(TEXT) - 1)
        with pytest.raises(CorruptBatchError):
            decompress(Codec.ZSTD, packed[:-2], bytes_max=MIB)
    streamed = zstandard.ZstdCompressor(level=22, write_content_size=False).compressobj()
    packed = streamed.compress(TEXT) + streamed.flush()
    assert decompress(Codec.ZSTD, packed, bytes_max=MIB) == TEXT


BOMBS = """
import resource, sys, zlib
import cramjam, zstandard
from tidelog.log.batch import Codec
from tidelog.log.compression import decompress
from tidelog.model.errors import RecordTooLargeError

CHUNK, TIMES, LIMIT = bytes(1 << 20), 128, 1 << 20

def gzip():
    out = zlib.compressobj(9, wbits=31)
    return b"".join(out.compress(CHUNK) for _ in range(TIMES)) + out.flush()

def zstd(has_size):
    size = len(CHUNK) * TIMES if has_size else -1
    out = zstandard.ZstdCompressor(level=1).compressobj(size=size)
    return b"".join(out.compress(CHUNK) for _ in range(TIMES)) + out.flush()

def lz4():
    out = cramjam.lz4.Compressor(level=1, content_checksum=False, block_linked=False)
    parts = []
    for _ in range(TIMES):
        out.compress(CHUNK)
        parts.append(bytes(out.flush()))
    return b"".join(parts) + bytes(out.finish())

def snappy():
    block = bytes(cramjam.snappy.compress_raw(CHUNK))
    header = bytes([130]) + b"SNAPPY" + bytes([0, 0, 0, 0, 1, 0, 0, 0, 1])
    return header + (len(block).to_bytes(4, "big") + block) * TIMES

def raw_snappy():
    return bytes([255, 255, 255, 255, 15]) + bytes(100)

bombs = [
    (Codec.GZIP, gzip()), (Codec.ZSTD, zstd(True)), (Codec.ZSTD, zstd(False)), (Codec.LZ4, lz4()),
    (Codec.SNAPPY, snappy()), (Codec.SNAPPY, raw_snappy()),
]
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
for codec, bomb in bombs:
    try:
        decompress(codec, bomb, bytes_max=LIMIT)
    except RecordTooLargeError:
        pass
    else:
        sys.exit(f"{codec.name} went off")
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""


def test_decompression_bombs_are_rejected_in_little_memory() -> None:
    # In another process: Python does not count the libraries' memory, so measure the peak of the process.
    done = subprocess.run([sys.executable, "-c", BOMBS], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) < 24 * 1024, "KiB above what making the bombs took, for bombs of 128 MiB"
