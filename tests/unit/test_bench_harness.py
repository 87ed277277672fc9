"""The harness of the benchmarks: targets, ratios and tables."""

import importlib.util
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[2]


def load(name: str, path: Path) -> ModuleType:
    """`bench` is no installed package, and the checkout is not on the path."""
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


harness = load("tidelog_test_harness", ROOT / "bench" / "harness.py")


def test_a_target_is_held_against_the_ratio_where_there_is_one() -> None:
    assert harness.at_least("x", 10.0, "s", target=1.0, ratio=0.5).met is False
    assert harness.at_least("x", 10.0, "s", target=1.0).met is True
    assert harness.at_most("x", 10.0, "s", target=1.0, ratio=0.5).met is True
    assert harness.at_most("x", 10.0, "s", target=1.0).met is False


def test_a_missed_target_stands_out_in_the_table() -> None:
    results = [
        harness.at_least("encode", 1234567.0, "records/s", target=1.0, ratio=0.25, anchor="peer"),
        harness.Result("size", 0.5, "MiB"),
    ]
    text = harness.table(results)
    assert text.splitlines()[2].split() == ["encode", "1,234,567", "records/s", "0.25x", "peer", "1", "MISSED"]
    assert text.splitlines()[3].split() == ["size", "0.5", "MiB"]
    assert "| encode | 1,234,567 | records/s | 0.25x | peer | 1 | MISSED |" in harness.markdown(results)


def test_a_result_has_the_documented_fields() -> None:
    fields = ["name", "value", "unit", "ratio", "anchor", "target", "met"]
    assert list(harness.Result("x", 1.0, "s").as_dict()) == fields


def test_the_best_of_several_runs_counts() -> None:
    durations = iter([30_000, 0, 20_000])
    best = harness.best_seconds(lambda: sum(range(next(durations))), repeat=3)
    assert 0 <= best < 1


def test_contestants_take_turns() -> None:
    order: list[str] = []
    times = harness.alternate(lambda: order.append("a"), lambda: order.append("b"), repeat=2)
    assert order == ["a", "b", "a", "b"]
    assert len(times) == 2


@pytest.mark.parametrize(
    ("value", "text"),
    [(0.0, "0"), (1234.5, "1,234"), (123.4, "123"), (12.34, "12.3"), (1.234, "1.23"), (0.01234, "0.0123")],
)
def test_figures_are_short(value: float, text: str) -> None:
    assert harness.figure(value) == text


def test_an_unknown_benchmark_is_named_with_those_there_are() -> None:
    run = subprocess.run(
        [sys.executable, "-m", "bench", "nonsense"], cwd=ROOT, env={}, capture_output=True, text=True, check=False
    )
    assert run.returncode == 2
    assert run.stderr.startswith("no such benchmark: nonsense; there are: ")
