"""The directories of a running node: locked, with their disks and state stores open.

A log directory that cannot be opened does not stop the node (unless it is the one for metadata): it is left out, told
in the log, and the controller learns from the registration that it is not there.
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

    def close(self) -> None:
        self.store.close()
        self.disk.close()
        self.lock.close()


class NodeDirectories:
    """Opened by construction; `close` after everything that uses them."""

    def __init__(self, config: NodeConfig) -> None:
        self.cluster_id, metas = check_node(config)
        self.open: list[OpenDirectory] = []
        """The one for metadata is the first."""
        self.left_out: dict[str, str] = {path: "it is gone" for path in config.directories if path not in metas}
        self._log_dirs = config.log_dirs if config.is_broker else ()
        try:
            for path, meta in metas.items():
                self._open(path, meta, who=f"tidelog node {config.node}", must=path == config.metadata_dir)
        except BaseException:
            self.close()
            raise
        for path, why in self.left_out.items():
            LOGGER.error("directory=%s is left out: %s", path, why)

    def _open(self, path: str, meta: Meta, *, who: str, must: bool) -> None:
        lock: DirectoryLock | None = None
        try:
            lock = DirectoryLock(path, who=who)
            if not os.path.exists(os.path.join(path, STATE, "data.mdb")):
                # A new store would let the node vote, and lead, without memory.
                raise StorageError(f"{path}: its state store is gone", path=path)
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

    def for_logs(self) -> list[tuple[RealDisk, LmdbStore, DirectoryId]]:
        return [
            (one.disk, one.store, DirectoryId(one.meta.directory)) for one in self.open if one.path in self._log_dirs
        ]

    def close(self) -> None:
        for one in self.open:
            one.close()
        self.open.clear()
