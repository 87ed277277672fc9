"""A transactional producer of Kafka's protocol, over the handlers of simulated brokers.

with TransactionCluster(seed=1, orders=2) as cluster:
    owner = KafkaOwner(cluster, "app", protocol=1)       # 1: adds partitions itself; 2: KIP-890
    owner.init()
    owner.send(("orders", 0), b"one")
    owner.commit_offsets("readers", {("orders", 1): 7})
    assert owner.end() == ""                             # the name of the error; empty for none
"""

from __future__ import annotations

from typing import Any

from support.brokers.cluster import RunningBroker
from support.brokers.transactions import transactional
from support.kafka.data_api import produce_request
from support.kafka.group_api import GroupApi, name_of
from support.transactions.cluster import TransactionCluster
from tidelog.model.errors import ErrorCode
from tidelog.rpc.kafka.dispatch import Table, build
from tidelog.rpc.kafka.messages import transactions as messages
from tidelog.services.services import BrokerServices

Place = tuple[str, int]

VERSIONS: dict[int, dict[type, int]] = {
    1: {
        messages.InitProducerIdRequest: 4,
        messages.AddPartitionsToTxnRequest: 3,
        messages.AddOffsetsToTxnRequest: 3,
        messages.TxnOffsetCommitRequest: 4,
        messages.EndTxnRequest: 4,
    },
    2: {
        messages.InitProducerIdRequest: 5,
        messages.TxnOffsetCommitRequest: 5,
        messages.EndTxnRequest: 5,
    },
}
PRODUCE_VERSIONS = {1: 11, 2: 12}
RETRIABLE = frozenset(row.name for row in ErrorCode if row.value.retriable)


class WholeApi(GroupApi):
    """All handlers of one broker."""

    table: Table = build()

    def services_of(self, broker: RunningBroker) -> BrokerServices:
        return broker.broker.api


