"""What real and simulated disks and stores have in common: errors for error numbers, and which paths are paths."""

import errno
import os

from tidelog.model.errors import FULL_ADVICE, OF_THE_PROCESS, DamagedLogError, DiskFullError, StorageError

NO_SPACE = (errno.ENOSPC, errno.EDQUOT)


def path_parts(path: str) -> list[str]:
    """The parts of a path below a disk's root; one that would lead out of it is our own error."""
    assert not path.startswith("/"), f"{path!r} is not relative to the log directory"
    assert "\0" not in path, f"{path!r} is no path"
    parts = [part for part in path.split("/") if part not in ("", ".")]
    assert ".." not in parts, f"{path!r} leads out of the log directory"
    return parts


def storage_error(action: str, path: str, error: OSError) -> StorageError:
    """`sync topic-0/00.log: Input/output error (EIO)`, as `DiskFullError` where there is no space.

    A sync for which there is no space is none: what was written before it is lost, and room does not bring it back.
    """
    number = error.errno or errno.EIO
    name = errno.errorcode.get(number, str(number))
    what = f"{action} {path or '.'}: {os.strerror(number)} ({name})"
    if number in NO_SPACE and not action.startswith("sync"):
        return DiskFullError(f"{what}; {FULL_ADVICE}", path=path, number=number)
    return StorageError(what, path=path, number=number)


def is_device_error(error: StorageError) -> bool:
    """Whether a write failed by the device: not for want of room, of open files or of memory, which may come back, and
    not since the log itself is damaged."""
    if isinstance(error, DiskFullError | DamagedLogError):
        return False
    return error.number not in OF_THE_PROCESS
