"""What an operator types at a cluster of real processes, wrongly too: every refusal names what is wrong, changes
nothing, and recommends what is safe."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
from patience import until

from tidelog.server.local_nodes import free_ports, is_free
from tidelog.testing import LocalCluster

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(180)]

ENVIRONMENT = {**os.environ, "PYTHONSAFEPATH": "1"}
ID = "4N5vJ7lOSvKq3mT0nF5kzA"


def tidelog(*arguments: str, code: int = 0, timeout_s: float = 90) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(
        [sys.executable, "-m", "tidelog", *arguments],
        capture_output=True,
        text=True,
        check=False,
        env=ENVIRONMENT,
        timeout=timeout_s,
    )
    assert done.returncode == code, f"{arguments}: {done.returncode}: {done.stdout}{done.stderr}"
    return done


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


@pytest.fixture(scope="module")
def cluster() -> Iterator[LocalCluster]:
    with LocalCluster(3) as made:
        yield made


def at(cluster: LocalCluster) -> tuple[str, str]:
    return "--bootstrap", cluster.bootstrap


def voters(cluster: LocalCluster) -> dict[int, dict[str, str]]:
    found = json.loads(tidelog("quorum", "describe", "--output", "json", *at(cluster)).stdout)
    return {member["node"]: member["endpoints"] for member in found["members"]}


def test_a_voter_at_a_wrong_endpoint_is_not_added(cluster: LocalCluster) -> None:
    before = voters(cluster)
    (nobody,) = free_ports(1)
    for port, why in (
        (nobody, f"node 9 at localhost:{nobody}: "),
        (cluster.ports(2).node, "this is node 2 of cluster"),
        (cluster.ports(2).grpc, f"localhost:{cluster.ports(2).grpc} does not answer as a controller"),
        (cluster.ports(2).http, f"localhost:{cluster.ports(2).http} does not answer as a controller"),
    ):
        began_s = time.monotonic()
        done = tidelog(
            *("quorum", "add", "--node-id", "9", "--directory-id", ID, "--endpoint", f"localhost:{port}"),
            *at(cluster),
            code=1,
        )
        assert why in done.stderr
        assert "nothing was changed" in done.stderr
        assert "may have been carried out" not in done.stderr
        assert time.monotonic() - began_s < 60
        assert voters(cluster) == before


def test_a_voter_is_not_moved_to_an_endpoint_where_it_does_not_answer(cluster: LocalCluster) -> None:
    before = voters(cluster)
    found = json.loads(tidelog("quorum", "describe", "--output", "json", *at(cluster)).stdout)
    directories = {member["node"]: member["directory_id"] for member in found["members"]}
    (nobody,) = free_ports(1)
    leader, other = found["leader"], found["leader"] % 3 + 1
    for node, port in ((leader, nobody), (other, nobody), (other, cluster.ports(leader).node)):
        done = tidelog(
            *("quorum", "update-voter", "--node-id", str(node), "--directory-id", directories[node]),
            *("--endpoint", f"localhost:{port}"),
            *at(cluster),
            code=1,
        )
        assert "nothing was changed" in done.stderr
    assert voters(cluster) == before
    done = tidelog("quorum", "remove", "--node-id", "2", "--directory-id", ID, "--yes", *at(cluster), code=1)
    assert f"voter 2 has the directory id {directories[2]}, not {ID}" in done.stderr


def test_a_node_without_a_quorum_says_so_and_shows_what_it_knows() -> None:
    with LocalCluster(3) as cluster:
        where = at(cluster)
        size = ("--partitions", "3", "--replication-factor", "3", "--config", "min.insync.replicas=2")
        tidelog("topics", "create", "orders", *size, *where)
        until(lambda: figures(cluster, 1)["tidelog_partitions_following"] == 2, "node 1 has its replicas")
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
            done = tidelog(*command, *where, "--output", "json", "--timeout", "20")
            assert "this may be old: localhost:" in done.stderr, command
            document = json.loads(done.stdout)
            assert document["stale"] is True, command
            assert document["age_ms"] > 0, command
        done = tidelog("reassign", "status", *where, "--timeout", "1", code=1)
        assert "nothing was changed; ask again, or ask another node" in done.stderr
        assert "may have been carried out" not in done.stderr
        cluster.start(2)
        until(lambda: page(cluster, 1, "/healthz")[0] == 200, "node 1 is ready again")
        document = json.loads(tidelog("brokers", "list", *where, "--output", "json").stdout)
        assert (document["stale"], document["age_ms"]) == (False, None)


def test_a_voter_whose_disk_is_lost_comes_back_only_as_another_voter(tmp_path: Path) -> None:
    with LocalCluster(3, data=tmp_path / "three") as cluster:
        where = at(cluster)
        quorum = json.loads(tidelog("quorum", "describe", "--output", "json", *where).stdout)
        old = {member["node"]: member["directory_id"] for member in quorum["members"]}
        config = str(cluster.path(3) / "node.toml")
        rows = [f"{n}@localhost:{cluster.ports(n).node}:{old[n]}" for n in (1, 2, 3)]
        again = ("storage", "format", "-c", config, "-t", cluster.cluster_id)
        cluster.kill(3)
        shutil.rmtree(cluster.path(3) / "data")

        cluster.start(3, is_awaited=False)
        until(lambda: cluster.ended().get(3) == 2, "it does not start")
        cluster.forget(3)
        assert "it must not come back as the voter that it was" in cluster.log(3)
        assert "tidelog quorum remove --node-id 3" in cluster.log(3)

        for first in (["--initial-controllers", ",".join(rows)], [], ["--standalone"]):
            done = tidelog(*again, *first, code=1)
            assert f"has voter 3 with directory id {old[3]} already" in done.stderr, first
            assert "tidelog quorum remove --node-id 3" in done.stderr
            assert not (cluster.path(3) / "data" / "meta.properties").exists()

        tidelog("quorum", "remove", "--node-id", "3", "--yes", *where)
        tidelog(*again, "--no-initial-controllers")
        info = json.loads(tidelog("storage", "info", "-c", config, "--output", "json").stdout)
        new = info["directories"][0]["directory_id"]
        assert new != old[3]
        cluster.start(3, is_awaited=False)
        until(lambda: not is_free(cluster.ports(3).node), "it listens")
        place = f"localhost:{cluster.ports(3).node}"
        done = tidelog("quorum", "add", "--node-id", "3", "--directory-id", new, "--endpoint", place, *where)
        assert done.stdout == "node 3 is a voter\n"
        assert f"asks node 3 at {place} who it is" in done.stderr

        def states() -> dict[int, str]:
            found = json.loads(tidelog("quorum", "describe", "--output", "json", *where).stdout)
            return {member["node"]: member["state"] for member in found["members"]}

        until(lambda: states() == {1: "good", 2: "good", 3: "good"}, "all voters are good")


def test_a_voter_that_was_formatted_again_while_nobody_answered_does_not_start(tmp_path: Path) -> None:
    with LocalCluster(3, data=tmp_path / "three") as cluster:
        quorum = json.loads(tidelog("quorum", "describe", "--output", "json", *at(cluster)).stdout)
        old = {member["node"]: member["directory_id"] for member in quorum["members"]}
        rows = [f"{n}@localhost:{cluster.ports(n).node}:{old[n]}" for n in (1, 2, 3)]
        for number in (1, 2, 3):
            cluster.kill(number)
        shutil.rmtree(cluster.path(3) / "data")
        config = str(cluster.path(3) / "node.toml")
        done = tidelog("storage", "format", "-c", config, "-t", cluster.cluster_id, "-I", ",".join(rows))
        assert "none of the other controllers answers" in done.stderr
        assert "If its disk was lost, do not start this node" in done.stderr
        cluster.start(1, is_awaited=False)
        cluster.start(2)
        cluster.start(3, is_awaited=False)
        until(lambda: cluster.ended().get(3) == 2, "it does not start")
        cluster.forget(3)
        assert f"has voter 3 with directory id {old[3]} already" in cluster.log(3)


def test_the_last_voter_of_a_new_cluster_is_formatted_and_started_after_the_others(tmp_path: Path) -> None:
    with LocalCluster(3, data=tmp_path / "three", is_started=False) as cluster:
        config = str(cluster.path(3) / "node.toml")
        info = json.loads(tidelog("storage", "info", "-c", config, "--output", "json").stdout)
        directory = info["directories"][0]["directory_id"]
        shutil.rmtree(cluster.path(3) / "data")
        cluster.start(1, is_awaited=False)
        cluster.start(2)
        quorum = json.loads(tidelog("quorum", "describe", "--output", "json", *at(cluster)).stdout)
        old = {member["node"]: member["directory_id"] for member in quorum["members"]}
        assert old[3] == directory
        rows = [f"{n}@localhost:{cluster.ports(n).node}:{old[n]}" for n in (1, 2, 3)]
        tidelog("storage", "format", "-c", config, "-t", cluster.cluster_id, "-I", ",".join(rows))
        cluster.start(3)