class KafkaOwner:
    def __init__(
        self, cluster: TransactionCluster, transactional_id: str, *, protocol: int = 2, timeout_ms: int = 60_000
    ) -> None:
        self.cluster = cluster
        self.transactional_id = transactional_id
        self.protocol = protocol
        self.timeout_ms = timeout_ms
        self.producer_id = -1
        self.epoch = -1
        self.sequences: dict[Place, int] = {}
        self.added: set[Place] = set()
        """Of the open transaction, in protocol 1."""

    # Requests.

    def api(self, broker: int | None = None) -> WholeApi:
        """Of the coordinator, if no other broker is named."""
        return WholeApi(self.cluster, self.cluster.coordinator_of(self.transactional_id) if broker is None else broker)

    def ask(self, request: Any, version: int | None = None, broker: int | None = None) -> Any:
        chosen = VERSIONS[self.protocol].get(type(request)) if version is None else version
        return self.api(broker).ask(request, chosen)

    def identity(self, *, prefix: str = "") -> dict[str, Any]:
        return {
            f"{prefix}transactional_id": self.transactional_id,
            f"{prefix}producer_id": self.producer_id,
            f"{prefix}producer_epoch": self.epoch,
        }

    def retried(self, attempt: Any, *, timeout_s: float = 30) -> str:
        """The first error that no client retries; empty for success."""
        end_s = self.cluster.now_s() + timeout_s
        while True:
            error: str = attempt()
            if error not in RETRIABLE or self.cluster.now_s() > end_s:
                return error
            self.cluster.world.run_for(0.05)

    # The producer.

    def init(self, *, is_recovery: bool = False, version: int | None = None) -> str:
        def attempt() -> str:
            own = {"producer_id": self.producer_id, "producer_epoch": self.epoch} if is_recovery else {}
            request = messages.InitProducerIdRequest(
                transactional_id=self.transactional_id, transaction_timeout_ms=self.timeout_ms, **own
            )
            response = self.ask(request, version)
            if not response.error_code:
                self._uses(response.producer_id, response.producer_epoch)
            return name_of(response.error_code)

        self.added.clear()
        return self.retried(attempt)

    def _uses(self, producer_id: int, epoch: int) -> None:
        if (producer_id, epoch) != (self.producer_id, self.epoch):
            self.sequences.clear()
        self.producer_id, self.epoch = producer_id, epoch

    def add(self, *places: Place, version: int | None = None) -> list[str]:
        """The errors of AddPartitionsToTxn, by partition."""
        rows: list[str] = []

        def attempt() -> str:
            topics = [messages.AddPartitionsToTxnTopic(name=name, partitions=[number]) for name, number in places]
            request = messages.AddPartitionsToTxnRequest(
                **self.identity(prefix="v3_and_below_"), v3_and_below_topics=topics
            )
            results = self.ask(request, version).results_by_topic_v3_and_below
            assert [topic.name for topic in results] == [name for name, _ in places]
            rows[:] = [name_of(row.partition_error_code) for topic in results for row in topic.results_by_partition]
            return rows[0] if rows else ""

        self.retried(attempt)
        return rows

    def send(self, place: Place, value: bytes, *, version: int | None = None, sequence: int | None = None) -> str:
        if self.protocol == 1 and place not in self.added and version is None:
            assert self.add(place) == [""]
            self.added.add(place)
        number = self.sequences.get(place, 0) if sequence is None else sequence
        data = transactional(value, self.producer_id, self.epoch, number)
        request = produce_request((*place, data), transactional_id=self.transactional_id)

        def attempt() -> str:
            leader = self.cluster.leader(self.cluster.partition_id(*place))
            response = self.ask(request, PRODUCE_VERSIONS[self.protocol] if version is None else version, leader)
            ((row,),) = [topic.partition_responses for topic in response.responses]
            return name_of(row.error_code)

        error = self.retried(attempt)
        if not error:
            self.sequences[place] = number + 1
        return error

    def add_group(self, group: str, *, version: int | None = None) -> str:
        def attempt() -> str:
            request = messages.AddOffsetsToTxnRequest(**self.identity(), group_id=group)
            return name_of(self.ask(request, version).error_code)

        return self.retried(attempt)

    def commit_offsets(self, group: str, offsets: dict[Place, int], *, version: int | None = None, **more: Any) -> str:
        """The error of the first partition."""
        if self.protocol == 1 and version is None:
            assert self.add_group(group) == ""

        def attempt() -> str:
            rows = self.commit_rows(group, offsets, version=version, **more)
            return rows[0]

        return self.retried(attempt)

    def commit_rows(
        self, group: str, offsets: dict[Place, int], *, version: int | None = None, **more: Any
    ) -> list[str]:
        request = messages.TxnOffsetCommitRequest(
            **self.identity(),
            group_id=group,
            topics=[
                messages.TxnOffsetCommitRequestTopic(
                    name=name,
                    topic_id=self.topic_id(name),
                    partitions=[
                        messages.TxnOffsetCommitRequestPartition(
                            partition_index=number, committed_offset=offset, committed_metadata="m"
                        )
                    ],
                )
                for (name, number), offset in offsets.items()
            ],
            **more,
        )
        response = self.ask(request, version, self.cluster.coordinator(group))
        return [name_of(row.error_code) for topic in response.topics for row in topic.partitions]

    def topic_id(self, name: str) -> bytes:
        found = self.cluster.image().topic_ids.get(name)
        return bytes(16) if found is None else found.bytes

    def end(self, *, is_commit: bool = True, version: int | None = None) -> str:
        def attempt() -> str:
            response = self.ask(messages.EndTxnRequest(**self.identity(), committed=is_commit), version)
            if not response.error_code and response.producer_id >= 0:
                self._uses(response.producer_id, response.producer_epoch)
            return name_of(response.error_code)

        self.added.clear()
        return self.retried(attempt)
