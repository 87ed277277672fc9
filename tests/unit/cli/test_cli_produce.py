"""`tidelog produce` with connections that a test scripts: what it says on stderr."""

from __future__ import annotations

import logging
import os
import signal
from argparse import Namespace
from types import SimpleNamespace
from typing import Any, cast

import pytest
from support.clients.scripted import ScriptedConnections, stale_metadata

from tidelog.cli import main as cli
from tidelog.cli import produce, session
from tidelog.model.errors import ErrorCode, RemoteError
from tidelog.rpc.grpc.errors import as_message
from tidelog.rpc.v1 import cluster_pb2

Capture = pytest.CaptureFixture[str]


def run_produce(
    monkeypatch: pytest.MonkeyPatch, connections: ScriptedConnections, topic: str, *, timeout_ms: int
) -> int:
    """Runs the command with one line on stdin."""
    reader, writer = os.pipe()
    os.write(writer, b"hello\n")
    os.close(writer)
    with os.fdopen(reader) as stdin:
        monkeypatch.setattr("sys.stdin", stdin)
        monkeypatch.setattr(session, "GrpcConnections", lambda: connections)
        return cli.main(["produce", topic, "--bootstrap", "a:1", "--timeout-ms", str(timeout_ms)])


def test_first_ctrl_c_says_what_is_waited_for(monkeypatch: pytest.MonkeyPatch, capfd: Capture) -> None:
    def metadata(address: str, request: Any, timeout_ms: int) -> Any:
        if len(connections.timeouts_ms) == 2:  # the first one is before the first record
            os.kill(os.getpid(), signal.SIGINT)
        return stale_metadata(address, request, timeout_ms)

    connections = ScriptedConnections(Metadata=metadata)
    monkeypatch.setattr(produce, "NOTICE_S", 0.05)
    monkeypatch.setattr(logging.getLogger("tidelog"), "handlers", [])  # `demo` leaves one that discards its lines
    assert run_produce(monkeypatch, connections, "t", timeout_ms=800) == 130
    error = capfd.readouterr().err
    assert "tidelog: waiting for 1 record; Ctrl-C again ends at once\n" in error
    assert "a:1 has no contact with an active controller" in error
    assert "\ntidelog: cannot reach broker 2" in f"\n{error}", "a warning of the client is a line of the command"


def test_topic_that_was_created_is_named(monkeypatch: pytest.MonkeyPatch, capfd: Capture) -> None:
    def metadata(address: str, request: Any, timeout_ms: int) -> Any:
        if request.may_create:
            connections.answers["Metadata"] = stale_metadata
            return stale_metadata(address, request, timeout_ms)
        answer = cluster_pb2.MetadataResponse(cluster_id="c")
        missing = RemoteError("no such topic", code=ErrorCode.UNKNOWN_TOPIC_OR_PARTITION)
        answer.topics.add(name="t", error=as_message(missing))
        return answer

    connections = ScriptedConnections(Metadata=metadata)
    assert run_produce(monkeypatch, connections, "t", timeout_ms=300) == 1
    assert "tidelog: created topic 't', 1 partition\n" in capfd.readouterr().err


def test_records_before_a_wrong_line_are_counted(capfd: Capture) -> None:
    producing = SimpleNamespace(records=1, error=None, rows={})
    source = SimpleNamespace(signal=None, wrong=produce.InputError("line 2 has no key separator"))
    produce._report(Namespace(output="table", topic="t"), cast(Any, producing), cast(Any, source))
    assert capfd.readouterr().err == "tidelog: 1 record stored in t\n"
