"""How bytes of Kafka's protocol are broken: one bit, a cut, lengths and counts that cannot be."""

from __future__ import annotations

import random

EXTREMES = [0, 1, -1, -2, 2, 127, 128, 2**15 - 1, -(2**15), 2**31 - 1, -(2**31), 2**63 - 1]
VARINTS = [bytes([0xFF]) * n + bytes([last]) for n in (1, 4, 9) for last in (0, 1, 0x0F, 0x7F)] + [b"\x00", b"\x01"]


def change(draw: random.Random, data: bytearray) -> None:
    at = draw.randrange(len(data) + 1)
    match draw.randrange(7):
        case 0 if data:
            data[draw.randrange(len(data))] ^= 1 << draw.randrange(8)
        case 1:
            del data[at:]
        case 2:
            data[at:at] = draw.randbytes(draw.randrange(1, 20))
        case 3:
            del data[at : at + draw.randrange(1, 20)]
        case 4:
            size = draw.choice([2, 4, 8])
            data[at : at + size] = (draw.choice(EXTREMES) % 2 ** (8 * size)).to_bytes(size, "big")
        case 5:
            data[at : at + draw.randrange(3)] = draw.choice(VARINTS)
        case _:
            data[at:] = draw.randbytes(max(len(data) - at, draw.randrange(40)))
