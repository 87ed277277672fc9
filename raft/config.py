"""The inputs of a core: limits, timeouts, and the state that storage found. Pure."""

from dataclasses import dataclass

from tidelog.model.ids import Epoch, Offset
from tidelog.raft.effects import HardState
from tidelog.raft.membership import Membership
from tidelog.raft.messages import Entry, SnapshotId

_NO_EPOCH_YET = Epoch(0)


@dataclass(frozen=True, slots=True)
class RaftConfig:
    election_timeout_min_ms: int = 500
    election_timeout_max_ms: int = 1000
    heartbeat_interval_ms: int = 100
    broken_stream_wait_max_ms: int = 100
    retry_wait_min_ms: int = 20
    retry_wait_max_ms: int = 150
    disk_stall_timeout_ms: int = 2000
    append_bytes_max: int = 1 << 20
    inflight_bytes_max: int = 8 << 20
    inflight_messages_max: int = 64
    uncommitted_bytes_max: int = 64 << 20
    kept_behind_snapshot_bytes: int = 4 << 20


@dataclass(frozen=True, slots=True)
class BootState:
    """The state that storage found, from which the core starts."""

    hard_state: HardState
    snapshot: SnapshotId
    membership: Membership
    """In force at `start`."""
    start: Offset
    start_epoch: Epoch
    entries: tuple[Entry, ...]
    recovering_until: Offset | None = None
    loss_epoch: Epoch = _NO_EPOCH_YET
    """The epoch when the loss was found: this node has cast no vote after it."""
