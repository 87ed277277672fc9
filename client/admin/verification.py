"""What `Admin.verify_replicas` returns. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

AGREE, DIFFER, UNVERIFIED = "agree", "differ", "unverified"


@dataclass(frozen=True, slots=True)
class DifferingReplica:
    """One replica at the place of a difference."""

    epoch: int | None
    """Leader epoch of the batch or record; None if it is not there, or cannot be read."""
    digest: str
    """Hexadecimal; empty like `epoch`."""
    fault: str
    """Why the batch cannot be read; empty if it can."""


@dataclass(frozen=True, slots=True)
class ReplicaDifference:
    """The first place where replicas of a partition differ: one batch, or one record of a compacted topic."""

    start: int
    end: int
    """Offsets [start, end)."""
    replicas: Mapping[int, DifferingReplica]
    suspects: tuple[int, ...]
    """Brokers whose batch is corrupt by its checksum; if there is none, those outside of the majority."""
    advice: str


@dataclass(frozen=True, slots=True)
class PartitionVerification:
    """The result for one partition.

    `state` is "agree": all replicas have the same batches in [start, end), below the high watermark. "differ": see
    `difference`. "unverified": some replicas could not be compared, those in `unverified`; the others agree.
    """

    topic: str
    partition: int
    state: str
    start: int
    end: int
    """Where the verification of the leader ended."""
    verified: Mapping[int, int]
    """Broker: the offset up to which its replica agrees with the leader."""
    unverified: Mapping[int, str]
    """Broker: the reason; -1 if the reason concerns the partition."""
    difference: ReplicaDifference | None
    by_record: bool
    """The log is or was compacted: records that both replicas keep were compared, one by one."""
    bytes: int
    """Bytes of the leader's replica that were compared."""


@dataclass(frozen=True, slots=True)
class VerificationProgress:
    partitions: int
    """Partitions that are done."""
    partitions_total: int
    offsets: int
    """Offsets of all partitions that were compared."""


SCRUB = "the scrub (it must not be off: `log.scrub.bytes.per.second` is above 0)"


def advice(broker_faults: Mapping[int, str], suspects: tuple[int, ...], count: int) -> str:
    """What the operator can do: nothing that loses a copy."""
    names = ", ".join(map(str, suspects))
    if broker_faults and len(broker_faults) < count:
        return (
            f"the copy on broker {names} fails its checksum and has been passed to {SCRUB}, which repairs it from a "
            "replica that is sound; run this again. If it stays, see docs/operations.md; remove nothing before"
        )
    if broker_faults:
        return (
            f"the copies on brokers {names} fail their checksums: no sound one is left here. Nothing is removed; keep "
            "all replicas, and restore these offsets from where they came from"
        )
    if len(suspects) < count:
        return (
            f"the copy on broker {names} differs from the others and has been passed to {SCRUB}; run this again. If it "
            "stays, compare the copies with `tidelog log dump` before you replace one"
        )
    return (
        f"no checksum and no majority tells which copy is right; all have been passed to {SCRUB}; run this again. If "
        "it stays, compare the copies with `tidelog log dump` before you replace one"
    )
