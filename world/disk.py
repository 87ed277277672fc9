"""The disk protocol: files that are appended to, read, truncated, and synced in groups.

Contract of every implementation; one conformance suite tests the real and the simulated one:

- Paths are relative to the disk's root, with `/` between parts. A `Disk` is one log directory on one device.
- `append`, `truncate`, `rename` and `remove` change the page cache and return at once. They survive a crash of the
  process; they survive a power loss only after a sync. A name (a created, renamed or removed file) survives only after
  a sync of its directory.
- `append` writes all bytes or none: a partial write is truncated before the error is raised.
- `sync_many` returns when everything written to these files and directories before the call is on the device. If it
  raises, the state of everything written since the last successful sync is unknown, now and after a restart of the
  process: the caller treats the directory as failed.
- Errors are `StorageError`, and `DiskFullError` when there is no space: then nothing changed, and the same call may
  succeed later. A sync never raises `DiskFullError`: a sync without space has lost data.
- Blocking calls (`read`, `sync`) are for startup and for helper processes. Code on the event loop uses `read_nowait`,
  `read_async` and `sync_many`.
"""

from collections.abc import Sequence
from typing import Protocol

Buffer = bytes | bytearray | memoryview


class File(Protocol):
    """An open file. Not shared between processes; closing is idempotent."""

    @property
    def path(self) -> str: ...

    @property
    def size(self) -> int:
        """Bytes in the file, as far as this handle knows (one writer at a time)."""
        ...

    def append(self, *buffers: Buffer) -> int:
        """Appends the buffers in order; returns the position of the first byte."""
        ...

    def read(self, position: int, length: int) -> bytes:
        """Returns up to `length` bytes from `position`; fewer only at the end of the file."""
        ...

    def read_nowait(self, position: int, length: int) -> bytes | None:
        """Like `read` if all bytes are in memory, else None."""
        ...

    async def read_async(self, position: int, length: int) -> bytes:
        """Like `read`, off the event loop."""
        ...

    def truncate(self, size: int) -> None:
        """Truncates the file to `size` bytes, which is at most its size."""
        ...

    def close(self) -> None: ...


class Disk(Protocol):
    """One log directory. The real implementation is picklable, so that helper processes can use it."""

    @property
    def label(self) -> str:
        """Names this directory in messages."""
        ...

    def open(self, path: str, *, create: bool = False) -> File:
        """Opens a file for reading and appending; `create` creates a missing file (its directory must exist)."""
        ...

    def exists(self, path: str) -> bool:
        """Whether the file or directory exists. Raises if the disk cannot tell."""
        ...

    def size(self, path: str) -> int: ...

    def list(self, path: str) -> list[str]:
        """Returns the names in a directory, sorted; raises if it does not exist."""
        ...

    def make_directory(self, path: str) -> None:
        """Creates a directory and its parents; existing ones are no error."""
        ...

    def rename(self, source: str, target: str) -> None:
        """Renames atomically; replaces the target."""
        ...

    def remove(self, path: str) -> None:
        """Removes a file; a missing one is no error."""
        ...

    def remove_directory(self, path: str) -> None:
        """Removes a directory and its files; a missing one is no error."""
        ...

    def free_bytes(self) -> int: ...

    def total_bytes(self) -> int: ...

    def sync(self, files: Sequence[File], directories: Sequence[str] = ()) -> None:
        """Like `sync_many`, blocking."""
        ...

    async def sync_many(self, files: Sequence[File], directories: Sequence[str] = ()) -> None: ...
