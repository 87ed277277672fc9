"""The gRPC transports of a node process. Each reaches its own node at the local address, whatever is advertised.

A combined node calls itself. Its advertised address may be a name that only others can resolve, or lead around the
machine: a controller that could not reach its own broker would fence it.

    NodeTransport       listens on every inter-node listener; calls controllers at their quorum endpoints
    BrokerTransport     calls brokers at their registered endpoints; listens through the NodeTransport

Each has its own addresses and connections: a wrong endpoint of a voter does not cut off the broker with the same id.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

from tidelog.metadata.delta import ImageDelta
from tidelog.metadata.image import Broker, ClusterImage
from tidelog.model.ids import NodeId
from tidelog.rpc.grpc.transport import GrpcTransport
from tidelog.server.listeners import Address
from tidelog.world.transport import CallHandler, StreamHandler, Transport


class NodeTransport(GrpcTransport):
    def __init__(self, me: NodeId, cluster_id: str, listen: Address, more: Sequence[Address] = ()) -> None:
        super().__init__(me, cluster_id, listen.to_listen_on, [address.to_listen_on for address in more])
        super().set_address(me, str(Address("127.0.0.1", listen.port) if listen.is_any_host else listen))

    def set_address(self, node: NodeId, address: str) -> None:
        if node != self.me:
            super().set_address(node, address)


class BrokerTransport(NodeTransport):
    """Has its own connections; `served_by` listens for both."""

    def __init__(self, served_by: NodeTransport, cluster_id: str, listen: Address) -> None:
        super().__init__(served_by.me, cluster_id, listen)
        self._served_by = served_by

    def serve(self, method: str, handler: CallHandler) -> None:
        self._served_by.serve(method, handler)

    def serve_stream(self, service: str, handler: StreamHandler) -> None:
        self._served_by.serve_stream(service, handler)

    async def start(self) -> None:
        """Opens nothing: `served_by` listens."""


def addresses_of(
    transport: Transport, names: Collection[str]
) -> Callable[[ImageDelta, ClusterImage, ClusterImage], None]:
    """Returns a metadata subscriber that sets the addresses of other brokers as they register: the endpoint of a
    listener of `names`, else the first, which is the one between brokers."""

    def set_addresses(delta: ImageDelta, _older: ClusterImage, _newer: ClusterImage) -> None:
        for number, broker in delta.brokers.items():
            if broker is not None and number != transport.me and broker.endpoints:
                transport.set_address(NodeId(number), str(_endpoint(broker, names)))

    return set_addresses


def _endpoint(broker: Broker, names: Collection[str]) -> Address:
    named = [endpoint for endpoint in broker.endpoints if endpoint[0] in names]
    _, _, host, port = [*named, *broker.endpoints][0]
    return Address(host, port)
