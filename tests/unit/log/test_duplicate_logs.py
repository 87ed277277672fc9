"""A log in two directories of a node: it is opened when its owner has chosen one copy."""

import pytest
from support.logs.node_logs import Host, Site, create, directory_id, log_id, write
from support.logs.single_log import SMALL, read_all

from tidelog.log.directories import (
    directory_name,
)
from tidelog.log.stored_state import key_prefix
from tidelog.model.errors import StorageError


async def make_double(host: Host, name: str) -> None:
    """A log with a record in the second directory, and an empty one of the same name in the first."""
    logs = await host.open()
    log = await logs.create(log_id(3, 1), label="orders", config=SMALL, directory=directory_id(1))
    assert log.path == name
    await write(log, value=b"kept")
    await logs.close()
    host.places[0][0].make_directory(name)


def test_a_log_in_two_directories_is_opened_only_after_the_owner_chooses(site: Site) -> None:
    name = directory_name(log_id(3, 1), "orders")

    async def main(host: Host) -> None:
        await make_double(host, name)

    async def undecided(host: Host) -> None:
        logs = await host.open()
        assert logs.known() == [log_id(3, 1)]
        assert await logs.wait_open(log_id(3, 1)) is None
        with pytest.raises(StorageError, match=r"has several copies.*move all but one away") as caught:
            await logs.keep(log_id(3, 1), directory_id(7))
        assert all(f"{disk.label}/{name}" in str(caught.value) for disk, _, _ in host.places)
        with pytest.raises(StorageError, match="has several copies"):
            await create(logs, 3, 1)
        other = await create(logs, 4)
        await write(other)
        assert await logs.close(), "the others are used, and closed"

    async def decided(host: Host) -> None:
        logs = await host.open()
        await logs.keep(log_id(3, 1), directory_id(1))
        log = await logs.wait_open(log_id(3, 1))
        assert log is not None
        assert b"kept" in (await read_all(log))[0]
        assert host.places[0][0].exists(f"{name}.0.aside"), "nothing is thrown away"
        assert not host.places[0][0].exists(name)
        await logs.close()

    async def later(host: Host) -> None:
        logs = await host.open()
        assert not logs.duplicates
        assert logs.known() == [log_id(3, 1), log_id(4)]
        assert logs.get(log_id(3, 1)) is not None
        await logs.close()

    site.run(main)
    site.run(undecided)
    site.run(decided)
    site.run(later)


def test_setting_a_copy_aside_deletes_its_stored_state(site: Site) -> None:
    """Otherwise a log created there again would look damaged. After a crash the next start deletes the state."""
    name = directory_name(log_id(3, 1), "orders")

    async def main(host: Host) -> None:
        await make_double(host, name)

    async def crashed(host: Host) -> None:
        disk = host.places[1][0]
        disk.rename(name, f"{name}.0.aside")
        assert host.places[1][1].keys(key_prefix(log_id(3, 1)))

    async def later(host: Host) -> None:
        logs = await host.open()
        assert logs.known() == [log_id(3, 1)]
        assert not host.places[1][1].keys(key_prefix(log_id(3, 1)))
        assert host.places[1][0].exists(f"{name}.0.aside")
        await logs.close()

    site.run(main)
    site.run(crashed)
    site.run(later)


async def test_removing_a_log_removes_all_copies(site: Site, host: Host) -> None:
    name = directory_name(log_id(3, 1), "orders")
    await make_double(host, name)
    logs = await host.open()
    await logs.remove(log_id(3, 1))
    assert logs.known() == []
    assert not any(disk.exists(name) for disk, _, _ in host.places)
    await logs.close()


async def test_a_log_under_two_names_in_one_directory_is_left_to_the_operator(site: Site, host: Host) -> None:
    for label in ("orders", "commands"):
        host.places[0][0].make_directory(directory_name(log_id(3, 1), label))
    logs = await host.open()
    with pytest.raises(StorageError, match="has several copies"):
        await logs.keep(log_id(3, 1), directory_id(0))
    assert log_id(3, 1) in logs.duplicates
    await logs.close()
