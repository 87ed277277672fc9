"""The client's view of the cluster: brokers, topics by name and id, leaders. Pure.

Two sources change it: responses of `Cluster.Metadata`, and leader hints in other responses.

- Of two responses from one cluster the one with the higher `metadata_offset` is newer; an older one is ignored.
- Only a leader with a higher epoch replaces a known one, from either source.
- A recreated topic has another id; everything known under the old id is dropped.
"""

from __future__ import annotations

from dataclasses import dataclass
from uuid import UUID

from tidelog.model.errors import ErrorCode
from tidelog.model.ids import PartitionId, TopicId
from tidelog.rpc.v1 import cluster_pb2 as pb

_DENIED = ErrorCode.TOPIC_AUTHORIZATION_FAILED.name


@dataclass(frozen=True, slots=True)
class BrokerInfo:
    id: int
    address: str
    rack: str


@dataclass(frozen=True, slots=True)
class LeaderInfo:
    node: int
    """-1: no leader."""
    epoch: int


@dataclass(frozen=True, slots=True)
class TopicInfo:
    name: str
    topic_id: TopicId
    is_internal: bool
    partitions: tuple[PartitionId, ...]
    """By number, from 0."""


def address_of(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


class ClusterView:
    def __init__(self) -> None:
        self.cluster_id = ""
        self.offset = -1
        self.controller = -1
        self.listener = ""
        self.brokers: dict[int, BrokerInfo] = {}
        self.topics: dict[str, TopicInfo] = {}
        self.denials: dict[str, str] = {}
        """Topics that this client may not describe -> why. Each was asked for by its name."""
        self._leaders: dict[PartitionId, LeaderInfo] = {}

    def leader(self, partition: PartitionId) -> LeaderInfo | None:
        return self._leaders.get(partition)

    def is_current(self, topic: TopicInfo) -> bool:
        """Return whether the topic name still has this id."""
        known = self.topics.get(topic.name)
        return known is not None and known.topic_id == topic.topic_id

    def take(self, answer: pb.MetadataResponse) -> bool:
        """Apply a metadata response. Returns False for one older than the view."""
        if answer.cluster_id != self.cluster_id:
            self.__init__()  # type: ignore[misc]  # another cluster: forget everything
            self.cluster_id = answer.cluster_id
        if answer.metadata_offset < self.offset:
            return False
        self.offset = answer.metadata_offset
        self.controller = answer.controller
        self.listener = answer.listener
        self.brokers = {
            broker.id: BrokerInfo(broker.id, address_of(broker.host, broker.port), broker.rack)
            for broker in answer.brokers
        }
        for topic in answer.topics:
            self._take_topic(topic)
        return True

    def _take_topic(self, topic: pb.Topic) -> None:
        if topic.HasField("error"):
            if topic.name:
                self._forget(topic.name)
                if topic.error.name == _DENIED:
                    self.denials[topic.name] = topic.error.message
            return
        self.denials.pop(topic.name, None)
        topic_id = TopicId(UUID(bytes=topic.topic_id))
        known = self.topics.get(topic.name)
        if known is not None and known.topic_id != topic_id:
            self._forget(topic.name)
        rows = sorted(topic.partitions, key=lambda row: row.partition)
        places = tuple(PartitionId(topic_id, row.partition) for row in rows)
        self.topics[topic.name] = TopicInfo(topic.name, topic_id, topic.is_internal, places)
        for place, row in zip(places, rows, strict=True):
            self.learn_leader(place, row.leader, row.leader_epoch)

    def _forget(self, name: str) -> None:
        self.denials.pop(name, None)
        topic = self.topics.pop(name, None)
        for place in topic.partitions if topic is not None else ():
            self._leaders.pop(place, None)

    def learn_leader(self, partition: PartitionId, leader: int, epoch: int) -> bool:
        """Apply a leader hint. Returns whether it is new."""
        known = self._leaders.get(partition)
        if known is not None and epoch <= known.epoch:
            return False
        self._leaders[partition] = LeaderInfo(leader, epoch)
        return True
