"""Consumer groups and writers on seeds: the fixed ones, then new ones until the time is up; every defect is noticed."""

import os
import time

import pytest

from simulation.campaign import all_defects, catch, replay_command
from simulation.defects import Defect
from simulation.groups_defects import DEFECTS
from simulation.groups_sim import draw_groups_shape, run_groups_seed
from simulation.replays import output_in_every_process
from simulation.seeds import FIXED_SEEDS, fresh_seeds, read_catching_seeds

SECONDS = float(os.environ.get("SIM_SECONDS", "60")) / 2
DEFECT_SEEDS_MAX = 100
REMEMBERED = read_catching_seeds()

DIGEST_PROGRAM = """
from simulation.groups_sim import run_groups_seed
result = run_groups_seed(3)
print(result.events, result.digest, result.failure)
"""


def _check(seed: int) -> tuple[int, int]:
    result = run_groups_seed(seed)
    if result.failure is not None:
        pytest.fail(f"seed {seed}: {result.failure}\nreplay: {replay_command(seed, stack='groups')}", pytrace=False)
    return result.acknowledged, result.reads


@pytest.mark.sim
@pytest.mark.timeout(SECONDS + 240)
def test_no_seed_breaks_a_promise_of_groups() -> None:
    deadline = time.monotonic() + SECONDS
    for seed in FIXED_SEEDS:
        acknowledged, given_out = _check(seed)
        assert acknowledged > 0, "where nothing was acknowledged nothing was tested"
        assert given_out > 0, "where nothing was given out nothing was tested"
    for seed in fresh_seeds("groups"):
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


def test_the_seed_draws_who_reads_and_how() -> None:
    shapes = [draw_groups_shape(seed) for seed in range(1, 60)]
    members = [member for shape in shapes for member in shape.members]
    assert {member.group for member in members} == {"alpha", "beta"}
    assert {member.is_static for member in members} == {True, False}
    assert {member.is_auto for member in members} == {True, False}
    assert {member.is_iterating for member in members} == {True, False}
    assert {shape.trial for shape in shapes} == {"streams", "kill", "kill_both"}
    assert all(shape.grace_ms + 1_500 < shape.member_session_ms for shape in shapes), "or grace could not be told apart"


def test_there_are_enough_defects_and_each_has_its_own_name() -> None:
    assert len(DEFECTS) >= 8
    assert {defect.stack for defect in DEFECTS} == {"groups"}
    names = [defect.name for defect in all_defects()]
    assert len(set(names)) == len(names), "they share one list of remembered seeds"
