"""Prints which requirements a test proves, which are rejected and which are open: `make requirements`.

Tests are parsed, not run. A marker `@pytest.mark.requirement("a:A-66", ...)` on a function or a class, in a module's
`pytestmark` or as `marks=` of a parameter proves the requirements that it names. `tests/requirements.toml` lists all of
them; `rejected` there is the reason why no test proves one.

    tests/requirements.py [--area AREA] [--strict] [--output text|json|markdown]

`--strict` exits with 1 while a requirement of the area is open. An unknown id, and an id that is both proved and
rejected, are errors (exit 1) in any case. `--output markdown` is docs/requirements.md.
"""

import argparse
import ast
import json
import sys
import tomllib
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

TESTS = Path(__file__).resolve().parent
LIST = TESTS / "requirements.toml"
MARKER = "requirement"
PROVED, REJECTED, OPEN = "proved", "rejected", "open"
AREAS = {
    "log": "The log of a partition",
    "raft": "The controller quorum",
    "metadata": "Cluster metadata",
    "brokers": "Brokers and replication",
    "clients": "Clients and consumer groups",
    "kafka": "The Kafka API",
    "spark": "Spark",
    "faults": "Fault tests",
    "transactions": "Transactions",
    "security": "Security and quotas",
    "pipelines": "Pipelines, connectors and stream processing",
    "later": "Later: schemas, REST, operations, mirroring, tiered storage",
}


@dataclass(frozen=True, slots=True)
class Requirement:
    """`id` is `source:number`, as markers write it."""

    id: str
    section: str
    area: str
    text: str
    rejected: str | None


@dataclass(frozen=True, slots=True)
class Matrix:
    """All requirements and the tests that prove them. `problems` is empty in a sound tree."""

    requirements: tuple[Requirement, ...]
    tests: dict[str, list[str]]
    """id -> `path::test`."""
    problems: tuple[str, ...]

    def state(self, requirement: Requirement) -> str:
        if requirement.rejected is not None:
            return REJECTED
        return PROVED if requirement.id in self.tests else OPEN


def read_requirements(path: Path = LIST) -> list[Requirement]:
    sources = tomllib.loads(path.read_text(encoding="utf-8"))
    return [
        Requirement(f"{source}:{number}", f"{source} {section}", row["area"], row["text"], row.get("rejected"))
        for source, sections in sources.items()
        for section, rows in sections.items()
        for number, row in rows.items()
    ]


def marked_ids(tree: ast.AST, marker: str = MARKER) -> Iterator[str]:
    """Yield each argument of each `pytest.mark.<marker>(...)` below a node."""
    for node in ast.walk(tree):
        match node:
            case ast.Call(func=ast.Attribute(value=ast.Attribute(attr="mark"), attr=attr)) if attr == marker:
                for argument in node.args:
                    is_text = isinstance(argument, ast.Constant) and isinstance(argument.value, str)
                    yield str(argument.value) if is_text else ast.unparse(argument)  # type: ignore[attr-defined]


def _tests_of(tree: ast.Module, prefix: str) -> Iterator[tuple[str, str]]:
    """Yield (id, test) for each marker of a module; `test` names the function, the class or the file that has it."""
    for node in tree.body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield from ((identifier, f"{prefix}::{node.name}") for identifier in marked_ids(node))
        elif isinstance(node, ast.ClassDef):
            name = f"{prefix}::{node.name}"
            for decorator in node.decorator_list:
                yield from ((identifier, name) for identifier in marked_ids(decorator))
            yield from _tests_of(ast.Module(node.body, []), name)
        else:
            yield from ((identifier, prefix) for identifier in marked_ids(node))


def read_tests(root: Path = TESTS) -> dict[str, list[str]]:
    tests: dict[str, list[str]] = {}
    for path in sorted(root.rglob("test_*.py")):
        text = path.read_text(encoding="utf-8")
        tree = ast.parse(text if f"mark.{MARKER}(" in text else "")
        for identifier, test in _tests_of(tree, str(path.relative_to(root.parent))):
            tests.setdefault(identifier, []).append(test)
    return tests


def problems_of(requirements: Sequence[Requirement], tests: dict[str, list[str]]) -> list[str]:
    """Unknown areas, markers that name no requirement, and rejected requirements that a test proves."""
    known = {row.id for row in requirements}
    problems = [f"{row.id}: no area '{row.area}'" for row in requirements if row.area not in AREAS]
    problems += [f"{tests[name][0]}: no requirement {name}" for name in sorted(set(tests) - known)]
    problems += [
        f"{tests[row.id][0]}: {row.id} is rejected ({row.rejected})"
        for row in requirements
        if row.rejected is not None and row.id in tests
    ]
    return problems


