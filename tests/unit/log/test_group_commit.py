"""Group commit over the real and the simulated disk: what a group covers, its cost, and failures."""

import asyncio
from collections.abc import Callable, Coroutine, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tidelog.log.group_commit import GroupCommit, SyncTicket
from tidelog.model.errors import StorageError
from tidelog.world.disk import Disk
from tidelog.world.real.disk import RealDisk
from tidelog.world.simulated import Latency, Loss, SimMachine, SimNode, SimWorld


class FileLog:
    """A minimal `Syncable`: one file, and futures for callers that wait for a durable size."""

    def __init__(self, disk: Disk, group_commit: GroupCommit, name: str) -> None:
        self.file = disk.open(name, create=True)
        self.group_commit = group_commit
        self.durable_end = 0
        self.groups = 0
        self.error: StorageError | None = None
        self._waiters: list[tuple[int, asyncio.Future[None]]] = []

    def append(self, data: bytes) -> "asyncio.Future[None]":
        self.file.append(data)
        self.group_commit.request(self)
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiters.append((self.file.size, waiter))
        return waiter

    def begin_sync(self) -> SyncTicket:
        return SyncTicket([self.file], [""] if self.durable_end == 0 else [], end=self.file.size)

    def end_sync(self, ticket: SyncTicket) -> None:
        self.groups += 1
        self.durable_end = ticket.end
        for end, waiter in self._waiters:
            if end <= self.durable_end and not waiter.done():
                waiter.set_result(None)
        self._waiters = [(end, waiter) for end, waiter in self._waiters if end > self.durable_end]

    def fail_sync(self, error: StorageError) -> None:
        assert self.error is None, "reported once"
        self.error = error
        for _, waiter in self._waiters:
            if not waiter.done():
                waiter.set_exception(error)


class Failures:
    """Counts the calls of `on_failure`."""

    def __init__(self) -> None:
        self.errors: list[StorageError] = []

    def __call__(self, error: StorageError) -> None:
        self.errors.append(error)


@dataclass
class Side:
    disk: Disk
    run: Callable[[Callable[[], Coroutine[Any, Any, Any]]], Any]


@pytest.fixture(params=["real", "simulated"])
def side(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Side]:
    if request.param == "real":
        disk = RealDisk(tmp_path)
        yield Side(disk, lambda main: asyncio.run(main()))
        disk.close()
    else:
        with SimWorld(seed=1) as world:
            node = world.machine("a").boot()
            yield Side(node.disk(), lambda main: world.run(node, lambda _: main()))


def must_not_fail(error: StorageError) -> None:
    raise AssertionError(f"no sync fails here: {error}")


def test_everything_requested_before_a_group_begins_is_covered_by_it(side: Side) -> None:
    async def main() -> None:
        commit = GroupCommit(side.disk, on_failure=must_not_fail)
        logs = [FileLog(side.disk, commit, str(number)) for number in range(30)]
        waiters = [log.append(b"abc") for log in logs for _ in range(3)]
        await asyncio.gather(*waiters)
        assert (commit.groups, commit.logs_synced, commit.files_synced) == (1, 30, 30)
        assert [log.durable_end for log in logs] == [9] * 30
        await commit.close()

    side.run(main)


def test_an_append_during_a_running_group_waits_for_the_next_one(side: Side) -> None:
    async def main() -> None:
        commit = GroupCommit(side.disk, on_failure=must_not_fail)
        log = FileLog(side.disk, commit, "log")
        first = log.append(b"abc")
        await asyncio.sleep(0)
        assert commit.group_began is not None, "the group runs"
        second = log.append(b"def")
        await first
        assert not second.done()
        assert log.durable_end == 3
        await second
        assert log.durable_end == 6
        assert commit.groups == 2
        await commit.close()

    side.run(main)


