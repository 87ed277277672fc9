"""Nodes of the simulator with their front doors: the public API over the simulated transport.

`DoorQuorum` has controllers, and brokers without logs; `DoorCluster` has whole brokers.
"""

from __future__ import annotations

from typing import Any

from google.protobuf.message import Message
from metadata_quorum import CLUSTER, CONTROLLERS, Quorum
from replication_cluster import ReplicationCluster

from tidelog.metadata.broker_side import BrokerConfig, ControllerClient
from tidelog.model.errors import StreamClosedError
from tidelog.model.ids import NodeId
from tidelog.rpc.admin_door import AdminDoor
from tidelog.rpc.cluster_door import ClusterDoor
from tidelog.rpc.door import (
    END_OF_REQUESTS,
    Doors,
    decode_response_frame,
    encode_message,
    method_named,
    serve,
    serve_forwarded,
)
from tidelog.rpc.door_log_dirs import LogDirs
from tidelog.rpc.door_quorum import QuorumLink
from tidelog.rpc.groups_door import GroupsDoor
from tidelog.rpc.limits import DoorLimits
from tidelog.rpc.log_door import LogDoor
from tidelog.world.simulated import SimNode, SimWorld
from tidelog.world.simulated.network import SimNetwork, SimTransport

__all__ = ["CONTROLLERS", "LISTENER", "DoorCluster", "DoorQuorum"]

LISTENER = "CLIENT"
"""As the brokers of `Quorum` call theirs."""


class _Network(SimNetwork):
    """Remembers the transport of each node's present life."""

    def __init__(self, world: SimWorld) -> None:
        super().__init__(world)
        self.transports: dict[NodeId, SimTransport] = {}

    def join(self, node: SimNode, node_id: NodeId) -> SimTransport:
        self.transports[node_id] = transport = super().join(node, node_id)
        return transport


class _WithDoors(Quorum):
    """Every node serves the public API to the admin's machine."""

    def __init__(self, seed: int, *more: Any, limits: DoorLimits | None = None, **named: Any) -> None:
        super().__init__(seed, *more, **named)
        network = _Network(self.world)
        network.silent_death_probability = 0.0
        self.network: SimNetwork = network
        self._transports = network.transports
        self.limits = limits or DoorLimits()

    async def _boot(self, node: NodeId, process: SimNode) -> None:
        await super()._boot(node, process)
        client = ControllerClient(self._transports[node], lambda: CONTROLLERS, BrokerConfig(), process.random)
        self._open_doors(node, process, None, controller=self.controllers[node][1], client=client)

    async def _boot_broker(self, broker: int, more: dict[str, Any], process: SimNode) -> None:
        await super()._boot_broker(broker, more, process)
        found = self.brokers[NodeId(broker)]
        service = getattr(found, "service", None)  # brokers of `Quorum` have no logs
        groups = getattr(found, "groups", None)
        self._open_doors(NodeId(broker), process, service, groups, tail=found.tail, client=found.agent.client)

    def _open_doors(self, node: NodeId, process: SimNode, service: Any, groups: Any = None, **parts: Any) -> None:
        transport = self._transports[node]
        link = QuorumLink(cluster_id=CLUSTER, transport=transport, **parts)
        doors = Doors(
            cluster=ClusterDoor(link, process.work, self.limits, version="0.0"),
            admin=AdminDoor(link, self.limits, None if service is None else LogDirs(service)),
            log=None if service is None else LogDoor(service, lambda: link.image, self.limits),
            groups=None if groups is None else GroupsDoor(groups, lambda: link.image, self.limits),
        )
        serve(transport, doors, listener=LISTENER)
        serve_forwarded(transport, doors)

    # The admin.

    def api(self, node: int, service: str, name: str, request: Message, *, timeout_s: float = 60) -> Any:
        """The response of this node to a unary call; raises the `RemoteError`."""
        method = method_named(service, name)

        async def call(_: SimNode) -> Any:
            data = await self.admin_transport.call(
                NodeId(node), method.wire_name, request.SerializeToString(), timeout_ms=int(timeout_s * 1000)
            )
            return method.response.FromString(data)

        return self.world.run(self.admin, call, timeout=timeout_s)

    def api_stream(
        self, node: int, service: str, name: str, *requests: Message, count: int | None = None, timeout_s: float = 60
    ) -> list[Any]:
        """Its responses: the first `count`, or all to the end of the stream."""
        method = method_named(service, name)

        async def read(_: SimNode) -> list[Any]:
            stream = await self.admin_transport.open_stream(NodeId(node), method.wire_name)
            found: list[Any] = []
            try:
                for request in requests:
                    await stream.send(encode_message(request))
                await stream.send(END_OF_REQUESTS)
                while count is None or len(found) < count:
                    found.append(decode_response_frame(method, await stream.receive()))
            except StreamClosedError:
                return found
            finally:
                stream.close()
            return found

        result: list[Any] = self.world.run(self.admin, read, timeout=timeout_s)
        return result


class DoorQuorum(_WithDoors):
    def __enter__(self) -> DoorQuorum:
        super().__enter__()
        return self


class DoorCluster(_WithDoors, ReplicationCluster):
    def __enter__(self) -> DoorCluster:
        super().__enter__()
        return self
