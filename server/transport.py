"""The transports of a node: as `rpc.transport`, and each reaches itself by its own address, whatever is advertised.

A node that is broker and controller calls itself. What it advertises may be a name that only others can resolve, or an
address that leads around the machine: a controller that could not reach its own broker would fence it.

    NodeTransport       listens on every listener between nodes; calls controllers, where the quorum says they are
    BrokerTransport     calls brokers, where they have registered; serves nothing by itself

The two have addresses and connections of their own: what the quorum says of a voter is never used to reach the broker
with the same node id, so that a wrong endpoint of a voter does not cut off a broker.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

from tidelog.metadata.delta import ImageDelta
from tidelog.metadata.image import Broker, ClusterImage
from tidelog.model.ids import NodeId
from tidelog.rpc.transport import GrpcTransport
from tidelog.server.listeners import Address
from tidelog.world.transport import CallHandler, StreamHandler


class NodeTransport(GrpcTransport):
    def __init__(self, me: NodeId, cluster_id: str, listen: Address, more: Sequence[Address] = ()) -> None:
        super().__init__(me, cluster_id, listen.to_listen_on, [one.to_listen_on for one in more])
        super().set_address(me, str(Address("127.0.0.1", listen.port) if listen.is_any_host else listen))

    def set_address(self, node: NodeId, address: str) -> None:
        if node != self.me:
            super().set_address(node, address)


class BrokerTransport(NodeTransport):
    """Connections of its own; who is called back comes in by `served_by`, which listens here too."""

    def __init__(self, served_by: NodeTransport, cluster_id: str, listen: Address) -> None:
        super().__init__(served_by.me, cluster_id, listen)
        self._served_by = served_by

    def serve(self, method: str, handler: CallHandler) -> None:
        self._served_by.serve(method, handler)

    def serve_stream(self, service: str, handler: StreamHandler) -> None:
        self._served_by.serve_stream(service, handler)

    async def start(self) -> None:
        """Nothing to open: the other one listens."""


def addresses_of(
    transport: GrpcTransport, names: Collection[str]
) -> Callable[[ImageDelta, ClusterImage, ClusterImage], None]:
    """Tells a transport where other brokers are, as they register: at a listener of `names`, else at their first, which
    is the one between brokers."""

    def changed(delta: ImageDelta, _older: ClusterImage, _newer: ClusterImage) -> None:
        for number, broker in delta.brokers.items():
            if broker is not None and number != transport.me and broker.endpoints:
                transport.set_address(NodeId(number), str(_place(broker, names)))

    return changed


def _place(broker: Broker, names: Collection[str]) -> Address:
    named = [endpoint for endpoint in broker.endpoints if endpoint[0] in names]
    _, _, host, port = [*named, *broker.endpoints][0]
    return Address(host, port)
