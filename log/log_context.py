"""State that all parts of one log share: its path, settings, lock and lifecycle."""

import asyncio
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar

from tidelog.log.config import LogConfig
from tidelog.log.file_pool import FilePool
from tidelog.log.stored_state import Writes, key_prefix
from tidelog.model.ids import PartitionId
from tidelog.world.clock import Clock
from tidelog.world.disk import Disk
from tidelog.world.store import StateStore
from tidelog.world.work import Work

T = TypeVar("T")


@dataclass(slots=True, kw_only=True, eq=False)
class LogContext:
    """Owns the settings (`configure`), `is_closed` (`close`) and `is_changing` (`changing`) of one log.

    `lock` serializes checkpoints and changes of files. Appends and reads do not take it.
    """

    disk: Disk
    store: StateStore
    work: Work
    clock: Clock
    files: FilePool
    path: str
    log_id: PartitionId
    config: LogConfig
    prefix: bytes = field(init=False)
    """Of the log's keys in the store."""
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    is_changing: bool = False
    is_closed: bool = False

    def __post_init__(self) -> None:
        self.prefix = key_prefix(self.log_id)

    def configure(self, config: LogConfig) -> None:
        self.config = config

    def close(self) -> None:
        """Reject appends and changes from now on."""
        self.is_closed = True

    @contextmanager
    def changing(self) -> Iterator[None]:
        """The end of the log is being truncated: an append in this block is a bug of the caller."""
        self.is_changing = True
        try:
            yield
        finally:
            self.is_changing = False

    async def commit(self, fields: Writes) -> None:
        """Write these fields of the log to the state store, in one transaction. None deletes a field."""
        await self.store.commit({self.prefix + name: value for name, value in fields.items()})


async def run_to_completion(change: Coroutine[Any, Any, T]) -> T:
    """Run a change. Cancelling the caller does not stop it: the store would name an intent that the log forgot."""
    task = asyncio.get_running_loop().create_task(change)
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        task.add_done_callback(lambda done: done.cancelled() or done.exception())
        raise
