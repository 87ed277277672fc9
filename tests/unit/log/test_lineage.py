"""The lineage of a log: the history of its leader and the removed deletes, stored in time, kept after a crash."""

from functools import partial
from typing import Any

import pytest
from support.logs.node_logs import Host, SimSite, log_id, pass_time, put, records_of, replicate_all
from support.logs.single_log import SMALL, Lab, batch, open_log, stamped
from test_housekeeping import COMPACT, create

from tidelog.log.batch import ControlKind, Record, encode, encode_control, read_header
from tidelog.log.epochs import EpochHistory
from tidelog.log.lineage import Lineage
from tidelog.log.log import Log
from tidelog.log.stored_state import LINEAGE
from tidelog.model.ids import Offset
from tidelog.world.simulated import Loss, SimNode

LEADER = Lineage(Offset(30), 5, ((1, 0), (2, 40), (3, 60), (4, 60), (5, 90)))


def pushed(log: Log, base: int, epoch: int) -> None:
    log.append_replicated(stamped(batch(1), base_offset=base, leader_epoch=epoch))


async def follow(node: SimNode) -> Log:
    log = await open_log(node, SMALL)
    await log.allow_gaps()
    await log.take_over_lineage(LEADER)
    return log


# Epochs


@pytest.mark.case("T6")
async def test_a_copy_has_the_epochs_that_compaction_erased(node: SimNode) -> None:
    log = await follow(node)
    pushed(log, 10, 1)
    assert list(log.epochs) == [(1, 0)]
    pushed(log, 75, 4)
    assert list(log.epochs) == [(1, 0), (2, 40), (3, 60), (4, 60)]
    pushed(log, 120, 5)
    assert list(log.epochs) == list(LEADER.entries)


def test_a_crash_before_the_first_checkpoint_loses_no_epoch(lab: Lab) -> None:
    async def main(node: SimNode) -> None:
        log = await follow(node)
        pushed(log, 10, 1)
        pushed(log, 120, 5)
        await log.flush()

    async def after(node: SimNode) -> None:
        log = await open_log(node, SMALL)
        assert log.end_offset == 121
        assert list(log.epochs) == list(LEADER.entries)
        assert log.lineage == LEADER

    lab.run(main)
    lab.crash(Loss.ALL)
    lab.run(after)


def test_a_former_leaders_history_ends_where_this_log_was_led(lab: Lab) -> None:
    async def main(node: SimNode) -> None:
        log = await follow(node)
        pushed(log, 10, 1)
        pushed(log, 50, 2)
        log.assign_epoch(7)
        log.append(batch(60), leader_epoch=7)
        await log.flush()

    async def after(node: SimNode) -> None:
        log = await open_log(node, SMALL)
        assert log.end_offset == 111
        assert list(log.epochs) == [(1, 0), (2, 40), (7, 51)]

    lab.run(main)
    lab.crash(Loss.ALL)
    lab.run(after)


def test_a_guessed_history_is_completed_by_the_leaders_history(lab: Lab) -> None:
    async def main(node: SimNode) -> None:
        log = await open_log(node, SMALL)
        await log.allow_gaps()
        pushed(log, 10, 1)
        pushed(log, 70, 4)
        assert list(log.epochs) == [(1, 10), (4, 70)], "an older leader has sent no history"
        await log.take_over_lineage(LEADER)
        assert list(log.epochs) == [(1, 0), (2, 40), (3, 60), (4, 60)]

    async def after(node: SimNode) -> None:
        log = await open_log(node, SMALL)
        assert list(log.epochs) == [(1, 0), (2, 40), (3, 60), (4, 60)]

    lab.run(main)
    lab.crash(Loss.ALL)
    lab.run(after)


def test_the_lineage_of_a_former_leader_is_void_for_the_next_one(lab: Lab) -> None:
    async def main(node: SimNode) -> None:
        log = await follow(node)
        pushed(log, 10, 1)
        await log.forget_leader()
        pushed(log, 80, 6)
        assert list(log.epochs) == [(1, 0), (6, 80)]
        await log.flush()

    async def after(node: SimNode) -> None:
        log = await open_log(node, SMALL)
        assert list(log.epochs) == [(1, 0), (6, 80)]
        assert log.lineage == Lineage(Offset(30))

    lab.run(main)
    lab.crash(Loss.ALL)
    lab.run(after)


def test_histories_that_contradict_each_other_are_not_merged() -> None:
    history = EpochHistory([(1, 0), (3, 40)])
    assert not history.learn([(1, 0), (2, 50)], log_start=0, log_end=100)
    assert list(history) == [(1, 0), (3, 40)]


def test_learn_ignores_entries_at_or_past_the_log_end() -> None:
    history = EpochHistory([(3, 40)])
    assert history.learn(LEADER.entries, log_start=20, log_end=60)
    assert list(history) == [(1, 20), (2, 40), (3, 40)]


# Deletes


async def delete_one(log: Log) -> None:
    """A key that is written and deleted, at offset 1, in a sealed segment."""
    for value in (b"a", None):
        log.append(encode([Record(0, log.clock.now_ms(), b"gone", value, ())]), leader_epoch=0)
    await put(log, {}, 30)
    log.roll()


async def values_of_gone(log: Log) -> list[bytes | None]:
    return [record.value for record in await records_of(log) if record.key == b"gone"]


