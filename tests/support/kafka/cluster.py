"""Whole brokers of the simulator behind the handlers of the Kafka API, without its sockets.

`KafkaCluster.send` carries a request as a connection does: it is encoded and decoded in a version of the protocol,
handled in the process of a broker, and its answer is encoded and decoded in the same version.
"""

from __future__ import annotations

from typing import Any

from support.grpc_api.simulated_nodes import LISTENER, ApiCluster
from support.kafka.server import NO_SESSIONS
from tidelog.model.errors import TidelogError
from tidelog.model.ids import NodeId
from tidelog.model.principals import ANONYMOUS, Principal
from tidelog.rpc.kafka import dispatch
from tidelog.rpc.kafka.api import Api
from tidelog.rpc.kafka.entries import Entry
from tidelog.rpc.kafka.services import ConnectionMemory, Context, DeferredResponse, Origin
from tidelog.services.deadline import deadline_after
from tidelog.services.limits import ResponseMemory
from tidelog.services.services import BrokerServices
from tidelog.world.simulated import SimNode


class KafkaCluster(ApiCluster):
    """`start_brokers` gives each its services; `handlers` are those of the modules under test."""

    def __init__(self, seed: int, handlers: dict[int, Entry], **more: Any) -> None:
        super().__init__(seed, **more)
        self.table = dispatch.build(handlers)
        self.services: dict[int, BrokerServices] = {}

    def __enter__(self) -> KafkaCluster:
        super().__enter__()
        return self

    async def _boot_broker(self, broker: int, more: dict[str, Any], process: SimNode) -> None:
        await super()._boot_broker(broker, more, process)
        self.services[broker] = self.brokers[NodeId(broker)].broker.api

    def send(
        self,
        api: Api[Any, Any],
        request: object,
        *,
        version: int | None = None,
        node: int = 11,
        listener: str = LISTENER,
        timeout_s: float = 60,
        principal: Principal = ANONYMOUS,
    ) -> Any:
        """In the highest version that is served, unless another is named."""
        served = self.table[api.key]
        version = served.high if version is None else version
        assert served.low <= version <= served.high, f"{api} is not served in version {version}"
        services = self.services[node]
        memory = ConnectionMemory(ResponseMemory(self.limits), self.limits)
        origin = Origin(
            listener=listener,
            peer="10.0.0.9:40000",
            host="10.0.0.9",
            memory=memory,
            fetch_sessions=NO_SESSIONS,
            principal=principal,
        )

        async def handle(_: SimNode) -> Any:
            asked = api.decode_request(version, b"".join(api.encode_request(version, request)))
            deadline_s = deadline_after(getattr(asked, "timeout_ms", 0))
            context = Context(services, origin, version, 1, "test", deadline_s)
            try:
                answer = await served.handle(asked, context)
                if isinstance(answer, DeferredResponse):
                    answer = await answer.respond()
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
