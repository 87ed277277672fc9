"""What became of each mutant: build/mutants.jsonl, one line for each mutant and phase, and the table of a run."""

import json
from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

from mutants.finder import Mutant

SIMULATION, TESTS = "simulation", "tests"
KILLED, CRASHED, ALIVE, UNREACHED = "killed", "crashed", "alive", "unreached"
NOTICED = (KILLED, CRASHED)
NO_COUNT = "-"


@dataclass(frozen=True, slots=True)
class Outcome:
    """Of one phase. `crashed`: the mutant let runs of the simulator crash or hang, and no checker named anything;
    `unreached`: no seed or test executes it."""

    key: str
    phase: str
    outcome: str
    by: str
    """The seed (`brokers 7`) or test that noticed it."""
    kind: str
    """Of what noticed it: checker, progress, crash, hang; unit, property."""
    why: str
    tried: int
    """Seeds or tests."""
    wall_s: float
    version: str
    """Of the module's source."""
    against: str
    """Of the seeds or tests that were there to notice it: more of them may notice more."""

    def describe(self) -> str:
        match self.outcome:
            case "alive":
                return f"alive after {self.tried} {'seeds' if self.phase == SIMULATION else 'tests'}"
            case "unreached":
                return "not executed"
            case _:
                return f"{self.outcome} by {self.by} ({self.kind}: {self.why})"


class Results:
    """Appends to the file; the last line of a mutant and phase counts."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._outcomes: dict[tuple[str, str], Outcome] = {}
        if path.exists():
            for line in path.read_text(encoding="utf-8").splitlines():
                outcome = Outcome(**json.loads(line))
                self._outcomes[outcome.key, outcome.phase] = outcome

    def add(self, outcome: Outcome) -> None:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(asdict(outcome)) + "\n")
        self._outcomes[outcome.key, outcome.phase] = outcome

    def get(self, mutant: Mutant, phase: str, *, version: str, against: str | None = None) -> Outcome | None:
        """If it holds for this version of the module. With `against`, what was not noticed counts only if there is
        nothing new to notice it."""
        outcome = self._outcomes.get((mutant.key, phase))
        if outcome is None or outcome.version != version:
            return None
        if against is not None and outcome.outcome not in NOTICED and outcome.against != against:
            return None
        return outcome

    def killers(self, module: str) -> Counter[str]:
        """How many mutants of a module each seed and test has noticed."""
        prefix = f"{module}:"
        outcomes = (outcome for (key, _), outcome in self._outcomes.items() if key.startswith(prefix))
        return Counter(outcome.by for outcome in outcomes if outcome.outcome in NOTICED)


@dataclass(slots=True)
class Row:
    """Of the table: the sampled mutants of a module."""

    module: str
    mutants: int = 0
    equivalent: int = 0
    simulated: int = 0
    by_simulation: int = 0
    crashed: int = 0
    tested: int = 0
    by_property: int = 0
    by_unit: int = 0
    alive: int = 0
    """Executed, and noticed by nothing that was run."""
    unreached: int = 0
    """Executed by nothing that was run."""
    pending: int = 0
    """Not run yet."""

    @property
    def noticed(self) -> int:
        return self.mutants - self.equivalent - self.alive - self.unreached - self.pending

    def count(self, simulation: Outcome | None, tests: Outcome | None) -> None:
        self.mutants += 1
        outcomes = [outcome.outcome for outcome in (simulation, tests) if outcome is not None]
        if simulation is not None:
            self.simulated += 1
            self.by_simulation += simulation.outcome == KILLED
            self.crashed += simulation.outcome == CRASHED
        if tests is not None:
            self.tested += 1
            self.by_property += tests.outcome == KILLED and tests.kind == "property"
            self.by_unit += tests.outcome == KILLED and tests.kind != "property"
        if not outcomes:
            self.pending += 1
        elif not any(outcome in NOTICED for outcome in outcomes):
            self.alive += ALIVE in outcomes
            self.unreached += ALIVE not in outcomes

    def add(self, other: "Row") -> None:
        for name in self.__slots__:
            if name != "module":
                setattr(self, name, getattr(self, name) + getattr(other, name))


HEADINGS = ("module", "mutants", "simulation", "crashed", "property", "unit", "alive", "not executed", "equivalent")


def table(rows: Iterable[Row]) -> str:
    """In Markdown. `simulation` is `killed/run`, since the tests may have been run alone; so are the others."""
    rows = list(rows)
    total = Row("all")
    for row in rows:
        total.add(row)
    lines = [HEADINGS, tuple("---" for _ in HEADINGS)]
    lines += [_cells(row) for row in [*rows, total]]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def _cells(row: Row) -> tuple[str, ...]:
    return (
        row.module,
        str(row.mutants),
        f"{row.by_simulation}/{row.simulated}" if row.simulated else NO_COUNT,
        str(row.crashed) if row.simulated else NO_COUNT,
        f"{row.by_property}/{row.tested}" if row.tested else NO_COUNT,
        f"{row.by_unit}/{row.tested}" if row.tested else NO_COUNT,
        str(row.alive),
        str(row.unreached),
        str(row.equivalent),
    )


def summary(rows: Iterable[Row], *, wall_s: float) -> str:
    """One line of JSON."""
    total = Row("all")
    for row in rows:
        total.add(row)
    counts = {name: getattr(total, name) for name in Row.__slots__ if name != "module"}
    return json.dumps({**counts, "noticed": total.noticed, "wall_s": round(wall_s, 1)})
