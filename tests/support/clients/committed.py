"""What readers of each isolation level get, and a transaction that nobody will end."""

from __future__ import annotations

import time
from itertools import count
from typing import Literal

import tidelog
from support.clusters.waiting import until
from tidelog.log.batch import encode
from tidelog.log.columns import Record
from tidelog.model.ids import NodeId, PartitionId, TopicId
from tidelog.replication.partition_transactions import ProducerTransaction
from tidelog.testing import MemoryCluster

COMMITTED: Literal["read_committed"] = "read_committed"
UNCOMMITTED: Literal["read_uncommitted"] = "read_uncommitted"
_names = count(1)
Isolation = Literal["read_committed", "read_uncommitted"]


def values(bootstrap: str, topic: str, isolation: Isolation = COMMITTED) -> list[bytes]:
    """All that this level returns up to the end that it sees, partition by partition."""
    with tidelog.Consumer(bootstrap, isolation=isolation) as consumer:
        places = consumer.partitions_for(topic)
        consumer.assign(places)
        consumer.seek_to_beginning()
        ends = consumer.end_offsets(*places)
        found: list[tidelog.ConsumerRecord] = []

        def is_at_end() -> bool:
            found.extend(consumer.poll(0.2))
            return all((consumer.position(place) or 0) >= ends[place] for place in places)

        until(is_at_end, f"the end of {topic}")
    return [record.value or b"" for record in sorted(found, key=lambda record: (record.partition, record.offset))]


def new_topic(cluster: MemoryCluster, *, partitions: int = 2, factor: int = 3) -> str:
    name = f"t{next(_names)}"
    with tidelog.Admin(cluster.bootstrap) as admin:
        admin.create_topic(name, partitions=partitions, replication_factor=factor)
    return name


def send_one(producer: tidelog.Producer, topic: str, value: bytes) -> None:
    """To each of two partitions."""
    for partition in (0, 1):
        producer.send(topic, value, partition=partition)


def state_of(cluster: MemoryCluster, transactional_id: str) -> str:
    with tidelog.Admin(cluster.bootstrap) as admin:
        return admin.describe_transaction(transactional_id).state


def coordinator_of(cluster: MemoryCluster, transactional_id: str) -> int:
    with tidelog.Admin(cluster.bootstrap) as admin:
        return admin.describe_transaction(transactional_id).coordinator


def hang(cluster: MemoryCluster, topic: str, value: bytes, *, producer_id: int = 999_999) -> int:
    """Append a batch of a transaction that no coordinator knows, as after the loss of a coordinator's log. Returns its
    offset."""
    offsets: list[int] = []

    def partition_and_leader() -> tuple[PartitionId, NodeId] | None:
        partition = PartitionId(TopicId(cluster._image().topic_ids[topic]), 0)
        leading = [node for node, broker in cluster._nodes.running.items() if broker.replicas.leader_of(partition)]
        return (partition, leading[0]) if leading else None

    found = until(lambda: cluster._do(partition_and_leader), f"{topic} has a leader")
    assert found is not None
    partition, node = found

    async def append() -> None:  # on the loop of the broker
        leader = cluster._nodes.running[node].replicas.leader_of(partition)
        assert leader is not None
        transaction = ProducerTransaction("nobody's")
        leader.transactions.answered(leader.transactions.ask(transaction, producer_id, 0), 1)
        batch = encode(
            [Record(0, int(time.time() * 1000), None, value, ())],
            producer_id=producer_id,
            producer_epoch=0,
            base_sequence=0,
            is_transactional=True,
        )
        offsets.append(leader.append(batch, transaction=transaction).last_offset)

    cluster._do(lambda: cluster._nodes.spawn(node, append(), "hang"))
    until(lambda: offsets, "the batch is appended")
    return offsets[0]
