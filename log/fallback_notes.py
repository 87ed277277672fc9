"""Notes in the directory of a log, for when the state store fails together with its device. Pure.

    suspect.note     a sync failed: everything from this offset on may be in the page cache only
    unsynced.note    the sync that ends a recovery failed: the files have to be written again

Each is a small file with the offset, in the form of the stored field. Nothing syncs it: it matters only as long as the
page cache shows records that the device lacks, and the page cache shows the note for as long. The next opening moves
notes to the state store. It erases the files before the sync that ends it, and only then deletes the stored fields: a
note that came back after a loss of power would truncate what was acknowledged in between.
"""

from __future__ import annotations

from contextlib import closing, suppress

from tidelog.log import stored_state as stored
from tidelog.model.errors import CorruptStateError, StorageError
from tidelog.world.disk import Disk

SUFFIX = ".note"
KINDS = {stored.SUSPECT: "suspect", stored.UNSYNCED: "unsynced"}
"""Fields of the state store, and the kinds of their values."""


def leave(disk: Disk, directory: str, field: bytes, offset: int) -> None:
    """Leave a note. Raises `StorageError`."""
    path = _path(directory, field)
    disk.remove(path)
    with closing(disk.open(path, create=True)) as file:
        file.append(stored.encode_number(KINDS[field], offset))


def read(disk: Disk, directory: str) -> dict[bytes, int]:
    """The notes of a log. One that cannot be decoded is from before a loss of power, and says nothing any more."""
    notes = {}
    for field, kind in KINDS.items():
        path = _path(directory, field)
        if disk.exists(path):
            with closing(disk.open(path)) as file, suppress(CorruptStateError):
                notes[field] = stored.decode_number(kind, file.read(0, file.size))
    return notes


def erase(disk: Disk, directory: str) -> None:
    """Erase the notes with the next sync of the directory, also those of which a failed sync left the names on the
    device: they are created once more, so that their removal is a change."""
    for field in KINDS:
        path = _path(directory, field)
        with suppress(StorageError):  # without space there is nothing to create
            disk.open(path, create=True).close()
        disk.remove(path)


def _path(directory: str, field: bytes) -> str:
    return f"{directory}/{field.decode()}{SUFFIX}"
