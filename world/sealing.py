"""The stored form of a state-store value, which proves that it was written under this key.

    0        4                 4 + n
    +--------+-----------------+
    | CRC    | value           |     CRC-32C, big endian, over key, then value
    +--------+-----------------+

The CRC covers the key, so that a value stored under a wrong key is detected, too.
"""

from crc32c import crc32c

from tidelog.model.errors import CorruptStateError

KEY_BYTES_MAX = 255
CRC_BYTES = 4


def seal(key: bytes, value: bytes) -> bytes:
    assert 1 <= len(key) <= KEY_BYTES_MAX, f"a key has 1 to {KEY_BYTES_MAX} bytes, this one {len(key)}"
    return crc32c(value, crc32c(key)).to_bytes(CRC_BYTES, "big") + value


def unseal(key: bytes, stored: bytes, *, path: str) -> bytes:
    """Returns the value; raises `CorruptStateError`, which names the key."""
    value = stored[CRC_BYTES:]
    if len(stored) < CRC_BYTES or int.from_bytes(stored[:CRC_BYTES], "big") != crc32c(value, crc32c(key)):
        raise CorruptStateError(f"state store {path}: the value of key {key!r} fails its CRC", path=path)
    return value
