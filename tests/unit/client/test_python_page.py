"""docs/python.md: up to date, and with a word about everything that is public."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path

import pytest

import tidelog
from tidelog.client import api_docs, option_table, public_errors

ROOT = Path(__file__).resolve().parents[3]


def test_the_page_is_up_to_date() -> None:
    committed = (ROOT / "docs" / "python.md").read_text(encoding="utf-8")
    assert committed == api_docs.page(), "run: python -m tidelog.client.api_docs > docs/python.md"


@pytest.mark.parametrize(
    "client", [api_docs.PRODUCER, api_docs.CONSUMER, api_docs.ADMIN], ids=lambda client: client.name
)
def test_every_method_of_a_client_is_described(client: api_docs.Described) -> None:
    assert api_docs.undocumented(client) == []


def test_every_public_name_is_on_the_page() -> None:
    page = api_docs.page()
    for name in set(dir(tidelog)) & set(tidelog._HOMES):
        assert name in page, name
    for kind in (option_table.ProducerConfig, option_table.ConsumerConfig, option_table.AdminConfig):
        rows = [line for line in page.splitlines() if line.startswith("| `")]
        for one in fields(kind):
            row = next(line for line in rows if line.startswith(f"| `{one.name}` |"))
            assert row.split(" | ")[-1].strip(" |"), f"nothing is said of {one.name}"


def test_every_error_that_a_client_raises_is_one_of_the_public_ones() -> None:
    from tidelog.client import errors
    from tidelog.client.consumer import errors as consumer_errors

    for module in (errors, consumer_errors):
        for name, kind in vars(module).items():
            if isinstance(kind, type) and issubclass(kind, Exception) and kind.__module__ == module.__name__:
                assert getattr(public_errors, name) is kind
    assert set(public_errors.__all__) <= set(vars(tidelog.errors))
