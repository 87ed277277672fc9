"""Which items of the source inventories are proved by a test, decided against, or open: `make sources`.

Tests are read, not run: a marker `@pytest.mark.source("a:A-66", ...)` on a function, on a class or in a module's
`pytestmark`, or as `marks=` of a parameter, proves the items it names. `tests/sources.toml` lists all items,
`docs/decided-against.md` those that no test shall prove.

    tests/sources.py [--area AREA] [--strict] [--output json]

`--area` looks at one part of the project; `--strict` exits with 1 if an item of it is open. An unknown id, an id twice
in a list, and an id that is both proved and decided against are errors (exit 1) in any case.
"""

import argparse
import ast
import json
import re
import sys
import tomllib
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

TESTS = Path(__file__).resolve().parent
ITEMS = TESTS / "sources.toml"
AGAINST = TESTS.parent / "docs" / "decided-against.md"
AREAS = ("log", "raft", "metadata", "brokers", "clients", "kafka", "spark", "later")
_AGAINST_LINE = re.compile(r"^- ([ab]:[A-Z0-9]+-\d+[a-z]?): (.+)$")


@dataclass(frozen=True, slots=True)
class Item:
    """One statement of the sources. `id` is `inventory:number`, as markers write it."""

    id: str
    section: str
    area: str
    title: str


@dataclass(frozen=True, slots=True)
class Ledger:
    """All items with what became of them. `problems` is empty in a sound tree."""

    items: tuple[Item, ...]
    proved: dict[str, list[str]]
    """id -> the tests that prove it, as `path:line`."""
    against: dict[str, str]
    """id -> reason."""
    problems: tuple[str, ...]

    def state(self, item: Item) -> str:
        if item.id in self.proved:
            return "proved"
        return "against" if item.id in self.against else "open"


def read_items(path: Path = ITEMS) -> list[Item]:
    """The items of the list, in its order."""
    with path.open("rb") as file:
        inventories = tomllib.load(file)
    return [
        Item(f"{inventory}:{number}", f"{inventory} {section}", row["area"], row["title"])
        for inventory, sections in inventories.items()
        for section, rows in sections.items()
        for number, row in rows.items()
    ]


def read_against(path: Path = AGAINST) -> tuple[dict[str, str], list[str]]:
    """Decided-against ids with their reasons, and what is wrong with the list."""
    reasons: dict[str, str] = {}
    problems: list[str] = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        if not line.startswith("- "):
            continue
        match = _AGAINST_LINE.match(line)
        if match is None:
            problems.append(f"{path.name}:{number}: not of the form '- inventory:id: reason'")
        elif match[1] in reasons:
            problems.append(f"{path.name}:{number}: {match[1]} is listed twice")
        else:
            reasons[match[1]] = match[2]
    return reasons, problems


def marks(tree: ast.AST, marker: str = "source") -> Iterable[tuple[int, str]]:
    """(line, id) of every argument of every `pytest.mark.<marker>(...)` in a module."""
    for node in ast.walk(tree):
        if (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Attribute)
            and node.func.attr == marker
            and isinstance(node.func.value, ast.Attribute)
            and node.func.value.attr == "mark"
        ):
            for argument in node.args:
                known = isinstance(argument, ast.Constant) and isinstance(argument.value, str)
                yield node.lineno, argument.value if known else ast.unparse(argument)  # type: ignore[attr-defined]


def collect(root: Path = TESTS) -> dict[str, list[str]]:
    """id -> places, over all test modules below `root`."""
    places: dict[str, list[str]] = {}
    for path in sorted(root.rglob("test_*.py")):
        for line, identifier in marks(ast.parse(path.read_text(encoding="utf-8"))):
            places.setdefault(identifier, []).append(f"{path.relative_to(root.parent)}:{line}")
    return places


def ledger() -> Ledger:
    """Read the lists and the tests, and hold them against each other."""
    items = read_items()
    known = {item.id for item in items}
    against, problems = read_against()
    proved = collect()
    counted = Counter(item.id for item in items)
    problems += [f"{ITEMS.name}: {identifier} is listed twice" for identifier, n in counted.items() if n > 1]
    problems += [f"{ITEMS.name}: {item.id}: no area '{item.area}'" for item in items if item.area not in AREAS]
    problems += [f"{proved[identifier][0]}: no item {identifier}" for identifier in sorted(set(proved) - known)]
    problems += [f"{AGAINST.name}: no item {identifier}" for identifier in sorted(set(against) - known)]
    problems += [
        f"{proved[identifier][0]}: {identifier} is decided against ({against[identifier]})"
        for identifier in sorted(set(proved) & set(against))
    ]
    return Ledger(tuple(items), proved, against, tuple(problems))


def report(book: Ledger, items: list[Item]) -> str:
    """For each section the three groups with their ids, then the totals of each area."""
    lines: list[str] = []
    for section in dict.fromkeys(item.section for item in items):
        inside = [item for item in items if item.section == section]
        lines.append(section)
        for state, heading in (("proved", "proved"), ("against", "decided against"), ("open", "open")):
            numbers = [item.id.partition(":")[2] for item in inside if book.state(item) == state]
            if numbers:
                lines.append(f"  {heading} {len(numbers)}: {' '.join(numbers)}")
    lines += ["", f"{'area':10}{'items':>7}{'proved':>8}{'against':>9}{'open':>6}"]
    for area in (*AREAS, "all"):
        inside = [item for item in items if area in (item.area, "all")]
        if inside:
            states = Counter(book.state(item) for item in inside)
            lines.append(
                f"{area:10}{len(inside):>7}{states['proved']:>8}{states['against']:>9}{states['open']:>6}",
            )
    return "\n".join(lines)


def as_document(book: Ledger, items: list[Item]) -> list[dict[str, object]]:
    return [
        {
            "id": item.id,
            "section": item.section,
            "area": item.area,
            "title": item.title,
            "state": book.state(item),
            "tests": book.proved.get(item.id, []),
            "reason": book.against.get(item.id),
        }
        for item in items
    ]


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="sources", description="What the tests prove of the source inventories.")
    parser.add_argument("--area", choices=AREAS, help="only this part of the project")
    parser.add_argument("--strict", action="store_true", help="exit with 1 if an item is open")
    parser.add_argument("--output", choices=("text", "json"), default="text")
    options = parser.parse_args(arguments)
    book = ledger()
    items = [item for item in book.items if options.area in (None, item.area)]
    print(report(book, items) if options.output == "text" else json.dumps(as_document(book, items), indent=2))
    still_open = [item for item in items if book.state(item) == "open"]
    if options.strict:
        for item in still_open:
            print(f"open: {item.id} {item.title}", file=sys.stderr)
    for problem in book.problems:
        print(f"error: {problem}", file=sys.stderr)
    return 1 if book.problems or (options.strict and still_open) else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
