"""Fixtures of the tests of groups over the Kafka API: a module names this one in its `pytest_plugins`."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from support.groups.cluster import BROKERS, GroupCluster
from support.kafka.group_api import GroupApi


@pytest.fixture(scope="module")
def cluster() -> Iterator[GroupCluster]:
    with GroupCluster(seed=12, offsets_partitions=1, orders=4) as made:
        made.topic("others", partitions=2)
        made.shard("any")
        yield made


@pytest.fixture(scope="module")
def api(cluster: GroupCluster) -> GroupApi:
    return GroupApi(cluster, cluster.coordinator("any"))


@pytest.fixture(scope="module")
def other(cluster: GroupCluster, api: GroupApi) -> GroupApi:
    return GroupApi(cluster, next(broker for broker in BROKERS if broker != api.broker))
