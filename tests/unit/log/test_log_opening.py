"""Opening logs while something fails that may pass: they are retried for as long as it takes, and lose nothing."""

import asyncio
import errno
import logging
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest
from log_world import SMALL, read_all
from logs_world import Host, SimSite, create, log_id, write

from tidelog.log.logs import Logs, LogsConfig
from tidelog.log.opening import REPORT_INTERVAL_S, RETRY_MAX_S, proves_damage
from tidelog.model.errors import (
    CorruptBatchError,
    CorruptStateError,
    DamagedLogError,
    DiskFullError,
    StorageError,
    TidelogError,
    UnsupportedMagicError,
    WorkFailedError,
)
from tidelog.world.simulated import Loss, SimWorld

COMPACTED = replace(SMALL, cleanup_compact=True, cleanup_delete=False, min_cleanable_dirty_ratio=0.0)
MAY_PASS = ("EMFILE", "ENFILE", "ENOMEM", "EACCES", "EPERM", "EIO", "EROFS", "EINTR", "ENOSPC", "ESTALE", "ENOENT")


@pytest.fixture
def sim() -> Iterator[SimSite]:
    with SimWorld(11) as world:
        yield SimSite(world, directories=1)


async def fill(host: Host) -> None:
    logs = await host.open()
    for topic in (1, 2):
        await write(await create(logs, topic), 20)


def segment_path(sim: SimSite, topic: int) -> str:
    async def find(host: Host) -> str:
        logs = await host.open()
        log = logs.get(log_id(topic))
        assert log is not None
        return log.segments.active_path()

    return sim.run(find)


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(600):
        while not condition():  # noqa: ASYNC110 - a condition, with a deadline
            await asyncio.sleep(0.01)


async def check_whole(logs: Logs) -> None:
    log = await logs.wait_open(log_id(1))
    assert log is not None
    assert log.damaged is None
    assert len(await read_all(log)) == 20
    assert logs.failures == {}
    assert log_id(1) not in logs.open_retries


@pytest.mark.parametrize(
    ("error", "is_proof"),
    [
        (WorkFailedError("a helper died"), False),
        (StorageError("open: EMFILE", number=errno.EMFILE), False),
        (StorageError("the state store has failed"), False),
        (DiskFullError("no room"), False),
        (CorruptBatchError("a CRC"), True),
        (CorruptStateError("a CRC of the store"), True),
        (UnsupportedMagicError("magic 7"), True),
        (DamagedLogError("ends too early", path="x", good_end=3), True),
    ],
)
def test_only_bytes_that_were_read_and_are_wrong_prove_damage(error: TidelogError, is_proof: bool) -> None:
    assert proves_damage(error) is is_proof


@pytest.mark.parametrize("operation", ["open", "list", "exists", "size", "read"])
@pytest.mark.parametrize("name", MAY_PASS)
def test_a_log_whose_opening_fails_for_a_while_is_opened_whole(sim: SimSite, name: str, operation: str) -> None:
    sim.run(fill)
    path = segment_path(sim, 1)
    sim.lose_power(Loss.ALL)
    where = path.rpartition("/")[0] if operation in ("list", "exists") else path

    async def look(host: Host) -> None:
        sim.machine.disk("disk-0").fail(operation, number=getattr(errno, name), times=7, path=where)
        logs = await host.open(wait=False)
        other = await logs.wait_open(log_id(2))
        assert other is not None
        assert len(await read_all(other)) == 20
        await logs.wait_open(log_id(1))
        sim.machine.disk("disk-0").heal()
        await check_whole(logs)

    sim.run(look)


def test_a_log_whose_state_cannot_be_read_for_a_while_is_opened_whole(sim: SimSite) -> None:
    sim.run(fill)
    sim.lose_power(Loss.ALL)

    async def look(host: Host) -> None:
        logs = await host.open(wait=False)
        sim.machine.store("disk-0").fail("get", times=5)
        await check_whole(logs)

    sim.run(look)


@pytest.mark.parametrize("deaths", [1, 3, 40])
def test_a_log_whose_helper_dies_while_it_is_read_is_opened_whole(sim: SimSite, deaths: int) -> None:
    sim.run(fill)
    sim.lose_power(Loss.ALL)

    async def look(host: Host) -> None:
        node = sim.machine.node
        assert node is not None
        node.work.deaths["scan_log"] = deaths
        logs = await host.open(wait=False)
        assert logs.is_recovering(log_id(1))
        await check_whole(logs)
        assert (await logs.wait_open(log_id(2))) is not None

    sim.run(look)


def test_retries_and_their_lines_in_the_log_have_a_bounded_rate(sim: SimSite, caplog: pytest.LogCaptureFixture) -> None:
    sim.run(fill)
    path = segment_path(sim, 1)
    sim.lose_power(Loss.ALL)

    async def look(host: Host) -> None:
        sim.machine.disk("disk-0").fail("open", number=errno.EIO, times=100_000, path=path)
        logs = await host.open(wait=False)
        await until(lambda: log_id(1) in logs.open_retries)
        await asyncio.sleep(1000)
        retry = logs.open_retries[log_id(1)]
        assert 1000 / RETRY_MAX_S <= retry.attempts <= 1000 / RETRY_MAX_S + 10
        assert retry.error.number == errno.EIO  # type: ignore[attr-defined]
        lines = [record for record in caplog.records if record.name == "tidelog.log.opening"]
        assert 2 <= len(lines) <= 1000 / REPORT_INTERVAL_S + 2
        assert logs.failures == {}
        sim.machine.disk("disk-0").heal()
        await check_whole(logs)

    with caplog.at_level(logging.ERROR, "tidelog.log.opening"):
        sim.run(look)


