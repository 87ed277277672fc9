"""`tidelog brokers` against a cluster in memory."""

from __future__ import annotations

import io
import json
import os

import pytest

import tidelog
from tidelog.cli import main as cli
from tidelog.testing import MemoryCluster

Capture = pytest.CaptureFixture[str]


def test_a_stopped_broker_without_replicas_is_unregistered(capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    with MemoryCluster() as cluster:
        monkeypatch.setenv("TIDELOG_BOOTSTRAP", cluster.bootstrap)
        broker = cluster.brokers[-1]
        unregister = ["brokers", "unregister", str(broker)]
        assert cli.main(unregister) == 1, "it runs"
        assert f"broker {broker}" in capsys.readouterr().err
        assert cli.main(["brokers", "unregister", "99"]) == 1
        assert "`tidelog brokers list`" in capsys.readouterr().err
        cluster.stop(broker)
        assert cli.main([*unregister, "--validate-only"]) == 0
        assert capsys.readouterr().out == f"broker {broker} would be unregistered\n"
        assert cli.main([*unregister, "--yes", "--output", "json"]) == 0
        assert json.loads(capsys.readouterr().out) == {"broker": broker, "validate_only": False}
        with tidelog.Admin(cluster.bootstrap) as admin:
            assert broker not in {row.id for row in admin.describe_brokers()}


def test_a_broker_is_unregistered_on_a_terminal_only_after_yes(
    capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Terminal(io.TextIOWrapper):
        def isatty(self) -> bool:
            return True

    def terminal(answer: str) -> Terminal:
        """Returns a terminal on which `answer` was typed and that ends there."""
        reader, writer = os.pipe()
        with os.fdopen(writer, "w") as typed:
            typed.write(answer)
        return Terminal(os.fdopen(reader, "rb"))

    with MemoryCluster() as cluster:
        monkeypatch.setenv("TIDELOG_BOOTSTRAP", cluster.bootstrap)
        broker = cluster.brokers[-1]
        cluster.stop(broker)
        for answer, code in (("n\n", 1), ("", 1), ("y\n", 0)):
            with terminal(answer) as stdin:
                monkeypatch.setattr("sys.stdin", stdin)
                assert cli.main(["brokers", "unregister", str(broker)]) == code
            captured = capsys.readouterr()
            assert f"Unregister broker {broker} of the cluster at " in captured.err
            assert ("nothing was changed" in captured.err) == bool(code)
