"""A node as a broker: its copy of the metadata, its logs, its replicas, its registration.

    open the copy, find the logs --> most logs open or known as bad --> register (fenced) --> heartbeats --> let in
                                 '--> the others open in the background: each is led or followed when it is

What is damaged or missing is told with the registration, as far as it is known after half a second: after a clean stop
that is everything. What takes longer to recover after a crash is told log by log, and is not elected before that
(`replication.announcing`, `replication.recovering`).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Sequence
from random import Random

from tidelog.coordinator.coordinator import GroupCoordinator
from tidelog.coordinator.service import GroupService
from tidelog.log.config import LogConfig
from tidelog.log.logs import Logs, LogsConfig
from tidelog.metadata import configs
from tidelog.metadata.broker_side import BrokerAgent, BrokerConfig, with_clean_stop
from tidelog.metadata.brokers import Register
from tidelog.metadata.features import supported
from tidelog.metadata.image import ClusterImage
from tidelog.metadata.tail import MetadataTail
from tidelog.model.errors import DuplicateBrokerError
from tidelog.model.ids import NodeId, PartitionId
from tidelog.replication.announcing import announce, close_logs, working_directories
from tidelog.replication.replicas import ReplicaConfig, Replicas
from tidelog.rpc.transport import GrpcTransport
from tidelog.server.config import NodeConfig
from tidelog.server.directories import NodeDirectories
from tidelog.server.group_metrics import group_samples, lag_samples
from tidelog.server.metrics import Sample, counter, gauge
from tidelog.server.transport import addresses_of
from tidelog.server.uuids import random_uuid
from tidelog.world.clock import Clock
from tidelog.world.work import Work

LOGGER = logging.getLogger(__name__)

TAIL_DIRECTORY = "metadata"
TWIN_CHECK_S = 0.5
TWIN_GRACE_S = 4.0


class BrokerPart:
    """Made by `open`, begun by `start`; `register` and `tail.run` are tasks; `shut_down` and `close` end it."""

    def __init__(
        self,
        config: NodeConfig,
        directories: NodeDirectories,
        tail: MetadataTail,
        logs: Logs,
        agent: BrokerAgent,
        replicas: Replicas,
        coordinator: GroupCoordinator,
    ) -> None:
        self.coordinator = coordinator
        self.groups = GroupService(coordinator, tail, agent.client)
        self.tail = tail
        self.logs = logs
        self.agent = agent
        self.replicas = replicas
        self._config = config
        self._directories = directories
        self._clean_epoch: int | None = None

    @classmethod
    async def open(
        cls,
        config: NodeConfig,
        directories: NodeDirectories,
        transport: GrpcTransport,
        controllers: Callable[[], Sequence[NodeId]],
        *,
        start_work: Work,
        work: Work,
        clock: Clock,
        random: Random,
        between_brokers: GrpcTransport,
        admission_work: Work | None = None,
    ) -> BrokerPart:
        """`transport` reaches controllers, `between_brokers` other brokers where they have registered."""
        tail = MetadataTail(
            disk=directories.metadata.disk,
            path=TAIL_DIRECTORY,
            transport=transport,
            sources=controllers,
            work=start_work,
            random=random,
        )
        await tail.open()
        logs = await Logs.open(
            directories.for_logs(),
            work=work,
            clock=clock,
            config_of=lambda log_id: log_config_of(tail.image, log_id),
            config=LogsConfig(open_files_max=config.number("log.open.files.max")),
        )
        agent = BrokerAgent(
            registration(config, directories, logs, random),
            transport,
            tail,
            controllers,
            BrokerConfig(heartbeat_ms=config.number("broker.heartbeat.interval.ms")),
            random,
        )
        replicas = Replicas(
            me=config.node,
            transport=between_brokers,
            logs=logs,
            tail=tail,
            agent=agent,
            clock=clock,
            config=ReplicaConfig(cleaner_backoff_ms=config.number("log.cleaner.backoff.ms")),
            random=random,
            admission_work=admission_work,
        )
        tail.subscribe(addresses_of(transport, config.names("controller.listener.names")))
        tail.subscribe(addresses_of(between_brokers, [config.between_brokers.name]))
        coordinator = GroupCoordinator(replicas, tail, clock)
        return cls(config, directories, tail, logs, agent, replicas, coordinator)

    async def start(self, on_failure: Callable[[BaseException], None]) -> None:
        self.replicas.on_crash = on_failure
        self.coordinator.on_failure = on_failure
        self.coordinator.start()
        await self.replicas.start()

    async def register(self) -> None:
        """Once the logs are open, or should be: say what is lost, then heartbeats for ever. Raises if it is refused."""
        await announce(self.agent, self.logs)
        async with asyncio.TaskGroup() as group:
            group.create_task(self.agent.run())
            group.create_task(self._watch_for_twin())

    async def _watch_for_twin(self) -> None:
        """Another process that lives under our id: registration would wait for ever. Raises `DuplicateBrokerError`.

        After a crash our own former life may look so; it is fenced when its session ends, so there is time for that.
        """
        loop = asyncio.get_running_loop()
        since: float | None = None
        while True:
            await asyncio.sleep(TWIN_CHECK_S)
            image = self.tail.image
            other = image.brokers.get(self._config.node)
            is_twin = (
                other is not None and not other.fenced and other.incarnation != self.agent.registration.incarnation
            )
            if not is_twin or self.agent.broker_epoch is not None:
                since = None
                continue
            since = since or loop.time()
            session_s = configs.cluster_int(image, "broker.session.timeout.ms") / 1000
            if other is not None and loop.time() - since > 2 * session_s + TWIN_GRACE_S:
                where = ", ".join(f"{host}:{port}" for _, _, host, port in other.endpoints)
                raise DuplicateBrokerError(
                    f"another process lives as broker {self._config.node}, at {where}: give each node its own node.id"
                )

    @property
    def is_ready(self) -> bool:
        return not self.agent.is_fenced

    def waits_for(self) -> str:
        if self.tail.trouble is not None:
            return self.tail.trouble
        if self.agent.broker_epoch is None:
            return "the broker is not registered yet: no active controller has answered"
        return "the broker is registered, and not let in yet: it reads the metadata"

    def trouble(self, grace_ms: int) -> str | None:
        """Why this broker does not do its work any more."""
        if not self.is_ready:
            return "the broker was fenced by the controller"
        stale_ms = self.tail.stale_ms()
        if self.agent.client.leader is None and (stale_ms is None or stale_ms > grace_ms):
            age = "" if stale_ms is None else f" for {stale_ms / 1000:.1f} s"
            return f"no active controller has answered{age}: {self.tail.trouble or 'what this broker knows may be old'}"
        return None

    async def shut_down(self, timeout_ms: int) -> None:
        """Move leaderships away, as far as that goes in this time."""
        self._clean_epoch = self.agent.broker_epoch
        if self._clean_epoch is None or timeout_ms == 0:
            return
        try:
            async with asyncio.timeout(timeout_ms / 1000):
                self._clean_epoch = await self.agent.shut_down()
        except TimeoutError:
            LOGGER.warning("no controller has taken the leaderships in %d ms: stopping with them", timeout_ms)

    async def close(self) -> None:
        await self.coordinator.close()
        await self.replicas.close()
        self.tail.close()
        await close_logs(self.logs, self._directories.metadata.store, self._clean_epoch)

    def samples(self) -> Iterable[Sample]:
        status = self.replicas.status()
        yield gauge("broker_fenced", float(self.agent.is_fenced), "1 while the controller keeps this broker out.")
        yield gauge("metadata_offset", self.tail.offset, "This broker has applied the metadata log up to here.")
        stale_ms = self.tail.stale_ms()
        yield gauge("metadata_stale_seconds", -1 if stale_ms is None else stale_ms / 1000, "Age of its metadata.")
        yield gauge("metadata_trouble", float(self.tail.trouble is not None), "1: the metadata log cannot be followed.")
        yield gauge("partitions_leading", status.leaders, "Partitions that this broker leads.")
        yield gauge("partitions_following", status.followers, "Partitions that it follows.")
        yield gauge("partitions_offline", status.offline, "Replicas here without a usable log.")
        yield gauge("partitions_cut_off", status.cut_off, "Followed here, while their leader cannot be reached.")
        yield gauge("partitions_under_replicated", status.under_replicated, "Led here, with replicas out of sync.")
        yield gauge("partitions_under_min_isr", status.under_min_isr, "Led here, read-only for acks=all.")
        yield gauge("partitions_at_min_isr", status.at_min_isr, "Led here, with no redundancy to lose.")
        yield counter(
            "isr_shrinks_total", status.isr_shrinks, "Times that this leader has taken a replica out of sync."
        )
        yield counter("isr_expands_total", status.isr_expands, "Times that it has taken one back.")
        yield from group_samples(self.groups)
        yield from lag_samples(self.groups, self.replicas)
        yield gauge("logs_open", len(self.logs), "Logs that are open.")
        yield gauge("logs_recovering", self.logs.recovering, "Logs that were found at the start and are not open yet.")
        yield gauge(
            "logs_open_retries", len(self.logs.open_retries), "Logs that cannot be opened now, and are retried."
        )
        yield gauge("logs_kept", len(self.logs.kept), "Copies of records that replicas here had to give up.")
        scrub = self.replicas.upkeep.scrubbing
        yield counter("scrub_segments_total", scrub.segments, "Sealed segments that were read and compared.")
        yield counter("scrub_bytes_total", scrub.bytes, "Bytes of them.")
        yield counter("scrub_faults_total", scrub.faults, "Segments that were not what was written.")
        yield counter("scrub_errors_total", scrub.errors, "Segments that could not be read.")
        yield counter("scrub_cycles_total", scrub.cycles, "Times that every sealed segment was looked at.")
        for directory in self.logs.directories:
            label = directory.disk.label
            yield gauge("directory_failed", float(directory.failed is not None), "1: given up.", directory=label)
            yield gauge("directory_logs", len(directory.paths), "Logs in a directory.", directory=label)
            # One that stands still would hold up whoever asks it, which is the event loop.
            if directory.failed is None and directory.directory_id not in self.agent.stalled_directories:
                yield gauge("directory_free_bytes", directory.disk.free_bytes(), "Room that is left.", directory=label)


def log_config_of(image: ClusterImage, log_id: PartitionId) -> LogConfig:
    topic = image.topics.get(log_id.topic_id)
    return LogConfig() if topic is None else configs.log_config(image, topic.name)


def registration(config: NodeConfig, directories: NodeDirectories, logs: Logs, random: Random) -> Register:
    """The endpoint between brokers is the first: who knows no name takes that one. Log directories that do not work are
    not named: the controller counts on nothing there."""
    told = sorted(config.listeners, key=lambda one: one is not config.between_brokers)
    wanted = Register(
        cluster_id=directories.cluster_id,
        broker=config.node,
        incarnation=random_uuid(random),
        endpoints=tuple((one.name, one.protocol, one.advertised.host, one.advertised.port) for one in told),
        rack=config.rack,
        directories=working_directories(logs),
        features=supported(),
    )
    return with_clean_stop(wanted, directories.metadata.store)
