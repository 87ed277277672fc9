"""Every fenced command and program in README and docs runs, and prints what the page shows: see `document_programs`."""

from pathlib import Path

import document_programs
import pytest
from document_programs import Step, check, matches, steps

ROOT = Path(__file__).resolve().parents[2]
DOCUMENTS = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md"))]
RUNNABLE = [path for path in DOCUMENTS if steps(path.read_text(encoding="utf-8"))]


@pytest.mark.cluster
@pytest.mark.timeout(400)
@pytest.mark.parametrize("path", RUNNABLE, ids=lambda path: path.name)
def test_the_commands_and_programs_of_a_document_print_what_it_shows(path: Path, tmp_path: Path) -> None:
    check(path.read_text(encoding="utf-8"), tmp_path)


def test_the_readme_shows_something_that_runs() -> None:
    assert ROOT / "README.md" in RUNNABLE


# The rules themselves.


def test_commands_come_with_their_output_and_make_lines_are_not_run() -> None:
    text = "```console\n$ make test\n$ echo a; echo b\na\nb\n$ true\n```\n```python\nx = 1\n```\n```\n$ rm -rf x\n```\n"
    assert steps(text) == [
        Step("console", "echo a; echo b", ("a", "b")),
        Step("console", "true"),
        Step("python", "x = 1\n"),
    ]


def test_the_output_of_a_program_stands_in_the_block_after_it() -> None:
    text = "```python\nprint(1)\n```\n\n```output\n1\n```\n"
    assert steps(text) == [Step("python", "print(1)\n", ("1",))]


def test_programs_for_spark_are_left_to_the_tests_of_spark() -> None:
    assert steps("```python\nimport tidelog.spark\n```\n```python\nx = 1\n```\n") == [Step("python", "x = 1\n")]


@pytest.mark.parametrize("has_kcat", [True, False])
def test_kcat_is_run_where_it_is_installed(has_kcat: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(document_programs, "HAS_KCAT", has_kcat)
    found = steps("```console\n$ echo x | kcat -P\n$ kcat -L\n$ true\n```\n")
    assert [step.program for step in found] == (["echo x | kcat -P", "kcat -L", "true"] if has_kcat else ["true"])


def test_a_cluster_in_the_foreground_is_a_step_of_its_own() -> None:
    text = "```console\n$ true\n$ tidelog dev --nodes 3\n...\n$ tidelog topics list\n```\n"
    assert [(step.kind, step.program) for step in steps(text)] == [
        ("console", "true"),
        ("dev", "tidelog dev --nodes 3"),
        ("console", "tidelog topics list"),
    ]


@pytest.mark.parametrize(
    ("shown", "real", "is_same"),
    [
        ([], [], True),
        ([], ["a"], False),
        (["a"], [], False),
        (["a", "b"], ["a", "b"], True),
        (["a"], ["b"], False),
        (["a...z"], ["a to z"], True),
        (["a...z"], ["a to", "z"], False),
        (["a", "...", "z"], ["a", "b", "c", "z"], True),
        (["a", "...", "z"], ["a", "z"], True),
        (["..."], [], True),
        (["a."], ["ab"], False),
        (["a"], ["a  "], True),
    ],
)
def test_three_dots_stand_for_what_varies_and_for_nothing_else(
    shown: list[str], real: list[str], is_same: bool
) -> None:
    assert matches(shown, real) is is_same


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("```console\n$ echo a\nb\n```\n", "prints\na\nand the document shows\nb"),
        ("```console\n$ echo a\n```\n", "prints\na\nand the document shows\n"),
        ("```console\n$ echo a >&2; false | true\na\n```\n", "exit code 1"),
        ("```python\nprint(1)\n```\n", "prints\n1\nand the document shows\n"),
    ],
)
def test_a_wrong_output_is_noticed(text: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(AssertionError) as found:
        check(text, tmp_path)
    assert message in str(found.value)
