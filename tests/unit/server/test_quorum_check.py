"""Whether a controller's directory may be formatted with first voters, by what the other controllers say."""

from __future__ import annotations

import asyncio
from pathlib import Path
from random import Random
from uuid import UUID

import pytest

from tidelog.metadata.voter_changes import ControllerIdentity
from tidelog.model.errors import StorageError
from tidelog.model.ids import NodeId
from tidelog.model.uuids import from_text, random_uuid, to_text
from tidelog.server.config import NodeConfig, load
from tidelog.server.local_nodes import Layout, LocalNodes, Ports, free_ports
from tidelog.server.quorum_check import Answers, KnownVoterError, ask_controllers, check_first_voters, unknown_note
from tidelog.server.storage import Voters, format_node, standalone

CLUSTER = to_text(random_uuid(Random(1)))
IDS = {node: random_uuid(Random(node)) for node in (1, 2, 3, 4)}
FIRST = Voters(tuple((NodeId(node), f"host-{node}:9192", IDS[node]) for node in (1, 2, 3)))


@pytest.fixture
def config(tmp_path: Path) -> NodeConfig:
    path = tmp_path / "node.toml"
    path.write_text('node.id = 3\nlog.dirs = ["a", "b"]\n', encoding="utf-8")
    return load(str(path), {})


def says(
    node: int, *, epoch: int = 5, seen_peers: tuple[int, ...] | None = (), third: UUID | None = IDS[3]
) -> tuple[str, ControllerIdentity]:
    members = [(NodeId(one), IDS[one].bytes, True) for one in (1, 2)]
    if third is not None:
        members.append((NodeId(3), third.bytes, True))
    nodes = None if seen_peers is None else tuple(NodeId(one) for one in seen_peers)
    return f"host-{node}:9192", ControllerIdentity(
        NodeId(node), IDS[node].bytes, epoch, 9, False, tuple(members), nodes
    )


def answers(*found: tuple[str, ControllerIdentity]) -> Answers:
    return Answers(("host-1:9192", "host-2:9192"), found)


@pytest.mark.parametrize(
    ("found", "why"),
    [
        ([says(1, seen_peers=(3,)), says(2)], f"has voter 3 with directory id {to_text(IDS[3])} already"),
        ([says(1, seen_peers=None), says(2)], "has voter 3 with directory id"),
        ([says(1)], "has voter 3 with directory id"),
        ([says(1, third=IDS[4]), says(2, third=IDS[4])], f"has voter 3 with directory id {to_text(IDS[4])} already"),
        ([says(1, third=None)], "has a quorum already"),
    ],
    ids=["heard", "heard is not known", "one does not answer", "another directory", "not a member"],
)
def test_a_voter_that_the_quorum_may_have_heard_is_refused(
    config: NodeConfig, found: list[tuple[str, ControllerIdentity]], why: str
) -> None:
    with pytest.raises(KnownVoterError, match=why) as refusal:
        check_first_voters(config, CLUSTER, FIRST, answers(*found))
    assert "--no-initial-controllers" in str(refusal.value)
    with pytest.raises(KnownVoterError, match="already"):
        check_first_voters(config, CLUSTER, standalone(config), answers(*found))
    check_first_voters(config, CLUSTER, Voters(()), answers(*found))  # it joins, with a new directory id


@pytest.mark.parametrize(
    "found",
    [[], [says(1, epoch=0, seen_peers=(3,))], [says(1), says(2)]],
    ids=["nobody answers", "nobody was ever elected", "nobody has heard from it"],
)
def test_a_voter_that_never_took_part_is_formatted(
    config: NodeConfig, found: list[tuple[str, ControllerIdentity]]
) -> None:
    check_first_voters(config, CLUSTER, FIRST, answers(*found))
    note = unknown_note(config, FIRST, answers(*found))
    assert (note is None) == bool(found)
    assert unknown_note(config, standalone(config), answers(*found)) is None, "a new id is always safe"


FIVE = (1, 2, 3, 4, 5)


def says_of_five(node: int, seen_peers: tuple[int, ...]) -> tuple[str, ControllerIdentity]:
    members = tuple((NodeId(one), UUID(int=one).bytes, True) for one in FIVE)
    nodes = tuple(NodeId(one) for one in seen_peers)
    return f"host-{node}:9192", ControllerIdentity(NodeId(node), UUID(int=node).bytes, 5, 9, node == 1, members, nodes)


@pytest.mark.parametrize(
    ("found", "is_refused"),
    [
        ([says_of_five(1, (1, 2, 4)), says_of_five(2, (1, 2, 4)), says_of_five(4, (1, 2, 4))], False),
        ([says_of_five(1, (1, 2, 4)), says_of_five(2, (1, 2, 4, 5)), says_of_five(4, (1, 2, 4))], True),
        ([says_of_five(1, (1, 2, 4)), says_of_five(2, (1, 2, 3)), says_of_five(4, (1, 2, 4))], True),
        ([says_of_five(1, (1, 2)), says_of_five(2, (1, 2))], True),
    ],
    ids=["one by one", "5 ran before", "this one ran before", "the others may be a majority"],
)
def test_five_first_voters_may_be_formatted_and_started_one_by_one(
    config: NodeConfig, found: list[tuple[str, ControllerIdentity]], is_refused: bool
) -> None:
    """Node 3 is the fourth of five: the first three have a leader, the last is not formatted yet."""
    voters = Voters(tuple((NodeId(node), f"host-{node}:9192", UUID(int=node)) for node in FIVE))
    seen_peers = Answers(tuple(f"host-{node}:9192" for node in (1, 2, 4, 5)), tuple(found))
    if is_refused:
        with pytest.raises(KnownVoterError, match="5 did not answer"):
            check_first_voters(config, CLUSTER, voters, seen_peers)
    else:
        check_first_voters(config, CLUSTER, voters, seen_peers)


def test_a_lost_metadata_directory_beside_a_formatted_log_directory_is_refused(config: NodeConfig) -> None:
    asyncio.run(format_node(config, CLUSTER, FIRST, ignore_formatted=False, random=Random(1)))
    for path in sorted(Path(config.metadata_dir).rglob("*"), reverse=True):
        path.rmdir() if path.is_dir() else path.unlink()
    with pytest.raises(KnownVoterError, match="this node was formatted before"):
        check_first_voters(config, CLUSTER, FIRST, answers())
    check_first_voters(config, CLUSTER, Voters(()), answers())


def test_controllers_that_do_not_run_are_asked_and_do_not_answer(tmp_path: Path) -> None:
    (port,) = free_ports(1)
    path = tmp_path / "node.toml"
    path.write_text(
        f'node.id = 3\nlog.dirs = "a"\ncontroller.quorum.voters = "1@localhost:{port},3@localhost:9192"\n',
        encoding="utf-8",
    )
    found = asyncio.run(ask_controllers(load(str(path), {}), CLUSTER, Voters(())))
    assert found == Answers((f"localhost:{port}",), ())


def test_a_development_cluster_does_not_format_a_lost_voter_again(tmp_path: Path) -> None:
    nodes = LocalNodes(tmp_path, Layout.fresh([Ports(*free_ports(4))]))
    nodes.prepare()
    assert from_text(nodes.layout.directories[0]) is not None
    nodes.prepare()
    (nodes.path(1) / "data").rename(tmp_path / "lost")
    nodes.prepare()  # it has never run
    (nodes.path(1) / "node.log").write_text("ready\n", encoding="utf-8")
    (nodes.path(1) / "data").rename(tmp_path / "lost-again")
    with pytest.raises(StorageError, match="it has forgotten its votes"):
        nodes.prepare()
