"""ListTransactions, DescribeTransactions and WriteTxnMarkers against whole brokers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from support.brokers.cluster import RunningBroker
from support.brokers.transactions import append_open, transactional
from support.kafka.group_api import name_of
from support.kafka.transaction_api import KafkaOwner, WholeApi
from support.transactions.cluster import TransactionCluster

from tidelog.model.ids import NodeId, PartitionId
from tidelog.rpc.kafka.messages import transactions as messages
from tidelog.rpc.kafka.messages.data import DescribeProducersRequest, DescribeProducersTopicRequest, ProducerState
from tidelog.services.context import INTERNAL
from tidelog.services.transaction_requests import JoinTransaction

Place = tuple[str, int]
HANGING = 900_000
"""The first producer id that no coordinator knows."""


@pytest.fixture(scope="module")
def cluster() -> Iterator[TransactionCluster]:
    with TransactionCluster(seed=43, orders=8, transaction_partitions=3, offsets_partitions=1) as made:
        yield made


def begun(cluster: TransactionCluster, transactional_id: str, protocol: int = 2, **more: Any) -> KafkaOwner:
    owner = KafkaOwner(cluster, transactional_id, protocol=protocol, **more)
    assert owner.init() == ""
    return owner


# Listing.


def listed(cluster: TransactionCluster, version: int = 2, **filters: Any) -> dict[tuple[str, int], str]:
    """(transactional id, producer id): state, of all brokers; no filter of theirs is unknown."""
    found: dict[tuple[str, int], str] = {}
    for broker in cluster.brokers:
        response = WholeApi(cluster, broker).ask(messages.ListTransactionsRequest(**filters), version)
        assert (response.error_code, response.unknown_state_filters) == (0, [])
        for row in response.transaction_states:
            found[row.transactional_id, row.producer_id] = row.transaction_state
    return found


def test_transactions_are_listed_by_each_filter(cluster: TransactionCluster) -> None:
    opened, ended, empty = (begun(cluster, f"listed-{name}") for name in ("open", "ended", "empty"))
    assert opened.send(("orders", 0), b"x") == ""
    assert ended.send(("orders", 0), b"x") == ""
    assert ended.end() == ""
    cluster.until_idle(ended.transactional_id)
    wanted = {
        ("listed-open", opened.producer_id): "Ongoing",
        ("listed-ended", ended.producer_id): "CompleteCommit",
        ("listed-empty", empty.producer_id): "Empty",
    }
    for version in range(3):
        assert wanted.items() <= listed(cluster, version).items()
    by_pattern = listed(cluster, transactional_id_pattern="listed-.*")
    assert by_pattern == wanted
    assert listed(cluster, transactional_id_pattern="listed") == {}, "it matches the whole id"
    by_state = listed(cluster, state_filters=["Ongoing", "Empty"], transactional_id_pattern="listed-.*")
    assert set(by_state.values()) == {"Ongoing", "Empty"}
    assert listed(cluster, state_filters=["Dead"]) == {}
    assert listed(cluster, producer_id_filters=[ended.producer_id, 77_777]) == {
        ("listed-ended", ended.producer_id): "CompleteCommit"
    }
    cluster.world.run_for(1.5)
    long_open = listed(cluster, duration_filter=1_000, transactional_id_pattern="listed-.*")
    assert long_open == {("listed-open", opened.producer_id): "Ongoing"}
    assert listed(cluster, duration_filter=60_000, transactional_id_pattern="listed-.*") == {}
    assert opened.end() == ""


def test_a_filter_that_means_nothing_is_reported(cluster: TransactionCluster) -> None:
    api = WholeApi(cluster, 11)
    response = api.ask(messages.ListTransactionsRequest(state_filters=["Nonsense"]))
    assert (response.error_code, response.unknown_state_filters, response.transaction_states) == (0, ["Nonsense"], [])
    for pattern in ("(", "x" * 2_000):
        response = api.ask(messages.ListTransactionsRequest(transactional_id_pattern=pattern))
        assert name_of(response.error_code) == "INVALID_REGULAR_EXPRESSION"
        assert response.transaction_states == []


# Descriptions.


def described(cluster: TransactionCluster, name: str, broker: int | None = None) -> Any:
    node = cluster.coordinator_of(name) if broker is None else broker
    (row,) = (
        WholeApi(cluster, node).ask(messages.DescribeTransactionsRequest(transactional_ids=[name])).transaction_states
    )
    assert row.transactional_id == name
    return row


def test_a_description_has_the_state_the_producer_and_the_partitions(cluster: TransactionCluster) -> None:
    owner = begun(cluster, "described", timeout_ms=30_000)
    empty = described(cluster, "described")
    assert (empty.transaction_state, empty.transaction_start_time_ms, empty.topics) == ("Empty", -1, [])
    for number in (3, 1):
        assert owner.send(("orders", number), b"x") == ""
    row = described(cluster, "described")
    assert (row.error_code, row.transaction_state, row.transaction_timeout_ms) == (0, "Ongoing", 30_000)
    assert (row.producer_id, row.producer_epoch) == (owner.producer_id, owner.epoch)
    assert row.transaction_start_time_ms > 0
    assert [(topic.topic, topic.partitions) for topic in row.topics] == [("orders", [1, 3])]
    assert owner.end() == ""


def test_a_description_that_cannot_be_given_has_its_error(cluster: TransactionCluster) -> None:
    assert name_of(described(cluster, "nobody").error_code) == "TRANSACTIONAL_ID_NOT_FOUND"
    elsewhere = next(broker for broker in cluster.brokers if broker != cluster.coordinator_of("nobody"))
    row = described(cluster, "nobody", elsewhere)
    assert (name_of(row.error_code), row.producer_id, row.topics) == ("NOT_COORDINATOR", -1, [])
    assert name_of(described(cluster, "", 11).error_code) == "INVALID_REQUEST"


def test_a_member_of_a_joint_transaction_is_found_by_its_producer_id(cluster: TransactionCluster) -> None:
    """Else Kafka's tool would call its transaction hanging."""
    owner = begun(cluster, "joint")
    request = JoinTransaction(transactional_id="joint")
    reply = cluster.ask_owner("joint", lambda service: service.join(INTERNAL, request))
    member = KafkaOwner(cluster, "joint")
    member.producer_id, member.epoch = reply.producer_id, reply.epoch
    assert member.send(("orders", 5), b"x") == ""
    wanted = {("joint", owner.producer_id): "Ongoing", ("joint", reply.producer_id): "Ongoing"}
    assert listed(cluster, producer_id_filters=[owner.producer_id, reply.producer_id]) == wanted
    assert listed(cluster, transactional_id_pattern="joint") == {("joint", owner.producer_id): "Ongoing"}
    (topic,) = described(cluster, "joint").topics
    assert (topic.topic, topic.partitions) == ("orders", [5])
    assert owner.end(is_commit=False) == ""


