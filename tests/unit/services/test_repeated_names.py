"""A request that names one thing many times costs no more than one that names it once."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast
from uuid import UUID

import pytest

from tidelog.metadata.config_changes import AlterConfigs, ConfigChange, ResourceChange
from tidelog.metadata.decision import Outcome, Outcomes
from tidelog.metadata.features import FeatureChange, UpdateFeatures
from tidelog.metadata.image import ClusterImage, Topic
from tidelog.metadata.partitions import PREFERRED, ElectLeaders
from tidelog.metadata.reassignments import AlterReassignments, ReassignmentTarget
from tidelog.metadata.topics import (
    AddPartitions,
    CreatedTopic,
    CreatedTopics,
    CreateTopics,
    DeleteTopics,
    NewPartitions,
    NewTopic,
)
from tidelog.model.errors import ErrorCode
from tidelog.model.maps import Map
from tidelog.services.configs import ConfigService
from tidelog.services.context import Api, RequestContext
from tidelog.services.guard import Guard
from tidelog.services.limits import RequestLimits
from tidelog.services.node import NodeAccess
from tidelog.services.replicas import ReplicaService
from tidelog.services.topics import TopicService

CONTEXT = RequestContext(api=Api.GRPC)
TOPIC_ID = UUID(int=5)
IMAGE = ClusterImage(topics=Map({TOPIC_ID: Topic(TOPIC_ID, "known", Map())}), topic_ids=Map({"known": TOPIC_ID}))
COUNT = 5_000


class Controller:
    """Accepts each change, and records how many items each request has."""

    def __init__(self) -> None:
        self.sizes: list[int] = []

    async def ask(self, _context: RequestContext, request: Any, *, timeout_ms: int) -> object:
        assert timeout_ms > 0
        if isinstance(request, CreateTopics):
            self.sizes.append(len(request.topics))
            return CreatedTopics(topics=tuple(CreatedTopic(name=topic.name) for topic in request.topics))
        if isinstance(request, DeleteTopics):
            count = len(request.names) + len(request.ids)
        else:
            items = [getattr(request, name, None) for name in ("topics", "resources", "partitions", "changes")]
            count = next(len(item) for item in items if item is not None)
        self.sizes.append(count)
        return Outcomes(items=tuple(Outcome(str(number)) for number in range(count)))


def _change(name: str) -> ResourceChange:
    change = ConfigChange(key="retention.ms", operation="set", value="1")
    return ResourceChange(resource_type="topic", resource=name, changes=(change,))


NAMES = ("once", *["often"] * COUNT)
CHANGES: dict[str, Callable[[NodeAccess], Any]] = {
    "creation": lambda node: TopicService(node).create(
        CONTEXT, CreateTopics(topics=tuple(NewTopic(name=name) for name in NAMES), validate_only=True)
    ),
    "deletion": lambda node: TopicService(node).delete(CONTEXT, DeleteTopics(names=NAMES, validate_only=True)),
    "deletion by name and id": lambda node: TopicService(node).delete(
        CONTEXT, DeleteTopics(names=("once", "known"), ids=(TOPIC_ID,) * (COUNT - 1), validate_only=True)
    ),
    "partitions": lambda node: TopicService(node).add_partitions(
        CONTEXT, AddPartitions(topics=tuple(NewPartitions(name=name, total=2) for name in NAMES), validate_only=True)
    ),
    "configs": lambda node: ConfigService(node).alter(
        CONTEXT, AlterConfigs(resources=tuple(_change(name) for name in NAMES))
    ),
    "reassignments": lambda node: ReplicaService(node).alter_reassignments(
        CONTEXT,
        AlterReassignments(
            partitions=tuple(ReassignmentTarget(topic=name, partition=0, replicas=(1,)) for name in NAMES)
        ),
    ),
    "features": lambda node: ReplicaService(node).update_features(
        CONTEXT, UpdateFeatures(changes=tuple(FeatureChange(name=name, level=1) for name in NAMES))
    ),
    "elections": lambda node: ReplicaService(node).elect_leaders(
        CONTEXT, ElectLeaders(kind=PREFERRED, partitions=tuple((name, 0) for name in NAMES))
    ),
}


def node_with(controller: Controller) -> NodeAccess:
    cache = SimpleNamespace(image=IMAGE, node=1, controller=None)
    return NodeAccess(cache=cast(Any, cache), forwarder=cast(Any, controller), limits=RequestLimits(), guard=Guard())


@pytest.mark.parametrize("name", sorted(CHANGES))
def test_repeated_rows_are_rejected_and_not_sent_to_the_controller(name: str) -> None:
    async def run() -> Any:
        return await CHANGES[name](node_with(controller))

    controller = Controller()
    first, *others = (getattr(row, "outcome", row) for row in asyncio.run(run()))
    assert controller.sizes == [1]
    assert first.error is None
    assert [row.error for row in others] == [ErrorCode.INVALID_REQUEST] * COUNT
    assert "in one request: name it once" in others[0].message
