"""Exercises of the sources about clients and groups, on real processes: what the simulated ones prove, once more.

One cluster of three serves all. Nodes are frozen here and come back within the long session that this cluster has, so
that nobody else takes over meanwhile. Each test leaves it whole.
"""

from __future__ import annotations

import struct
import time
from collections.abc import Iterator, Sequence
from functools import partial
from typing import NamedTuple

import pytest
from exercises import Door, Program, Worker, make, records_of, with_client
from patience import DEADLINE_S, until
from procedures import partitions

import tidelog
from tidelog.client.cluster import ClusterClient
from tidelog.client.consumer_errors import DeserializationError, SubscriptionError
from tidelog.client.errors import DeliveryTimeoutError, SerializationError
from tidelog.client.partitioners import partition_of
from tidelog.client.record import TopicPartition
from tidelog.model.errors import ErrorCode, RecordTooLargeError, TidelogError
from tidelog.rpc.door import method_named
from tidelog.rpc.v1 import log_pb2
from tidelog.testing import LocalCluster

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(180)]

FROZEN_MS = 30_000
"""How long a frozen node stays who it is."""
_INIT = method_named("Log", "InitProducerId")


@pytest.fixture(scope="module")
def cluster() -> Iterator[LocalCluster]:
    settings = {"broker.session.timeout.ms": FROZEN_MS, "replica.lag.time.max.ms": FROZEN_MS}
    with LocalCluster(nodes=3, settings=settings) as made:
        yield made


@pytest.fixture(scope="module")
def admin(cluster: LocalCluster) -> Iterator[tidelog.Admin]:
    with tidelog.Admin(cluster.bootstrap) as made:
        yield made


@pytest.fixture
def programs() -> Iterator[list[Program]]:
    made: list[Program] = []
    yield made
    for program in made:
        program.end()


class Roles(NamedTuple):
    leader: int
    """It is the active controller, so that it can do without any one of the others."""
    follower: int
    third: int
    at: str
    """The leader's address: who is frozen is not asked."""


def roles(cluster: LocalCluster, admin: tidelog.Admin) -> Roles:
    leader = admin.describe_quorum().leader
    assert leader is not None
    follower, third = (number for number in (1, 2, 3) if number != leader)
    return Roles(leader, follower, third, f"localhost:{cluster.ports(leader).grpc}")


def fill(cluster: LocalCluster, topic: str, count: int, *, partitions: int = 1, first: int = 0) -> None:
    """Numbered records in each partition; one batch in each."""
    with tidelog.Producer(cluster.bootstrap, linger_ms=200) as producer:
        for number in range(first, first + count):
            for partition in range(partitions):
                producer.send(topic, str(number), partition=partition)


# What producers send.


class Customer(NamedTuple):
    id: int
    name: str | None


class CustomerSerializer:
    """The id, the size of the name, the name; without a name its size is 0."""

    def serialize(self, _topic: str, data: Customer | None) -> bytes | None:
        if data is None:
            return None
        name = (data.name or "").encode()
        return struct.pack(">ii", data.id, len(name)) + name

    def deserialize(self, _topic: str, data: bytes) -> Customer:
        if len(data) < 8:
            raise ValueError(f"{len(data)} bytes are too few")
        number, size = struct.unpack_from(">ii", data)
        return Customer(number, data[8 : 8 + size].decode() or None)


@pytest.mark.source("b:EX-10")
def test_a_serializer_of_ones_own_goes_there_and_back_and_too_few_bytes_are_told(
    cluster: LocalCluster, admin: tidelog.Admin
) -> None:
    topic = make(admin, "customers")
    sent = [Customer(7, "Ann"), Customer(8, None), None, Customer(9, "Zoë")]
    with tidelog.Producer(cluster.bootstrap, value_serializer=CustomerSerializer()) as producer:
        for customer in sent:
            producer.send(topic, customer)
        with pytest.raises(SerializationError, match="of type str"):
            producer.send(topic, "no customer")
    with tidelog.Producer(cluster.bootstrap) as producer:
        producer.send(topic, b"short").result(DEADLINE_S)
    stored = [record.value for record in records_of(cluster, topic)]
    assert [None if value is None else len(value) for value in stored] == [11, 8, None, 12, 5]
    place = TopicPartition(topic, 0)
    with tidelog.Consumer(
        cluster.bootstrap, auto_offset_reset="earliest", value_deserializer=CustomerSerializer()
    ) as consumer:
        consumer.assign([place])
        assert [record.value for record in _read(consumer, 4)] == sent
        with pytest.raises(DeserializationError, match=r"offset 4 .*5 bytes are too few") as told:
            consumer.poll(30_000)
        assert (told.value.partition, told.value.offset) == (place, 4)


