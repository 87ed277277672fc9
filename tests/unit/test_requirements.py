"""The requirements matrix: markers and the list agree, and the tool reports what is wrong."""

import ast
import json
import subprocess
import sys
from pathlib import Path

import requirements

ROOT = Path(__file__).resolve().parents[2]


def test_markers_and_the_list_of_requirements_agree() -> None:
    assert requirements.read_matrix().problems == ()


def test_every_requirement_is_a_short_sentence() -> None:
    wordy = [row.id for row in requirements.read_requirements() if not 1 < len(row.text.split()) <= 30]
    assert wordy == []


def test_markers_on_functions_classes_parameters_and_modules_are_read() -> None:
    text = """
pytestmark = [pytest.mark.requirement("a:A-01")]
@pytest.mark.requirement("a:A-02", "b:A-03")
class TestOne:
    @pytest.mark.requirement("a:A-05")
    def test_two(self): ...
@pytest.mark.parametrize("x", [pytest.param(1, marks=pytest.mark.requirement("a:A-04"))])
@pytest.mark.case("T5")
def test_three(x): ...
"""
    tree = ast.parse(text)
    assert dict(requirements._tests_of(tree, "f.py")) == {
        "a:A-01": "f.py",
        "a:A-02": "f.py::TestOne",
        "b:A-03": "f.py::TestOne",
        "a:A-04": "f.py::test_three",
        "a:A-05": "f.py::TestOne::test_two",
    }
    assert list(requirements.marked_ids(tree, "case")) == ["T5"]


def test_a_rejected_requirement_with_a_test_is_a_problem(tmp_path: Path) -> None:
    path = tmp_path / "requirements.toml"
    path.write_text(
        '[a."One"]\nA-01 = { area = "log", text = "One is one.", rejected = "it is not" }\n', encoding="utf-8"
    )
    (row,) = requirements.read_requirements(path)
    matrix = requirements.Matrix((row,), {row.id: ["f.py::test_one"]}, ())
    assert matrix.state(row) == requirements.REJECTED
    assert requirements.problems_of((row,), matrix.tests) == ["f.py::test_one: a:A-01 is rejected (it is not)"]


def test_an_unknown_id_and_an_unknown_area_are_problems() -> None:
    row = requirements.Requirement("a:A-01", "a One", "nowhere", "One is one.", None)
    assert requirements.problems_of((row,), {"a:A-02": ["f.py::test_two"]}) == [
        "a:A-01: no area 'nowhere'",
        "f.py::test_two: no requirement a:A-02",
    ]


def test_strict_fails_while_a_requirement_is_open() -> None:
    run = subprocess.run(
        [sys.executable, "tests/requirements.py", "--area", "later", "--strict", "--output", "json"],
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
