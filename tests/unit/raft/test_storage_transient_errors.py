"""Errors that may pass while a member opens its storage: nothing counts as lost, nothing is set aside."""

import errno

import pytest
from support.raft.storage import Parts, SimHost, store_some

from tidelog.model.errors import StorageError, WorkFailedError
from tidelog.raft.storage import METADATA_LOG_PATH
from tidelog.world.simulated import Loss


async def check_whole(parts: Parts) -> None:
    storage, boot = await parts.opened()
    assert len(boot.entries) == 20
    assert boot.recovering_until is None
    assert not any("lost" in note or "damaged" in note for note in storage.notes)
    await storage.close()


@pytest.mark.parametrize("name", ["EMFILE", "EIO", "EACCES", "ENOMEM"])
def test_a_storage_that_cannot_be_read_for_a_moment_is_opened_whole(name: str) -> None:
    host = SimHost()
    with host.world:
        host.run(store_some)
        host.machine.lose_power(Loss.ALL)
        path = f"{METADATA_LOG_PATH}/{0:020d}.log"
        host.machine.disk().fail("open", number=getattr(errno, name), times=3, path=path)
        host.run(check_whole)


@pytest.mark.parametrize("job", ["scan_log", "read_file"])
def test_a_storage_whose_helpers_die_for_a_moment_is_opened_whole(job: str) -> None:
    host = SimHost()
    with host.world:
        host.run(store_some)
        host.machine.lose_power(Loss.ALL)

        async def look(parts: Parts) -> None:
            parts.work.deaths[job] = 10  # type: ignore[attr-defined]
            await check_whole(parts)

        host.run(look)


def test_a_storage_that_cannot_be_read_for_long_refuses_to_start_and_is_whole_later() -> None:
    host = SimHost()
    with host.world:
        host.run(store_some)
        host.machine.lose_power(Loss.ALL)
        path = f"{METADATA_LOG_PATH}/{0:020d}.log"
        host.machine.disk().fail("open", number=errno.EIO, times=1000, path=path)
        with pytest.raises((StorageError, WorkFailedError)):
            host.run(check_whole)
        host.machine.disk().heal()
        host.run(check_whole)
