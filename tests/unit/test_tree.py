"""Rules of the tree: packages, layers, sizes, words, links and pins. Derived from the files, not from lists."""

import ast
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import grimp
import pytest
from words import tracked_files

import tidelog

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = sorted({path.parent.name for path in ROOT.glob("*/__init__.py")} - {"bench", "tests"})
LINES_MAX = 600
FUNCTION_LINES_MAX = 60
UNROLLED = ("log/kernel.py", "log/kernel_bulk.py")
"""Their loops over records call no function, for speed."""
IMPURE = frozenset(
    {"asyncio", "grpc", "lmdb", "logging", "os", "random", "socket", "subprocess", "threading", "time", "uvloop"}
)
PURE = re.compile(r"\bPure[.,;:]")
"""A module says so in its docstring."""


def says_pure(module: str) -> bool:
    path = ROOT / "src" / module.replace(".", "/")
    source = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    return PURE.search(ast.get_docstring(ast.parse(source.read_text(encoding="utf-8"))) or "") is not None


@pytest.fixture(scope="module")
def imports() -> grimp.ImportGraph:
    return grimp.build_graph(
        "tidelog", include_external_packages=True, exclude_type_checking_imports=True, cache_dir=None
    )


def test_every_package_is_linked_into_the_namespace_and_nothing_else_is() -> None:
    links = {
        path.name: path.readlink().as_posix() for path in (ROOT / "src" / "tidelog").iterdir() if path.is_symlink()
    }
    assert links == {package: f"../../{package}" for package in PACKAGES}


def test_a_package_cannot_be_imported_by_its_bare_name() -> None:
    program = "import importlib.util, sys; print([n for n in sys.argv[1:] if importlib.util.find_spec(n)])"
    run = subprocess.run(
        [sys.executable, "-c", program, *PACKAGES],
        cwd=ROOT,
        env={"PYTHONSAFEPATH": "1"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert run.stdout.strip() == "[]"


def test_every_package_has_its_place_among_the_layers() -> None:
    config = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    layers = next(c for c in config["tool"]["importlinter"]["contracts"] if c["type"] == "layers")["layers"]
    assert sorted(layer.strip("()").removeprefix("tidelog.") for layer in layers) == PACKAGES


def test_pure_modules_import_no_io_no_clock_and_no_randomness(imports: grimp.ImportGraph) -> None:
    impure = [
        f"{module} -> {', '.join(sorted(reached))}"
        for module in sorted(imports.modules)
        if module.startswith("tidelog.") and "_pb2" not in module
        if says_pure(module)
        if (reached := imports.find_upstream_modules(module) & IMPURE)
    ]
    assert impure == [], "\n".join(impure)


def test_modules_of_a_pure_core_say_so(imports: grimp.ImportGraph) -> None:
    """So that a module that stops being pure loses the word, which a reviewer sees."""
    cores = ("tidelog.model.", "tidelog.raft.", "tidelog.metadata.", "tidelog.replication.", "tidelog.coordinator.")
    silent = [
        module
        for module in sorted(imports.modules)
        if module.startswith((*cores, "tidelog.log.", "tidelog.services.", "tidelog.security."))
        if not imports.find_upstream_modules(module) & IMPURE
        if not says_pure(module)
    ]
    assert silent == [], "\n".join(silent)


def test_no_import_cycle_hides_behind_type_checking() -> None:
    graph = grimp.build_graph("tidelog", exclude_type_checking_imports=False, cache_dir=None)
    cycles = [
        f"{module} <-> {other}"
        for module in sorted(graph.modules)
        for other in sorted(graph.find_modules_directly_imported_by(module))
        if module < other and module in graph.find_upstream_modules(other)
    ]
    assert cycles == [], "\n".join(cycles)


def test_no_file_is_longer_than_one_idea() -> None:
    too_long = [
        f"{path.relative_to(ROOT)}: {count} lines"
        for path in tracked_files("*.py")
        if (count := path.read_text(encoding="utf-8").count("\n")) > LINES_MAX
    ]
    assert too_long == [], "\n".join(too_long)


def functions(path: Path) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node


def test_every_function_fits_on_a_screen() -> None:
    too_long = [
        f"{path.relative_to(ROOT)}:{node.lineno} {node.name}: {count} lines"
        for path in tracked_files("*.py")
        if path.relative_to(ROOT).as_posix() not in UNROLLED
        for node in functions(path)
        if node.end_lineno is not None and (count := node.end_lineno - node.lineno + 1) > FUNCTION_LINES_MAX
    ]
    assert too_long == [], "\n".join(too_long)


def test_relative_links_in_documents_lead_to_files() -> None:
    broken = [
        f"{path.relative_to(ROOT)}: {target}"
        for path in [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]
        for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", path.read_text(encoding="utf-8"))
        if not (path.parent / target).exists()
    ]
    assert broken == []


@cache
def defined_names(path: Path) -> set[str]:
    """Functions of a file, as `function` and `Class.method`."""
    body = ast.parse(path.read_text(encoding="utf-8")).body
    owners: list[tuple[str, list[ast.stmt]]] = [("", body)]
    owners += [(f"{node.name}.", node.body) for node in body if isinstance(node, ast.ClassDef)]
    kinds = ast.FunctionDef | ast.AsyncFunctionDef
    return {f"{prefix}{node.name}" for prefix, nodes in owners for node in nodes if isinstance(node, kinds)}


def test_code_paths_name_functions_that_exist() -> None:
    text = (ROOT / "docs" / "code-paths.md").read_text(encoding="utf-8")
    steps = re.findall(r"`([\w/]+\.py)`: ((?:`[\w.]+`(?:, )?)+)", text)
    assert len(steps) > 100
    missing = [
        f"{path}: {name}"
        for path, names in steps
        for name in re.findall(r"`([\w.]+)`", names)
        if not (ROOT / path).is_file() or name not in defined_names(ROOT / path)
    ]
    assert missing == [], "\n".join(missing)


def test_decisions_have_numbers_of_their_own_and_three_parts() -> None:
    paths = sorted((ROOT / "docs" / "decisions").glob("*.md"))
    numbers = [int(path.name[:4]) for path in paths]
    assert len(set(numbers)) == len(numbers), "two decisions have one number"
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
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    pinned = {line.partition("==")[0].lower() for line in (ROOT / "constraints.txt").read_text().splitlines()}
    names = {re.split(r"[><=]", requirement)[0] for requirement in project["dependencies"]}
    assert names <= pinned


def test_package_and_project_state_the_same_version() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert project["version"] == tidelog.__version__
