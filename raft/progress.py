"""What a leader knows of one peer, and what it may send to it.

    PROBE       one append at a time, until the peer's log is found to agree at `next`
    REPLICATE   pipelined: `next` runs ahead of `match`, with bounded bytes and messages in flight
    SNAPSHOT    the peer needs entries that are gone: pieces of a snapshot, one at a time

`match` is what the peer has said that it has synced in this epoch: it never falls while the leader leads, and
`match <= next`. Losing the stream, a rejection, or silence brings a peer back to PROBE.
"""

from __future__ import annotations

from collections import deque
from enum import Enum

from tidelog.model.ids import Offset
from tidelog.raft.messages import SnapshotId


class Mode(Enum):
    PROBE = "probe"
    REPLICATE = "replicate"
    SNAPSHOT = "snapshot"


# Names of our own: `Mode.X` is slow in Python 3.11 (see `core`).
PROBE, REPLICATE, SNAPSHOT = Mode.PROBE, Mode.REPLICATE, Mode.SNAPSHOT


class Progress:
    __slots__ = (
        "active_ms",
        "advanced_ms",
        "asked_ms",
        "counts",
        "directory",
        "inflight",
        "inflight_bytes",
        "match",
        "mode",
        "next",
        "paused",
        "position",
        "probe",
        "sent_ms",
        "snapshot",
    )

    def __init__(self, *, next_offset: Offset, directory: bytes, now_ms: int) -> None:
        self.directory = directory
        self.match = Offset(0)
        self.next = next_offset
        self.mode = PROBE
        self.paused = False
        """PROBE and SNAPSHOT: something is out, its answer is awaited."""
        self.inflight: deque[tuple[Offset, int]] = deque()
        """REPLICATE: (end offset, bytes) of each append that is out, oldest first."""
        self.inflight_bytes = 0
        self.snapshot: SnapshotId | None = None
        self.position = 0
        self.probe = 0
        self.counts = True
        self.active_ms = now_ms
        self.advanced_ms = now_ms
        """When it last had everything that was to be had, or came a step nearer."""
        self.sent_ms = now_ms
        """When the last append left, entries or heartbeat."""
        self.asked_ms = now_ms
        """When what is awaited (`paused`) was sent."""

    def to_probe(self, next_offset: Offset) -> None:
        self.mode = PROBE
        self.next = max(next_offset, self.match)
        self.paused = False
        self.snapshot = None
        self.inflight.clear()
        self.inflight_bytes = 0

    def to_replicate(self) -> None:
        self.mode = REPLICATE
        self.paused = False
        self.snapshot = None
        self.next = max(self.next, self.match)

    def to_snapshot(self, snapshot: SnapshotId) -> None:
        self.mode = SNAPSHOT
        self.snapshot = snapshot
        self.position = 0
        self.paused = False
        self.inflight.clear()
        self.inflight_bytes = 0

    def sent(self, end: Offset, size: int, now_ms: int) -> None:
        """An append with entries up to `end` left for this peer."""
        if self.mode is PROBE:
            self.paused = True
            self.asked_ms = now_ms
        else:
            self.next = end
            self.inflight.append((end, size))
            self.inflight_bytes += size

    def acked(self, match: Offset) -> bool:
        """The peer has synced up to `match`; True if that is news."""
        while self.inflight and self.inflight[0][0] <= match:
            self.inflight_bytes -= self.inflight.popleft()[1]
        if match <= self.match:
            return False
        self.match = match
        self.next = max(self.next, match)
        return True

    def has_room(self, *, bytes_max: int, messages_max: int) -> bool:
        if self.mode is REPLICATE:
            return self.inflight_bytes < bytes_max and len(self.inflight) < messages_max
        return not self.paused