@pytest.mark.source("b:EX-36")
def test_a_key_has_one_place_until_partitions_are_added_and_what_is_stored_stays(
    cluster: LocalCluster, admin: tidelog.Admin
) -> None:
    topic = make(admin, "grown", 3)
    keys = [f"user-{number}" for number in range(40)]
    with tidelog.Producer(cluster.bootstrap, metadata_max_age_ms=100) as producer:

        def places() -> dict[str, int]:
            sent = {key: producer.send(topic, "v", key=key) for key in keys}
            return {key: delivery.result(DEADLINE_S).partition for key, delivery in sent.items()}

        before = places()
        assert places() == before == {key: partition_of(key.encode(), 3) for key in keys}
        stored = records_of(cluster, topic)
        admin.add_partitions({topic: 5})
        until(lambda: producer.partitions_for(topic) == [0, 1, 2, 3, 4], "the producer has noticed")
        after = places()
    assert after == {key: partition_of(key.encode(), 5) for key in keys}
    assert {after[key] for key in keys if after[key] != before[key]} >= {3, 4}
    now = records_of(cluster, topic)
    assert len(now) == 120
    for number in range(3):
        old = [record for record in stored if record.partition == number]
        assert [record for record in now if record.partition == number][: len(old)] == old


@pytest.mark.source("a:X3-48")
def test_a_record_that_is_too_large_is_refused_at_once_and_its_compressed_size_counts(
    cluster: LocalCluster, admin: tidelog.Admin
) -> None:
    topic = make(admin, "sized", max_message_bytes=2_000)
    with tidelog.Producer(cluster.bootstrap, delivery_timeout_ms=600_000) as producer:
        producer.send(topic, b"small").result(DEADLINE_S)  # from here on its leader is known
        retries = producer.metrics()["retries"]
        with pytest.raises(TidelogError) as refused:
            producer.send(topic, bytes(50_000)).result(DEADLINE_S)
        assert refused.value.code is ErrorCode.MESSAGE_TOO_LARGE
        assert not refused.value.retriable
        with pytest.raises(RecordTooLargeError, match="max_request_size"):
            producer.send(topic, bytes(2 << 20))
        assert producer.metrics()["retries"] == retries
    with tidelog.Producer(cluster.bootstrap, compression="gzip") as producer:
        producer.send(topic, bytes(50_000)).result(DEADLINE_S)
    assert [record.value for record in records_of(cluster, topic)] == [b"small", bytes(50_000)]


@pytest.mark.source("a:X3-26")
def test_a_gap_in_the_sequence_is_refused_and_a_repeat_is_answered_with_where_it_is(
    cluster: LocalCluster, admin: tidelog.Admin
) -> None:
    topic = make(admin, "sequences")

    async def job(client: ClusterClient) -> None:
        door = Door(client, topic)
        leader = await door.leader()
        made = await client.call(_INIT, log_pb2.InitProducerIdRequest())
        me = {"producer_id": made.producer_id, "producer_epoch": made.producer_epoch}
        for number in range(3):
            assert await door.produce(leader, b"%d" % number, base_sequence=number, **me) == (number, None)
        _, refusal = await door.produce(leader, b"27", base_sequence=27, **me)
        assert refusal is ErrorCode.OUT_OF_ORDER_SEQUENCE_NUMBER
        assert await door.produce(leader, b"2", base_sequence=2, **me) == (2, None), "a repeat: where it is"
        assert await door.produce(leader, b"3", base_sequence=3, **me) == (3, None)

    with_client(cluster.bootstrap, job)
    assert [record.value for record in records_of(cluster, topic)] == [b"0", b"1", b"2", b"3"]


