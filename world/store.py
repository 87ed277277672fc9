"""The state store protocol: small state that changes atomically, such as Raft's epoch and vote, recovery points, high
watermarks and epoch histories.

Contract; one conformance suite tests LMDB and the simulated store:

- `commit` applies a write set entirely or not at all, and returns when it is durable. Commits that are pending at the
  same time share one transaction; they apply in the order of the calls.
- Keys have at most 255 bytes. Every value is stored with a CRC-32C. `get` and `scan` raise `CorruptStateError`, which
  names the key, for a value that fails it: the value is never returned and never silently dropped.
- `DiskFullError`: there was no space for a transaction, and nothing of it is stored, now or after a crash. All commits
  that shared it fail. The store keeps working: a later commit succeeds if there is space. A store keeps a reserve, so
  that small commits that replace values work for a while on a full disk.
- Any other failed commit is fatal for the store: later commits raise too, since the state on disk is unknown. Reads
  work as far as they can.
- `get` and `scan` see commits that have returned, and nothing uncommitted.
"""

from collections.abc import Mapping
from typing import Protocol


class StateStore(Protocol):
    def get(self, key: bytes) -> bytes | None: ...

    def scan(self, prefix: bytes) -> list[tuple[bytes, bytes]]:
        """Returns the keys with this prefix and their values, in key order."""
        ...

    def keys(self, prefix: bytes) -> list[bytes]:
        """Returns the keys with this prefix, in order, including those whose values fail their CRC."""
        ...

    async def commit(self, writes: Mapping[bytes, bytes | None]) -> None:
        """Writes each value; None deletes the key."""
        ...

    def close(self) -> None: ...
