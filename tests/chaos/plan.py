"""The faults of a run, drawn from a seed. Pure.

    kill        kill -9, and a start after `seconds`
    freeze      SIGSTOP, and SIGCONT after `seconds`
    restart     SIGTERM, and a start after `seconds`
    full-disk   the log directory has no free byte for `seconds`
    quiet       nothing for `seconds`: readers have to catch up

A fault strikes one node, so that a majority always runs. `target` says how the node is chosen when the time comes: any
node, the leader of a partition, the coordinator of a group, the active controller. `pick` is the index of that node,
partition or group. The plan is the same for the same seed; which node it strikes depends on the run.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from random import Random

KILL, FREEZE, RESTART, FULL_DISK, QUIET = "kill", "freeze", "restart", "full-disk", "quiet"
KINDS = (KILL, FREEZE, RESTART, FULL_DISK)
ANY, LEADER, COORDINATOR, CONTROLLER = "any", "leader", "coordinator", "controller"
TARGETS = (ANY, LEADER, COORDINATOR, CONTROLLER)

QUIET_SHARE = 0.25
"""Of the time, about. A quiet period is longer than a fault, so fewer of the steps are quiet."""
SECONDS: dict[str, tuple[float, float]] = {
    KILL: (0.5, 8.0),
    FREEZE: (1.0, 20.0),
    RESTART: (0.5, 4.0),
    FULL_DISK: (2.0, 15.0),
    QUIET: (15.0, 45.0),
}
PAUSE_S = (0.5, 8.0)
"""Between two faults."""
WEIGHTS = {KILL: 4, FREEZE: 4, RESTART: 1, FULL_DISK: 2}
PICKS = 1 << 16


@dataclass(frozen=True, slots=True)
class Fault:
    kind: str
    target: str
    pick: int
    seconds: float
    pause_s: float
    waits_for_sync: bool
    """Whether the next fault waits until all replicas are in sync. Otherwise it can strike while writes are refused."""

    def __str__(self) -> str:
        where = "" if self.kind == QUIET else f" target={self.target}"
        return f"{self.kind}{where} seconds={self.seconds:.1f}"


def draw(random: Random, kinds: tuple[str, ...] = KINDS) -> Iterator[Fault]:
    """Faults without end. The share of quiet time is kept by what was drawn so far, so it holds for any length."""
    assert kinds, "at least one kind of fault"
    quiet_s = busy_s = 0.0
    weights = [WEIGHTS[kind] for kind in kinds]
    while True:
        kind = random.choices(kinds, weights)[0]
        if quiet_s < QUIET_SHARE * (quiet_s + busy_s) and random.random() < 0.5:
            kind = QUIET
        fault = Fault(
            kind,
            random.choice(TARGETS),
            random.randrange(PICKS),
            random.uniform(*SECONDS[kind]),
            random.uniform(*PAUSE_S),
            random.random() < 0.7,
        )
        if kind == QUIET:
            quiet_s += fault.seconds
        else:
            busy_s += fault.seconds + fault.pause_s
        yield fault
