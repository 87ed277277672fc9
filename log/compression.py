"""The codecs of record batches. Every decompressor limits its output, so a decompression bomb is rejected. Pure.

gzip    RFC 1952; several members in a row are one stream.
snappy  written in the framing of Java's snappy stream, read in that framing or as one raw block:

            0x82 "SNAPPY" 0x00 | version i32 = 1 | oldest compatible version i32 = 1 | blocks...
            block: compressed size i32, big endian | raw snappy of at most 32 KiB

        A header may come again between blocks (streams that were joined).
lz4     frames with independent blocks: Kafka's Java code cannot read linked ones. Both are read.
zstd    RFC 8878. A frame may ask for a window of up to 128 MiB, as Java producers do at their highest level.
"""

import zlib
from struct import Struct

import cramjam
import zstandard

from tidelog.log.batch_header import Buffer, Codec
from tidelog.model.errors import CorruptBatchError, RecordTooLargeError

_XERIAL_MAGIC = b"\x82SNAPPY\x00"
_XERIAL_HEADER = _XERIAL_MAGIC + bytes([0, 0, 0, 1, 0, 0, 0, 1])
_XERIAL_BLOCK_BYTES = 32 * 1024
_BLOCK_SIZE = Struct(">i")
_REPEATED_HEADER = _BLOCK_SIZE.unpack(_XERIAL_MAGIC[:4])[0]

_GZIP_WINDOW_BITS = 31
_GZIP_MEMBERS_MAX = 64
"""Writers use one. The library copies what follows a member, so very many would take quadratic time."""
_GUESS_BYTES_MIN = 64 * 1024
_OVERFLOW_WORDS = "write whole buffer"


def compress(codec: Codec, data: Buffer, level: int | None = None) -> bytes:
    """`data` compressed with `codec`, at the codec's default level unless one is passed (snappy has none)."""
    match codec:
        case Codec.NONE:
            return bytes(data)
        case Codec.GZIP:
            return bytes(cramjam.gzip.compress(data, 6 if level is None else level))
        case Codec.SNAPPY:
            return _compress_xerial(data)
        case Codec.LZ4:
            compressor = cramjam.lz4.Compressor(
                level=1 if level is None else level, content_checksum=False, block_linked=False
            )
            compressor.compress(bytes(data))  # it takes nothing else
            return bytes(compressor.finish())
        case Codec.ZSTD:
            return zstandard.ZstdCompressor(level=3 if level is None else level).compress(data)


def decompress(codec: Codec, data: Buffer, *, bytes_max: int) -> bytes:
    """The decompressed `data`.

    Raises RecordTooLargeError if that is more than `bytes_max` bytes, with little more than that in memory, and
    CorruptBatchError if it is not a complete stream of the codec.
    """
    match codec:
        case Codec.NONE:
            if len(data) > bytes_max:
                raise _too_large(codec, bytes_max)
            return bytes(data)
        case Codec.GZIP:
            return _decompress_gzip(data, bytes_max)
        case Codec.SNAPPY:
            return _decompress_snappy(memoryview(data), bytes_max)
        case Codec.LZ4:
            return _decompress_lz4(data, bytes_max)
        case Codec.ZSTD:
            return _decompress_zstd(data, bytes_max)


def _too_large(codec: Codec, bytes_max: int) -> RecordTooLargeError:
    return RecordTooLargeError(f"the {codec.name.lower()} data holds more than the limit of {bytes_max} bytes")


def _corrupt(codec: Codec, reason: object) -> CorruptBatchError:
    return CorruptBatchError(f"the {codec.name.lower()} data is broken: {reason}")


def _decompress_gzip(data: Buffer, bytes_max: int) -> bytes:
    parts: list[bytes] = []
    left = bytes_max
    rest: Buffer = data
    for _ in range(_GZIP_MEMBERS_MAX):
        member = zlib.decompressobj(_GZIP_WINDOW_BITS)
        try:
            # One byte more than allowed tells "full" from "too much"; 0 would mean no limit.
            part = member.decompress(rest, left + 1)
        except zlib.error as failure:
            raise _corrupt(Codec.GZIP, failure) from failure
        left -= len(part)
        if left < 0:
            raise _too_large(Codec.GZIP, bytes_max)
        if not member.eof:
            raise _corrupt(Codec.GZIP, "it is cut off")
        parts.append(part)
        rest = member.unused_data
        if not rest:
            return b"".join(parts) if len(parts) > 1 else part
    raise _corrupt(Codec.GZIP, f"it has more than {_GZIP_MEMBERS_MAX} members")


