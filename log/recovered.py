"""What the recovery of a log found: its parts, its damage if it has any, and a report for people."""

from dataclasses import dataclass

from tidelog.log.epochs import EpochHistory
from tidelog.log.lineage import Lineage
from tidelog.log.producers import ProducerState
from tidelog.log.segment import ActiveSegment, RecoveryMark, SegmentInfo
from tidelog.model.ids import Offset


@dataclass(frozen=True, slots=True)
class Damage:
    """Below `good_end` the log can be trusted; above it bytes that were acknowledged are missing or wrong."""

    good_end: Offset
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RecoveryReport:
    """What opening a log found and did. `bytes_read` counts bytes of segment files."""

    clean: bool
    recovery_point: int
    was_page_cache: bool = False
    """Records that were acknowledged may have been on no device; after a clean stop all are."""
    bytes_read: int = 0
    batches_scanned: int = 0
    bytes_cut: int = 0
    cut_reason: str | None = None
    rebuilt: tuple[str, ...] = ()
    lost: tuple[str, ...] = ()
    files_removed: int = 0


@dataclass(slots=True, kw_only=True)
class Recovered:
    """A log as recovery leaves it: on the device up to `end_offset`, as committed in `mark`."""

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
    damage: Damage | None
    report: RecoveryReport
    high_watermark: int = 0
    """The stored one, at most `end_offset`."""
    is_named: bool = True
    """Whether the names of the log's directory are on the device. A log that is blank may have had none synced, in this
    life or in one before: they go there with its first records."""
