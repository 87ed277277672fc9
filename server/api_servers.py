"""The API servers of a node process: gRPC and the Kafka protocol, on sockets, over the services of the node.

Both share the services, the limits and the memory for requests and responses.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping, Sequence

from tidelog.rpc.grpc.server import GrpcServer, Listener
from tidelog.rpc.kafka import dispatch
from tidelog.rpc.kafka.listener import Acceptor, KafkaServer
from tidelog.rpc.kafka.listener import Listener as KafkaListener
from tidelog.rpc.kafka.shared import Counts, Shared, SocketLimits
from tidelog.rpc.kafka.sockets import Sockets
from tidelog.rpc.protocol_sniffing import WireProtocol
from tidelog.server.config import NodeConfig
from tidelog.server.listeners import listener_hints
from tidelog.server.metrics import Sample, counter, gauge
from tidelog.server.services import NodeServices
from tidelog.services.limits import RequestMemory
from tidelog.services.services import BrokerServices


class ApiServers:
    def __init__(self, config: NodeConfig, services: NodeServices) -> None:
        self._services = services
        listeners = [Listener(name=listener.name, address=listener.address.to_listen_on) for listener in config.grpc]
        self._grpc = GrpcServer(services.handlers, listeners, services.limits, services.responses)
        self.kafka: KafkaServer | None = None
        if services.fetch_sessions is not None and config.kafka:
            sockets = socket_limits(config)
            self.kafka = kafka_server(
                services,
                [KafkaListener(name=one.name, host=one.address.host, port=one.address.port) for one in config.kafka],
                Sockets(sockets),
                requests=self._grpc.memory,
                sockets=sockets,
                other_ports=listener_hints(config.listeners, config.http),
            )

    async def start(self) -> None:
        """Listens; the health service reports that the node does not serve yet."""
        await self._grpc.start(is_serving=False)
        if self.kafka is not None:
            await self.kafka.start()

    async def set_serving(self, is_serving: bool) -> None:
        await self._grpc.set_serving(is_serving)

    async def close(self) -> None:
        if self.kafka is None:
            await self._grpc.close()
        else:
            await asyncio.gather(self._grpc.close(), self.kafka.close())

    def samples(self) -> Iterable[Sample]:
        server = self._grpc
        yield gauge("request_bytes", server.memory.used, "Bytes of requests in progress.")
        yield gauge("requests_waiting", server.memory.waiting, "Requests that wait for memory to be read.")
        yield counter("requests_refused_total", server.memory.rejected, "Requests that timed out waiting for memory.")
        for (service, method), count in sorted(server.requests.items()):
            yield counter("grpc_requests_total", count, "Requests that were read.", service=service, method=method)
        yield gauge("response_bytes", server.responses.used, "Bytes of responses that clients have not read yet.")
        services = self._services.services
        if isinstance(services, BrokerServices):
            data = services.data
            yield gauge("produce_bytes", data.produce.queued_bytes, "Bytes of writes that are not acknowledged yet.")
            yield gauge("fetches_waiting", data.fetch.waiting_fetches, "Fetches that wait for records.")
        if self.kafka is not None:
            yield from _kafka_samples(len(self.kafka), self.kafka.shared.counts)


def kafka_server(
    node: NodeServices,
    listeners: Sequence[KafkaListener],
    acceptor: Acceptor,
    *,
    requests: RequestMemory,
    sockets: SocketLimits,
    other_ports: Mapping[WireProtocol, str],
) -> KafkaServer:
    """Returns a server over the services of a broker. All API servers of the node share `requests`."""
    assert isinstance(node.services, BrokerServices), "only brokers serve Kafka clients"
    assert node.fetch_sessions is not None, "a broker has them"
    shared = Shared(
        services=node.services,
        fetch_sessions=node.fetch_sessions,
        table=dispatch.build(),
        requests=requests,
        responses=node.responses,
        limits=node.limits,
        sockets=sockets,
        counts=Counts(),
        other_ports=other_ports,
    )
    return KafkaServer(shared, listeners, acceptor)


def socket_limits(config: NodeConfig) -> SocketLimits:
    return SocketLimits(
        idle_ms=config.number("connections.max.idle.ms"),
        connections_max=config.number("max.connections"),
        connections_per_ip_max=config.number("max.connections.per.ip"),
        backlog=config.number("socket.listen.backlog.size"),
        send_buffer_bytes=config.number("socket.send.buffer.bytes"),
        receive_buffer_bytes=config.number("socket.receive.buffer.bytes"),
    )


def _kafka_samples(connections: int, counts: Counts) -> Iterable[Sample]:
    yield gauge("kafka_connections", connections, "Connections of Kafka clients.")
    yield counter("kafka_connections_accepted_total", counts.accepted, "Connections that were accepted.")
    yield counter("kafka_connections_refused_total", counts.rejected, "Connections refused by a limit.")
    yield counter("kafka_connections_slow_total", counts.ended_slow, "Closed: a request or a response took too long.")
    yield counter("kafka_connections_idle_total", counts.ended_idle, "Closed: idle for connections.max.idle.ms.")
    yield counter("kafka_bytes_in_total", counts.bytes_in, "Bytes that Kafka clients have sent.")
    yield counter("kafka_bytes_out_total", counts.bytes_out, "Bytes that were sent to them.")
    yield counter("kafka_malformed_total", counts.malformed, "Malformed or unsupported requests.")
    for speech, count in sorted(counts.other_protocols.items()):
        yield counter("kafka_other_protocols_total", count, "Connections with another protocol.", speech=speech)
    for name, api in sorted(counts.apis.items()):
        yield counter("kafka_requests_total", api.requests, "Requests that were answered.", api=name)
    for name, api in sorted(counts.apis.items()):
        yield counter("kafka_request_errors_total", api.errors, "Requests that failed as a whole.", api=name)
    for name, api in sorted(counts.apis.items()):
        yield counter("kafka_request_seconds_total", api.seconds, "Time from arrival to response.", api=name)
