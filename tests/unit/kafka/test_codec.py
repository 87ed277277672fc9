"""Every message of the Kafka API in every version that we serve: what was encoded is decoded."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from support.kafka.message_values import (
    MESSAGES,
    as_carried,
    decode,
    encode,
    full,
    message_class,
    messages,
    versions_of,
)

from tidelog.rpc.kafka.messages import APIS
from tidelog.rpc.kafka.schema import FIELDS, NEVER, Kind

# What clients of today ask for, of the keys that are served.
SERVED = {0, 1, 2, 3, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17, 18, 19, 20, 21, 22, 23, 24, 25, 26, 27, 28}
SERVED |= {29, 30, 31, 32, 33, 34, 35, 36, 37, 42, 43, 44, 45, 46, 47, 48, 55, 57, 60, 61, 64, 65, 66, 68, 69, 74, 75}


@pytest.mark.requirement("a:C-04")
def test_the_tables_have_every_key_that_the_kafka_api_serves() -> None:
    assert set(APIS) == SERVED
    for key, api in APIS.items():
        assert api.key == key
        assert 0 <= api.low <= api.high
        assert api.request.__name__ == api.name + "Request"
        assert api.response.__name__ == api.name + "Response"


@pytest.mark.requirement("a:C-02")
@pytest.mark.parametrize(("key", "side"), MESSAGES)
def test_a_message_of_any_version_comes_back_as_it_was(key: int, side: str) -> None:
    versions = versions_of(key)
    tries = max(4, settings().max_examples // len(versions))
    for version in versions:
        settings(max_examples=tries)(
            given(messages(message_class(key, side), version))(_round_trip(key, side, version))
        )()


def _round_trip(key: int, side: str, version: int) -> Callable[[Any], None]:
    def check(message: Any) -> None:
        encoded = encode(key, side, version, message)
        assert decode(key, side, version, encoded) == message
        assert decode(key, side, version, memoryview(b"head" + encoded), 4) == message

    return check


@pytest.mark.parametrize(("key", "side"), MESSAGES)
def test_a_message_of_defaults_comes_back_as_it_was(key: int, side: str) -> None:
    message = message_class(key, side)()
    for version in versions_of(key):
        assert decode(key, side, version, encode(key, side, version, message)) == message, version


@pytest.mark.parametrize(("key", "side"), MESSAGES)
def test_a_version_passes_over_the_fields_that_it_does_not_carry(key: int, side: str) -> None:
    message = full(message_class(key, side))
    for version in versions_of(key):
        encoded = encode(key, side, version, message)
        got = decode(key, side, version, encoded)
        assert got == as_carried(message, version), version
        assert encode(key, side, version, got) == encoded, version


def test_defaults_are_never_shared_between_messages() -> None:
    for key, side in MESSAGES:
        cls = message_class(key, side)
        one, other = cls(), cls()
        for field in FIELDS[cls]:
            if field.kind is Kind.ARRAY and field.default is not None:
                assert getattr(one, field.name) is not getattr(other, field.name)


def test_fields_that_are_never_null_say_so_in_every_version() -> None:
    """A field that may be null from some version on is served in that version."""
    for key, side in MESSAGES:
        for field in FIELDS[message_class(key, side)]:
            if field.nullable_since != NEVER:
                assert field.nullable_since <= APIS[key].high, (key, side, field.name)
