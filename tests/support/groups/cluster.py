"""Consumer groups in the simulator: a whole cluster, and members that speak the public API from machines of their own.

with GroupCluster(seed=1) as cluster:
    cluster.topic("orders", partitions=6)
    one = cluster.member("billing", "orders")            # joins, heartbeats, revokes and acquires as assigned
    cluster.until(lambda: len(one.owned) == 6)
    one.kill()                                           # as with -9
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from google.protobuf.message import Message

from support.grpc_api.simulated_nodes import ApiCluster
from tidelog.coordinator.hashing import partition_for
from tidelog.coordinator.partition_shard import Phase
from tidelog.coordinator.shard import Shard
from tidelog.metadata.config_changes import AlterConfigs, ConfigChange, ResourceChange
from tidelog.model.errors import RemoteError, TransportError
from tidelog.model.ids import NodeId, PartitionId
from tidelog.rpc.grpc.methods import decode_response_frame, encode_message, method_named
from tidelog.rpc.v1 import common_pb2 as common
from tidelog.rpc.v1 import groups_pb2 as pb
from tidelog.world.simulated import SimNode
from tidelog.world.transport import Stream

BROKERS = (11, 12, 13)
OFFSETS_TOPIC = "__consumer_offsets"
_MEMBERSHIP = method_named("Groups", "Membership")
_FIRST_MEMBER = 1_000
_TRY_AGAIN = ("COORDINATOR_LOAD_IN_PROGRESS", "COORDINATOR_NOT_AVAILABLE", "NOT_COORDINATOR", "NETWORK_EXCEPTION")


class GroupCluster(ApiCluster):
    """Three controllers, three brokers; `__consumer_offsets` has few partitions."""

    def __init__(self, seed: int, *, offsets_partitions: int = 3, orders: int = 0, **more: Any) -> None:
        """`orders`: begins with a topic of this name with so many partitions; 0: with none."""
        super().__init__(seed, **more)
        self._orders = orders
        self._offsets_partitions = offsets_partitions
        self._members = 0

    def __enter__(self) -> GroupCluster:
        super().__enter__()
        self.start()
        self.start_brokers(*BROKERS)
        self.set_cluster("offsets.topic.num.partitions", str(self._offsets_partitions))
        if self._orders:
            self.topic("orders", partitions=self._orders)
        return self

    def set_cluster(self, key: str, value: str) -> None:
        change = ResourceChange(resource_type="cluster", changes=(ConfigChange(key=key, operation="set", value=value),))
        (done,) = self.ask(AlterConfigs(resources=(change,))).items
        assert done.error is None, done.message

        def is_known() -> bool:
            found = [broker.tail.image.config("cluster", "").get(key) for broker in self.brokers.values()]
            return all(one == value for one in found)

        self.until(is_known)

    # Calls.

    def groups(self, name: str, request: Message, *, node: int) -> Any:
        return self.api(node, "Groups", name, request)

    def ask_groups(self, group: str, name: str, request: Message, *, timeout: float = 30) -> Any:
        """Calls the group's current coordinator, once it can answer."""
        end_s = self.now_s() + timeout
        last: RemoteError | TransportError | None = None
        while self.now_s() < end_s:
            try:
                return self.groups(name, request, node=self.coordinator(group))
            except (RemoteError, TransportError) as error:
                if not error.retriable:
                    raise
                last = error
            self.world.run_for(0.05)
        raise AssertionError(f"no answer in {timeout} s: {last!r}")

    def coordinator(self, group: str, timeout: float = 30) -> int:
        """As any broker tells it."""
        end_s = self.now_s() + timeout
        while self.now_s() < end_s:
            node = next(iter(self.brokers))
            request = pb.FindCoordinatorRequest(groups=[group])
            try:
                (found,) = self.groups("FindCoordinator", request, node=node).coordinators
            except (RemoteError, TransportError) as error:
                if not error.retriable:
                    raise
            else:
                if not found.error.code and NodeId(found.broker) in self.brokers:
                    return int(found.broker)
            self.world.run_for(0.05)
        raise AssertionError(f"group {group} has no coordinator")

    def shard(self, group: str) -> Shard:
        """Of the coordinator, once it has read it."""
        found: list[Shard] = []

        def look() -> bool:
            found[:] = [
                shard
                for broker in self.brokers.values()
                for number, shard in broker.coordinator.shards.items()
                if number == partition_for(group, self._offsets_partitions) and shard.phase is Phase.LEADING
            ]
            return len(found) == 1

        self.coordinator(group)
        self.until(look, timeout=30)
        return found[0]

    def commit(
        self, group: str, offsets: dict[tuple[str, int], int], *, member: Member | None = None, **more: Any
    ) -> list[str]:
        """Names of the errors, in order; empty where it was done."""
        request = pb.CommitOffsetsRequest(
            group=group,
            member_id="" if member is None else member.member_id,
            member_epoch=-1 if member is None else member.epoch,
            offsets=[
                pb.OffsetToCommit(topic=topic, partition=number, offset=offset, leader_epoch=-1, **more)
                for (topic, number), offset in offsets.items()
            ],
        )
        return [row.error.name for row in self.ask_groups(group, "CommitOffsets", request).offsets]

    def committed(self, group: str, *partitions: tuple[str, int]) -> dict[tuple[str, int], int]:
        request = pb.FetchOffsetsRequest(
            group=group,
            partitions=[common.TopicPartition(topic=topic, partition=number) for topic, number in partitions],
        )
        rows = self.ask_groups(group, "FetchOffsets", request).offsets
        return {(row.topic, row.partition): row.offset for row in rows}

    def describe(self, group: str) -> pb.GroupDescription:
        (found,) = self.ask_groups(group, "DescribeGroups", pb.DescribeGroupsRequest(groups=[group])).groups
        assert isinstance(found, pb.GroupDescription)
        return found

    def topic(self, name: str, replicas: Sequence[int] | None = None, **more: Any) -> PartitionId:
        made = super().topic(name, replicas, **more)
        brokers = self.brokers.values()
        self.until(lambda: all(name in broker.tail.image.topic_ids for broker in brokers))
        return made

    # Members.

    def member(self, group: str, *topics: str, join: bool = True, **more: Any) -> Member:
        self._members += 1
        made = Member(self, group, topics, NodeId(_FIRST_MEMBER + self._members), **more)
        if join:
            made.begin()
            self.until(lambda: made.epoch > 0 or made.is_over, timeout=30)
        return made


