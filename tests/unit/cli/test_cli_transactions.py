"""`tidelog transactions` and the admin methods behind it, against scripted transactional ids."""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest
from support.clusters.commands import KEYS, keys_of

from tidelog.cli import main as cli
from tidelog.cli import transaction_grammar
from tidelog.client.admin import transactions as operations
from tidelog.client.record import TopicPartition
from tidelog.errors import CoordinatorLoadingError, InvalidRequestError, OverloadedError, TransactionalIdNotFoundError
from tidelog.testing import MockAdmin

Capture = pytest.CaptureFixture[str]


@pytest.fixture
def admin(monkeypatch: pytest.MonkeyPatch) -> Iterator[MockAdmin]:
    with MockAdmin() as mock:
        mock.create_topic("orders", partitions=2)
        mock.add_transaction(
            "payments",
            producer_id=1_001,
            partitions=[("orders", 0)],
            members={"task 1": (1_002, [("orders", 1)])},
            open_for_s=600,
            last_token=b"batch 7",
        )
        mock.add_transaction("idle", state="CompleteCommit", producer_id=1_003)
        monkeypatch.setattr("tidelog.cli.transactions.open_admin", lambda _: nullcontext(mock))
        yield mock


def run(*arguments: str) -> int:
    return cli.main(["transactions", *arguments])


def checked(command: str, capsys: Capture) -> dict[str, Any]:
    """The document, whose keys are all listed in docs/cli.md."""
    document: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert keys_of(document) <= KEYS[f"transactions {command}"]
    return document


def test_list_shows_the_ids_that_match(admin: MockAdmin, capsys: Capture) -> None:
    assert run("list") == 0
    assert capsys.readouterr().out.splitlines() == [
        "transactional id  producer  state           coordinator",
        "idle                  1003  CompleteCommit            1",
        "payments              1001  Ongoing                   1",
    ]
    for arguments in (["--state", "Ongoing"], ["--producer-id", "1002"], ["--open-for", "5m"]):
        assert run("list", *arguments, "--output", "json") == 0
        rows = checked("list", capsys)["transactions"]
        assert rows == [{"transactional_id": "payments", "producer_id": 1_001, "state": "Ongoing", "coordinator": 1}]
    assert run("list", "--state", "PrepareAbort") == 0
    assert capsys.readouterr().err == "tidelog: no transactional id matches\n"
    assert run("list", "--open-for", "soon") == 2
    assert "use a duration like 90s or 15m" in capsys.readouterr().err


def test_describe_shows_partitions_and_members_and_what_is_not_there(admin: MockAdmin, capsys: Capture) -> None:
    assert run("describe") == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("payments: Ongoing, producer 1001 epoch 0, timeout 60000 ms, coordinator 1, open since ")
    assert re.search(r"open since \d{4}-\d\d-\d\d \d\d:\d\d:\d\d\.\d{3} UTC, token b'batch 7'$", lines[0])
    assert lines[1:] == [
        "topic   partition  member  producer",
        "orders          0  -           1001",
        "orders          1  task 1      1002",
    ]
    assert run("describe", "payments", "nobody", "--output", "json") == 1
    captured = capsys.readouterr()
    document = json.loads(captured.out)
    assert keys_of(document) <= KEYS["transactions describe"]
    known, unknown = document["transactions"]
    assert known["partitions"] == [{"topic": "orders", "partition": 0}]
    assert known["members"] == [
        {"producer_id": 1_002, "label": "task 1", "partitions": [{"topic": "orders", "partition": 1}]}
    ]
    assert known["last_token"] == "YmF0Y2ggNw=="
    assert unknown["error"]["name"] == "TRANSACTIONAL_ID_NOT_FOUND"
    assert "nobody" in captured.err
    assert "`tidelog transactions list`" in captured.err


def test_ids_and_labels_cannot_write_to_the_terminal(admin: MockAdmin, capsys: Capture) -> None:
    members = {"\x1b[2Jtask": (1_005, [("orders", 1)])}
    admin.add_transaction("a\nb\x1b[31m\u202e", producer_id=1_004, members=members)
    assert run("list", "--producer-id", "1004") == 0
    assert run("describe", "a\nb\x1b[31m\u202e") == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 5
    assert lines[1].startswith(r"a\nb\x1b[31m\u202e  ")
    assert lines[2].startswith(r"a\nb\x1b[31m\u202e: Ongoing")
    assert r"\x1b[2Jtask" in lines[4]
    assert run("abort", "a\nb\x1b[31m\u202e") == 0
    assert capsys.readouterr().out == "a\\nb\\x1b[31m\\u202e: aborted\n"


def test_abort_says_what_it_has_done_for_each_id(admin: MockAdmin, capsys: Capture) -> None:
    assert run("abort", "payments", "idle", "nobody", "--yes") == 1
    captured = capsys.readouterr()
    assert captured.out == "payments: aborted\nidle: no transaction is open\n"
    assert "nobody" in captured.err
    assert run("abort", "payments", "--yes", "--output", "json") == 0
    assert checked("abort", capsys)["transactions"] == [
        {"transactional_id": "payments", "was_open": False, "error": None}
    ]
    assert admin.describe_transaction("payments").state == "CompleteAbort"


