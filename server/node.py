"""A node process: opens its world from a configuration, runs its roles and API servers, stops them.

    new --start--> starting --listeners are open--> waiting --unfenced, or a leader is known--> ready
                      |                                |                                          |
                      '---- error: raised              '--- stop, or a part fails: stopping ------+--> stopped

Start: directories are locked and checked, the roles are opened (`server.controller`, `server.broker`), then the
transports, the roles and the API servers start. A node is `ready` when its broker is unfenced, or its controller knows
a leader; it reports that to systemd, /healthz and the log. Until then it reports what it waits for.

Stop: the broker moves its leaderships, the API servers close, logs are synced and closed, the controller resigns. A
second signal ends the process at once, which is as safe as kill -9.

A part that fails (a metadata disk, an internal error) stops the node with an error. Everything acknowledged before is
durable, so a supervisor may restart it.
"""

from __future__ import annotations

import asyncio
import gc
import json
import logging
import os
import resource
from collections.abc import Coroutine, Iterable, Sequence
from dataclasses import replace
from random import Random, SystemRandom
from typing import Any

from tidelog import __version__
from tidelog.model.errors import TidelogError
from tidelog.model.ids import NodeId, TopicId
from tidelog.rpc.http.server import HttpServer, Page
from tidelog.server.api_servers import ApiServers
from tidelog.server.broker import Broker
from tidelog.server.config import NodeConfig
from tidelog.server.controller import ControllerRole
from tidelog.server.directories import NodeDirectories
from tidelog.server.kafka_settings import node_settings
from tidelog.server.known_controllers import KnownControllers
from tidelog.server.listeners import ListenerKind, listener_hints
from tidelog.server.metrics import CONTENT_TYPE, Gatherer, Sample, counter, gauge, page
from tidelog.server.notify import ServiceManager
from tidelog.server.ports import check_free
from tidelog.server.quorum_check import check_first_start
from tidelog.server.role_config import BrokerRoleConfig, ControllerRoleConfig, broker_config, controller_config
from tidelog.server.services import NodeServices
from tidelog.server.tasks import Tasks
from tidelog.server.transport import BrokerTransport, NodeTransport
from tidelog.server.watchdog import LoopWatchdog
from tidelog.server.work import StartingWork
from tidelog.server.world import NodeWorld
from tidelog.services.context import RequestContext
from tidelog.world.real.clock import SystemClock
from tidelog.world.real.work import ProcessWork

LOGGER = logging.getLogger(__name__)

READY_POLL_S = 0.02
STATUS_EVERY_S = 2.0
HEALTH_EVERY_S = 0.2
UNHEALTHY_AFTER_MS = 3_000
"""A node without a quorum leader reports itself as not ready after this time."""
ADMISSION_HELPERS = 2
"""Processes that decode produced batches for topics that require it; started at first use."""


