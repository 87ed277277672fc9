"""All replicas of a broker: their roles by the metadata. The only owner of their logs.

    metadata delta --> an outdated role ends at once --> enqueued --> reconciled: log open, configs, role, subscription
    group commit, pushes, acks, answers ----------------------------> the roles (`leader_replica`, `follower_replica`)

    replica   (new) --log open, and reported--> no role
                                              --leader is this broker, in its broker epoch--> LeaderReplica
                                              --leader is another---------------------------> FollowerReplica
              any   --its directory fails, its log does not open----------------------------> offline
              any   --topic deleted, reassigned away----------------------------------------> dropped, log removed

A leader epoch belongs to one incarnation: a replica takes a role only when the image shows this incarnation registered,
whose record ended the epochs of the former one. One reconciler worker at a time does the slow work on a replica's log
(open, truncate, remove). An idle partition has no task, no timer and no future.

`Replicas` builds the parts and connects them; each part owns its state. Modules import only those on their left:

    partition, replica --> broker_context --> leader_replica, follower_replica --> leader_stream, follower_stream
        --> isr_updates, repair, moves, background_tasks --> reconciler, metadata_changes --> replicas

After a crash this broker is unfenced while logs are still being recovered, and serves those that are open. A replica
without an open log has no role and blocks no worker; it is enqueued when its log is open (`recovery_reports`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from random import Random

from tidelog.log.directories import LogDirectory
from tidelog.log.group_commit import Syncable
from tidelog.log.log import Log
from tidelog.log.logs import Logs
from tidelog.metadata.broker_lifecycle import BrokerLifecycle
from tidelog.metadata.image import ClusterImage
from tidelog.metadata.tail import MetadataTail
from tidelog.model.errors import StorageError
from tidelog.model.ids import NodeId, PartitionId
from tidelog.replication.background_tasks import BackgroundTasks
from tidelog.replication.broker_context import BrokerContext, BrokerMetadata
from tidelog.replication.follower_replica import FollowerReplica
from tidelog.replication.follower_stream import FollowerStreams
from tidelog.replication.full_directories import FullDirectories
from tidelog.replication.isr_log import IsrLog
from tidelog.replication.isr_updates import IsrUpdates
from tidelog.replication.leader_replica import LeaderEvents, LeaderReplica, LeadershipObserver, leaders_of
from tidelog.replication.leader_stream import LeaderStreams
from tidelog.replication.log_end_reports import LogEndReports
from tidelog.replication.messages import CATCH_UP, MAIN
from tidelog.replication.metadata_changes import MetadataChanges
from tidelog.replication.moves import Moves
from tidelog.replication.producer_ids import ProducerIds
from tidelog.replication.reconciler import Reconciler
from tidelog.replication.reconciler_queue import ReconcilerQueue
from tidelog.replication.recovery_reports import RecoveryReports
from tidelog.replication.repair import Repair
from tidelog.replication.replica import Replica, ReplicaConfig
from tidelog.replication.replica_digests import ReplicaDigests
from tidelog.replication.scrubbing import Scrubbing
from tidelog.replication.segment_copies import SegmentCopies
from tidelog.replication.segment_repair import SegmentRepair
from tidelog.replication.tasks import ReplicaTasks
from tidelog.replication.waiters import Wakers
from tidelog.world.transport import Transport
from tidelog.world.work import Work


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaStatus:
    """Counts, for metrics."""

    leaders: int
    followers: int
    offline: int
    cut_off: int
    """Followers without an open stream to their leader."""
    under_replicated: int
    under_min_isr: int
    at_min_isr: int
    isr_shrinks: int
    isr_expands: int


class Replicas:
    """See the module. `start`, then `close`; used on one event loop."""

    def __init__(
        self,
        *,
        me: NodeId,
        transport: Transport,
        logs: Logs,
        tail: MetadataTail,
        agent: BrokerLifecycle,
        config: ReplicaConfig,
        random: Random,
        on_crash: Callable[[BaseException], None],
        admission_work: Work | None = None,
    ) -> None:
        """`admission_work` decodes batches of clients; None: the work queue of the log does. `on_crash` is called with
        an unexpected error of a background task: the node stops."""
        self.me = me
        self.logs = logs
        self.agent = agent
        self.random = random
        self.admission_work = admission_work
        self.producer_ids = ProducerIds(agent)
        self.wakers = Wakers()
        self.tasks = ReplicaTasks(me, on_crash)
        self.queue = ReconcilerQueue(self.tasks, config)
        self.full_directories = FullDirectories(agent, logs, self.wakers)
        self._transport = transport
        self._tail = tail
        self._observers: list[LeadershipObserver] = []
        self._metadata = BrokerMetadata(me)
        self._replicas: dict[PartitionId, Replica] = {}
        context = BrokerContext(
            config=config,
            agent=agent,
            logs=logs,
            metadata=self._metadata,
            replicas=self._replicas,
            tasks=self.tasks,
            queue=self.queue,
            wakers=self.wakers,
            full_directories=self.full_directories,
        )
        self._isr_updates = IsrUpdates(context)
        self.leader_streams = LeaderStreams(context)
        self.follower_streams = FollowerStreams(context, transport, random)
        self.segment_repair = SegmentRepair(context, transport)
        self._repair = Repair(context, self.segment_repair)
        self._recovering = RecoveryReports(context)
        self.log_end_reports = LogEndReports(context)
        scrubbing = Scrubbing(context, random, self.segment_repair)
        self.background_tasks = BackgroundTasks(context, self._isr_updates, scrubbing)
        self.digests = ReplicaDigests(self._metadata, self.get, scrubbing.check_soon)
        self.moves = Moves(context, self._repair, self.background_tasks.assign)
        self._changes = self._new_changes(context)
        self._reconciler = self._new_reconciler(context)
        self.queue.serve(self._reconciler.reconcile)

    def _new_changes(self, context: BrokerContext) -> MetadataChanges:
        return MetadataChanges(
            context,
            self._replicas,
            isr_updates=self._isr_updates,
            leader_streams=self.leader_streams,
            follower_streams=self.follower_streams,
        )

    def _new_reconciler(self, context: BrokerContext) -> Reconciler:
        isr_log = IsrLog(self.tasks.call_later)
        return Reconciler(
            context,
            leader_events=LeaderEvents(check_isr=self._isr_updates.check, isr_log=isr_log, observers=self._observers),
            leader_streams=self.leader_streams,
            follower_streams=self.follower_streams,
            repair=self._repair,
            recovering=self._recovering,
            moves=self.moves,
            assign=self.background_tasks.assign,
            remove=self._changes.remove,
        )

    # Start and stop.

    async def start(self) -> None:
        """Serve replication streams and subscribe to the metadata."""
        self.logs.observe(
            on_synced=self._synced, on_directory_failure=self._directory_failed, on_opened=self._log_opened
        )
        for directory in self.logs.directories:
            if directory.failed is not None:
                self._directory_failed(directory, directory.failed)
        SegmentCopies(self._transport, self.get).start()
        self._transport.serve_stream(MAIN, self.leader_streams.serve)
        self._transport.serve_stream(CATCH_UP, self.leader_streams.serve)
        self.tasks.spawn(self._isr_updates.run(), name="isr-updates")
        self.tasks.spawn(self._repair.run(), name="repair")
        self.tasks.spawn(self._recovering.run(), name="recovering")
        self.tasks.spawn(self.log_end_reports.run(), name="log-end-reports")
        self.background_tasks.start()
        self._tail.subscribe(self._changes.metadata_changed)

    async def close(self) -> None:
        """End all roles and tasks. The caller closes the logs."""
        self.tasks.begin_close()
        self.queue.clear()
        for replica in list(self._replicas.values()):
            replica.end_role()
        self.follower_streams.close()
        await self.tasks.cancel()

    def observe(self, observer: LeadershipObserver) -> None:
        """Add an observer; called before `start`."""
        self._observers.append(observer)

    # Queries.

    @property
    def image(self) -> ClusterImage:
        return self._metadata.image

    @property
    def broker_epoch(self) -> int:
        return self._metadata.broker_epoch

    def get(self, partition_id: PartitionId) -> Replica | None:
        return self._replicas.get(partition_id)

    def all(self) -> Iterator[Replica]:
        return iter(self._replicas.values())

    def leader_of(self, partition_id: PartitionId) -> LeaderReplica | None:
        replica = self._replicas.get(partition_id)
        return replica.role if replica is not None and isinstance(replica.role, LeaderReplica) else None

    def leaders(self) -> list[LeaderReplica]:
        return leaders_of(self._replicas.values())

    def status(self) -> ReplicaStatus:
        leaders = self.leaders()
        followers = [replica.role for replica in self.all() if isinstance(replica.role, FollowerReplica)]
        sizes = [
            (
                leader.reachable_isr,
                self._metadata.min_isr(leader.replica),
                len(leader.replica.partition.original_replicas),
            )
            for leader in leaders
        ]
        return ReplicaStatus(
            leaders=len(leaders),
            followers=len(followers),
            offline=sum(
                replica.open_error is not None or replica.partition_id in self.logs.open_retries
                for replica in self.all()
            ),
            cut_off=sum(not follower.is_connected for follower in followers),
            under_replicated=sum(isr < replicas for isr, _, replicas in sizes),
            under_min_isr=sum(isr < least for isr, least, _ in sizes),
            at_min_isr=sum(isr == least for isr, least, _ in sizes),
            isr_shrinks=self._isr_updates.shrinks,
            isr_expands=self._isr_updates.expands,
        )

    # Logs.

    def report_corruption(self, replica: Replica, offset: int) -> None:
        """Mark the log as damaged: a batch at or past `offset` is corrupt."""
        self.queue.report_corruption(replica, offset)

    def _log_opened(self, partition_id: PartitionId) -> None:
        replica = self._replicas.get(partition_id)
        if replica is not None:
            self.queue.add(replica)

    def _synced(self, synced: list[Syncable]) -> None:
        try:
            for log in synced:
                if isinstance(log, Log):
                    replica = self._replicas.get(log.log_id)
                    if replica is not None and replica.role is not None and replica.log is log:
                        replica.role.durable()
        except Exception as error:
            # A bug: group commit would mistake it for a disk error.
            self.tasks.crash("sync callback", error)

    def _directory_failed(self, directory: LogDirectory, error: StorageError) -> None:
        """Take the replicas of the directory offline; all others go on."""
        for partition_id in directory.paths:
            replica = self._replicas.get(partition_id)
            if replica is not None:
                replica.end_role()
                replica.log, replica.open_error = None, error
                self.wakers.wake(partition_id)
                self.queue.add(replica)
        self.background_tasks.directory_failed(directory)
