"""The result of the recovery of a log: its state, its damage if any, and a report."""

from dataclasses import dataclass

from tidelog.log.damage import Damage
from tidelog.log.epochs import EpochHistory
from tidelog.log.lineage import Lineage
from tidelog.log.producers import ProducerState
from tidelog.log.segment import ActiveSegment, RecoveryMark, SegmentInfo


@dataclass(frozen=True, slots=True, kw_only=True)
class RecoveryReport:
    """What opening a log found and did. `bytes_read` counts bytes of segment files."""

    clean: bool
    recovery_point: int
    was_page_cache: bool = False
    """Acknowledged records may have been on no device; after a clean stop all are."""
    bytes_read: int = 0
    batches_scanned: int = 0
    bytes_truncated: int = 0
    fault: str | None = None
    rebuilt: tuple[str, ...] = ()
    lost: tuple[str, ...] = ()
    files_removed: int = 0


@dataclass(slots=True, kw_only=True)
class RecoveryResult:
    """A log after recovery: on the device up to `end_offset`, as committed in `mark`."""

    start_offset: int
    end_offset: int
    sealed: list[SegmentInfo]
    active: ActiveSegment
    epochs: EpochHistory
    producers: ProducerState
    snapshots: list[int]
    mark: RecoveryMark
    gaps: bool
    lineage: Lineage
    report: RecoveryReport
    damage: Damage | None = None
    high_watermark: int = 0
    """The stored one, limited to `end_offset`."""
    is_named: bool = True
    """Whether the directory entry of the log is on the device. That of a blank log may not be: it is synced with the
    first records."""
