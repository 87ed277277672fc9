"""Nodes of the simulator and a client that calls their gRPC API over the simulated transport."""

from __future__ import annotations

from typing import Any

from google.protobuf.message import Message

from support.brokers.cluster import ReplicationCluster
from support.metadata.quorum import CONTROLLERS, LISTENER
from tidelog.model.errors import StreamClosedError
from tidelog.model.ids import NodeId
from tidelog.rpc.grpc.methods import END_OF_REQUESTS, decode_response_frame, encode_message, method_named
from tidelog.world.simulated import SimNode

__all__ = ["CONTROLLERS", "LISTENER", "ApiCluster"]


class ApiCluster(ReplicationCluster):
    """The admin's machine calls the API of every node."""

    def __enter__(self) -> ApiCluster:
        super().__enter__()
        return self

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