def test_a_log_that_backs_off_can_be_removed_and_closed(sim: SimSite) -> None:
    sim.run(fill)
    paths = [segment_path(sim, topic) for topic in (1, 2)]
    sim.lose_power(Loss.ALL)

    async def look(host: Host) -> None:
        for path in paths:
            sim.machine.disk("disk-0").fail("open", number=errno.EACCES, times=100_000, path=path)
        logs = await host.open(wait=False)
        await until(lambda: len(logs.open_retries) == 2)
        await logs.remove(log_id(1))
        assert logs.known() == [log_id(2)]
        assert not await logs.close(), "one was never open"

    async def again(host: Host) -> None:
        sim.machine.disk("disk-0").heal()
        logs = await host.open()
        assert [len(await read_all(log)) for log in logs.all()] == [20]

    sim.run(look)
    sim.run(again)


def test_a_log_that_is_being_opened_when_it_is_removed_is_not_retried(sim: SimSite) -> None:
    sim.run(fill)
    sim.lose_power(Loss.ALL)

    async def look(host: Host) -> None:
        node = sim.machine.node
        assert node is not None
        node.work.dying.add("scan_log")
        logs = await host.open(wait=False)
        await asyncio.sleep(0.001)
        async with asyncio.timeout(10):
            await logs.remove(log_id(1))
        assert logs.known() == [log_id(2)]

    sim.run(look)


def test_a_log_that_backs_off_fails_at_once_with_its_directory(sim: SimSite) -> None:
    sim.run(fill)
    path = segment_path(sim, 1)
    sim.lose_power(Loss.ALL)

    async def look(host: Host) -> None:
        sim.machine.disk("disk-0").fail("open", number=errno.EACCES, times=100_000, path=path)
        logs = await host.open(wait=False)
        assert await logs.wait_open(log_id(2)) is not None
        await until(lambda: log_id(1) in logs.open_retries and logs.open_retries[log_id(1)].attempts > 8)
        logs.directories[0].fail(StorageError("the device is gone"))
        async with asyncio.timeout(1):
            assert await logs.wait_open(log_id(1)) is None
        assert set(logs.failures) == {log_id(1), log_id(2)}

    sim.run(look)


def test_a_cleaning_that_fails_for_a_reason_that_may_pass_is_tried_again(sim: SimSite) -> None:
    async def main(host: Host) -> None:
        logs = await host.open(COMPACTED)
        log = await create(logs, 1, config=COMPACTED)
        for number in range(60):
            await write(log, key=b"%d" % (number % 3), value=b"%d" % number)
        log.roll()
        await logs.checkpoint()
        logs.note_high_watermark(log_id(1), log.end_offset)
        sim.machine.disk("disk-0").fail("open", number=errno.EMFILE, times=1)
        assert await logs.clean_one() is None
        assert logs.uncleanable == {}
        sim.machine.disk("disk-0").heal()
        assert await logs.clean_one() is not None

    sim.run(main)


@pytest.mark.parametrize("loss", [Loss.ALL, Loss.SOME])
@pytest.mark.parametrize("times", [1, 3])
def test_a_sync_that_fails_while_a_log_is_recovered_costs_no_acknowledged_record(
    sim: SimSite, times: int, loss: Loss
) -> None:
    """It lies past the recovery point and is durable; what the failed sync was about is written again."""

    async def unmarked(host: Host) -> None:
        logs = await host.open(logs_config=LogsConfig(checkpoint_interval_ms=3_600_000))
        await write(await create(logs, 1), 20)
        log = logs.get(log_id(1))
        assert log is not None
        await write(log, 5, wait=False)

    async def look(host: Host) -> None:
        sim.machine.disk("disk-0").fail("sync", number=errno.EIO, times=times)
        logs = await host.open()
        log = logs.get(log_id(1))
        assert log is not None
        assert log.damaged is None
        assert len(await read_all(log)) == log.end_offset == 25
        assert host.failed == []

    async def again(host: Host) -> None:
        logs = await host.open()
        log = logs.get(log_id(1))
        assert log is not None
        assert log.end_offset == 25, "what recovery said to be durable is"

    sim.run(unmarked)
    sim.run(look)
    sim.lose_power(loss)
    sim.run(again)


def test_a_failed_sync_that_cannot_be_stored_takes_the_directory_offline(sim: SimSite) -> None:
    sim.run(fill)

    async def look(host: Host) -> None:
        sim.machine.disk("disk-0").fail("sync", number=errno.EIO)
        logs = await host.open(wait=False)
        sim.machine.store("disk-0").fill()
        assert await logs.wait_open(log_id(1)) is None
        assert len(host.failed) == 1

    sim.run(look)
