"""Connections of a client to nodes that answer as a test says."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from tidelog.model.errors import UnreachableError
from tidelog.rpc.grpc.methods import Method
from tidelog.rpc.v1 import cluster_pb2

Answer = Callable[[str, Any, int], Any]


class ScriptedConnections:
    """Answers of the address `a:1` by the name of the method; everything else is refused."""

    def __init__(self, **answers: Answer) -> None:
        self.answers = answers
        self.timeouts_ms: list[int] = []

    async def call(self, address: str, method: Method, request: Any, *, timeout_ms: int) -> Any:
        answer = self.answers.get(method.name)
        if address != "a:1" or answer is None:
            raise UnreachableError(f"{address}: Connection refused")
        self.timeouts_ms.append(timeout_ms)
        result = answer(address, request, timeout_ms)
        return await result if asyncio.iscoroutine(result) else result

    async def open(self, address: str, _method: Method, _request: Any = None) -> Any:
        raise UnreachableError(f"{address}: Connection refused")

    async def close(self) -> None: ...


def stale_metadata(_address: str, _request: Any, _timeout_ms: int) -> Any:
    """Of a node without an active controller: it believes that broker 2 leads."""
    answer = cluster_pb2.MetadataResponse(cluster_id="c", stale_ms=7_000)
    answer.brokers.add(id=2, host="b", port=2)
    topic = answer.topics.add(name="t", topic_id=bytes(16))
    topic.partitions.add(partition=0, leader=2, leader_epoch=1)
    return answer
