"""`tidelog groups`, `tidelog consume --group` and `tidelog.Admin` against a real cluster of three nodes."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import subprocess
import threading
from pathlib import Path

import pytest
from support.async_tests import asyncio_test
from support.clusters.commands import Shell
from support.clusters.waiting import until

import tidelog
from tidelog.client.record import TopicPartition
from tidelog.model.errors import ErrorCode, TidelogError
from tidelog.testing import LocalCluster

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(240)]


class Lines:
    """What a process has printed so far."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process
        self.lines: list[str] = []
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.append(line.rstrip("\n"))

    def end(self, number: int) -> str:
        """Send a signal and wait; what it said to stderr."""
        with self.process as process:
            assert process.stderr is not None
            process.send_signal(number)
            process.wait(30)
            self._thread.join(10)
            return process.stderr.read()


def fill(shell: Shell, topic: str, count: int, *, partitions: int = 4, first: int = 0) -> None:
    shell.run("topics", "create", topic, "--partitions", str(partitions), "--if-not-exists")
    lines = "".join(f"key{number}:{number}\n" for number in range(first, first + count))
    shell.run("produce", topic, "--key-separator", ":", stdin=lines)


@pytest.mark.requirement("a:N-04", "b:P-05", "b:P-04", "b:P-02", "b:P-03")
def test_members_share_a_topic_commit_what_they_printed_and_leave_by_ctrl_c(shell: Shell, admin: tidelog.Admin) -> None:
    fill(shell, "shared", 200)
    (topic,) = shell.json("topics", "describe", "shared")["topics"]
    assert [row["partition"] for row in topic["partitions"]] == [0, 1, 2, 3]
    assert all(row["leader"] in row["isr"] and row["replicas"] for row in topic["partitions"])
    first = shell.run("consume", "shared", "--group", "s", "--from-beginning", "--max-messages", "50").split()
    assert len(first) == len(set(first)) == 50
    one = Lines(shell.start("consume", "shared", "--group", "s", "--from-beginning"))
    two = Lines(shell.start("consume", "shared", "--group", "s", "--from-beginning"))
    try:
        until(lambda: len(one.lines) + len(two.lines) >= 150, "the rest of the records")

        def is_shared() -> bool:
            found = admin.describe_group("s")
            return found.state == "stable" and [len(one.assignment) for one in found.members] == [2, 2]

        until(is_shared, "two members with two partitions each")
        fill(shell, "shared", 40, first=200)
        until(lambda: len(one.lines) + len(two.lines) >= 190, "the new records")
        (group,) = shell.json("groups", "describe", "s")["groups"]
        assert {member["client_id"] for member in group["members"]} == {"tidelog-consume"}
        assert {member["host"] for member in group["members"]} <= {"127.0.0.1", "::1"}
        said = one.end(signal.SIGINT)
        assert one.process.returncode == 130
        assert said == f"tidelog: {len(one.lines)} records read\n"

        # It has left: the other one has all, without waiting for a session.
        def has_all() -> bool:
            return [len(one.assignment) for one in admin.describe_group("s").members] == [4]

        until(has_all, "one member with all partitions", timeout_s=10)
    finally:
        two.end(signal.SIGINT)
    # Each record was printed once by the group, and all of it is committed.
    assert sorted(map(int, [*first, *one.lines, *two.lines])) == list(range(240))
    (group,) = shell.json("groups", "describe", "s")["groups"]
    assert (group["state"], group["lag"], group["members"]) == ("empty", 0, [])
    assert shell.run("consume", "shared", "--group", "s", "--timeout-ms", "500") == ""
    assert shell.run("consume", "shared", "--group", "s", "--exit-at-end") == ""


def test_a_member_of_a_group_is_refused_what_the_group_decides(shell: Shell) -> None:
    for wrong in (["--partition", "0"], ["--timestamp", "0"], ["--offset", "5"]):
        shell.run("consume", "shared", "--group", "s", *wrong, code=2)
        assert "does not go with --group" in shell.err
    shell.run("consume", "nowhere", "--group", "s", code=1)
    assert "there is no topic 'nowhere'; create it with" in shell.err


