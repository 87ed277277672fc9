"""What an operator types at a cluster of real processes, wrongly too: every refusal names what is wrong, changes
nothing, and recommends what is safe."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest

from tidelog.server.local_nodes import free_ports
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
