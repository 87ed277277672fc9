"""Every stack on seeds: the fixed ones, then new ones until the time is up; a seed replays exactly; and every
deliberate defect is noticed, since a checker that cannot fail is worthless."""

import os
import time
from collections import Counter

import pytest

from simulation.broker_shape import draw_broker_shape, draw_product_shape
from simulation.campaign import all_defects, catch, replay_command
from simulation.defects import Defect
from simulation.groups_sim import draw_groups_shape
from simulation.raft_sim import run_seed
from simulation.replays import output_in_every_process
from simulation.run_result import Result
from simulation.seeds import FIXED_SEEDS, fresh_seeds, read_catching_seeds

SECONDS = float(os.environ.get("SIM_SECONDS", "15"))
"""For the seeds of one stack; the fixed ones are run, however long they take."""
STACKS = ("core", "driver", "metadata", "brokers", "groups")
"""With seeds of their own for the time that is left; `test_transactions.py` has the other one."""
DEFECT_SEEDS_MAX = {
    "core": 500, "driver": 500, "metadata": 500, "brokers": 200, "product": 140, "groups": 100, "transactions": 60,
}  # fmt: skip
KAFKA_ACTS = ("acknowledged batches", "repeated batches", "fetches of a session", "fetches nearby", "generations")
"""What the clients of the Kafka API have done in the fixed seeds, all together."""
REMEMBERED = read_catching_seeds()
DEFECTS = all_defects()

DIGEST_SEEDS = {"core": 3, "driver": 4, "metadata": 8, "brokers": 8, "groups": 3, "transactions": 3}
DIGEST_PROGRAM = """
from simulation.raft_sim import run_seed
result = run_seed({seed}, stack={stack!r})
print(result.events, result.digest, result.failure)
"""


def _check(seed: int, stack: str) -> Result:
    result = run_seed(seed, stack=stack)
    if result.failure is not None:
        pytest.fail(f"seed {seed}: {result.failure}\nreplay: {replay_command(seed, stack=stack)}", pytrace=False)
    return result


@pytest.mark.requirement("a:N-14")
@pytest.mark.sim
@pytest.mark.timeout(SECONDS + 240)
@pytest.mark.parametrize("stack", STACKS)
def test_no_seed_breaks_a_promise(stack: str) -> None:
    deadline = time.monotonic() + SECONDS
    results = [_check(seed, stack) for seed in FIXED_SEEDS]
    assert min(result.acknowledged for result in results) > 0, "where nothing was acknowledged nothing was tested"
    assert min(result.reads for result in results) > 0 or stack != "groups", "where nothing was read, too"
    counts = {name: sum(result.counts[name] for result in results) for name in results[0].counts}
    assert min(counts.values(), default=1) > 0 or stack != "brokers", counts
    if stack in ("brokers", "groups"):
        acts = sum((result.coverage.acted for result in results), Counter[str]())
        assert all(acts[f"Kafka API: {name}"] for name in KAFKA_ACTS), acts
    for seed in fresh_seeds(stack):
        if time.monotonic() >= deadline:
            break
        result = _check(seed, stack)
        assert result.acknowledged > 0 or stack in ("brokers", "groups"), f"seed {seed}: nothing was acknowledged"


@pytest.mark.sim
@pytest.mark.timeout(600)
@pytest.mark.parametrize("defect", DEFECTS, ids=[defect.name for defect in DEFECTS])
def test_the_simulator_notices(defect: Defect) -> None:
    seeds = DEFECT_SEEDS_MAX[defect.stack]
    caught = catch(defect, remembered=REMEMBERED.get(defect.name), seeds=seeds)
    assert caught is not None, f"not noticed in {seeds} seeds: {defect.what}"


@pytest.mark.sim
@pytest.mark.timeout(180)
@pytest.mark.parametrize("stack", DIGEST_SEEDS)
def test_a_seed_gives_the_same_run_in_every_process(stack: str) -> None:
    """Whatever strings hash to and wherever objects lie."""
    program = DIGEST_PROGRAM.format(seed=DIGEST_SEEDS[stack], stack=stack)
    assert output_in_every_process(program).strip().endswith("None")


def test_there_are_enough_defects_and_each_has_its_own_name() -> None:
    assert len({defect.name for defect in DEFECTS}) == len(DEFECTS), "they share one list of remembered seeds"
    least = {("core", "driver"): 14, ("metadata",): 12, ("brokers",): 12, ("groups",): 8, ("transactions",): 15}
    for stacks, count in least.items():
        assert len([defect for defect in DEFECTS if defect.stack in stacks]) >= count, stacks
    assert {defect.stack for defect in DEFECTS} == {*STACKS, "product", "transactions"}


def test_the_seed_draws_how_the_cluster_is_built() -> None:
    shapes = [draw_broker_shape(seed) for seed in range(1, 60)]
    assert {shape.is_combined for shape in shapes} == {True, False}
    assert {shape.brokers for shape in shapes} == {3, 4}
    assert {topic for shape in shapes for topic in shape.topics} == {"plain", "weak", "unclean", "compacted", "grouped"}


def test_a_fair_share_of_seeds_has_all_that_a_run_may_have() -> None:
    shapes = [draw_broker_shape(seed) for seed in range(1, 201)]
    whole = [shape for shape in shapes if shape.compaction is not None and shape.groups is not None and shape.spares]
    assert 25 <= len(whole) <= 60
    assert draw_broker_shape(DIGEST_SEEDS["brokers"]) in whole, "its runs are compared from process to process"
    assert any(shape.directories > 1 and shape.is_combined for shape in whole)
    assert any(shape.directories > 1 and not shape.is_combined for shape in whole)
    bare = [shape for shape in shapes if shape.compaction is None and shape.groups is None and not shape.spares]
    assert len(bare) >= 25


def test_the_seed_draws_which_parts_of_the_product_a_run_has() -> None:
    plans = [draw_product_shape(seed).product for seed in range(1, 201)]
    assert 100 <= plans.count(None) <= 140
    drawn = [plan for plan in plans if plan is not None]
    parts = ("retention", "flush", "has_changes", "has_recreation", "producers", "throttle_bytes")
    acts = ("expiry_ms", "has_drains", "has_elections", "has_moves")
    for name in (*parts, *acts):
        with_it = [plan for plan in drawn if getattr(plan, name) not in (None, False, 0)]
        assert len(drawn) * 0.1 < len(with_it) < len(drawn) * 0.9, name
    assert any(all(getattr(plan, name) not in (None, False, 0) for name in parts) for plan in drawn)
    assert {topic for plan in drawn for topic in plan.topics()} == {
        "timed", "sized", "cached", "tuned", "again", "piped"
    }  # fmt: skip


def test_the_seed_draws_who_reads_and_how() -> None:
    plans = [plan for seed in range(1, 60) if (plan := draw_groups_shape(seed).groups) is not None]
    members = [member for plan in plans for member in plan.members]
    assert {member.group for member in members} == {"alpha", "beta"}
    assert {member.is_static for member in members} == {True, False}
    assert {member.is_auto for member in members} == {True, False}
    assert {member.is_iterating for member in members} == {True, False}
    assert {plan.trial for plan in plans} == {"streams", "kill", "kill_both"}
    assert all(plan.grace_ms + 1_500 < plan.member_session_ms for plan in plans), "or grace could not be distinguished"
