"""The disk as the code sees it: files that are appended to, read, cut, and synced in groups.

Contract, for the real one and the simulated one alike (one conformance suite tests both):

- Paths are relative to the disk's root, with `/` between parts. A `Disk` is one log directory: one device, one fate.
- `append`, `truncate`, `rename`, `remove` act on the page cache and return at once; they survive a crash of the
  process, and a loss of power only after a sync. A name (a created, renamed or removed file) survives only after a
  sync of its directory.
- `append` keeps all of its bytes or none: a write that fails in the middle is cut back before the error is raised.
- `sync_many` returns when everything written to these files and directories before the call is on the device. If it
  raises, nothing may be assumed of what was written since the last sync that succeeded, now or after a restart of the
  process: the caller treats the directory as failed.
- Errors are `StorageError`, and `DiskFullError` where there is no space: nothing was changed then, and the same call
  may succeed later. A sync raises no `DiskFullError`: one that finds no space has lost what was written.
- Blocking calls (`read`, `sync`) are for start-up and for helper processes; on the event loop use `read_nowait` and
  `read_async`, and `sync_many`.
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
        """Bytes in the file, as known to this handle (one writer at a time)."""
        ...

    def append(self, *buffers: Buffer) -> int:
        """Write the buffers at the end, one after the other; returns the position of the first byte."""
        ...

    def read(self, position: int, length: int) -> bytes:
        """Up to `length` bytes from `position`; fewer only at the end of the file."""
        ...

    def read_nowait(self, position: int, length: int) -> bytes | None:
        """As `read` if all of it is in memory, else None."""
        ...

    async def read_async(self, position: int, length: int) -> bytes:
        """As `read`, off the event loop."""
        ...

    def truncate(self, size: int) -> None:
        """Cut the file to `size` bytes; `size` is at most the file's size."""
        ...

    def close(self) -> None: ...


class Disk(Protocol):
    """One log directory. Picklable where helper processes use it (the real one), so that work can be sent to them."""

    @property
    def label(self) -> str:
        """What to call this directory in messages."""
        ...

    def open(self, path: str, *, create: bool = False) -> File:
        """Open for reading and appending; `create` makes a missing file (its directory must exist)."""
        ...

    def exists(self, path: str) -> bool:
        """Whether a file or directory is there. An error if the disk does not say."""
        ...

    def size(self, path: str) -> int: ...

    def list(self, path: str) -> list[str]:
        """Names in a directory, sorted; an error if it does not exist."""
        ...

    def make_directory(self, path: str) -> None:
        """Make a directory and its parents; existing ones are fine."""
        ...

    def rename(self, source: str, target: str) -> None:
        """Atomic, replaces the target."""
        ...

    def remove(self, path: str) -> None:
        """Remove a file; one that is not there is fine."""
        ...

    def remove_directory(self, path: str) -> None:
        """Remove a directory and the files in it; one that is not there is fine."""
        ...

    def free_bytes(self) -> int: ...

    def total_bytes(self) -> int: ...

    def sync(self, files: Sequence[File], directories: Sequence[str] = ()) -> None:
        """`sync_many`, blocking."""
        ...

    async def sync_many(self, files: Sequence[File], directories: Sequence[str] = ()) -> None: ...
