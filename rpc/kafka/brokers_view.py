"""The brokers as a client of one listener sees them, by one image. Pure.

A broker is told while it is not fenced: one that is leaving still leads until its partitions have moved. A broker that
has no listener of this name cannot be reached from here, so it leads nothing here and its replicas are offline.

Who leads is told as Kafka's brokers tell it:

    the leader                              leader_id   error
    can be reached                          its id      none
    is nobody, or no broker that is known   -1          LEADER_NOT_AVAILABLE
    has no such listener, or is fenced      -1          LISTENER_NOT_FOUND, or LEADER_NOT_AVAILABLE for old clients
"""

from __future__ import annotations

from typing import NamedTuple

from tidelog.metadata.image import Broker, ClusterImage, Partition
from tidelog.model.errors import ErrorCode
from tidelog.model.maps import Map, sorted_items

NOBODY = -1
LEADER_NOT_AVAILABLE = ErrorCode.LEADER_NOT_AVAILABLE.value.code
LISTENER_NOT_FOUND = ErrorCode.LISTENER_NOT_FOUND.value.code


class Place(NamedTuple):
    broker: int
    host: str
    port: int
    rack: str | None
    is_fenced: bool


class BrokersView:
    """`places` are those that can be reached, by id; `fenced` would be if they were not fenced."""

    __slots__ = ("_known", "_offline_directories", "fenced", "places")

    def __init__(self, brokers: Map[int, Broker], listener: str) -> None:
        self.places: dict[int, Place] = {}
        self.fenced: dict[int, Place] = {}
        self._known = brokers
        self._offline_directories = {number: broker.offline for number, broker in brokers.items() if broker.offline}
        for number, broker in sorted_items(brokers):
            for name, _, host, port in broker.endpoints:
                if name == listener:
                    place = Place(number, host, port, broker.rack, broker.fenced)
                    (self.fenced if broker.fenced else self.places)[number] = place

    @property
    def controller(self) -> int:
        """Whom clients send admin calls: every broker hands them on, so it is the same one as long as it lives."""
        return next(iter(self.places), NOBODY)

    def leader(self, partition: Partition, *, tells_listeners: bool) -> tuple[int, int]:
        """Its id and an error code, as the table above says."""
        leader = partition.leader
        if leader in self.places:
            return leader, 0
        if tells_listeners and leader in self._known:
            return NOBODY, LISTENER_NOT_FOUND
        return NOBODY, LEADER_NOT_AVAILABLE

    def offline(self, partition: Partition) -> list[int]:
        """Replicas that nobody can read now."""
        places, directories = self.places, self._offline_directories
        if not directories:
            return [broker for broker in partition.replicas if broker not in places]
        return [
            broker
            for broker in partition.replicas
            if broker not in places or (broker in directories and partition.directory_of(broker) in directories[broker])
        ]


def view_of(image: ClusterImage, listener: str) -> BrokersView:
    return BrokersView(image.brokers, listener)
