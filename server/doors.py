"""The public API of a node: its doors, built from what the node is, and the listeners that they stand behind.

A broker has two front doors, gRPC and Kafka's protocol, over the same services and within the same limits of memory.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence
from random import Random

from tidelog import __version__
from tidelog.metadata.broker_side import BrokerConfig, ControllerClient
from tidelog.model.ids import NodeId
from tidelog.replication.service import PartitionService, ServiceConfig
from tidelog.rpc.admin_door import AdminDoor
from tidelog.rpc.cluster_door import ClusterDoor
from tidelog.rpc.door import Doors, serve_forwarded
from tidelog.rpc.door_auto_create import AutoCreate
from tidelog.rpc.door_log_dirs import LogDirs
from tidelog.rpc.door_quorum import QuorumLink
from tidelog.rpc.groups_door import GroupsDoor
from tidelog.rpc.grpc_server import GrpcServer, Listener
from tidelog.rpc.kafka import dispatch
from tidelog.rpc.kafka.fetch_sessions import FetchSessions
from tidelog.rpc.kafka.listener import KafkaServer
from tidelog.rpc.kafka.listener import Listener as KafkaListener
from tidelog.rpc.kafka.services import KafkaServices
from tidelog.rpc.kafka.shared import Counts, Shared, SocketLimits
from tidelog.rpc.limits import DoorLimits, ResponseMemory
from tidelog.rpc.log_door import LogDoor
from tidelog.rpc.transport import GrpcTransport
from tidelog.server.broker_part import BrokerPart
from tidelog.server.config import NodeConfig
from tidelog.server.controller_part import ControllerPart
from tidelog.server.kafka_metrics import kafka_samples
from tidelog.server.kafka_settings import node_settings
from tidelog.server.listeners import where_doors_are
from tidelog.server.metrics import Sample, counter, gauge
from tidelog.world.work import Work


class PublicDoors:
    def __init__(
        self,
        config: NodeConfig,
        cluster_id: str,
        transport: GrpcTransport,
        controllers: Callable[[], Sequence[NodeId]],
        *,
        controller: ControllerPart | None,
        broker: BrokerPart | None,
        between_brokers: GrpcTransport | None,
        work: Work,
        random: Random,
    ) -> None:
        limits = door_limits(config)
        client = (
            ControllerClient(transport, controllers, BrokerConfig(), random) if broker is None else broker.agent.client
        )
        link = QuorumLink(
            cluster_id=cluster_id,
            transport=transport,
            client=client,
            controller=None if controller is None else controller.node,
            tail=None if broker is None else broker.tail,
            brokers=between_brokers,
        )
        responses = ResponseMemory(limits)
        self._service = None if broker is None else PartitionService(broker.replicas, service_config(config))
        log = None if self._service is None else LogDoor(self._service, lambda: link.image, limits, responses)
        cluster = ClusterDoor(link, work, limits, version=__version__)
        self._log_dirs = None if self._service is None else LogDirs(self._service)
        groups = None if broker is None else GroupsDoor(broker.groups, lambda: link.image, limits)
        admin = AdminDoor(link, limits, self._log_dirs)
        doors = Doors(cluster=cluster, admin=admin, log=log, groups=groups)
        serve_forwarded(transport, doors)
        listeners = [Listener(name=one.name, address=one.address.to_listen_on) for one in config.grpc]
        self._server = GrpcServer(doors, listeners, limits, responses)
        self._kafka: KafkaServer | None = None
        if broker is not None and self._service is not None and self._log_dirs is not None and config.kafka:
            services = KafkaServices(
                partitions=self._service,
                groups=broker.groups,
                link=link,
                auto_create=AutoCreate(link),
                cluster=cluster,
                admin=admin,
                log_dirs=self._log_dirs,
                limits=limits,
                fetch_sessions=FetchSessions(
                    random, slots_max=config.number("max.incremental.fetch.session.cache.slots")
                ),
                version=__version__,
                node_settings=node_settings(config),
            )
            self._kafka = kafka_server(config, services, self._server)

    async def start(self) -> None:
        """Listen; the health service says that the node does not serve yet."""
        await self._server.start(is_serving=False)
        if self._kafka is not None:
            await self._kafka.start()

    async def set_serving(self, is_serving: bool) -> None:
        await self._server.set_serving(is_serving)

    async def close(self) -> None:
        if self._kafka is None:
            await self._server.close()
        else:
            await asyncio.gather(self._server.close(), self._kafka.close())
        if self._log_dirs is not None:
            await self._log_dirs.close()

    def samples(self) -> Iterable[Sample]:
        server = self._server
        yield gauge("request_bytes", server.memory.used, "Bytes of requests that are being answered.")
        yield gauge("requests_waiting", server.memory.waiting, "Requests that wait for room to be read.")
        yield counter("requests_refused_total", server.memory.refused, "Requests that waited for room in vain.")
        for (service, method), count in sorted(server.requests.items()):
            yield counter("grpc_requests_total", count, "Requests that were read.", service=service, method=method)
        yield gauge("response_bytes", server.responses.used, "Fetched bytes that clients have not taken yet.")
        if self._service is not None:
            yield gauge("produce_bytes", self._service.queued_bytes, "Bytes of writes that are not acknowledged yet.")
            yield gauge("fetches_waiting", self._service.waiting_fetches, "Fetches that wait for records.")
        if self._kafka is not None:
            yield from kafka_samples(len(self._kafka), self._kafka.shared.counts)


def kafka_server(config: NodeConfig, services: KafkaServices, grpc: GrpcServer) -> KafkaServer:
    """It counts its requests and answers with those of the gRPC door."""
    shared = Shared(
        services=services,
        table=dispatch.build(),
        requests=grpc.memory,
        responses=grpc.responses,
        limits=services.limits,
        sockets=socket_limits(config),
        counts=Counts(),
        doors=where_doors_are(config.listeners, config.http),
    )
    listeners = [KafkaListener(name=one.name, host=one.address.host, port=one.address.port) for one in config.kafka]
    return KafkaServer(shared, listeners)


def service_config(config: NodeConfig) -> ServiceConfig:
    return ServiceConfig(
        queued_bytes_max=config.number("queued.max.request.bytes"), fetch_bytes_max=config.number("fetch.max.bytes")
    )


def socket_limits(config: NodeConfig) -> SocketLimits:
    return SocketLimits(
        idle_ms=config.number("connections.max.idle.ms"),
        connections_max=config.number("max.connections"),
        connections_per_ip_max=config.number("max.connections.per.ip"),
        backlog=config.number("socket.listen.backlog.size"),
        send_buffer_bytes=config.number("socket.send.buffer.bytes"),
        receive_buffer_bytes=config.number("socket.receive.buffer.bytes"),
    )


def door_limits(config: NodeConfig) -> DoorLimits:
    return DoorLimits(
        message_bytes_max=config.number("socket.request.max.bytes"),
        request_bytes_max=config.number("queued.max.request.bytes"),
        fetch_bytes_max=config.number("fetch.max.bytes"),
    )
