"""Which faults struck which features on which roles: counted by each run, summed by a campaign.

    feature   a part of the product that a run may have. `Coverage.feature` registers it, with a function that tells on
              which roles of a machine it is active now
    acted     how often a feature did its work: segments that retention deleted, elections that were asked for.
              A run that has a feature which never acted is idle in it
    cell      (fault, role, feature): how often a fault struck a machine that had the feature in that role

A fault strikes the machines that it names in what it traces when it begins, and all that run if it names none. What it
does later (`call_later`) strikes the machines that are killed, paused or lose power by it. Each machine counts once for
each step of the plan, role and feature. Coverage draws no random numbers and changes nothing.
"""

import json
import re
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from simulation.cluster import Station

LEADER, FOLLOWER, CONTROLLER, COORDINATOR = "leader", "follower", "controller", "coordinator"
ROLES = (LEADER, FOLLOWER, CONTROLLER, COORDINATOR)
"""Of partitions: leader and follower. The active controller; a coordinator of groups that leads a shard."""
NAME = re.compile(r"\b[a-z]\d+\b")
EMPTY_SHOWN_MAX = 12

Cell = tuple[str, str, str]
RolesOf = Callable[["Station"], Iterable[str]]


@dataclass(slots=True)
class Counts:
    """Of one run, or of many."""

    features: dict[str, tuple[str, ...]] = field(default_factory=dict)
    """By name: the roles in which it can be active."""
    runs: Counter[str] = field(default_factory=Counter)
    """By feature: runs that have it."""
    idle: Counter[str] = field(default_factory=Counter)
    """By feature: runs that have it and in which it never acted."""
    acted: Counter[str] = field(default_factory=Counter)
    faults: Counter[str] = field(default_factory=Counter)
    cells: Counter[Cell] = field(default_factory=Counter)

    def add(self, other: "Counts") -> None:
        for name, roles in other.features.items():
            self.features[name] = tuple(role for role in ROLES if role in {*self.features.get(name, ()), *roles})
        for mine, theirs in (
            (self.runs, other.runs), (self.idle, other.idle), (self.acted, other.acted), (self.faults, other.faults),
        ):  # fmt: skip
            mine.update(theirs)
        self.cells.update(other.cells)

    def empty(self) -> Iterator[Cell]:
        """Cells that no run has filled."""
        for fault in sorted(self.faults):
            for feature, roles in sorted(self.features.items()):
                yield from ((fault, role, feature) for role in roles if not self.cells[fault, role, feature])

    def table(self) -> str:
        """One row for each fault, one column for each feature; a cell has the initials of the roles that were struck
        (l, f, c; o of the coordinator), a dot where none was. `-` marks roles that the feature does not have."""
        names = sorted(self.features)
        lines = ["feature                          runs  idle     acted"]
        for number, name in enumerate(names, 1):
            row = f"{number:>3} {name:<26}"
            lines.append(f"{row} {self.runs[name]:>6} {self.idle[name]:>5} {self.acted[name]:>9}")
        lines.append(f"{'fault':<24} {'struck':>6} " + " ".join(f"{number:>4}" for number in range(1, len(names) + 1)))
        for fault in sorted(self.faults):
            cells = " ".join(self._cell(fault, name) for name in names)
            lines.append(f"{fault:<24} {self.faults[fault]:>6} {cells}")
        empty = list(self.empty())
        total = len(self.faults) * sum(len(roles) for roles in self.features.values())
        lines.append(f"{total - len(empty)} of {total} cells fault x role x feature are filled")
        shown = empty if len(empty) <= EMPTY_SHOWN_MAX else empty[:EMPTY_SHOWN_MAX]
        lines += [f"  empty: {fault} on the {role} of {feature}" for fault, role, feature in shown]
        return "\n".join(lines)

    def _cell(self, fault: str, feature: str) -> str:
        marks = zip("lfco", ROLES, strict=True)
        return "".join(
            "-" if role not in self.features[feature] else mark if self.cells[fault, role, feature] else "."
            for mark, role in marks
        )

    def report(self) -> dict[str, Any]:
        return {
            "features": {
                name: {
                    "roles": list(roles),
                    "runs": self.runs[name],
                    "idle": self.idle[name],
                    "acted": self.acted[name],
                }
                for name, roles in sorted(self.features.items())
            },
            "faults": dict(sorted(self.faults.items())),
            "cells": [
                {"fault": fault, "role": role, "feature": feature, "count": count}
                for (fault, role, feature), count in sorted(self.cells.items())
            ],
            "empty": [{"fault": fault, "role": role, "feature": feature} for fault, role, feature in self.empty()],
        }

    def write(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(self.report(), indent=1) + "\n")


@dataclass(slots=True, eq=False)
class Strike:
    """A step of the plan that has begun."""

    coverage: "Coverage"
    fault: str
    counted: set[tuple[str, str, str]] = field(default_factory=set)
    """(machine, role, feature)."""

    def hit(self, station: "Station") -> None:
        for role, feature in self.coverage.active(station):
            if (station.name, role, feature) not in self.counted:
                self.counted.add((station.name, role, feature))
                self.coverage.counts.cells[self.fault, role, feature] += 1


_strike: ContextVar[Strike | None] = ContextVar("strike", default=None)


def harmed(station: "Station") -> None:
    """A machine is about to be killed, to be paused, or to lose its power."""
    strike = _strike.get()
    if strike is not None:
        strike.hit(station)


class Coverage:
    """What one run has exercised."""

    def __init__(self, stations: Callable[[], Iterable["Station"]]) -> None:
        self.counts = Counts()
        self._stations = stations
        self._roles_of: dict[str, RolesOf] = {}

    def feature(self, name: str, roles: Sequence[str], roles_of: RolesOf) -> None:
        """This run has a feature. `roles` are those in which it can be active; `roles_of` tells which of them a machine
        has now."""
        assert set(roles) <= set(ROLES), "known roles"
        assert name not in self._roles_of, "each feature is registered once"
        self._roles_of[name] = roles_of
        self.counts.features[name] = tuple(roles)
        self.counts.runs[name] = 1
        self.counts.idle[name] = 1

    def acted(self, name: str, times: int = 1) -> None:
        """A feature that this run has did its work."""
        assert name in self._roles_of, f"{name} is registered"
        if times > 0:
            self.counts.acted[name] += times
            self.counts.idle.pop(name, None)

    def active(self, station: "Station") -> list[tuple[str, str]]:
        """(role, feature) of a machine, now."""
        return [(role, name) for name, roles_of in self._roles_of.items() for role in roles_of(station)]

    @contextmanager
    def striking(self, fault: str) -> Iterator[Strike]:
        """A fault begins inside of this block."""
        strike = Strike(self, fault)
        token = _strike.set(strike)
        try:
            yield strike
        finally:
            _strike.reset(token)

    def named(self, text: str) -> None:
        """A fault that is beginning has traced this."""
        strike = _strike.get()
        if strike is not None:
            names = set(NAME.findall(text))
            self._hit(strike, [station for station in self._stations() if station.name in names])

    def begun(self, strike: Strike, traced: Collection[str]) -> None:
        """A fault has begun; it strikes everybody if nothing of what it `traced` names a machine."""
        self.counts.faults[strike.fault] += 1
        names = {station.name for station in self._stations()}
        if not any(names & set(NAME.findall(text)) for text in traced):
            self._hit(strike, self._stations())

    def _hit(self, strike: Strike, stations: Iterable["Station"]) -> None:
        for station in stations:
            if station.is_up:
                strike.hit(station)
