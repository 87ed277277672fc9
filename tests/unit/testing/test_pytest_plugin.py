"""The fixtures as a user's test suite sees them."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from importlib.metadata import entry_points
from pathlib import Path

import pytest

# `pytester` forgets what a run in this process has imported: the next run would have half of the modules twice.
import tidelog.testing.memory  # noqa: F401

pytest_plugins = ["pytester"]

ROOT = Path(__file__).resolve().parents[3]
PLUGIN = "tidelog.testing.plugin"
IS_INSTALLED = any(one.value == PLUGIN for one in entry_points(group="pytest11"))
"""An installation that is older than the entry point must name the plugin."""
ARGUMENTS = ["-p", "no:cacheprovider", "-q", *([] if IS_INSTALLED else ["-p", PLUGIN])]


def test_the_package_names_the_plugin() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert project["entry-points"]["pytest11"] == {"tidelog": PLUGIN}


def test_the_memory_fixture_gives_each_test_its_own_cluster(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(
        """
        import pytest
        import tidelog

        @pytest.mark.parametrize("turn", [1, 2])
        def test_orders(tidelog_memory, turn):
            with tidelog.Admin(tidelog_memory.bootstrap) as admin:
                assert admin.list_topics() == []
                admin.create_topic("orders", partitions=1, replication_factor=3)
            with tidelog.Producer(tidelog_memory.bootstrap) as producer:
                producer.send("orders", b"1").result(30)
                tidelog_memory.kill_leader("orders")
                assert producer.send("orders", b"2").result(60).offset == 1

        @pytest.mark.tidelog_memory(brokers=5, seed=9)
        def test_five(tidelog_memory):
            assert tidelog_memory.brokers == (1, 2, 3, 4, 5)
            assert tidelog_memory.seed == 9
        """
    )
    pytester.runpytest_inprocess(*ARGUMENTS).assert_outcomes(passed=3)


def test_a_failure_tells_the_seed_and_the_faults(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(
        """
        def test_fails(tidelog_memory):
            tidelog_memory.kill(2)
            assert False
        """
    )
    result = pytester.runpytest_inprocess(*ARGUMENTS, "--tidelog-seed=42")
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["*tidelog_memory*", "*--tidelog-seed=42*", "*kill broker 2*"])


def test_the_marker_and_the_option_are_known(pytester: pytest.Pytester) -> None:
    pytester.makepyfile("def test_nothing(): pass")
    result = pytester.runpytest_inprocess(*ARGUMENTS, "--strict-markers", "--markers")
    result.stdout.fnmatch_lines(["@pytest.mark.tidelog_memory*"])


@pytest.mark.cluster
def test_the_cluster_fixture_starts_processes_once_for_the_session(pytester: pytest.Pytester) -> None:
    pytester.makeconftest(
        """
        import pytest

        @pytest.fixture(scope="session")
        def tidelog_nodes():
            return 1
        """
    )
    pytester.makepyfile(
        """
        import tidelog

        PIDS = []

        def test_one(tidelog_cluster):
            PIDS.append(tidelog_cluster.pid(1))
            with tidelog.Admin(tidelog_cluster.bootstrap) as admin:
                admin.create_topic("orders", partitions=1, replication_factor=1)

        def test_two(tidelog_cluster):
            assert PIDS == [tidelog_cluster.pid(1)]
            with tidelog.Admin(tidelog_cluster.bootstrap) as admin:
                assert [topic.name for topic in admin.list_topics()] == ["orders"]
        """
    )
    pytester.runpytest_inprocess(*ARGUMENTS).assert_outcomes(passed=2)


def test_the_plugin_imports_nothing_of_tidelog_before_it_is_used() -> None:
    program = (
        f"import sys, {PLUGIN}; "
        "heavy = [name for name in sys.modules if name.startswith(('tidelog.client', 'tidelog.server', 'grpc'))]; "
        "sys.exit(repr(heavy) if heavy else 0)"
    )
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False, timeout=60)
    assert run.returncode == 0, run.stderr


def blocks() -> list[str]:
    text = (ROOT / "docs" / "testing-your-application.md").read_text(encoding="utf-8")
    return [block.split("```", 1)[0] for block in text.split("```py\n")[1:]]


def test_the_examples_of_the_page_about_testing_pass(pytester: pytest.Pytester) -> None:
    assert len(blocks()) >= 3
    pytester.makepyfile(**{f"test_example_{number}": block for number, block in enumerate(blocks())})
    result = pytester.runpytest_inprocess(*ARGUMENTS)
    outcomes = result.parseoutcomes()
    assert set(outcomes) == {"passed"}, outcomes
    assert outcomes["passed"] >= len(blocks())
