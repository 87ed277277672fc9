"""What `coverage` counts: which faults struck which features on which roles."""

import json
from pathlib import Path

import pytest

from simulation.cluster import Cluster, Context, Station
from simulation.coverage import CONTROLLER, FOLLOWER, LEADER, Counts, Coverage
from simulation.raft_sim import run_seed
from tidelog.model.ids import NodeId
from tidelog.world.simulated import SimWorld

pytestmark = pytest.mark.sim


async def _idle(context: Context) -> None:
    await context.node.loop.create_future()


def _cluster(world: SimWorld) -> tuple[Cluster, list[Station]]:
    cluster = Cluster(world)
    stations = [cluster.add(f"n{number}", NodeId(number), _idle) for number in (1, 2)]
    for station in stations:
        station.start()
    return cluster, stations


def _coverage(cluster: Cluster) -> Coverage:
    """The first machine leads, the second follows."""
    coverage = Coverage(cluster.stations.values)
    roles = {"n1": [LEADER], "n2": [FOLLOWER]}
    coverage.feature("logs", (LEADER, FOLLOWER), lambda station: roles[station.name])
    return coverage


def test_a_fault_strikes_the_machine_that_it_names() -> None:
    with SimWorld(1) as world:
        cluster, _ = _cluster(world)
        coverage = _coverage(cluster)
        with coverage.striking("slow") as strike:
            coverage.named("n2 is slow, n21 is not")
        coverage.begun(strike, ["n2 is slow, n21 is not"])
        assert coverage.counts.cells == {("slow", FOLLOWER, "logs"): 1}


def test_a_fault_that_names_no_machine_strikes_all() -> None:
    with SimWorld(1) as world:
        cluster, _ = _cluster(world)
        coverage = _coverage(cluster)
        with coverage.striking("delay") as strike:
            coverage.named("all links are slow")
        coverage.begun(strike, ["all links are slow"])
        assert coverage.counts.cells == {("delay", LEADER, "logs"): 1, ("delay", FOLLOWER, "logs"): 1}


def test_a_machine_that_a_fault_kills_later_counts_once() -> None:
    with SimWorld(1) as world:
        cluster, (leader, _) = _cluster(world)
        coverage = _coverage(cluster)
        with coverage.striking("roll") as strike:
            world.loop.call_later(1.0, leader.kill)
            world.loop.call_later(2.0, leader.start)
            world.loop.call_later(3.0, leader.kill)
        coverage.begun(strike, ["n2 first"])
        leader.pause()  # by nobody's fault
        world.run_for(4.0)
        assert coverage.counts.cells == {("roll", LEADER, "logs"): 1}


def test_a_machine_that_is_down_is_not_struck() -> None:
    with SimWorld(1) as world:
        cluster, (leader, _) = _cluster(world)
        coverage = _coverage(cluster)
        leader.kill()
        with coverage.striking("delay") as strike:
            pass
        coverage.begun(strike, [])
        assert set(coverage.counts.cells) == {("delay", FOLLOWER, "logs")}


def test_a_campaign_sums_runs_and_names_empty_cells_and_idle_features(tmp_path: Path) -> None:
    with SimWorld(1) as world:
        cluster, _ = _cluster(world)
        first, second = _coverage(cluster), _coverage(cluster)
        second.feature("moves", (CONTROLLER,), lambda _: [])
        first.acted("logs", 3)
        with first.striking("kill") as strike:
            first.named("kill n1")
        first.begun(strike, ["kill n1"])
    totals = Counts()
    totals.add(first.counts)
    totals.add(second.counts)
    assert (totals.runs["logs"], totals.idle["logs"], totals.acted["logs"], totals.idle["moves"]) == (2, 1, 3, 1)
    assert list(totals.empty()) == [("kill", FOLLOWER, "logs"), ("kill", CONTROLLER, "moves")]
    assert "  1 logs                            2     1         3" in totals.table()
    assert "1 of 3 cells fault x role x feature are filled" in totals.table()
    totals.write(tmp_path / "build" / "coverage.json")
    report = json.loads((tmp_path / "build" / "coverage.json").read_text())
    assert report["cells"] == [{"fault": "kill", "role": "leader", "feature": "logs", "count": 1}]
    assert report["empty"][1] == {"fault": "kill", "role": "controller", "feature": "moves"}


def test_a_run_of_the_whole_cluster_counts_what_its_faults_struck() -> None:
    result = run_seed(8, stack="brokers")
    assert result.failure is None
    assert set(result.coverage.faults) == set(result.faults)
    assert result.coverage.acted["topics: plain"] > 0
    assert any(role == LEADER and feature == "topics: plain" for _, role, feature in result.coverage.cells)
