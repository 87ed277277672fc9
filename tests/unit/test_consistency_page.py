"""docs/consistency.md: every promise has a number and names tests that exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from test_tree import defined_names

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "consistency.md").read_text(encoding="utf-8")
NAMED = re.compile(r"`(tests/[\w/]+\.py)::(\w+)`")
ROWS = [
    [cell.strip() for cell in line.strip("|").split("|")]
    for line in PAGE.splitlines()
    if line.startswith("| ") and not line.startswith(("| no. ", "| what fails ", "| --- "))
]
"""Of every table: the first cell is a number or a part that fails, the last one names tests."""


def test_the_page_has_promises_of_every_kind() -> None:
    kinds = {row[0][0] for row in ROWS if re.fullmatch(r"[A-Z]\d+", row[0])}
    assert kinds == {"P", "A", "R", "T", "J", "C", "G", "M"}
    assert len(ROWS) > 45


def test_numbers_of_promises_are_in_order_without_gaps() -> None:
    numbers: dict[str, list[int]] = {}
    for row in ROWS:
        if re.fullmatch(r"[A-Z]\d+", row[0]):
            numbers.setdefault(row[0][0], []).append(int(row[0][1:]))
    assert {kind: found == list(range(1, len(found) + 1)) for kind, found in numbers.items()} == dict.fromkeys(
        numbers, True
    )


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row[0])
def test_every_promise_names_its_tests(row: list[str]) -> None:
    assert NAMED.findall(row[-1]), f"{row[0]} has no test"
    assert NAMED.sub("", row[-1]).replace("<br>", "") == "", f"{row[0]}: something in the last cell is no test"


def test_the_tests_exist() -> None:
    named = NAMED.findall(PAGE)
    assert len(named) > 90
    missing = [
        f"{path}::{name}"
        for path, name in named
        if not (ROOT / path).is_file()
        or name not in {defined.rpartition(".")[2] for defined in defined_names(ROOT / path)}
    ]
    assert missing == []
