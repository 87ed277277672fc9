"""Errors of OffsetFetch: what an answer names, so that clients ask again."""

from __future__ import annotations

from typing import Any

import pytest
from support.groups.cluster import GroupCluster
from support.kafka.group_api import GroupApi, fetch_of, fetches_of, name_of

from tidelog.coordinator.partition_shard import Phase
from tidelog.rpc.kafka.messages import groups as messages

pytest_plugins = ["support.kafka.group_fixtures"]

UNSTABLE = {("orders", 1): ("UNSTABLE_OFFSET_COMMIT", -1), ("orders", 3): ("UNSTABLE_OFFSET_COMMIT", -1)}


def rows_of(topics: Any) -> dict[tuple[str, int], tuple[str, int]]:
    """The error and the offset of each partition."""
    return {
        (topic.name, row.partition_index): (name_of(row.error_code), row.committed_offset)
        for topic in topics
        for row in topic.partitions
    }


def fetch_as(api: GroupApi, group: str, version: int, member_id: str | None = None, epoch: int = -1) -> tuple[str, Any]:
    """The error of the group, and the rows, of a fetch of two partitions, in the form of the version."""
    if version < 8:
        answer = api.ask(fetch_of(group, ("orders", [1, 3])), version)
        return name_of(answer.error_code), rows_of(answer.topics)
    topic = messages.OffsetFetchRequestTopics(name="orders", partition_indexes=[1, 3])
    wanted = messages.OffsetFetchRequestGroup(group_id=group, member_id=member_id, member_epoch=epoch, topics=[topic])
    (answer,) = api.ask(fetches_of(wanted), version).groups
    return name_of(answer.error_code), rows_of(answer.topics)


@pytest.mark.parametrize("version", [7, 8, 9])
def test_offset_fetch_at_another_broker_names_its_partitions_so_that_librdkafka_asks_again(
    other: GroupApi, version: int
) -> None:
    assert fetch_as(other, "any", version) == ("NOT_COORDINATOR", UNSTABLE)


def test_offset_fetch_by_topic_ids_at_another_broker_names_its_partitions(
    cluster: GroupCluster, other: GroupApi
) -> None:
    topic_id = other._services.image.topic_ids["orders"].bytes
    topic = messages.OffsetFetchRequestTopics(topic_id=topic_id, partition_indexes=[1])
    (answer,) = other.ask(fetches_of(messages.OffsetFetchRequestGroup(group_id="any", topics=[topic])), 10).groups
    assert name_of(answer.error_code) == "NOT_COORDINATOR"
    assert [one.topic_id for one in answer.topics] == [topic_id]
    assert [name_of(row.error_code) for row in answer.topics[0].partitions] == ["UNSTABLE_OFFSET_COMMIT"]


@pytest.mark.parametrize(
    ("phase", "error"), [("LOADING", "COORDINATOR_LOAD_IN_PROGRESS"), ("BROKEN", "NOT_COORDINATOR")]
)
def test_offset_fetch_at_a_coordinator_that_is_not_ready_names_its_partitions(
    cluster: GroupCluster, api: GroupApi, phase: str, error: str
) -> None:
    shard = cluster.shard("any")
    shard.phase = Phase[phase]
    try:
        assert fetch_as(api, "any", 9) == (error, UNSTABLE)
    finally:
        shard.phase = Phase.LEADING


def test_offset_fetch_with_another_member_epoch_names_its_partitions(api: GroupApi) -> None:
    joined = api.ask(
        messages.ConsumerGroupHeartbeatRequest(
            group_id="stale",
            member_id="m1",
            rebalance_timeout_ms=60_000,
            subscribed_topic_names=["orders"],
            topic_partitions=[],
        )
    )
    assert fetch_as(api, "stale", 9, "m1", joined.member_epoch) == (
        "",
        {("orders", 1): ("", -1), ("orders", 3): ("", -1)},
    )
    assert fetch_as(api, "stale", 9, "m1", joined.member_epoch + 1) == ("STALE_MEMBER_EPOCH", UNSTABLE)
    assert fetch_as(api, "stale", 9, "m2", 1) == ("UNKNOWN_MEMBER_ID", UNSTABLE)


def test_offset_fetch_of_clients_that_do_not_know_unstable_offsets_has_the_error_alone(other: GroupApi) -> None:
    assert fetch_as(other, "any", 6) == ("NOT_COORDINATOR", {})


def test_offset_fetch_that_can_never_succeed_names_no_partitions(api: GroupApi) -> None:
    assert fetch_as(api, "", 9) == ("INVALID_GROUP_ID", {})