@pytest.mark.parametrize(("typed", "code", "state"), [(b"n\n", 1, "Ongoing"), (b"y\n", 0, "CompleteAbort")])
def test_abort_asks_on_a_terminal(
    admin: MockAdmin, capsys: Capture, monkeypatch: pytest.MonkeyPatch, typed: bytes, code: int, state: str
) -> None:
    keyboard, terminal = os.openpty()
    with os.fdopen(keyboard, "wb", buffering=0) as typing, os.fdopen(terminal, encoding="utf-8") as stdin:
        monkeypatch.setattr(sys, "stdin", stdin)
        typing.write(typed)
        assert run("abort", "payments") == code
    assert "abort the open transaction of payments?" in capsys.readouterr().err
    assert admin.describe_transaction("payments").state == state


def test_abort_of_a_prepared_transaction_asks_with_its_consequence(
    admin: MockAdmin, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    prepared = replace(admin.describe_transaction("payments"), prepared_ms=1_000)
    monkeypatch.setattr(admin, "describe_transaction", lambda _: prepared)
    keyboard, terminal = os.openpty()
    with os.fdopen(keyboard, "wb", buffering=0) as typing, os.fdopen(terminal, encoding="utf-8") as stdin:
        monkeypatch.setattr(sys, "stdin", stdin)
        typing.write(b"n\n")
        assert run("abort", "payments") == 1
    question = (
        "payments is prepared, and another system may have committed its part; abort the open transaction of payments?"
    )
    assert question in capsys.readouterr().err


def test_find_hanging_reports_what_no_coordinator_knows(admin: MockAdmin, capsys: Capture) -> None:
    admin.add_open_transaction(("orders", 0), producer_id=1_001, start_offset=5, age_s=7_200)
    admin.add_open_transaction(("orders", 1), producer_id=1_002, start_offset=6, age_s=7_200)
    admin.add_open_transaction(("orders", 1), producer_id=77, start_offset=8, age_s=60)
    assert run("find-hanging") == 0
    assert "no transaction hangs" in capsys.readouterr().err
    assert run("find-hanging", "--open-for", "30s") == 1, "that one is young"
    capsys.readouterr()
    admin.add_open_transaction(("orders", 0), producer_id=1_003, start_offset=9, age_s=7_200)
    assert run("find-hanging", "--topic", "orders", "--output", "json") == 1
    (row,) = checked("find-hanging", capsys)["hanging"]
    assert row["last_timestamp_ms"] > 0
    del row["last_timestamp_ms"]
    assert row == {
        "topic": "orders",
        "partition": 0,
        "producer_id": 1_003,
        "producer_epoch": 0,
        "start_offset": 9,
        "coordinator_epoch": -1,
    }
    assert run("find-hanging") == 1
    lines = capsys.readouterr().out.splitlines()
    assert re.search(r" \d{4}-\d\d-\d\d \d\d:\d\d:\d\d\.\d{3}$", lines[1])
    assert lines[0] == "topic   partition  producer  epoch  from offset        last record (UTC)"
    assert run("find-hanging", "--topic", "none") == 1
    assert "none" in capsys.readouterr().err


def test_the_admin_rejects_what_cannot_be_meant(admin: MockAdmin) -> None:
    with pytest.raises(InvalidRequestError, match="no state 'Open'"):
        admin.list_transactions(states=["Open"])
    with pytest.raises(InvalidRequestError, match="no duration"):
        admin.list_transactions(open_for="soon")
    with pytest.raises(InvalidRequestError, match="integers"):
        admin.list_transactions(producer_ids=["x"])  # type: ignore[list-item]
    with pytest.raises(TransactionalIdNotFoundError):
        admin.describe_transaction("nobody")
    with pytest.raises(TransactionalIdNotFoundError):
        admin.abort_transaction("nobody")
    described = admin.describe_transactions(["payments", "nobody"], partial=True)
    assert set(described.succeeded) == {"payments"}
    assert set(described.errors) == {"nobody"}
    assert described["payments"].partitions == (TopicPartition("orders", 0),)
    listed = admin.list_transactions(states=["ongoing"], open_for=timedelta(minutes=5))
    assert [row.transactional_id for row in listed] == ["payments"]
    assert len(admin.list_transactions(open_for=3_600_000)) == 0


def test_a_list_that_is_not_complete_says_so(admin: MockAdmin, capsys: Capture) -> None:
    admin.fail_next("list_transactions", CoordinatorLoadingError("broker 2 loads"))
    assert run("list") == 0, "the second attempt was complete"
    capsys.readouterr()
    admin.fail_next("list_transactions", OverloadedError("busy"), times=2)
    assert run("list") == 1
    assert "busy" in capsys.readouterr().err


def test_the_grammar_and_the_client_know_the_same_states() -> None:
    assert transaction_grammar.STATES == operations.STATES
