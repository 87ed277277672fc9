"""Transactional producers of the Kafka API, of both protocols, against whole brokers."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
from support.kafka.data_api import fetch_request, wanted
from support.kafka.group_api import name_of
from support.kafka.transaction_api import KafkaOwner, WholeApi
from support.transactions.cluster import TransactionCluster

from tidelog.log.batch import decode_columns, read_header
from tidelog.rpc.kafka.messages import transactions as messages
from tidelog.rpc.kafka.messages.data import ListOffsetsPartition, ListOffsetsRequest, ListOffsetsTopic, PartitionData
from tidelog.rpc.kafka.messages.groups import OffsetFetchRequest, OffsetFetchRequestGroup, OffsetFetchRequestTopics
from tidelog.rpc.kafka.messages.metadata import FindCoordinatorRequest

READ_UNCOMMITTED, READ_COMMITTED = 0, 1
Place = tuple[str, int]


@pytest.fixture(scope="module")
def cluster() -> Iterator[TransactionCluster]:
    with TransactionCluster(seed=41, orders=12, offsets_partitions=1) as made:
        yield made


@pytest.fixture(params=[1, 2])
def protocol(request: pytest.FixtureRequest) -> int:
    return int(request.param)


NEXT: list[int] = []


@pytest.fixture
def place(cluster: TransactionCluster) -> Place:
    """Of a topic that no other test writes to."""
    NEXT.append(0)
    name = f"place-{len(NEXT)}"
    cluster.topic(name, partitions=2)
    return name, 0


def row_of(cluster: TransactionCluster, place: Place, isolation: int, offset: int = 0) -> PartitionData:
    api = WholeApi(cluster, cluster.leader(cluster.partition_id(*place)))
    request = fetch_request(wanted(place[0], offset, partition=place[1]), isolation_level=isolation)
    ((row,),) = [topic.partitions for topic in api.ask(request, 12).responses]
    assert isinstance(row, PartitionData)
    assert row.error_code == 0
    return row


def read(cluster: TransactionCluster, place: Place, isolation: int = READ_COMMITTED) -> list[bytes | None]:
    """What a client of Kafka returns to its program: it skips the batches of aborted transactions."""
    values: list[bytes | None] = []
    skipped: set[int] = set()
    offset = 0
    while data := bytes((row := row_of(cluster, place, isolation, offset)).records or b""):  # type: ignore[arg-type]
        aborted = {one.first_offset: one.producer_id for one in row.aborted_transactions or ()}
        at = 0
        while at < len(data):
            header = read_header(data, at)
            if header.base_offset in aborted:
                skipped.add(aborted[header.base_offset])
            if header.is_control:
                skipped.discard(header.producer_id)
            elif not (header.is_transactional and header.producer_id in skipped):
                values += decode_columns(data, at, decompressed_bytes_max=1 << 20).values
            at += header.size
            offset = header.last_offset + 1
    return values


def latest(cluster: TransactionCluster, place: Place, isolation: int) -> int:
    api = WholeApi(cluster, cluster.leader(cluster.partition_id(*place)))
    asked = ListOffsetsPartition(partition_index=place[1], timestamp=-1)
    request = ListOffsetsRequest(
        replica_id=-1, isolation_level=isolation, topics=[ListOffsetsTopic(name=place[0], partitions=[asked])]
    )
    ((row,),) = [topic.partitions for topic in api.ask(request).topics]
    assert row.error_code == 0
    return int(row.offset)


def committed(cluster: TransactionCluster, group: str, place: Place, *, require_stable: bool = True) -> tuple[int, str]:
    """(offset, name of the error)."""
    topic = OffsetFetchRequestTopics(name=place[0], partition_indexes=[place[1]])
    request = OffsetFetchRequest(
        groups=[OffsetFetchRequestGroup(group_id=group, topics=[topic])], require_stable=require_stable
    )
    (found,) = WholeApi(cluster, cluster.coordinator(group)).ask(request, 8).groups
    assert found.error_code == 0
    (row,) = found.topics[0].partitions
    return row.committed_offset, name_of(row.error_code)


def begun(cluster: TransactionCluster, transactional_id: str, protocol: int, **more: Any) -> KafkaOwner:
    owner = KafkaOwner(cluster, transactional_id, protocol=protocol, **more)
    assert owner.init() == ""
    return owner


# The way of a good client.


@pytest.mark.requirement("a:H-02", "a:H-15", "a:H-20", "b:J-07", "b:J-08")
def test_records_of_a_transaction_are_read_together_once_it_is_committed(
    cluster: TransactionCluster, place: Place, protocol: int
) -> None:
    name = place[0]
    owner = begun(cluster, f"together-{name}", protocol)
    for number in range(2):
        assert owner.send((name, number), b"one") == ""
    assert [read(cluster, (name, number)) for number in range(2)] == [[], []]
    assert [read(cluster, (name, number), READ_UNCOMMITTED) for number in range(2)] == [[b"one"], [b"one"]]
    assert owner.end() == ""
    cluster.until_idle(owner.transactional_id)
    assert [read(cluster, (name, number)) for number in range(2)] == [[b"one"], [b"one"]]


@pytest.mark.requirement("a:H-20", "a:X3-39")
def test_a_reader_of_committed_data_skips_what_was_aborted_and_one_of_all_data_does_not(
    cluster: TransactionCluster, place: Place, protocol: int
) -> None:
    owner = begun(cluster, f"skips-{place[0]}", protocol)
    for value, is_commit in ((b"one", True), (b"two", False), (b"three", True)):
        assert owner.send(place, value) == ""
        assert owner.end(is_commit=is_commit) == ""
    cluster.until_idle(owner.transactional_id)
    assert read(cluster, place) == [b"one", b"three"]
    assert read(cluster, place, READ_UNCOMMITTED) == [b"one", b"two", b"three"]
    (aborted,) = row_of(cluster, place, READ_COMMITTED, 2).aborted_transactions or []
    assert (aborted.producer_id, aborted.first_offset) == (owner.producer_id, 2)
    assert row_of(cluster, place, READ_UNCOMMITTED, 2).aborted_transactions is None


@pytest.mark.requirement("b:J-09")
def test_the_latest_offset_of_committed_data_is_the_first_of_an_open_transaction(
    cluster: TransactionCluster, place: Place, protocol: int
) -> None:
    owner = begun(cluster, f"latest-{place[0]}", protocol)
    assert owner.send(place, b"one") == ""
    assert owner.end() == ""
    cluster.until_idle(owner.transactional_id)
    assert owner.send(place, b"two") == ""
    assert (latest(cluster, place, READ_COMMITTED), latest(cluster, place, READ_UNCOMMITTED)) == (2, 3)
    row = row_of(cluster, place, READ_COMMITTED)
    assert (row.last_stable_offset, row.high_watermark) == (2, 3)
    assert owner.end(is_commit=False) == ""
    cluster.until_idle(owner.transactional_id)
    assert (latest(cluster, place, READ_COMMITTED), latest(cluster, place, READ_UNCOMMITTED)) == (4, 4)


@pytest.mark.requirement("a:H-14")
def test_offsets_of_a_transaction_are_unstable_until_it_ends(
    cluster: TransactionCluster, place: Place, protocol: int
) -> None:
    group = f"group-{place[0]}"
    owner = begun(cluster, f"offsets-{place[0]}", protocol)
    assert owner.commit_offsets(group, {place: 7}) == ""
    assert committed(cluster, group, place) == (-1, "UNSTABLE_OFFSET_COMMIT")
    assert committed(cluster, group, place, require_stable=False) == (-1, "")
    assert owner.end() == ""
    cluster.until_idle(owner.transactional_id)
    assert committed(cluster, group, place) == (7, "")
    assert owner.commit_offsets(group, {place: 9}) == ""
    assert owner.end(is_commit=False) == ""
    cluster.until_idle(owner.transactional_id)
    assert committed(cluster, group, place) == (7, "")


def test_every_version_of_a_protocol_serves_a_whole_transaction(cluster: TransactionCluster, place: Place) -> None:
    for version in range(6):
        is_old = version < 5
        owner = KafkaOwner(cluster, f"versions-{place[0]}", protocol=1 if is_old else 2)
        assert owner.init(version=version) == ""
        value = b"%d" % version
        if is_old:
            assert owner.add(place, version=min(version, 3)) == [""]
            owner.added.add(place)
            assert owner.add_group("versions", version=min(version, 4)) == ""
        assert owner.send(place, value) == ""
        assert owner.commit_offsets("versions", {place: version}, version=version) == ""
        assert owner.end(version=version) == ""
        cluster.until_idle(owner.transactional_id)
        assert read(cluster, place)[-1] == value
        assert committed(cluster, "versions", place) == (version, "")
    owner = begun(cluster, f"versions-{place[0]}", 2)
    assert owner.commit_offsets("versions", {place: 6}, version=6) == ""
    assert owner.end() == ""
    cluster.until_idle(owner.transactional_id)
    assert committed(cluster, "versions", place) == (6, "")


def test_an_end_of_version_5_returns_the_next_epoch_and_an_older_one_keeps_it(
    cluster: TransactionCluster, place: Place
) -> None:
    new, old = begun(cluster, f"new-{place[0]}", 2), begun(cluster, f"old-{place[0]}", 1)
    for owner, raised in ((new, 1), (old, 0)):
        before = owner.producer_id, owner.epoch
        assert owner.send(place, b"one") == ""
        assert owner.end() == ""
        cluster.until_idle(owner.transactional_id)
        state = cluster.state_of(owner.transactional_id)
        assert (owner.producer_id, owner.epoch) == (before[0], before[1] + raised) == (state.producer_id, state.epoch)


def test_a_repeated_end_has_the_same_answer(cluster: TransactionCluster, place: Place, protocol: int) -> None:
    owner = begun(cluster, f"repeat-{place[0]}", protocol)
    assert owner.send(place, b"one") == ""
    request = messages.EndTxnRequest(**owner.identity(), committed=True)
    assert owner.end() == ""
    cluster.until_idle(owner.transactional_id)
    again = owner.ask(request)
    assert again.error_code == 0
    if protocol == 2:
        assert (again.producer_id, again.producer_epoch) == (owner.producer_id, owner.epoch)
    assert read(cluster, place) == [b"one"]


# Initialization.


@pytest.mark.requirement("a:H-32")
def test_the_coordinator_of_a_transactional_id_is_found_in_every_version(cluster: TransactionCluster) -> None:
    coordinator = cluster.coordinator_of("app")
    for version in range(1, 7):
        api = WholeApi(cluster, 12)
        if version < 4:
            row = api.ask(FindCoordinatorRequest(key="app", key_type=1), version)
        else:
            (row,) = api.ask(FindCoordinatorRequest(coordinator_keys=["app"], key_type=1), version).coordinators
            assert row.key == "app"
        assert (name_of(row.error_code), row.node_id, row.port) == ("", coordinator, 9092)
    (empty,) = WholeApi(cluster, 12).ask(FindCoordinatorRequest(coordinator_keys=[""], key_type=1)).coordinators
    assert (name_of(empty.error_code), empty.node_id) == ("INVALID_REQUEST", -1)


@pytest.mark.requirement("a:H-11", "a:H-35", "a:X3-37", "a:T-18")
@pytest.mark.parametrize("version", [0, 3, 5])
def test_a_new_instance_aborts_the_open_transaction_and_fences_the_one_before(
    cluster: TransactionCluster, place: Place, protocol: int, version: int
) -> None:
    """In the words that each version has for it."""
    old = begun(cluster, f"fenced-{place[0]}", protocol)
    assert old.send(place, b"lost") == ""
    new = KafkaOwner(cluster, old.transactional_id, protocol=protocol)
    first = new.ask(messages.InitProducerIdRequest(transactional_id=new.transactional_id, transaction_timeout_ms=1_000))
    assert name_of(first.error_code) == "CONCURRENT_TRANSACTIONS", "as Kafka: a client tries again"
    assert (first.producer_id, first.producer_epoch) == (-1, -1)
    assert new.init(version=version) == ""
    assert (new.producer_id, new.epoch > old.epoch) == (old.producer_id, True)
    assert old.send(place, b"late", version=11) == "INVALID_PRODUCER_EPOCH"
    assert old.send(place, b"late", version=12) == "INVALID_PRODUCER_EPOCH"
    for end_version, expected in ((0, "INVALID_PRODUCER_EPOCH"), (2, "PRODUCER_FENCED"), (5, "PRODUCER_FENCED")):
        assert old.end(version=end_version) == expected
    for version_added, expected in ((1, "INVALID_PRODUCER_EPOCH"), (2, "PRODUCER_FENCED")):
        assert old.add(place, version=version_added) == [expected]
        assert old.add_group("g", version=version_added) == expected
    assert old.commit_offsets("g", {place: 1}, version=5) == "INVALID_PRODUCER_EPOCH"
    for own_version, expected in ((3, "INVALID_PRODUCER_EPOCH"), (4, "PRODUCER_FENCED")):
        assert old.init(is_recovery=True, version=own_version) == expected
    assert read(cluster, place) == []
    assert new.send(place, b"kept") == ""
    assert new.end() == ""
    cluster.until_idle(new.transactional_id)
    assert read(cluster, place) == [b"kept"]


def test_a_producer_that_recovers_gets_the_next_epoch_of_its_own_id(
    cluster: TransactionCluster, place: Place, protocol: int
) -> None:
    owner = begun(cluster, f"recovers-{place[0]}", protocol)
    assert owner.send(place, b"lost") == ""
    before = owner.producer_id, owner.epoch
    assert owner.init(is_recovery=True) == ""
    assert owner.producer_id == before[0]
    assert owner.epoch > before[1]
    assert owner.send(place, b"kept") == ""
    assert owner.end() == ""
    cluster.until_idle(owner.transactional_id)
    assert read(cluster, place) == [b"kept"]


def test_an_initialization_that_makes_no_sense_changes_nothing(cluster: TransactionCluster) -> None:
    def ask(**more: Any) -> str:
        values: dict[str, Any] = {"transactional_id": "strange", "transaction_timeout_ms": 1_000} | more
        response = owner.ask(messages.InitProducerIdRequest(**values))
        assert (response.producer_id, response.producer_epoch) == (-1, -1)
        return name_of(response.error_code)

    owner = KafkaOwner(cluster, "strange")
    assert ask(transactional_id="") == "INVALID_REQUEST"
    assert ask(transactional_id="x" * 2_000) == "INVALID_REQUEST"
    for timeout_ms in (0, -1, 15 * 60_000 + 1):
        assert ask(transaction_timeout_ms=timeout_ms) == "INVALID_TRANSACTION_TIMEOUT"
    assert ask(producer_id=5) == "INVALID_REQUEST"
    assert ask(producer_epoch=5) == "INVALID_REQUEST"
    assert cluster.states_of("strange") == []
    other = next(broker for broker in cluster.brokers if broker != cluster.coordinator_of("strange"))
    request = messages.InitProducerIdRequest(transactional_id="strange", transaction_timeout_ms=1_000)
    assert name_of(owner.ask(request, broker=other).error_code) == "NOT_COORDINATOR"


# Time-outs.


@pytest.mark.requirement("a:H-22", "a:T-20", "a:X3-38")
def test_a_transaction_that_times_out_is_aborted_and_its_producer_goes_on(
    cluster: TransactionCluster, place: Place, protocol: int
) -> None:
    owner = begun(cluster, f"slow-{place[0]}", protocol, timeout_ms=2_000)
    assert owner.send(place, b"lost") == ""
    before = owner.epoch
    cluster.until(lambda: cluster.state_of(owner.transactional_id).is_open is False, timeout=30)
    cluster.until_idle(owner.transactional_id)
    for number in range(2):  # where it has written, and where it has not
        owner.added.add((place[0], number))
        assert owner.send((place[0], number), b"late") == "INVALID_PRODUCER_EPOCH"
    assert owner.commit_offsets("late", {place: 1}, version={1: 4, 2: 5}[protocol]) == "INVALID_PRODUCER_EPOCH"
    if protocol == 2:
        assert owner.end() == "PRODUCER_FENCED", "as Kafka: Streams goes on after it"
        assert owner.end(is_commit=False) == "", "one that has heard of it by a record goes on"
        assert owner.epoch > before
    else:
        assert owner.end() == "PRODUCER_FENCED"
        assert owner.init(is_recovery=True) == ""
    assert owner.send(place, b"kept") == ""
    assert owner.end() == ""
    cluster.until_idle(owner.transactional_id)
    assert read(cluster, place) == [b"kept"]


# Requests in a wrong state.


def test_requests_without_an_open_transaction_get_their_error(cluster: TransactionCluster, place: Place) -> None:
    old, new = begun(cluster, f"closed-1-{place[0]}", 1), begun(cluster, f"closed-2-{place[0]}", 2)
    assert old.end() == "INVALID_TXN_STATE"
    assert new.end() == "INVALID_TXN_STATE"
    assert new.end(is_commit=False) == "", "an abort of nothing raises the epoch"
    for version, expected in ((10, "INVALID_TXN_STATE"), (11, "TRANSACTION_ABORTABLE")):
        old.added.add(place)
        assert old.send(place, b"never", version=version) == expected
    for version, expected in ((3, "INVALID_TXN_STATE"), (4, "TRANSACTION_ABORTABLE")):
        assert old.commit_offsets("closed", {place: 1}, version=version) == expected
    assert read(cluster, place, READ_UNCOMMITTED) == []
    assert committed(cluster, "closed", place) == (-1, "")


def test_an_id_that_nobody_has_initialized_and_a_foreign_producer_are_rejected(
    cluster: TransactionCluster, place: Place
) -> None:
    nobody, foreign = KafkaOwner(cluster, "nobody"), begun(cluster, f"mine-{place[0]}", 2)
    nobody.producer_id, nobody.epoch = 77, 0
    foreign.producer_id += 1_000_000
    for owner in (nobody, foreign):
        assert owner.add(place, version=3) == ["INVALID_PRODUCER_ID_MAPPING"]
        assert owner.add_group("g", version=3) == "INVALID_PRODUCER_ID_MAPPING"
        assert owner.end() == "INVALID_PRODUCER_ID_MAPPING"
        assert owner.send(place, b"never") == "INVALID_PRODUCER_ID_MAPPING"
        assert owner.commit_offsets("g", {place: 1}) == "INVALID_PRODUCER_ID_MAPPING"
    assert read(cluster, place, READ_UNCOMMITTED) == []
    assert not cluster.state_of(foreign.transactional_id).is_open


def test_a_partition_that_cannot_be_added_keeps_the_others_out(cluster: TransactionCluster, place: Place) -> None:
    owner = begun(cluster, f"partitions-{place[0]}", 1)
    errors = owner.add(place, ("not-there", 0), (place[0], 9), (place[0], 1))
    unknown, skipped = "UNKNOWN_TOPIC_OR_PARTITION", "OPERATION_NOT_ATTEMPTED"
    assert errors == [skipped, unknown, unknown, skipped]
    assert not cluster.state_of(owner.transactional_id).is_open
    assert owner.add() == []
    assert not cluster.state_of(owner.transactional_id).is_open
    assert owner.add(place, place) == ["", ""]
    assert cluster.state_of(owner.transactional_id).partitions == {cluster.partition_id(*place)}


def test_an_internal_topic_is_no_part_of_a_transaction(cluster: TransactionCluster, place: Place) -> None:
    """Its marker could never be written, and the transaction would never end."""
    owner = begun(cluster, f"internal-{place[0]}", 1)
    assert owner.add_group("internal") == ""
    assert owner.end(is_commit=False) == ""
    cluster.until_idle(owner.transactional_id)
    for topic in ("__transaction_state", "__consumer_offsets"):
        assert owner.add(place, (topic, 0)) == ["OPERATION_NOT_ATTEMPTED", "INVALID_TOPIC"]
        assert owner.send((topic, 0), b"never", version=11) == "INVALID_TOPIC"
    new = begun(cluster, f"internal-2-{place[0]}", 2)
    assert new.send(("__transaction_state", 0), b"never") == "INVALID_TOPIC"
    assert batched(new, ("__transaction_state", 0), verify_only=False) == ["INVALID_TOPIC"]
    assert batched(new, ("__consumer_offsets", 0), verify_only=False) == [""]
    for each in (owner, new):
        assert each.end(is_commit=False) in ("", "INVALID_TXN_STATE")
        cluster.until_idle(each.transactional_id)


def test_a_transaction_of_too_many_partitions_is_rejected_and_may_end(
    cluster: TransactionCluster, place: Place
) -> None:
    old, new = begun(cluster, f"large-1-{place[0]}", 1), begun(cluster, f"large-2-{place[0]}", 2)
    for owner in (old, new):
        shard = cluster.shard_of(owner.transactional_id)
        before = shard.machine.limits
        shard.machine.limits = replace(before, partitions_max=2)
        try:
            assert owner.send(place, b"one") == ""
            if owner is old:
                assert owner.add(("orders", 0), ("orders", 1)) == ["POLICY_VIOLATION"] * 2
            else:
                assert owner.send(("orders", 0), b"one") == ""
                assert owner.send(("orders", 1), b"one") == "POLICY_VIOLATION"
        finally:
            shard.machine.limits = before
        assert owner.end() == ""
        cluster.until_idle(owner.transactional_id)
    assert read(cluster, place) == [b"one", b"one"]


def test_a_transaction_of_one_protocol_is_not_ended_by_the_other(cluster: TransactionCluster, place: Place) -> None:
    old, new = begun(cluster, f"mixed-1-{place[0]}", 1), begun(cluster, f"mixed-2-{place[0]}", 2)
    for owner, wrong in ((old, 5), (new, 4)):
        assert owner.send(place, b"one") == ""
        assert owner.end(version=wrong) == "INVALID_TXN_STATE"
        assert cluster.state_of(owner.transactional_id).is_open
        assert owner.end(is_commit=False) == ""
        cluster.until_idle(owner.transactional_id)
    assert read(cluster, place) == []


def test_offsets_of_unknown_groups_members_and_partitions_are_not_committed(
    cluster: TransactionCluster, place: Place
) -> None:
    owner = begun(cluster, f"members-{place[0]}", 2)
    member = {"member_id": "gone", "generation_id_or_member_epoch": 3}
    assert owner.commit_offsets("no-such-group", {place: 1}, **member, version=5) == "ILLEGAL_GENERATION"
    assert owner.commit_offsets("no-such-group", {place: 1}, **member, version=6) == "GROUP_ID_NOT_FOUND"
    rows = owner.commit_rows("partly", {place: 1, ("not-there", 0): 1, (place[0], 9): 1})
    assert rows == ["", "UNKNOWN_TOPIC_OR_PARTITION", "UNKNOWN_TOPIC_OR_PARTITION"]
    assert owner.commit_rows("partly", {("not-there", 0): 1}, version=6) == ["UNKNOWN_TOPIC_ID"]
    assert owner.commit_rows("partly", {}) == []
    assert owner.end() == ""
    cluster.until_idle(owner.transactional_id)
    assert committed(cluster, "partly", place) == (1, "")
    assert committed(cluster, "no-such-group", place) == (-1, "")


# Requests of brokers.


def batched(owner: KafkaOwner, *places: Place, verify_only: bool, version: int = 5) -> list[str]:
    transaction = messages.AddPartitionsToTxnTransaction(
        **owner.identity(),
        verify_only=verify_only,
        topics=[messages.AddPartitionsToTxnTopic(name=name, partitions=[number]) for name, number in places],
    )
    response = owner.ask(messages.AddPartitionsToTxnRequest(transactions=[transaction]), version)
    assert response.error_code == 0
    (result,) = response.results_by_transaction
    assert result.transactional_id == owner.transactional_id
    return [name_of(row.partition_error_code) for topic in result.topic_results for row in topic.results_by_partition]


def test_a_batched_request_verifies_for_old_clients_and_adds_for_new_ones(
    cluster: TransactionCluster, place: Place
) -> None:
    old, new = begun(cluster, f"batch-1-{place[0]}", 1), begun(cluster, f"batch-2-{place[0]}", 2)
    assert batched(old, place, verify_only=True, version=4) == ["INVALID_TXN_STATE"]
    assert batched(old, place, verify_only=True) == ["TRANSACTION_ABORTABLE"]
    assert old.add(place) == [""]
    assert batched(old, place, verify_only=True) == [""]
    assert batched(new, place, verify_only=False) == [""]
    state = cluster.state_of(new.transactional_id)
    assert state.version == 2
    assert state.partitions == {cluster.partition_id(*place)}
    new.epoch += 1
    assert batched(new, place, verify_only=False) == ["PRODUCER_FENCED"]