class Node:
    """`run` starts the node and returns after it has stopped; `stop` requests that."""

    def __init__(self, config: NodeConfig, *, manager: ServiceManager | None = None) -> None:
        self.config = config
        self.state = "new"
        self.is_ready = False
        self.failure: BaseException | None = None
        self.http: HttpServer | None = None
        self.broker: Broker | None = None
        self.controller: ControllerRole | None = None
        self.api_servers: ApiServers | None = None
        self._manager = manager or ServiceManager()
        self._watchdog = LoopWatchdog(self._manager, warn_ms=config.number("loop.lag.warn.ms"))
        self._random: Random = SystemRandom()
        self._helpers = ProcessWork(config.number("num.recovery.threads.per.data.dir"))
        self._work = StartingWork(self._helpers)
        self._admission = ProcessWork(ADMISSION_HELPERS)
        self._stop = asyncio.Event()
        self._tasks = Tasks(self.fail)
        self._directories: NodeDirectories | None = None
        self._transports: list[NodeTransport] = []
        self._known: KnownControllers | None = None

    def topic_name(self, topic_id: TopicId) -> str | None:
        """Returns the name in this node's copy of the metadata."""
        topic = None if self.broker is None else self.broker.tail.image.topics.get(topic_id)
        return None if topic is None else topic.name

    # From start to stop.

    async def run(self) -> int:
        """Returns 0 after an orderly stop, 1 after a failure. Raises the error that prevented the start."""
        self.state = "starting"
        try:
            await self._start()
        except BaseException:
            await self._close(is_orderly=False)
            raise
        self.state = "waiting"
        self._tasks.spawn(self._watchdog.run(), "watchdog")
        self._tasks.spawn(self._become_ready(), "readiness")
        await self._stop.wait()
        self.state = "stopping"
        self.is_ready = False
        self._manager.stopping()
        if self.api_servers is not None:
            await self.api_servers.set_serving(False)
        await self._close(is_orderly=self.failure is None)
        self.state = "stopped"
        self._manager.close()
        if self.failure is not None:
            LOGGER.error("stopped after a failure: %s", self.failure)
            return 1
        LOGGER.info("stopped in order")
        return 0

    def stop(self) -> None:
        self._stop.set()

    def fail(self, error: BaseException) -> None:
        if self.failure is None and self.state != "stopping":
            self.failure = error
            LOGGER.error("this node stops: %s", error, exc_info=None if isinstance(error, TidelogError) else error)
        self._stop.set()

    async def _start(self) -> None:
        config = self.config
        _warn(config)
        world = self._open_world()
        if config.is_controller:
            self.controller = await ControllerRole.open(world, controller_role_config(config))
            await check_first_start(config, world.cluster_id, self.controller)
        if config.is_broker:
            controller = None if self.controller is None else self.controller.node
            self.broker = await Broker.open(world, broker_role_config(config), controller=controller)
        self.api_servers = ApiServers(config, self._services())
        await world.to_controllers.start()
        if self.controller is not None:
            await self.controller.start()
        if not config.is_controller or config.bootstrap:
            assert self._known is not None, "created with the world"
            self._tasks.spawn(self._known.run(), "controllers")
        if self.broker is not None:
            await self.broker.start()
        await self.api_servers.start()
        if config.http is not None:
            pages = {"/metrics": self._metrics_page, "/healthz": self._health_page}
            pages |= {"/readyz": self._health_page, "/livez": self._alive_page}
            self.http = HttpServer(config.http, pages, listener_hints(config.listeners, config.http))
            await self.http.start()
        self._work.begin_serving()
        LOGGER.info(
            "started: version=%s pid=%d cluster=%s %s",
            __version__,
            os.getpid(),
            world.cluster_id,
            " ".join(f"{listener.name.lower()}={listener.address}" for listener in config.listeners),
        )

    def _open_world(self) -> NodeWorld:
        """Locks the directories and creates the transports, which `_close` closes."""
        config = self.config
        self._directories = directories = NodeDirectories(config)
        opened = [each.address for each in config.listeners if each.kind is not ListenerKind.KAFKA or config.is_broker]
        for address in [*opened, config.http]:
            if address is not None:
                check_free(address)
        more = [listener.address for listener in config.between_nodes if listener is not config.own]
        to_controllers = NodeTransport(config.node, directories.cluster_id, config.own.address, more)
        self._transports.append(to_controllers)
        to_brokers = BrokerTransport(to_controllers, directories.cluster_id, config.between_brokers.address)
        self._transports.append(to_brokers)
        self._known = KnownControllers(
            to_controllers, directories.cluster_id, self._first_controllers(), config.bootstrap
        )
        return NodeWorld(
            node=config.node,
            cluster_id=directories.cluster_id,
            metadata=directories.metadata.as_world(),
            log_directories=directories.log_directories,
            controllers=self.controllers,
            to_controllers=to_controllers,
            to_brokers=to_brokers,
            clock=SystemClock(),
            random=self._random,
            work=self._helpers,
            metadata_work=self._work,
            admission_work=self._admission,
            on_failure=self.fail,
        )

    def _services(self) -> NodeServices:
        if self.broker is not None:
            return self.broker.services
        assert self.controller is not None, "a node has a role"
        assert self.controller.services is not None, "a controller alone has services"
        return self.controller.services

    def _first_controllers(self) -> list[tuple[NodeId, str]]:
        rows = [row for row in self.config.voters if row[0] != self.config.node]
        if self.config.is_controller:
            rows.append((self.config.node, str(self.config.own.address)))
        return rows

    def controllers(self) -> Sequence[NodeId]:
        """Returns the known controllers: configured, learned, and voters of the own membership."""
        assert self._known is not None, "created with the world"
        if self.controller is not None:
            voters = self.controller.membership.voters
            self._known.learn(
                (member.node, member.endpoints[0][1])
                for member in voters
                if member.endpoints and member.node != self.config.node
            )
            own = [self.config.node] if self.controller.membership.voter(self.config.node) else []
            return [*(node for node in self._known.nodes() if node != self.config.node), *own]
        return self._known.nodes()

    # Readiness.

    async def _become_ready(self) -> None:
        loop = asyncio.get_running_loop()
        reported_s = loop.time()
        while (reason := self.waits_for()) is not None:
            if loop.time() - reported_s >= STATUS_EVERY_S:
                self._manager.status(reason)
                reported_s = loop.time()
            await asyncio.sleep(READY_POLL_S)
        # What was loaded stays: the collector need not scan it again.
        gc.collect()
        gc.freeze()
        assert self.api_servers is not None, "they listen before the node is ready"
        await self.api_servers.set_serving(True)
        self.is_ready = True
        self.state = "ready"
        self._manager.ready("ready")
        LOGGER.info("ready")
        is_serving = True
        while True:
            # While it is fenced or has no quorum, the gRPC health service sends clients elsewhere.
            await asyncio.sleep(HEALTH_EVERY_S)
            if self._stop.is_set():
                return  # the controller fences a broker that stops: that is nothing to report
            reason = self.unhealthy_reason()
            if is_serving != (reason is None):
                is_serving = not is_serving
                await self.api_servers.set_serving(is_serving)
                if reason is None:
                    LOGGER.info("ready again")
                else:
                    LOGGER.warning("not ready: %s", reason)

    def waits_for(self) -> str | None:
        """Returns why the node is not ready; None if it is."""
        if self.controller is not None and (reason := self.controller.waits_for()) is not None:
            return reason
        if self.broker is not None and not self.broker.is_ready:
            return self.broker.waits_for()
        return None

    def unhealthy_reason(self) -> str | None:
        """Returns why a node that was ready does not do all of its work now; None if it does, also in an election."""
        reason = None if self.broker is None else self.broker.unhealthy_reason(UNHEALTHY_AFTER_MS)
        if self.controller is not None and reason is not None:
            # The controller knows which voters the quorum lacks.
            return self.controller.unhealthy_reason(0) or reason
        return reason if self.controller is None else self.controller.unhealthy_reason(UNHEALTHY_AFTER_MS)

    async def _health_page(self, _context: RequestContext) -> Page:
        """Reports whether the node does its work, by its own knowledge."""
        reason = self.unhealthy_reason() if self.is_ready else self.waits_for() or "starting"
        state = "waiting" if self.state == "ready" and reason is not None else self.state
        document: dict[str, object] = {"node": int(self.config.node), "state": state, "waits_for": reason}
        if self.broker is not None:
            brokers = self.broker.tail.image.brokers
            document["live_brokers"] = sorted(int(node) for node, broker in brokers.items() if broker.is_live)
        return Page(json.dumps(document) + "\n", 200 if reason is None else 503, "application/json")

    async def _alive_page(self, _context: RequestContext) -> Page:
        """Reports that the process runs. A missing quorum does not count: a restart would not bring it back."""
        return Page(json.dumps({"node": int(self.config.node), "state": self.state}) + "\n", 200, "application/json")

    async def _metrics_page(self, _context: RequestContext) -> Page:
        gatherers: list[Gatherer] = [self._samples]
        parts = (self.controller, self.broker, self.api_servers)
        gatherers += [part.samples for part in parts if part is not None]
        return Page(page(gatherers), content_type=CONTENT_TYPE)

    def _samples(self) -> Iterable[Sample]:
        usage = resource.getrusage(resource.RUSAGE_SELF)
        yield gauge("node_info", 1, "This node.", node=str(self.config.node), version=__version__)
        is_ready = self.is_ready and self.unhealthy_reason() is None
        yield gauge("node_ready", float(is_ready), "1 when the node does its work.")
        yield counter("process_cpu_seconds_total", usage.ru_utime + usage.ru_stime, "Processor time.")
        yield gauge("process_resident_bytes", _resident_bytes(), "Memory.")
        yield gauge("loop_lag_worst_seconds", self._watchdog.take_worst_s(), "Longest delay since the last scrape.")
        yield counter("loop_lag_seconds_total", self._watchdog.total_s, "Sum of all delays of the event loop.")
        yield counter("loop_late_total", self._watchdog.late, "Delays above loop.lag.warn.ms.")

    # Stop.

    async def _close(self, *, is_orderly: bool) -> None:
        """Closes users before what they use. An error of one part does not keep the others open."""
        if is_orderly and self.broker is not None:
            await self._attempt(self.broker.shut_down())
        if self.broker is not None:
            self.broker.stop_coordinators()
        if self.api_servers is not None:
            await self._attempt(self.api_servers.close())
        await self._tasks.cancel()
        if self.broker is not None:
            await self._attempt(self.broker.close())
        if self.controller is not None:
            await self._attempt(self.controller.close(is_orderly=is_orderly))
        for transport in reversed(self._transports):
            await self._attempt(transport.close())
        if self.http is not None:
            await self._attempt(self.http.close())
        await self._attempt(self._helpers.close())
        await self._attempt(self._admission.close())
        if self._directories is not None:
            self._directories.close()

    async def _attempt(self, work: Coroutine[Any, Any, None]) -> None:
        try:
            await work
        except Exception as error:
            LOGGER.error("while stopping: %s", error, exc_info=None if isinstance(error, TidelogError) else error)
            self.failure = self.failure or error


