"""What an operator types at a cluster of real processes, wrongly too: every refusal names what is wrong, changes
nothing, and recommends what is safe."""

from __future__ import annotations

import json
import shutil
import urllib.error
import urllib.request
from typing import Any

import pytest
from support.clusters.commands import Shell, run
from support.clusters.waiting import until

from tidelog.server.local_nodes import free_ports, is_free
from tidelog.testing import LocalCluster

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(600)]

ID = "4N5vJ7lOSvKq3mT0nF5kzA"


def page(cluster: LocalCluster, number: int, path: str) -> tuple[int, str]:
    try:
        with urllib.request.urlopen(f"http://localhost:{cluster.ports(number).http}{path}", timeout=10) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read().decode()


def figures(cluster: LocalCluster, number: int) -> dict[str, float]:
    lines = page(cluster, number, "/metrics")[1].splitlines()
    return {name: float(value) for name, _, value in (line.rpartition(" ") for line in lines if line[:1] != "#")}


def voters(shell: Shell) -> dict[int, dict[str, Any]]:
    return {member["node"]: member for member in shell.json("quorum", "describe")["members"]}


def test_a_voter_at_a_wrong_endpoint_is_not_added(cluster: LocalCluster, shell: Shell) -> None:
    (nobody,) = free_ports(1)
    for port, why in (
        (nobody, f"node 9 at localhost:{nobody}: "),
        (cluster.ports(2).node, "this is node 2 of cluster"),
        (cluster.ports(2).grpc, f"localhost:{cluster.ports(2).grpc} does not answer as a controller"),
        (cluster.ports(2).http, f"localhost:{cluster.ports(2).http} does not answer as a controller"),
    ):
        wanted = ("--node-id", "9", "--directory-id", ID, "--endpoint", f"localhost:{port}")
        shell.run("quorum", "add", *wanted, "--timeout", "5", code=1)
        assert why in shell.err
        assert "nothing was changed" in shell.err
        assert "may have been carried out" not in shell.err
        assert sorted(voters(shell)) == [1, 2, 3]


def test_a_voter_is_not_moved_to_an_endpoint_where_it_does_not_answer(cluster: LocalCluster, shell: Shell) -> None:
    before = voters(shell)
    (nobody,) = free_ports(1)
    leader = shell.json("quorum", "describe")["leader"]
    other = leader % 3 + 1
    for node, port in ((leader, nobody), (other, nobody), (other, cluster.ports(leader).node)):
        wanted = ("--node-id", str(node), "--directory-id", before[node]["directory_id"])
        shell.run("quorum", "update-voter", *wanted, "--endpoint", f"localhost:{port}", "--timeout", "5", code=1)
        assert "nothing was changed" in shell.err
    assert {node: row["endpoints"] for node, row in voters(shell).items()} == {
        node: row["endpoints"] for node, row in before.items()
    }
    shell.run("quorum", "remove", "--node-id", "2", "--directory-id", ID, "--yes", code=1)
    assert f"voter 2 has the directory id {before[2]['directory_id']}, not {ID}" in shell.err


