"""One trial: an operation that is struck, a start that may be struck too, and a check of what is there then.

    prepare     a process of its own, without strikes; it ends by `kill -9`
    change      the next process: opens, then the operation, struck at its k-th call
    reopen      the next start, struck as well in a double trial
    check       the next start: the state is the old or the new one, nothing acknowledged is lost, and it works on
    again       after a loss of all that is not synced: what the check left is still there

A `Story` is what an operation needs of these. `enumerate_trials` yields every strike that its reference run has calls
for: each crash with each kind of loss, each error number at each call where it makes sense, once and until the restart.
"""

import hashlib
from collections.abc import Callable, Coroutine, Iterator
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any, Protocol

from support.crashes.strikes import ERRORS, ROOT, Crash, Fail, Strike, Strikes, is_sensible
from tidelog.model.errors import TidelogError
from tidelog.world.simulated import Loss, SimMachine, SimNode, SimulationError, SimWorld

SEED = 7
PATIENCE_S = 60.0
RECORDED_S = 2.5


class Story(Protocol):
    """One operation, with what comes before and after it. A new one for each trial."""

    @property
    def labels(self) -> list[str]:
        """Of the disks and stores that it uses."""
        ...

    async def prepare(self, node: SimNode) -> None: ...

    async def change(self, node: SimNode, arm: Callable[[], None]) -> None:
        """Calls `arm` between opening and the operation. May raise an error of the catalogue if it is struck."""
        ...

    async def reopen(self, node: SimNode) -> None:
        """Only opens. May raise an error of the catalogue if it is struck."""
        ...

    async def check(self, node: SimNode, outcome: "Outcome") -> None: ...

    async def go_on(self) -> None:
        """In the process whose operation got an error: everything else works."""
        ...

    async def again(self, node: SimNode) -> None: ...


@dataclass(frozen=True, slots=True)
class Operation:
    name: str
    make: Callable[[], Story]


@dataclass(slots=True)
class Outcome:
    """Of `change`, for the check."""

    is_done: bool
    """It returned; it did not raise, and its process did not die."""
    has_failed: bool
    """A call of it, or of a start after it, failed: with an error number, not by a crash."""


@dataclass(frozen=True, slots=True)
class Trial:
    operation: Operation
    first: Strike | None = None
    second: Strike | None = None
    seed: int = SEED

    def __str__(self) -> str:
        then = "" if self.second is None else f", then at the start {self.second}"
        return f"{self.operation.name}: {self.first or 'no strike'}{then}, seed {self.seed}"


@dataclass(slots=True)
class Report:
    """What a trial did: how many calls there were to strike."""

    operations: list[str]
    reopening: list[str]
    lines: set[tuple[str, int]]
    struck: str
    struck_again: str
    is_done: bool


def run_trial(trial: Trial) -> Report:
    """Raises what the check of the story raises."""
    story = trial.operation.make()  # first: it may need a trial of its own
    with SimWorld(trial.seed) as world:
        machine = world.machine("node")
        strikes = Strikes(machine, story.labels)
        world.run(machine.boot(), story.prepare)
        machine.kill()
        is_done = _run(world, machine, strikes, lambda node: story.change(node, lambda: strikes.arm(trial.first)))
        operations, struck, lines = strikes.operations, strikes.has_struck, set(strikes.lines)
        strikes.disarm()
        if machine.node is not None and isinstance(trial.first, Fail) and not trial.first.lasts:
            world.run(machine.node, lambda _: story.go_on(), timeout=PATIENCE_S)
        _end(machine, trial.first, trial.seed)
        strikes.arm(trial.second)
        _run(world, machine, strikes, story.reopen)
        reopening, struck_again = strikes.operations, strikes.has_struck
        strikes.disarm()
        _end(machine, trial.second or trial.first, trial.seed)
        has_failed = isinstance(trial.first, Fail) or isinstance(trial.second, Fail)
        world.run(machine.boot(), lambda node: story.check(node, Outcome(is_done, has_failed)))
        machine.lose_power(Loss.ALL)
        world.run(machine.boot(), story.again)
        return Report(operations, reopening, lines | strikes.lines, struck, struck_again, is_done)


def _run(
    world: SimWorld, machine: SimMachine, strikes: Strikes, main: Callable[[SimNode], Coroutine[Any, Any, None]]
) -> bool:
    """Whether it returned: not if its power went, nor if it raised an error of the catalogue. What still tries after
    `PATIENCE_S` has to succeed as soon as nothing fails any more."""
    node = machine.boot()
    task = node.spawn(main(node))
    try:
        world.run_until(lambda: task.done() or not node.is_alive, timeout=PATIENCE_S)
    except SimulationError:
        world.check()
        strikes.disarm()
        world.run_until(lambda: task.done() or not node.is_alive, timeout=PATIENCE_S)
    if not node.is_alive:
        return False
    error = task.exception()
    if error is not None and not isinstance(error, TidelogError):
        raise error
    if strikes.has_struck:
        # What failed is recorded before the process ends: a process that dies with its device records nothing.
        world.run_for(RECORDED_S)
    return error is None


def _end(machine: SimMachine, strike: Strike | None, seed: int) -> None:
    """The process ends, unless it has. What a device that failed for good had in memory is not seen again."""
    if machine.node is None:
        return
    if isinstance(strike, Crash):
        machine.lose_power(strike.loss)
    elif isinstance(strike, Fail) and strike.lasts:
        machine.lose_power(Loss.ALL)
    elif Random(f"{seed}/{strike}").random() < 0.5:
        machine.kill()
    else:
        machine.lose_power(Random(f"{seed}/{strike}/loss").choice(list(Loss)))


def crashes(count: int, losses: tuple[Loss, ...] = tuple(Loss)) -> Iterator[Crash]:
    for at in range(1, count + 1):
        for loss in losses:
            yield Crash(at, loss)


def failures(operations: list[str]) -> Iterator[Fail]:
    for at, operation in enumerate(operations, 1):
        for number in ERRORS:
            if is_sensible(number, operation):
                yield Fail(at, number)
                yield Fail(at, number, lasts=True)


def sources_seed(name: str) -> int:
    """Changes with the code: a sample of the trials is another one, and the same everywhere, for each version."""
    digest = hashlib.blake2b(name.encode(), digest_size=8)
    for package in ("log", "raft", "metadata", "world", "tests/support/crashes"):
        for path in sorted(Path(ROOT, package).rglob("*.py")):
            digest.update(path.read_bytes())
    return int.from_bytes(digest.digest(), "big")
