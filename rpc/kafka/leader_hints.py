"""Current leaders in the rows of Produce and Fetch responses, for partitions that moved (KIP-951)."""

from __future__ import annotations

from tidelog.metadata.image import ClusterImage
from tidelog.model.errors import ErrorCode, TidelogError
from tidelog.rpc.kafka.brokers_view import view_of
from tidelog.rpc.kafka.messages.data import LeaderIdAndEpoch, NodeEndpoint

_MOVED = (ErrorCode.NOT_LEADER_OR_FOLLOWER, ErrorCode.FENCED_LEADER_EPOCH)


def is_moved(error: TidelogError | None) -> bool:
    """Whether the response names the current leader."""
    return error is not None and error.code in _MOVED


class LeaderHints:
    """Leaders that one response names."""

    __slots__ = ("_image", "_listener", "_named")

    def __init__(self, image: ClusterImage, listener: str) -> None:
        self._image = image
        self._listener = listener
        self._named: dict[int, None] = {}

    def add(self, leader: int, leader_epoch: int) -> LeaderIdAndEpoch:
        if leader >= 0:
            self._named[leader] = None
        return LeaderIdAndEpoch(leader_id=leader, leader_epoch=leader_epoch)

    def endpoints(self) -> list[NodeEndpoint]:
        """Endpoints of the named leaders that have this listener."""
        if not self._named:
            return []
        reachable = view_of(self._image, self._listener).reachable
        brokers = [reachable[leader] for leader in self._named if leader in reachable]
        return [
            NodeEndpoint(node_id=broker.broker, host=broker.host, port=broker.port, rack=broker.rack)
            for broker in brokers
        ]
