"""`tidelog verify chaos` against a cluster, with commands that strike its nodes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest
from support.clusters.commands import Shell, run
from support.clusters.waiting import until

import tidelog
from tidelog.cli import verify_chaos
from tidelog.model.errors import UnreachableError
from tidelog.testing import LocalCluster
from tidelog.testing.chaos.commands import CommandTarget, cluster_of_yours, read_nodes
from tidelog.testing.chaos.run import Options, Report

pytestmark = pytest.mark.cluster

SEED = 4683
"""Its plan begins with a short freeze."""


def nodes_file(path: Path, cluster: LocalCluster) -> Path:
    file = path / "nodes.toml"
    rows = [
        f'[nodes.{number}]\npause = "kill -STOP {cluster.pid(number)}; touch {path}/paused"\n'
        f'resume = "kill -CONT {cluster.pid(number)}"\n'
        for number in (1, 2, 3)
    ]
    file.write_text("".join(rows), encoding="utf-8")
    return file


@pytest.mark.requirement("a:S-10", "a:X3-13")
def test_chaos_command_strikes_nodes_and_reports_a_sound_cluster(harmed: LocalCluster, tmp_path: Path) -> None:
    path = tmp_path / "run"
    file = nodes_file(tmp_path, harmed)
    flags = ("--minutes", "0.05", "--seed", str(SEED), "--nodes", str(file), "--path", str(path))
    document = Shell(harmed.bootstrap).json("verify", "chaos", *flags)
    assert document["is_good"], document
    assert document["acknowledged"] > 0
    assert [row["kind"] for row in document["faults"]] == ["freeze"]
    assert (tmp_path / "paused").exists()
    assert "good" in (path / "report.html").read_text(encoding="utf-8")
    with tidelog.Admin(harmed.bootstrap) as admin:
        assert not [row.name for row in admin.list_topics() if row.name.startswith("tidelog-chaos-")]
        assert not [row.group for row in admin.list_groups().groups if row.group.startswith("tidelog-chaos-")]


def test_brokers_that_were_switched_off_before_the_run_are_not_awaited(harmed: LocalCluster) -> None:
    harmed.kill(3)
    try:
        with tidelog.Admin(harmed.bootstrap) as admin:
            until(lambda: [row.id for row in admin.describe_brokers() if row.is_fenced] == [3], "broker 3 is fenced")
        commands: dict[int, dict[str, str]] = {node: {"kill": "true", "start": "true"} for node in (1, 2)}
        with cluster_of_yours(harmed.bootstrap, "", "tidelog-chaos-off-", commands, 30.0) as target:
            assert target.recover() == []
            assert target.remove_traces(["tidelog-chaos-no-such-group"]) == []
    finally:
        harmed.start(3)


@pytest.mark.parametrize("is_good", [True, False])
def test_what_a_run_leaves_is_named_after_its_verdict(
    is_good: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A cluster that is gone after a good run, and a run that is bad: the verdict is printed, the exit code is its."""

    class Gone(CommandTarget):
        def remove_traces(self, groups: Sequence[str]) -> list[str]:
            raise UnreachableError("the cluster is gone")

    @contextmanager
    def no_cluster(*_: object) -> Iterator[CommandTarget]:
        yield Gone("nowhere:1", "", {"tidelog-chaos-7-events": 6}, {})

    def ended(options: Options, _target: object) -> Report:
        return Report(options, groups=["tidelog-chaos-7-solo"], failures=[] if is_good else ["lost: 1 record"])

    monkeypatch.setattr(verify_chaos, "cluster_of_yours", no_cluster)
    monkeypatch.setattr(verify_chaos, "run_chaos", ended)
    done = run("verify", "chaos", "--seed", "7", "--path", str(tmp_path / "run"), code=0 if is_good else 1)
    assert done.out.splitlines()[-1].startswith("good" if is_good else "BAD")
    assert "topic tidelog-chaos-7-events, group tidelog-chaos-7-solo" in done.err
    assert ("the cluster is gone" if is_good else "the run was bad") in done.err


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "there is no table [nodes.ID]"),
        ('[nodes.a]\nkill = "true"\n', "[nodes.a]: ID is the id of a node"),
        ('[nodes.1]\nshoot = "true"\n', "'shoot' is no command: use heal, isolate"),
        ("[nodes.1]\nkill = 7\n", "'kill' is no command"),
        ('[nodes.1]\nkill = "true"\n', "'kill' needs 'start'"),
        ('[nodes.1]\nstart = "true"\n', "no command begins a fault"),
        ('[nodes.1]\npause = "true"\nresume = "true"\n[nodes.2]\n', "nodes 1 and 2 differ in pause, resume"),
    ],
)
def test_file_of_nodes_that_is_wrong_is_a_usage_error(tmp_path: Path, text: str, says: str) -> None:
    file = tmp_path / "nodes.toml"
    file.write_text(text, encoding="utf-8")
    done = run("verify", "chaos", "--nodes", str(file), code=2)
    assert says in done.err


def test_file_of_nodes_has_commands_by_node(tmp_path: Path) -> None:
    file = tmp_path / "nodes.toml"
    file.write_text('[nodes.7]\nkill = "a"\nstart = "b"\n', encoding="utf-8")
    assert read_nodes(file) == {7: {"kill": "a", "start": "b"}}
