"""One controller as a process of its own: real disk, LMDB, gRPC. The cluster tests and the benchmarks start three.

    python metadata_node.py NODE DIRECTORY HOST:PORT

The directory is formatted (`raft_node.format_directories`). Beside the controller's own service it answers `look`:
whether it is active, how far it has applied, a digest of its image, and the longest time since the last `look` for
which its event loop did not turn. SIGTERM stops it in order.
"""

from __future__ import annotations

import asyncio
import gc
import hashlib
import logging
import signal
import sys
from dataclasses import replace
from pathlib import Path
from random import SystemRandom

import msgpack
from raft_node import CLUSTER_ID, main

from tidelog.metadata.controller_node import ControllerNode
from tidelog.metadata.image import ClusterImage
from tidelog.metadata.snapshot import snapshot_bytes
from tidelog.model.ids import NodeId
from tidelog.rpc.grpc.transport import GrpcTransport
from tidelog.server.controller import ControllerRole
from tidelog.server.role_config import controller_config
from tidelog.server.world import Directory, NodeWorld
from tidelog.world.real.clock import SystemClock
from tidelog.world.real.disk import RealDisk
from tidelog.world.real.store import LmdbStore
from tidelog.world.real.work import ProcessWork

LOOK = "look"
DIGESTED_MAX = 10_000
"""Partitions of an image that is small enough to be digested on the spot."""
TURN_S = 0.002


def digest(image: ClusterImage) -> str:
    if sum(len(topic.partitions) for topic in image.topics.values()) > DIGESTED_MAX:
        return ""
    return hashlib.sha256(snapshot_bytes(image)).hexdigest()


class LoopWatch:
    """The longest time for which the event loop did not turn."""

    def __init__(self) -> None:
        self.worst_s = 0.0

    async def run(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            before = loop.time()
            await asyncio.sleep(TURN_S)
            self.worst_s = max(self.worst_s, loop.time() - before - TURN_S)

    def take_ms(self) -> float:
        worst_s, self.worst_s = self.worst_s, 0.0
        return worst_s * 1000


def serve(transport: GrpcTransport, node: ControllerNode, watch: LoopWatch) -> None:
    async def look(_caller: NodeId, _request: bytes) -> bytes:
        fields = {
            "is_active": node.is_active,
            "offset": node.machine.offset,
            "topics": len(node.image.topics),
            "digest": digest(node.image),
            "stall_ms": watch.take_ms(),
        }
        return bytes(msgpack.packb(fields))

    transport.serve(LOOK, look)


async def run(node: NodeId, path: Path, address: str) -> int:
    disk, store, work = RealDisk(path), LmdbStore(path / "state"), ProcessWork()
    transport = GrpcTransport(node, CLUSTER_ID, address)
    stop = asyncio.Event()
    world = NodeWorld(
        node=node,
        cluster_id=CLUSTER_ID,
        metadata=Directory(disk, store),
        controllers=lambda: [member.node for member in role.membership.voters],
        to_controllers=transport,
        to_brokers=transport,
        clock=SystemClock(),
        random=SystemRandom(),
        work=work,
        metadata_work=work,
        on_failure=lambda _: stop.set(),
    )
    config = controller_config(address=address)
    driver = replace(config.controller.driver, report_after_ms=1_000)
    config = replace(config, controller=replace(config.controller, driver=driver))
    role = await ControllerRole.open(world, config)
    controller = role.node
    watch = LoopWatch()
    watching = asyncio.ensure_future(watch.run())
    serve(transport, controller, watch)
    await role.start()
    gc.freeze()
    await transport.start()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    logging.getLogger("node").info("ready, stalled for at most %.0f ms", watch.worst_s * 1000)
    await stop.wait()
    watching.cancel()
    has_failed = controller.driver.failed is not None
    await role.close()
    await transport.close()
    await work.close()
    store.close()
    disk.close()
    return 1 if has_failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:], run))