class Member:
    """The simplest client: holds what it is assigned, and reports it."""

    def __init__(
        self,
        cluster: GroupCluster,
        group: str,
        topics: Sequence[str],
        node: NodeId,
        *,
        pattern: str = "",
        instance_id: str = "",
        member_id: str = "",
        session_timeout_ms: int = 0,
        rebalance_timeout_ms: int = 0,
        comes_back: bool = True,
        gives_up: bool = True,
    ) -> None:
        self.cluster = cluster
        self.group = group
        self.member_id = member_id or f"member-{node}"
        self.epoch = 0
        self.owned: frozenset[tuple[str, int]] = frozenset()
        self.error = ""
        """The last one, of the stream or of a call."""
        self.errors: list[str] = []
        """Those that streams ended with."""
        self.revoked: list[tuple[str, int]] = []
        self.streams = 0
        self.comes_back = comes_back
        self.gives_up = gives_up
        self.beats = True
        self.answers = 0
        self.is_over = False
        self._wants = pb.HeartbeatRequest(
            group=group,
            member_id=self.member_id,
            instance_id=instance_id,
            subscription=pb.Subscription(topics=topics, pattern=pattern),
            session_timeout_ms=session_timeout_ms,
            rebalance_timeout_ms=rebalance_timeout_ms,
        )
        self._instance_id = instance_id
        self._node = node
        self._ids: dict[str, bytes] = {}
        self._process = cluster.world.machine(f"m{node}").boot()
        self._transport = cluster.network.join(self._process, node)
        self._stream: Stream | None = None
        self._interval_s = 5.0

    def begin(self) -> None:
        self._process.spawn(self._run())

    def kill(self) -> None:
        """As with -9: its streams break."""
        self.cluster.world.machine(f"m{self._node}").kill()

    def cut(self) -> None:
        """Its streams break, and it lives."""
        for broker in BROKERS:
            self.cluster.network.cut_streams(self._node, NodeId(broker))

    def leave(self, epoch: int = -1) -> None:
        self.comes_back = False

        async def goodbye(_: SimNode) -> None:
            assert self._stream is not None, "a member that has joined"
            await self._stream.send(encode_message(self._request(epoch)))

        self.cluster.world.run(self._process, goodbye)
        self.cluster.until(lambda: self.is_over)

    # On its machine.

    def _request(self, epoch: int, *, owned: bool = False) -> pb.HeartbeatRequest:
        request = pb.HeartbeatRequest(
            group=self.group, member_id=self.member_id, member_epoch=epoch, instance_id=self._instance_id
        )
        if epoch == 0:
            request.MergeFrom(self._wants)
        if owned:
            request.owned.SetInParent()
            for topic in sorted({name for name, _ in self.owned}):
                numbers = sorted(number for name, number in self.owned if name == topic)
                request.owned.topics.add(topic=topic, topic_id=self._ids[topic], partitions=numbers)
        return request

    async def _run(self) -> None:
        while True:
            try:
                await self._one_stream(await self._find())
            except (RemoteError, TransportError) as error:
                self.error = error.code.name
            self.errors.append(self.error)
            self._stream = None
            is_early = self.epoch == 0 and self.error in _TRY_AGAIN
            if not self.comes_back and not is_early:
                self.is_over = True
                return
            if self.error in ("UNKNOWN_MEMBER_ID", "FENCED_MEMBER_EPOCH"):
                self.epoch, self.owned = 0, frozenset()
            await asyncio.sleep(0.05)

    async def _find(self) -> NodeId:
        method = method_named("Groups", "FindCoordinator")
        request = pb.FindCoordinatorRequest(groups=[self.group]).SerializeToString()
        while True:
            for broker in sorted(self.cluster.brokers):
                try:
                    data = await self._transport.call(broker, method.wire_name, request, timeout_ms=2_000)
                except (RemoteError, TransportError) as error:
                    self.error = error.code.name
                    continue
                (found,) = pb.FindCoordinatorResponse.FromString(data).coordinators
                if not found.error.code:
                    return NodeId(found.broker)
            await asyncio.sleep(0.05)

    async def _one_stream(self, broker: NodeId) -> None:
        stream = await self._transport.open_stream(broker, _MEMBERSHIP.wire_name)
        self.streams += 1
        self._stream = stream
        await stream.send(encode_message(self._request(self.epoch, owned=self.epoch > 0)))
        beats = asyncio.get_running_loop().create_task(self._beat(stream))
        try:
            while True:
                response = decode_response_frame(_MEMBERSHIP, await stream.receive())
                self.error = response.error.name
                if self.error or response.member_epoch < 0:
                    return
                self.answers += 1
                await self._take(stream, response)
        finally:
            beats.cancel()
            stream.close()

    async def _take(self, stream: Stream, response: pb.HeartbeatResponse) -> None:
        self._interval_s = response.heartbeat_interval_ms / 1000
        is_new_epoch, self.epoch = response.member_epoch != self.epoch, response.member_epoch
        changed = False
        if response.HasField("assignment"):
            reported: set[tuple[str, int]] = set()
            for topic in response.assignment.topics:
                self._ids[topic.topic] = topic.topic_id
                reported.update((topic.topic, number) for number in topic.partitions)
            if not self.gives_up:
                reported |= self.owned
            changed = reported != self.owned
            self.revoked += sorted(self.owned - reported)
            self.owned = frozenset(reported)
        if is_new_epoch or changed:
            await stream.send(encode_message(self._request(self.epoch, owned=True)))

    async def _beat(self, stream: Stream) -> None:
        while True:
            await asyncio.sleep(self._interval_s)
            if self.beats:
                await stream.send(encode_message(self._request(self.epoch)))
