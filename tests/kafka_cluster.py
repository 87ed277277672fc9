"""Whole brokers of the simulator behind the handlers of the Kafka door, without its sockets.

`KafkaCluster.send` carries a request as a connection does: it is encoded and decoded in a version of the protocol,
handled in the process of a broker, and its answer is encoded and decoded in the same version.
"""

from __future__ import annotations

from typing import Any

from door_quorum import LISTENER, DoorCluster
from metadata_quorum import CLUSTER

from tidelog.model.errors import TidelogError
from tidelog.model.ids import NodeId
from tidelog.rpc.admin_door import AdminDoor
from tidelog.rpc.cluster_door import ClusterDoor
from tidelog.rpc.door_auto_create import AutoCreate
from tidelog.rpc.door_log_dirs import LogDirs
from tidelog.rpc.door_quorum import QuorumLink
from tidelog.rpc.kafka import dispatch
from tidelog.rpc.kafka.api import Api
from tidelog.rpc.kafka.entries import Entry
from tidelog.rpc.kafka.fetch_sessions import FetchSessions
from tidelog.rpc.kafka.services import AnswerMemory, Context, KafkaServices, Later, Origin
from tidelog.rpc.limits import ResponseMemory
from tidelog.world.simulated import SimNode


class KafkaCluster(DoorCluster):
    """`start_brokers` gives each its services; `handlers` are those of the modules under test."""

    def __init__(self, seed: int, handlers: dict[int, Entry], **more: Any) -> None:
        super().__init__(seed, **more)
        self.table = dispatch.build(handlers)
        self.services: dict[int, KafkaServices] = {}

    def __enter__(self) -> KafkaCluster:
        super().__enter__()
        return self

    def _open_doors(self, node: NodeId, process: SimNode, service: Any, groups: Any = None, **parts: Any) -> None:
        super()._open_doors(node, process, service, groups, **parts)
        if service is None:
            return
        link = QuorumLink(cluster_id=CLUSTER, transport=self._transports[node], **parts)
        log_dirs = LogDirs(service)
        self.services[node] = KafkaServices(
            partitions=service,
            groups=groups,
            link=link,
            auto_create=AutoCreate(link),
            cluster=ClusterDoor(link, process.work, self.limits),
            admin=AdminDoor(link, self.limits, log_dirs),
            log_dirs=log_dirs,
            limits=self.limits,
            fetch_sessions=FetchSessions(process.random),
        )

    def send(
        self,
        api: Api[Any, Any],
        request: object,
        *,
        version: int | None = None,
        node: int = 11,
        listener: str = LISTENER,
        timeout_s: float = 60,
    ) -> Any:
        """In the highest version that is served, unless another is named."""
        served = self.table[api.key]
        version = served.high if version is None else version
        assert served.low <= version <= served.high, f"{api} is not served in version {version}"
        services = self.services[node]
        memory = AnswerMemory(ResponseMemory(self.limits), self.limits)
        origin = Origin(listener=listener, peer="10.0.0.9:40000", host="10.0.0.9", memory=memory)
        context = Context(services, origin, version, 1, "test")

        async def handle(_: SimNode) -> Any:
            asked = api.decode_request(version, b"".join(api.encode_request(version, request)))
            try:
                answer = await served.handle(asked, context)
                if isinstance(answer, Later):
                    answer = await answer.answer()
            except TidelogError as error:
                answer = dispatch.failure(served, version, error.code, str(error))
                if answer is None:
                    raise
            return api.decode_response(version, b"".join(api.encode_response(version, answer)))

        return self.world.run(self.brokers[NodeId(node)].node, handle, timeout=timeout_s)

    def image(self, node: int = 11) -> Any:
        return self.services[node].image

    def until_same(self) -> None:
        """Every broker has heard of what the active controller has decided."""
        end = self.controller(self.active()).machine.offset
        tails = [broker.tail for broker in self.brokers.values()]
        self.world.run_until(lambda: all(tail.offset >= end for tail in tails), timeout=10)
