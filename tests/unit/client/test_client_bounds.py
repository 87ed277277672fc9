"""What a client remembers has bounds, and one bad address, topic or record does not spoil the others."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest
from support.clients.cluster import CLIENT, ClientWorld
from support.clients.producers import SimProducer
from support.clients.records import create, make_topic, stored

from tidelog.client import coordinators
from tidelog.client.admin.core import AdminCore
from tidelog.client.cluster import ClusterClient
from tidelog.client.consumer.poll_timer import PollTimer
from tidelog.client.coordinators import Coordinators
from tidelog.client.errors import NoClusterError, SerializationError, UnknownTopicError
from tidelog.client.producer.records import headers_of
from tidelog.client.serializers import dumper
from tidelog.model.errors import CallTimeoutError
from tidelog.model.ids import NodeId
from tidelog.verify import Checker, GroupChecker


@pytest.fixture
def world() -> Iterator[ClientWorld]:
    with ClientWorld(17) as made:
        yield made
        assert made.failures == []


def test_a_producer_forgets_deleted_topics_and_never_restarts_the_sequence_of_one(world: ClientWorld) -> None:
    async def job(client: ClusterClient) -> None:
        await make_topic(client, "stays")
        admin = AdminCore(client)
        async with SimProducer(world, metadata_max_age_ms=200) as producer:
            for number in range(12):
                name = f"day-{number}"
                await make_topic(client, name)
                await producer.send_and_wait(name, b"1")
                await producer.send_and_wait("stays", b"%d" % number)
                await admin.delete_topics([name])
            core = producer.core
            async with asyncio.timeout(30):
                while len(producer.accumulator.topics) > 1:  # noqa: ASYNC110 - nobody tells
                    await asyncio.sleep(0.1)
            sender = core.sender
            assert len(sender.queues) == len(sender._broker_of) == 1
            assert set(core.cluster._names) == {"stays"}
            assert set(core._topics) == {"stays"}
            assert len(core.cluster.view._leaders) == 1
            with pytest.raises(UnknownTopicError):
                await producer.send("day-3", b"2")
            # Who is dropped by mistake gets other numbers: what it sends is no repeat to the log.
            before = next(iter(sender.queues.values())).producer
            known = core.cluster.view.topics.pop("stays")
            sender.forget_deleted()
            assert not sender.queues
            core.cluster.view.topics["stays"] = known
            await producer.send_and_wait("stays", b"12")
            assert next(iter(sender.queues.values())).producer != before
            await producer.send_and_wait("stays", b"13")
        records = (await stored(client, "stays"))[0]
        assert [record.value for record in records] == [b"%d" % number for number in range(14)]

    world.run(job)


def test_a_topic_with_records_on_their_way_is_not_forgotten(world: ClientWorld) -> None:
    async def job(client: ClusterClient) -> None:
        await make_topic(client, "t")
        async with SimProducer(world, linger_ms=5_000) as producer:
            await producer.send("t", b"1")
            assert not producer.accumulator.forget_topic("t")
            await producer.flush()
            assert producer.accumulator.forget_topic("t")
            assert (await producer.send_and_wait("t", b"2")).offset == 1, "it is looked for again"

    world.run(job)


def test_of_many_groups_the_coordinators_of_some_are_remembered(
    world: ClientWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(coordinators, "KNOWN_MAX", 5)

    async def job(client: ClusterClient) -> None:
        known = Coordinators(client)
        for number in range(12):
            await known.find(f"group-{number}")
            assert len(known._known) <= 5
        first = await known.find("group-11")
        assert first == await known.find("group-11")

    world.run(job)


@pytest.mark.parametrize("request_timeout_ms", [300, 1_000])
def test_a_silent_address_costs_its_share_of_the_time_and_no_more(world: ClientWorld, request_timeout_ms: int) -> None:
    async def job(client: ClusterClient) -> None:
        await create(client, "t", (12, 13))
        world.network.block(CLIENT, NodeId(11))
        async with SimProducer(world, request_timeout_ms=request_timeout_ms) as producer:
            start_s = asyncio.get_running_loop().time()
            assert (await producer.send_and_wait("t", b"1")).offset == 0
            assert asyncio.get_running_loop().time() - start_s < 2

    world.run(job)


def test_metadata_is_waited_for_as_long_as_send_may_block_and_the_error_says_why_there_is_none(
    world: ClientWorld,
) -> None:
    async def job(client: ClusterClient) -> None:
        await make_topic(client, "t")
        loop = asyncio.get_running_loop()
        world.cut_off()
        async with SimProducer(world, request_timeout_ms=300, max_block_ms=3_000) as producer:
            start_s = loop.time()
            with pytest.raises(CallTimeoutError, match=r"no metadata of 't' in 3000 ms \(max_block_ms\): \S+"):
                await producer.send("t", b"1")
            assert 2.9 < loop.time() - start_s < 3.2
            loop.call_later(1, world.network.heal)
            assert (await producer.send_and_wait("t", b"1")).offset == 0, "it comes back meanwhile"

    world.run(job)


def test_an_unreachable_cluster_is_reported_at_once(world: ClientWorld) -> None:
    async def job(client: ClusterClient) -> None:
        async with SimProducer(world) as producer:
            producer._new_cluster = lambda io: world.new_client(("nowhere:1",))  # type: ignore[method-assign]
            with pytest.raises(NoClusterError):
                await producer.send("t", b"1")

    world.run(job)


@pytest.mark.parametrize("wrong", [["ab"], [b"ab"], [("\ud800", b"1")], [("a",)], "ab", [("a", 1)], [(1, b"a")]])
def test_headers_that_cannot_be_meant_are_refused_and_spoil_no_batch(wrong: Any) -> None:
    with pytest.raises((TypeError, UnicodeEncodeError)):
        headers_of(wrong)


def test_headers_may_repeat_be_empty_and_be_null() -> None:
    assert headers_of([("", b""), ("a", None), ("a", "ä"), ("a", bytearray(b"1"))]) == (
        ("", b""),
        ("a", None),
        ("a", "ä".encode()),
        ("a", b"1"),
    )
    assert headers_of({}) is None
    assert headers_of([]) is None
    assert headers_of(iter([])) in (None, ())


def test_any_error_of_a_serializer_is_reported_as_its_failure() -> None:
    def broken(_: object) -> bytes:
        raise KeyError("schema")

    for given, said in ((broken, "schema"), (lambda _: "\ud800", "UTF-8 cannot hold"), (lambda _: 5, "returned int")):
        dump = dumper(given)
        assert dump is not None
        with pytest.raises(SerializationError, match=said):
            dump("t", object(), "value")


def test_a_verdict_may_be_asked_for_twice() -> None:
    ack = {"event": "ack", "run": "r", "partition": 0, "first": 0, "count": 2, "offset": 0}
    log = Checker()
    for event in (
        ack,
        {"event": "read", "reader": "a", "partition": 0, "records": [[0, "r", 0]]},
        {"event": "end", "reader": "a", "partition": 0, "start": 0, "end": 2},
    ):
        log.feed(event)
    group = GroupChecker()
    for event in (
        ack,
        {"event": "assigned", "member": "m", "partition": 0, "offset": 0, "at_ms": 1},
        {"event": "drained", "partition": 0, "end": 2},
    ):
        group.feed(event)
    for checker in (log, group):
        first, second = checker.verdict(), checker.verdict()
        assert first == second
        assert not first.is_good
        assert first.acknowledged == 2


def test_the_time_of_a_program_counts_and_that_of_its_calls_does_not() -> None:
    presence = PollTimer()
    assert presence.idle_s(100) == 0, "nothing counts before the first poll"
    presence.enter(100)
    presence.reset(100)
    assert presence.idle_s(150) == 0
    presence.leave(150)
    assert presence.idle_s(152) == 2
    presence.enter(153)  # a commit, which takes 60 s
    presence.enter(160)  # and a callback that calls something, in between
    presence.leave(170)
    assert presence.idle_s(200) == 0
    presence.leave(213)
    assert presence.idle_s(214) == 4, "three before it, and one since"
    presence.enter(215)
    presence.reset(215)
    presence.leave(216)
    assert presence.idle_s(217) == 1
