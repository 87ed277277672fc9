"""The owners of the state of one open log."""

from dataclasses import dataclass

from tidelog.log.damage import DamageState
from tidelog.log.durability import Durability
from tidelog.log.epochs import LeaderEpochs
from tidelog.log.lineage import LineageState
from tidelog.log.log_context import LogContext
from tidelog.log.log_offsets import LogOffsets
from tidelog.log.producers import ProducerState
from tidelog.log.recovery_checkpoint import RecoveryCheckpoint
from tidelog.log.segments import Segments


@dataclass(frozen=True, slots=True, eq=False)
class LogState:
    """Bundles the owners. Only an owner changes its state; `LogAppender` and others call its methods."""

    context: LogContext
    segments: Segments
    durability: Durability
    offsets: LogOffsets
    epochs: LeaderEpochs
    producers: ProducerState
    damage: DamageState
    checkpoint: RecoveryCheckpoint
    lineage: LineageState
