"""The group handlers of the Kafka API on a broker of the simulator: requests go in as bytes of a version, and answers
come out so.

with GroupCluster(seed=1) as cluster:
    api = GroupApi(cluster, cluster.coordinator("billing"))
    api.ask(HeartbeatRequest(group_id="billing"), version=3)
"""

from __future__ import annotations

import asyncio
import struct
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar, cast

from support.brokers.cluster import RunningBroker
from support.groups.cluster import GroupCluster
from support.kafka.server import NO_SESSIONS
from tidelog.metadata.image import ClusterImage
from tidelog.model.errors import ErrorCode, TidelogError
from tidelog.model.ids import NodeId
from tidelog.rpc.kafka.dispatch import Table, build, failure
from tidelog.rpc.kafka.entries import Entry
from tidelog.rpc.kafka.group_offsets import HANDLERS as OFFSETS
from tidelog.rpc.kafka.groups import HANDLERS as GROUPS
from tidelog.rpc.kafka.members import HANDLERS as MEMBERS
from tidelog.rpc.kafka.messages import APIS
from tidelog.rpc.kafka.messages import groups as messages
from tidelog.rpc.kafka.services import ConnectionMemory, Context, DeferredResponse, Origin
from tidelog.services.groups import GroupService
from tidelog.services.guard import Guard
from tidelog.services.limits import RequestLimits, ResponseMemory
from tidelog.services.services import BrokerServices

T = TypeVar("T")

ENTRIES: dict[int, Entry] = {**GROUPS, **OFFSETS, **MEMBERS}
TABLE = build(ENTRIES)
_BY_REQUEST = {api.request: api for api in APIS.values()}


def name_of(error_code: int) -> str:
    """Of the error; empty for none."""
    return next((one.name for one in ErrorCode if one.value.code == error_code), "") if error_code else ""


class Services:
    """As far as the handlers of groups use them."""

    def __init__(self, broker: RunningBroker) -> None:
        self._broker = broker
        self.groups = broker.groups
        self.guard = Guard()

    @property
    def image(self) -> ClusterImage:
        return self._broker.tail.image


class GroupApi:
    """Of one broker. A request without a version goes in the highest that is served."""

    table: Table = TABLE

    def __init__(self, cluster: GroupCluster, broker: int, *, listener: str = "CLIENT", **limits: int) -> None:
        self.cluster = cluster
        self.broker = broker
        self.limits = RequestLimits(**limits)
        self._services = self.services_of(cluster.brokers[NodeId(broker)])
        memory = ConnectionMemory(ResponseMemory(self.limits), self.limits)
        self._origin = Origin(
            listener=listener, peer="10.0.0.9:4711", host="10.0.0.9", memory=memory, fetch_sessions=NO_SESSIONS
        )

    def services_of(self, broker: RunningBroker) -> BrokerServices:
        return cast(BrokerServices, Services(broker))

    @property
    def groups(self) -> GroupService:
        return self._services.groups

    async def call(self, request: object, version: int | None = None, client_id: str | None = "app") -> Any:
        """On the broker's own loop."""
        api = _BY_REQUEST[type(request)]
        served = self.table[api.key]
        version = served.high if version is None else version
        data = b"".join(api.encode_request(version, request))
        context = Context(self._services, self._origin, version, 1, client_id)
        try:
            answer = await served.handle(api.decode_request(version, data), context)
            if isinstance(answer, DeferredResponse):
                later = answer
                try:
                    answer = await later.respond()
                finally:
                    later.abandon()
        except TidelogError as error:
            answer = failure(served, version, error.code, str(error))
            if answer is None:
                raise
        return api.decode_response(version, b"".join(api.encode_response(version, answer)))

    def ask(self, request: object, version: int | None = None, client_id: str | None = "app") -> Any:
        return self.run(lambda: self.call(request, version, client_id))

    def run(self, job: Callable[[], Coroutine[Any, Any, T]], timeout: float = 120) -> T:
        return self.cluster.on_broker(self.broker, lambda _: job(), timeout=timeout)

    def until(self, condition: Callable[[], bool], timeout: float = 30) -> None:
        """One that calls the API itself."""
        end_s = self.cluster.now_s() + timeout
        while not condition():
            assert self.cluster.now_s() < end_s, f"not within {timeout} s"
            self.cluster.world.run_for(0.05)


def subscription(*topics: str) -> bytes:
    """As consumers write it: version 0, without user data."""
    names = b"".join(struct.pack(">h", len(topic)) + topic.encode() for topic in topics)
    return struct.pack(">hi", 0, len(topics)) + names + struct.pack(">i", -1)