@pytest.mark.source("a:X3-27", "b:EX-33")
def test_a_batch_that_failed_comes_after_the_next_one_unless_both_have_sequences(
    cluster: LocalCluster, admin: tidelog.Admin
) -> None:
    """The first batch fails: it meets a broker that does not lead."""
    without, with_ = make(admin, "reversed"), make(admin, "kept-in-order")

    async def job(client: ClusterClient) -> None:
        door = Door(client, without)
        leader = await door.leader()
        other = leader % 3 + 1
        assert (await door.produce(other, b"first"))[1] is ErrorCode.NOT_LEADER_OR_FOLLOWER
        assert await door.produce(leader, b"second") == (0, None)
        assert await door.produce(leader, b"first") == (1, None)
        door = Door(client, with_)
        leader = await door.leader()
        other = leader % 3 + 1
        made = await client.call(_INIT, log_pb2.InitProducerIdRequest())
        me = {"producer_id": made.producer_id, "producer_epoch": made.producer_epoch}
        assert await door.produce(leader, b"before", base_sequence=0, **me) == (0, None)
        assert (await door.produce(other, b"first", base_sequence=1, **me))[1] is ErrorCode.NOT_LEADER_OR_FOLLOWER
        _, refusal = await door.produce(leader, b"second", base_sequence=2, **me)
        assert refusal is ErrorCode.OUT_OF_ORDER_SEQUENCE_NUMBER
        assert await door.produce(leader, b"first", base_sequence=1, **me) == (1, None)
        assert await door.produce(leader, b"second", base_sequence=2, **me) == (2, None)

    with_client(cluster.bootstrap, job)
    assert [record.value for record in records_of(cluster, without)] == [b"second", b"first"]
    assert [record.value for record in records_of(cluster, with_)] == [b"before", b"first", b"second"]


@pytest.mark.case("C2")
@pytest.mark.case("C4")
@pytest.mark.source("b:EX-33")
def test_what_was_stored_and_not_answered_is_sent_again_and_stands_there_once_in_order(
    cluster: LocalCluster, admin: tidelog.Admin
) -> None:
    """A follower is frozen: the leader stores and cannot acknowledge, so that every request ends without an answer.

    A third producer gives up meanwhile, and goes on with another topic: nothing of the one is found in the other."""
    leader, follower, third, at = roles(cluster, admin)
    topics = {in_flight: make(admin, f"unanswered-{in_flight}", replicas=(leader, follower)) for in_flight in (1, 5)}
    given_up = make(admin, "given-up", replicas=(leader, follower))
    elsewhere = make(admin, "elsewhere", replicas=(leader, third))
    patient = {"request_timeout_ms": 700, "delivery_timeout_ms": 120_000, "batch_size": 0}
    hasty = {"request_timeout_ms": 700, "delivery_timeout_ms": 1_500}
    values = [b"%d" % number for number in range(12)]
    with (
        tidelog.Producer(at, max_in_flight=1, **patient) as one,
        tidelog.Producer(at, max_in_flight=5, **patient) as five,
        tidelog.Producer(at, **hasty) as third_producer,
    ):
        producers = {1: one, 5: five}
        for in_flight, producer in producers.items():
            producer.send(topics[in_flight], b"warm").result(DEADLINE_S)
        third_producer.send(given_up, b"warm").result(DEADLINE_S)
        cluster.freeze(follower)
        try:
            sent = {
                in_flight: [producer.send(topics[in_flight], value) for value in values]
                for in_flight, producer in producers.items()
            }
            lost = [third_producer.send(given_up, b"given up %d" % number) for number in range(20)]
            for delivery in lost:
                with pytest.raises(DeliveryTimeoutError):
                    delivery.result(DEADLINE_S)
            moved = [third_producer.send(elsewhere, b"elsewhere %d" % number) for number in range(20)]
            assert [delivery.result(DEADLINE_S).offset for delivery in moved] == list(range(20))
            for in_flight, producer in producers.items():
                until(lambda producer=producer: producer.metrics()["retries"] >= 1, "it is sent again")  # type: ignore[misc]
                (file,) = cluster.path(leader).rglob(f"{topics[in_flight]}.*-0/*.log")
                assert values[0] in file.read_bytes(), "it is stored all the while"
                assert not any(delivery.done() for delivery in sent[in_flight]), "and nobody has said so"
        finally:
            cluster.thaw(follower)
        for deliveries in sent.values():
            assert [delivery.result(DEADLINE_S).offset for delivery in deliveries] == list(range(1, 13))
    for topic in topics.values():
        assert [record.value for record in records_of(cluster, topic)] == [b"warm", *values]
    left = [record.value for record in records_of(cluster, given_up)]
    assert left[0] == b"warm"
    assert left[1:] == [b"given up %d" % number for number in range(len(left) - 1)], "once, in order, as far as it came"
    assert [record.value for record in records_of(cluster, elsewhere)] == [b"elsewhere %d" % n for n in range(20)]