def test_64_waiting_appends_share_their_syncs(side: Side) -> None:
    rounds, waiting = 20, 64

    async def main() -> None:
        commit = GroupCommit(side.disk, on_failure=must_not_fail)
        logs = [FileLog(side.disk, commit, str(number)) for number in range(4)]

        async def produce(number: int) -> None:
            for _ in range(rounds):
                await logs[number % 4].append(b"x" * 100)

        async with asyncio.TaskGroup() as tasks:
            for number in range(waiting):
                tasks.create_task(produce(number))
        appends = rounds * waiting
        assert sum(log.durable_end for log in logs) == appends * 100
        assert commit.groups / appends <= 1 / 16
        await commit.close()

    side.run(main)


def test_there_is_no_task_while_nothing_is_dirty(side: Side) -> None:
    async def main() -> None:
        commit = GroupCommit(side.disk, on_failure=must_not_fail)
        log = FileLog(side.disk, commit, "log")
        assert len(asyncio.all_tasks()) == 1
        await log.append(b"abc")
        await asyncio.sleep(0)
        assert len(asyncio.all_tasks()) == 1
        assert commit.group_began is None
        await log.append(b"def")
        await commit.close()

    side.run(main)


def test_flush_waits_for_a_group_that_began_after_the_call(side: Side) -> None:
    async def main() -> None:
        commit = GroupCommit(side.disk, on_failure=must_not_fail)
        log = FileLog(side.disk, commit, "log")
        log.append(b"abc")
        await asyncio.sleep(0)
        log.file.append(b"def")
        await commit.flush(log)
        assert log.durable_end == 6
        await commit.close()

    side.run(main)


def test_a_released_log_is_in_no_group_any_more(side: Side) -> None:
    async def main() -> None:
        commit = GroupCommit(side.disk, on_failure=must_not_fail)
        log = FileLog(side.disk, commit, "log")
        log.append(b"abc")
        await asyncio.sleep(0)
        log.append(b"def")
        await commit.release(log)
        assert log.groups == 1
        log.file.close()
        await commit.close()
        assert log.groups == 1

    side.run(main)


def test_close_syncs_dirty_logs_and_rejects_requests(side: Side) -> None:
    async def main() -> None:
        commit = GroupCommit(side.disk, on_failure=must_not_fail)
        log = FileLog(side.disk, commit, "log")
        log.append(b"abc")
        await asyncio.sleep(0)
        log.append(b"def")
        closing = asyncio.ensure_future(commit.close())
        await asyncio.sleep(0)
        closing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await closing
        await commit.close()
        assert log.durable_end == 6
        with pytest.raises(AssertionError, match="closed"):
            commit.request(log)

    side.run(main)


# On the simulated disk only


@pytest.fixture
def machine() -> Iterator[SimMachine]:
    with SimWorld(seed=2) as world:
        yield world.machine("a")


def test_a_failed_sync_is_reported_to_all_and_never_retried(machine: SimMachine) -> None:
    device = machine.disk()

    async def main(node: SimNode) -> None:
        failures = Failures()
        commit = GroupCommit(node.disk(), on_failure=failures)
        running, both, waiting = (FileLog(node.disk(), commit, name) for name in ("running", "both", "waiting"))
        quiet = FileLog(node.disk(), commit, "quiet")
        await quiet.append(b"abc")
        device.fail("sync")
        waiters = [running.append(b"abc"), both.append(b"abc")]
        await asyncio.sleep(0)
        waiters += [both.append(b"def"), waiting.append(b"abc")]
        flush = asyncio.ensure_future(commit.flush(waiting))
        results = await asyncio.gather(*waiters, flush, return_exceptions=True)
        assert {str(result) for result in results} == {"sync running: Input/output error (EIO)"}
        assert [log.error is commit.failed for log in (running, both, waiting)] == [True] * 3
        assert (quiet.error, quiet.durable_end, running.durable_end) == (None, 3, 0)
        assert failures.errors == [commit.failed]
        syncs = device.syncs
        with pytest.raises(StorageError, match="EIO"):
            commit.request(quiet)
        with pytest.raises(StorageError, match="EIO"):
            await commit.flush(quiet)
        await commit.close()
        assert device.syncs == syncs

    machine.world.run(machine.boot(), main)