@pytest.mark.requirement("a:N-06", "a:G-34", "a:X3-34")
def test_a_group_is_listed_moved_refused_while_active_and_deleted(
    shell: Shell, admin: tidelog.Admin, tmp_path: Path
) -> None:
    def lag() -> int:
        return sum(row.lag or 0 for row in admin.group_lag("billing"))

    fill(shell, "orders", 60, partitions=2)
    shell.run("consume", "orders", "--group", "billing", "--from-beginning", "--max-messages", "60")
    listed = {one["group"]: one for one in shell.json("groups", "list")["groups"]}
    assert listed["billing"]["state"] == "empty"
    assert "billing" in shell.run("groups", "list", "--state", "empty")
    assert "billing" not in shell.run("groups", "list", "--type", "classic")
    (group,) = shell.json("groups", "describe", "billing")["groups"]
    assert (group["lag"], sum(row["committed"] for row in group["partitions"])) == (0, 60)
    # A plan, which changes nothing; then the same, done.
    plan = shell.json("groups", "reset-offsets", "billing", "--topic", "orders", "--to-earliest")
    assert plan["executed"] is False
    assert {row["after"] for row in plan["partitions"]} == {0}
    assert "nothing was changed; --execute makes the changes" in shell.err
    assert lag() == 0
    kept = shell.run("groups", "reset-offsets", "billing", "--all-topics", "--to-current", "--export")
    file = tmp_path / "kept.csv"
    file.write_text(kept)
    shell.run("groups", "reset-offsets", "billing", "--topic", "orders", "--to-earliest", "--execute")
    assert lag() == 60
    table = shell.run("groups", "describe", "billing")
    assert "simple" not in table
    assert "lag 60" in table.splitlines()[0]
    shell.run("groups", "reset-offsets", "billing", "--all-topics", "--shift-by", "5", "--execute")
    assert lag() == 50
    shell.run("groups", "reset-offsets", "billing", "--all-topics", "--by-duration", "1h", "--execute")
    assert lag() == 60
    future = "2100-01-01T00:00:00.000"
    shell.run("groups", "reset-offsets", "billing", "--all-topics", "--to-datetime", future, "--execute")
    assert lag() == 0
    shell.run("groups", "reset-offsets", "billing", "--topic", "orders:1", "--to-offset", "0", "--execute")
    shell.run("groups", "reset-offsets", "billing", "--from-file", str(file), "--execute")
    assert shell.run("groups", "reset-offsets", "billing", "--all-topics", "--to-current", "--export") == kept
    # While it has a member its offsets are its member's.
    member = Lines(shell.start("consume", "orders", "--group", "billing"))
    try:
        until(lambda: admin.describe_group("billing").is_active, "a member")
        shell.run("groups", "reset-offsets", "billing", "--topic", "orders", "--to-latest", "--execute", code=1)
        assert re.search(r"has active members \(1, on (127\.0\.0\.1|::1)\): stop them first", shell.err)
        shell.run("groups", "delete", "billing", "--yes", code=1)
        assert "NON_EMPTY_GROUP" in shell.err
        shell.run("groups", "delete-offsets", "billing", "--topic", "orders", code=1)
        assert "GROUP_SUBSCRIBED_TO_TOPIC" in shell.err
        removed = shell.json("groups", "remove-members", "billing", "--all")
        assert [one["error"] for one in removed["members"]] == [None]
    finally:
        member.end(signal.SIGINT)
    gone = shell.json("groups", "delete-offsets", "billing", "--topic", "orders:1")
    assert gone["partitions"] == [{"name": "orders-1", "error": None}]
    assert shell.json("groups", "delete", "billing")["groups"] == [{"name": "billing", "error": None}]
    missing = shell.json("groups", "delete", "billing", code=1)
    assert missing["groups"][0]["error"]["name"] == "GROUP_ID_NOT_FOUND"
    shell.run("groups", "describe", "billing", code=1)
    assert shell.err.count("\n") == 1