@pytest.mark.source("a:X3-28")
def test_a_record_is_given_to_nobody_before_all_in_sync_replicas_have_it(
    cluster: LocalCluster, admin: tidelog.Admin
) -> None:
    leader, follower, _, at = roles(cluster, admin)
    topic = make(admin, "committed-only", replicas=(leader, follower))
    place = TopicPartition(topic, 0)
    with (
        tidelog.Producer(at, acks=1) as producer,
        tidelog.Consumer(at, auto_offset_reset="earliest") as consumer,
    ):
        consumer.assign([place])
        producer.send(topic, b"seen").result(DEADLINE_S)
        assert [record.value for record in until(lambda: consumer.poll(1_000), "the first record")] == [b"seen"]
        cluster.freeze(follower)
        try:
            assert producer.send(topic, b"not yet").result(DEADLINE_S).offset == 1, "the leader has it"
            assert consumer.poll(1_500) == []
            assert consumer.end_offsets(place) == {place: 1}
            (row,) = partitions(at, topic)
            assert sorted(row.isr) == sorted((leader, follower)), "the one that lacks it still counts"
        finally:
            cluster.thaw(follower)
        assert [record.value for record in until(lambda: consumer.poll(1_000), "the second")] == [b"not yet"]


# What consumers fetch.


@pytest.mark.source("a:X3-50", "b:EX-37")
def test_a_fetch_ends_with_its_bytes_or_its_time_whichever_comes_first(
    cluster: LocalCluster, admin: tidelog.Admin
) -> None:
    topic = make(admin, "waited-for")
    place = TopicPartition(topic, 0)
    long_ms = 45_000
    with (
        tidelog.Producer(cluster.bootstrap) as producer,
        tidelog.Consumer(cluster.bootstrap, auto_offset_reset="earliest", fetch_min_bytes=1 << 20,
                         fetch_max_wait_ms=100) as quick,
        tidelog.Consumer(cluster.bootstrap, auto_offset_reset="earliest", fetch_min_bytes=1 << 20,
                         fetch_max_wait_ms=long_ms) as patient,
    ):  # fmt: skip
        producer.send(topic, b"little").result(DEADLINE_S)

        async def job(client: ClusterClient) -> None:
            door = Door(client, topic)
            size, took_s = await door.fetch(0, min_bytes=1 << 20, max_wait_ms=100)
            assert 0 < size < 1_000, "what there is,"
            assert 0.099 < took_s < long_ms / 1000, "after its time"
            assert (await door.fetch(0, min_bytes=1, max_wait_ms=long_ms))[1] < long_ms / 1000, "there is enough"
            size, took_s = await door.fetch(1, min_bytes=1, max_wait_ms=500)
            assert (size, took_s > 0.499) == (0, True), "nothing to read: as long as the default says"

        with_client(cluster.bootstrap, job)
        quick.assign([place])
        patient.assign([place])
        began_s = time.monotonic()
        assert [record.value for record in until(lambda: quick.poll(5_000), "a megabyte never comes")] == [b"little"]
        assert patient.poll(1_500) == [], "it waits for its megabyte"
        large = [producer.send(topic, bytes(600_000)) for _ in range(2)]
        assert [delivery.result(DEADLINE_S).offset for delivery in large] == [1, 2]
        assert [record.offset for record in _read(patient, 2)] == [0, 1], "as much as fits into its megabyte"
        assert time.monotonic() - began_s < long_ms / 1000, "its bytes came first"


def _read(consumer: tidelog.Consumer, count: int) -> list[tidelog.ConsumerRecord]:
    found: list[tidelog.ConsumerRecord] = []

    def is_read() -> bool:
        found.extend(consumer.poll(1_000))
        return len(found) >= count

    until(is_read, f"{count} records")
    return found


@pytest.mark.source("b:EX-19")
def test_a_consumer_without_a_group_takes_what_it_names_and_notices_no_new_partition(
    cluster: LocalCluster, admin: tidelog.Admin
) -> None:
    topic = make(admin, "stand-alone", 2)
    fill(cluster, topic, 5, partitions=2)
    options = {"group": "stand-alone", "auto_offset_reset": "earliest", "enable_auto_commit": False}
    with tidelog.Consumer(cluster.bootstrap, metadata_max_age_ms=100, **options) as consumer:
        names = consumer.partitions_for(topic)
        assert names == [TopicPartition(topic, 0), TopicPartition(topic, 1)]
        consumer.assign(names)
        with pytest.raises(SubscriptionError):
            consumer.subscribe([topic])
        assert len(_read(consumer, 10)) == 10
        consumer.commit()
        kept = {name: row.committed.offset for name, row in admin.group_offsets("stand-alone").items()}
        assert kept == dict.fromkeys(names, 5)
        admin.add_partitions({topic: 3})
        until(lambda: len(consumer.partitions_for(topic)) == 3, "it could know of the third")
        with tidelog.Producer(cluster.bootstrap) as producer:
            until(lambda: producer.partitions_for(topic) == [0, 1, 2], "the producer knows")
            producer.send(topic, b"unread", partition=2).result(DEADLINE_S)
            producer.send(topic, b"read", partition=0).result(DEADLINE_S)
        assert [record.value for record in _read(consumer, 1)] == [b"read"]
        assert consumer.poll(600) == []
        assert consumer.assignment() == set(names)
    with tidelog.Consumer(cluster.bootstrap, **options) as again:
        again.assign(names)
        assert [record.value for record in _read(again, 1)] == [b"read"], "it goes on where it had committed"


