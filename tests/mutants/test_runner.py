"""A mutant is run in a process of its own, and its outcome is recorded and counted."""

from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from mutants.finder import Mutant, find_mutants
from mutants.hook import source_path
from mutants.processes import Worker, WorkerHangsError
from mutants.reach import Reach, Run, version_of
from mutants.results import ALIVE, CRASHED, KILLED, UNREACHED, Outcome, Results, Row, summary, table
from mutants.runner import Options, Runner, _staged, sample
from mutants.table import Group, read_groups

EPOCHS = "log.epochs"
TEST_FILE = "tests/unit/log/test_epochs.py"
MUTANTS = find_mutants(EPOCHS, source_path(EPOCHS).read_text())
(GROUP,) = (group for group in read_groups() if EPOCHS in group.modules)
TOY = Group("toy", (EPOCHS,), ("core",), (TEST_FILE,))


class FixedReach(Reach):
    """Has measured these runs; they reach every block."""

    def __init__(self, *, seeds: list[str], tests: list[str]) -> None:
        self._seeds = [Run(name, 0.1, {EPOCHS: -1}) for name in seeds]
        self._tests = [Run(name, 0.1, {EPOCHS: -1}) for name in tests]

    def seeds(self, module: str, group: Group, count: int) -> list[Run]:
        return self._seeds

    def tests(self, module: str, group: Group) -> list[Run]:
        return self._tests


def _outcome(mutant: Mutant, phase: str, outcome: str, **fields: str) -> Outcome:
    version, against = fields.get("version", version_of(EPOCHS)), fields.get("against", "")
    return Outcome(
        mutant.key, phase, outcome, fields.get("by", ""), fields.get("kind", ""), "", 1, 0.1, version, against
    )


def test_reach_is_measured_once_and_a_mutant_is_killed_by_a_test_that_reaches_it(tmp_path: Path) -> None:
    """The whole path: probes, a worker, pytest in it."""
    reach = Reach(tmp_path / "reach.jsonl", [TOY])
    runs = reach.tests(EPOCHS, TOY)
    assert len(runs) > 10
    assert all(run.name.startswith(TEST_FILE) for run in runs)
    again = Reach(tmp_path / "reach.jsonl", [TOY])
    measured = (tmp_path / "reach.jsonl").stat().st_size
    assert again.tests(EPOCHS, TOY) == runs
    assert (tmp_path / "reach.jsonl").stat().st_size == measured
    results = Results(tmp_path / "mutants.jsonl")
    mutant = next(mutant for mutant in MUTANTS if mutant.function == "EpochHistory.epoch_for")
    runner = Runner(Options(match=mutant.key, simulate=False), again, results, {})
    row = runner.run_module(EPOCHS, TOY)
    assert (row.mutants, row.tested, row.by_unit, row.alive) == (1, 1, 1, 0)
    recorded = Results(tmp_path / "mutants.jsonl").get(mutant, "tests", version=version_of(EPOCHS))
    assert recorded is not None
    assert recorded.by.startswith(TEST_FILE)


def test_a_seed_kills_a_mutant_and_leaves_another_alive(tmp_path: Path) -> None:
    core = find_mutants("raft.core", source_path("raft.core").read_text())
    every = [Run("core 1", 0.2, {"raft.core": -1}), Run("core 2", 0.2, {"raft.core": -1})]
    runner = Runner(Options(), FixedReach(seeds=[], tests=[]), Results(tmp_path / "mutants.jsonl"), {})
    fatal = next(mutant for mutant in core if mutant.function == "RaftCore.vote_for")
    found = runner._simulate(fatal, every)
    assert (found["outcome"], found["kind"]) == (KILLED, "checker"), found
    unused = next(mutant for mutant in core if mutant.function == "RaftCore._on_transfer")
    found = runner._simulate(unused, every[:1])
    assert (found["outcome"], found["tried"]) == (UNREACHED, 1), found


def test_a_worker_that_hangs_is_killed(tmp_path: Path) -> None:
    job = {"task": "measure seeds", "stack": "core", "seeds": list(range(1, 10_000)), "modules": []}
    with Worker(job, tmp_path / "worker.log") as worker, pytest.raises(WorkerHangsError):
        list(worker.replies(within_s=0.01))
    assert worker._process.returncode == -9


def test_a_mutant_that_does_not_exist_is_no_crash(tmp_path: Path) -> None:
    mutant = replace(MUTANTS[0], source="gone")
    job = {"task": "run tests", "mutant": mutant.as_json(), "stages": [[TEST_FILE]], "timeout_s": 10}
    with Worker(job, tmp_path / "worker.log") as worker, pytest.raises(RuntimeError, match="has no mutant"):
        list(worker.replies(within_s=60.0))


