"""What a simulated store loses, keeps, refuses and delays; and the clock and the work beside it."""

import asyncio
import math
from collections.abc import Iterator

import pytest

from tidelog.model.errors import StorageError
from tidelog.world.simulated import Latency, Loss, MachineDied, NodeDiedError, SimMachine, SimNode, SimWorld


@pytest.fixture
def world() -> Iterator[SimWorld]:
    with SimWorld(seed=5) as world:
        yield world


@pytest.fixture
def machine(world: SimWorld) -> SimMachine:
    return world.machine("a")


def test_a_commit_that_returned_survives_and_one_under_way_happened_or_not_as_a_whole(
    world: SimWorld, machine: SimMachine
) -> None:
    machine.store().commit_latency = Latency(1.0, 1.0)
    outcomes = set()
    for round_number in range(40):
        node = machine.boot()
        store = node.store()
        value = b"%d" % round_number
        world.run(node, lambda node, value=value: node.store().commit({b"x": value, b"y": value}))  # type: ignore[misc]
        node.spawn(store.commit({b"x": b"new", b"y": b"new"}))
        world.run_for(0.5)
        node.spawn(store.commit({b"z": b"never begun"}))
        world.run_for(0.1)
        machine.lose_power(Loss.SOME) if round_number % 2 else machine.kill()
        with pytest.raises(MachineDied):
            store.get(b"x")
        store = machine.boot().store()
        assert store.get(b"x") == store.get(b"y")
        assert store.get(b"x") in (value, b"new")
        assert store.get(b"z") is None
        outcomes.add(store.get(b"x") == b"new")
        machine.kill()
    assert outcomes == {True, False}


def test_a_failed_commit_is_the_last_of_its_process(world: SimWorld, machine: SimMachine) -> None:
    async def main(node: SimNode) -> None:
        store = node.store()
        await store.commit({b"epoch": b"1"})
        machine.store().fail("commit")
        results = await asyncio.gather(
            store.commit({b"epoch": b"2"}), store.commit({b"epoch": b"3"}), return_exceptions=True
        )
        assert [type(result) for result in results] == [StorageError, StorageError]
        with pytest.raises(StorageError, match="EIO"):
            await store.commit({b"epoch": b"4"})
        assert store.get(b"epoch") == b"1"

    found = set()
    for _ in range(30):
        world.run(machine.boot(), main)
        machine.kill()
        found.add(machine.boot().store().get(b"epoch"))
        machine.kill()
    assert found == {b"1", b"2"}


def test_a_stalled_store_answers_when_it_is_healed(world: SimWorld, machine: SimMachine) -> None:
    node = machine.boot()
    machine.store().begin_stall()
    task = node.spawn(node.store().commit({b"epoch": b"1"}))
    world.run_for(100)
    assert not task.done()
    assert node.store().get(b"epoch") is None
    machine.store().heal()
    world.run_until(task.done, timeout=1)
    assert node.store().get(b"epoch") == b"1"


def test_a_read_can_fail(machine: SimMachine) -> None:
    store = machine.boot().store()
    machine.store().fail("get")
    with pytest.raises(StorageError, match="EIO"):
        store.get(b"epoch")
    assert store.get(b"epoch") is None


def test_the_power_can_go_before_a_chosen_commit(world: SimWorld, machine: SimMachine) -> None:
    async def main(node: SimNode) -> None:
        for number in range(3):
            await node.store().commit({b"epoch": b"%d" % number})

    machine.store().crash_at_commit = 3
    with pytest.raises(NodeDiedError, match="died"):
        world.run(machine.boot(), main)
    assert machine.boot().store().get(b"epoch") == b"1"


def test_the_wall_clock_jumps_and_drifts_and_the_loop_does_not_care(world: SimWorld, machine: SimMachine) -> None:
    node = machine.boot()
    start_ms, start_s = node.clock.now_ms(), node.loop.time()
    world.run_for(2)
    assert node.clock.now_ms() == start_ms + 2_000
    node.clock.jump(-60_000)
    assert node.clock.now_ms() == start_ms - 58_000
    assert node.loop.time() == pytest.approx(start_s + 2)
    machine.set_clock_rate(2.0)
    world.run_for(10)
    assert node.clock.now_ms() == start_ms - 38_000
    assert node.loop.time() == pytest.approx(start_s + 22)


def raise_value_error() -> None:
    raise ValueError("as asked")


def test_work_takes_virtual_time_and_returns_its_value(world: SimWorld, machine: SimMachine) -> None:
    async def main(node: SimNode) -> float:
        began = node.loop.time()
        result = await node.work.run(math.sqrt, 16)
        assert node.loop.time() > began
        with pytest.raises(ValueError, match="as asked"):
            await node.work.run(raise_value_error)
        with pytest.raises(AssertionError, match="helper process"):
            await node.work.run(lambda: None)
        return result

    assert world.run(machine.boot(), main) == 4