# Groups.


def _names(topic: str, count: int) -> set[TopicPartition]:
    return {TopicPartition(topic, number) for number in range(count)}


def _is_dealt(members: Sequence[tidelog.Consumer], wanted: list[int], topic: str) -> bool:
    """Whether they hold so many, sorted, and all partitions are held once. Polls each."""
    for member in members:
        member.poll(20)
    held = [member.assignment() for member in members]
    return sorted(map(len, held)) == wanted and set().union(*held) == _names(topic, sum(wanted))


@pytest.mark.source("b:EX-12")
def test_a_group_of_one_two_four_and_five_shares_four_partitions(cluster: LocalCluster, admin: tidelog.Admin) -> None:
    topic, ten = make(admin, "scaled", 4), make(admin, "scaled-ten", 10)
    fill(cluster, topic, 5, partitions=4)
    options = {"auto_offset_reset": "earliest", "max_poll_records": 1}
    members: list[tidelog.Consumer] = []
    try:
        for wanted in ([4], [2, 2], [1, 1, 1, 1], [0, 1, 1, 1, 1]):
            while len(members) < len(wanted):
                members.append(tidelog.Consumer(cluster.bootstrap, group="g1", **options))
                members[-1].subscribe([topic])
            until(lambda wanted=wanted: _is_dealt(members, wanted, topic), f"{len(wanted)} have {wanted}")  # type: ignore[misc]
    finally:
        for member in members:
            member.close()
    with tidelog.Consumer(cluster.bootstrap, group="g2", auto_offset_reset="earliest") as other:
        other.subscribe([topic])
        found = _read(other, 20)
        assert len({(record.partition, record.offset) for record in found}) == len(found) == 20, "all, whoever read it"
    with tidelog.Consumer(cluster.bootstrap, group="g1", **options) as one:
        one.subscribe([ten])
        until(lambda: _is_dealt([one], [10], ten), "one has ten")
        with tidelog.Consumer(cluster.bootstrap, group="g1", **options) as two:
            two.subscribe([ten])
            until(lambda: _is_dealt([one, two], [5, 5], ten), "each has five")


@pytest.mark.source("b:EX-20")
def test_a_pattern_takes_in_a_topic_that_is_made_later(cluster: LocalCluster, admin: tidelog.Admin) -> None:
    make(admin, "test.one")
    make(admin, "no-test.one")
    with tidelog.Consumer(cluster.bootstrap, group="patterned", auto_offset_reset="earliest") as consumer:
        consumer.subscribe(pattern="test.*")
        until(lambda: _is_dealt([consumer], [1], "test.one"), "it has the first")
        make(admin, "test.two")
        with tidelog.Producer(cluster.bootstrap) as producer:
            for topic in ("no-test.one", "test.two", "test.one"):
                producer.send(topic, topic).result(DEADLINE_S)
        assert sorted(record.topic for record in _read(consumer, 2)) == ["test.one", "test.two"]
        assert consumer.assignment() == {TopicPartition("test.one", 0), TopicPartition("test.two", 0)}