@pytest.mark.case("S4")
def test_a_failed_directory_sync_blocks_recording_completion(machine: SimMachine) -> None:
    async def main(node: SimNode) -> None:
        failures = Failures()
        commit = GroupCommit(node.disk(), on_failure=failures)
        log = FileLog(node.disk(), commit, "log")
        machine.disk().fail("sync", path="")
        with pytest.raises(StorageError, match="EIO"):
            await log.append(b"abc")
        assert log.durable_end == 0
        assert len(failures.errors) == 1

    machine.world.run(machine.boot(), main)


def test_a_log_whose_begin_sync_raises_fails_the_directory(machine: SimMachine) -> None:
    class BrokenLog(FileLog):
        def end_sync(self, ticket: SyncTicket) -> None:
            raise AssertionError("our own error")

    async def main(node: SimNode) -> None:
        failures = Failures()
        commit = GroupCommit(node.disk(), on_failure=failures)
        broken, log = BrokenLog(node.disk(), commit, "broken"), FileLog(node.disk(), commit, "log")
        results = await asyncio.gather(broken.append(b"abc"), log.append(b"abc"), return_exceptions=True)
        assert [type(result) for result in results] == [StorageError, StorageError]
        assert "our own error" in str(commit.failed)
        assert len(failures.errors) == 1

    world = machine.world
    world.run(machine.boot(), main)
    # Only the task has the error: the run must end with it.
    machine_loop = world.scheduler.loops[1]
    machine_loop.report_untaken_errors()
    assert [str(failure.error) for failure in world.scheduler.failures] == ["our own error"]
    world.scheduler.failures.clear()


def test_a_stalled_disk_shows_in_the_running_group_and_loses_nothing(machine: SimMachine) -> None:
    async def main(node: SimNode) -> None:
        commit = GroupCommit(node.disk(), on_failure=must_not_fail)
        log = FileLog(node.disk(), commit, "log")
        machine.disk().begin_stall()
        waiters = [log.append(b"abc")]
        for _ in range(10):
            await asyncio.sleep(1)
            waiters.append(log.append(b"abc"))
        assert commit.group_began is not None
        assert node.loop.time() - commit.group_began >= 10
        assert not any(waiter.done() for waiter in waiters)
        machine.disk().heal()
        await asyncio.gather(*waiters)
        assert commit.groups == 2
        await commit.close()

    machine.world.run(machine.boot(), main)


@pytest.mark.parametrize("loss", list(Loss))
def test_durable_records_survive_a_power_loss(machine: SimMachine, loss: Loss) -> None:
    """Producers run and the power fails at any time; acknowledged records survive, complete and in order."""
    world = machine.world
    machine.disk().sync_latency = Latency(0.001, 0.02)
    draw = world.random("test")
    for _ in range(30):
        machine.disk().wipe()
        node = machine.boot()
        commit = GroupCommit(node.disk(), on_failure=must_not_fail)
        logs = [FileLog(node.disk(), commit, name) for name in ("a", "b")]

        async def produce(log: FileLog) -> None:
            while True:
                await log.append(bytes([1 + log.file.size % 250]) * draw.randrange(1, 3000))
                await asyncio.sleep(draw.random() * 0.01)

        for log in logs:
            for _ in range(3):
                node.spawn(produce(log))
        world.run_for(draw.random() * 0.2)
        written = {log.file.path: machine.disk().raw(log.file.path) for log in logs}
        acknowledged = {log.file.path: log.durable_end for log in logs}
        machine.lose_power(loss)
        disk = machine.boot().disk()
        for path, end in acknowledged.items():
            if end:
                assert disk.open(path).read(0, end) == written[path][:end]
        machine.kill()
