"""Small state that must change atomically: Raft's epoch and vote, recovery points, high watermarks, epoch histories.

Contract (one conformance suite for LMDB and the simulated store):

- `commit` applies a write set entirely or not at all, and returns when it is durable. Commits that wait at the same
  time share one transaction; they apply in the order of the calls.
- Keys are at most 255 bytes. Every value is stored with a CRC-32C; a value that fails it raises `CorruptStateError`
  on `get`, naming the key: it is never returned and never silently dropped. `scan` raises likewise.
- `DiskFullError`: there was no room for a transaction, and nothing of it is stored, now or after a crash. All commits
  that shared it are told; the store goes on, and a later commit, the same one too, succeeds if there is room for it.
  A store keeps room in reserve, so that small commits that replace what is there go on for a while on a full disk.
- Any other failed commit is fatal for the store: later commits raise too, since what is on disk is unknown. Reads go
  on as far as they can.
- `get` and `scan` see commits that have returned, and nothing that has not been committed.
"""

from collections.abc import Mapping
from typing import Protocol


class StateStore(Protocol):
    def get(self, key: bytes) -> bytes | None: ...

    def scan(self, prefix: bytes) -> list[tuple[bytes, bytes]]:
        """Keys with this prefix and their values, in key order."""
        ...

    def keys(self, prefix: bytes) -> list[bytes]:
        """Keys with this prefix, in order, whatever their values: also of those that fail their CRC."""
        ...

    async def commit(self, writes: Mapping[bytes, bytes | None]) -> None:
        """Put each value; None deletes the key."""
        ...

    def close(self) -> None: ...