def _compress_xerial(data: Buffer) -> bytes:
    view = memoryview(data)
    parts = [_XERIAL_HEADER]
    for start in range(0, len(view), _XERIAL_BLOCK_BYTES):
        block = bytes(cramjam.snappy.compress_raw(view[start : start + _XERIAL_BLOCK_BYTES]))
        parts.append(_BLOCK_SIZE.pack(len(block)))
        parts.append(block)
    return b"".join(parts)


def _decompress_snappy(data: memoryview, bytes_max: int) -> bytes:
    if data[: len(_XERIAL_MAGIC)] != _XERIAL_MAGIC:
        return _decompress_snappy_block(data, bytes_max, bytes_max)
    parts: list[bytes] = []
    left = bytes_max
    # The two version numbers are not checked: some writers use the wrong byte order.
    position = len(_XERIAL_HEADER)
    while position != len(data):
        if position + _BLOCK_SIZE.size > len(data):
            raise _corrupt(Codec.SNAPPY, "it is cut off")
        size = _BLOCK_SIZE.unpack_from(data, position)[0]
        if size == _REPEATED_HEADER:
            position += len(_XERIAL_HEADER)
            continue
        position += _BLOCK_SIZE.size
        if not 0 <= size <= len(data) - position:
            raise _corrupt(Codec.SNAPPY, f"a block of {size} bytes where {len(data) - position} are left")
        part = _decompress_snappy_block(data[position : position + size], left, bytes_max)
        parts.append(part)
        left -= len(part)
        position += size
    return b"".join(parts)


def _decompress_snappy_block(data: memoryview, left: int, bytes_max: int) -> bytes:
    if not data:
        raise _corrupt(Codec.SNAPPY, "it is empty")
    try:
        # A block begins with its decompressed length, and the library holds the rest to it.
        if cramjam.snappy.decompress_raw_len(data) > left:
            raise _too_large(Codec.SNAPPY, bytes_max)
        return bytes(cramjam.snappy.decompress_raw(data))
    except cramjam.DecompressionError as failure:
        raise _corrupt(Codec.SNAPPY, failure) from failure


def _guesses(data: Buffer, bytes_max: int) -> list[int]:
    """Sizes of the output buffer to try, up to the limit: most data fits the first, a bomb costs a third more."""
    sizes = []
    size = max(_GUESS_BYTES_MIN, 8 * len(data))
    while size < bytes_max:
        sizes.append(size)
        size *= 4
    return [*sizes, bytes_max]


def _decompress_lz4(data: Buffer, bytes_max: int) -> bytes:
    for size in _guesses(data, bytes_max):
        out = bytearray(size)
        try:
            used = cramjam.lz4.decompress_into(data, out)
        except cramjam.DecompressionError as failure:
            if _OVERFLOW_WORDS not in str(failure):
                raise _corrupt(Codec.LZ4, failure) from failure
        else:
            with memoryview(out) as view:
                return bytes(view[:used])
    raise _too_large(Codec.LZ4, bytes_max)


def _decompress_zstd(data: Buffer, bytes_max: int) -> bytes:
    decompressor = zstandard.ZstdDecompressor()
    try:
        size = zstandard.get_frame_parameters(data).content_size
        if size != zstandard.CONTENTSIZE_UNKNOWN:
            # The library trusts this number and ignores any other limit.
            if size > bytes_max:
                raise _too_large(Codec.ZSTD, bytes_max)
            return decompressor.decompress(data, allow_extra_data=False)
    except zstandard.ZstdError as failure:
        raise _corrupt(Codec.ZSTD, failure) from failure
    for size in _guesses(data, bytes_max):
        try:
            return decompressor.decompress(data, max_output_size=size, allow_extra_data=False)
        except zstandard.ZstdError as failure:
            reason = failure
    # The library does not say whether the output was too long or the input too short: count.
    if _exceeds_zstd(decompressor, data, bytes_max):
        raise _too_large(Codec.ZSTD, bytes_max) from reason
    raise _corrupt(Codec.ZSTD, reason) from reason


def _exceeds_zstd(decompressor: zstandard.ZstdDecompressor, data: Buffer, bytes_max: int) -> bool:
    left = bytes_max
    try:
        with decompressor.stream_reader(data) as reader:
            while left >= 0:
                part = reader.read(_GUESS_BYTES_MIN)
                if not part:
                    return False
                left -= len(part)
    except zstandard.ZstdError:
        return False
    return True
