"""What commands say about a cluster in memory whose state is old, or that has nothing to do."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

import tidelog
from tidelog.cli import main as cli
from tidelog.client.admin.core import AdminCore
from tidelog.testing import MemoryCluster

Capture = pytest.CaptureFixture[str]


@pytest.fixture(scope="module")
def cluster() -> Iterator[MemoryCluster]:
    with MemoryCluster(1) as made:
        with tidelog.Admin(made.bootstrap) as admin:
            admin.create_topic("orders", partitions=1)
        yield made


@pytest.fixture(autouse=True)
def _bootstrap(cluster: MemoryCluster, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TIDELOG_BOOTSTRAP", cluster.bootstrap)


@pytest.fixture
def _stale(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every answer is seven seconds old."""
    monkeypatch.setattr(AdminCore, "stale_ms", property(lambda _self: 7_000, lambda _self, _value: None), raising=False)


@pytest.mark.usefixtures("_stale")
def test_stale_states_are_marked_in_the_table(capsys: Capture) -> None:
    assert cli.main(["topics", "describe", "orders"]) == 0
    assert "  online (7 s ago)" in capsys.readouterr().out
    for command in ("list", "describe"):
        assert cli.main(["brokers", command]) == 0
        assert "live (7 s ago)" in capsys.readouterr().out.replace(", active controller", "")


@pytest.mark.usefixtures("_stale")
@pytest.mark.parametrize("option", ["--unavailable", "--under-replicated"])
def test_selection_of_stale_partitions_fails(capsys: Capture, option: str) -> None:
    assert cli.main(["topics", "describe", option]) == 1
    assert "this selection is unknown now: only an active controller knows" in capsys.readouterr().err


@pytest.mark.parametrize("option", ["--unavailable", "--under-replicated"])
def test_selection_of_nothing_succeeds(capsys: Capture, option: str) -> None:
    assert cli.main(["topics", "describe", option]) == 0
    assert capsys.readouterr().err == ""


def test_election_without_anything_to_do_says_so(capsys: Capture) -> None:
    assert cli.main(["elect-leaders", "--all"]) == 0
    assert capsys.readouterr().err == "tidelog: nothing to do: the preferred replicas lead already\n"
    assert cli.main(["elect-leaders", "--all", "--unclean", "--yes"]) == 0
    assert capsys.readouterr().err == "tidelog: nothing to do: no partition lacks a leader\n"


def test_unknown_config_key_is_an_error(capsys: Capture) -> None:
    assert cli.main(["configs", "describe", "--topic", "orders", "--key", "foo"]) == 1
    assert capsys.readouterr().err == "tidelog: unknown key: foo; --all shows the keys of a topic\n"
    assert cli.main(["configs", "describe", "--topic", "orders", "--key", "retention.ms"]) == 0
