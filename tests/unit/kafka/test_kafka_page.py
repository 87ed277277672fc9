"""docs/kafka.md says what is served, and the settings that it names are there."""

import re
from pathlib import Path

import pytest

from tidelog.rpc.kafka.dispatch import build
from tidelog.server.listeners import ListenerKind

DOCS = Path(__file__).resolve().parents[3] / "docs"
PAGE = (DOCS / "kafka.md").read_text(encoding="utf-8")


@pytest.mark.requirement("a:N-11", "b:U-02")
def test_the_table_is_what_is_served() -> None:
    rows = [f"| {key} | {row.api.name} | {row.advertised_low} to {row.high} |" for key, row in sorted(build().items())]
    table = "\n".join(["| key | name | versions |", "| --- | --- | --- |", *rows])
    assert f"\n\n{table}\n\n" in PAGE, f"docs/kafka.md should have this table:\n{table}"


@pytest.mark.requirement("b:B-05")
def test_the_port_is_the_usual_one() -> None:
    assert ListenerKind.KAFKA.value == 9092
    assert f"port {ListenerKind.KAFKA.value}" in PAGE


def test_settings_that_are_named_exist() -> None:
    named = re.findall(r"`([a-z]+(?:\.[a-z]+)+)`", PAGE.partition("## Settings")[2])
    known = (DOCS / "node-configuration.md").read_text() + (DOCS / "configuration.md").read_text()
    assert named
    assert [name for name in named if f"`{name}`" not in known] == []
