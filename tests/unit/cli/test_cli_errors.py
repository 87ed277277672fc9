"""What a command says when something is wrong: the right advice, names once, numbers that agree."""

from __future__ import annotations

import argparse

import grpc  # type: ignore[import-untyped]
import pytest
from grpc import aio

from tidelog.cli.clients import client_errors
from tidelog.cli.main import CommandError
from tidelog.cli.messages import error_text, named_error_text, print_outcomes
from tidelog.cli.table import count
from tidelog.client.errors import NoClusterError, UnknownTopicError
from tidelog.client.grpc_connections import error_of
from tidelog.model.errors import (
    ErrorCode,
    RemoteError,
    TidelogError,
    TopicAlreadyExistsError,
    UnreachableError,
    UnsupportedVersionError,
)
from tidelog.rpc.grpc.methods import method_named

METADATA = method_named("Cluster", "Metadata")


def refusal_of(error: TidelogError) -> str:
    """What a command whose job ends with the error says."""

    with pytest.raises(CommandError) as refusal, client_errors():
        raise error
    return str(refusal.value)


def status_of(code: grpc.StatusCode, details: str) -> TidelogError:
    metadata = aio.Metadata()
    return error_of(aio.AioRpcError(code, metadata, metadata, details=details), "nohost:9292", METADATA)


@pytest.mark.requirement("a:A-27", "b:B-11")
def test_a_missing_topic_comes_with_the_command_that_creates_it() -> None:
    text = "there is no topic 'nope'; create it with: tidelog topics create nope"
    assert refusal_of(UnknownTopicError("nope")) == text
    error = RemoteError("there is no topic nope", code=ErrorCode.UNKNOWN_TOPIC_OR_PARTITION)
    assert named_error_text("nope", error, creates=True) == text
    assert named_error_text("topic nope", error, creates=True) == text
    assert named_error_text("nope", error, creates=False) == "there is no topic 'nope' (UNKNOWN_TOPIC_OR_PARTITION)"
    assert refusal_of(UnknownTopicError("a b")).endswith("tidelog topics create 'a b'")


@pytest.mark.parametrize(
    ("name", "message", "beginning"),
    [
        ("greetings", "topic greetings exists", "topic greetings exists ("),
        ("bad name", "topic name 'bad name': letters only", "topic name 'bad name': letters only ("),
        (
            "fact",
            "replication factor 3: 1 broker is registered",
            "fact: replication factor 3: 1 broker is registered (",
        ),
        ("a", "topic a.b exists", "a: topic a.b exists ("),
    ],
)
def test_a_name_stands_in_its_error_once(name: str, message: str, beginning: str) -> None:
    error = RemoteError(message, code=ErrorCode.INVALID_TOPIC)
    assert named_error_text(name, error, creates=True).startswith(beginning)


def test_each_item_that_failed_has_its_line(capsys: pytest.CaptureFixture[str]) -> None:
    rows = {
        "a": None,
        "b": RemoteError("there is no topic b", code=ErrorCode.UNKNOWN_TOPIC_OR_PARTITION),
        "c": TopicAlreadyExistsError("topic 'c' already exists"),
    }
    options = argparse.Namespace(output="table")
    exists = (ErrorCode.TOPIC_ALREADY_EXISTS,)
    assert print_outcomes(options, "topics", rows, "deleted", creates=False, expected=exists) == 1
    captured = capsys.readouterr()
    assert captured.out == "a: deleted\n"
    assert captured.err == "tidelog: there is no topic 'b' (UNKNOWN_TOPIC_OR_PARTITION)\n"
    assert print_outcomes(options, "topics", {"a": None}, "deleted") == 0


def test_another_listener_is_not_taken_for_a_missing_cluster() -> None:
    http = status_of(grpc.StatusCode.UNAVAILABLE, "Trying to connect an http1.x server")
    assert isinstance(http, UnreachableError)
    text = refusal_of(NoClusterError(["nohost:9292"], [str(http)]))
    assert "speaks HTTP" in text
    assert "tidelog dev" not in text
    assert refusal_of(NoClusterError(["h:1"], ["connection refused"])).endswith("start one with: tidelog dev")
    default = refusal_of(NoClusterError(["localhost:9292"], ["connection refused"]))
    assert "; start one with: tidelog dev; " in default
    assert default.endswith("name its nodes by --bootstrap or TIDELOG_BOOTSTRAP"), "its first node may be dead"


def test_the_node_listener_is_named_without_advice_about_versions() -> None:
    error = status_of(grpc.StatusCode.UNIMPLEMENTED, "Method not found!")
    assert isinstance(error, UnsupportedVersionError)
    text = refusal_of(error)
    assert "9292 is the usual port for clients" in text
    assert "UNSUPPORTED_VERSION" not in text


@pytest.mark.parametrize(
    ("details", "reason"),
    [
        ("DNS resolution failed for nohost:9292: [C-ares status: Domain name not found]", "Domain name not found"),
        ("failed to connect to all addresses; last error: UNKNOWN: ipv4:1.2.3.4:1: Connection refused", "refused"),
        ("errors resolving nohost:9292: [one]", "[one]"),
    ],
)
def test_the_reason_of_an_unreachable_address_has_no_stray_bracket(details: str, reason: str) -> None:
    error = status_of(grpc.StatusCode.UNAVAILABLE, details)
    assert isinstance(error, UnreachableError)
    assert str(error).endswith(reason)


def test_numbers_and_nouns_agree() -> None:
    assert [count(number, "replica") for number in (0, 1, 2)] == ["0 replicas", "1 replica", "2 replicas"]
    assert [count(number, "batch") for number in (1, 2)] == ["1 batch", "2 batches"]


def test_advice_is_left_out_where_it_fits_only_some_reasons() -> None:
    live = RemoteError("broker 2 is live; stop it first", code=ErrorCode.INVALID_REQUEST)
    assert error_text(live) == "broker 2 is live; stop it first (INVALID_REQUEST)"
    assert error_text(RemoteError("x", code=ErrorCode.NOT_CONTROLLER)).startswith("x (NOT_CONTROLLER: ")
