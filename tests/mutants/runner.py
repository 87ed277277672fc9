"""Runs mutants: plans which seeds and tests can notice each, runs them in a worker, records the outcome."""

import hashlib
import json
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mutants.finder import Mutant, find_mutants
from mutants.hook import ROOT, source_path
from mutants.processes import Worker, WorkerError, WorkerHangsError
from mutants.reach import SIMULATOR, Reach, Run, digest, version_of
from mutants.results import ALIVE, CRASHED, KILLED, NOTICED, SIMULATION, TESTS, UNREACHED, Outcome, Results, Row
from mutants.table import Group

SLOWER = 20
PATIENCE_S = 60.0
"""A run hangs if it takes so many times the CPU time that it took without the mutant, and this."""
TEST_TIMEOUT_MIN_S = 15
SECOND_FILES = 4
"""Whose tests run after those of the first file, and before the rest."""


@dataclass(frozen=True, slots=True)
class Options:
    sample: int | None = None
    """Mutants of each module; all if None."""
    sample_seed: int = 1
    seeds: int = 20
    """Of each stack: 1 to this."""
    only_reach: bool = False
    """Run nothing: find mutants that no seed and no test executes."""
    simulate: bool = True
    test: bool = True
    test_cpu_s: float = 60.0
    """For the tests of one mutant; those that killed others of its module come first, then the cheapest."""
    match: str = ""
    """Only mutants with this text in their key."""
    again: bool = False
    """Ignore what is recorded."""


def sample(mutants: list[Mutant], count: int | None, seed: int) -> list[Mutant]:
    """Mutants drawn by their keys, so that a change of the module leaves most of a sample as it is."""
    if count is None:
        return sorted(mutants)
    return sorted(sorted(mutants, key=lambda mutant: _rank(mutant, seed))[:count])


def _rank(mutant: Mutant, seed: int) -> bytes:
    return hashlib.blake2b(f"{seed} {mutant.key}".encode(), digest_size=8).digest()


class Runner:
    def __init__(self, options: Options, reach: Reach, results: Results, equivalents: dict[Mutant, str]) -> None:
        self._options = options
        self._reach = reach
        self._results = results
        self._equivalents = equivalents
        self._log = ROOT / "build" / "mutants" / "worker.log"
        self.alive: list[tuple[Mutant, str]] = []
        """Those that nothing noticed, with what was tried."""

    def run_module(self, module: str, group: Group) -> Row:
        mutants = find_mutants(module, source_path(module).read_text(encoding="utf-8"))
        chosen = [mutant for mutant in mutants if self._options.match in mutant.key]
        row = Row(module)
        for mutant in sample(chosen, self._options.sample, self._options.sample_seed):
            if mutant in self._equivalents:
                row.mutants += 1
                row.equivalent += 1
                continue
            if self._options.only_reach:
                self._check_reach(mutant, group, row)
                continue
            outcomes = dict(self._outcomes(mutant, group))
            row.count(outcomes.get(SIMULATION), outcomes.get(TESTS))
            if outcomes and not any(outcome.outcome in NOTICED for outcome in outcomes.values()):
                self.alive.append((mutant, "; ".join(outcome.describe() for outcome in outcomes.values())))
        return row

    def _check_reach(self, mutant: Mutant, group: Group, row: Row) -> None:
        seeds = self._reach.seeds(mutant.module, group, self._options.seeds)
        row.mutants += 1
        if any(run.reaches(mutant.module, mutant.block) for run in (*seeds, *self._reach.tests(mutant.module, group))):
            row.pending += 1
        else:
            row.unreached += 1
            self.alive.append((mutant, f"not executed by seeds 1 to {self._options.seeds} and the tests"))

    def _outcomes(self, mutant: Mutant, group: Group) -> Iterator[tuple[str, Outcome]]:
        """By phase: what is recorded, and what is run now. Tests are not run for what the simulation has noticed."""
        phases = [(SIMULATION, self._options.simulate), (TESTS, self._options.test)]
        noticed = False
        for phase, is_asked in phases:
            version = version_of(mutant.module)
            against = self._against(phase, group)
            outcome = None
            if not (self._options.again and is_asked):
                outcome = self._results.get(mutant, phase, version=version, against=against if is_asked else None)
            if outcome is None and is_asked and not (noticed and phase == TESTS):
                outcome = self._run(mutant, phase, group)
                self._results.add(outcome)
                print(f"{mutant.key}  [line {mutant.line}]\n    {phase}: {outcome.describe()}", flush=True)
            if outcome is not None:
                noticed = noticed or outcome.outcome in NOTICED
                yield phase, outcome

    def _against(self, phase: str, group: Group) -> str:
        if phase == SIMULATION:
            parts = [f"{self._options.seeds} {' '.join(group.stacks)}", *(digest(ROOT / part) for part in SIMULATOR)]
        else:
            parts = [f"{self._options.test_cpu_s}", *(digest(ROOT / file) for file in group.test_files())]
        return hashlib.blake2b(" ".join(parts).encode(), digest_size=8).hexdigest()

    def _run(self, mutant: Mutant, phase: str, group: Group) -> Outcome:
        began = time.monotonic()
        killers = self._results.killers(mutant.module)
        if phase == SIMULATION:
            runs = self._reach.seeds(mutant.module, group, self._options.seeds)
            found = self._simulate(mutant, _ordered(runs, mutant, killers))
        else:
            runs = self._reach.tests(mutant.module, group)
            found = self._test(mutant, _staged(runs, mutant, killers, self._options.test_cpu_s))
        return Outcome(
            key=mutant.key,
            phase=phase,
            wall_s=round(time.monotonic() - began, 1),
            version=version_of(mutant.module),
            against=self._against(phase, group),
            **found,
        )

    def _simulate(self, mutant: Mutant, runs: list[Run]) -> dict[str, Any]:
        if not runs:
            return _found(UNREACHED, 0)
        seeds = [(stack, int(number)) for stack, number in (run.name.split() for run in runs)]
        job = {"task": "run seeds", "mutant": mutant.as_json(), "seeds": seeds}
        tried, reached = 0, False
        crash: tuple[str, str, str] | None = None
        try:
            with Worker(job, self._log) as worker:
                for reply in worker.replies(within_s=_patience(runs)):
                    if "reached" in reply:
                        reached = reply["reached"]
                        continue
                    tried += 1
                    by = f"{reply['stack']} {reply['seed']}"
                    if reply["kind"] in ("checker", "progress"):
                        return _found(KILLED, tried, by, reply["kind"], reply["why"])
                    if reply["kind"] == "crashed" and crash is None:
                        crash = (by, "crash", reply["why"])
        except WorkerError as error:
            kind = "hang" if isinstance(error, WorkerHangsError) else "crash"
            crash = crash or (runs[min(tried, len(runs) - 1)].name, kind, str(error).splitlines()[-1])
        if crash is not None:
            return _found(CRASHED, tried, *crash)
        return _found(ALIVE if reached else UNREACHED, tried)

    def _test(self, mutant: Mutant, stages: list[list[Run]]) -> dict[str, Any]:
        runs = [run for stage in stages for run in stage]
        if not runs:
            return _found(UNREACHED, 0)
        timeout_s = max(TEST_TIMEOUT_MIN_S, int(SLOWER * max(run.cpu_s for run in runs)))
        job = {
            "task": "run tests",
            "mutant": mutant.as_json(),
            "stages": [[run.name for run in stage] for stage in stages],
            "timeout_s": timeout_s,
        }
        begun, reached = [runs[0].name], False
        try:
            with Worker(job, self._log) as worker:
                for reply in worker.replies(within_s=timeout_s + PATIENCE_S):
                    if "begins" in reply:
                        begun.append(reply["begins"])
                    elif "failed" in reply:
                        return _found(KILLED, len(begun) - 1, reply["failed"], _kind(reply["failed"]), reply["why"])
                    else:
                        reached = reply["reached"]
        except WorkerHangsError as error:
            return _found(KILLED, len(begun) - 1, begun[-1], _kind(begun[-1]), f"hangs: {error}")
        except WorkerError as error:
            return _found(KILLED, len(begun) - 1, begun[-1], _kind(begun[-1]), str(error).splitlines()[-1])
        if len(begun) - 1 < len(runs):
            raise WorkerError(f"only {len(begun) - 1} of {len(runs)} tests ran, and none failed: {mutant.key}")
        return _found(ALIVE if reached else UNREACHED, len(runs))


