"""What the replicas of one broker share: metadata as they see it, logs, tasks, waiting readers, reconciler queue."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from tidelog.log.logs import Logs
from tidelog.metadata import configs
from tidelog.metadata.broker_lifecycle import BrokerLifecycle
from tidelog.metadata.image import ClusterImage
from tidelog.model.errors import DiskFullError, StorageError
from tidelog.model.ids import NodeId, PartitionId
from tidelog.replication.full_directories import FullDirectories
from tidelog.replication.reconciler_queue import ReconcilerQueue
from tidelog.replication.replica import Replica, ReplicaConfig
from tidelog.replication.tasks import ReplicaTasks
from tidelog.replication.waiters import Wakers
from tidelog.world.storage_errors import is_device_error


class BrokerMetadata:
    """The metadata of this broker. Only `metadata_changes` sets `image` and `broker_epoch`."""

    __slots__ = ("broker_epoch", "image", "me")

    def __init__(self, me: NodeId) -> None:
        self.me = me
        self.image = ClusterImage()
        """The newest image that is applied, or is being applied."""
        self.broker_epoch = -1
        """Broker epoch of this incarnation in the metadata; -1 until it is registered there."""

    def setting(self, name: str) -> int:
        value = configs.broker_config(self.image, name, self.me).value
        assert isinstance(value, int), f"{name} is an integer"
        return value

    def lag_max_ms(self) -> int:
        return self.setting("replica.lag.time.max.ms")

    def is_deleted(self, replica: Replica) -> bool:
        """Return whether the topic is deleted. A large delta is applied in slices: the replica may be dropped later."""
        return replica.partition_id.topic_id not in self.image.topics

    def min_isr(self, replica: Replica) -> int:
        if self.is_deleted(replica):
            return len(replica.partition.replicas)
        return configs.min_isr(self.image, replica.partition_id.topic_id, replica.partition)


@dataclass(frozen=True, slots=True, kw_only=True)
class BrokerContext:
    """See the module. Each part owns its state and knows nothing of the replicas' roles."""

    config: ReplicaConfig
    agent: BrokerLifecycle
    logs: Logs
    metadata: BrokerMetadata
    replicas: Mapping[PartitionId, Replica]
    """All replicas of this broker; `metadata_changes` adds and removes them."""
    tasks: ReplicaTasks
    queue: ReconcilerQueue
    wakers: Wakers
    full_directories: FullDirectories

    def append_failed(self, partition_id: PartitionId, error: StorageError) -> None:
        """Note a full directory; fail one with a device error. Only a restart tries the device again: until then other
        brokers serve its partitions."""
        if isinstance(error, DiskFullError):
            self.full_directories.append_rejected(partition_id)
        elif is_device_error(error):
            directory = self.logs.directory_of(partition_id)
            if directory is not None:
                directory.fail(error)
