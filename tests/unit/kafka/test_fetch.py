"""Fetch of the Kafka API against whole brokers: batches, limits, waiting, sessions, and what is refused."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any, cast
from uuid import UUID

import pytest
from support.brokers.cluster import NodeId, ReplicationCluster, RunningBroker, batch, values_of
from support.brokers.transactions import append_open
from support.kafka.data_api import BROKERS, DataWorld, fetch_request, forgotten, produce_request, rows_of, wanted

from tidelog.log.batch import ControlKind, encode_control
from tidelog.model.errors import DamagedLogError, ErrorCode, LeaderNotAvailableError, OverloadedError, TidelogError
from tidelog.model.ids import PartitionId
from tidelog.rpc.kafka import fetch
from tidelog.rpc.kafka.messages import FETCH, PRODUCE
from tidelog.rpc.kafka.messages.data import FetchResponse, PartitionData, ReplicaState
from tidelog.rpc.kafka.services import DeferredResponse
from tidelog.services.fetch import FetchService
from tidelog.services.limits import RequestLimits
from tidelog.services.partition_lookup import PARTITIONS_PER_SLICE as NAMES_PER_SLICE

RACKS = {11: "east", 12: "west", 13: "south"}
IDS_SINCE = 13


@pytest.fixture(scope="module")
def world() -> Iterator[DataWorld]:
    with ReplicationCluster(702, brokers=()) as cluster:
        for broker, rack in RACKS.items():
            cluster.start_brokers(broker, rack=rack)
        yield DataWorld(cluster)


def code(row: Any) -> str:
    return next((one.name for one in ErrorCode if one.value.code == row.error_code), "") if row.error_code else ""


def values(row: PartitionData, start: int = 0) -> list[bytes]:
    assert isinstance(row.records, bytes | memoryview)
    return values_of(row.records, start=start)


def write(world: DataWorld, name: str, *sent: bytes) -> None:
    for value in sent:
        assert world.produce(name, batch(value)).error_code == 0


# What is read.


@pytest.mark.requirement("a:C-09")
@pytest.mark.parametrize("version", range(FETCH.low, FETCH.high + 1))
def test_batches_are_read_as_they_are_stored_in_every_version(world: DataWorld, version: int) -> None:
    name = f"version-{version}"
    where = world.topic(name)
    write(world, name, b"a", b"b", b"c")
    topic = where.topic_id.bytes if version >= IDS_SINCE else name
    response = world.fetch(wanted(topic, 1), version=version)
    assert (response.error_code, response.session_id, response.throttle_time_ms) == (0, 0, 0)
    row = rows_of(response)[topic, 0]
    assert (row.error_code, row.high_watermark, row.last_stable_offset) == (0, 3, 3)
    assert row.log_start_offset == (0 if version >= 5 else -1)
    assert row.aborted_transactions is None, "read uncommitted"
    assert (row.preferred_read_replica, row.current_leader.leader_id, row.diverging_epoch.epoch) == (-1, -1, -1)
    assert values(row) == [b"b", b"c"]
    empty = rows_of(world.fetch(wanted(topic, 3), version=version))[topic, 0]
    assert (empty.error_code, empty.records) == (0, b""), "empty, not null"
    assert world.is_idle()


def test_stored_batches_become_part_of_the_answer_without_a_copy(world: DataWorld) -> None:
    world.topic("views")
    write(world, "views", *(bytes(30_000) for _ in range(6)))

    async def job(broker: RunningBroker) -> tuple[object, list[Any]]:
        request = FETCH.decode_request(
            12, b"".join(FETCH.encode_request(12, fetch_request(wanted("views", bytes_max=100_000))))
        )
        later = await fetch.handle(request, world.context(broker, 12))
        assert isinstance(later, DeferredResponse)
        response = await later.respond()
        later.abandon()
        return response.responses[0].partitions[0].records, FETCH.encode_response(12, response)

    records, parts = world.cluster.on_broker(11, job)
    assert isinstance(records, memoryview), "a part of what was read: a fourth batch was cut off"
    assert any(part is records for part in parts)
    assert values_of(records) == [bytes(30_000)] * 3


@pytest.mark.requirement("a:C-09")
def test_limits_hold_but_for_the_first_batch(world: DataWorld) -> None:
    for name in ("large-a", "large-b"):
        world.topic(name)
        write(world, name, *(bytes([at]) * 1_000 for at in range(4)))
    one = world.fetch_row("large-a")
    assert len(values(one)) == 4
    size = len(one.records or b"") // 4
    both = [wanted("large-a"), wanted("large-b")]

    def counts(**limits: int) -> list[int]:
        topics = [wanted(name, bytes_max=limits.get("partition", 1 << 20)) for name in ("large-a", "large-b")]
        rows = rows_of(world.fetch(*topics, max_bytes=limits.get("total", 1 << 20)))
        return [len(values(rows[name, 0])) for name in ("large-a", "large-b")]

    assert counts(partition=2 * size + 10) == [2, 2]
    assert counts(total=3 * size) == [3, 0]
    assert counts(total=5 * size) == [4, 1]
    for total in (-5, 0, 1, size - 1):
        assert counts(total=total) == [1, 0], "a reader always gets on"
    assert counts(partition=0)[0] == 1
    assert len(rows_of(world.fetch(*both))) == 2


@pytest.mark.requirement("a:C-10")
def test_a_fetch_waits_for_enough_bytes_or_for_its_time(world: DataWorld) -> None:
    world.topic("waits")
    cluster = world.cluster
    began_s = cluster.now_s()
    assert values(world.fetch_row("waits", max_wait_ms=700)) == []
    assert 0.69 < cluster.now_s() - began_s < 0.9

    async def job(broker: RunningBroker) -> list[bytes]:
        asked = fetch_request(wanted("waits"), min_bytes=200, max_wait_ms=30_000)
        waiting = asyncio.get_running_loop().create_task(world.answer(broker, FETCH, 12, asked))
        await asyncio.sleep(0.5)
        for value in (b"small", bytes(200)):
            assert not waiting.done()
            assert broker.service.fetch.waiting_fetches == 1
            await world.answer(broker, PRODUCE, 12, produce_request(("waits", 0, batch(value))))
        return values(rows_of(await waiting)["waits", 0])

    began_s = cluster.now_s()
    assert cluster.on_broker(11, job) == [b"small", bytes(200)]
    assert cluster.now_s() - began_s < 5
    assert world.is_idle()


@pytest.mark.requirement("a:C-10")
def test_a_fetch_whose_client_is_gone_waits_no_more(world: DataWorld) -> None:
    world.topic("left")

    async def job(broker: RunningBroker) -> None:
        later = await world.begin(broker, FETCH, 12, fetch_request(wanted("left"), max_wait_ms=60_000))
        assert isinstance(later, DeferredResponse)
        waiting = asyncio.get_running_loop().create_task(later.respond())
        await asyncio.sleep(0.2)
        assert broker.service.fetch.waiting_fetches == 1
        waiting.cancel()
        await asyncio.wait([waiting])
        later.abandon()
        assert waiting.cancelled()
        assert len(broker.replicas.wakers) == 0

    world.cluster.on_broker(11, job)
    assert world.is_idle()


def test_a_known_error_does_not_wait_for_the_others(world: DataWorld) -> None:
    world.topic("present")
    before_s = world.cluster.now_s()
    response = world.fetch(wanted("present"), wanted("absent"), max_wait_ms=20_000)
    assert world.cluster.now_s() - before_s < 1
    assert {name: code(row) for (name, _), row in rows_of(response).items()} == {
        "present": "",
        "absent": "UNKNOWN_TOPIC_OR_PARTITION",
    }


def test_without_a_place_to_wait_there_is_an_answer_at_once(world: DataWorld) -> None:
    world.topic("crowd")
    service = world.cluster.brokers[NodeId(11)].service.fetch
    before, service.limits = service.limits, RequestLimits(waiting_fetches_max=0)
    try:
        began_s = world.cluster.now_s()
        assert world.fetch_row("crowd", max_wait_ms=20_000).error_code == 0
        assert world.cluster.now_s() - began_s < 1
    finally:
        service.limits = before


def test_a_transaction_is_read_when_it_has_ended_and_aborted_ones_are_named(world: DataWorld) -> None:
    where = world.topic("transactions")

    async def job(broker: RunningBroker) -> None:
        leading = broker.replicas.leader_of(where)
        assert leading is not None
        for number, kind in ((5, ControlKind.ABORT), (6, ControlKind.COMMIT), (7, None)):
            data = batch(b"%d" % number, is_transactional=True, producer_id=number, producer_epoch=0, base_sequence=0)
            append_open(leading, data, number, 0)
            if kind is not None:
                marker = encode_control(
                    kind, coordinator_epoch=1, timestamp=1_000, producer_id=number, producer_epoch=0
                )
                leading.append(marker, is_coordinator=True)

    world.cluster.on_broker(11, job)
    world.cluster.until(lambda: world.cluster.leading(where).high_watermark == 5)
    committed = world.fetch_row("transactions", isolation_level=1)
    assert (committed.high_watermark, committed.last_stable_offset) == (5, 4)
    assert values(committed) == [b"5", b"6"]
    assert committed.aborted_transactions is not None
    assert [(one.producer_id, one.first_offset) for one in committed.aborted_transactions] == [(5, 0)]
    assert world.fetch_row("transactions", 2, isolation_level=1).aborted_transactions == []
    uncommitted = world.fetch_row("transactions")
    assert values(uncommitted) == [b"5", b"6", b"7"]
    assert uncommitted.aborted_transactions is None


# Who leads, and from where to read.


def test_a_partition_that_is_led_elsewhere_says_who_leads_and_where(world: DataWorld) -> None:
    where = world.topic("elsewhere")
    epoch = world.cluster.partition(where).leader_epoch
    for version in (11, 12, 16):
        topic = where.topic_id.bytes if version >= IDS_SINCE else "elsewhere"
        response = world.fetch(wanted(topic), version=version, node=12)
        row = rows_of(response)[topic, 0]
        assert (code(row), row.high_watermark, row.records) == ("NOT_LEADER_OR_FOLLOWER", -1, b"")
        assert row.current_leader.leader_id == (11 if version >= 12 else -1)
        assert row.current_leader.leader_epoch == (epoch if version >= 12 else -1)
        reported = [(one.node_id, one.host, one.port, one.rack) for one in response.node_endpoints]
        assert reported == ([(11, "host-11", 9092, "east")] if version >= 16 else [])


def test_epochs_of_readers_are_compared(world: DataWorld) -> None:
    where = world.topic("epochs")
    write(world, "epochs", b"a", b"b")
    epoch = world.cluster.partition(where).leader_epoch
    assert values(world.fetch_row("epochs", current_leader_epoch=epoch, last_fetched_epoch=epoch)) == [b"a", b"b"]
    assert code(world.fetch_row("epochs", current_leader_epoch=epoch + 1)) == "UNKNOWN_LEADER_EPOCH"
    assert code(world.fetch_row("epochs", last_fetched_epoch=epoch + 1)) == "UNKNOWN_LEADER_EPOCH"
    beyond = world.fetch_row("epochs", 50, last_fetched_epoch=epoch)
    assert (code(beyond), beyond.records) == ("", b"")
    assert (beyond.diverging_epoch.epoch, beyond.diverging_epoch.end_offset) == (epoch, 2)
    outside = world.fetch_row("epochs", 50)
    assert (code(outside), outside.log_start_offset) == ("OFFSET_OUT_OF_RANGE", 0)
    assert code(world.fetch_row("epochs", -1)) == "OFFSET_OUT_OF_RANGE"


def test_a_reader_is_sent_to_the_replica_in_its_rack(world: DataWorld) -> None:
    where = world.topic("racks")
    write(world, "racks", b"near")
    world.cluster.until_in_sync(where, *BROKERS)
    row = world.fetch_row("racks", rack_id="west")
    assert (row.preferred_read_replica, row.records) == (12, b"")
    assert values(world.fetch_row("racks", rack_id="east")) == [b"near"], "it is there already"
    assert values(world.fetch_row("racks", rack_id="moon")) == [b"near"], "nobody is there"
    assert values(world.fetch_row("racks", rack_id="west", version=10)) == [b"near"], "no rack before version 11"
    world.cluster.until(lambda: world.cluster.following(12, where).high_watermark == 1)
    assert values(world.fetch_row("racks", rack_id="west", node=12)) == [b"near"]
    assert code(world.fetch_row("racks", 5, rack_id="west", node=12)) == "OFFSET_NOT_AVAILABLE"


def test_a_reader_is_sent_to_nobody_whom_its_listener_cannot_reach(world: DataWorld) -> None:
    """It would come back to the leader, and be sent away without data again and again."""
    where = world.topic("unreachable")
    write(world, "unreachable", b"near")
    world.cluster.until_in_sync(where, *BROKERS)
    request = fetch_request(wanted("unreachable"), rack_id="west")

    async def job(broker: RunningBroker) -> FetchResponse:
        context = world.context(broker, 12)
        context.connection.listener = "INSIDE"
        later = await fetch.handle(request, context)
        assert isinstance(later, DeferredResponse)
        try:
            return cast(FetchResponse, await later.respond())
        finally:
            later.abandon()

    row = rows_of(world.cluster.on_broker(11, job))["unreachable", 0]
    assert (row.preferred_read_replica, values(row)) == (-1, [b"near"])


# What is refused.


def test_unknown_topics_and_partitions_have_errors_of_their_own(world: DataWorld) -> None:
    where = world.topic("known")
    response = world.fetch(wanted("known", partition=9), wanted("nobody"), wanted("", partition=-1))
    assert [code(row) for row in rows_of(response).values()] == ["UNKNOWN_TOPIC_OR_PARTITION"] * 3
    ids = world.fetch(
        wanted(where.topic_id.bytes, partition=9), wanted(UUID(int=9).bytes), wanted(bytes(16)), version=17
    )
    assert [code(row) for row in rows_of(ids).values()] == ["UNKNOWN_TOPIC_OR_PARTITION", *["UNKNOWN_TOPIC_ID"] * 2]


def test_client_with_a_replica_id_reads_as_a_consumer(world: DataWorld) -> None:
    where = world.topic("named")
    write(world, "named", b"x")
    before = world.cluster.partition(where)
    for replica_id in (-2, 0, 12, 99):
        for version in (4, 6, 12):
            assert values(world.fetch_row("named", version=version, replica_id=replica_id)) == [b"x"]
        state = ReplicaState(replica_id=replica_id, replica_epoch=1)
        response = world.fetch(wanted(where.topic_id.bytes), version=17, replica_state=state)
        assert [values(row) for row in rows_of(response).values()] == [[b"x"]]
    assert world.cluster.partition(where) == before


def test_client_with_a_replica_id_neither_confirms_nor_sees_uncommitted_records() -> None:
    with ReplicationCluster(704, brokers=BROKERS) as cluster:
        lone = DataWorld(cluster)
        where = lone.topic("uncommitted")
        write(lone, "uncommitted", b"first")
        before = cluster.partition(where)
        for follower in (12, 13):
            cluster.lose_power(follower)

        async def job(broker: RunningBroker) -> list[tuple[int, bytes]]:
            request = produce_request(("uncommitted", 0, batch(b"second")), acks=1)
            response = await lone.answer(broker, PRODUCE, 12, request)
            assert response.responses[0].partition_responses[0].base_offset == 1
            rows = []
            for replica_id, offset in ((12, 1), (13, 1), (12, 2), (13, 2), (12, 1)):
                asked = fetch_request(wanted("uncommitted", offset), replica_id=replica_id)
                (row,) = rows_of(await lone.answer(broker, FETCH, 12, asked)).values()
                assert isinstance(row.records, bytes | memoryview)
                rows.append((row.high_watermark, bytes(row.records)))
            return rows

        rows = cluster.on_broker(11, job)
        assert cluster.log(11, where).end_offset == 2
        assert {high_watermark for high_watermark, _ in rows} <= {1, -1}
        assert {records for _, records in rows} == {b""}
        assert cluster.partition(where) == before, "the in-sync replicas are the same"


def test_nonsense_is_refused(world: DataWorld) -> None:
    world.topic("refused")
    write(world, "refused", b"x")
    assert code(world.fetch(wanted("refused"), isolation_level=2)) == "INVALID_REQUEST"
    assert values(world.fetch_row("refused", replica_id=-2)) == [b"x"]
    assert world.fetch().responses == []


@pytest.mark.parametrize(
    ("error", "version", "expected"),
    [
        (LeaderNotAvailableError("none"), 12, "NOT_LEADER_OR_FOLLOWER"),
        (OverloadedError("busy"), 12, "REPLICA_NOT_AVAILABLE"),
        (DamagedLogError("rot", path="p", good_end=0), 6, "STORAGE_ERROR"),
        (DamagedLogError("rot", path="p", good_end=0), 5, "NOT_LEADER_OR_FOLLOWER"),
        (TidelogError("what"), 12, "UNKNOWN_SERVER_ERROR"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, TidelogError) else str(value),
)
def test_failures_have_codes_that_readers_know(
    world: DataWorld, monkeypatch: pytest.MonkeyPatch, error: TidelogError, version: int, expected: str
) -> None:
    if "codes" not in world.cluster.image().topic_ids:
        world.topic("codes")
        write(world, "codes", b"x")

    def failing(*_: Any, **__: Any) -> Any:
        raise error

    log = world.cluster.log(11, PartitionId(world.cluster.image().topic_ids["codes"], 0))  # type: ignore[arg-type]
    monkeypatch.setattr(type(log), "read_nowait", failing)
    monkeypatch.setattr(type(world.cluster.brokers[NodeId(11)].replicas), "report_corruption", lambda *_: None)
    assert code(world.fetch_row("codes", version=version)) == expected


def test_many_partitions_are_dealt_with_a_few_at_a_time(world: DataWorld) -> None:
    world.topic("wide")
    write(world, "wide", b"x")

    async def job(broker: RunningBroker) -> tuple[int, int]:
        asked = fetch_request(wanted("wide"), *(wanted("nobody", partition=at) for at in range(2_000)))
        working = asyncio.get_running_loop().create_task(world.answer(broker, FETCH, 12, asked))
        turns = 0
        while not working.done():
            await asyncio.sleep(0)
            turns += 1
        return len(rows_of(await working)), turns

    count, turns = world.cluster.on_broker(11, job)
    assert count == 2_001
    assert turns >= 3 * 2_000 // NAMES_PER_SLICE, "named, found and reported in slices"
    assert world.is_idle()


# Sessions.


@pytest.mark.requirement("a:C-11")
@pytest.mark.parametrize("version", [7, 12, 13, 17])
def test_a_session_answers_with_what_has_changed(world: DataWorld, version: int) -> None:
    names = [f"session-{version}-{at}" for at in range(3)]
    topics: list[str | bytes] = [
        where.topic_id.bytes if version >= IDS_SINCE else name for name in names for where in [world.topic(name)]
    ]
    write(world, names[0], b"first")
    first = world.fetch(*map(wanted, topics[:2]), version=version, session_epoch=0)
    session = first.session_id
    assert session > 0
    assert list(rows_of(first)) == [(topics[0], 0), (topics[1], 0)], "everything"

    def go_on(epoch: int, *topics: Any, **more: Any) -> dict[Any, PartitionData]:
        response = world.fetch(*topics, version=version, session_id=session, session_epoch=epoch, **more)
        assert (response.error_code, response.session_id) == (0, session)
        return rows_of(response)

    assert go_on(1, wanted(topics[0], 1)) == {}, "nothing is new"
    write(world, names[1], b"second")
    changed = go_on(2, max_wait_ms=5_000)
    assert [(key, values(row)) for key, row in changed.items()] == [((topics[1], 0), [b"second"])]
    added = go_on(3, wanted(topics[1], 1), wanted(topics[2]), forgotten_topics_data=[forgotten(topics[0], 0)])
    assert [(key, row.records) for key, row in added.items()] == [((topics[2], 0), b"")], "new, so it is reported once"
    write(world, names[0], b"unread")
    assert go_on(4) == {}, "forgotten"
    left = world.fetch(
        version=version,
        session_id=session,
        session_epoch=5,
        forgotten_topics_data=[forgotten(topics[1], 0), forgotten(topics[2], 0)],
    )
    assert (left.error_code, left.session_id, left.responses) == (0, 0, []), "nothing is left to read"
    gone = world.fetch(version=version, session_id=session, session_epoch=6)
    assert code(gone) == "FETCH_SESSION_ID_NOT_FOUND"


@pytest.mark.requirement("a:C-11", "a:T-26")
def test_who_has_lost_its_session_begins_a_new_one(world: DataWorld) -> None:
    where = world.topic("evicted")
    write(world, "evicted", b"x")
    mine = world.fetch(wanted("evicted"), session_epoch=0).session_id
    assert code(world.fetch(session_id=mine, session_epoch=9)) == "INVALID_FETCH_SESSION_EPOCH"
    by_id = world.fetch(wanted(where.topic_id.bytes), version=13, session_id=mine, session_epoch=1)
    assert code(by_id) == "FETCH_SESSION_TOPIC_ID_ERROR"
    world.cluster.world.run_for(130)  # longer than a session keeps its place against others
    others = [world.fetch(wanted("evicted"), session_epoch=0).session_id for _ in range(25)]
    assert others.count(0) > 0, "there are fewer places"
    lost = world.fetch(session_id=mine, session_epoch=1)
    assert (code(lost), lost.session_id, lost.responses) == ("FETCH_SESSION_ID_NOT_FOUND", 0, [])
    again = world.fetch(wanted("evicted"), session_id=mine, session_epoch=0)
    assert (again.error_code, values(rows_of(again)["evicted", 0])) == (0, [b"x"]), "served in full, with or without"
    for session in others:
        world.fetch(session_id=session, session_epoch=-1)
    assert len(world.sessions) == 0
    world.sessions.validate()


def test_an_error_is_reported_until_it_has_gone(world: DataWorld) -> None:
    session = world.fetch(wanted("to-come"), session_epoch=0).session_id
    assert session
    for epoch in (1, 2):
        rows = rows_of(world.fetch(session_id=session, session_epoch=epoch))
        assert {key: code(row) for key, row in rows.items()} == {("to-come", 0): "UNKNOWN_TOPIC_OR_PARTITION"}
    world.topic("to-come")
    rows = rows_of(world.fetch(session_id=session, session_epoch=3))
    assert {key: code(row) for key, row in rows.items()} == {("to-come", 0): ""}
    assert rows_of(world.fetch(session_id=session, session_epoch=4)) == {}
    world.fetch(session_id=session, session_epoch=-1)


def test_a_request_that_does_not_wait_for_its_answer_loses_it(world: DataWorld) -> None:
    world.topic("hasty")
    session = world.fetch(wanted("hasty"), session_epoch=0).session_id

    async def job(broker: RunningBroker) -> tuple[Any, Any]:
        asked = {"session_id": session, "max_wait_ms": 500}
        loop = asyncio.get_running_loop()
        first = loop.create_task(world.answer(broker, FETCH, 12, fetch_request(session_epoch=1, **asked)))
        await asyncio.sleep(0.1)
        second = loop.create_task(world.answer(broker, FETCH, 12, fetch_request(session_epoch=2, **asked)))
        return await first, await second

    first, second = world.cluster.on_broker(11, job)
    assert (code(first), code(second)) == ("INVALID_FETCH_SESSION_EPOCH", "")
    assert second.session_id == session
    world.fetch(session_id=session, session_epoch=-1)


def test_busy_partitions_of_a_session_do_not_starve_the_others(world: DataWorld) -> None:
    for name in ("starve-a", "starve-b"):
        world.topic(name)
        write(world, name, *(bytes(500) for _ in range(3)))
    first = world.fetch(wanted("starve-a"), wanted("starve-b"), session_epoch=0, max_bytes=100)
    assert [key for key, row in rows_of(first).items() if row.records] == [("starve-a", 0)]
    second = world.fetch(wanted("starve-a", 1), session_id=first.session_id, session_epoch=1, max_bytes=100)
    third = world.fetch(wanted("starve-b", 1), session_id=first.session_id, session_epoch=2, max_bytes=100)
    read = [key for one in (second, third) for key, row in rows_of(one).items() if row.records]
    assert sorted(read) == [("starve-a", 0), ("starve-b", 0)]
    world.fetch(session_id=first.session_id, session_epoch=-1)


def test_what_is_read_counts_in_the_memory_of_the_connection(world: DataWorld, monkeypatch: pytest.MonkeyPatch) -> None:
    world.topic("counted")
    write(world, "counted", *(bytes(1_000) for _ in range(10)))
    limits = RequestLimits(fetch_bytes_max=1 << 20, fetch_bytes_min=2_500, response_bytes_max=5_000)
    tight = DataWorld(world.cluster, limits)
    peak = 0
    reading = FetchService.fetch

    async def watched(service: FetchService, context: Any, request: Any, memory: Any) -> Any:
        nonlocal peak
        results = await reading(service, context, request, memory)
        peak = max(peak, sum(len(result.data) for result in results))
        assert memory.reading == 0, "what was read is the answer's from now on"
        return results

    monkeypatch.setattr(FetchService, "fetch", watched)
    assert len(values(tight.fetch_row("counted"))) == 4
    tight.responses.used = 5_000  # clients have not taken their answers
    assert len(values(tight.fetch_row("counted"))) == 2
    assert 2_000 < peak < 5_000
    assert tight.responses.used == 5_000


def test_what_was_read_counts_until_the_connection_counts_it(world: DataWorld) -> None:
    world.topic("gapless")
    write(world, "gapless", bytes(1_000))

    async def job(broker: RunningBroker) -> tuple[int, int]:
        later = await world.begin(broker, FETCH, 12, fetch_request(wanted("gapless")))
        await later.respond()
        read = world.responses.used
        later.abandon()
        return read, world.responses.used

    read, left = world.cluster.on_broker(11, job)
    assert read > 1_000
    assert left == 0
