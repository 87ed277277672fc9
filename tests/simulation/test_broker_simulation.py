"""A whole cluster on seeds: the fixed ones, then new ones until the time is up; and every defect is noticed."""

import os
import time

import pytest

from simulation.broker_defects import DEFECTS
from simulation.broker_sim import draw_broker_shape, run_broker_seed
from simulation.campaign import all_defects, catch, replay_command
from simulation.defects import Defect
from simulation.replays import output_in_every_process
from simulation.seeds import FIXED_SEEDS, fresh_seeds, read_catching_seeds

SECONDS = float(os.environ.get("SIM_SECONDS", "60")) / 2
DEFECT_SEEDS_MAX = 200
REMEMBERED = read_catching_seeds()

DIGEST_PROGRAM = """
from simulation.broker_sim import run_broker_seed
result = run_broker_seed(8)
print(result.events, result.digest, result.failure)
"""


def _check(seed: int) -> int:
    result = run_broker_seed(seed)
    if result.failure is not None:
        pytest.fail(f"seed {seed}: {result.failure}\nreplay: {replay_command(seed, stack='brokers')}", pytrace=False)
    return result.acknowledged


@pytest.mark.source("a:N-14")
@pytest.mark.sim
@pytest.mark.timeout(SECONDS + 180)
def test_no_seed_breaks_a_promise_of_the_cluster() -> None:
    deadline = time.monotonic() + SECONDS
    acknowledged = [_check(seed) for seed in FIXED_SEEDS]
    assert min(acknowledged) > 0, "where nothing was acknowledged nothing was tested"
    for seed in fresh_seeds("brokers"):
        if time.monotonic() >= deadline:
            break
        _check(seed)


@pytest.mark.sim
@pytest.mark.timeout(600)
@pytest.mark.parametrize("defect", DEFECTS, ids=[defect.name for defect in DEFECTS])
def test_the_simulator_notices(defect: Defect) -> None:
    caught = catch(defect, remembered=REMEMBERED.get(defect.name), seeds=DEFECT_SEEDS_MAX)
    assert caught is not None, f"not noticed in {DEFECT_SEEDS_MAX} seeds: {defect.what}"


@pytest.mark.sim
@pytest.mark.timeout(180)
def test_a_seed_gives_the_same_run_in_every_process() -> None:
    assert output_in_every_process(DIGEST_PROGRAM).strip().endswith("None")


def test_the_seed_draws_how_the_cluster_is_built() -> None:
    shapes = [draw_broker_shape(seed) for seed in range(1, 60)]
    assert {shape.is_combined for shape in shapes} == {True, False}
    assert {shape.brokers for shape in shapes} == {3, 4}
    assert {topic for shape in shapes for topic in shape.topics} == {"plain", "weak", "unclean"}


def test_there_are_enough_defects_and_each_has_its_own_name() -> None:
    assert len(DEFECTS) >= 12
    assert {defect.stack for defect in DEFECTS} == {"brokers"}
    names = [defect.name for defect in all_defects()]
    assert len(set(names)) == len(names), "they share one list of remembered seeds"