def _found(outcome: str, tried: int, by: str = "", kind: str = "", why: str = "") -> dict[str, Any]:
    return {"outcome": outcome, "tried": tried, "by": by, "kind": kind, "why": why}


def _kind(test: str) -> str:
    return "property" if test.startswith("tests/property/") else "unit"


def _patience(runs: list[Run]) -> float:
    return PATIENCE_S + SLOWER * max(run.cpu_s for run in runs)


def _ordered(runs: list[Run], mutant: Mutant, killers: Counter[str]) -> list[Run]:
    """Those that reach the mutant: first those that killed others of its module, then the cheap ones."""
    reaching = [run for run in runs if run.reaches(mutant.module, mutant.block)]
    return sorted(reaching, key=lambda run: (-killers[run.name], run.cpu_s, run.name))


def _staged(runs: list[Run], mutant: Mutant, killers: Counter[str], cpu_s_max: float) -> list[list[Run]]:
    """Tests that reach the mutant, within the time, at least one. First those of the file that killed most mutants of
    the module, or else has most of these tests: most mutants need no other, and files take long to import."""
    files: dict[str, list[Run]] = {}
    for run in _ordered(runs, mutant, killers):
        files.setdefault(run.name.partition("::")[0], []).append(run)
    ranked = sorted(files.values(), key=lambda tests: (-sum(killers[run.name] for run in tests), -len(tests)))
    first, second, rest = ranked[:1], ranked[1 : 1 + SECOND_FILES], ranked[1 + SECOND_FILES :]
    stages: list[list[Run]] = []
    spent_s = 0.0
    for part in (first, second, rest):
        stages.append([])
        for run in _ordered([run for tests in part for run in tests], mutant, killers):
            if stages[0] and spent_s + run.cpu_s > cpu_s_max:
                break
            spent_s += run.cpu_s
            stages[-1].append(run)
    return [stage for stage in stages if stage]


def toml_entry(mutant: Mutant) -> str:
    """For equivalent.toml; the reason is still to be written."""
    lines = ["[[equivalent]]"]
    for name in ("module", "function", "operator", "source", "becomes", "occurrence"):
        value = getattr(mutant, name)
        if (name, value) not in (("becomes", "pass"), ("occurrence", 0)):
            lines.append(f"{name} = {json.dumps(value)}")
    return "\n".join([*lines, 'reason = ""', ""])


def write_alive(alive: list[tuple[Mutant, str]], path: Path) -> None:
    """What is alive, in the format of equivalent.toml."""
    path.parent.mkdir(parents=True, exist_ok=True)
    text = "\n".join(f"# line {mutant.line}: {why}\n{toml_entry(mutant)}" for mutant, why in alive)
    path.write_text(text, encoding="utf-8")
