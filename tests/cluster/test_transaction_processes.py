"""Transactions on real processes: Ctrl-C, forks, nodes that are killed, and the operator's commands."""

from __future__ import annotations

import os
import pty
import signal
import subprocess
import sys
import textwrap
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from exercises import make
from support.clients.committed import UNCOMMITTED, values
from support.clusters import commands
from support.clusters.waiting import until

import tidelog
from tidelog.testing import LocalCluster
from tidelog.verify import TransactionChecker

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(180)]

ROUNDS = 3
AFTER_KILL = 20
"""Transactions after each kill, before the node starts again."""


@contextmanager
def program(cluster: LocalCluster, code: str, **names: object) -> Iterator[subprocess.Popen[str]]:
    """A program of its own; these names are defined in it."""
    head = "".join(f"{name} = {value!r}\n" for name, value in {"BOOTSTRAP": cluster.bootstrap, **names}.items())
    process = subprocess.Popen(
        [sys.executable, "-W", "error", "-c", head + textwrap.dedent(code)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


IN_A_BLOCK = """
import signal, sys, time
import tidelog

with tidelog.Producer(BOOTSTRAP, transactional_id=TOPIC) as producer:
    with producer.transaction():
        producer.send(TOPIC, b"interrupted").result(30)
        print("in the block", flush=True)
        time.sleep(100)
"""
IN_AN_ASYNC_BLOCK = """
import asyncio
import tidelog

async def main():
    async with tidelog.aio.Producer(BOOTSTRAP, transactional_id=TOPIC) as producer:
        async with producer.transaction():
            await producer.send_and_wait(TOPIC, b"interrupted")
            print("in the block", flush=True)
            await asyncio.sleep(100)

asyncio.run(main())
"""


@pytest.mark.parametrize("code", [IN_A_BLOCK, IN_AN_ASYNC_BLOCK], ids=["threads", "asyncio"])
def test_ctrl_c_in_a_block_aborts_before_the_program_ends(
    cluster: LocalCluster, admin: tidelog.Admin, code: str, request: pytest.FixtureRequest
) -> None:
    topic = make(admin, f"interrupted-{request.node.callspec.id}")
    with program(cluster, code, TOPIC=topic) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "in the block\n"
        assert admin.describe_transaction(topic).state == "Ongoing"
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=30)
    assert process.returncode == -signal.SIGINT
    assert "KeyboardInterrupt" in errors
    assert "failed" not in errors
    assert admin.describe_transaction(topic).state in ("PrepareAbort", "CompleteAbort")
    assert values(cluster.bootstrap, topic) == []
    assert values(cluster.bootstrap, topic, UNCOMMITTED) == [b"interrupted"]


FORKED = """
import os, signal, sys
import tidelog

signal.alarm(60)

def in_child(job):
    pid = os.fork()
    if pid == 0:
        signal.alarm(20)
        try:
            job()
        except BaseException as error:
            print(type(error).__name__, flush=True)
        else:
            print("nothing was raised", flush=True)
        os._exit(0)
    assert os.waitpid(pid, 0)[1] == 0

with tidelog.Producer(BOOTSTRAP, transactional_id=TOPIC) as owner, tidelog.Producer(BOOTSTRAP) as member:
    owner.init_transactions()
    member.join_transaction(TOPIC)
    member.send(TOPIC, b"member").result(30)
    with owner.transaction():
        owner.send(TOPIC, b"owner").result(30)
        for job in (
            lambda: owner.send(TOPIC, b"x"),
            lambda: owner.commit_transaction(),
            lambda: owner.transaction().__enter__(),
            lambda: member.send(TOPIC, b"x").result(10),
            lambda: member.leave_transaction(),
        ):
            in_child(job)
        id_ = member.leave_transaction()
        owner.commit_transaction(members=[id_])
    pid = -1
    try:
        with owner.transaction():
            owner.send(TOPIC, b"parent")
            pid = os.fork()
    except tidelog.errors.ForkedError:
        print("the block of the child ends with an error", flush=True)
        os._exit(0)
    assert pid > 0
    assert os.waitpid(pid, 0)[1] == 0
"""


def test_a_forked_child_cannot_use_the_transactions_of_its_parent(cluster: LocalCluster, admin: tidelog.Admin) -> None:
    topic = make(admin, "forked-owner")
    with program(cluster, FORKED, TOPIC=topic) as process:
        out, errors = process.communicate(timeout=100)
    assert process.returncode == 0, errors
    assert out.splitlines() == ["ForkedError"] * 5 + ["the block of the child ends with an error"]
    assert sorted(values(cluster.bootstrap, topic)) == [b"member", b"owner", b"parent"]


TASK = """
import time
import tidelog

with tidelog.Producer(BOOTSTRAP) as member:
    member.join_transaction(OWNER, label=LABEL)
    for number in range(100):
        member.send(TOPIC, f"{LABEL} {number}")
    member.flush()
    if not DIES:
        member_id = member.leave_transaction()
    print(0 if DIES else member_id, flush=True)
    if DIES:
        time.sleep(100)
"""


def test_only_attempts_of_tasks_that_the_owner_names_commit(cluster: LocalCluster, admin: tidelog.Admin) -> None:
    topic = make(admin, "tasks", 3)

    def attempt(label: str, *, dies: bool) -> int:
        with program(cluster, TASK, TOPIC=topic, OWNER=topic, LABEL=label, DIES=dies) as process:
            assert process.stdout is not None
            return int(process.stdout.readline())  # then it is killed

    with tidelog.Producer(cluster.bootstrap, transactional_id=topic) as owner:
        owner.init_transactions()
        attempt("task 1, killed", dies=True)
        members = [attempt("task 1, again", dies=False), attempt("task 2", dies=False)]
        attempt("task 2, twice", dies=False)
        owner.begin_transaction()
        assert len(admin.describe_transaction(topic).members) == 4
        assert values(cluster.bootstrap, topic) == []
        assert owner.commit_transaction(members=members, token=b"job 1")
        wanted = sorted(f"{label} {number}".encode() for label in ("task 1, again", "task 2") for number in range(100))
        until(lambda: sorted(values(cluster.bootstrap, topic)) == wanted, "what the named members wrote")
        assert len(values(cluster.bootstrap, topic, UNCOMMITTED)) == 400


def test_an_operator_lists_describes_and_aborts_on_a_terminal(cluster: LocalCluster, admin: tidelog.Admin) -> None:
    topic = make(admin, "operated")
    with tidelog.Producer(cluster.bootstrap, transactional_id=topic) as producer:
        producer.init_transactions()
        producer.begin_transaction()
        producer.send(topic, b"x").result(30)

        def document(*arguments: str) -> Any:
            named = ("--bootstrap", cluster.bootstrap, "--output", "json")
            return commands.run("transactions", *arguments, *named).document["transactions"]

        (listed,) = [row for row in document("list", "--state", "Ongoing") if row["transactional_id"] == topic]
        (described,) = document("describe", topic)
        assert described["producer_id"] == listed["producer_id"]
        assert described["partitions"] == [{"topic": topic, "partition": 0}]
        assert answer_abort(cluster, topic, "n") == 1
        assert document("describe", topic)[0]["state"] == "Ongoing"
        assert answer_abort(cluster, topic, "y") == 0
        assert values(cluster.bootstrap, topic) == []
        with pytest.raises(tidelog.errors.TransactionAbortableError):
            producer.commit_transaction()
        producer.abort_transaction()
        with producer.transaction():
            producer.send(topic, b"next")
    until(lambda: values(cluster.bootstrap, topic) == [b"next"], "the owner goes on")


def answer_abort(cluster: LocalCluster, transactional_id: str, answer: str) -> int:
    """The exit code of `tidelog transactions abort` on a terminal whose user types this."""
    keyboard, terminal = pty.openpty()
    command = [sys.executable, "-m", "tidelog", "transactions", "abort", transactional_id]
    with subprocess.Popen(
        [*command, "--bootstrap", cluster.bootstrap],
        stdin=terminal,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as process:
        os.close(terminal)
        os.write(keyboard, f"{answer}\n".encode())
        said, _ = process.communicate(timeout=60)
        os.close(keyboard)
    assert f"abort the open transaction of {transactional_id}?" in said
    return process.returncode


class Transfers:
    """Transfers between two partitions, each in a transaction of its own, until `stop`; it notes what it does."""

    def __init__(self, bootstrap: str, topic: str) -> None:
        self.history: list[dict[str, Any]] = []
        self.committed = 0
        self.failure: BaseException | None = None
        self._bootstrap = bootstrap
        self._topic = topic
        self._is_stopping = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def stop(self) -> None:
        self._is_stopping.set()
        self._thread.join(120)
        assert not self._thread.is_alive()
        if self.failure is not None:
            raise self.failure

    def _run(self) -> None:
        try:
            with tidelog.Producer(self._bootstrap, transactional_id=self._topic) as producer:
                number = 0
                while not self._is_stopping.is_set():
                    self._transfer(producer, f"t{number}")
                    number += 1
        except BaseException as error:
            self.failure = error

    def _transfer(self, producer: tidelog.Producer, name: str) -> None:
        self.history.append({"event": "txn-begin", "txn": name, "owner": self._topic})
        outcome = "aborted"
        try:
            with producer.transaction():
                for number, partition in enumerate((0, 1, 0)):
                    place = f"{self._topic}-{partition}"
                    self.history.append({"event": "txn-send", "txn": name, "number": number, "place": place})
                    producer.send(self._topic, f"{name}/{number}", partition=partition)
            outcome = "committed"
            self.committed += 1
        except tidelog.errors.TransactionAbortableError:
            pass  # the block has aborted it
        self.history.append({"event": "txn-end", "txn": name, "outcome": outcome})


@pytest.mark.requirement("a:X3-36", "a:T-19", "b:EX-38")
def test_every_transaction_is_whole_while_its_coordinators_are_killed(harmed: LocalCluster) -> None:
    with tidelog.Admin(harmed.bootstrap) as admin:
        topic = make(admin, "transfers", 2)
        transfers = Transfers(harmed.bootstrap, topic)
        try:
            for _ in range(ROUNDS):
                until(lambda: transfers.failure or transfers.committed, "the first transaction")
                killed = admin.describe_transaction(topic).coordinator
                before = transfers.committed
                harmed.kill(killed)
                until(
                    lambda limit=before + AFTER_KILL: transfers.failure or transfers.committed >= limit,  # type: ignore[misc]
                    "transactions with the next coordinator",
                )
                harmed.start(killed)
        finally:
            transfers.stop()
    checker = TransactionChecker()
    for event in [*transfers.history, *seen(harmed.bootstrap, topic)]:
        checker.feed(event)
    verdict = checker.verdict()
    assert verdict.anomalies == []
    assert verdict.acknowledged == verdict.read >= 3 * ROUNDS * AFTER_KILL


def seen(bootstrap: str, topic: str) -> Iterator[dict[str, Any]]:
    """What a reader of committed data gets of the whole topic."""
    with tidelog.Consumer(bootstrap, isolation="read_committed") as consumer:
        places = consumer.partitions_for(topic)
        consumer.assign(places)
        consumer.seek_to_beginning()
        ends = until(lambda: _stable_ends(bootstrap, consumer, places), "no transaction is open")
        while any((consumer.position(place) or 0) < ends[place] for place in places):
            for record in consumer.poll(1):
                name, _, number = (record.value or b"").decode().partition("/")
                place = f"{record.topic}-{record.partition}"
                rows = [[record.offset, name, int(number)]]
                yield {"event": "saw", "reader": "r", "place": place, "records": rows}
    for partition in range(len(places)):
        yield {"event": "saw-all", "place": f"{topic}-{partition}"}


def _stable_ends(
    bootstrap: str, consumer: tidelog.Consumer, places: list[tidelog.TopicPartition]
) -> dict[tidelog.TopicPartition, int]:
    """The ends, once all markers are written."""
    with tidelog.Consumer(bootstrap) as plain:
        ends = plain.end_offsets(*places)
    return ends if consumer.end_offsets(*places) == ends else {}
