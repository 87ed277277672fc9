"""Locks a directory for one process at a time, by flock on its file `.lock`.

The kernel releases the lock when the process ends, however it ends. The text in the file only informs people.
"""

from __future__ import annotations

import fcntl
import os

from tidelog.model.errors import StorageError

NAME = ".lock"


class DirectoryInUseError(StorageError):
    """Another process uses the directory; `pid` is 0 if it is unknown."""

    def __init__(self, message: str, *, path: str, pid: int) -> None:
        super().__init__(message, path=path)
        self.pid = pid

    @property
    def advice(self) -> str:
        return "stop that process first, or use another directory"


class DirectoryLock:
    """Held from construction to `close`."""

    def __init__(self, directory: str, *, who: str) -> None:
        """`who` describes this process in the errors of others. Raises `DirectoryInUseError`."""
        self._path = os.path.join(directory, NAME)
        self._descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            pid, other = _holder(self._descriptor)
            os.close(self._descriptor)
            user = f"process {pid} ({other})" if pid else "another process"
            raise DirectoryInUseError(f"{directory} is in use by {user}", path=directory, pid=pid) from error
        except OSError as error:
            os.close(self._descriptor)
            raise StorageError(f"{directory}: cannot be locked: {error.strerror}", path=directory) from error
        os.ftruncate(self._descriptor, 0)
        os.pwrite(self._descriptor, f"{os.getpid()} {who}\n".encode(), 0)

    def close(self) -> None:
        if self._descriptor >= 0:
            os.ftruncate(self._descriptor, 0)
            os.close(self._descriptor)
            self._descriptor = -1


def holder_of(directory: str) -> tuple[int, str] | None:
    """Returns (pid, description) of the process that uses the directory; None if none does."""
    try:
        descriptor = os.open(os.path.join(directory, NAME), os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return _holder(descriptor)
    else:
        return None
    finally:
        os.close(descriptor)


def _holder(descriptor: int) -> tuple[int, str]:
    number, _, who = os.pread(descriptor, 200, 0).decode(errors="replace").strip().partition(" ")
    return (int(number) if number.isdecimal() else 0), who or "unknown"
