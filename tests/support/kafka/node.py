"""A whole node with its Kafka API in the process of a test: real sockets, real files, a loop of its own."""

from __future__ import annotations

import asyncio
import gc
import logging
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from support.kafka.server import KafkaClient, soon
from tidelog.rpc.kafka.listener import KafkaServer
from tidelog.rpc.kafka.shared import Shared
from tidelog.server.config import NodeConfig, load
from tidelog.server.local_nodes import Layout, LocalNodes, Ports, free_ports
from tidelog.server.node import Node
from tidelog.services.data import DataServices
from tidelog.services.groups import GroupService

SETTINGS: dict[str, object] = {"offsets.topic.num.partitions": 2, "group.initial.rebalance.delay.ms": 0}
READY_S = 60.0
STOP_S = 30.0


class Lines(logging.Handler):
    """What no client may cause: lines of level ERROR, and lines with a traceback."""

    def __init__(self) -> None:
        super().__init__()
        self.wrong: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        if record.levelno >= logging.ERROR or record.exc_info:
            text = f"{record.levelname} {record.name}: {record.getMessage()}"
            if record.exc_info:
                text += "\n" + logging.Formatter().formatException(record.exc_info)
            self.wrong.append(text)


@dataclass
class KafkaNode:
    node: Node
    lines: Lines
    clients: list[KafkaClient] = field(default_factory=list)

    @property
    def server(self) -> KafkaServer:
        assert self.node.api_servers is not None
        assert self.node.api_servers.kafka is not None
        return self.node.api_servers.kafka

    @property
    def shared(self) -> Shared:
        return self.server.shared

    @property
    def data(self) -> DataServices:
        return self.shared.services.data

    @property
    def groups(self) -> GroupService:
        return self.shared.services.groups

    @property
    def port(self) -> int:
        return next(iter(self.server.ports.values()))

    async def client(self, **options: Any) -> KafkaClient:
        client = KafkaClient(*await asyncio.open_connection("localhost", self.port, **options))
        self.clients.append(client)
        return client

    def drop(self, client: KafkaClient) -> None:
        self.clients.remove(client)
        client.writer.transport.abort()

    def drop_all(self) -> None:
        for client in list(self.clients):
            self.drop(client)

    def held(self) -> dict[str, int]:
        """What is counted; all of it goes back to zero when nobody asks."""
        return {
            "connections": len(self.server),
            "request bytes": self.shared.requests.used,
            "answer bytes": self.shared.responses.used,
            "queued writes": self.data.produce.queued_bytes,
            "waiting fetches": self.data.fetch.waiting_fetches,
        }

    def is_idle(self) -> bool:
        return not any(self.held().values())


def prepare(path: Path, settings: Mapping[str, object] | None = None) -> NodeConfig:
    """Outside of any loop."""
    layout = Layout.fresh([Ports(*free_ports(4))])
    nodes = LocalNodes(path, layout, {**SETTINGS, **(settings or {})})
    nodes.prepare()
    return load(str(nodes.path(1) / "node.toml"), {})


@asynccontextmanager
async def running(config: NodeConfig) -> AsyncIterator[KafkaNode]:
    """Ready, until the block ends; then nothing of it is left, and no line in the log was wrong."""
    lines = Lines()
    logging.getLogger().addHandler(lines)
    node = Node(config)
    task = asyncio.ensure_future(node.run())
    made = KafkaNode(node, lines)
    try:
        await soon(lambda: node.is_ready or task.done(), "the node is ready", timeout_s=READY_S)
        if task.done():
            task.result()
        yield made
        made.drop_all()
        await soon(made.is_idle, "nothing is held", timeout_s=STOP_S)
        gc.collect()  # what was never awaited says so
        assert not lines.wrong, "\n".join(lines.wrong)
    finally:
        made.drop_all()
        node.stop()
        async with asyncio.timeout(STOP_S):
            await task
        logging.getLogger().removeHandler(lines)
        gc.unfreeze()  # the node froze what it found
