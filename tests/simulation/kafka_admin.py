"""An operator of the Kafka API: offsets of a group without members, requests to delete, and commits that come late.

Its group `epsilon` has no members: the operator commits its offsets, reads and deletes them. Groups with members must
refuse what it asks of them. `late` holds commits of members that have died or were put out; each is sent again once the
committed log shows that somebody has replaced its sender, and no coordinator may accept it.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from random import Random
from typing import TYPE_CHECKING

from simulation.cluster import Context
from simulation.kafka_client import KafkaClient
from simulation.kafka_groups_checker import KafkaLife, is_replaced
from simulation.kafka_member import codes_of_commit, offset_commit, offset_fetch, offsets_of_fetch
from tidelog.model.errors import ErrorCode, TransportError
from tidelog.model.ids import PartitionId
from tidelog.rpc.kafka.messages import groups as messages

if TYPE_CHECKING:
    from simulation.kafka_groups import KafkaGroups

GROUP = "epsilon"
LATE_MAX = 20


@dataclass(slots=True, eq=False)
class LateCommit:
    """A commit of a consumer, with the member id and generation that it had."""

    life: KafkaLife
    offsets: dict[PartitionId, int]


class KafkaAdmin:
    """The program of a machine."""

    def __init__(self, groups: KafkaGroups, draw: Random) -> None:
        self.is_steady = False
        """From now on it only looks."""
        self.late: list[LateCommit] = []
        self.refused = 0
        """Requests to delete what groups with members use."""
        self._groups = groups
        self._random = draw
        self._offsets: dict[PartitionId, int] = {}

    async def run(self, context: Context) -> None:
        context.app = self
        groups = self._groups
        await groups.consumer_groups.are_topics_made()
        self._client = KafkaClient(
            context, groups.simulation.broker_nodes, self._random, groups.fail, client_id=context.station.name
        )
        self._life = KafkaLife(context.station.name, GROUP, is_static=False)
        while True:
            await asyncio.sleep(self._random.expovariate(1 / 0.2))
            await self._client.ready(groups.topic_names)
            if self.is_steady:
                continue
            act = self._random.choices(
                (self._commit, self._fetch, self._delete, self._delete_used, self._late), (4, 2, 1, 1, 3)
            )
            await act[0]()

    def _partition(self) -> PartitionId:
        everything = [known.partition_id for known, _ in self._groups.consumer_groups.partitions()]
        return self._random.choice(everything)

    async def _commit(self) -> None:
        partition = self._partition()
        offset = self._offsets[partition] = self._offsets.get(partition, 0) + 1
        self._life.reached[partition] = offset
        sent = self._groups.kafka_checker.sends(self._life, {partition: offset})
        request = offset_commit(self._groups, self._life, {partition: offset})
        try:
            response = await self._client.ask_coordinator(GROUP, request)
        except TransportError:
            return
        codes = codes_of_commit(self._groups, self._client, response)
        for code in codes.values():
            if code is not None:
                self._client.check_code(GROUP, code.value.code)
        self._groups.kafka_checker.answered(sent, codes)

    async def _fetch(self) -> None:
        partition = self._partition()
        least = self._groups.checker.asks_offsets(self._life, [partition])
        try:
            response = await self._client.ask_coordinator(
                GROUP, offset_fetch(self._groups, self._client, GROUP, [partition])
            )
        except TransportError:
            return
        offsets = offsets_of_fetch(self._groups, self._client, GROUP, response)
        if isinstance(offsets, dict):
            self._groups.checker.check_reported_offsets(self._life, least, offsets)

    async def _delete(self) -> None:
        """Offsets of its own group, or the whole group."""
        self._groups.kafka_checker.asked.add(GROUP)
        partition = self._partition()
        request: object = messages.DeleteGroupsRequest(groups_names=[GROUP])
        if self._random.random() < 0.7:
            request = self._offset_delete(GROUP, partition)
        try:
            await self._client.ask_coordinator(GROUP, request)
        except TransportError:
            return

    def _offset_delete(self, group: str, partition: PartitionId) -> messages.OffsetDeleteRequest:
        known = self._groups.simulation.replica_checker.partitions[partition]
        row = messages.OffsetDeleteRequestPartition(partition_index=partition.partition)
        topic = messages.OffsetDeleteRequestTopic(name=known.topic.name, partitions=[row])
        return messages.OffsetDeleteRequest(group_id=group, topics=[topic])

    async def _delete_used(self) -> None:
        """Of a group that has members, most of the time."""
        group = self._random.choice(self._groups.names)
        self._groups.kafka_checker.asked.add(group)
        try:
            if self._random.random() < 0.5:
                response = await self._client.ask_coordinator(group, messages.DeleteGroupsRequest(groups_names=[group]))
                code = response.results[0].error_code
            else:
                response = await self._client.ask_coordinator(group, self._offset_delete(group, self._partition()))
                code = response.error_code or response.topics[0].partitions[0].error_code
        except TransportError:
            return
        error = self._client.check_code(group, code)
        self.refused += error in (ErrorCode.NON_EMPTY_GROUP, ErrorCode.GROUP_SUBSCRIBED_TO_TOPIC)

    async def _late(self) -> None:
        for late in [one for one in self.late if is_replaced(self._groups.checker.group(one.life.group), one.life)]:
            self.late.remove(late)
            group = late.life.group
            sent = self._groups.kafka_checker.sends(late.life, late.offsets)
            try:
                response = await self._client.ask_coordinator(
                    group, offset_commit(self._groups, late.life, late.offsets)
                )
            except TransportError:
                continue
            codes = codes_of_commit(self._groups, self._client, response)
            for code in codes.values():
                self._client.check_code(group, 0 if code is None else code.value.code)
            self._groups.kafka_checker.answered(sent, codes)

    def add_late(self, life: KafkaLife, offsets: dict[PartitionId, int]) -> None:
        """A copy of what a consumer has committed last, as it was then."""
        if offsets and life.generation >= 0 and len(self.late) < LATE_MAX:
            copy = KafkaLife(life.name, life.group, life.is_static, protocol=life.protocol)
            copy.own_id, copy.generation, copy.instance_id = life.own_id, life.generation, life.instance_id
            copy.reached = dict(offsets)
            self.late.append(LateCommit(copy, dict(offsets)))
