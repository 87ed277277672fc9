"""A node as a controller: its Raft storage, the controller itself, its services.

    opened --start--> started --> ready (a leader is known) --close--> closed

`start` and `close` are idempotent. `close` is safe in every state.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AsyncExitStack
from dataclasses import replace

from tidelog.metadata.controller import Controller
from tidelog.metadata.controller_node import ControllerNode
from tidelog.model.ids import NodeId
from tidelog.raft.directory_identity import FORMAT_KEY
from tidelog.raft.membership import Membership
from tidelog.raft.storage import RaftStorage, default_log_config
from tidelog.server.controller_metrics import controller_samples
from tidelog.server.initial_configs import InitialConfigs
from tidelog.server.known_controllers import METHOD, encode_rows
from tidelog.server.metrics import Sample
from tidelog.server.role_config import ControllerRoleConfig
from tidelog.server.services import NodeServices, controller_services
from tidelog.server.tasks import Tasks, close_all
from tidelog.server.world import NodeWorld


class ControllerRole:
    """Created by `open`."""

    def __init__(
        self,
        world: NodeWorld,
        config: ControllerRoleConfig,
        storage: RaftStorage,
        node: ControllerNode,
        boot_membership: Membership,
    ) -> None:
        self.node = node
        self.boot_membership = boot_membership
        """As stored at the start."""
        self.services: NodeServices | None = None
        """None on a combined node: the broker's services include the controller."""
        if not config.is_combined:
            self.services = controller_services(world, config.services, node)
        self._config = config
        self._storage = storage
        self._initial_configs = InitialConfigs(node, config.initial_configs, config.initial_configs_source)
        self._tasks = Tasks(world.on_failure)
        self._is_started = False
        self._is_closed = False
        world.to_controllers.serve(METHOD, self._controllers)

    @classmethod
    async def open(cls, world: NodeWorld, config: ControllerRoleConfig) -> ControllerRole:
        """Reads the Raft state; raises `UnformattedDirectoryError` where there is none. The caller starts the
        transports after this. An open that fails or is cancelled leaves nothing open."""
        storage = _storage(world, config)
        async with AsyncExitStack() as opened:
            opened.push_async_callback(storage.close)
            boot = await storage.open()
            node = ControllerNode(
                storage,
                boot,
                world.to_controllers,
                Controller(world.cluster_id),
                config.controller,
                world.random,
                clock=world.clock,
                work=world.metadata_work,
                on_failure=world.on_failure,
            )
            role = cls(world, config, storage, node, boot.membership)
            opened.pop_all()
            return role

    async def _controllers(self, _caller: NodeId, _request: bytes) -> bytes:
        return encode_rows(self.membership.voters)

    @property
    def membership(self) -> Membership:
        return self.node.driver.core.log.membership

    async def start(self) -> None:
        if self._is_started or self._is_closed:
            return
        self._is_started = True
        await self.node.start()
        self._tasks.spawn(self._initial_configs.run(), "initial-configs")

    async def close(self, *, is_orderly: bool = True) -> None:
        """`is_orderly`: a leader first transfers leadership to another voter, for at most `resign_timeout_ms`."""
        if self._is_closed:
            return
        self._is_closed = True
        can_resign = is_orderly and self._is_started and len(self.membership.voters) > 1
        timeout_ms = self._config.resign_timeout_ms if can_resign else 0
        await close_all(self._tasks.cancel, lambda: self.node.close(step_down_ms=timeout_ms), self._storage.close)

    def waits_for(self) -> str | None:
        """Returns why there is no leader; None if there is one."""
        return None if self.node.driver.core.leader is not None else self.node.driver.explain_missing_leader()

    def unhealthy_reason(self, grace_ms: int) -> str | None:
        """Returns why this controller does not work: it has known no leader for longer than `grace_ms`."""
        driver = self.node.driver
        return driver.explain_missing_leader() if driver.describe().without_leader_ms > grace_ms else None

    def samples(self) -> Iterable[Sample]:
        return controller_samples(self.node)


async def format_if_new(
    world: NodeWorld, config: ControllerRoleConfig, *, directory: bytes, membership: Membership
) -> None:
    """Formats the metadata directory of a simulated controller. A real one is formatted by `tidelog storage format`."""
    if world.metadata.store.get(FORMAT_KEY) is None:
        await _storage(world, config).format(directory=directory, membership=membership)


def _storage(world: NodeWorld, config: ControllerRoleConfig) -> RaftStorage:
    log_config = default_log_config()
    if config.segment_bytes is not None:
        log_config = replace(log_config, segment_bytes=config.segment_bytes)
    return RaftStorage(
        disk=world.metadata.disk,
        store=world.metadata.store,
        work=world.metadata_work,
        clock=world.clock,
        cluster_id=world.cluster_id,
        node=world.node,
        log_config=log_config,
        on_failure=world.on_failure,
    )
