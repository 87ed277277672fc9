"""The faults of `STACK=lab`, and what they are drawn from."""

import ast
from random import Random

import pytest

from simulation.campaign import replay_command
from simulation.lab_faults import LAB_FAULTS, WORK_KINDS, draw_lab_plan
from simulation.raft_sim import run_seed
from simulation.seeds import ROOT

PACKAGES = ("log", "raft", "metadata", "replication", "coordinator", "services", "server")
ENCODERS = {"encode"}
"""Attributes that name the function when they run: `snapshot_bytes` in the product."""
SEEDS = (2, 3, 4)
"""The last one has consumer groups."""


def _runs() -> set[str]:
    """What the product runs in helper processes."""
    found = set()
    for package in PACKAGES:
        for path in sorted((ROOT / package).rglob("*.py")):
            for call in ast.walk(ast.parse(path.read_text())):
                if isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute) and call.args:
                    owner = ast.unparse(call.func.value).rpartition(".")[2].lstrip("_")
                    if call.func.attr == "run" and owner == "work":
                        found.add(ast.unparse(call.args[0]).rpartition(".")[2])
    return found


def test_helpers_can_die_in_every_kind_of_work() -> None:
    assert _runs() - ENCODERS == set(WORK_KINDS)


def test_every_fault_of_the_lab_is_drawn() -> None:
    drawn = {step.fault for seed in range(40) for step in draw_lab_plan(Random(seed), from_s=2.0, until_s=10.0)}
    assert drawn == {name for name, _, _ in LAB_FAULTS}


@pytest.mark.sim
@pytest.mark.timeout(120)
@pytest.mark.parametrize("seed", SEEDS)
def test_no_seed_of_the_lab_breaks_a_promise(seed: int) -> None:
    result = run_seed(seed, stack="lab")
    if result.failure is not None:
        pytest.fail(f"seed {seed}: {result.failure}\nreplay: {replay_command(seed, stack='lab')}", pytrace=False)
    assert result.acknowledged > 0
    assert {name for name, _, _ in LAB_FAULTS} & set(result.faults)
