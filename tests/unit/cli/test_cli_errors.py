"""What a command says when something is wrong: the right advice, names once, numbers that agree."""

from __future__ import annotations

import grpc  # type: ignore[import-untyped]
import pytest
from grpc import aio

from tidelog.cli import session
from tidelog.cli.main import RefusedError
from tidelog.cli.session import named_error_text
from tidelog.cli.table import count
from tidelog.client.cluster import ClusterClient
from tidelog.client.errors import NoClusterError, UnknownTopicError
from tidelog.client.grpc_connections import error_of
from tidelog.model.errors import ErrorCode, RemoteError, TidelogError, UnreachableError, UnsupportedVersionError
from tidelog.rpc.door import method_named
from tidelog.rpc.errors import coded
from tidelog.rpc.v1 import common_pb2 as pb

METADATA = method_named("Cluster", "Metadata")


def refusal_of(error: TidelogError) -> str:
    """What a command whose job ends with the error says."""

    async def job(_: ClusterClient) -> int:
        raise error

    with pytest.raises(RefusedError) as refusal:
        session.run_at(["localhost:1"], job)
    return str(refusal.value)


def status_of(code: grpc.StatusCode, details: str) -> TidelogError:
    metadata = aio.Metadata()
    return error_of(aio.AioRpcError(code, metadata, metadata, details=details), "nohost:9292", METADATA)


@pytest.mark.source("a:A-27", "b:B-11")
def test_a_missing_topic_comes_with_the_command_that_creates_it() -> None:
    told = "there is no topic 'nope'; create it with: tidelog topics create nope"
    assert refusal_of(UnknownTopicError("nope")) == told
    error = RemoteError("there is no topic nope", code=ErrorCode.UNKNOWN_TOPIC_OR_PARTITION)
    assert named_error_text("nope", error, creates=True) == told
    assert named_error_text("topic nope", error, creates=True) == told
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
    rows = [
        ("a", pb.Outcome(name="a")),
        ("b", pb.Outcome(name="b", error=coded(ErrorCode.UNKNOWN_TOPIC_OR_PARTITION, "there is no topic b"))),
        ("c", pb.Outcome(name="c", error=coded(ErrorCode.TOPIC_ALREADY_EXISTS, "topic c exists"))),
    ]
    assert session.tell_errors(rows, but=[ErrorCode.TOPIC_ALREADY_EXISTS], creates=False) == 1
    assert capsys.readouterr().err == "tidelog: there is no topic 'b' (UNKNOWN_TOPIC_OR_PARTITION)\n"
    assert session.tell_errors(rows[:1]) == 0


def test_another_door_is_not_taken_for_a_missing_cluster() -> None:
    http = status_of(grpc.StatusCode.UNAVAILABLE, "Trying to connect an http1.x server")
    assert isinstance(http, UnreachableError)
    told = refusal_of(NoClusterError(["nohost:9292"], [str(http)]))
    assert "speaks HTTP" in told
    assert "tidelog dev" not in told
    assert refusal_of(NoClusterError(["h:1"], ["connection refused"])).endswith("start one with: tidelog dev")


def test_the_door_between_nodes_is_told_without_advice_about_versions() -> None:
    error = status_of(grpc.StatusCode.UNIMPLEMENTED, "Method not found!")
    assert isinstance(error, UnsupportedVersionError)
    told = refusal_of(error)
    assert "9292 is the usual port for clients" in told
    assert "UNSUPPORTED_VERSION" not in told


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
