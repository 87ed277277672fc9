"""A leader's view of one peer, and what it may send to it. Pure.

    PROBE       one append at a time, until the peer's log is found to agree at `next`
    REPLICATE   pipelined: `next` runs ahead of `match`, with bounded bytes and messages in flight
    SNAPSHOT    the peer needs dropped entries: chunks of a snapshot, one at a time

`match` is what the peer has acknowledged as synced in this epoch: it never falls while the leader leads, and `match <=
next` (`validate`). A broken stream, a rejection, or silence brings a peer back to PROBE.
"""

from collections import deque
from enum import Enum

from tidelog.model.ids import Offset
from tidelog.raft.messages import SnapshotId


class Mode(Enum):
    PROBE = "probe"
    REPLICATE = "replicate"
    SNAPSHOT = "snapshot"


# Local aliases: `Mode.X` is slow in Python 3.11 (see `core`).
PROBE, REPLICATE, SNAPSHOT = Mode.PROBE, Mode.REPLICATE, Mode.SNAPSHOT


class Progress:
    def __init__(self, *, next_offset: Offset, directory: bytes, now_ms: int) -> None:
        self.directory = directory
        self.match = Offset(0)
        self.next = next_offset
        self.mode = PROBE
        self.paused = False
        """PROBE and SNAPSHOT: waits for a response."""
        self.inflight: deque[tuple[Offset, int]] = deque()
        """REPLICATE: (end offset, bytes) of each append in flight, oldest first."""
        self.inflight_bytes = 0
        self.snapshot: SnapshotId | None = None
        self.position = 0
        self.probe = 0
        self.counts = True
        self.active_ms = now_ms
        self.advanced_ms = now_ms
        """When it last had everything, or made progress."""
        self.sent_ms = now_ms
        """When the last append was sent, entries or heartbeat."""
        self.asked_ms = now_ms
        """When the request that `paused` waits for was sent."""

    def validate(self, log_end: Offset) -> None:
        """Asserts the invariants, of a leader whose log ends at `log_end`."""
        assert self.match <= self.next <= log_end, f"match {self.match}, next {self.next} of a log up to {log_end}"
        assert self.inflight_bytes == sum(size for _, size in self.inflight), "bytes in flight are counted"
        assert not self.inflight or self.mode is REPLICATE, f"appends in flight in {self.mode.value}"
        assert not self.inflight or self.match < self.inflight[0][0], "an append in flight is acknowledged"
        assert not self.inflight or self.inflight[-1][0] == self.next, "the last append in flight ends at next"
        assert (self.snapshot is not None) == (self.mode is SNAPSHOT), f"{self.mode.value}: snapshot {self.snapshot}"

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
        """Notes an append with entries up to `end` as sent."""
        if self.mode is PROBE:
            self.paused = True
            self.asked_ms = now_ms
        else:
            self.next = end
            self.inflight.append((end, size))
            self.inflight_bytes += size

    def acked(self, match: Offset) -> bool:
        """Notes that the peer has synced up to `match`; returns True if that is an advance."""
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
