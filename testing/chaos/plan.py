"""The faults of a run, drawn from a seed. Pure.

    kill        kill -9, and a start after `seconds`
    freeze      SIGSTOP, and SIGCONT after `seconds`
    restart     SIGTERM, and a start after `seconds`
    isolate     no packet reaches the node or leaves it for `seconds`
    quiet       nothing for `seconds`: readers have to catch up

A target may have more kinds. A fault strikes one node, so that a majority always runs, except for kinds that say
otherwise. `target` says how the node is chosen when the time comes: any node, the leader of a partition, the
coordinator of a group or of a transactional id, the active controller. `pick` is the index of that node, partition,
group or id. The plan is the same for the same seed; which node it strikes depends on the run.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from random import Random

KILL, FREEZE, RESTART, ISOLATE, QUIET = "kill", "freeze", "restart", "isolate", "quiet"
ANY, LEADER, COORDINATOR, CONTROLLER = "any", "leader", "coordinator", "controller"
TARGETS = (ANY, LEADER, COORDINATOR, CONTROLLER)


@dataclass(frozen=True, slots=True)
class Kind:
    weight: int
    """How often, compared with others."""
    seconds: tuple[float, float]
    """How long."""
    has_node: bool = True
    """It strikes a node; otherwise the cluster."""
    loses_majority: bool = False
    """Writes cannot be acknowledged while it lasts, and for the time to recover."""


KINDS: Mapping[str, Kind] = {
    KILL: Kind(4, (0.5, 8.0)),
    FREEZE: Kind(4, (1.0, 20.0)),
    RESTART: Kind(1, (0.5, 4.0)),
    ISOLATE: Kind(3, (1.0, 20.0)),
}
QUIET_SHARE = 0.25
"""Of the time, about. A quiet period is longer than a fault, so fewer of the steps are quiet."""
QUIET_S = (15.0, 45.0)
PAUSE_S = (0.5, 8.0)
"""Between two faults."""
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


def draw(
    random: Random,
    kinds: Mapping[str, Kind] = KINDS,
    *,
    quiet_share: float = QUIET_SHARE,
    pause_s: tuple[float, float] = PAUSE_S,
) -> Iterator[Fault]:
    """Faults without end. The share of quiet time is kept by what was drawn so far, so it holds for any length. Without
    a kind there is quiet time only."""
    quiet_s = busy_s = 0.0
    names = list(kinds)
    weights = [kinds[name].weight for name in names]
    while True:
        kind = random.choices(names, weights)[0] if names else QUIET
        if quiet_s < quiet_share * (quiet_s + busy_s) and random.random() < 0.5:
            kind = QUIET
        fault = Fault(
            kind,
            random.choice(TARGETS),
            random.randrange(PICKS),
            random.uniform(*(QUIET_S if kind == QUIET else kinds[kind].seconds)),
            random.uniform(*pause_s),
            random.random() < 0.7,
        )
        if kind == QUIET:
            quiet_s += fault.seconds
        else:
            busy_s += fault.seconds + fault.pause_s
        yield fault
