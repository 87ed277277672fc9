"""The programs of examples/, each in a process of its own, against one real cluster."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from support.clusters import commands

from tidelog.testing import LocalCluster

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(120)]

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
COVERED = {"produce.py", "consume_group.py", "admin.py", "bulk_arrow.py", "asyncio_example.py", "ledger.py"}


@pytest.fixture
def bootstrap(cluster: LocalCluster) -> str:
    return cluster.bootstrap


def run(name: str, *arguments: str) -> list[str]:
    """The lines that it prints."""
    done = subprocess.run(
        [sys.executable, "-W", "error", str(EXAMPLES / name), *arguments],
        capture_output=True,
        text=True,
        timeout=90,
        check=False,
        env={**os.environ, "PYTHONSAFEPATH": "1"},
    )
    assert (done.returncode, done.stderr) == (0, ""), f"{name}:\n{done.stdout}\n{done.stderr}"
    return done.stdout.splitlines()


def test_every_example_is_run() -> None:
    assert {path.name for path in EXAMPLES.glob("*.py")} == COVERED


def test_what_is_produced_is_consumed_by_a_group_and_not_twice(bootstrap: str) -> None:
    lines = run("produce.py", bootstrap)
    partition = lines[0].split()[4]
    assert lines[0] == f"future: stored in partition {partition} at offset 0"
    assert lines[1:4] == [f"callback: stored in partition {partition} at offset {offset}" for offset in (1, 2, 3)]
    assert lines[4].startswith("bulk: 1000 records in ")
    assert lines[5:] == ["json: stored"]
    # 1 + 3 + 1,000 + 1, in two runs of the group: the second goes on where the first has stopped.
    assert run("consume_group.py", bootstrap, "400")[-1] == "handled 400 records"
    second = run("consume_group.py", bootstrap, "605")
    assert second[0] == "reads example-orders-0, example-orders-1, example-orders-2"
    assert second[-1] == "handled 605 records"
    lag = commands.run("groups", "describe", "example-billing", "--bootstrap", bootstrap)
    rows = [line.split() for line in lag.out.splitlines() if line.lstrip().startswith("example-orders")]
    assert len(rows) == 3
    assert sum(int(row[-1]) for row in rows if row[-1].isdecimal()) == 0, lag.out


def test_the_admin_makes_changes_moves_and_deletes(bootstrap: str) -> None:
    lines = run("admin.py", bootstrap)
    assert re.fullmatch(r"example-admin: led by \[[123], [123]\]", lines.pop(2))
    assert lines == [
        "example-admin: created, 2 partitions",
        "retention.ms: 3600000, set on the topic",
        "no-such-topic: UNKNOWN_TOPIC_OR_PARTITION",
        "example-reports: 6 records behind",
        "example-reports: example-admin-0 from 4 to 0",
        "deleted",
    ]


def test_tables_go_in_and_come_out(bootstrap: str) -> None:
    lines = run("bulk_arrow.py", bootstrap)
    assert lines[0].startswith("stored 20000 rows in ")
    assert lines[1:] == [
        "read 20000 rows of 4 partitions",
        f"sum of the values: {sum(range(20_000))}",
        "streamed 20000 rows",
    ]


def test_writers_of_a_ledger_never_book_more_than_there_is(bootstrap: str) -> None:
    assert run("ledger.py", bootstrap) == ["10 of 18 withdrawals of 10 were booked from 100"]


def test_the_same_on_an_event_loop(bootstrap: str) -> None:
    assert sorted(run("asyncio_example.py", bootstrap)) == ["read 50 events", "wrote 50 events"]
