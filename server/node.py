"""One node: builds its parts from a configuration, runs them, stops them. The only place that knows all of them.

    new --start--> starting --listening, parts run--> waiting --let in by the quorum--> ready
                      |                                  |                               |
                      '---- error: raised                '------- stop, or a part fails -+--> stopping --> stopped

Starting: directories are locked and checked; Raft state and the copy of the metadata are read; listeners open; then the
parts run. `ready` is told (systemd, /healthz, the log) when a broker is unfenced, or a controller knows a leader. Until
then the node says whom it waits for: the first of three nodes waits for the second.

Stopping: leaderships are moved away, the doors close, logs are synced and say so, Raft leadership is handed over, then
everything closes. A second signal ends the process at once, which is as safe as kill -9 is.

A part that fails (a disk under the metadata, an error of our own) stops the node with an error: what it said before was
durable, and whoever started it may start it again.
"""

from __future__ import annotations

import asyncio
import gc
import json
import logging
import os
import resource
from collections.abc import Coroutine, Iterable, Sequence
from random import Random, SystemRandom
from typing import Any

from tidelog import __version__
from tidelog.model.errors import TidelogError
from tidelog.model.ids import NodeId, TopicId
from tidelog.rpc.transport import GrpcTransport
from tidelog.server.broker_part import BrokerPart
from tidelog.server.config import NodeConfig
from tidelog.server.controller_part import ControllerPart
from tidelog.server.controllers import KnownControllers
from tidelog.server.directories import NodeDirectories
from tidelog.server.doors import PublicDoors
from tidelog.server.http import HttpServer, Page
from tidelog.server.listeners import Door, where_doors_are
from tidelog.server.metrics import CONTENT_TYPE, Gatherer, Sample, counter, gauge, page
from tidelog.server.notify import ServiceManager
from tidelog.server.ports import check_free
from tidelog.server.transport import BrokerTransport, NodeTransport
from tidelog.server.watchdog import LoopWatchdog
from tidelog.server.work import StartingWork
from tidelog.world.clock import Clock
from tidelog.world.real.clock import SystemClock
from tidelog.world.real.work import ProcessWork

LOGGER = logging.getLogger(__name__)

READY_POLL_S = 0.02
STATUS_EVERY_S = 2.0
HEALTH_EVERY_S = 0.2
TROUBLE_AFTER_MS = 3_000
"""So long a node may be without a leader of the quorum before it says that it is not ready."""
ADMISSION_HELPERS = 2
"""Processes that decode what clients send to topics that ask for it; started when first needed."""