def test_a_recorded_outcome_counts_until_its_module_changes(tmp_path: Path) -> None:
    results = Results(tmp_path / "mutants.jsonl")
    mutant = MUTANTS[0]
    results.add(_outcome(mutant, "tests", KILLED, by="test_a"))
    results.add(_outcome(mutant, "simulation", ALIVE, against="old"))
    results = Results(tmp_path / "mutants.jsonl")
    version = version_of(EPOCHS)
    assert results.get(mutant, "tests", version=version, against="new") is not None, "noticed is noticed"
    assert results.get(mutant, "tests", version="other") is None
    assert results.get(mutant, "simulation", version=version, against="new") is None, "new seeds may notice it"
    assert results.get(mutant, "simulation", version=version, against="old") is not None
    assert results.killers(EPOCHS) == {"test_a": 1}


def test_equivalent_mutants_are_counted_and_not_run(tmp_path: Path) -> None:
    runner = Runner(
        Options(), FixedReach(seeds=[], tests=[]), Results(tmp_path / "mutants.jsonl"), dict.fromkeys(MUTANTS, "reason")
    )
    row = runner.run_module(EPOCHS, GROUP)
    assert (row.mutants, row.equivalent, row.pending) == (len(MUTANTS), len(MUTANTS), 0)
    assert not (tmp_path / "mutants.jsonl").exists()


def test_what_nothing_executes_is_not_alive(tmp_path: Path) -> None:
    runner = Runner(
        Options(match=MUTANTS[0].key), FixedReach(seeds=[], tests=[]), Results(tmp_path / "mutants.jsonl"), {}
    )
    row = runner.run_module(EPOCHS, GROUP)
    assert (row.mutants, row.unreached, row.alive) == (1, 1, 0)
    assert [mutant for mutant, _ in runner.alive] == [MUTANTS[0]]


def test_mutants_that_nothing_executes_are_listed_without_a_run(tmp_path: Path) -> None:
    reach = FixedReach(seeds=["core 1"], tests=[])
    reach._seeds = [Run("core 1", 0.1, {EPOCHS: 1 << MUTANTS[0].block})]
    runner = Runner(Options(only_reach=True), reach, Results(tmp_path / "mutants.jsonl"), {})
    row = runner.run_module(EPOCHS, GROUP)
    assert {mutant for mutant, _ in runner.alive} == {m for m in MUTANTS if m.block != MUTANTS[0].block}
    assert row.unreached == len(runner.alive) == len(MUTANTS) - row.pending
    assert not (tmp_path / "mutants.jsonl").exists()


def test_a_row_counts_each_mutant_once() -> None:
    row = Row(EPOCHS)
    mutant = MUTANTS[0]
    killed = _outcome(mutant, "simulation", KILLED, kind="checker")
    row.count(killed, None)
    row.count(replace(killed, outcome=CRASHED), None)
    row.count(replace(killed, outcome=ALIVE), _outcome(mutant, "tests", KILLED, kind="property"))
    row.count(replace(killed, outcome=ALIVE), _outcome(mutant, "tests", ALIVE))
    row.count(replace(killed, outcome=UNREACHED), _outcome(mutant, "tests", ALIVE))
    row.count(replace(killed, outcome=UNREACHED), _outcome(mutant, "tests", UNREACHED))
    row.count(None, None)
    assert (row.mutants, row.by_simulation, row.crashed, row.by_property) == (7, 1, 1, 1)
    assert (row.alive, row.unreached, row.pending, row.noticed) == (2, 1, 1, 3)
    assert "| log.epochs | 7 | 1/6 | 1 | 1/4 | 0/4 | 2 | 1 | 0 |" in table([row])
    assert '"alive": 2' in summary([row], wall_s=1.0)


def test_tests_of_the_file_that_killed_most_come_first_and_the_cheap_ones_before_others() -> None:
    runs = [Run(f"{file}::test_{n}", cpu_s, {EPOCHS: 1}) for file in "abcdefg" for n, cpu_s in enumerate((3.0, 1.0))]
    runs.append(Run("a::elsewhere", 0.1, {EPOCHS: 2}))
    mutant = replace(MUTANTS[0], block=0)
    killers = Counter({"f::test_0": 2, "c::test_1": 1})
    stages = [[run.name for run in stage] for stage in _staged(runs, mutant, killers, 100.0)]
    assert stages[0] == ["f::test_0", "f::test_1"]
    assert stages[1][:2] == ["c::test_1", "a::test_1"]
    assert [len(stage) for stage in stages] == [2, 8, 4]
    assert [len(stage) for stage in _staged(runs, mutant, killers, 4.5)] == [2]
    assert [len(stage) for stage in _staged(runs, mutant, killers, 0.1)] == [1]


def test_a_sample_is_drawn_by_the_keys() -> None:
    drawn = sample(MUTANTS, 10, 1)
    assert len(set(drawn)) == 10
    assert drawn != sample(MUTANTS, 10, 2)
    assert set(sample([m for m in MUTANTS if m not in drawn[:1]], 10, 1)) > set(drawn[1:])
    assert sample(MUTANTS, None, 1) == sorted(MUTANTS)
