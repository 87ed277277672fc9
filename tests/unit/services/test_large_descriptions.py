"""Descriptions name each topic once, ask the controller in slices, and have a largest response."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any, cast

import pytest
from support.metadata.controller import Cluster

from tidelog.metadata.queries import DescribeConfigs, DescribedConfigs, DescribeTopics, describe_topics
from tidelog.metadata.topics import CreateTopics, NewTopic
from tidelog.model.errors import InvalidRequestError
from tidelog.rpc.grpc.admin import AdminHandlers
from tidelog.rpc.grpc.cluster import ClusterHandlers
from tidelog.rpc.grpc.groups import GroupsHandlers
from tidelog.rpc.v1 import admin_pb2, cluster_pb2, groups_pb2
from tidelog.services import limits, topics
from tidelog.services.cluster import ClusterService
from tidelog.services.configs import ConfigService
from tidelog.services.context import Api, RequestContext
from tidelog.services.groups import GroupDetails
from tidelog.services.guard import Guard
from tidelog.services.limits import RequestLimits
from tidelog.services.node import NodeAccess
from tidelog.services.topics import TopicService

CONTEXT = RequestContext(Api.GRPC)
NAMES = ("t-0", "t-1", "t-2")


@pytest.fixture(scope="module")
def image() -> Any:
    cluster = Cluster(brokers=3)
    cluster.ask(CreateTopics(topics=tuple(NewTopic(name=name, partitions=30, replication_factor=3) for name in NAMES)))
    return cluster.image


class World:
    """The services of one node, and a controller that records its questions."""

    def __init__(self, image: Any) -> None:
        self.questions: list[Any] = []
        self._image = image
        cache: Any = SimpleNamespace(
            image=image, node=1, controller=None, cluster_id="c", metadata_offset=1, active_controller=0
        )
        cache.stale_ms = lambda: None
        node = NodeAccess(cache=cache, forwarder=cast(Any, self), limits=RequestLimits(), guard=Guard())
        service = TopicService(node)
        services = SimpleNamespace(
            topics=service, cluster=ClusterService(node, service), configs=ConfigService(node), cache=cache
        )
        self.admin = AdminHandlers(cast(Any, services))
        self.cluster = ClusterHandlers(cast(Any, services))

    async def ask(self, _context: object, question: Any, *, timeout_ms: int) -> object:
        assert timeout_ms > 0
        self.questions.append(question)
        if isinstance(question, DescribeConfigs):
            return DescribedConfigs(entries=())
        assert isinstance(question, DescribeTopics)
        return describe_topics(self._image, question)

    def metadata(self, *names: str) -> Any:
        return asyncio.run(self.cluster.metadata(cluster_pb2.MetadataRequest(topics=names), CONTEXT)).topics

    def describe(self, *names: str, **more: Any) -> Any:
        request = admin_pb2.DescribeTopicsRequest(topics=names, **more)
        return asyncio.run(self.admin.describe_topics(request, CONTEXT)).topics


def test_each_topic_is_described_once_however_often_it_is_named(image: Any) -> None:
    world = World(image)
    topic_id = image.topic_ids["t-1"].bytes
    rows = world.describe(*["t-0", "none"] * 500, topic_ids=[topic_id] * 500)
    assert [(row.name, row.error.name) for row in rows] == [
        ("t-0", ""),
        ("none", "UNKNOWN_TOPIC_OR_PARTITION"),
        ("t-1", ""),
    ]
    assert [question.names for question in world.questions] == [("t-0", "none", "t-1")]
    assert [row.name for row in world.metadata(*["t-0", "none"] * 500)] == ["t-0", "none"]


@pytest.mark.parametrize("is_all", [False, True])
def test_the_controller_describes_few_partitions_in_one_turn(
    image: Any, is_all: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(topics, "PARTITIONS_PER_QUESTION", 60)
    world = World(image)
    rows = world.describe(all_topics=True) if is_all else world.describe(*NAMES)
    assert [(row.name, len(row.partitions)) for row in rows] == [(name, 30) for name in NAMES]
    assert [question.names for question in world.questions] == [NAMES[:2], NAMES[2:]]


def test_a_response_that_would_be_too_large_is_an_error(image: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "RESPONSE_BYTES_MAX", 100)
    world = World(image)
    for ask in (world.describe, world.metadata):
        assert len(ask("t-0")) == 1, "the first one always fits"
        with pytest.raises(InvalidRequestError, match="too large: ask for fewer topics at once"):
            ask(*NAMES)


def test_configs_of_a_resource_named_often_are_asked_for_once(image: Any) -> None:
    world = World(image)
    resource = admin_pb2.ConfigResource(type="topic", name="t-0")
    request = admin_pb2.DescribeConfigsRequest(resources=[resource] * 200)
    response = asyncio.run(world.admin.describe_configs(request, CONTEXT))
    assert [row.resource.name for row in response.resources] == ["t-0"] * 200
    assert len(world.questions) == 1


def test_descriptions_of_groups_have_the_same_limit(image: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "RESPONSE_BYTES_MAX", 5)
    service = SimpleNamespace(
        coordinator=SimpleNamespace(me=1),
        describe_group=lambda _context, group: GroupDetails(
            group=group, kind="consumer", state="empty", epoch=1, assignment_epoch=1, assignor="", members=()
        ),
    )
    request = groups_pb2.DescribeGroupsRequest(groups=["g", "g", "h"])
    response = asyncio.run(GroupsHandlers(cast(Any, service), lambda: image).describe_groups(request, CONTEXT))
    assert [(row.group, row.error.name) for row in response.groups] == [("g", ""), ("h", "INVALID_REQUEST")]
    assert "ask for fewer groups at once" in response.groups[1].error.message
