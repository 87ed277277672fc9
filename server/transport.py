"""The transport of a node: as `rpc.transport`, and it reaches itself by its own address, whatever it advertises.

A node that is broker and controller calls itself. What it advertises may be a name that only others can resolve, or an
address that leads around the machine: a controller that could not reach its own broker would fence it.
"""

from __future__ import annotations

from tidelog.model.ids import NodeId
from tidelog.rpc.transport import GrpcTransport
from tidelog.server.listeners import Address


class NodeTransport(GrpcTransport):
    def __init__(self, me: NodeId, cluster_id: str, listen: Address) -> None:
        super().__init__(me, cluster_id, listen.to_listen_on)
        super().set_address(me, str(Address("127.0.0.1", listen.port) if listen.is_any_host else listen))

    def set_address(self, node: NodeId, address: str) -> None:
        if node != self.me:
            super().set_address(node, address)