@pytest.mark.source("b:EX-15")
def test_a_planned_hand_over_with_commits_in_the_callback_loses_nothing_and_repeats_nothing(
    cluster: LocalCluster, admin: tidelog.Admin
) -> None:
    topic, count = make(admin, "handed-over", 4), 4 * 250
    fill(cluster, topic, 250, partitions=4)
    events: list[tuple[str, object, int, int]] = []
    workers: list[Worker] = []
    try:
        workers.append(Worker(cluster, topic, events))
        until(lambda: len(workers[0].handled) > 40, "the first one works")
        workers.append(Worker(cluster, topic, events))
        until(lambda: len(workers[1].handled) > 40, "the second one works")
        workers[0].close()
        until(lambda: sum(len(worker.handled) for worker in workers) >= count, "all is handled")
    finally:
        for worker in workers:
            worker.close()
    assert [worker.error for worker in workers] == [None, None]
    assert len(workers[0].handled) < count, "there was something to hand over"
    handled = [row for worker in workers for row in worker.handled]
    assert sorted(handled) == [(number, offset) for number in range(4) for offset in range(250)]
    owners: dict[int, object] = {}
    for what, who, partition, _ in events:
        if what == "assigned":
            assert partition not in owners, "the old owner's callback was over"
            owners[partition] = who
        elif what == "revoked":
            assert owners.pop(partition) is who
        else:
            assert owners[partition] is who, "assigned before its first record, and not revoked yet"


@pytest.mark.case("C5")
@pytest.mark.source("b:EX-14", "b:EX-17")
def test_each_way_to_commit_repeats_or_loses_what_it_may_and_nothing_else(
    cluster: LocalCluster, admin: tidelog.Admin, programs: list[Program]
) -> None:
    """The program is killed with a record in hand, and run again. `before` commits before it handles: at most once.
    Automatic commits are at least once here: they take what the program has come back for, and not what it was given.
    """
    topic, stuck_at, end = make(admin, "ways"), 25, 40
    place = TopicPartition(topic, 0)
    fill(cluster, topic, end)
    ways = ("auto", "sync", "async", "combined", "every", "before")
    first = Program("commits_process.py", cluster.bootstrap, topic, str(stuck_at), str(end))
    programs.append(first)
    until(lambda: len(first.said("stuck")) == 5 and first.said("done") == [["combined"]], "all stand where they shall")

    def committed(way: str) -> int:
        found = admin.group_offsets(f"{topic}-{way}")
        return found[place].committed.offset if place in found else -1

    polled = {way: [tuple(rest) for name, *rest in first.said("polled") if name == way] for way in ways}
    until(lambda: committed("auto") > 0, "auto has committed by itself")
    wanted = {way: polled[way][-1][0] for way in ("sync", "async")}
    wanted |= {"every": stuck_at // 10 * 10, "before": polled["before"][-1][1], "combined": 22}
    for way, offset in wanted.items():
        until(partial(lambda way, offset: committed(way) == offset, way, offset), f"{way} has committed {offset}")
    first.kill()
    wanted["auto"] = committed("auto")
    assert wanted["auto"] in [start for start, _ in polled["auto"]], "the end of an earlier poll, nothing of the last"
    assert {way: committed(way) for way in ways} == wanted, "what was in hand is not committed by dying"
    second = Program("commits_process.py", cluster.bootstrap, topic, "-1", str(end))
    programs.append(second)
    until(lambda: len(second.said("done")) == len(ways), "the rest is handled")
    second.close()
    for way in ways:
        runs = [[offset for name, offset in program.said("handled") if name == way] for program in (first, second)]
        assert runs[1] == list(range(wanted[way], end)), "from the commit on"
        repeated, lost = set(runs[0]) & set(runs[1]), set(range(end)) - set(runs[0]) - set(runs[1])
        if way == "before":
            assert (repeated, lost) == (set(), set(range(stuck_at, wanted[way]))), "at most once"
        else:
            done = 22 if way == "combined" else stuck_at
            assert (repeated, lost) == (set(range(wanted[way], done)), set()), "at least once"
        assert committed(way) == end or way == "every"


@pytest.mark.source("b:EX-14")
def test_commits_that_nobody_waits_for_keep_their_order(cluster: LocalCluster, admin: tidelog.Admin) -> None:
    topic = make(admin, "unwaited")
    place = TopicPartition(topic, 0)
    fill(cluster, topic, 5)
    told: list[tuple[int, TidelogError | None]] = []
    with tidelog.Consumer(
        cluster.bootstrap, group=topic, auto_offset_reset="earliest", enable_auto_commit=False
    ) as consumer:
        consumer.subscribe([topic])
        _read(consumer, 5)
        for offset in (1, 2, 3):
            consumer.commit_async({place: offset}, lambda offsets, error: told.append((offsets[place].offset, error)))
        until(lambda: len(told) == 3 or bool(consumer.poll(50)), "all are told")
        assert told == [(1, None), (2, None), (3, None)]
        found = consumer.committed(place)[place]
    assert found is not None
    assert found.offset == 3, "an older one never comes after a newer one"
