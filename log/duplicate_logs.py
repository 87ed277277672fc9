"""Chooses between several copies of a log in the directories of a node.

A directory that could not be read at one start may return at the next, with a log that was created again in another
directory meanwhile. Neither the files nor the state store show which copy the cluster relies on. The cluster metadata
does: it records the directory of every replica. So such a log is not opened at the start. The owner names the directory
(`Logs.keep`) when its metadata is as new as its registration. The other copies are renamed, for the operator to inspect
and remove.
"""

import logging
from collections.abc import Sequence
from dataclasses import dataclass

from tidelog.log.directories import ASIDE, LogDirectory
from tidelog.model.errors import StorageError
from tidelog.model.ids import DirectoryId, PartitionId

LOGGER = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class LogCopy:
    """One copy of a log."""

    directory: LogDirectory
    name: str

    def __str__(self) -> str:
        return f"{self.directory.disk.label}/{self.name}"


def undecided(log_id: PartitionId, copies: Sequence[LogCopy]) -> StorageError:
    """The error for the operator if the metadata names no directory with a copy."""
    places = " and ".join(map(str, copies))
    return StorageError(
        f"partition {log_id.partition} of topic {log_id.topic_id} has several copies: {places};"
        " move all but one away and restart the node",
        path=copies[0].name,
    )


def choose(copies: Sequence[LogCopy], directory: DirectoryId) -> LogCopy | None:
    """Return the copy in that directory; None unless it is the only one there and the directory works."""
    candidates = [copy for copy in copies if copy.directory.directory_id == directory and copy.directory.failed is None]
    return candidates[0] if len(candidates) == 1 else None


async def rename_copy(log_id: PartitionId, copy: LogCopy, name: str) -> None:
    """Rename the files durably and delete the stored state, so that a log can be created here again."""
    directory = copy.directory
    if directory.failed is not None:
        raise directory.failed
    directory.disk.rename(copy.name, name)
    await directory.sync_names("")
    # A crash before this leaves stored state without a log; the next start finds the new name and clears it.
    await directory.forget(log_id)


async def set_aside(log_id: PartitionId, copy: LogCopy) -> None:
    name = copy.directory.free_name(copy.name, ASIDE)
    await rename_copy(log_id, copy, name)
    LOGGER.error(
        "log=%s is not the copy in the metadata and is set aside as %s/%s", copy, copy.directory.disk.label, name
    )
