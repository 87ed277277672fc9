"""Subscriptions and assignments as classic members write and read them."""

from __future__ import annotations

from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.groups.mixed_model import encode_subscription
from support.kafka.group_api import subscription

from tidelog.coordinator.consumer_protocol import (
    Assignment,
    Subscription,
    encode_assignment,
    parse_assignment,
    parse_subscription,
)
from tidelog.model.errors import InvalidRequestError

OWNED = {"a": [0, 3], "b": [7]}


def test_a_subscription_is_read_in_each_of_its_versions() -> None:
    assert parse_subscription(subscription("a", "b")) == Subscription(("a", "b"))
    owned = (("a", (0, 3)), ("b", (7,)))
    first = encode_subscription(["a"], OWNED)
    assert parse_subscription(first) == Subscription(("a",), owned)
    second = b"\x00\x02" + first[2:] + (5).to_bytes(4, "big")
    assert parse_subscription(second) == Subscription(("a",), owned)
    third = b"\x00\x03" + second[2:] + b"\x00\x02r1"
    assert parse_subscription(third) == Subscription(("a",), owned, "r1")
    newer = b"\x00\x09" + third[2:] + b"something"
    assert parse_subscription(newer) == Subscription(("a",), owned, "r1")
    without_rack = b"\x00\x03" + second[2:] + b"\xff\xff"
    assert parse_subscription(without_rack).rack == ""


def test_an_assignment_survives_its_coding() -> None:
    data = encode_assignment({"b": [7], "a": [3, 0]})
    assert parse_assignment(data) == Assignment((("a", (0, 3)), ("b", (7,))))
    assert parse_assignment(b"") == Assignment(())
    assert parse_assignment(data[:-4] + b"\x00\x00\x00\x02hi").user_data == b"hi"


def test_an_assignment_is_read_by_other_implementations() -> None:
    from aiokafka.coordinator.protocol import ConsumerProtocolMemberAssignment

    read = ConsumerProtocolMemberAssignment.decode(encode_assignment({"b": [7], "a": [3, 0]}))
    assert [(topic, list(numbers)) for topic, numbers in read.assignment] == [("a", [0, 3]), ("b", [7])]


@given(st.binary(max_size=60), st.integers(0, 40))
def test_malformed_bytes_are_refused_and_break_nothing(data: bytes, cut: int) -> None:
    for parse in (parse_subscription, parse_assignment):
        for attempt in (data, encode_subscription(["a"], OWNED)[:cut], b"\x00\x00\x7f\xff\xff\xff" + data):
            with suppress(InvalidRequestError):  # any other error fails
                parse(attempt)


def test_a_count_beyond_the_bytes_is_refused_before_anything_is_read() -> None:
    with pytest.raises(InvalidRequestError, match="items"):
        parse_subscription(b"\x00\x00\x7f\xff\xff\xff")
    with pytest.raises(InvalidRequestError, match="bytes"):
        parse_subscription(b"\x00\x00\x00\x00\x00\x01\x7f\xffabc")
