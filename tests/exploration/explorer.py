"""Visits every state that a model can reach within bounds, breadth first, and reports the shortest path to a violation.

A model is a state, the actions that are possible in it, and a key. The explorer applies every action to every state
once. It merges states with equal keys: a key has to hold everything that the future depends on, and may leave out names
(a symmetric model gives all renamings of a state one key). A violation is an `AssertionError` that `apply` or
`check_progress` raises. Actions are tuples of plain values, so that a path can be printed and replayed.

The search is complete if it ends because no state is left, not because a bound is reached; `Report` says which.
"""

from __future__ import annotations

import marshal
import pickle
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any, Protocol, TypeVar

Action = tuple[Any, ...]
State = TypeVar("State")
_BATCH = 256


class Model(Protocol[State]):
    def initial(self) -> State: ...

    def actions(self, state: State) -> list[Action]:
        """The actions that are possible here, in a fixed order. Changes nothing."""

    def apply(self, state: State, action: Action) -> None:
        """Changes the state; raises at the first step that breaks a property."""

    def key(self, state: State) -> Any:
        """Everything that the future depends on, of values that `marshal` writes."""

    def check_progress(self, state: State) -> None:
        """Heals the state (a copy) and raises if the system does not work again."""


class ViolationError(AssertionError):
    """A property does not hold at the end of `path`, which no shorter one breaks."""

    def __init__(self, path: tuple[Action, ...], cause: BaseException) -> None:
        steps = "".join(f"\n  {number}. {' '.join(map(str, action))}" for number, action in enumerate(path, start=1))
        super().__init__(f"{cause or type(cause).__name__}; after{steps or ' no step'}")
        self.path = path


@dataclass(frozen=True, slots=True)
class Bounds:
    states_max: int = 1_000_000
    depth_max: int = 1_000
    seconds_max: float = 1e9
    progress_every: int = 0
    """Checks progress from each n-th new state; 0 from none."""


@dataclass(slots=True)
class Report:
    states: int = 0
    transitions: int = 0
    depth: int = 0
    """All paths up to this length were taken."""
    is_complete: bool = False
    """No reachable state is left out."""
    progress_checks: int = 0
    actions: Counter[str] = field(default_factory=Counter)
    """How often each kind of action was taken."""

    def as_dict(self) -> dict[str, Any]:
        return {
            "states": self.states,
            "transitions": self.transitions,
            "depth": self.depth,
            "complete": self.is_complete,
            "progress_checks": self.progress_checks,
            "actions": dict(sorted(self.actions.items())),
        }


def explore(model: Model[State], bounds: Bounds | None = None) -> Report:
    """Returns what was visited; raises `ViolationError` with the shortest path to a violation."""
    return _Search(model, bounds or Bounds()).run()


def replay(model: Model[State], path: tuple[Action, ...]) -> State:
    """The state at the end of a path; raises what its last step raises."""
    state = model.initial()
    for action in path:
        model.apply(state, action)
    return state


class _Search:
    def __init__(self, model: Model[Any], bounds: Bounds) -> None:
        self.model = model
        self.bounds = bounds
        self.report = Report()
        self._seen: set[bytes] = set()
        self._until = time.monotonic() + bounds.seconds_max

    def run(self) -> Report:
        initial = self.model.initial()
        self._is_new(initial)
        frontier: list[tuple[Action, ...]] = [()]
        while frontier and self.report.depth < self.bounds.depth_max:
            following: list[tuple[Action, ...]] = []
            for path in frontier:
                following.extend(self._expand(path))
                if self._is_over():
                    return self.report
            frontier = following
            self.report.depth += 1
        self.report.is_complete = not frontier
        return self.report

    def _is_over(self) -> bool:
        return self.report.states >= self.bounds.states_max or time.monotonic() > self._until

    def _expand(self, path: tuple[Action, ...]) -> Iterator[tuple[Action, ...]]:
        """Takes every action in the state at the end of a path; yields the paths to states that are new.

        The frontier holds paths, not states: a state is a hundred times as large.
        """
        model, report = self.model, self.report
        stored = pickle.dumps(replay(model, path), -1)
        actions = model.actions(pickle.loads(stored))
        for action in actions:
            state = pickle.loads(stored)
            after = (*path, action)
            report.transitions += 1
            report.actions[str(action[0])] += 1
            try:
                model.apply(state, action)
                if not self._is_new(state):
                    continue
                if self.bounds.progress_every and report.states % self.bounds.progress_every == 0:
                    report.progress_checks += 1
                    model.check_progress(pickle.loads(pickle.dumps(state, -1)))
            except AssertionError as error:
                raise ViolationError(after, error) from error
            yield after

    def _is_new(self, state: Any) -> bool:
        # Version 2 of marshal writes values only: later ones also write which of them are the same object.
        digest = blake2b(marshal.dumps(self.model.key(state), 2), digest_size=12).digest()
        if digest in self._seen:
            return False
        self._seen.add(digest)
        self.report.states += 1
        return True
