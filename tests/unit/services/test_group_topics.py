"""Requests of groups reach only topics that the principal may describe."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast
from uuid import UUID

import pytest

from tidelog.coordinator.consumer_protocol import PROTOCOL_TYPE
from tidelog.metadata.image import ClusterImage, Topic
from tidelog.model.errors import ErrorCode
from tidelog.model.ids import PartitionId, TopicId
from tidelog.model.maps import Map
from tidelog.services import groups
from tidelog.services.authorization import AuthorizationFailedError, Operation, Resource, ResourceType
from tidelog.services.context import Api, RequestContext
from tidelog.services.groups import GroupService, JoinGroup, MemberHeartbeat
from tidelog.services.guard import Guard

CONTEXT = RequestContext(Api.GRPC)
OPEN, SECRET = (Topic(UUID(int=number), name, Map()) for number, name in ((1, "open"), (2, "secret")))
IMAGE = ClusterImage(
    topics=Map({topic.topic_id: topic for topic in (OPEN, SECRET)}),
    topic_ids=Map({topic.name: topic.topic_id for topic in (OPEN, SECRET)}),
)
HEARTBEAT = MemberHeartbeat(group="g", member_id="m", member_epoch=0, topics=("open", "secret"))


class NoSecrets:
    """Allows everything but the topic `secret`."""

    def __init__(self) -> None:
        self.topics: list[tuple[Operation, str]] = []

    def authorize(self, _context: RequestContext, operation: Operation, resource: Resource) -> bool:
        if resource.type is not ResourceType.TOPIC:
            return True
        self.topics.append((operation, resource.name))
        return resource.name != "secret"

    def authorize_any(self, _context: RequestContext, _operation: Operation, _kind: ResourceType) -> bool:
        return True


def group_service(authorizer: NoSecrets) -> GroupService:
    coordinator = SimpleNamespace(tasks=SimpleNamespace(keep=lambda _task: None))
    return GroupService(
        cast(Any, coordinator), cast(Any, SimpleNamespace(image=IMAGE)), cast(Any, None), guard=Guard(authorizer)
    )


async def stream(service: GroupService) -> None:
    async def receive() -> MemberHeartbeat:
        return HEARTBEAT

    async def send(answer: object) -> None:
        if isinstance(answer, Exception):
            raise answer

    await service.membership(CONTEXT, receive, send)


def join(service: GroupService) -> Any:
    request = JoinGroup(
        member_id="",
        protocol_type=PROTOCOL_TYPE,
        protocols=(("range", b"metadata"),),
        session_timeout_ms=1,
        rebalance_timeout_ms=1,
    )
    return service.join_group(CONTEXT, "g", request)


CALLS: dict[str, Callable[[GroupService], Any]] = {
    "heartbeat": lambda service: service.heartbeat(CONTEXT, HEARTBEAT),
    "membership": stream,
    "join": join,
}


@pytest.mark.parametrize("name", sorted(CALLS))
def test_a_member_may_describe_each_topic_that_it_subscribes_to(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    async def run() -> None:
        await CALLS[name](group_service(authorizer))

    monkeypatch.setattr(groups, "subscribed_topics", lambda _data: ("open", "secret"))
    authorizer = NoSecrets()
    with pytest.raises(AuthorizationFailedError) as raised:
        asyncio.run(run())
    assert raised.value.code is ErrorCode.TOPIC_AUTHORIZATION_FAILED
    assert authorizer.topics[:2] == [(Operation.DESCRIBE, "open"), (Operation.DESCRIBE, "secret")]


def test_all_offsets_of_a_group_are_those_of_topics_that_the_principal_may_describe(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    offsets = {PartitionId(TopicId(topic.topic_id), 0): topic.name for topic in (OPEN, SECRET)}
    shard = SimpleNamespace(state=SimpleNamespace(group=lambda _name: SimpleNamespace(offsets=offsets)))
    monkeypatch.setattr(
        groups, "fetch_offsets", lambda _state, _group, piece, **_: {ref: offsets[ref] for ref in piece}
    )

    async def run() -> Any:
        service = group_service(authorizer)
        monkeypatch.setattr(service, "_router", SimpleNamespace(shard_of=lambda _group: shard))
        return await service.fetch_offsets(CONTEXT, "g", None)

    authorizer = NoSecrets()
    assert asyncio.run(run()) == {PartitionId(TopicId(OPEN.topic_id), 0): "open"}
    assert {operation for operation, _ in authorizer.topics} == {Operation.DESCRIBE}
