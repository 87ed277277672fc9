"""A broker without its network: which directories it registers, and when it stores a clean stop."""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import lmdb
import pytest
from support.async_tests import inside
from support.brokers.cluster import CONTROLLERS, ReplicationCluster

from tidelog.log.directories import DIRECTORY_ID
from tidelog.log.logs import Logs
from tidelog.metadata.broker_lifecycle import CLEAN_STOP_KEY
from tidelog.metadata.controller_node import ControllerNode
from tidelog.model.errors import StorageError
from tidelog.model.ids import NodeId
from tidelog.raft.storage import RaftStorage
from tidelog.server.broker import Broker
from tidelog.server.config import NodeConfig, load
from tidelog.server.controller import ControllerRole
from tidelog.server.directories import NodeDirectories
from tidelog.server.membership import BrokerMembership
from tidelog.server.node import broker_role_config, controller_role_config
from tidelog.server.storage import STATE, format_node, standalone
from tidelog.server.transport import BrokerTransport, NodeTransport
from tidelog.server.world import NodeWorld
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


def run_broker(config: NodeConfig, job: Callable[[Broker, NodeDirectories], Awaitable[None]]) -> None:
    """Runs one incarnation; `job` closes it."""

    async def run(world: NodeWorld, directories: NodeDirectories) -> None:
        role = replace(broker_role_config(config), controlled_shutdown_ms=0)
        await job(await Broker.open(world, role), directories)

    in_world(config, run)


def in_world(config: NodeConfig, job: Callable[[NodeWorld, NodeDirectories], Awaitable[None]]) -> None:
    async def main() -> None:
        directories = NodeDirectories(config)
        transport = NodeTransport(config.node, directories.cluster_id, config.own.address)
        world = NodeWorld(
            node=config.node,
            cluster_id=directories.cluster_id,
            metadata=directories.metadata.as_world(),
            log_directories=directories.log_directories,
            controllers=lambda: (),
            to_controllers=transport,
            to_brokers=BrokerTransport(transport, directories.cluster_id, config.own.address),
            clock=SystemClock(),
            random=Random(1),
            work=InlineWork(),
            metadata_work=InlineWork(),
            on_failure=_raise,
        )
        try:
            await job(world, directories)
        finally:
            await transport.close()
            directories.close()

    asyncio.run(main())


def _raise(error: BaseException) -> None:
    raise error


def test_a_log_directory_whose_id_cannot_be_read_is_not_registered(config: NodeConfig, tmp_path: Path) -> None:
    async def whole(part: Broker, directories: NodeDirectories) -> None:
        ids = tuple(one.meta.directory for one in directories.open)
        assert part.agent.registration.directories == ids
        await part.close()

    async def half(part: Broker, directories: NodeDirectories) -> None:
        first, second = (one.meta.directory for one in directories.open)
        assert part.agent.registration.directories == (first,)
        broken = part.logs.directories[1]
        assert broken.failed is not None
        assert broken.directory_id == second, "it is known by its meta.properties"
        await part.close()

    run_broker(config, whole)
    with lmdb.open(str(tmp_path / "b" / STATE), map_size=1 << 30) as store, store.begin(write=True) as transaction:
        value = bytearray(transaction.get(DIRECTORY_ID) or b"")
        value[-1] ^= 1
        transaction.put(DIRECTORY_ID, bytes(value))
    run_broker(config, half)


@pytest.mark.parametrize("is_clean", [True, False])
def test_a_clean_stop_is_stored_only_if_no_directory_has_failed(config: NodeConfig, is_clean: bool) -> None:
    async def stop(part: Broker, directories: NodeDirectories) -> None:
        part.agent.broker_epoch = 5
        await part.shut_down()
        if not is_clean:
            part.logs.directories[1].fail(StorageError("a test says so"))
        await part.close()
        assert (directories.metadata.store.get(CLEAN_STOP_KEY) is not None) == is_clean

    run_broker(config, stop)


@inside(run_broker, "config")
async def test_a_broker_that_never_started_closes_and_every_step_of_its_end_may_be_repeated(
    broker: Broker, directories: NodeDirectories
) -> None:
    for _ in range(2):
        await broker.shut_down()
    for _ in range(2):
        await broker.close()
    await broker.start()
    assert not broker.is_ready
    assert directories.metadata.store.get(CLEAN_STOP_KEY) is None, "it was not registered"


class FailedOpen:
    """Raises an error in one step of an open, and records the parts that were closed."""

    def __init__(
        self, patch: pytest.MonkeyPatch, step: tuple[type, str], parts: dict[type, str], error: BaseException
    ) -> None:
        def fail(*_: object, **__: object) -> None:
            raise error

        self.closed: list[str] = []
        patch.setattr(*step, fail)
        for kind, method in parts.items():
            patch.setattr(kind, method, self._recorded(kind.__name__, getattr(kind, method)))

    def _recorded(self, name: str, close: Callable[..., Any]) -> Callable[..., Any]:
        def recorded(part: object) -> Any:
            self.closed.append(name)
            return close(part)

        return recorded


FAILED_OPENS: dict[str, tuple[Callable[..., Awaitable[object]], tuple[type, str], dict[type, str]]] = {
    "broker": (
        lambda world, config: Broker.open(world, broker_role_config(config)),
        (BrokerMembership, "prepare_registration"),
        {Logs: "close", BrokerMembership: "close"},
    ),
    "controller": (
        lambda world, config: ControllerRole.open(world, controller_role_config(config)),
        (ControllerNode, "__init__"),
        {RaftStorage: "close"},
    ),
}
"""How to open a role, the step that fails, and what was open by then, in the order of closing."""


@pytest.mark.parametrize("error", [StorageError("the state store cannot be read"), asyncio.CancelledError()])
@pytest.mark.parametrize("role", sorted(FAILED_OPENS))
def test_an_open_that_fails_or_is_cancelled_closes_what_it_has_opened(
    config: NodeConfig, monkeypatch: pytest.MonkeyPatch, role: str, error: BaseException
) -> None:
    open_role, step, parts = FAILED_OPENS[role]
    opened = FailedOpen(monkeypatch, step, parts, error)
    left: list[object] = []

    async def run(world: NodeWorld, _directories: NodeDirectories) -> None:
        with pytest.raises(type(error)):
            await open_role(world, config)
        await asyncio.sleep(0)
        left.extend(task for task in asyncio.all_tasks() if task is not asyncio.current_task())

    in_world(config, run)
    assert opened.closed == [kind.__name__ for kind in parts]
    assert left == []


def test_a_restarted_broker_waits_for_controllers_and_does_not_mistake_its_last_incarnation_for_a_twin() -> None:
    with ReplicationCluster(31, brokers=(11, 12, 13)) as cluster:
        for node in CONTROLLERS:
            cluster.kill(node)
        cluster.kill(NodeId(11))
        cluster.start_brokers(11, wait=False)
        cluster.world.run_for(120)
        assert cluster.failures == []
        cluster.start()
        cluster.until_live(11)