@pytest.mark.requirement("a:G-01", "a:G-04", "a:G-06", "a:G-14", "a:G-31", "a:G-32", "a:G-40", "b:I-08")
def test_admin_of_a_plain_program(cluster: LocalCluster, shell: Shell) -> None:
    with tidelog.Admin(cluster.bootstrap) as admin:
        admin.create_topic("admin", partitions=2, replication_factor=3)
        with pytest.raises(TidelogError) as there:
            admin.create_topic("admin")
        assert there.value.code is ErrorCode.TOPIC_ALREADY_EXISTS
        with tidelog.Producer(cluster.bootstrap) as producer:
            for number in range(10):
                producer.send("admin", value=b"x", partition=number % 2)
        admin.reset_group_offsets("g", to=2, topics="admin")
        assert [row.lag for row in admin.group_lag("g")] == [3, 3]
        assert {one.group for one in admin.list_groups(types=["simple"])} >= {"g"}
        assert len(admin.describe_cluster().brokers) == 3
        sizes = {broker: sum(row.bytes for one in dirs for row in one.replicas)
                 for broker, dirs in admin.describe_log_dirs(topics=["admin"]).items()}  # fmt: skip
        assert sorted(sizes) == [1, 2, 3]
        assert all(sizes.values())
        assert [row.lag for row in admin.group_lag("g")] == [3, 3]
        ends = {place: row.offset for place, row in admin.list_offsets("admin").items()}
        assert ends == {row.partition: row.end for row in admin.group_lag("g")}
        assert admin.delete_records({TopicPartition("admin", 0): 2}).succeeded == {TopicPartition("admin", 0): 2}
        assert admin.list_offsets([("admin", 0)], at="earliest")[TopicPartition("admin", 0)].offset == 2
        admin.delete_group("g")
        admin.delete_topic("admin")
    shell.run("topics", "describe", "admin", code=1)


@pytest.mark.requirement("a:G-01", "a:G-14")
@asyncio_test
async def test_admin_on_an_event_loop_asks_many_things_at_once(cluster: LocalCluster) -> None:
    async with tidelog.aio.Admin(cluster.bootstrap) as admin:
        await admin.create_topics([tidelog.NewTopic(f"aio-{number}", 1) for number in range(5)])
        found = await asyncio.gather(
            *(admin.describe_topic(f"aio-{number}") for number in range(5)), admin.describe_cluster()
        )
        assert len(found) == 6
        late = asyncio.ensure_future(admin.list_groups())
        late.cancel()
        with pytest.raises(asyncio.CancelledError):
            await late
        await admin.delete_topics([f"aio-{number}" for number in range(5)])
        with pytest.raises(TidelogError) as unknown:
            await admin.describe_group("nobody")
        assert unknown.value.code is ErrorCode.GROUP_ID_NOT_FOUND


@pytest.mark.requirement("a:X3-9")
def test_histories_of_a_group_whose_members_are_killed_and_replaced_are_good(shell: Shell, tmp_path: Path) -> None:
    shell.run("topics", "create", "checked", "--partitions", "3")
    files = [str(tmp_path / f"{name}.jsonl") for name in ("writer", "one", "two", "three")]
    writer = shell.start("verify", "produce", "checked", "--history", files[0], "--records", "1500", "--rate", "600")
    follow = ("verify", "consume", "checked", "--group", "v", "--follow", "--history")
    one, two = shell.start(*follow, files[1]), shell.start(*follow, files[2])

    def has_polled(path: str) -> bool:
        return os.path.exists(path) and '"poll"' in Path(path).read_text(encoding="utf-8")

    try:
        until(lambda: has_polled(files[1]) or has_polled(files[2]), "something was read")
        one.kill()
        one.wait(10)
        assert writer.wait(60) == 0
        last = shell.json("verify", "consume", "checked", "--group", "v", "--history", files[3])
        assert last["foreign"] == 0
    finally:
        two.send_signal(signal.SIGINT)
        two.wait(30)
        for process in (writer, one, two):
            for stream in (process.stdout, process.stderr):
                assert stream is not None
                stream.close()
    shell.run("verify", "consume", "checked", "--group", "v", "--history", files[3])
    verdict = shell.json("verify", "check", *[path for path in files if os.path.exists(path)])
    assert verdict["is_good"]
    assert verdict["acknowledged"] == 1500
    assert 1500 <= verdict["read"] <= 2000  # a restart costs some records that are read twice, and not many
    assert verdict["is_complete"]
    assert verdict["counts"]["lost-commit"] == 0