class Operator:
    """Three voters, and what an operator does with them, one thing after the other."""

    def __init__(self, cluster: LocalCluster) -> None:
        self.cluster, self.shell = cluster, Shell(cluster.bootstrap)
        self.config = str(cluster.path(3) / "node.toml")

    def format(self, *more: str, code: int = 0) -> str:
        """Formats node 3; what the command has said."""
        return run("storage", "format", "-c", self.config, "-t", self.cluster.cluster_id, *more, code=code).err

    def directory(self) -> str:
        (row,) = run("storage", "info", "-c", self.config, "--output", "json").document["directories"]
        return str(row["directory_id"])

    def first_voters(self) -> str:
        rows = voters(self.shell).items()
        return ",".join(f"{n}@localhost:{self.cluster.ports(n).node}:{row['directory_id']}" for n, row in rows)

    def lose_disk(self) -> None:
        shutil.rmtree(self.cluster.path(3) / "data")

    def check_not_started(self) -> None:
        self.cluster.start(3, wait=False)
        until(lambda: self.cluster.ended().get(3) == 2, "it does not start")
        self.cluster.reap(3)

    def start_last_voter_later(self) -> None:
        directory = self.directory()
        self.lose_disk()
        self.cluster.start(1, wait=False)
        self.cluster.start(2)
        assert voters(self.shell)[3]["directory_id"] == directory
        self.format("-I", self.first_voters())
        self.cluster.start(3)

    def replace_lost_voter(self) -> None:
        old, first_voters = voters(self.shell)[3]["directory_id"], self.first_voters()
        self.cluster.kill(3)
        self.lose_disk()
        self.check_not_started()
        assert "it must not come back as the voter that it was" in self.cluster.log(3)
        assert "tidelog quorum remove --node-id 3" in self.cluster.log(3)
        for first in (["--initial-controllers", first_voters], [], ["--standalone"]):
            said = self.format(*first, code=1)
            assert f"has voter 3 with directory id {old} already" in said, first
            assert "tidelog quorum remove --node-id 3" in said
            assert not (self.cluster.path(3) / "data" / "meta.properties").exists()
        self.shell.run("quorum", "remove", "--node-id", "3", "--yes")
        self.format("--no-initial-controllers")
        new, place = self.directory(), f"localhost:{self.cluster.ports(3).node}"
        assert new != old
        self.cluster.start(3, wait=False)
        until(lambda: not is_free(self.cluster.ports(3).node), "it listens")
        wanted = ("--node-id", "3", "--directory-id", new, "--endpoint", place)
        assert self.shell.run("quorum", "add", *wanted) == "node 3 is a voter\n"
        assert f"asking node 3 at {place} for its identity" in self.shell.err

        def states() -> list[str]:
            return [row["state"] for row in voters(self.shell).values()]

        until(lambda: states() == ["good", "good", "good"], "all voters are good")
        self.cluster.wait_ready(3)

    def ask_without_quorum(self) -> None:
        cluster, shell = self.cluster, self.shell
        shell.run("topics", "create", "orders", "--replica-assignment", "1:2:3,2:3:1,3:1:2")
        until(lambda: figures(cluster, 1)["tidelog_partitions_following"] == 2, "node 1 has its replicas")
        # A broker tails any controller: its own voter may hear of a commit later than the broker.
        committed = max(figures(cluster, node)["tidelog_raft_commit_offset"] for node in (1, 2, 3))
        until(lambda: figures(cluster, 1)["tidelog_raft_commit_offset"] >= committed, "node 1's voter knows the topic")
        assert page(cluster, 1, "/healthz")[0] == 200
        cluster.kill(2)
        cluster.kill(3)
        until(lambda: page(cluster, 1, "/healthz")[0] == 503, "node 1 is not ready")
        health = json.loads(page(cluster, 1, "/readyz")[1])
        assert health["state"] == "waiting"
        assert "waits for 1 more of 3 voters (2 are needed)" in health["waits_for"]
        assert page(cluster, 1, "/livez")[0] == 200

        def degraded() -> bool:
            found = figures(cluster, 1)
            names = ("partitions_leading", "partitions_under_min_isr", "partitions_cut_off", "node_ready")
            return [found[f"tidelog_{name}"] for name in names] == [1, 1, 2, 0]

        until(degraded, "the metrics show what is gone")
        for command in (
            ["quorum", "describe"],
            ["brokers", "list"],
            ["topics", "list"],
            ["topics", "describe", "orders"],
            ["configs", "describe", "--topic", "orders"],
            ["metadata", "show", "/topics/orders"],
        ):
            document = shell.done(*command, "--output", "json", "--timeout", "20").document
            assert "stale: localhost:" in shell.err, command
            assert document["stale"] is True, command
            assert document["age_ms"] > 0, command
        shell.run("reassign", "status", "--timeout", "1", code=1)
        assert "nothing was changed; ask again, or ask another node" in shell.err
        assert "may have been carried out" not in shell.err
        cluster.start(2)
        until(lambda: page(cluster, 1, "/healthz")[0] == 200, "node 1 is ready again")
        document = shell.json("brokers", "list")
        assert (document["stale"], document["age_ms"]) == (False, None)

    def format_while_nobody_answers(self) -> None:
        """Node 3 is not running."""
        old, first_voters = voters(self.shell)[3]["directory_id"], self.first_voters()
        self.cluster.kill(1)
        self.cluster.kill(2)
        self.lose_disk()
        said = self.format("-I", first_voters)
        assert "none of the other controllers answers" in said
        assert "If its disk was lost, do not start this node" in said
        self.cluster.start(1, wait=False)
        self.cluster.start(2)
        self.check_not_started()
        assert f"has voter 3 with directory id {old} already" in self.cluster.log(3)


def test_a_voter_that_has_lost_its_disk_comes_back_only_as_another_one() -> None:
    """The last voter of a new cluster may be formatted after the others have started. Later it comes back only by
    remove and add; the others keep answering, by what they know, without a quorum; and a format that could ask nobody
    is noticed at the start."""
    with LocalCluster(3, settings={"min.insync.replicas": 2}, start=False) as cluster:
        operator = Operator(cluster)
        operator.start_last_voter_later()
        operator.replace_lost_voter()
        operator.ask_without_quorum()
        operator.format_while_nobody_answers()