# Hanging transactions.


def hang(cluster: TransactionCluster, place: Place, producer_id: int, *, epoch: int = 3) -> None:
    """Open a transaction in the log of the partition that its coordinator has forgotten."""
    partition = cluster.partition_id(*place)

    async def append(broker: RunningBroker) -> None:
        leading = broker.replicas.leader_of(partition)
        assert leading is not None
        append_open(leading, transactional(b"hanging", producer_id, epoch), producer_id, epoch)

    cluster.on_broker(cluster.leader(partition), append)
    cluster.until(lambda: cluster.last_stable(place)[1] == cluster.leading(partition).log.end_offset)


def producer(cluster: TransactionCluster, place: Place, producer_id: int) -> ProducerState:
    request = DescribeProducersRequest(
        topics=[DescribeProducersTopicRequest(name=place[0], partition_indexes=[place[1]])]
    )
    ((row,),) = [
        topic.partitions
        for topic in WholeApi(cluster, cluster.leader(cluster.partition_id(*place))).ask(request).topics
    ]
    (found,) = [each for each in row.active_producers if each.producer_id == producer_id]
    assert isinstance(found, ProducerState)
    return found


def abort(
    cluster: TransactionCluster,
    place: Place,
    producer_id: int,
    *,
    epoch: int = 3,
    broker: int | None = None,
    **more: Any,
) -> str:
    version = more.pop("version", 2)
    marker = messages.WritableTxnMarker(
        producer_id=producer_id,
        producer_epoch=epoch,
        topics=[messages.WritableTxnMarkerTopic(name=place[0], partition_indexes=[place[1]])],
        **more,
    )
    node = cluster.leader(cluster.partition_id(*place)) if broker is None else broker
    response = WholeApi(cluster, node).ask(messages.WriteTxnMarkersRequest(markers=[marker]), version)
    (result,) = response.markers
    assert result.producer_id == producer_id
    ((row,),) = [topic.partitions for topic in result.topics]
    assert row.partition_index == place[1]
    return name_of(row.error_code)


@pytest.mark.parametrize("version", [1, 2])
def test_a_hanging_transaction_is_aborted_once(cluster: TransactionCluster, version: int) -> None:
    place, producer_id = ("orders", version), HANGING + version
    hang(cluster, place, producer_id)
    stable, end = cluster.last_stable(place)
    assert stable < end
    assert producer(cluster, place, producer_id).current_txn_start_offset == stable
    assert abort(cluster, place, producer_id, version=version) == ""
    assert cluster.last_stable(place) == (end + 1, end + 1)
    row = producer(cluster, place, producer_id)
    assert (row.current_txn_start_offset, row.coordinator_epoch, row.producer_epoch) == (-1, 0, 3)
    assert abort(cluster, place, producer_id, version=version) == "", "a repeat succeeds"
    assert cluster.last_stable(place) == (end + 1, end + 1), "and changes nothing"


