"""Opens the directories of a node process: locks them, opens their disks and state stores.

A log directory that cannot be opened does not stop the node, unless it holds the metadata. It is logged and not
registered, so the controller does not count on it.
"""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass

from tidelog.model.errors import StorageError
from tidelog.model.ids import DirectoryId
from tidelog.server.config import NodeConfig
from tidelog.server.locks import DirectoryInUseError, DirectoryLock
from tidelog.server.storage import STATE, Meta, check_node
from tidelog.server.world import Directory
from tidelog.world.real.disk import RealDisk
from tidelog.world.real.store import LmdbStore

LOGGER = logging.getLogger(__name__)


@dataclass(slots=True)
class OpenDirectory:
    path: str
    meta: Meta
    lock: DirectoryLock
    disk: RealDisk
    store: LmdbStore

    def as_world(self) -> Directory:
        return Directory(self.disk, self.store, DirectoryId(self.meta.directory))

    def close(self) -> None:
        self.store.close()
        self.disk.close()
        self.lock.close()


class NodeDirectories:
    """Opened by construction; closed after all parts that use them."""

    def __init__(self, config: NodeConfig) -> None:
        self.cluster_id, metas = check_node(config)
        self.open: list[OpenDirectory] = []
        """The metadata directory is the first."""
        self.left_out: dict[str, str] = {path: "it is missing" for path in config.directories if path not in metas}
        self._log_dirs = config.log_dirs if config.is_broker else ()
        try:
            for path, meta in metas.items():
                self._open(path, meta, who=f"tidelog node {config.node}", must=path == config.metadata_dir)
        except BaseException:
            self.close()
            raise
        for path, reason in self.left_out.items():
            LOGGER.error("directory=%s is not used: %s", path, reason)

    def _open(self, path: str, meta: Meta, *, who: str, must: bool) -> None:
        lock: DirectoryLock | None = None
        try:
            lock = DirectoryLock(path, who=who)
            if not os.path.exists(os.path.join(path, STATE, "data.mdb")):
                # With a new store the node would vote and lead without its past votes.
                raise StorageError(f"{path}: its state store is missing", path=path)
            self.open.append(OpenDirectory(path, meta, lock, RealDisk(path), LmdbStore(os.path.join(path, STATE))))
        except DirectoryInUseError:
            raise
        except (StorageError, OSError) as error:
            if lock is not None:
                lock.close()
            if must:
                raise
            self.left_out[path] = str(error)

    @property
    def metadata(self) -> OpenDirectory:
        return self.open[0]

    @property
    def log_directories(self) -> tuple[Directory, ...]:
        return tuple(directory.as_world() for directory in self.open if directory.path in self._log_dirs)

    def close(self) -> None:
        for one in self.open:
            one.close()
        self.open.clear()
