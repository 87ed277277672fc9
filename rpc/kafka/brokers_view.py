"""The brokers of one image, as a client of one listener sees them. Pure.

A client sees brokers that are not fenced: one in controlled shutdown leads until its partitions have moved. A client
cannot reach a broker without a listener of this name: it leads nothing, and its replicas are offline.

The leader of a partition, as Kafka's brokers return it:

    leader                                  leader_id   error
    reachable                               its id      none
    none, or an unknown broker              -1          LEADER_NOT_AVAILABLE
    without this listener, or fenced        -1          LISTENER_NOT_FOUND, or LEADER_NOT_AVAILABLE for old clients
"""

from __future__ import annotations

from typing import NamedTuple

from tidelog.metadata.image import Broker, ClusterImage, Partition
from tidelog.model.errors import ErrorCode
from tidelog.model.maps import Map, sorted_items

NO_BROKER = -1
LEADER_NOT_AVAILABLE = ErrorCode.LEADER_NOT_AVAILABLE.value.code
LISTENER_NOT_FOUND = ErrorCode.LISTENER_NOT_FOUND.value.code


class BrokerEndpoint(NamedTuple):
    broker: int
    host: str
    port: int
    rack: str | None
    is_fenced: bool


class BrokersView:
    """`reachable` are reachable brokers by id; `fenced` are fenced brokers with this listener."""

    __slots__ = ("_known", "_offline_directories", "fenced", "reachable")

    def __init__(self, brokers: Map[int, Broker], listener: str) -> None:
        self.reachable: dict[int, BrokerEndpoint] = {}
        self.fenced: dict[int, BrokerEndpoint] = {}
        self._known = brokers
        self._offline_directories = {number: broker.offline for number, broker in brokers.items() if broker.offline}
        for number, broker in sorted_items(brokers):
            for name, _, host, port in broker.endpoints:
                if name == listener:
                    endpoint = BrokerEndpoint(number, host, port, broker.rack, broker.fenced)
                    (self.fenced if broker.fenced else self.reachable)[number] = endpoint

    @property
    def controller(self) -> int:
        """The broker for admin requests: every broker forwards them, so it is the reachable one with the lowest id."""
        return next(iter(self.reachable), NO_BROKER)

    def leader(self, partition: Partition, *, tells_listeners: bool) -> tuple[int, int]:
        """Return its id and an error code, by the table of the module."""
        leader = partition.leader
        if leader in self.reachable:
            return leader, 0
        if tells_listeners and leader in self._known:
            return NO_BROKER, LISTENER_NOT_FOUND
        return NO_BROKER, LEADER_NOT_AVAILABLE

    def offline(self, partition: Partition) -> list[int]:
        """Return the replicas that no client can read now."""
        reachable, directories = self.reachable, self._offline_directories
        if not directories:
            return [broker for broker in partition.replicas if broker not in reachable]
        return [
            broker
            for broker in partition.replicas
            if broker not in reachable
            or (broker in directories and partition.directory_of(broker) in directories[broker])
        ]


def view_of(image: ClusterImage, listener: str) -> BrokersView:
    return BrokersView(image.brokers, listener)
