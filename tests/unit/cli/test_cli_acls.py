"""`tidelog acls` against a `MemoryCluster` that enforces ACLs."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from support.clusters.commands import KEYS, keys_of

from tidelog.cli import acl_grammar
from tidelog.cli import main as cli
from tidelog.metadata import acls
from tidelog.testing import MemoryCluster

Capture = pytest.CaptureFixture[str]
Run = Callable[..., int]


@pytest.fixture
def run() -> Iterator[Run]:
    settings = {"authorizer": "acl", "super.users": "User:ANONYMOUS"}
    with MemoryCluster(1, node_settings=settings) as cluster:
        yield lambda command, *more: cli.main(["acls", command, "--bootstrap", cluster.bootstrap, *more])


def rows(capsys: Capture) -> list[list[str]]:
    """The cells of a table, without its heading."""
    return [
        line.split() for line in capsys.readouterr().out.splitlines() if line[:4] in ("topi", "grou", "clus", "tran")
    ]


def document(command: str, capsys: Capture) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert keys_of(found) <= KEYS[f"acls {command}"]
    return found


@pytest.mark.requirement("a:K-17", "a:N-07", "b:M-10", "b:P-08", "b:I-12")
def test_acls_are_created_listed_and_deleted(run: Run, capsys: Capture) -> None:
    assert run("list") == 0
    assert capsys.readouterr().err == "tidelog: there are no ACLs\n"
    assert run("create", "--allow-principal", "User:alice", "--operation", "read", "--topic", "orders") == 0
    assert capsys.readouterr().out.startswith("created:\n")
    prefixed = ("--topic", "audit-", "--resource-pattern-type", "prefixed")
    assert run("create", "--deny-principal", "User:*", "--deny-host", "10.0.0.7", *prefixed) == 0
    capsys.readouterr()
    assert run("list") == 0
    assert rows(capsys) == [
        ["topic", "audit-", "prefixed", "User:*", "10.0.0.7", "all", "deny"],
        ["topic", "orders", "literal", "User:alice", "*", "read", "allow"],
    ]
    assert run("list", "--topic", "audit-log", "--resource-pattern-type", "match", "--output", "json") == 0
    (found,) = document("list", capsys)["acls"]
    assert (found["resource"], found["permission"]) == ("audit-", "deny")
    assert run("list", "--principal", "User:bob") == 0
    assert capsys.readouterr().err == "tidelog: no ACL matches\n"
    assert run("delete", "--topic", "orders", "--validate-only") == 0
    assert capsys.readouterr().out.startswith("these would be deleted:\n")
    assert run("delete", "--topic", "orders", "--yes", "--output", "json") == 0
    deleted = document("delete", capsys)
    assert [(row["principal"], row["error"]) for row in deleted["acls"]] == [("User:alice", None)]
    assert run("delete", "--topic", "orders", "--yes") == 0
    assert capsys.readouterr().err == "tidelog: no ACL matches\n"
    assert run("list", "--output", "json") == 0
    assert len(document("list", capsys)["acls"]) == 1


@pytest.mark.requirement("a:K-15", "a:K-17", "a:K-24")
def test_producer_and_consumer_stand_for_what_they_need(run: Run, capsys: Capture) -> None:
    allow = ("--allow-principal", "User:app")
    assert run("create", *allow, "--producer", "--topic", "orders", "--transactional-id", "tx") == 0
    assert {(row[0], row[5]) for row in rows(capsys)} == {
        ("topic", "write"),
        ("topic", "describe"),
        ("topic", "create"),
        ("transactional-id", "write"),
        ("transactional-id", "describe"),
    }
    assert run("create", *allow, "--consumer", "--topic", "orders", "--group", "billing") == 0
    assert {(row[0], row[5]) for row in rows(capsys)} == {("topic", "read"), ("topic", "describe"), ("group", "read")}
    assert run("delete", *allow, "--consumer", "--topic", "orders", "--group", "billing", "--yes") == 0
    assert len(rows(capsys)) == 3
    assert run("list") == 0
    assert {row[5] for row in rows(capsys) if row[0] == "topic"} == {"write", "create"}


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("--topic", "t"), "nobody is named"),
        (("--allow-principal", "User:a"), "no resource is named"),
        (("--allow-principal", "User:a", "--producer", "--group", "g"), "need --topic"),
        (("--allow-principal", "User:a", "--consumer", "--topic", "t"), "needs --group"),
        (("--allow-principal", "User:a", "--producer", "--topic", "t", "--group", "g"), "no right to a group"),
        (("--allow-principal", "User:a", "--producer", "--topic", "t", "--operation", "read"), "no --operation"),
        (("--allow-host", "h", "--topic", "t"), "--allow-host without --allow-principal"),
        (("--allow-principal", "User:a", "--topic", "t", "--operation", "fly"), "unknown value"),
    ],
)
def test_arguments_without_a_meaning_are_refused(arguments: tuple[str, ...], says: str, capsys: Capture) -> None:
    assert cli.main(["acls", "create", "--bootstrap", "localhost:1", *arguments]) == 2
    assert says in capsys.readouterr().err


def test_an_acl_that_is_rejected_is_reported_and_the_others_are_created(run: Run, capsys: Capture) -> None:
    both = ("--allow-principal", "alice", "--allow-principal", "User:bob", "--topic", "t", "--operation", "read")
    assert run("create", *both, "--output", "json") == 1
    captured = capsys.readouterr()
    first, second = json.loads(captured.out)["acls"]
    assert first["error"]["name"] == "INVALID_REQUEST"
    assert second["error"] is None
    assert "User:name" in captured.err


def test_without_an_authorizer_there_are_no_acls(capsys: Capture) -> None:
    with MemoryCluster(1) as cluster:
        assert cli.main(["acls", "list", "--bootstrap", cluster.bootstrap]) == 1
    assert "no authorizer is configured" in capsys.readouterr().err


def test_the_operations_are_those_of_the_metadata() -> None:
    known = {operation for kind in acls.RESOURCE_TYPES for operation in acls._OPERATIONS[kind]}
    assert set(acl_grammar.OPERATIONS) == known | {acls.ALL}
