"""Bad bytes: a mutated or random message is decoded or malformed, never anything else, in bounded memory.

14,000 mutations in all; `FUZZ_MUTATIONS` raises the number. Each message has its own seed, its key and side; a failure
prints the number of the mutation, and `mutation(key, side, number)` makes it again.
"""

from __future__ import annotations

import os
import random
import tracemalloc
from collections import Counter
from contextlib import suppress

import pytest
from support.kafka.message_values import MESSAGES, decode, encode, full, message_class, versions_of
from support.kafka.mutations import change

from tidelog.rpc.kafka.headers import read_request_header
from tidelog.rpc.kafka.messages import APIS
from tidelog.rpc.kafka.wire import MalformedError

MUTATIONS = max(14_000, int(os.environ.get("FUZZ_MUTATIONS", "0")))
EACH = -(-MUTATIONS // len(MESSAGES))


def mutation(key: int, side: str, number: int) -> tuple[int, bytes]:
    """A version, and bytes that may be a message of it."""
    draw = random.Random(f"{key} {side} {number}")
    version = draw.choice(versions_of(key))
    cls = message_class(key, side)
    data = bytearray(encode(key, side, version, draw.choice([full(cls), cls()])))
    for _ in range(draw.choice([1, 1, 1, 3])):
        change(draw, data)
    return version, bytes(data)


@pytest.mark.parametrize(("key", "side"), MESSAGES)
def test_mutated_messages_are_decoded_or_malformed(key: int, side: str) -> None:
    seen: Counter[str] = Counter()
    for number in range(EACH):
        version, data = mutation(key, side, number)
        try:
            message = decode(key, side, version, data)
        except MalformedError:
            seen["malformed"] += 1
            continue
        except Exception as error:
            raise AssertionError(f"mutation({key}, {side!r}, {number})") from error
        seen["decoded"] += 1
        # What was taken for a message is one: it has an encoding, and that one means the same.
        again = encode(key, side, version, message)
        assert decode(key, side, version, again) == message, f"mutation({key}, {side!r}, {number})"
    assert seen["malformed"] > EACH // 20, "mutations that break nothing test nothing"


def test_mutated_headers_are_read_or_malformed() -> None:
    draw = random.Random(18)
    seen: Counter[str] = Counter()
    for number in range(5_000):
        api = APIS[draw.choice(sorted(APIS))]
        data = bytearray(api.key.to_bytes(2, "big") + draw.choice(versions_of(api.key)).to_bytes(2, "big"))
        data += bytes(4) + b"\x00\x03cli" + draw.choice([b"\x00", b"\x01\x00\x02ab", b"\x02\x00\x00\x05\x01a"])
        change(draw, data)
        try:
            header = read_request_header(bytes(data))
        except MalformedError:
            seen["malformed"] += 1
        else:
            seen["read"] += 1
            assert 0 < header.body <= len(data), number
    assert min(seen["malformed"], seen["read"]) > 500


def test_mutated_messages_never_cost_much_memory() -> None:
    """Counts and lengths up to the largest: what is allocated goes with the bytes that are there."""
    cases = [(key, side, number) for key, side in MESSAGES for number in range(0, EACH, 20)]
    for key, side, number in cases:  # decoders are compiled before anything is measured
        version, _ = mutation(key, side, number)
        decode(key, side, version, encode(key, side, version, message_class(key, side)()))
    tracemalloc.start()
    try:
        for key, side, number in cases:
            version, data = mutation(key, side, number)
            tracemalloc.reset_peak()
            before = tracemalloc.get_traced_memory()[0]
            with suppress(MalformedError):
                decode(key, side, version, data)
            peak = tracemalloc.get_traced_memory()[1] - before
            assert peak < 20_000 + 200 * len(data), f"mutation({key}, {side!r}, {number}): {peak} bytes"
    finally:
        tracemalloc.stop()
