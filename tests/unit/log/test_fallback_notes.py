"""A sync fails together with the state store: what the page cache shows must not be trusted by the next process."""

from __future__ import annotations

import pytest
from support.logs.single_log import LOG_ID, ONE_SEGMENT, PATH, Lab, batch, fill, open_log

from tidelog.log import fallback_notes
from tidelog.log import stored_state as stored
from tidelog.model.errors import StorageError, UnsyncedError
from tidelog.world.simulated import Loss, SimNode

DURABLE = 5
ALWAYS = 1_000


def fail_sync_and_store(lab: Lab) -> None:
    """The log has `DURABLE` records on the device, and one in the page cache that never gets there."""

    async def main(node: SimNode) -> None:
        log = await open_log(node, ONE_SEGMENT)
        fill(log, DURABLE)
        await log.flush()
        log.append(batch(1), leader_epoch=1)
        break_device(lab)
        with pytest.raises(StorageError):
            await log.flush()
        assert log.damage_state.suspect_task is not None
        await log.damage_state.suspect_task
        assert fallback_notes.read(node.disk(), PATH) == {stored.SUSPECT: DURABLE}

    lab.run(main)
    lab.kill()


def break_device(lab: Lab) -> None:
    lab.machine.disk().fail("sync")
    lab.machine.store().fail("commit", times=ALWAYS)


def heal(lab: Lab) -> None:
    lab.machine.disk().heal()
    lab.machine.store().heal()


def check_acknowledged(lab: Lab) -> None:
    """What is acknowledged from now on survives a loss of power."""
    heal(lab)

    async def write(node: SimNode) -> int:
        log = await open_log(node, ONE_SEGMENT)
        assert log.end_offset == DURABLE
        assert fallback_notes.read(node.disk(), PATH) == {}
        fill(log, 3)
        await log.flush()
        return log.end_offset

    async def end_of(node: SimNode) -> int:
        log = await open_log(node, ONE_SEGMENT)
        assert log.damaged is None
        return log.end_offset

    end = lab.run(write)
    lab.crash(Loss.ALL)
    assert lab.run(end_of) == end == DURABLE + 3


def test_a_failed_sync_that_the_store_cannot_record_is_noted_in_the_directory(lab: Lab) -> None:
    fail_sync_and_store(lab)
    check_acknowledged(lab)


def test_a_note_that_comes_back_truncates_nothing(lab: Lab) -> None:
    """Its name is on the device. The sync that should have removed it from there has failed."""

    async def sync_note(node: SimNode) -> None:
        await node.disk().sync_many([], [PATH])

    async def fail_to_open(node: SimNode) -> None:
        lab.machine.disk().fail("sync")
        with pytest.raises(StorageError):
            await open_log(node, ONE_SEGMENT)
        assert fallback_notes.read(node.disk(), PATH) == {}

    fail_sync_and_store(lab)
    heal(lab)
    lab.run(sync_note)
    lab.kill()
    lab.run(fail_to_open)
    lab.kill()
    check_acknowledged(lab)


def test_a_recovery_whose_sync_and_store_fail_is_noted_too(lab: Lab) -> None:
    async def write(node: SimNode) -> None:
        log = await open_log(node, ONE_SEGMENT)
        fill(log, 1)
        await log.flush()
        fill(log, DURABLE - 1)

    async def fail_to_open(node: SimNode) -> None:
        break_device(lab)
        with pytest.raises(UnsyncedError):
            await open_log(node, ONE_SEGMENT)
        assert fallback_notes.read(node.disk(), PATH).keys() == {stored.UNSYNCED}

    lab.run(write)
    lab.kill()
    lab.run(fail_to_open)
    lab.kill()
    check_acknowledged(lab)


def test_a_note_that_cannot_be_decoded_says_nothing(lab: Lab) -> None:
    """Its content is gone with the power, and so is what the page cache showed."""

    async def write(node: SimNode) -> None:
        log = await open_log(node, ONE_SEGMENT)
        fill(log, DURABLE)
        await log.flush()
        fallback_notes.leave(node.disk(), PATH, stored.SUSPECT, 2)
        name = f"{PATH}/suspect{fallback_notes.SUFFIX}"
        node.disk().open(name).truncate(1)

    lab.run(write)
    lab.kill()
    check_acknowledged(lab)


def test_of_a_note_and_a_stored_field_the_lower_offset_counts(lab: Lab) -> None:
    async def store_another(node: SimNode) -> None:
        fallback_notes.leave(node.disk(), PATH, stored.SUSPECT, DURABLE + 1)
        field = stored.key_prefix(LOG_ID) + stored.SUSPECT
        await node.store().commit({field: stored.encode_number("suspect", DURABLE)})

    fail_sync_and_store(lab)
    heal(lab)
    lab.run(store_another)
    lab.kill()
    check_acknowledged(lab)
