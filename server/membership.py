"""A broker's membership in the cluster: its copy of the metadata, its registration, its heartbeats.

    open the copy --> prepare_registration (the directories that work) --> register, fenced --> heartbeats --> unfenced

It is a part of its own because it needs no logs: tests of the metadata run brokers that consist of it alone.
"""

from __future__ import annotations

import asyncio

from tidelog.metadata import configs
from tidelog.metadata.broker_lifecycle import BrokerLifecycle, with_clean_stop
from tidelog.metadata.brokers import Register
from tidelog.metadata.tail import MetadataTail
from tidelog.model.errors import DuplicateBrokerError
from tidelog.model.ids import DirectoryId
from tidelog.model.uuids import random_uuid
from tidelog.server.role_config import BrokerRoleConfig
from tidelog.server.world import NodeWorld

TAIL_DIRECTORY = "metadata"
DUPLICATE_CHECK_S = 0.5
DUPLICATE_GRACE_S = 4.0


class BrokerMembership:
    """Created by `open`; then `prepare_registration`; `tail.run` and `run` are tasks; `close` ends it."""

    agent: BrokerLifecycle

    def __init__(self, world: NodeWorld, config: BrokerRoleConfig, tail: MetadataTail) -> None:
        self.tail = tail
        self._world = world
        self._config = config

    @classmethod
    async def open(cls, world: NodeWorld, config: BrokerRoleConfig) -> BrokerMembership:
        tail = MetadataTail(
            disk=world.metadata.disk,
            path=TAIL_DIRECTORY,
            transport=world.to_controllers,
            sources=world.controllers,
            work=world.metadata_work,
            random=world.random,
            snapshot_bytes=config.metadata_snapshot_bytes,
        )
        await tail.open()
        return cls(world, config, tail)

    def prepare_registration(self, directories: tuple[DirectoryId, ...]) -> None:
        """Prepares the registration. `directories` are the log directories that work: the controller does not count on
        any other."""
        world, config = self._world, self._config
        registration = Register(
            cluster_id=world.cluster_id,
            broker=world.node,
            incarnation=random_uuid(world.random),
            endpoints=config.endpoints,
            rack=config.rack,
            directories=directories,
            features=config.features,
        )
        self.agent = BrokerLifecycle(
            with_clean_stop(registration, world.metadata.store),
            world.to_controllers,
            self.tail,
            world.controllers,
            config.lifecycle,
            world.random,
        )

    async def run(self) -> None:
        """Registers and sends heartbeats until it is cancelled. Raises the error that rejects the registration."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self.agent.run())
            group.create_task(self._check_for_duplicate())

    async def _check_for_duplicate(self) -> None:
        """Raises `DuplicateBrokerError` if another process is registered under our id: our registration would wait
        forever.

        After a crash our own last incarnation looks the same until its session ends, so this waits for two sessions.
        Only a current copy of the metadata counts: while no controller answers, nobody can fence the last incarnation.
        """
        loop = asyncio.get_running_loop()
        since_s: float | None = None
        while True:
            await asyncio.sleep(DUPLICATE_CHECK_S)
            image = self.tail.image
            session_ms = configs.cluster_int(image, "broker.session.timeout.ms")
            registered = image.brokers.get(self._world.node)
            stale_ms = self.tail.stale_ms()
            if (
                registered is None
                or registered.fenced
                or registered.incarnation == self.agent.registration.incarnation
                or self.agent.broker_epoch is not None
                or stale_ms is None
                or stale_ms > session_ms
            ):
                since_s = None
                continue
            since_s = since_s or loop.time()
            if loop.time() - since_s > 2 * session_ms / 1000 + DUPLICATE_GRACE_S:
                addresses = ", ".join(f"{host}:{port}" for _, _, host, port in registered.endpoints)
                raise DuplicateBrokerError(
                    f"another process runs as broker {self._world.node}, at {addresses}: give each node its own node.id"
                )

    def close(self) -> None:
        self.tail.close()
