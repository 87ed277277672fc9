"""The house itself: lists that must agree, links that must lead somewhere, names that must not leak."""

import importlib.util
import json
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[2]
TREE = ("model", "world", "log", "raft", "cli", "bench", "tests", "docs", "src")


def load(name: str, path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


sources = load("tidelog_test_sources", ROOT / "tests" / "sources.py")
harness = load("tidelog_test_harness", ROOT / "bench" / "harness.py")


def test_markers_and_lists_of_source_items_agree() -> None:
    assert sources.ledger().problems == ()


def test_every_source_item_has_a_title_of_a_few_words() -> None:
    wordy = [item.id for item in sources.read_items() if not 1 < len(item.title.split()) <= 12]
    assert wordy == []


def test_marks_are_found_on_functions_classes_parameters_and_modules() -> None:
    import ast

    text = """
pytestmark = [pytest.mark.source("a:A-01")]
@pytest.mark.source("a:A-02", "b:A-03")
class TestIt: ...
@pytest.mark.parametrize("x", [pytest.param(1, marks=pytest.mark.source("a:A-04"))])
@pytest.mark.case("T5")
def test_it(x): ...
"""
    found = {identifier for _, identifier in sources.marks(ast.parse(text))}
    assert found == {"a:A-01", "a:A-02", "b:A-03", "a:A-04"}
    assert [identifier for _, identifier in sources.marks(ast.parse(text), "case")] == ["T5"]


def test_a_wrong_line_in_the_list_of_the_decided_is_noticed(tmp_path: Path) -> None:
    path = tmp_path / "against.md"
    path.write_text("text\n- a:A-01: reason\n- a:A-01: again\n- A-02 no form\n", encoding="utf-8")
    reasons, problems = sources.read_against(path)
    assert reasons == {"a:A-01": "reason"}
    assert problems == [
        "against.md:3: a:A-01 is listed twice",
        "against.md:4: not of the form '- inventory:id: reason'",
    ]


def test_strict_sources_fail_while_an_item_is_open() -> None:
    run = subprocess.run(
        [sys.executable, "tests/sources.py", "--area", "later", "--strict", "--output", "json"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    rows = json.loads(run.stdout)
    still_open = [row["id"] for row in rows if row["state"] == "open"]
    assert {row["area"] for row in rows} == {"later"}
    assert run.returncode == (1 if still_open else 0)
    assert len(run.stderr.splitlines()) >= len(still_open)


def test_every_room_is_linked_into_the_namespace_and_nothing_else_is() -> None:
    rooms = {path.parent.name for path in ROOT.glob("*/__init__.py")} - {"bench", "tests"}
    links = {
        path.name: path.readlink().as_posix() for path in (ROOT / "src" / "tidelog").iterdir() if path.is_symlink()
    }
    assert links == {room: f"../../{room}" for room in rooms}


def test_a_room_cannot_be_imported_by_its_bare_name(tmp_path: Path) -> None:
    for room in ("log", "raft", "model", "world", "cli"):
        run = subprocess.run(
            [sys.executable, "-c", f"import {room}"],
            cwd=ROOT,
            env={"PYTHONSAFEPATH": "1"},
            capture_output=True,
            text=True,
            check=False,
        )
        assert run.returncode == 1, f"import {room} works"
        assert "ModuleNotFoundError" in run.stderr


def test_relative_links_in_documents_lead_to_files() -> None:
    broken = [
        f"{path.relative_to(ROOT)}: {target}"
        for path in [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]
        for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", path.read_text(encoding="utf-8"))
        if not (path.parent / target).exists()
    ]
    assert broken == []


def test_decisions_are_numbered_without_gaps_and_have_three_parts() -> None:
    paths = sorted((ROOT / "docs" / "decisions").glob("*.md"))
    assert [int(path.name[:4]) for path in paths] == list(range(1, len(paths) + 1))
    for path in paths:
        text = path.read_text(encoding="utf-8")
        for heading in ("## Context", "## Decision", "## Consequences"):
            assert heading in text, f"{path.name} has no {heading}"


def test_pinned_versions_name_no_registry() -> None:
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pins = [line for line in lines if line and not line.startswith("#")]
    assert pins
    assert all(re.fullmatch(r"[A-Za-z0-9._-]+==[A-Za-z0-9.]+", pin) for pin in pins)


def test_every_direct_dependency_is_pinned() -> None:
    import tomllib

    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    pinned = {line.partition("==")[0].lower() for line in (ROOT / "constraints.txt").read_text().splitlines()}
    names = {re.split(r"[><=]", requirement)[0] for requirement in project["dependencies"]}
    assert names <= pinned


def test_the_version_is_told_once() -> None:
    import tomllib

    import tidelog

    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert project["version"] == tidelog.__version__


def test_no_file_grows_past_what_one_can_read() -> None:
    too_long = [
        f"{path.relative_to(ROOT)}: {count} lines"
        for room in ("model", "world", "log", "raft", "cli", "bench")
        for path in (ROOT / room).rglob("*.py")
        if "_pb2" not in path.name and (count := path.read_text(encoding="utf-8").count("\n")) > 900
    ]
    assert too_long == []


class TestHarness:
    def test_a_target_is_held_against_the_ratio_where_there_is_one(self) -> None:
        assert harness.at_least("x", 10.0, "s", target=1.0, ratio=0.5).met is False
        assert harness.at_least("x", 10.0, "s", target=1.0).met is True
        assert harness.at_most("x", 10.0, "s", target=1.0, ratio=0.5).met is True
        assert harness.at_most("x", 10.0, "s", target=1.0).met is False

    def test_a_missed_target_stands_out_in_the_table(self) -> None:
        results = [
            harness.at_least("encode", 1234567.0, "records/s", target=1.0, ratio=0.25, anchor="peer"),
            harness.Result("size", 0.5, "MiB"),
        ]
        text = harness.table(results)
        assert text.splitlines()[2].split() == ["encode", "1,234,567", "records/s", "0.25x", "peer", "1", "MISSED"]
        assert text.splitlines()[3].split() == ["size", "0.5", "MiB"]
        assert "| encode | 1,234,567 | records/s | 0.25x | peer | 1 | MISSED |" in harness.markdown(results)

    def test_a_result_has_the_documented_fields(self) -> None:
        fields = ["name", "value", "unit", "ratio", "anchor", "target", "met"]
        assert list(harness.Result("x", 1.0, "s").as_dict()) == fields

    def test_the_best_of_several_runs_counts(self) -> None:
        durations = iter([30_000, 0, 20_000])
        best = harness.best_seconds(lambda: sum(range(next(durations))), repeat=3)
        assert 0 <= best < 1

    def test_contestants_take_turns(self) -> None:
        order: list[str] = []
        times = harness.alternate(lambda: order.append("a"), lambda: order.append("b"), repeat=2)
        assert order == ["a", "b", "a", "b"]
        assert len(times) == 2

    @pytest.mark.parametrize(
        ("value", "text"),
        [(0.0, "0"), (1234.5, "1,234"), (123.4, "123"), (12.34, "12.3"), (1.234, "1.23"), (0.01234, "0.0123")],
    )
    def test_figures_are_short(self, value: float, text: str) -> None:
        assert harness.figure(value) == text

    def test_an_unknown_benchmark_is_named_with_those_there_are(self) -> None:
        run = subprocess.run(
            [sys.executable, "-m", "bench", "nonsense"], cwd=ROOT, env={}, capture_output=True, text=True, check=False
        )
        assert run.returncode == 2
        assert run.stderr.startswith("no such benchmark: nonsense; there are: ")
