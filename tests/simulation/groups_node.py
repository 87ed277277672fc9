"""A broker with a group coordinator, and the whole public API over the simulated transport; how clients reach it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from client_world import SimConnections

from simulation.broker_node import BROKER, BrokerApp, BrokerStack
from simulation.cluster import Context
from simulation.driver_node import CLUSTER_ID
from tidelog.coordinator.coordinator import GroupCoordinator
from tidelog.coordinator.service import GroupService
from tidelog.log.logs import Logs
from tidelog.metadata.broker_side import BrokerAgent
from tidelog.metadata.tail import MetadataTail
from tidelog.model.errors import UnreachableError
from tidelog.model.ids import NodeId
from tidelog.replication.announcing import close_logs
from tidelog.replication.replicas import Replicas
from tidelog.rpc.admin_door import AdminDoor
from tidelog.rpc.cluster_door import ClusterDoor
from tidelog.rpc.door import Doors, serve
from tidelog.rpc.door_quorum import QuorumLink
from tidelog.rpc.groups_door import GroupsDoor
from tidelog.rpc.limits import DoorLimits
from tidelog.rpc.log_door import LogDoor
from tidelog.world.simulated import SimLoop
from tidelog.world.transport import Transport

if TYPE_CHECKING:
    from simulation.groups_sim import GroupsSimulation

LISTENER = "CLIENT"


class GroupsApp(BrokerApp):
    def __init__(
        self, context: Context, tail: MetadataTail, agent: BrokerAgent, logs: Logs, replicas: Replicas
    ) -> None:
        super().__init__(context, tail, agent, logs, replicas)
        self.coordinator = GroupCoordinator(replicas, tail, context.node.clock)
        self.groups = GroupService(self.coordinator, tail, agent.client)

    async def stop(self) -> None:
        self.is_stopping = True
        epoch = await self.agent.shut_down()
        await self.coordinator.close()
        await self.replicas.close()
        await close_logs(self.logs, self.context.node.store(BROKER), epoch)
        self.is_stopped = True


class GroupsStack(BrokerStack):
    _simulation: GroupsSimulation

    def _new_app(
        self, context: Context, tail: MetadataTail, agent: BrokerAgent, logs: Logs, replicas: Replicas
    ) -> BrokerApp:
        app = GroupsApp(context, tail, agent, logs, replicas)
        app.coordinator.on_failure = lambda error: self._simulation.crashed(app.name, error)
        app.coordinator.start()
        return app

    def _serve(self, context: Context, app: BrokerApp) -> None:
        assert isinstance(app, GroupsApp)
        limits, tail = DoorLimits(), app.tail
        link = QuorumLink(cluster_id=CLUSTER_ID, transport=context.transport, client=app.agent.client, tail=tail)
        doors = Doors(
            cluster=ClusterDoor(link, context.node.work, limits, version="0.0"),
            admin=AdminDoor(link, limits, None),
            log=LogDoor(app.service, lambda: tail.image, limits),
            groups=GroupsDoor(app.groups, lambda: tail.image, limits),
        )
        serve(context.transport, doors, listener=LISTENER)

    def _stepped(self, loop: SimLoop) -> None:
        super()._stepped(loop)
        app = self._brokers.get(loop)
        if app is not None and not loop.is_dead:
            assert isinstance(app, GroupsApp)
            self._simulation.groups_checker.look(app)


class Connections(SimConnections):
    """To brokers whose hosts are their stations: n1, b13."""

    def __init__(self, transport: Transport) -> None:
        super().__init__(transport)

    def _node(self, address: str) -> NodeId:
        host = address.partition(":")[0]
        if not host[1:].isdigit():
            raise UnreachableError(f"{address}: no such host")
        return NodeId(int(host[1:]))


def bootstrap_of(simulation: Any) -> tuple[str, ...]:
    return tuple(f"{station.name}:9092" for station in simulation.brokers)
