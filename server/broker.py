"""A node as a broker: its copy of the metadata, its logs, its replicas, its coordinators of groups and
transactions, its services.

    opened --start--> started --> registered (fenced) --> ready --shut_down--> draining --close--> closed

`open` reads the copy of the metadata and finds the logs, which open in the background; each is led or followed once it
is open. The broker registers when all logs are open or known as damaged, at the latest after
`registration_delay_ms`. What it knows then to be damaged or missing is part of the registration; after a clean stop
that is everything. Logs that take longer to recover are reported one by one and not elected before
(`replication.startup_report`, `replication.recovery_reports`).

`start`, `shut_down` and `close` are idempotent. `close` is safe in every state.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable
from contextlib import AsyncExitStack

from tidelog.coordinator.coordinator import GroupCoordinator
from tidelog.coordinator.transactions.coordinator import TransactionCoordinator
from tidelog.log.config import LogConfig
from tidelog.log.logs import Logs
from tidelog.metadata import configs
from tidelog.metadata.broker_lifecycle import BrokerLifecycle
from tidelog.metadata.controller_node import ControllerNode
from tidelog.metadata.image import ClusterImage
from tidelog.metadata.tail import MetadataTail
from tidelog.model.ids import PartitionId
from tidelog.replication.marker_receiver import LeaderMarkers
from tidelog.replication.replicas import Replicas
from tidelog.replication.startup_report import add_losses, close_logs, working_directories
from tidelog.server.broker_metrics import broker_samples
from tidelog.server.membership import BrokerMembership
from tidelog.server.metrics import Sample
from tidelog.server.role_config import BrokerRoleConfig
from tidelog.server.services import NodeServices, broker_services
from tidelog.server.tasks import Tasks, close_all
from tidelog.server.transport import addresses_of
from tidelog.server.world import NodeWorld
from tidelog.services.data import DataServices
from tidelog.services.groups import GroupService
from tidelog.services.services import BrokerServices

LOGGER = logging.getLogger(__name__)


class Broker:
    """Created by `open`."""

    def __init__(
        self,
        world: NodeWorld,
        config: BrokerRoleConfig,
        membership: BrokerMembership,
        logs: Logs,
        controller: ControllerNode | None,
    ) -> None:
        self.config = config
        self.membership = membership
        self.logs = logs
        self.replicas = Replicas(
            me=world.node,
            transport=world.to_brokers,
            logs=logs,
            tail=membership.tail,
            agent=membership.agent,
            config=config.replicas,
            random=world.random,
            on_crash=world.on_failure,
            admission_work=world.admission_work,
        )
        self.coordinator = GroupCoordinator(self.replicas, membership.tail, world.clock)
        self.transactions = TransactionCoordinator(
            self.replicas,
            membership.tail,
            world.clock,
            world.to_brokers,
            LeaderMarkers(self.replicas.get, lambda: self.replicas.image, self.coordinator),
        )
        self.services: NodeServices = broker_services(
            world,
            config.services,
            membership=membership,
            replicas=self.replicas,
            coordinator=self.coordinator,
            transactions=self.transactions,
            controller=controller,
        )
        self._world = world
        self._tasks = Tasks(world.on_failure)
        self._clean_epoch: int | None = None
        self._is_started = False
        self._is_closed = False

    @classmethod
    async def open(
        cls, world: NodeWorld, config: BrokerRoleConfig, *, controller: ControllerNode | None = None
    ) -> Broker:
        """`controller`: that of a combined node. The caller starts the transports after this. An open that fails or is
        cancelled leaves nothing open."""
        async with AsyncExitStack() as opened:
            membership = await BrokerMembership.open(world, config)
            opened.callback(membership.close)
            tail = membership.tail
            logs = await Logs.open(
                world.log_directory_ids(),
                work=world.work,
                clock=world.clock,
                config_of=lambda log_id: log_config_of(tail.image, log_id),
                config=config.logs,
                on_crash=world.on_failure,
            )
            opened.push_async_callback(logs.close)
            membership.prepare_registration(working_directories(logs))
            tail.subscribe(addresses_of(world.to_controllers, config.controller_listeners))
            tail.subscribe(addresses_of(world.to_brokers, [config.inter_broker_listener]))
            broker = cls(world, config, membership, logs, controller)
            opened.pop_all()
            return broker

    @property
    def tail(self) -> MetadataTail:
        return self.membership.tail

    @property
    def agent(self) -> BrokerLifecycle:
        return self.membership.agent

    @property
    def api(self) -> BrokerServices:
        services = self.services.services
        assert isinstance(services, BrokerServices), "those of a broker"
        return services

    @property
    def data(self) -> DataServices:
        return self.api.data

    @property
    def groups(self) -> GroupService:
        return self.api.groups

    async def start(self) -> None:
        if self._is_started or self._is_closed:
            return
        self._is_started = True
        self.coordinator.start()
        self.transactions.start()
        await self.replicas.start()
        self._tasks.spawn(self.tail.run(), "metadata")
        self._tasks.spawn(self._register(), "registration")

    async def _register(self) -> None:
        await add_losses(self.agent, self.logs, grace_ms=self.config.registration_delay_ms)
        await self.membership.run()

    @property
    def is_ready(self) -> bool:
        return not self.agent.is_fenced

    def stop_coordinators(self) -> None:
        """Ends all shards, before the API servers close: their clients find the next coordinators."""
        self.coordinator.stop()
        self.transactions.stop()

    def waits_for(self) -> str:
        """Returns why a broker that starts is not ready yet."""
        if self.tail.unhealthy_reason is not None:
            return self.tail.unhealthy_reason
        if self.agent.broker_epoch is None:
            return "the broker is not registered yet: no active controller has answered"
        return "the broker is registered and still fenced: it reads the metadata"

    def unhealthy_reason(self, grace_ms: int) -> str | None:
        """Returns why a broker that was ready does not serve now; None if it does."""
        if not self.is_ready:
            return "the broker was fenced by the controller"
        stale_ms = self.tail.stale_ms()
        if self.agent.client.leader is None and (stale_ms is None or stale_ms > grace_ms):
            age = "" if stale_ms is None else f" for {stale_ms / 1000:.1f} s"
            return f"no active controller has answered{age}: {self.tail.unhealthy_reason or 'its metadata may be old'}"
        return None

    async def shut_down(self) -> None:
        """Moves leaderships away, for at most `controlled_shutdown_ms`. The broker serves until `close`."""
        timeout_ms = self.config.controlled_shutdown_ms
        if self._clean_epoch is not None or self._is_closed:
            return
        self._clean_epoch = self.agent.broker_epoch
        if self._clean_epoch is None or timeout_ms == 0:
            return
        try:
            async with asyncio.timeout(timeout_ms / 1000):
                self._clean_epoch = await self.agent.shut_down()
        except TimeoutError:
            LOGGER.warning("controlled shutdown: leaderships have not moved in %d ms; stopping anyway", timeout_ms)

    async def close(self) -> None:
        """Ends every part, also after an error of one, and raises the first error. After `shut_down` the clean stop is
        stored if all logs were closed cleanly."""
        if self._is_closed:
            return
        self._is_closed = True
        await close_all(
            self._tasks.cancel,
            self.services.close,
            self.transactions.close,
            self.coordinator.close,
            self.replicas.close,
            self._close_storage,
        )

    async def _close_storage(self) -> None:
        self.membership.close()
        await close_logs(self.logs, self._world.metadata.store, self._clean_epoch)

    def samples(self) -> Iterable[Sample]:
        return broker_samples(self.membership, self.logs, self.replicas, self.api)


def log_config_of(image: ClusterImage, log_id: PartitionId) -> LogConfig:
    topic = image.topics.get(log_id.topic_id)
    return LogConfig() if topic is None else configs.log_config(image, topic.name)
