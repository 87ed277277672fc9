"""All partitions of a broker: which ones it leads or follows, by the metadata, and the only owner of their logs.

    metadata delta --> what was is ended at once --> unsettled --> settled: log open, settings, role, mended, subscribed
    group commit, pushes, acks, answers ---------------------------> the roles (`leading`, `following`)

    replica   (new) --log open, and told--> no role
                                          --leader is me, my epoch--> Leading
                                          --leader is another-------> Following
              any   --its directory fails, its log does not open----> offline
              any   --topic deleted, reassigned away----------------> dropped, log removed

A leader epoch belongs to one incarnation: roles are taken only when the image shows this very incarnation registered,
whose record has ended the epochs of the former one. Everything that takes time on a log (opening, cutting, removing)
is done for one replica by one settler at a time (`settling`). Nothing is held for an idle partition: no task, no timer,
no future.

After a crash this broker is let in while logs are still recovered, and serves those that are open: a replica whose log
is not has no role, and holds up no settler; its turn comes when the log is open (`recovering`).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Iterator
from random import Random
from typing import Any, Protocol, TypeVar

from tidelog.log.directories import LogDirectory
from tidelog.log.group_commit import Dirty
from tidelog.log.log import Log
from tidelog.log.logs import Logs
from tidelog.metadata import configs
from tidelog.metadata.broker_side import BrokerAgent
from tidelog.metadata.delta import LocalPartition
from tidelog.metadata.image import ClusterImage, Partition
from tidelog.metadata.tail import MetadataTail
from tidelog.model.errors import (
    NotLeaderOrFollowerError,
    StorageError,
)
from tidelog.model.ids import NodeId, PartitionId, TopicId
from tidelog.replication import throttle
from tidelog.replication.changes import Changes
from tidelog.replication.follower_stream import FollowerStreams
from tidelog.replication.following import Following
from tidelog.replication.isr_log import IsrLog
from tidelog.replication.isr_updates import IsrUpdates
from tidelog.replication.leader_stream import LeaderStream
from tidelog.replication.leading import Leading
from tidelog.replication.log_end_reports import LogEndReports
from tidelog.replication.messages import CATCH_UP, MAIN
from tidelog.replication.moves import Moves
from tidelog.replication.recovering import Recovering
from tidelog.replication.repair import Repair
from tidelog.replication.replica import Replica, ReplicaConfig, ReplicaStatus
from tidelog.replication.settling import Settling
from tidelog.replication.upkeep import Upkeep
from tidelog.replication.waiting import Wakers
from tidelog.world.clock import Clock
from tidelog.world.storage_errors import is_device_error
from tidelog.world.transport import Stream, Transport
from tidelog.world.work import Work

__all__ = ["LeadershipObserver", "Replica", "ReplicaConfig", "ReplicaStatus", "Replicas"]

LOGGER = logging.getLogger(__name__)

T = TypeVar("T")


class LeadershipObserver(Protocol):
    """Told of every leader epoch that begins and ends here. Returns quickly."""

    def led(self, leading: Leading) -> None: ...

    def left(self, leading: Leading) -> None: ...


class Replicas:
    """See the module. `start`, then `close`; used on one event loop."""

    def __init__(
        self,
        *,
        me: NodeId,
        transport: Transport,
        logs: Logs,
        tail: MetadataTail,
        agent: BrokerAgent,
        clock: Clock,
        config: ReplicaConfig,
        random: Random,
        admission_work: Work | None = None,
    ) -> None:
        """`admission_work` is where batches of clients are decoded, if it is not to wait for what logs have to do."""
        self.admission_work = admission_work
        self.me = me
        self.transport = transport
        self.logs = logs
        self.agent = agent
        self.clock = clock
        self.config = config
        self.random = random
        self.broker_epoch = -1
        """Of this incarnation, as the metadata has it; -1 until then."""
        self.wakers = Wakers()
        self.isr_updates = IsrUpdates(self)
        self.isr_log = IsrLog(lambda delay_s, end: self.call_later(delay_s, lambda _none: end(), None))
        self.streams = FollowerStreams(self)
        self.repair = Repair(self)
        self.recovering = Recovering(self)
        self.log_end_reports = LogEndReports(self)
        self.moves = Moves(self)
        self.upkeep = Upkeep(self)
        self.leader_bucket = throttle.Bucket(throttle.NO_LIMIT, 0.0)
        self.follower_bucket = throttle.Bucket(throttle.NO_LIMIT, 0.0)
        self.crashed: BaseException | None = None
        self.on_crash: Callable[[BaseException], None] | None = None
        """An error of our own in the background: the node should stop."""
        self._observers: list[LeadershipObserver] = []
        self._tail = tail
        self._replicas: dict[PartitionId, Replica] = {}
        self._settling = Settling(self)
        self._parked: dict[PartitionId, dict[LeaderStream, None]] = {}
        self._tasks: set[asyncio.Task[Any]] = set()
        self._subscriptions = 0
        self._changes = Changes(self)
        self._is_closed = False

    # Life.

    async def start(self) -> None:
        """Serve the streams and follow the metadata."""
        now_s = asyncio.get_running_loop().time()
        self.leader_bucket = throttle.Bucket(throttle.NO_LIMIT, now_s)
        self.follower_bucket = throttle.Bucket(throttle.NO_LIMIT, now_s)
        self.logs.observe(
            on_synced=self._synced, on_directory_failure=self._directory_failed, on_opened=self._log_opened
        )
        for directory in self.logs.directories:
            if directory.failed is not None:
                self._directory_failed(directory, directory.failed)
        self.transport.serve_stream(MAIN, self._serve)
        self.transport.serve_stream(CATCH_UP, self._serve)
        self.spawn(self.isr_updates.run(), name="isr-updates")
        self.repair.start()
        self.recovering.start()
        self.log_end_reports.start()
        self.upkeep.start()
        self._tail.subscribe(self._changes.metadata_changed)

    async def close(self) -> None:
        """Lead and follow nothing any more. The logs are the caller's to close."""
        self._is_closed = True
        self._settling.clear()
        for replica in list(self._replicas.values()):
            self.end_role(replica)
        self.streams.close()
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)

    def spawn(self, work: Coroutine[Any, Any, T], *, name: str) -> asyncio.Task[T]:
        """A task of ours: ended by `close`; an error that is our own stops the node."""
        task = asyncio.get_running_loop().create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        self.check(task)

    def check(self, task: asyncio.Task[Any]) -> None:
        """A task that has ended by an error is our own fault: those of the world were handled in it."""
        error = None if task.cancelled() else task.exception()
        if error is not None:
            self._crash(task.get_name(), error)

    def _crash(self, where: str, error: BaseException) -> None:
        LOGGER.critical("broker=%d %s has crashed: %r", self.me, where, error, exc_info=error)
        if self.crashed is None:
            self.crashed = error
            if self.on_crash is not None:
                self.on_crash(error)

    def call_later(self, delay_s: float, callback: Callable[[Any], None], argument: object) -> None:
        """Unless this is closed by then."""

        def call() -> None:
            if not self._is_closed:
                callback(argument)

        asyncio.get_running_loop().call_later(delay_s, call)

    def now_ms(self) -> int:
        """For lags: this process's own time, not the wall's."""
        return int(asyncio.get_running_loop().time() * 1000)

    @property
    def image(self) -> ClusterImage:
        return self._changes.image

    @property
    def is_closed(self) -> bool:
        return self._is_closed

    def observe(self, observer: LeadershipObserver) -> None:
        """Before `start`."""
        self._observers.append(observer)

    # Looking.

    def get(self, partition_id: PartitionId) -> Replica | None:
        return self._replicas.get(partition_id)

    def all(self) -> Iterator[Replica]:
        return iter(self._replicas.values())

    def leading(self, partition_id: PartitionId) -> Leading | None:
        replica = self._replicas.get(partition_id)
        return replica.role if replica is not None and isinstance(replica.role, Leading) else None

    def leaders(self) -> list[Leading]:
        return [replica.role for replica in self._replicas.values() if isinstance(replica.role, Leading)]

    def status(self) -> ReplicaStatus:
        leaders = self.leaders()
        sizes = [
            (leading.reachable_isr, self.min_isr(leading.replica), len(leading.replica.partition.settled))
            for leading in leaders
        ]
        return ReplicaStatus(
            leaders=len(leaders),
            followers=sum(isinstance(replica.role, Following) for replica in self._replicas.values()),
            offline=sum(
                replica.offline is not None or replica.partition_id in self.logs.open_retries
                for replica in self._replicas.values()
            ),
            cut_off=sum(
                isinstance(replica.role, Following) and not replica.role.is_connected
                for replica in self._replicas.values()
            ),
            under_replicated=sum(isr < replicas for isr, _, replicas in sizes),
            under_min_isr=sum(isr < least for isr, least, _ in sizes),
            at_min_isr=sum(isr == least for isr, least, _ in sizes),
            unsettled=len(self._settling) + sum(replica.is_settling for replica in self._replicas.values()),
            isr_shrinks=self.isr_updates.shrinks,
            isr_expands=self.isr_updates.expands,
        )

    def is_gone(self, replica: Replica) -> bool:
        """Its topic is deleted. A large change is carried out in turns, so it may be dropped later than that."""
        return replica.partition_id.topic_id not in self.image.topics

    def min_isr(self, replica: Replica) -> int:
        if self.is_gone(replica):
            return len(replica.partition.replicas)
        return configs.min_isr(self.image, replica.partition_id.topic_id, replica.partition)

    def lag_max_ms(self) -> int:
        value = configs.broker_config(self.image, "replica.lag.time.max.ms", self.me).value
        assert isinstance(value, int), "a time is an integer"
        return value

    # The metadata.

    def changed(self, local: LocalPartition) -> None:
        """What the metadata says of a partition of this broker."""
        partition_id, partition = PartitionId(TopicId(local.topic_id), local.number), local.partition
        replica = self._replicas.get(partition_id)
        if replica is None:
            topic = self.image.topics[partition_id.topic_id].name
            replica = self._replicas[partition_id] = Replica(partition_id, topic, partition)
            self.note_throttles(replica)
        replica.partition = partition
        replica.is_dropped = False
        role = replica.role
        if isinstance(role, Leading) and self._leads(partition) and role.leader_epoch == partition.leader_epoch:
            role.metadata_changed(partition, self.min_isr(replica))
            self.isr_updates.look(replica)
        elif isinstance(role, Following) and self._follows(role, partition):
            if role.stream is not None and role.stream.service != self.channel(replica):
                role.leave()
        else:
            self.end_role(replica)
        self.unsettle(replica)
        self.retry_parked(partition_id)

    def _leads(self, partition: Partition) -> bool:
        return self.broker_epoch >= 0 and partition.leader == self.me

    def _follows(self, role: Following, partition: Partition) -> bool:
        return role.leader == partition.leader and role.leader_epoch == partition.leader_epoch

    def drop(self, partition_id: PartitionId) -> None:
        """It has no replica here any more."""
        replica = self._replicas.get(partition_id)
        if replica is not None:
            self.end_role(replica)
            replica.is_dropped = True
            self.unsettle(replica)
            self.wakers.wake(partition_id)

    def end_role(self, replica: Replica) -> None:
        """Whatever it was, it is not any more."""
        role, replica.role = replica.role, None
        if isinstance(role, Leading):
            where = f"{replica.topic}-{replica.partition_id.partition}"
            role.end(NotLeaderOrFollowerError(f"{where} is not led here any more", leader=replica.partition.leader))
            for observer in self._observers:
                observer.left(role)
        elif isinstance(role, Following):
            role.end()

    def note_throttles(self, replica: Replica) -> None:
        number = replica.partition_id.partition
        is_named = throttle.is_named
        replica.is_leader_throttled = is_named(self.image, throttle.LEADER, replica.topic, number, self.me)
        replica.is_follower_throttled = is_named(self.image, throttle.FOLLOWER, replica.topic, number, self.me)

    async def remove(self, partition_id: PartitionId) -> None:
        """A log that has no replica."""
        try:
            await self.logs.remove(partition_id)
        except StorageError as error:
            LOGGER.error("broker=%d cannot remove the log of %s: %s", self.me, partition_id, error)

    # Settling.

    def unsettle(self, replica: Replica) -> None:
        """Something about this replica is not as it should be."""
        self._settling.add(replica)

    def unsettle_later(self, replica: Replica) -> None:
        self.call_later(self.config.repair_retry_ms / 1000, self.unsettle, replica)

    def led(self, leading: Leading) -> None:
        """An epoch begins here."""
        for observer in self._observers:
            observer.led(leading)

    def forget(self, replica: Replica) -> None:
        """It was dropped, and its log is gone."""
        del self._replicas[replica.partition_id]

    def channel(self, replica: Replica) -> str:
        return MAIN if self.me in replica.partition.isr else CATCH_UP

    def look_at_start(self, replica: Replica) -> None:
        """The high watermark has moved: what was deleted may reach further now."""
        log = replica.log
        if log is not None and log.start_offset < min(replica.partition.start_offset, replica.high_watermark):
            self.unsettle(replica)

    # Logs.

    def _log_opened(self, partition_id: PartitionId) -> None:
        replica = self._replicas.get(partition_id)
        if replica is not None:
            self.unsettle(replica)

    def _synced(self, synced: list[Dirty]) -> None:
        try:
            for log in synced:
                if isinstance(log, Log):
                    replica = self._replicas.get(log.log_id)
                    if replica is not None and replica.role is not None and replica.log is log:
                        replica.role.durable()
        except Exception as error:
            # Our own error: group commit would take it for one of the disk.
            self._crash("what follows a sync", error)

    def _directory_failed(self, directory: LogDirectory, error: StorageError) -> None:
        """Its partitions are offline; the others go on."""
        for partition_id in directory.paths:
            replica = self._replicas.get(partition_id)
            if replica is not None:
                self.end_role(replica)
                replica.log, replica.offline = None, error
                self.wakers.wake(partition_id)
                self.unsettle(replica)
        self.upkeep.directory_failed(directory)

    def write_failed(self, replica: Replica, error: StorageError) -> None:
        """An append of this replica was not taken. Whether a device that returned an error will take the next one is
        for a restart to find out: until then others lead and follow what lies there."""
        directory = self.logs.directory_of(replica.partition_id)
        if directory is not None and is_device_error(error):
            directory.fail(error)

    def found_damage(self, replica: Replica) -> None:
        """The log is damaged: it neither leads nor counts until it is mended."""
        self.end_role(replica)
        self.unsettle(replica)

    def found_rot(self, replica: Replica, offset: int) -> None:
        """A batch at or past `offset` cannot be read."""
        self.repair.found_rot(replica, offset)

    # Streams.

    async def _serve(self, stream: Stream) -> None:
        await LeaderStream(self, stream).run()

    def next_subscription(self) -> int:
        self._subscriptions += 1
        return self._subscriptions

    def park(self, partition_id: PartitionId, stream: LeaderStream) -> None:
        self._parked.setdefault(partition_id, {})[stream] = None

    def unpark(self, partition_id: PartitionId, stream: LeaderStream) -> None:
        streams = self._parked.get(partition_id)
        if streams is not None:
            streams.pop(stream, None)
            if not streams:
                del self._parked[partition_id]

    def retry_parked(self, partition_id: PartitionId) -> None:
        for stream in list(self._parked.get(partition_id, ())):
            stream.retry(partition_id)

    # Throttle of what is followed.

    def _is_held_back(self, following: Following) -> bool:
        replica = following.replica
        return replica.is_follower_throttled and self.me not in replica.partition.isr

    def spend_follower(self, following: Following, size: int) -> None:
        if self._is_held_back(following):
            self.follower_bucket.spend(size, asyncio.get_running_loop().time())

    def ack_delay_s(self, following: Following) -> float:
        if not self._is_held_back(following):
            return 0.0
        return min(self.follower_bucket.wait_s(asyncio.get_running_loop().time()), 10.0)
