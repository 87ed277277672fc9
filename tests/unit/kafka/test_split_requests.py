"""Requests that become several decisions of the controller: they have one deadline, and one outcome for each item."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from support.kafka.cluster import KafkaCluster

from tidelog.rpc.kafka import cluster as cluster_handlers
from tidelog.rpc.kafka import configs, messages, topics
from tidelog.rpc.kafka.api import Api
from tidelog.rpc.kafka.messages.cluster import ElectLeadersRequest, ElectLeadersTopicPartitions
from tidelog.rpc.kafka.messages.configs import IncrementalAlterConfigsRequest, IncrementalAlterConfigsResource
from tidelog.rpc.kafka.messages.topics import (
    CreatableTopic,
    CreatePartitionsRequest,
    CreatePartitionsTopic,
    CreateTopicsRequest,
    DeleteTopicsRequest,
    DeleteTopicState,
)

COUNT = 450
TIMEOUT_MS = 3_000
NAMES = [f"topic-{number}" for number in range(COUNT)]


@pytest.fixture(scope="module")
def cluster() -> Iterator[KafkaCluster]:
    """A broker without a quorum."""
    with KafkaCluster(43, topics.HANDLERS | configs.HANDLERS | cluster_handlers.HANDLERS, brokers=(11,)) as made:
        for node in sorted(made.controllers)[:2]:
            made.kill(node)
        yield made


@pytest.mark.parametrize(
    ("api", "request_", "most_s"),
    [
        (
            messages.CREATE_TOPICS,
            CreateTopicsRequest(
                topics=[CreatableTopic(name=name, num_partitions=1, replication_factor=1) for name in NAMES],
                timeout_ms=TIMEOUT_MS,
            ),
            TIMEOUT_MS / 1000,
        ),
        (
            messages.DELETE_TOPICS,
            DeleteTopicsRequest(topics=[DeleteTopicState(name=name) for name in NAMES], timeout_ms=TIMEOUT_MS),
            TIMEOUT_MS / 1000,
        ),
        (
            messages.CREATE_PARTITIONS,
            CreatePartitionsRequest(
                topics=[CreatePartitionsTopic(name=name, count=2) for name in NAMES], timeout_ms=TIMEOUT_MS
            ),
            TIMEOUT_MS / 1000,
        ),
        (
            messages.ELECT_LEADERS,
            ElectLeadersRequest(
                topic_partitions=[ElectLeadersTopicPartitions(topic=name, partitions=[*range(5)]) for name in NAMES],
                timeout_ms=TIMEOUT_MS,
            ),
            TIMEOUT_MS / 1000,
        ),
        (
            messages.INCREMENTAL_ALTER_CONFIGS,
            IncrementalAlterConfigsRequest(
                resources=[
                    IncrementalAlterConfigsResource(resource_type=configs.TOPIC, resource_name=name) for name in NAMES
                ]
            ),
            30,
        ),
    ],
    ids=["create topics", "delete topics", "create partitions", "elect leaders", "alter configs"],
)
def test_large_request_without_a_quorum_is_answered_within_its_timeout(
    cluster: KafkaCluster, api: Api[Any, Any], request_: object, most_s: float
) -> None:
    """Each piece had the whole timeout for itself: a thousand topics waited for minutes, and went on when the client
    had long asked again."""
    began_s = cluster.now_s()
    answer = cluster.send(api, request_, timeout_s=1_000)
    assert cluster.now_s() - began_s < most_s + 2
    rows = getattr(answer, "topics", None) or getattr(answer, "responses", None) or getattr(answer, "results", None)
    if rows is None:
        assert answer.error_code != 0
    else:
        assert len(rows) == COUNT
        assert all(row.error_code for row in rows)
