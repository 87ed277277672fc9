"""`python -m bench [names]`: run the benchmarks, print a table for each, write build/bench.json.

Without names it runs every module of `bench/` that has a `run()`. A missed target is reported and does not fail: the
exit code is 0, and 2 only for an unknown name. `--markdown FILE` also writes the tables between the marks of a document
(docs/performance.md).
"""

import argparse
import ast
import importlib
import json
import pkgutil
import platform
import sys
from collections.abc import Callable, Iterable
from pathlib import Path

import bench
from bench.harness import Result, markdown, table

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "build" / "bench.json"
BEGIN, END = "<!-- bench: begin -->", "<!-- bench: end -->"


def has_run(path: Path) -> bool:
    """Return whether a module defines `run` at its top level, without importing it."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    return any(isinstance(node, ast.FunctionDef) and node.name == "run" for node in tree.body)


def available() -> list[str]:
    """Return the names of the benchmarks, sorted."""
    here = Path(__file__).resolve().parent
    modules = (module.name for module in pkgutil.iter_modules(bench.__path__) if module.name != "__main__")
    return sorted(name for name in modules if has_run(here / f"{name}.py"))


def put_between_marks(document: Path, text: str) -> None:
    """Replace the text between the two marks of a document."""
    before, begin, rest = document.read_text(encoding="utf-8").partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise SystemExit(f"{document}: no marks {BEGIN} ... {END}")
    document.write_text(f"{before}{BEGIN}\n{text}\n{END}{after}", encoding="utf-8")


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench", description="Run benchmarks.")
    parser.add_argument("names", nargs="*", help="benchmarks to run (all of them if none is named)")
    parser.add_argument("--list", action="store_true", help="only list their names")
    parser.add_argument("--markdown", type=Path, help="also write the tables between the marks of this document")
    options = parser.parse_args(arguments)
    known = available()
    if options.list:
        print("\n".join(known))
        return 0
    unknown = sorted(set(options.names) - set(known))
    if unknown:
        print(f"no such benchmark: {', '.join(unknown)}; there are: {', '.join(known)}", file=sys.stderr)
        return 2
    everything: list[Result] = []
    sections: list[str] = []
    for name in options.names or known:
        run: Callable[[], Iterable[Result]] = importlib.import_module(f"bench.{name}").run
        results = list(run())
        print(f"\n{name}\n{table(results)}", flush=True)
        sections.append(f"**{name}**\n\n{markdown(results)}\n")
        everything += results
    RESULTS.parent.mkdir(parents=True, exist_ok=True)
    RESULTS.write_text(json.dumps([result.as_dict() for result in everything], indent=2) + "\n", encoding="utf-8")
    if options.markdown is not None:
        machine = f"Python {platform.python_version()} on {platform.system()} {platform.machine()}."
        put_between_marks(options.markdown, "\n".join([machine + "\n", *sections]).rstrip())
    missed = [result.name for result in everything if result.met is False]
    print(f"\n{len(everything)} results, {len(missed)} MISSED; written to {RESULTS.relative_to(ROOT)}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
