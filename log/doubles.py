"""Logs that stand in more than one place of a node, and which of them counts.

A directory that cannot be read at one start, and can at the next, may come back with a log that was begun anew in
another one meanwhile. Neither files nor state store tell which copy has what the cluster counts on: the cluster's
metadata does, since it records the directory of every replica. So nothing of such a log is opened at the start; the
owner says which directory counts (`Logs.keep`) when its metadata is as new as its registration. The other copies are
set aside under another name, and are the operator's to look at and to remove.
"""

import logging
from collections.abc import Sequence
from dataclasses import dataclass

from tidelog.log.directories import LogDirectory
from tidelog.model.errors import StorageError
from tidelog.model.ids import DirectoryId, PartitionId

LOGGER = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class LogCopy:
    """One place where a log stands."""

    directory: LogDirectory
    name: str

    def __str__(self) -> str:
        return f"{self.directory.disk.label}/{self.name}"


def undecided(log_id: PartitionId, copies: Sequence[LogCopy]) -> StorageError:
    """What the operator is told where the metadata names no place, or another one."""
    places = " and ".join(map(str, copies))
    return StorageError(
        f"partition {log_id.partition} of topic {log_id.topic_id} is there twice: {places};"
        " move one of them away and start the node again",
        path=copies[0].name,
    )


def choose(copies: Sequence[LogCopy], directory: DirectoryId) -> LogCopy | None:
    """The copy in that directory, if there is one, and the directory works."""
    found = [copy for copy in copies if copy.directory.directory_id == directory and copy.directory.failed is None]
    return found[0] if len(found) == 1 else None


async def take_away(log_id: PartitionId, copy: LogCopy, name: str) -> None:
    """Its files stand under another name, durably; what is stored of it goes, since a log may be made here again."""
    directory = copy.directory
    if directory.failed is not None:
        raise directory.failed
    directory.disk.rename(copy.name, name)
    await directory.sync_names("")
    # A crash before this leaves stored state without a log; the next start finds the new name and clears it.
    await directory.forget(log_id)


async def set_aside(log_id: PartitionId, copy: LogCopy) -> None:
    name = copy.directory.free_aside_name(copy.name)
    await take_away(log_id, copy, name)
    LOGGER.error("log=%s does not count and is set aside as %s/%s", copy, copy.directory.disk.label, name)
