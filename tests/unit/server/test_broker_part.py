"""A node as a broker, without its network: what it says of its directories, and of how it stopped."""

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from random import Random

import lmdb
import pytest

from tidelog.log.directories import DIRECTORY_ID
from tidelog.metadata.broker_side import CLEAN_STOP_KEY
from tidelog.model.errors import StorageError
from tidelog.server.broker_part import BrokerPart
from tidelog.server.config import NodeConfig, load
from tidelog.server.directories import NodeDirectories
from tidelog.server.storage import STATE, format_node, standalone
from tidelog.server.transport import BrokerTransport, NodeTransport
from tidelog.world.real.clock import SystemClock
from tidelog.world.real.work import InlineWork

CLUSTER = "4L6g3nShT-eMCtK--X86sw"


@pytest.fixture
def config(tmp_path: Path) -> NodeConfig:
    path = tmp_path / "node.toml"
    path.write_text('"node.id" = 1\n"log.dirs" = ["a", "b"]\n', encoding="utf-8")
    config = load(str(path), {})
    asyncio.run(format_node(config, CLUSTER, standalone(config), ignore_formatted=False, random=Random(7)))
    return config


def live(config: NodeConfig, job: Callable[[BrokerPart, NodeDirectories], Awaitable[None]]) -> None:
    """One life of the part; `job` closes it."""

    async def main() -> None:
        directories = NodeDirectories(config)
        transport = NodeTransport(config.node, directories.cluster_id, config.own.address)
        work = InlineWork()
        part = await BrokerPart.open(
            config,
            directories,
            transport,
            lambda: (),
            start_work=work,
            work=work,
            between_brokers=BrokerTransport(transport, directories.cluster_id, config.own.address),
            admission_work=work,
            clock=SystemClock(),
            random=Random(1),
        )
        try:
            await job(part, directories)
        finally:
            await transport.close()
            directories.close()

    asyncio.run(main())


def test_a_log_directory_whose_id_cannot_be_read_is_not_registered(config: NodeConfig, tmp_path: Path) -> None:
    async def whole(part: BrokerPart, directories: NodeDirectories) -> None:
        ids = tuple(one.meta.directory for one in directories.open)
        assert part.agent.registration.directories == ids
        await part.close()

    async def half(part: BrokerPart, directories: NodeDirectories) -> None:
        first, second = (one.meta.directory for one in directories.open)
        assert part.agent.registration.directories == (first,)
        broken = part.logs.directories[1]
        assert broken.failed is not None
        assert broken.directory_id == second, "it is known by its meta.properties"
        await part.close()

    live(config, whole)
    with lmdb.open(str(tmp_path / "b" / STATE), map_size=1 << 30) as store, store.begin(write=True) as transaction:
        value = bytearray(transaction.get(DIRECTORY_ID) or b"")
        value[-1] ^= 1
        transaction.put(DIRECTORY_ID, bytes(value))
    live(config, half)


@pytest.mark.parametrize("is_clean", [True, False])
def test_a_clean_stop_is_stored_only_if_no_directory_has_failed(config: NodeConfig, is_clean: bool) -> None:
    async def stop(part: BrokerPart, directories: NodeDirectories) -> None:
        part.agent.broker_epoch = 5
        await part.shut_down(0)
        if not is_clean:
            part.logs.directories[1].fail(StorageError("a test says so"))
        await part.close()
        assert (directories.metadata.store.get(CLEAN_STOP_KEY) is not None) == is_clean

    live(config, stop)
