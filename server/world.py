"""The environment of one node process: everything that a broker or a controller takes from outside.

The node process passes real disks, LMDB and gRPC (`server.node`); `MemoryCluster`, the simulator and the tests pass
simulated ones. `server.broker` and `server.controller` build the same parts from either.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random

from tidelog.model.ids import DirectoryId, NodeId
from tidelog.world.clock import Clock
from tidelog.world.disk import Disk
from tidelog.world.store import StateStore
from tidelog.world.transport import Transport
from tidelog.world.work import Work


@dataclass(frozen=True, slots=True)
class Directory:
    """An open directory. The caller closes it after the roles that use it."""

    disk: Disk
    store: StateStore
    directory_id: DirectoryId | None = None
    """Every log directory has one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeWorld:
    node: NodeId
    cluster_id: str
    metadata: Directory
    """Holds a controller's Raft log, a broker's copy of the metadata and its clean-shutdown marker."""
    log_directories: tuple[Directory, ...] = ()
    controllers: Callable[[], Sequence[NodeId]]
    """Returns the controllers that are known now."""
    to_controllers: Transport
    """Reaches controllers at their quorum endpoints; also serves what other nodes call."""
    to_brokers: Transport
    """Reaches brokers at their registered endpoints. May be `to_controllers` where a node has one address."""
    clock: Clock
    random: Random
    work: Work
    """Recovers, compacts and scrubs logs."""
    metadata_work: Work
    """Encodes and decodes metadata snapshots."""
    admission_work: Work | None = None
    """Decodes produced batches where a topic requires it; None: `work` does."""
    on_failure: Callable[[BaseException], None]
    """Stops the process. A role calls it with an error that it cannot handle; it may be called several times."""

    def log_directory_ids(self) -> list[tuple[Disk, StateStore, DirectoryId]]:
        """Returns the log directories in the form that `Logs.open` takes."""
        directories = []
        for directory in self.log_directories:
            assert directory.directory_id is not None, "a log directory has an id"
            directories.append((directory.disk, directory.store, directory.directory_id))
        return directories
