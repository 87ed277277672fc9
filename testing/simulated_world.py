"""Builds a `NodeWorld` on a simulated machine, for `MemoryCluster`, the simulator and tests."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from tidelog.model.ids import DirectoryId, NodeId
from tidelog.server.world import Directory, NodeWorld
from tidelog.world.simulated import SimNode
from tidelog.world.simulated.network import SimTransport
from tidelog.world.work import Work


def simulated_world(
    process: SimNode,
    transport: SimTransport,
    *,
    cluster_id: str,
    controllers: Callable[[], Sequence[NodeId]],
    metadata: str,
    logs: Mapping[str, DirectoryId],
    on_failure: Callable[[BaseException], None],
    work: Work | None = None,
) -> NodeWorld:
    """`metadata` is the label of the disk and store with the metadata, `logs` are those of the log directories. `work`
    replaces that of the process for logs."""
    return NodeWorld(
        node=transport.me,
        cluster_id=cluster_id,
        metadata=Directory(process.disk(metadata), process.store(metadata)),
        log_directories=tuple(
            Directory(process.disk(label), process.store(label), directory_id) for label, directory_id in logs.items()
        ),
        controllers=controllers,
        to_controllers=transport,
        to_brokers=transport,
        clock=process.clock,
        random=process.random,
        work=work or process.work,
        metadata_work=process.work,
        on_failure=on_failure,
    )
