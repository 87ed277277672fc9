"""Whole brokers with their controllers in one simulated world: replicated partitions behind `DataServices`.

with ReplicationCluster(seed=1) as cluster:
    cluster.start()                                  # controllers
    cluster.start_brokers(11, 12, 13)                # and brokers, until they are let in
    orders = cluster.topic("orders")                 # a PartitionId of partition 0
    cluster.write(orders, b"a")                      # acks=all, through the leader, however long it takes
    cluster.kill(NodeId(11))
    assert cluster.values(orders) == [b"a"]
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, TypeVar
from uuid import UUID

from support.brokers import data_requests
from support.metadata.quorum import BROKER_DIRECTORY, CONTROLLERS, LISTENER, Quorum
from tidelog.log.batch import Record, decode, encode, read_header
from tidelog.log.log import Log
from tidelog.log.log_scan import scan_log
from tidelog.log.logs import LogsConfig
from tidelog.metadata.image import ClusterImage, Partition
from tidelog.metadata.partitions import ElectLeaders
from tidelog.metadata.topics import CreateTopics, NewTopic
from tidelog.model.errors import ErrorCode, TidelogError
from tidelog.model.ids import DirectoryId, NodeId, PartitionId, TopicId
from tidelog.replication.follower_replica import FollowerReplica
from tidelog.replication.leader_replica import LeaderReplica
from tidelog.replication.replica import Replica, ReplicaConfig
from tidelog.rpc.grpc.dispatch import serve
from tidelog.server.broker import Broker
from tidelog.server.role_config import broker_config
from tidelog.services.fetch import FetchItem, FetchResult
from tidelog.services.produce import ProduceItem, ProduceResult
from tidelog.world.simulated import Loss, SimNode
from tidelog.world.work import Work

T = TypeVar("T")

__all__ = ["BROKER_DIRECTORY", "CONTROLLERS", "NodeId", "ReplicationCluster", "batch", "values_of"]


def batch(*values: bytes, **fields: Any) -> bytes:
    """A batch as a client sends it, one record a value."""
    return encode([Record(at, 1_000 + at, b"key", value, ()) for at, value in enumerate(values)], **fields)


def values_of(data: bytes | memoryview, *, start: int = 0) -> list[bytes]:
    """The values of whole batches, from an offset on."""
    found: list[bytes] = []
    position = 0
    while position < len(data):
        header = read_header(data, position)
        if not header.is_control:
            records = decode(data[position : position + header.size], decompressed_bytes_max=1 << 24)
            found += [record.value or b"" for record in records if record.offset >= start]
        position += header.size
    return found


class HeldRecovery:
    """Implements `world.work.Work`: logs in these directories are not read before they are let go."""

    def __init__(self, work: Work, held: set[str]) -> None:
        self._work = work
        self._held = held

    async def run(self, fn: Callable[..., T], *values: Any) -> T:
        while fn is scan_log and values[1].directory in self._held:  # noqa: ASYNC110 - let go from outside of the loop
            await asyncio.sleep(0.01)
        return await self._work.run(fn, *values)


class RunningBroker:
    """One process: the broker and its parts."""

    def __init__(self, node: SimNode, broker: Broker, labels: list[str]) -> None:
        self.node = node
        self.broker = broker
        self.labels = labels
        self.tail = broker.tail
        self.agent = broker.agent
        self.logs = broker.logs
        self.replicas = broker.replicas
        self.service = broker.data
        self.coordinator = broker.coordinator
        self.groups = broker.groups


class ReplicationCluster(Quorum):
    """See the module's docstring."""

    brokers: dict[NodeId, RunningBroker]  # type: ignore[assignment]

    def __init__(
        self,
        seed: int,
        *,
        brokers: Sequence[int] | None = None,
        replica_config: ReplicaConfig | None = None,
        directories: int = 1,
        **more: Any,
    ) -> None:
        """`brokers`: begins with the controllers and these brokers running; None: with nothing. A test that passes ends
        with `check`."""
        super().__init__(seed, **more)
        self._first_brokers = brokers
        self.replica_config = replica_config or ReplicaConfig(cleaner_backoff_ms=1_000)
        self.logs_config = LogsConfig()
        self.directories = directories
        self.held: dict[int, set[str]] = {}
        """Of a broker: the logs that it does not come to read after a crash, while they stand here."""

    def __enter__(self) -> ReplicationCluster:
        super().__enter__()
        if self._first_brokers is not None:
            self.start()
            if self._first_brokers:
                self.start_brokers(*self._first_brokers)
        return self

    def __exit__(self, *details: Any) -> None:
        try:
            if details[0] is None:
                self.check()
        finally:
            super().__exit__(*details)

    # Brokers.

    async def _boot_broker(self, broker: int, more: dict[str, Any], process: SimNode) -> None:
        labels = [f"logs-{number}" for number in range(self.directories)]
        world = self.world_of(
            process,
            NodeId(broker),
            logs={label: DirectoryId(UUID(int=broker << 16 | number)) for number, label in enumerate(labels)},
            work=HeldRecovery(process.work, self.held.setdefault(broker, set())),
        )
        config = replace(
            broker_config(endpoints=((LISTENER, "PLAINTEXT", f"host-{broker}", 9092),)),
            logs=self.logs_config,
            replicas=self.replica_config,
            services=self.service_options,
            metadata_snapshot_bytes=self.tail_bytes,
        )
        opened = await Broker.open(world, config)
        opened.agent.registration = replace(opened.agent.registration, **more)
        serve(world.to_controllers, opened.services.handlers, listener=LISTENER)
        self.brokers[NodeId(broker)] = RunningBroker(process, opened, labels)
        await opened.start()

    def lose_power(self, broker: int, loss: Loss = Loss.ALL) -> None:
        del self.brokers[NodeId(broker)]
        self.world.machine(f"b{broker}").lose_power(loss)

    def stop(self, broker: int, timeout: float = 30) -> None:
        """Controlled shutdown, and the end of the process."""
        found = self.brokers[NodeId(broker)]

        async def stop(_: SimNode) -> None:
            await found.broker.shut_down()
            await found.broker.close()

        self.world.run(found.node, stop, timeout=timeout)
        self.kill(NodeId(broker))

    def on_broker(self, broker: int, job: Callable[[RunningBroker], Coroutine[Any, Any, T]], timeout: float = 60) -> T:
        found = self.brokers[NodeId(broker)]
        return self.world.run(found.node, lambda _: job(found), timeout=timeout)

    # Topics.

    def topic(
        self,
        name: str,
        replicas: Sequence[int] | None = None,
        *,
        configs: dict[str, str] | None = None,
        partitions: int = 1,
        factor: int = 3,
        wait: bool = True,
    ) -> PartitionId:
        """Made, and led; partition 0."""
        topic = NewTopic(
            name=name,
            partitions=partitions if replicas is None else -1,
            replication_factor=factor if replicas is None else -1,
            assignment=() if replicas is None else (tuple(replicas),),
            configs=tuple((configs or {}).items()),
        )
        (made,) = self.ask(CreateTopics(topics=(topic,))).topics
        assert made.error is None, made.message
        found = PartitionId(TopicId(made.topic_id), 0)
        if wait:
            for number in range(partitions):
                self.leader(PartitionId(found.topic_id, number))
        return found

    def image(self) -> ClusterImage:
        """The newest that a broker has."""
        return max((found.tail for found in self.brokers.values()), key=lambda tail: tail.offset).image

    def partition(self, partition: PartitionId) -> Partition:
        found = self.image().partition(partition.topic_id, partition.partition)
        assert found is not None, f"{partition} does not exist"
        return found

    def leader(self, partition: PartitionId, timeout: float = 20) -> int:
        """Who leads it, and has taken the role."""
        self.world.run_until(lambda: self._leader(partition) is not None, timeout=timeout)
        leading = self._leader(partition)
        assert leading is not None
        return leading

    def _leader(self, partition: PartitionId) -> int | None:
        found = self.image().partition(partition.topic_id, partition.partition)
        if found is None or NodeId(found.leader) not in self.brokers:
            return None
        leading = self.brokers[NodeId(found.leader)].replicas.leader_of(partition)
        return found.leader if leading is not None and leading.leader_epoch == found.leader_epoch else None

    def leading(self, partition: PartitionId) -> LeaderReplica:
        found = self.brokers[NodeId(self.leader(partition))].replicas.leader_of(partition)
        assert found is not None
        return found

    def replica(self, broker: int, partition: PartitionId) -> Replica:
        found = self.brokers[NodeId(broker)].replicas.get(partition)
        assert found is not None, f"broker {broker} has no replica of {partition}"
        return found

    def log(self, broker: int, partition: PartitionId) -> Log:
        found = self.replica(broker, partition).log
        assert found is not None, f"broker {broker} has no log of {partition}"
        return found

    def following(self, broker: int, partition: PartitionId) -> FollowerReplica:
        role = self.replica(broker, partition).role
        assert isinstance(role, FollowerReplica), f"broker {broker} does not follow {partition}"
        return role

    def until_in_sync(self, partition: PartitionId, *brokers: int, timeout: float = 30) -> None:
        def are() -> bool:
            found = self.image().partition(partition.topic_id, partition.partition)
            return found is not None and set(found.isr) == set(brokers)

        self.until(are, timeout=timeout)

    def until_whole(self, partition: PartitionId) -> None:
        """Until all replicas are in sync, and have the same records."""
        brokers = self.image().topics[partition.topic_id].partitions[partition.partition].replicas
        self.until_in_sync(partition, *brokers)
        self.until_equal(partition, *brokers)

    def until(self, condition: Callable[[], bool], timeout: float = 20) -> None:
        """Time passes until it is so; an error of our own in a broker ends the test."""
        self.world.run_until(lambda: bool(self.failures) or condition(), timeout=timeout)
        self.check()

    def check(self) -> None:
        """Nothing of ours has broken, and every state is sound."""
        if self.failures:
            raise self.failures[0]
        for found in self.brokers.values():
            for replica in found.replicas.all():
                if replica.role is not None:
                    replica.role.state.validate()
                if replica.log is not None and not replica.log.is_changing and not replica.log.is_closed:
                    replica.log.validate()

    # Clients.

    def produce(
        self, broker: int, partition: PartitionId, data: bytes, *, acks: int = -1, timeout_ms: int = 5_000
    ) -> ProduceResult:
        """One attempt."""
        items = [ProduceItem(partition, data)]
        (result,) = self.on_broker(
            broker,
            lambda found: data_requests.produce(found.service, items, acks=acks, timeout_ms=timeout_ms),
            timeout=60,
        )
        return result

    def write(
        self, partition: PartitionId, *values: bytes, acks: int = -1, timeout: float = 60, **fields: Any
    ) -> ProduceResult:
        """Writes through the leader until it is acknowledged. A repeat may store it twice, unless it has a producer."""
        end_s = self.now_s() + timeout
        last: TidelogError | None = None
        while self.now_s() < end_s:
            result = self.produce(self.leader(partition), partition, batch(*values, **fields), acks=acks)
            if result.error is None:
                return result
            last = result.error
            assert last.retriable or last.code in (ErrorCode.NOT_LEADER_OR_FOLLOWER,), f"{last!r}"
            self.world.run_for(0.05)
        raise AssertionError(f"not acknowledged in {timeout} s: {last!r}")

    def write_numbers(self, partition: PartitionId, count: int, form: bytes = b"%d") -> None:
        for number in range(count):
            self.write(partition, form % number)

    def elect(self, topic: str, kind: str) -> None:
        """Elects the leader of its partition 0."""
        (outcome,) = self.ask(ElectLeaders(kind=kind, partitions=((topic, 0),))).items
        assert outcome.error is None, outcome.message

    def fetch(
        self,
        broker: int,
        partition: PartitionId,
        offset: int = 0,
        *,
        max_wait_ms: int = 0,
        min_bytes: int = 1,
        bytes_max: int = 1 << 20,
        rack: str = "",
        **fields: Any,
    ) -> FetchResult:
        items = [FetchItem(partition, offset, bytes_max, **fields)]
        (result,) = self.on_broker(
            broker,
            lambda found: data_requests.fetch(
                found.service, items, min_bytes=min_bytes, max_bytes=1 << 20, max_wait_ms=max_wait_ms, rack=rack
            ),
        )
        return result

    def values(self, partition: PartitionId, *, broker: int | None = None) -> list[bytes]:
        """All that can be read."""
        found: list[bytes] = []
        at = broker if broker is not None else self.leader(partition)
        offset = self.log(at, partition).start_offset
        while True:
            result = self.fetch(at, partition, offset)
            assert result.error is None, result.error
            if not result.data:
                return found
            found += values_of(result.data, start=offset)
            position = 0
            while position < len(result.data):
                header = read_header(result.data, position)
                position += header.size
                offset = header.next_offset

    def until_equal(self, partition: PartitionId, *brokers: int, timeout: float = 30) -> None:
        """All of these have the same log, synced, and know it as committed."""

        def are() -> bool:
            logs = [self.brokers[NodeId(broker)].logs.get(partition) for broker in brokers]
            ends = {None if log is None else (log.end_offset, log.durable_end) for log in logs}
            known = {self.replica(broker, partition).high_watermark for broker in brokers}
            return len(ends) == 1 and None not in ends and known == {next(iter(ends))[0]}  # type: ignore[index]

        self.until(are, timeout=timeout)


@contextmanager
def orders_cluster(seed: int, *values: bytes, **fields: Any) -> Iterator[tuple[ReplicationCluster, PartitionId]]:
    """A cluster of three brokers, and partition 0 of the topic `orders` on all of them, with these values."""
    brokers = (11, 12, 13)
    with ReplicationCluster(seed, brokers=brokers, **fields) as cluster:
        orders = cluster.topic("orders", brokers)
        for value in values:
            cluster.write(orders, value)
        yield cluster, orders
