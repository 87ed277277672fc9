"""`MockAdmin`: `tidelog.Admin` without a cluster, with any number of brokers. The controller's code decides on topics,
settings, reassignments and elections; the test scripts groups, offsets, records and transactions.

    admin = MockAdmin(brokers=5)
    admin.create_topic("orders", partitions=6, replication_factor=3)
    admin.add_group("billing", {("orders", 0): 10})
    admin.set_offsets(("orders", 0), start=0, end=25)
    admin.fail_next("create_topic", error)

All methods are those of `tidelog.Admin`, and so are retries and errors: offsets of a partition that nobody leads are
asked for until `timeout`. A reassignment runs until `finish_reassignments`. Call `kill_broker` before
`unregister_broker`. The mock has no metadata log: `read_metadata_log` returns an empty one.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Coroutine, Iterable, Mapping
from random import Random
from typing import Any, TypeVar, Unpack

from tidelog.client.admin.arguments import read_offsets
from tidelog.client.admin.calls import query
from tidelog.client.admin.core import AdminCore
from tidelog.client.admin.threaded import Admin
from tidelog.client.admin.values import MetadataLog
from tidelog.client.cluster import ClusterClient
from tidelog.client.consumer.arguments import PartitionLike, read_partition, read_partitions
from tidelog.client.new_cluster import client_config
from tidelog.client.options import AdminOptions, Bootstrap
from tidelog.client.record import OffsetAndMetadata, TopicPartition
from tidelog.model.errors import ErrorCode, RemoteError, UnknownTopicOrPartitionError
from tidelog.model.ids import PartitionId
from tidelog.services.groups import OffsetToCommit
from tidelog.testing.mock_cluster import MockCluster, MockConnections, partition_id
from tidelog.testing.mock_metadata import MockMetadata
from tidelog.world.real.clock import SystemClock

T = TypeVar("T")
BROKERS_MAX = 10_000
_METHODS = frozenset(name for name in vars(Admin) if not name.startswith("_"))


class MockAdmin(Admin):
    """See the module's docstring. Options are those of `tidelog.Admin`. Brokers are numbered from 1."""

    def __init__(
        self, bootstrap: Bootstrap = "mock:9292", /, *, brokers: int = 3, seed: int = 0, **options: Unpack[AdminOptions]
    ) -> None:
        if not 1 <= brokers <= BROKERS_MAX:
            raise ValueError(f"1 to {BROKERS_MAX:,} brokers, not {brokers}")
        super().__init__(bootstrap, **options)
        self._host.warns_unclosed = False  # a test need not close a mock
        self.calls: list[str] = []
        """Names of the called methods, in order."""
        self._metadata = MockMetadata(brokers, seed)
        self._cluster = MockCluster(self._metadata)
        self._errors: dict[str, deque[Exception]] = {}

    def _new_core(self, io: Any) -> AdminCore:
        cluster = ClusterClient(
            self.options.bootstrap,
            MockConnections(self._cluster.handlers),
            random=Random(0),
            clock=SystemClock(),
            config=client_config(self.options),
        )
        return _MockCore(cluster, self.options.default_api_timeout_ms, self.calls, self._errors)

    # For tests.

    @property
    def is_closed(self) -> bool:
        return self._host.is_closed

    def fail_next(self, method: str, error: Exception, *, times: int = 1) -> None:
        """Make the next calls of this method raise `error` and do nothing."""
        if method not in _METHODS:
            raise ValueError(f"Admin has no method '{method}'")
        self._errors.setdefault(method, deque()).extend([error] * times)

    def kill_broker(self, broker: int) -> None:
        """Fence the broker: other in-sync replicas, if any, lead its partitions."""
        self._check_broker(broker)
        self._metadata.fence(broker)

    def restart_broker(self, broker: int) -> None:
        """Unfence the broker; its replicas are in sync again."""
        self._check_broker(broker)
        self._metadata.start(broker)
        self._metadata.catch_up()

    def _check_broker(self, broker: int) -> None:
        if broker not in self._metadata.image.brokers:
            raise RemoteError(f"there is no broker {broker}", code=ErrorCode.BROKER_ID_NOT_REGISTERED)

    def finish_reassignments(self) -> None:
        """Complete running reassignments: added replicas have caught up."""
        self._metadata.catch_up()

    def set_offsets(
        self, partition: PartitionLike, *, start: int = 0, end: int, times: Iterable[tuple[int, int]] = ()
    ) -> None:
        """Set the log of a partition; `times` are (timestamp, offset) pairs for lookups, in order."""
        place = read_partition(partition)
        if not 0 <= start <= end:
            raise ValueError(f"{place}: a log from {start} to {end}")
        self._cluster.records.set_log(self._known(place), start, end, times)

    def add_group(
        self,
        group: str,
        offsets: Mapping[Any, int | OffsetAndMetadata] | None = None,
        *,
        members: Mapping[str, Iterable[PartitionLike]] | None = None,
    ) -> None:
        """Add or change a group with these offsets and members (id -> assigned partitions)."""
        committed = {
            self._known(place): OffsetToCommit(offset.offset, offset.leader_epoch, offset.metadata)
            for place, offset in read_offsets(offsets or {}).items()
        }
        self._cluster.groups.add(group, committed)
        if members is not None:
            held = {name: read_partitions(places) for name, places in members.items()}
            self._cluster.groups.set_members(
                group,
                {
                    name: (tuple(sorted({place.topic for place in places})), tuple(map(self._known, places)))
                    for name, places in held.items()
                },
            )

    def add_transaction(
        self,
        transactional_id: str,
        *,
        state: str = "Ongoing",
        producer_id: int = 1_000,
        partitions: Iterable[PartitionLike] = (),
        members: Mapping[str, tuple[int, Iterable[PartitionLike]]] | None = None,
        open_for_s: float = 0.0,
        last_token: bytes = b"",
    ) -> None:
        """Add or change a transactional id; `members` are label -> (producer id, partitions)."""
        self._cluster.transactions.add(
            transactional_id,
            state=state,
            producer_id=producer_id,
            partitions=read_partitions(partitions),
            members={name: (number, read_partitions(places)) for name, (number, places) in (members or {}).items()},
            open_for_s=open_for_s,
            last_token=last_token,
        )

    def add_open_transaction(
        self, partition: PartitionLike, *, producer_id: int, start_offset: int, age_s: float = 0.0
    ) -> None:
        """Make a transaction open in the log of a partition, with a last record of this age. It hangs if no
        transactional id of `add_transaction` has it."""
        self._cluster.records.open_transaction(
            self._known(read_partition(partition)), producer_id=producer_id, start_offset=start_offset, age_s=age_s
        )

    def _known(self, place: TopicPartition) -> PartitionId:
        found = partition_id(self._metadata.image, place.topic, place.partition)
        if found is None:
            raise UnknownTopicOrPartitionError(f"there is no partition {place}")
        return found


class _MockCore(AdminCore):
    """Notes each operation, and raises the error that the test has set for it."""

    def __init__(
        self, cluster: ClusterClient, timeout_ms: int, called: list[str], errors: dict[str, deque[Exception]]
    ) -> None:
        super().__init__(cluster, timeout_ms=timeout_ms)
        self._called = called
        self._errors = errors

    async def _run(self, name: str, job: Coroutine[Any, Any, T], timeout: float | None, *, is_change: bool) -> T:
        self._called.append(name)
        if errors := self._errors.get(name):
            job.close()
            self.calls += 1
            self.failures += 1
            raise errors.popleft()
        return await super()._run(name, job, timeout, is_change=is_change)

    @query
    async def read_metadata_log(self, *, allow_stale: bool = False, timeout: float | None = None) -> MetadataLog:
        return MetadataLog(None, ())
