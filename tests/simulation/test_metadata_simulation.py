"""The metadata quorum on seeds: the fixed ones, then new ones until the time is up; and every defect is noticed."""

import os
import time

import pytest

from simulation.campaign import all_defects, catch, replay_command
from simulation.defects import Defect
from simulation.metadata_defects import DEFECTS
from simulation.metadata_sim import run_metadata_seed
from simulation.replays import output_in_every_process
from simulation.seeds import FIXED_SEEDS, fresh_seeds, read_catching_seeds

SECONDS = float(os.environ.get("SIM_SECONDS", "60")) / 2
REMEMBERED = read_catching_seeds()

DIGEST_PROGRAM = """
from simulation.metadata_sim import run_metadata_seed
result = run_metadata_seed(8)
print(result.events, result.digest, result.failure)
"""


def _check(seed: int) -> None:
    result = run_metadata_seed(seed)
    if result.failure is not None:
        pytest.fail(f"seed {seed}: {result.failure}\nreplay: {replay_command(seed, stack='metadata')}", pytrace=False)
    assert result.acknowledged > 0, f"seed {seed}: nothing was acknowledged, so nothing was tested"


@pytest.mark.sim
@pytest.mark.timeout(SECONDS + 180)
def test_no_seed_breaks_a_promise_of_the_metadata_quorum() -> None:
    deadline = time.monotonic() + SECONDS
    for seed in FIXED_SEEDS:
        _check(seed)
    for seed in fresh_seeds("metadata"):
        if time.monotonic() >= deadline:
            break
        _check(seed)


@pytest.mark.sim
@pytest.mark.timeout(600)
@pytest.mark.parametrize("defect", DEFECTS, ids=[defect.name for defect in DEFECTS])
def test_the_simulator_notices(defect: Defect) -> None:
    caught = catch(defect, remembered=REMEMBERED.get(defect.name))
    assert caught is not None, f"not noticed in 500 seeds: {defect.what}"


@pytest.mark.sim
@pytest.mark.timeout(180)
def test_a_seed_gives_the_same_run_in_every_process() -> None:
    assert output_in_every_process(DIGEST_PROGRAM).strip().endswith("None")


def test_there_are_enough_defects_and_each_has_its_own_name() -> None:
    assert len(DEFECTS) >= 12
    names = [defect.name for defect in all_defects()]
    assert len(set(names)) == len(names), "they share one list of remembered seeds"
