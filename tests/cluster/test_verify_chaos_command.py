"""`tidelog verify chaos` against a cluster, with commands that strike its nodes."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.clusters.commands import Shell, run

import tidelog
from tidelog.testing import LocalCluster
from tidelog.testing.chaos.commands import read_nodes

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
