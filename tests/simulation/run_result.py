"""What a seed decides about a run before it begins, and what the run results in."""

from dataclasses import dataclass, field
from enum import Enum
from random import Random

from simulation.coverage import Counts
from simulation.nemesis import PlanStep
from tidelog.raft.config import RaftConfig
from tidelog.world.simulated import Latency

NETWORKS = (Latency(0.0002, 0.001, 0.01, 0.01), Latency(0.001, 0.02), Latency(0.002, 0.05, 0.05, 0.1))
DISKS = (Latency(0.0002, 0.001), Latency(0.001, 0.02, 0.02, 0.1), Latency(0.01, 0.08))


@dataclass(frozen=True, slots=True)
class Shape:
    """What a seed decides about a run before it begins."""

    stack: str
    voters: int
    spares: int
    observers: int
    fault_s: float
    clients: int
    client_pause_s: float
    reads: float
    snapshot_every: int
    piece_bytes: int
    segment_bytes: int
    failover: str | None
    latency: Latency
    disk_latency: Latency
    raft: RaftConfig


def draw_shape(seed: int, stack: str | None = None) -> Shape:
    draw = Random(f"{seed}/shape")
    drawn_stack = "driver" if draw.random() < 0.4 else "core"
    stack = stack or drawn_stack
    snapshot_every = draw.choice((3, 10, 10, 30, 1000))
    # A transfer in many pieces, of a state that a newer one replaces before it is through, would never end.
    piece_bytes, pause_s = draw.choice((64, 256, 4096)), draw.choice((0.04, 0.12, 0.4))
    if snapshot_every < 30:
        piece_bytes, pause_s = 4096, max(pause_s, 0.1)
    heartbeat_ms = draw.choice((100, 150, 250))
    shortest_ms = heartbeat_ms * draw.choice((3, 5))
    return Shape(
        stack=stack,
        voters=draw.choice((3,) * 12 + (5, 5, 5, 5, 4, 4, 2, 1)),
        spares=draw.choice((0, 0, 1, 1, 2)),
        # Drawn from a stream of its own: the rest of a seed's shape is what it was before there were any.
        observers=Random(f"{seed}/observers").choice((1, 1, 2)) if stack == "driver" else 0,
        fault_s=draw.choice((8.0, 12.0, 20.0)),
        clients=draw.choice((1, 1, 2)),
        client_pause_s=pause_s,
        reads=draw.choice((0.1, 0.3, 0.6)),
        snapshot_every=snapshot_every,
        piece_bytes=piece_bytes,
        segment_bytes=draw.choice((400, 2000, 1 << 20)),
        failover=draw.choice((None, "kill", "pause", "isolate")),
        latency=draw.choice(NETWORKS),
        disk_latency=draw.choice(DISKS),
        raft=RaftConfig(
            election_timeout_min_ms=shortest_ms,
            election_timeout_max_ms=shortest_ms * 2,
            heartbeat_interval_ms=heartbeat_ms,
            disk_stall_timeout_ms=draw.choice((500, 2000)),
            append_bytes_max=draw.choice((64, 1 << 10, 1 << 20)),
            inflight_messages_max=draw.choice((1, 4, 64)),
            inflight_bytes_max=draw.choice((256, 8 << 20)),
            uncommitted_bytes_max=draw.choice((2000, 64 << 20)),
            kept_behind_snapshot_bytes=draw.choice((0, 0, 200, 4 << 20)),
        ),
    )


class Symptom(Enum):
    """How a run fails."""

    CHECKER = "a checker names what is wrong"
    PROGRESS = "something that must happen after the healing does not happen in its time"
    CRASH = "code raises what nobody handles, or the run itself ends too early"


@dataclass(slots=True)
class Result:
    seed: int
    failure: str | None
    virtual_s: float
    events: int
    digest: str
    plan: list[PlanStep]
    shape: Shape
    acknowledged: int = 0
    reads: int = 0
    elections: int = 0
    faults: dict[str, int] = field(default_factory=dict)
    counts: dict[str, int] = field(default_factory=dict)
    """How much of what a run may have was there: see the simulation's `counts`."""
    coverage: Counts = field(default_factory=Counts)
    trace: list[str] = field(default_factory=list)
    symptom: Symptom | None = None
    """What kind of failure it is."""
    error: BaseException | None = None
    """Of a crash."""
