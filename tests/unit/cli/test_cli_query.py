"""`tidelog query`, as far as no cluster is needed: missing extras, which tables are topics, cells."""

from __future__ import annotations

import sys
from datetime import UTC, date, datetime
from decimal import Decimal
from typing import Any

import duckdb
import pytest

from tidelog.cli import main as cli
from tidelog.cli import query
from tidelog.cli.main import UsageError


@pytest.mark.parametrize(("package", "extra"), [("duckdb", "query"), ("pyarrow", "arrow")])
def test_a_missing_extra_is_one_line(
    package: str, extra: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    assert cli.main(["query", "select 1"]) == 1
    assert capsys.readouterr().err == f"tidelog: this needs {package}: pip install 'tidelog[{extra}]'\n"


@pytest.mark.parametrize(
    ("text", "tables"),
    [
        ("select 1", {}),
        ('select * from orders a join "orders.eu-1" b using (key)', {"orders": False, "orders.eu-1": False}),
        ("from a where key in (select key from b) union select * from c", {"a": False, "b": False, "c": False}),
        ("with x as (select * from a) select * from x, b", {"a": False, "x": True, "b": False}),
        ("with a as (select * from a) select * from A", {"a": True, "A": True}),
        ("select * from read_csv('f.csv'), range(3)", {}),
        ("select 'from t', count(*) from \"select\"", {"select": False}),
    ],
)
def test_tables_of_a_query_are_topics_but_for_those_that_it_defines(text: str, tables: dict[str, bool]) -> None:
    with duckdb.connect(":memory:") as database:
        assert query._tables(database, text) == tables


def test_a_query_has_a_bounded_number_of_tables() -> None:
    text = "select 1 from " + ", ".join(f"t{number}" for number in range(query.TOPICS_MAX + 1))
    with duckdb.connect(":memory:") as database, pytest.raises(UsageError, match="100 at most"):
        query._tables(database, text)


@pytest.mark.parametrize(
    ("value", "plain", "csv", "shown"),
    [
        (None, None, None, None),
        (b"text", "text", "text", "text"),
        (b"\xff\x00", {"base64": "/wA="}, "0xff00", "0xff00"),
        (Decimal("18"), 18, "18", Decimal("18")),
        (Decimal("1.25"), 1.25, "1.25", Decimal("1.25")),
        (float("nan"), "nan", "nan", None),
        (datetime(2026, 1, 31, 12, tzinfo=UTC), "2026-01-31T12:00:00.000Z", "2026-01-31T12:00:00.000Z", None),
        (date(2026, 1, 31), "2026-01-31", "2026-01-31", "2026-01-31"),
        ([{"name": "a", "value": b"1"}], [{"name": "a", "value": "1"}], '[{"name": "a", "value": "1"}]', None),
        ("two\nlines", "two\nlines", "two\nlines", r"two\nlines"),
    ],
)
def test_values_for_programs_and_for_people(value: Any, plain: Any, csv: Any, shown: Any) -> None:
    assert query._plain(value) == plain
    assert query._csv_cell(value) == csv
    if shown is not None:
        assert query._table_cell(value) == shown


def test_rows_past_the_limit_are_omitted_with_a_notice(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["query", "select range as n from range(5)", "--limit", "2", "--output", "csv"]) == 0
    captured = capsys.readouterr()
    assert captured.out == "n\n0\n1\n"
    assert captured.err == "tidelog: the first 2 rows only; --limit shows more\n"
    assert cli.main(["query", "select range as n from range(2)", "--limit", "2"]) == 0
    captured = capsys.readouterr()
    assert (captured.out, captured.err) == ("n\n0\n1\n", "")


def test_a_failure_while_rows_come_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["query", "select ('x' || range)::int from range(3)"]) == 1
    captured = capsys.readouterr()
    assert captured.err.startswith("tidelog: Conversion Error: Could not convert string 'x0'")
    assert captured.err.count("\n") == 1


def test_variables_of_the_program_are_no_tables(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["query", "select * from found", "--bootstrap", "127.0.0.1:1"]) == 1
    assert "no cluster at" in capsys.readouterr().err