@pytest.mark.parametrize("protocol", [1, 2])
def test_a_transaction_that_a_coordinator_knows_is_not_aborted_by_a_marker(
    cluster: TransactionCluster, protocol: int
) -> None:
    owner = begun(cluster, f"alive-{protocol}", protocol)
    place = ("orders", 4)
    assert owner.send(place, b"x") == ""
    assert abort(cluster, place, owner.producer_id, epoch=owner.epoch) == "INVALID_TXN_STATE"
    assert abort(cluster, place, owner.producer_id, epoch=owner.epoch + 1) == "INVALID_PRODUCER_EPOCH"
    assert cluster.state_of(owner.transactional_id).is_open
    assert owner.end() == ""
    cluster.until_idle(owner.transactional_id)
    assert cluster.committed_values(place)[-1] == b"x"


def test_a_late_marker_does_not_abort_the_next_transaction(cluster: TransactionCluster) -> None:
    place, producer_id = ("orders", 6), HANGING + 10
    hang(cluster, place, producer_id)
    assert abort(cluster, place, producer_id) == ""
    hang(cluster, place, producer_id, epoch=4)
    before = cluster.last_stable(place)
    assert abort(cluster, place, producer_id) == "INVALID_PRODUCER_EPOCH"
    assert cluster.last_stable(place) == before
    assert abort(cluster, place, producer_id, epoch=4) == ""


def test_a_marker_of_a_client_that_makes_no_sense_changes_nothing(cluster: TransactionCluster) -> None:
    place, producer_id = ("orders", 7), HANGING + 20
    hang(cluster, place, producer_id)
    before = cluster.last_stable(place)
    assert abort(cluster, place, producer_id, transaction_result=True) == "INVALID_REQUEST"
    assert abort(cluster, place, producer_id + 1) == "INVALID_PRODUCER_ID_MAPPING"
    assert abort(cluster, place, producer_id, epoch=2) == "INVALID_PRODUCER_EPOCH"
    follower = next(broker for broker in cluster.brokers if broker != cluster.leader(cluster.partition_id(*place)))
    assert abort(cluster, place, producer_id, broker=follower) == "NOT_LEADER_OR_FOLLOWER"
    assert abort(cluster, ("not-there", 0), producer_id, broker=11) == "UNKNOWN_TOPIC_OR_PARTITION"
    internal = ("__transaction_state", 0)
    cluster.coordinator_of("any")
    assert abort(cluster, internal, producer_id) == "INVALID_TOPIC"
    many = messages.WritableTxnMarkerTopic(name="orders", partition_indexes=[7] * 101)
    request = messages.WriteTxnMarkersRequest(
        markers=[messages.WritableTxnMarker(producer_id=producer_id, topics=[many])]
    )
    (result,) = WholeApi(cluster, 11).ask(request).markers
    assert {name_of(row.error_code) for row in result.topics[0].partitions} == {"INVALID_REQUEST"}
    assert cluster.last_stable(place) == before
    assert abort(cluster, place, producer_id) == ""


def test_a_producer_that_writes_during_the_search_is_not_hanging(
    cluster: TransactionCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    place, producer_id = ("orders", 3), HANGING + 30
    hang(cluster, place, producer_id)
    partition = cluster.partition_id(*place)
    leader = cluster.brokers[NodeId(cluster.leader(partition))]
    search = leader.broker.transactions.search
    found = search.find

    async def find_slowly(producer: int, where: PartitionId) -> str | None:
        holder = await found(producer, where)
        leading = leader.replicas.leader_of(partition)
        assert leading is not None
        append_open(leading, transactional(b"alive", producer_id, 3, 1), producer_id, 3)
        return holder

    with monkeypatch.context() as patched:
        patched.setattr(search, "find", find_slowly)
        assert abort(cluster, place, producer_id) == "CONCURRENT_TRANSACTIONS"
    assert producer(cluster, place, producer_id).current_txn_start_offset >= 0
    assert abort(cluster, place, producer_id) == ""


def test_nothing_is_aborted_while_a_coordinator_does_not_answer() -> None:
    with TransactionCluster(seed=44, orders=1, transaction_partitions=3) as cluster:
        place, producer_id = ("orders", 0), HANGING
        cluster.coordinator_of("any")
        hang(cluster, place, producer_id)
        leader = cluster.leader(cluster.partition_id(*place))
        others = cluster.others_than(leader)
        for other in others:
            cluster.network.block(NodeId(leader), NodeId(other))
        assert abort(cluster, place, producer_id) == "COORDINATOR_NOT_AVAILABLE"
        assert producer(cluster, place, producer_id).current_txn_start_offset >= 0
        cluster.network.heal()
        cluster.until(lambda: abort(cluster, place, producer_id) == "", timeout=30)
