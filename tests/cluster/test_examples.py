"""The programs of examples/, each in a process of its own, against one real cluster."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from support.clients.committed import values
from support.clusters import commands
from support.clusters.waiting import until

import tidelog
from tidelog.testing import LocalCluster

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(120)]

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
COVERED = {
    "produce.py",
    "consume_group.py",
    "consume_transform_produce.py",
    "admin.py",
    "bulk_arrow.py",
    "asyncio_example.py",
    "ledger.py",
    "lock.py",
}
ORDERS = 10_000


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


@contextmanager
def started(name: str, *arguments: str) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-W", "error", str(EXAMPLES / name), *arguments]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env={**os.environ, "PYTHONSAFEPATH": "1"})
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def await_line(process: subprocess.Popen[str], start: str) -> None:
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith(start):
            return
    raise AssertionError(f"it has ended with {process.wait()}, without a line {start!r}")


@pytest.mark.requirement("a:H-01", "a:H-03", "a:T-18", "a:X3-36", "b:EX-38")
def test_a_pipeline_that_is_killed_in_open_transactions_processes_each_order_once(bootstrap: str) -> None:
    name = "consume_transform_produce.py"
    with started(name, bootstrap) as process:
        await_line(process, "ready")
        with tidelog.Producer(bootstrap) as producer:
            orders = [f"order {number}" for number in range(ORDERS)]
            producer.send_many("example-incoming", values=orders).result(60)
        await_line(process, "committed")
        stop_in_transaction(process, bootstrap)
        process.send_signal(signal.SIGKILL)
    with started(name, bootstrap) as process, tidelog.Admin(bootstrap) as admin:
        await_line(process, "committed")
        stop_in_transaction(process, bootstrap)
        assert admin.abort_transaction("example-invoicing-1")
        process.send_signal(signal.SIGCONT)
        await_line(process, "aborted")
        await_line(process, "committed")
        stop_in_transaction(process, bootstrap)
        process.send_signal(signal.SIGKILL)
    with started(name, bootstrap) as process:
        until(lambda: len(values(bootstrap, "example-invoices")) >= ORDERS, "all orders are processed")
        process.send_signal(signal.SIGINT)
        await_line(process, "asked to stop")
        assert process.wait(30) == 0
    assert sorted(values(bootstrap, "example-invoices")) == sorted(f"invoice of {order}".encode() for order in orders)
    with tidelog.Admin(bootstrap) as admin:
        assert sum(row.lag or 0 for row in admin.group_lag("example-invoicing")) == 0


def stop_in_transaction(process: subprocess.Popen[str], bootstrap: str) -> None:
    """Stop it, again and again until a transaction is open then."""

    def is_open() -> bool:
        process.send_signal(signal.SIGSTOP)
        with tidelog.Admin(bootstrap) as admin:
            state = admin.describe_transaction("example-invoicing-1").state
        if state != "Ongoing":
            process.send_signal(signal.SIGCONT)
        return state == "Ongoing"

    until(is_open, "it is stopped in a transaction")


def test_one_of_many_programs_holds_the_lock_and_one_that_lost_it_changes_nothing(bootstrap: str) -> None:
    assert run("lock.py", bootstrap) == [
        "first holds the lock",
        "second does not get it while first holds it",
        "second holds the lock",
        "first has lost the lock: its update was not stored",
        "updates: ['of first', 'of second']",
    ]


def test_writers_of_a_ledger_never_book_more_than_there_is(bootstrap: str) -> None:
    assert run("ledger.py", bootstrap) == ["10 of 18 withdrawals of 10 were booked from 100"]
    assert run("ledger.py", bootstrap) == [
        "the ledger has entries already: it is not opened again",
        "0 of 18 withdrawals of 10 were booked from 100",
    ]


def test_the_same_on_an_event_loop(bootstrap: str) -> None:
    assert sorted(run("asyncio_example.py", bootstrap)) == ["read 50 events", "wrote 50 events"]