class Node:
    """`run` from start to stop; `stop` asks it to."""

    def __init__(self, config: NodeConfig, *, manager: ServiceManager | None = None) -> None:
        self.config = config
        self.state = "new"
        self.is_ready = False
        self.failure: BaseException | None = None
        self.http: HttpServer | None = None
        self._manager = manager or ServiceManager()
        self._watchdog = LoopWatchdog(self._manager, warn_ms=config.number("loop.lag.warn.ms"))
        self._random: Random = SystemRandom()
        self._clock: Clock = SystemClock()
        self._helpers = ProcessWork(config.number("num.recovery.threads.per.data.dir"))
        self._work = StartingWork(self._helpers)
        self._admission = ProcessWork(ADMISSION_HELPERS)
        self._stop = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()
        self._directories: NodeDirectories | None = None
        self._transport: GrpcTransport | None = None
        self._between_brokers: GrpcTransport | None = None
        self._known: KnownControllers | None = None
        self._controller: ControllerPart | None = None
        self._broker: BrokerPart | None = None
        self._doors: PublicDoors | None = None

    def topic_name(self, topic_id: TopicId) -> str | None:
        """As far as this node's copy of the metadata knows it."""
        topic = None if self._broker is None else self._broker.tail.image.topics.get(topic_id)
        return None if topic is None else topic.name

    # From start to stop.

    async def run(self) -> int:
        """0 after an orderly stop, 1 after a failure. Raises what kept it from starting."""
        self.state = "starting"
        try:
            await self._start()
        except BaseException:
            await self._close(is_orderly=False)
            raise
        self.state = "waiting"
        self._spawn(self._watchdog.run(), "watchdog")
        self._spawn(self._become_ready(), "readiness")
        await self._stop.wait()
        self.state = "stopping"
        self.is_ready = False
        self._manager.stopping()
        if self._doors is not None:
            await self._doors.set_serving(False)
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
        if config.ignored:
            LOGGER.warning("ignored, since they mean nothing here: %s", ", ".join(config.ignored))
        if config.warnings:
            # One line: Kubernetes sets many variables, and the log's bound on lines must not hide a misspelt setting.
            LOGGER.warning("%s", "; ".join(config.warnings))
        for listener in config.listeners:
            if listener.door is Door.KAFKA and not config.is_broker:
                LOGGER.warning("listener %s is not opened: only a broker serves Kafka clients", listener.name)
        if config.cluster and not config.is_controller:
            LOGGER.warning("only a controller's file tells where the cluster begins: %s", ", ".join(config.cluster))
        self._directories = directories = NodeDirectories(config)
        opened = [one.address for one in config.listeners if one.door is not Door.KAFKA or config.is_broker]
        for address in [*opened, config.http]:
            if address is not None:
                check_free(address)
        more = [one.address for one in config.between_nodes if one is not config.own]
        self._transport = transport = NodeTransport(config.node, directories.cluster_id, config.own.address, more)
        if config.is_broker:
            self._between_brokers = BrokerTransport(transport, directories.cluster_id, config.between_brokers.address)
        self._known = KnownControllers(transport, directories.cluster_id, self._first_controllers(), config.bootstrap)
        if config.is_controller:
            self._controller = await ControllerPart.open(
                config,
                directories,
                transport,
                work=self._work,
                clock=self._clock,
                random=self._random,
                on_failure=self.fail,
            )
            await self._controller.check_first_start(config, directories.cluster_id)
        if self._between_brokers is not None:
            self._broker = await BrokerPart.open(
                config,
                directories,
                transport,
                self.controllers,
                start_work=self._work,
                work=self._helpers,
                admission_work=self._admission,
                clock=self._clock,
                random=self._random,
                between_brokers=self._between_brokers,
            )
        await self._begin(transport)

    async def _begin(self, transport: GrpcTransport) -> None:
        assert self._directories is not None, "opened before"
        assert self._known is not None, "made before"
        self._doors = PublicDoors(
            self.config,
            self._directories.cluster_id,
            transport,
            self.controllers,
            controller=self._controller,
            broker=self._broker,
            between_brokers=self._between_brokers,
            work=self._work,
            random=self._random,
        )
        await transport.start()
        if self._controller is not None:
            await self._controller.start()
            self._spawn(self._controller.initial.run(), "initial-configs")
        if not self.config.is_controller or self.config.bootstrap:
            self._spawn(self._known.run(), "controllers")
        if self._broker is not None:
            await self._broker.start(self.fail)
            self._spawn(self._broker.tail.run(), "metadata")
            self._spawn(self._broker.register(), "registration")
        await self._doors.start()
        if self.config.http is not None:
            pages = {"/metrics": self._metrics_page, "/healthz": self._health_page}
            pages |= {"/readyz": self._health_page, "/livez": self._alive_page}
            self.http = HttpServer(self.config.http, pages, where_doors_are(self.config.listeners, self.config.http))
            await self.http.start()
        self._work.begin_serving()
        LOGGER.info(
            "started: version=%s pid=%d cluster=%s %s",
            __version__,
            os.getpid(),
            self._directories.cluster_id,
            " ".join(f"{one.name.lower()}={one.address}" for one in self.config.listeners),
        )

    def _first_controllers(self) -> list[tuple[NodeId, str]]:
        rows = [row for row in self.config.voters if row[0] != self.config.node]
        if self.config.is_controller:
            rows.append((self.config.node, str(self.config.own.address)))
        return rows

    def controllers(self) -> Sequence[NodeId]:
        """Whom to ask for metadata: those of the file, those that were learned, those that vote."""
        assert self._known is not None, "made at the start"
        if self._controller is not None:
            voters = self._controller.membership.voters
            self._known.learn(
                (member.node, member.endpoints[0][1])
                for member in voters
                if member.endpoints and member.node != self.config.node
            )
            mine = [self.config.node] if self._controller.membership.voter(self.config.node) else []
            return [*(node for node in self._known.nodes() if node != self.config.node), *mine]
        return self._known.nodes()

    def _spawn(self, work: Coroutine[Any, Any, None], name: str) -> None:
        task = asyncio.get_running_loop().create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            while isinstance(error, BaseExceptionGroup):
                error = error.exceptions[0]
            self.fail(error)

    # Ready.

    async def _become_ready(self) -> None:
        loop = asyncio.get_running_loop()
        told = loop.time()
        while (why := self.waits_for()) is not None:
            if loop.time() - told >= STATUS_EVERY_S:
                self._manager.status(why)
                told = loop.time()
            await asyncio.sleep(READY_POLL_S)
        # What was loaded stays: it is not looked at again by the collector.
        gc.collect()
        gc.freeze()
        assert self._doors is not None, "they are open before the node is ready"
        await self._doors.set_serving(True)
        self.is_ready = True
        self.state = "ready"
        self._manager.ready("ready")
        LOGGER.info("ready")
        is_serving = True
        while True:
            # Fenced, or without a quorum: whoever looks at the health of the API goes elsewhere.
            await asyncio.sleep(HEALTH_EVERY_S)
            if self._stop.is_set():
                return  # the controller fences a broker that stops: that is no trouble to report
            why = self.trouble()
            if is_serving != (why is None):
                is_serving = not is_serving
                await self._doors.set_serving(is_serving)
                LOGGER.warning("ready again" if why is None else "not ready: %s", *([] if why is None else [why]))

    def waits_for(self) -> str | None:
        """Why the node is not ready; None if it is."""
        if self._controller is not None and (why := self._controller.waits_for()) is not None:
            return why
        if self._broker is not None and not self._broker.is_ready:
            return self._broker.waits_for()
        return None

    def trouble(self) -> str | None:
        """Why a node that was ready does not do all of its work now; None if it does. An election is no trouble."""
        why = None if self._broker is None else self._broker.trouble(TROUBLE_AFTER_MS)
        if self._controller is not None and why is not None:
            # It knows more: whom the quorum waits for.
            return self._controller.trouble(0) or why
        return why if self._controller is None else self._controller.trouble(TROUBLE_AFTER_MS)

    async def _health_page(self) -> Page:
        """Whether the node does its work, by what it knows itself."""
        why = self.trouble() if self.is_ready else self.waits_for() or "starting"
        state = "waiting" if self.state == "ready" and why is not None else self.state
        document = {"node": int(self.config.node), "state": state, "waits_for": why}
        return Page(json.dumps(document) + "\n", 200 if why is None else 503, "application/json")

    async def _alive_page(self) -> Page:
        """Whether the process runs: a restart does not bring back a quorum, so that is not asked here."""
        return Page(json.dumps({"node": int(self.config.node), "state": self.state}) + "\n", 200, "application/json")

    async def _metrics_page(self) -> Page:
        gatherers: list[Gatherer] = [self._samples]
        if self._controller is not None:
            gatherers.append(self._controller.samples)
        if self._broker is not None:
            gatherers.append(self._broker.samples)
        if self._doors is not None:
            gatherers.append(self._doors.samples)
        return Page(page(gatherers), content_type=CONTENT_TYPE)

    def _samples(self) -> Iterable[Sample]:
        usage = resource.getrusage(resource.RUSAGE_SELF)
        yield gauge("node_info", 1, "This node.", node=str(self.config.node), version=__version__)
        is_ready = self.is_ready and self.trouble() is None
        yield gauge("node_ready", float(is_ready), "1 when the node does its work.")
        yield counter("process_cpu_seconds_total", usage.ru_utime + usage.ru_stime, "Processor time.")
        yield gauge("process_resident_bytes", _resident_bytes(), "Memory.")
        yield gauge("loop_lag_worst_seconds", self._watchdog.take_worst_s(), "Longest delay since the last scrape.")
        yield counter("loop_lag_seconds_total", self._watchdog.total_s, "All delays of the event loop.")
        yield counter("loop_late_total", self._watchdog.late, "Delays above loop.lag.warn.ms.")

    # The end.

    async def _close(self, *, is_orderly: bool) -> None:
        """In the order in which parts lean on each other; an error of one does not keep the others open."""
        if is_orderly and self._broker is not None:
            await self._quietly(self._broker.shut_down(self.config.number("controlled.shutdown.timeout.ms")))
        if self._doors is not None:
            await self._quietly(self._doors.close())
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)
        if self._broker is not None:
            await self._quietly(self._broker.close())
        if self._controller is not None:
            await self._quietly(self._controller.close(is_orderly=is_orderly))
        for transport in (self._between_brokers, self._transport):
            if transport is not None:
                await self._quietly(transport.close())
        if self.http is not None:
            await self._quietly(self.http.close())
        await self._quietly(self._helpers.close())
        await self._quietly(self._admission.close())
        if self._directories is not None:
            self._directories.close()

    async def _quietly(self, work: Coroutine[Any, Any, None]) -> None:
        try:
            await work
        except Exception as error:
            LOGGER.error("while stopping: %s", error, exc_info=None if isinstance(error, TidelogError) else error)
            self.failure = self.failure or error


def _resident_bytes() -> int:
    with open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[1]) * resource.getpagesize()