def controller_role_config(config: NodeConfig) -> ControllerRoleConfig:
    role = controller_config(
        config.values, address=str(config.own.advertised), listener=config.own.name, initial_configs=config.cluster
    )
    return replace(role, initial_configs_source=config.path, is_combined=config.is_broker)


def broker_role_config(config: NodeConfig) -> BrokerRoleConfig:
    listeners = sorted(config.listeners, key=lambda listener: listener is not config.between_brokers)
    endpoints = tuple(
        (listener.name, listener.protocol, listener.advertised.host, listener.advertised.port) for listener in listeners
    )
    role = broker_config(config.values, endpoints=endpoints, rack=config.rack)
    return replace(
        role,
        controller_listeners=config.names("controller.listener.names"),
        inter_broker_listener=config.between_brokers.name,
        services=replace(role.services, node_settings=node_settings(config)),
    )


def _warn(config: NodeConfig) -> None:
    if config.ignored:
        LOGGER.warning("ignored unknown settings: %s", ", ".join(config.ignored))
    if config.warnings:
        # One line: Kubernetes sets many variables, and the rate limit of the log must not hide a misspelt setting.
        LOGGER.warning("%s", "; ".join(config.warnings))
    for listener in config.listeners:
        if listener.kind is ListenerKind.KAFKA and not config.is_broker:
            LOGGER.warning("listener %s is not opened: only a broker serves Kafka clients", listener.name)
    if config.cluster and not config.is_controller:
        LOGGER.warning("cluster configs take effect only in a controller's file: %s", ", ".join(config.cluster))


def _resident_bytes() -> int:
    with open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[1]) * resource.getpagesize()