def test_a_tombstone_stays_as_long_as_a_replica_needs_it(sim: SimSite) -> None:
    async def main(host: Host) -> None:
        logs = await host.open()
        bound = 1
        clean_one = partial(logs.housekeeping.clean_one, deletes_bound_of=lambda _: Offset(bound))
        log = await create(logs)
        await delete_one(log)
        replicate_all(logs)
        assert await clean_one() is not None
        pass_time(sim, 2 * COMPACT.delete_retention_ms)
        assert await clean_one() is None, "no delete may go, so there is nothing to clean"
        assert await values_of_gone(log) == [None]
        assert log.lineage.deletes_end == 0
        bound = 2
        assert await clean_one() is not None
        assert await values_of_gone(log) == []
        assert log.lineage.deletes_end == 2
        assert await clean_one() is None

    async def after(host: Host) -> None:
        logs = await host.open(COMPACT)
        assert logs.all()[0].lineage.deletes_end == 2

    sim.run(main)
    sim.lose_power()
    sim.run(after)


async def test_a_replica_that_joins_before_a_tombstone_goes_keeps_it(host: Host, sim: SimSite) -> None:
    logs = await host.open()
    asked = []

    def bound_of(_: object) -> Offset:
        asked.append(1)
        return Offset(2 if len(asked) < 3 else 0)

    log = await create(logs)
    await delete_one(log)
    replicate_all(logs)
    assert await logs.housekeeping.clean_one() is not None
    pass_time(sim, 2 * COMPACT.delete_retention_ms)
    asked.append(1)
    assert await logs.housekeeping.clean_one(deletes_bound_of=bound_of) is None
    assert len(asked) > 2, "asked for the plan, and again before the swap"
    assert await values_of_gone(log) == [None]
    assert log.lineage.deletes_end == 0


async def test_the_marker_of_a_transaction_stays_as_long_as_a_replica_needs_it(host: Host, sim: SimSite) -> None:
    logs = await host.open()
    log = await create(logs)
    producer: dict[str, Any] = {"producer_id": 7, "producer_epoch": 0}
    aborted = [Record(0, 1, b"k0", b"aborted", ())]
    log.append(encode(aborted, base_sequence=0, is_transactional=True, **producer), leader_epoch=0)
    end = encode_control(ControlKind.ABORT, coordinator_epoch=0, timestamp=1, **producer)
    log.append(end, leader_epoch=0, is_coordinator=True)
    # The last batch of a producer always stays, so append a later one.
    log.append(encode([Record(0, 1, b"k1", b"later", ())], base_sequence=1, **producer), leader_epoch=0)
    await put(log, {}, 30)
    log.roll()
    replicate_all(logs)
    for _ in range(3):
        while await logs.housekeeping.clean_one(deletes_bound_of=lambda _: Offset(1)) is not None:
            pass
        pass_time(sim, 2 * COMPACT.delete_retention_ms)
        await put(log, {}, 30)
        log.roll()
        replicate_all(logs)
    assert await control_offsets(log) == [1]
    assert log.lineage.deletes_end == 0
    while await logs.housekeeping.clean_one() is not None:
        pass
    assert await control_offsets(log) == []
    assert log.lineage.deletes_end == 2


async def control_offsets(log: Log) -> list[int]:
    found: list[int] = []
    offset = log.start_offset
    while offset < log.end_offset:
        piece = await log.read(offset, bytes_max=1 << 20)
        position = 0
        while position < len(piece.data):
            header = read_header(piece.data, position)
            if header.is_control and header.count:
                found.append(int(header.base_offset))
            position += header.size
        offset = piece.next_offset
    return found


def test_a_log_without_a_stored_lineage_may_lack_any_sealed_delete(sim: SimSite) -> None:
    async def main(host: Host) -> None:
        logs = await host.open()
        log = await create(logs)
        await delete_one(log)
        await put(log, {}, 3)
        await log.checkpoint()
        await log.store.commit({log.prefix + LINEAGE: None})
        await logs.close()

    async def after(host: Host) -> None:
        log = (await host.open(COMPACT)).all()[0]
        assert log.lineage == Lineage(log.segments.active.base_offset)
        assert log.store.get(log.prefix + LINEAGE) is not None

    sim.run(main)
    sim.run(after)


def test_a_log_that_becomes_compacted_has_every_delete(lab: Lab) -> None:
    async def main(node: SimNode) -> None:
        log = await open_log(node, SMALL)
        for _ in range(40):
            log.append(batch(1), leader_epoch=0)
        await log.allow_gaps()
        await log.close()

    async def after(node: SimNode) -> None:
        log = await open_log(node, SMALL)
        assert log.gaps
        assert log.lineage == Lineage()

    lab.run(main)
    lab.crash(Loss.ALL)
    lab.run(after)


async def test_a_move_overtaken_by_a_cleaning_revives_no_deleted_key(host: Host, sim: SimSite) -> None:
    logs = await host.open()
    log = await create(logs)
    await put(log, {}, 1)
    log.append(encode([Record(0, log.clock.now_ms(), b"gone", b"value", ())]), leader_epoch=0)
    for _ in range(40):  # more than one piece
        data = encode([Record(0, log.clock.now_ms(), b"large", b"x" * 300, ())])
        log.append(data, leader_epoch=0)
    log.append(encode([Record(0, log.clock.now_ms(), b"gone", None, ())]), leader_epoch=0)
    await put(log, {}, 30)
    log.roll()
    replicate_all(logs)
    home = logs.directory_of(log_id(1))
    target = next(one for one in logs.directories if one is not home)
    assert target.directory_id is not None
    move = logs.move(log_id(1), target.directory_id)
    assert await move._copy_piece()
    assert 2 <= move.copied_end < 42, "it has the value, and not the tombstone"
    assert await logs.housekeeping.clean_one() is not None
    pass_time(sim, 2 * COMPACT.delete_retention_ms)
    assert await logs.housekeeping.clean_one() is not None
    assert await values_of_gone(log) == []
    moved = await move.finish()
    assert await values_of_gone(moved) == []
    assert moved.lineage.deletes_end == log.lineage.deletes_end > 0
