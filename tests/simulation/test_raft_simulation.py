"""Raft groups on seeds: the fixed ones, then new ones until the time is up; and that a seed replays exactly."""

import os
import time

import pytest

from simulation.campaign import replay_command
from simulation.raft_sim import run_seed
from simulation.replays import output_in_every_process
from simulation.seeds import FIXED_SEEDS, fresh_seeds

SECONDS = float(os.environ.get("SIM_SECONDS", "60"))

DIGEST_PROGRAM = """
from simulation.raft_sim import run_seed
for seed in (3, 4):
    for stack in ("core", "driver"):
        result = run_seed(seed, stack=stack)
        print(seed, stack, result.events, result.digest, result.failure)
"""


@pytest.mark.sim
@pytest.mark.timeout(SECONDS + 120)
@pytest.mark.parametrize("stack", ["core", "driver"])
def test_no_seed_breaks_a_promise_of_raft(stack: str) -> None:
    """Half of the time for each kind of node."""
    deadline = time.monotonic() + SECONDS / 2
    for seed in FIXED_SEEDS:
        _check(seed, stack)
    for seed in fresh_seeds(stack):
        if time.monotonic() >= deadline:
            break
        _check(seed, stack)


def _check(seed: int, stack: str) -> None:
    result = run_seed(seed, stack=stack)
    if result.failure is not None:
        pytest.fail(f"seed {seed}: {result.failure}\nreplay: {replay_command(seed, stack=stack)}", pytrace=False)
    assert result.acknowledged > 0, f"seed {seed}: nothing was acknowledged, so nothing was tested"


@pytest.mark.sim
@pytest.mark.timeout(180)
def test_a_seed_gives_the_same_run_in_every_process() -> None:
    """Whatever strings hash to and wherever objects lie."""
    output = output_in_every_process(DIGEST_PROGRAM)
    assert len(output.splitlines()) == 4
    assert "None" in output
