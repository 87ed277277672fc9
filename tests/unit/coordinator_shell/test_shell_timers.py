"""One heap for all deadlines, and the index of who looks at which topic."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Hashable
from dataclasses import replace
from random import Random
from typing import Any
from uuid import UUID

import uvloop
from support.async_tests import inside

from tidelog.coordinator.records import MemberValue
from tidelog.coordinator.state import Group
from tidelog.coordinator.timers import LATE_MAX_S, LATE_S, Timers
from tidelog.coordinator.topics_view import ImageTopics, SubscriptionIndex, reshaped_topics
from tidelog.metadata.delta import ImageDelta, delta_between
from tidelog.metadata.image import ClusterImage
from tidelog.metadata.records import CreatePartition, CreateTopic, RegisterBroker, RemoveTopic
from tidelog.model.ids import TopicId
from tidelog.model.maps import Map
from tidelog.world.simulated import SimNode, SimWorld


def run(job: Callable[[], Coroutine[Any, Any, None]]) -> None:
    """In simulated time."""
    with SimWorld(1) as world:

        async def main(_: SimNode) -> None:
            await job()

        world.run(world.machine("one").boot(), main, timeout=10_000)


def now() -> float:
    return asyncio.get_running_loop().time()


@inside(run)
async def test_deadlines_come_in_order_and_at_their_time() -> None:
    timers = Timers()
    came: list[tuple[Hashable, float]] = []
    began = now()
    deadlines = timers.new_set(lambda key: came.append((key, round(now() - began, 3))))
    for key, at in (("c", 3.0), ("a", 1.0), ("b", 2.0)):
        deadlines.set(key, began + at)
    await asyncio.sleep(10)
    assert came == [("a", 1.0), ("b", 2.0), ("c", 3.0)]
    assert len(timers) == len(deadlines) == 0


@inside(run)
async def test_a_deadline_can_be_moved_either_way_and_taken_back() -> None:
    timers = Timers()
    came: list[tuple[Hashable, float]] = []
    began = now()
    deadlines = timers.new_set(lambda key: came.append((key, round(now() - began, 3))))
    for key in ("later", "sooner", "never", "again"):
        deadlines.set(key, began + 5)
    deadlines.set("later", began + 8)
    deadlines.set("sooner", began + 2)
    deadlines.cancel("never")
    deadlines.cancel("again")
    deadlines.set("again", began + 6)
    assert deadlines.at("later") == began + 8
    await asyncio.sleep(20)
    assert came == [("sooner", 2.0), ("again", 6.0), ("later", 8.0)]


@inside(run)
async def test_an_owner_that_is_gone_hears_nothing() -> None:
    timers = Timers()
    came: list[Hashable] = []
    gone, stays = timers.new_set(came.append), timers.new_set(came.append)
    gone.set("gone", now() + 1)
    stays.set("stays", now() + 1)
    gone.clear()
    await asyncio.sleep(2)
    assert came == ["stays"]
    timers.close()
    stays.set("after the end", now() + 1)
    await asyncio.sleep(2)
    assert came == ["stays"]


@inside(run)
async def test_heartbeats_do_not_make_the_heap_grow() -> None:
    timers = Timers()
    random = Random(5)
    wanted: dict[Hashable, float] = {}
    came: dict[Hashable, float] = {}

    def due(key: Hashable) -> None:
        came[key] = now()

    deadlines = timers.new_set(due)
    for step in range(50_000):
        key = random.randrange(100)
        wanted[key] = now() + random.choice((2.0, 45.0))
        deadlines.set(key, wanted[key])
        if step % 10 == 0:
            gone = random.randrange(100)
            deadlines.cancel(gone)
            wanted.pop(gone, None)
        assert len(timers._heap) <= 2 * 100 + 65
    await asyncio.sleep(100)
    assert came == wanted


BROKER = RegisterBroker(
    broker=1, broker_epoch=1, incarnation=UUID(int=1), endpoints=(("A", "PLAINTEXT", "h", 1),), rack="left"
)


class JumpingLoop(asyncio.SelectorEventLoop):
    """A loop whose process can be stopped: time passes, and nothing runs."""

    stopped_s = 0.0

    def time(self) -> float:
        return super().time() + self.stopped_s


def run_stopped(job: Callable[[JumpingLoop, Timers, list[Hashable]], Coroutine[Any, Any, None]]) -> None:
    """`job` gets the loop, timers, and the list of deadlines that have come."""
    loop = JumpingLoop()
    with asyncio.Runner(loop_factory=lambda: loop) as runner:

        async def main() -> None:
            timers = Timers()
            try:
                await job(loop, timers, [])
            finally:
                timers.close()

        runner.run(main())


async def turns(count: int) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


@inside(run_stopped)
async def test_member_whose_heartbeat_waited_while_the_coordinator_was_stopped_is_not_late(
    loop: JumpingLoop, timers: Timers, came: list[Hashable]
) -> None:
    deadlines = timers.new_set(came.append)
    deadlines.set("member", now() + 45)
    loop.stopped_s += 60
    await turns(5)  # a heartbeat that lay in the socket is read, decoded and handled
    assert came == []
    deadlines.set("member", now() + 45)
    deadlines.set("another", now() + 50)
    loop.stopped_s += LATE_MAX_S
    await turns(5)
    assert came == []


@inside(run_stopped)
async def test_member_that_is_not_heard_of_after_the_stop_is_late(
    loop: JumpingLoop, timers: Timers, came: list[Hashable]
) -> None:
    deadlines = timers.new_set(came.append)
    deadlines.set("member", now() + 45)
    loop.stopped_s += 60
    await turns(5)
    deadlines.set("another", now() + 1_000)
    await turns(5)
    assert came == [], "a new deadline brings no other one forward"
    loop.stopped_s += LATE_MAX_S
    await turns(5)
    assert came == ["member"]


@inside(run_stopped)
async def test_deadlines_are_put_off_once_however_often_the_loop_is_late(
    loop: JumpingLoop, timers: Timers, came: list[Hashable]
) -> None:
    deadlines = timers.new_set(came.append)
    deadlines.set("member", now() + 1)
    for _ in range(2):
        loop.stopped_s += 100
        await turns(5)
    assert came == ["member"]


@inside(run_stopped)
async def test_loop_that_is_a_little_late_puts_nothing_off(
    loop: JumpingLoop, timers: Timers, came: list[Hashable]
) -> None:
    deadlines = timers.new_set(came.append)
    deadlines.set("member", now() + 5)
    loop.stopped_s += 5 + LATE_S / 2
    await turns(5)
    assert came == ["member"]


def image_of(topics: dict[str, int]) -> ClusterImage:
    image = ClusterImage().apply(BROKER)
    for number, (name, partitions) in enumerate(topics.items(), 1):
        topic_id = UUID(int=number)
        image = image.apply(CreateTopic(topic_id=topic_id, name=name))
        for partition in range(partitions):
            image = image.apply(new_partition(topic_id, partition))
    return image


def new_partition(topic_id: UUID, number: int) -> CreatePartition:
    return CreatePartition(
        topic_id=topic_id, partition=number, replicas=(1,), directories=(UUID(int=9),), isr=(1,), leader=1
    )


def test_a_view_shows_topics_as_they_are_in_an_image() -> None:
    view = ImageTopics(image_of({"b": 2, "a": 1, "__consumer_offsets": 3}))
    assert list(view.names()) == ["a", "b"], "internal ones are not subscribed to by pattern"
    shape = view.by_name("b")
    assert shape is not None
    assert (shape.name, shape.partitions, shape.racks) == ("b", 2, (frozenset({"left"}), frozenset({"left"})))
    assert view.by_id(shape.topic_id) is shape
    assert view.by_name("nothing") is None
    assert view.by_id(TopicId(UUID(int=77))) is None
    assert ImageTopics(view.image, view).names() is view.names(), "the same topics are sorted once"


def test_topics_that_have_come_gone_or_grown_are_found() -> None:
    older = image_of({"stays": 1, "grows": 1, "goes": 1})
    grown = older.apply(new_partition(UUID(int=2), 1))
    newer = grown.apply(RemoveTopic(topic_id=UUID(int=3))).apply(CreateTopic(topic_id=UUID(int=4), name="comes"))
    assert reshaped_topics(delta_between(older, newer), older, newer) == {"grows", "goes", "comes"}
    assert reshaped_topics(delta_between(older, older), older, older) == set()


def test_deadlines_that_have_passed_already_come_on_the_loop_of_a_real_node_too() -> None:
    """There a handle of what is due at once does not know its time."""

    async def job() -> None:
        timers = Timers()
        came: list[Hashable] = []
        both = asyncio.Event()

        def due(key: Hashable) -> None:
            came.append(key)
            if len(came) == 3:
                both.set()

        deadlines = timers.new_set(due)
        deadlines.set("late", now() - 1)
        deadlines.set("later", now() - 0.5)
        deadlines.set("soon", now() + 0.01)
        async with asyncio.timeout(10):
            await both.wait()
        assert came == ["late", "later", "soon"]
        timers.close()

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(job())


def group_of(*members: MemberValue) -> Group:
    return Group("g", members=Map({str(number): member for number, member in enumerate(members)}))


def test_a_topic_finds_the_groups_that_look_at_it() -> None:
    index = SubscriptionIndex()
    index.put("by-name", group_of(MemberValue(topics=("orders", "bills")), MemberValue(topics=("orders",))))
    index.put("by-pattern", group_of(MemberValue(pattern="ord.*")))
    index.put("by-both", group_of(MemberValue(topics=("bills",), pattern="x.*")))
    index.put("of-nobody", group_of())
    assert index.concerned(["orders"]) == ["by-name", "by-pattern"]
    assert index.concerned(["bills"]) == ["by-both", "by-name"]
    assert index.concerned(["xyz", "nothing"]) == ["by-both"]
    assert index.concerned(["nothing"]) == []
    assert list(index) == ["by-name", "by-pattern", "by-both"]
    index.put("by-name", group_of(MemberValue(topics=("other",))))
    index.put("by-pattern", None)
    assert index.concerned(["orders"]) == []
    assert index.concerned(["other"]) == ["by-name"]
    for group in ("by-name", "by-both"):
        index.put(group, None)
    assert not index._by_name
    assert not index._by_pattern


def test_replicas_that_move_concern_members_with_racks() -> None:
    older = image_of({"moves": 2, "stays": 1})
    partition = older.topics[UUID(int=1)].partitions[1]
    changed = partition._replace(replicas=(2,))
    topic = older.topics[UUID(int=1)]
    newer = replace(
        older,
        topics=older.topics.set(UUID(int=1), replace(topic, partitions=topic.partitions.set(1, changed))),
    )
    delta = ImageDelta(partitions={UUID(int=1): {1: changed}})
    assert reshaped_topics(delta, older, newer) == {"moves"}
    without = replace(newer, brokers=Map())
    assert reshaped_topics(delta, older, without) == set(), "where no broker has a rack"