class Classic:
    """A member of a classic group, as a client of Kafka is one."""

    def __init__(self, api: GroupApi, group: str, *, instance_id: str | None = None, version: int = 9) -> None:
        self.api = api
        self.group = group
        self.instance_id = instance_id
        self.version = version
        self.member_id = ""
        self.generation = -1
        self.error = ""
        self.joined = messages.JoinGroupResponse()
        self.assignment = b""

    @property
    def leads(self) -> bool:
        return bool(self.member_id) and self.joined.leader == self.member_id

    async def join(self, topics: tuple[str, ...] = ("orders",), **more: Any) -> None:
        """Once more with the id that it is given."""
        fields: dict[str, Any] = {
            "session_timeout_ms": 10_000,
            "rebalance_timeout_ms": 20_000,
            "protocol_type": "consumer",
            "protocols": [messages.JoinGroupRequestProtocol(name="range", metadata=subscription(*topics))],
            **more,
        }
        for _ in range(2):
            request = messages.JoinGroupRequest(
                group_id=self.group, member_id=self.member_id, group_instance_id=self.instance_id, **fields
            )
            self.joined = await self.api.call(request, self.version)
            self.error = name_of(self.joined.error_code)
            if self.error != "MEMBER_ID_REQUIRED":
                break
            self.member_id = self.joined.member_id
        if not self.error:
            self.member_id, self.generation = self.joined.member_id, self.joined.generation_id

    async def sync(self, version: int = 5) -> None:
        """The leader deals to each member a text with its id."""
        dealt = [
            messages.SyncGroupRequestAssignment(member_id=one.member_id, assignment=f"for {one.member_id}".encode())
            for one in self.joined.members
        ]
        request = messages.SyncGroupRequest(
            group_id=self.group,
            generation_id=self.generation,
            member_id=self.member_id,
            group_instance_id=self.instance_id if version >= 3 else None,
            protocol_type="consumer" if version >= 5 else None,
            protocol_name="range" if version >= 5 else None,
            assignments=dealt,
        )
        response = await self.api.call(request, version)
        self.error, self.assignment = name_of(response.error_code), response.assignment

    async def beat(self, version: int = 4, **more: Any) -> str:
        fields: dict[str, Any] = {"generation_id": self.generation, "member_id": self.member_id, **more}
        instance_id = self.instance_id if version >= 3 else None
        request = messages.HeartbeatRequest(group_id=self.group, group_instance_id=instance_id, **fields)
        return name_of((await self.api.call(request, version)).error_code)

    async def leave(self, version: int = 5) -> str:
        request = messages.LeaveGroupRequest(group_id=self.group)
        if version < 3:
            request.member_id = self.member_id
            return name_of((await self.api.call(request, version)).error_code)
        request.members = [messages.MemberIdentity(member_id=self.member_id, group_instance_id=self.instance_id)]
        (row,) = (await self.api.call(request, version)).members
        return name_of(row.error_code)

    async def commit(self, offset: int, topic: str = "orders", partition: int = 0, version: int = 9) -> str:
        request = commit_of(self.group, {(topic, partition): offset})
        request.generation_id_or_member_epoch, request.member_id = self.generation, self.member_id
        request.group_instance_id = self.instance_id if version >= 7 else None
        return codes(await self.api.call(request, version))[0]


async def round_of(*members: Classic) -> None:
    """All of them join and sync."""
    await asyncio.gather(*(member.join() for member in members))
    await asyncio.gather(*(member.sync() for member in members))


def commit_of(group: str, offsets: dict[tuple[str, int], int]) -> messages.OffsetCommitRequest:
    topics: dict[str, messages.OffsetCommitRequestTopic] = {}
    for (name, partition), offset in offsets.items():
        topic = topics.setdefault(name, messages.OffsetCommitRequestTopic(name=name))
        topic.partitions.append(
            messages.OffsetCommitRequestPartition(partition_index=partition, committed_offset=offset)
        )
    return messages.OffsetCommitRequest(group_id=group, topics=list(topics.values()))


def codes(response: Any) -> list[str]:
    """Names of the errors of all partitions, in order."""
    return [name_of(row.error_code) for topic in response.topics for row in topic.partitions]


def describe(api: GroupApi, group: str, version: int = 6) -> Any:
    (found,) = api.ask(messages.DescribeGroupsRequest(groups=[group]), version).groups
    return found


def joining(group: str, *topics: str, **more: Any) -> messages.ConsumerGroupHeartbeatRequest:
    fields: dict[str, Any] = {
        "member_id": f"member-of-{group}",
        "member_epoch": 0,
        "rebalance_timeout_ms": 30_000,
        "subscribed_topic_names": list(topics) or ["orders"],
        "topic_partitions": [],
        **more,
    }
    return messages.ConsumerGroupHeartbeatRequest(group_id=group, **fields)


def going_on(group: str, reported: Any, **more: Any) -> messages.ConsumerGroupHeartbeatRequest:
    """The next heartbeat after an answer."""
    fields = {"member_id": reported.member_id, "member_epoch": reported.member_epoch, **more}
    return messages.ConsumerGroupHeartbeatRequest(group_id=group, **fields)


def parts(reported: Any) -> list[int]:
    (topic,) = reported.assignment.topic_partitions
    return sorted(topic.partitions)


def fetch_of(group: str, *rows: tuple[str, list[int]]) -> messages.OffsetFetchRequest:
    """For versions below 8; without rows all that there is."""
    topics = [messages.OffsetFetchRequestTopic(name=name, partition_indexes=numbers) for name, numbers in rows]
    return messages.OffsetFetchRequest(group_id=group, topics=topics or None)


def fetches_of(*groups: messages.OffsetFetchRequestGroup) -> messages.OffsetFetchRequest:
    return messages.OffsetFetchRequest(groups=list(groups))
