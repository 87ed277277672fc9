"""Errors for `errno` values, and path checks, shared by real and simulated disks and stores."""

import errno
import os

from tidelog.model.errors import DISK_FULL_ADVICE, PROCESS_ERRNOS, DamagedLogError, DiskFullError, StorageError

NO_SPACE = (errno.ENOSPC, errno.EDQUOT)


def path_parts(path: str) -> list[str]:
    """Splits a path below a disk's root. A path outside of the root is a bug and asserts."""
    assert not path.startswith("/"), f"{path!r} is not relative to the log directory"
    assert "\0" not in path, f"{path!r} is no path"
    parts = [part for part in path.split("/") if part not in ("", ".")]
    assert ".." not in parts, f"{path!r} leads out of the log directory"
    return parts


def storage_error(action: str, path: str, error: OSError) -> StorageError:
    """Returns `sync topic-0/00.log: Input/output error (EIO)`, as `DiskFullError` if there is no space.

    A sync without space is no `DiskFullError`: what was written before it is lost, and free space does not restore it.
    """
    number = error.errno or errno.EIO
    name = errno.errorcode.get(number, str(number))
    what = f"{action} {path or '.'}: {os.strerror(number)} ({name})"
    if number in NO_SPACE and not action.startswith("sync"):
        return DiskFullError(f"{what}; {DISK_FULL_ADVICE}", path=path, number=number)
    return StorageError(what, path=path, number=number)


def is_device_error(error: StorageError) -> bool:
    """Whether the device caused the error, rather than missing space, open files or memory, which may become available
    again, or damage of the log itself."""
    if isinstance(error, DiskFullError | DamagedLogError):
        return False
    return error.number not in PROCESS_ERRNOS
