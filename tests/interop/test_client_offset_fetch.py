"""librdkafka and an OffsetFetch that fails for now: its consumers ask again and read.

Kafka answers such a request with an error of the group and no partitions. librdkafka 2.16 then keeps its partitions in
a list of those that were asked for, and never asks again (confluentinc/librdkafka#5586): the consumer sends heartbeats
and reads nothing, after STALE_MEMBER_EPOCH without any error to the program. Answers here name the partitions.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import confluent_kafka
import pytest
from support.interop.clients import DEADLINE_S, deadline
from support.kafka.node import KafkaNode, prepare, running

from tidelog.model.errors import TidelogError
from tidelog.model.group_errors import (
    CoordinatorLoadingError,
    CoordinatorNotAvailableError,
    NotCoordinatorError,
    StaleMemberEpochError,
)

pytestmark = [pytest.mark.interop, pytest.mark.timeout(180)]

TOPIC = "orders"
RECORDS = 10
FAILURES = 2
"""In a row: the first fetch, and the first repeat."""


def fail_first(node: KafkaNode, make: Callable[[], TidelogError]) -> list[TidelogError]:
    """The coordinator refuses the first fetches of offsets. The list has what it has refused them with."""
    refused: list[TidelogError] = []
    fetch = node.groups.fetch_offsets

    def fetch_offsets(*arguments: Any, **options: Any) -> Any:
        if len(refused) < FAILURES:
            refused.append(make())
            raise refused[-1]
        return fetch(*arguments, **options)

    node.groups.fetch_offsets = fetch_offsets  # type: ignore[method-assign]
    return refused


def read_all(port: int, protocol: str) -> list[str]:
    """Reads all records. Returns the errors that the program was given meanwhile."""
    config = {"bootstrap.servers": f"localhost:{port}", "log_level": 2}
    producer = confluent_kafka.Producer(config)
    for number in range(RECORDS):
        producer.produce(TOPIC, b"%d" % number)
    assert producer.flush(DEADLINE_S) == 0
    consumer = confluent_kafka.Consumer(
        {**config, "group.id": "readers", "group.protocol": protocol, "auto.offset.reset": "earliest"}
    )
    read: list[Any] = []
    errors: list[str] = []
    try:
        consumer.subscribe([TOPIC])
        for _ in deadline(lambda: len(read) == RECORDS, f"{RECORDS} records are read", timeout_s=2 * DEADLINE_S):
            for message in consumer.consume(RECORDS, 0.2):
                error = message.error()
                if error is None:
                    read.append(message.value())
                else:
                    errors.append(str(error))
    finally:
        consumer.close()
    return errors


@pytest.mark.parametrize("protocol", ["consumer", "classic"])
@pytest.mark.parametrize(
    "make",
    [
        pytest.param(lambda: NotCoordinatorError("moved", coordinator=2), id="not-coordinator"),
        pytest.param(lambda: CoordinatorNotAvailableError("nobody leads"), id="not-available"),
        pytest.param(lambda: CoordinatorLoadingError("it reads"), id="loading"),
        pytest.param(lambda: StaleMemberEpochError("older"), id="stale-epoch"),
    ],
)
def test_librdkafka_fetches_offsets_again_after_a_transient_error(
    protocol: str, make: Callable[[], TidelogError], tmp_path: Path
) -> None:
    config = prepare(tmp_path, {"auto.create.topics.enable": True})

    async def main() -> None:
        async with running(config) as node:
            refused = fail_first(node, make)
            errors = await asyncio.get_running_loop().run_in_executor(None, read_all, node.port, protocol)
            assert len(refused) == FAILURES, "it was refused, and has asked again"
            assert errors == []

    asyncio.run(main())
