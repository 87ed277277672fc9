"""What the real and the simulated disk have in common: errors for error numbers, and which paths are paths."""

import errno
import os

from tidelog.model.errors import DiskFullError, StorageError

NO_SPACE = (errno.ENOSPC, errno.EDQUOT)


def path_parts(path: str) -> list[str]:
    """The parts of a path below a disk's root; one that would lead out of it is our own error."""
    assert not path.startswith("/"), f"{path!r} is not relative to the log directory"
    assert "\0" not in path, f"{path!r} is no path"
    parts = [part for part in path.split("/") if part not in ("", ".")]
    assert ".." not in parts, f"{path!r} leads out of the log directory"
    return parts


def storage_error(action: str, path: str, error: OSError) -> StorageError:
    """`append topic-0/00.log: No space left on device (ENOSPC)`, as `DiskFullError` where there is no space."""
    number = error.errno or errno.EIO
    name = errno.errorcode.get(number, str(number))
    kind = DiskFullError if number in NO_SPACE else StorageError
    return kind(f"{action} {path or '.'}: {os.strerror(number)} ({name})", path=path)