def read_matrix() -> Matrix:
    requirements = read_requirements()
    tests = read_tests()
    return Matrix(tuple(requirements), tests, tuple(problems_of(requirements, tests)))


def totals(matrix: Matrix, requirements: list[Requirement]) -> list[tuple[str, int, int, int, int]]:
    """(area, all, proved, rejected, open) for each area that has any, and for all of them."""
    rows = []
    for area in (*AREAS, "all"):
        states = Counter(matrix.state(row) for row in requirements if area in (row.area, "all"))
        if states:
            rows.append((area, states.total(), states[PROVED], states[REJECTED], states[OPEN]))
    return rows


def as_text(matrix: Matrix, requirements: list[Requirement]) -> str:
    lines: list[str] = []
    for section in dict.fromkeys(row.section for row in requirements):
        lines.append(section)
        for state in (PROVED, REJECTED, OPEN):
            numbers = [
                row.id.partition(":")[2]
                for row in requirements
                if row.section == section and matrix.state(row) == state
            ]
            if numbers:
                lines.append(f"  {state} {len(numbers)}: {' '.join(numbers)}")
    lines += ["", f"{'area':14}{'all':>6}{'proved':>8}{'rejected':>10}{'open':>6}"]
    lines += [f"{area:14}{n:>6}{yes:>8}{no:>10}{rest:>6}" for area, n, yes, no, rest in totals(matrix, requirements)]
    return "\n".join(lines)


def as_document(matrix: Matrix, requirements: list[Requirement]) -> list[dict[str, object]]:
    return [
        {
            "id": row.id,
            "section": row.section,
            "area": row.area,
            "text": row.text,
            "state": matrix.state(row),
            "tests": matrix.tests.get(row.id, []),
            "rejected": row.rejected,
        }
        for row in requirements
    ]


def as_markdown(matrix: Matrix, requirements: list[Requirement]) -> str:
    """One table for each area: id, requirement, the first test that proves it or why none does."""
    lines = [
        "# Requirements",
        "",
        "What Tidelog is built to do, and the test that proves each requirement. The ids are those of the two sources",
        "that state them (`a` and `b`). A *rejected* requirement has a reason instead of a test. An *open* one belongs",
        "to a later step of the [roadmap](roadmap.md). `make docs` generates this page from `tests/requirements.toml`",
        "and the markers of the tests; `make requirements` prints the same by section.",
        "",
        "| area | all | proved | rejected | open |",
        "| --- | ---: | ---: | ---: | ---: |",
    ]
    lines += [" | ".join(("| " + str(row[0]), *map(str, row[1:]))) + " |" for row in totals(matrix, requirements)]
    for area, title in AREAS.items():
        rows = [row for row in requirements if row.area == area]
        if not rows:
            continue
        lines += ["", f"## {title}", "", "| id | requirement | proved by |", "| --- | --- | --- |"]
        for row in rows:
            tests = matrix.tests.get(row.id, [])
            more = f" and {len(tests) - 1} more" if len(tests) > 1 else ""
            proof = f"rejected: {row.rejected}" if row.rejected else f"`{tests[0]}`{more}" if tests else "open"
            lines.append(f"| {row.id} | {row.text.replace('|', '/')} | {proof.replace('|', '/')} |")
    return "\n".join(lines) + "\n"


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="requirements", description="Which requirements the tests prove.")
    parser.add_argument("--area", choices=tuple(AREAS), help="only this part of the project")
    parser.add_argument("--strict", action="store_true", help="exit with 1 if a requirement is open")
    parser.add_argument("--output", choices=("text", "json", "markdown"), default="text")
    options = parser.parse_args(arguments)
    matrix = read_matrix()
    requirements = [row for row in matrix.requirements if options.area in (None, row.area)]
    if options.output == "json":
        print(json.dumps(as_document(matrix, requirements), indent=2))
    else:
        print((as_text if options.output == "text" else as_markdown)(matrix, requirements).rstrip("\n"))
    still_open = [row for row in requirements if matrix.state(row) == OPEN]
    if options.strict:
        for row in still_open:
            print(f"open: {row.id} {row.text}", file=sys.stderr)
    for problem in matrix.problems:
        print(f"error: {problem}", file=sys.stderr)
    return 1 if matrix.problems or (options.strict and still_open) else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
