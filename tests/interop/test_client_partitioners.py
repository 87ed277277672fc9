"""Keys land where librdkafka puts them, by every name of its partitioners: it is asked, with its mock cluster."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import pytest
from confluent_kafka import Producer

from tidelog.client.producer.partitioners import create_partitioner

pytestmark = pytest.mark.interop

TOPIC = "keys"


def places_by_librdkafka(name: str, keys: list[bytes]) -> tuple[list[int], int]:
    """(the partition of each key, how many partitions there are)."""
    options = {"bootstrap.servers": "none", "test.mock.num.brokers": 1, "partitioner": name, "log_level": 0}
    producer: Any = Producer(options)
    count = len(producer.list_topics(TOPIC, timeout=20).topics[TOPIC].partitions)
    found: dict[bytes, int] = {}

    def on_delivery(error: Any, message: Any) -> None:
        assert error is None
        found[message.value()] = message.partition()

    for number, key in enumerate(keys):
        producer.produce(TOPIC, b"%d" % number, key=key, on_delivery=on_delivery)
    assert producer.flush(30) == 0
    return [found[b"%d" % number] for number in range(len(keys))], count


@pytest.mark.parametrize(
    "name", ["consistent", "consistent_random", "murmur2", "murmur2_random", "fnv1a", "fnv1a_random"]
)
def test_keys_go_where_librdkafka_puts_them(name: str) -> None:
    draw = random.Random(7)
    keys = [draw.randbytes(draw.randint(1, 40)) for _ in range(300)] + [b"a", bytes(range(256)), "ключ".encode()]
    theirs, count = places_by_librdkafka(name, keys)
    place = SimpleNamespace(count=count, sticky=-1)
    ours = create_partitioner(name)
    assert [ours.partition(place, key, None) for key in keys] == theirs
    assert set(theirs) == set(range(count))
