"""How the clients of the product reach the brokers of a run."""

from __future__ import annotations

from typing import TYPE_CHECKING

from support.clients.cluster import SimConnections

from tidelog.model.errors import UnreachableError
from tidelog.model.ids import NodeId
from tidelog.world.transport import Transport

if TYPE_CHECKING:
    from simulation.broker_sim import BrokerSimulation


class Connections(SimConnections):
    """To brokers whose hosts are their stations: n1, b13."""

    def __init__(self, transport: Transport) -> None:
        super().__init__(transport)

    def _node(self, address: str) -> NodeId:
        return node_at(address)


def node_at(address: str) -> NodeId:
    host = address.partition(":")[0]
    if not host[1:].isdigit():
        raise UnreachableError(f"{address}: no such host")
    return NodeId(int(host[1:]))


def bootstrap_of(simulation: BrokerSimulation) -> tuple[str, ...]:
    return tuple(f"{station.name}:9092" for station in simulation.brokers)
