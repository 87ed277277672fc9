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
is done for one replica by one settler at a time; a few settlers run while something is unsettled. Nothing is held for
an idle partition: no task, no timer, no future.

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
from tidelog.metadata.image import NIL, ClusterImage, Partition
from tidelog.metadata.tail import MetadataTail
from tidelog.model.errors import (
    DiskFullError,
    FencedLeaderEpochError,
    NotLeaderOrFollowerError,
    StorageError,
    TidelogError,
)
from tidelog.model.ids import DirectoryId, NodeId, Offset, PartitionId, TopicId
from tidelog.replication import throttle
from tidelog.replication.changes import Changes
from tidelog.replication.follower_stream import FollowerStreams
from tidelog.replication.following import Following
from tidelog.replication.isr_updates import IsrUpdates
from tidelog.replication.leader_stream import LeaderStream
from tidelog.replication.leading import Leading, safe_end
from tidelog.replication.messages import CATCH_UP, MAIN
from tidelog.replication.moves import Moves
from tidelog.replication.partition import FollowerState, LeaderState
from tidelog.replication.recovering import Recovering
from tidelog.replication.repair import Repair
from tidelog.replication.replica import Replica, ReplicaConfig, ReplicaStatus
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
        self.streams = FollowerStreams(self)
        self.repair = Repair(self)
        self.recovering = Recovering(self)
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
        self._unsettled: dict[Replica, None] = {}
        self._settlers = 0
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
        self.upkeep.start()
        self._tail.subscribe(self._changes.metadata_changed)

    async def close(self) -> None:
        """Lead and follow nothing any more. The logs are the caller's to close."""
        self._is_closed = True
        self._unsettled.clear()
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
            (len(leading.state.isr), self.min_isr(leading.replica), len(leading.replica.partition.settled))
            for leading in leaders
        ]
        return ReplicaStatus(
            leaders=len(leaders),
            followers=sum(isinstance(replica.role, Following) for replica in self._replicas.values()),
            offline=sum(replica.offline is not None for replica in self._replicas.values()),
            under_replicated=sum(isr < replicas for isr, _, replicas in sizes),
            under_min_isr=sum(isr < least for isr, least, _ in sizes),
            at_min_isr=sum(isr == least for isr, least, _ in sizes),
            unsettled=len(self._unsettled) + sum(replica.is_settling for replica in self._replicas.values()),
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
            if role.stream is not None and role.stream.service != self._channel(replica):
                role.leave()
        else:
            self.end_role(replica)
        self.unsettle(replica)
        self._retry_parked(partition_id)

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
        if self._is_closed or self._replicas.get(replica.partition_id) is not replica:
            return  # a timer of one that was dropped: the partition may be back, with another log
        if replica.is_settling:
            replica.is_again = True
            return
        self._unsettled[replica] = None
        if self._settlers < self.config.settlers_max:
            self._settlers += 1
            self.spawn(self._settle_all(), name="settler")

    def unsettle_later(self, replica: Replica) -> None:
        self.call_later(self.config.repair_retry_ms / 1000, self.unsettle, replica)

    async def _settle_all(self) -> None:
        settled = 0
        try:
            while self._unsettled:
                replica = next(iter(self._unsettled))
                del self._unsettled[replica]
                if self._replicas.get(replica.partition_id) is not replica:
                    continue
                replica.is_settling = True
                try:
                    await self._settle(replica)
                finally:
                    replica.is_settling = False
                if replica.is_again:
                    replica.is_again = False
                    self._unsettled[replica] = None
                settled += 1
                if settled % self.config.partitions_per_slice == 0:
                    await asyncio.sleep(0)  # most have nothing to wait for
        finally:
            self._settlers -= 1

    async def _settle(self, replica: Replica) -> None:
        try:
            if replica.is_dropped:
                await self.moves.stop(replica)
                await self._forget(replica)
                return
            if self.recovering.is_waiting(replica):
                return
            log = replica.log or await self._open(replica)
            if log is None:
                return
            await self._configure(replica, log)
            if log.damaged is not None and not await self.repair.mend(replica, log):
                return
            if replica.move is not None:
                log = await self.moves.finish(replica, log)
            # In another directory than the recorded one it would count as what lies there, if it was there before.
            if self._tell_place(replica) and self.recovering.is_settled(replica):
                self._take_role(replica, log)
            await self._follow(replica, log)
            await self._trim(replica, log)
        except TidelogError as error:
            LOGGER.error("broker=%d %s-%d: %s", self.me, replica.topic, replica.partition_id.partition, error)
            directory = self.logs.directory_of(replica.partition_id)
            if directory is not None and directory.failed is not None:
                return  # the whole directory is offline
            # A full disk, or the like. What leads or follows goes on with what it has.
            if isinstance(error, DiskFullError) and replica.partition.leader == self.me:
                self.upkeep.directory_full(replica)
            if replica.log is None:
                replica.offline = error
            self.unsettle_later(replica)

    async def _forget(self, replica: Replica) -> None:
        replica.log = None
        await self.logs.remove(replica.partition_id)
        if replica.is_dropped and self._replicas.get(replica.partition_id) is replica:
            del self._replicas[replica.partition_id]

    async def _open(self, replica: Replica) -> Log | None:
        recorded = replica.partition.directory_of(self.me)
        if replica.partition_id in self.logs.doubles and not await self._choose_copy(replica, DirectoryId(recorded)):
            return None
        await self.logs.wait_open(replica.partition_id)
        directory = self.logs.directory_of(replica.partition_id)
        if replica.partition_id in self.logs.failures:
            replica.offline = self.logs.failures[replica.partition_id]
            if directory is not None and directory.failed is not None:
                if directory.directory_id != recorded:
                    self.repair.lost(replica)  # that the directory has failed does not tell of this one
                return None
            if not await self.repair.reopen(replica):
                return None
        elif directory is None and not self.repair.may_begin(replica):
            return None
        working = [d.directory_id for d in self.logs.directories if d.failed is None]
        wanted = DirectoryId(recorded) if recorded != NIL and recorded in working else None
        config = configs.log_config(self.image, replica.topic)
        log = await self.logs.create(replica.partition_id, label=replica.topic, config=config, directory=wanted)
        replica.log, replica.offline = log, None
        replica.high_watermark = self.logs.high_watermark(replica.partition_id)
        return log

    async def _choose_copy(self, replica: Replica, recorded: DirectoryId) -> bool:
        """The log stands in several directories: the one that the metadata has is it. Not before this incarnation is
        registered: older metadata may name the one that it was in before."""
        if self.broker_epoch < 0:
            return False
        try:
            await self.logs.keep(replica.partition_id, recorded)
        except StorageError as error:
            LOGGER.error("broker=%d %s", self.me, error)
            replica.offline = error
            self.repair.lost(replica)
            return False
        return True

    def _tell_place(self, replica: Replica) -> bool:
        """Whether the metadata knows in which directory the log is, or knows of none."""
        home, recorded = self.logs.directory_of(replica.partition_id), replica.partition.directory_of(self.me)
        if home is None or home.directory_id is None or home.directory_id == recorded:
            return True
        self.upkeep.assign(replica.partition_id, home.directory_id)
        return recorded == NIL

    async def _configure(self, replica: Replica, log: Log) -> None:
        if self.is_gone(replica):
            return
        config = configs.log_config(self.image, replica.topic)
        if log.config is not config and log.config != config:
            flush_mode = log.config.flush_mode
            await log.configure(config)
            if config.flush_mode is not flush_mode:
                await log.flush()
        elif config.cleanup_compact:
            await log.allow_gaps()

    def _take_role(self, replica: Replica, log: Log) -> None:
        partition = replica.partition
        if replica.role is not None or self.broker_epoch < 0 or replica.is_dropped or self._is_closed:
            return
        if self.is_gone(replica):
            return
        if partition.leader == self.me:
            if partition.leader_epoch <= replica.led_epoch:
                # What the controller has answered in this epoch is forgotten: it must not be led twice.
                LOGGER.error("broker=%d has led %s in epoch %d before", self.me, log.path, partition.leader_epoch)
                return
            try:
                log.assign_epoch(partition.leader_epoch)
            except FencedLeaderEpochError as error:
                LOGGER.error("broker=%d cannot lead %s: %s", self.me, log.path, error)
                return
            self._lead(replica, log, partition)
        elif partition.leader >= 0:
            log.forget_empty_epochs()
            state = FollowerState(
                leader=partition.leader,
                leader_epoch=partition.leader_epoch,
                log_end=log.end_offset,
                durable_end=safe_end(log),
                high_watermark=replica.high_watermark,
            )
            replica.role = Following(self, replica, log, state)
            self.wakers.wake(replica.partition_id)

    def _lead(self, replica: Replica, log: Log, partition: Partition) -> None:
        state = LeaderState(
            me=self.me,
            my_broker_epoch=self.broker_epoch,
            partition=partition,
            min_isr=self.min_isr(replica),
            log_end=log.end_offset,
            durable_end=safe_end(log),
            high_watermark=Offset(min(replica.high_watermark, log.end_offset)),
            now_ms=self.now_ms(),
            lag_max_ms=self.lag_max_ms(),
        )
        replica.led_epoch = partition.leader_epoch
        leading = replica.role = Leading(self, replica, log, state)
        leading.begin()
        for observer in self._observers:
            observer.led(leading)
        self.isr_updates.look(replica)
        self._retry_parked(replica.partition_id)

    def _channel(self, replica: Replica) -> str:
        return MAIN if self.me in replica.partition.isr else CATCH_UP

    async def _follow(self, replica: Replica, log: Log) -> None:
        """Bring the log to where the leader said, then subscribe."""
        role = replica.role
        if not isinstance(role, Following):
            return
        if role.unsound is not None:
            await role.mend()
        if not role.is_over and role.stream is None and role.unsound is None and log.damaged is None:
            self.streams.add(role, self._channel(replica))

    async def _trim(self, replica: Replica, log: Log) -> None:
        """Records that were deleted by an admin's call are deleted here too."""
        wanted = min(replica.partition.start_offset, replica.high_watermark, log.end_offset)
        if wanted > log.start_offset and log.damaged is None:
            await log.advance_start(wanted)
            self.wakers.wake(replica.partition_id)

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

    def _retry_parked(self, partition_id: PartitionId) -> None:
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
