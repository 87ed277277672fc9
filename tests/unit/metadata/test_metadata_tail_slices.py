"""Large decisions in a broker's copy of the metadata: taken in slices, shown at once."""

import asyncio
from collections.abc import Callable, Sequence
from uuid import UUID

import pytest
from support.metadata.quorum import Quorum

from tidelog.metadata.delta import (
    PARTITIONS_PER_STEP,
    ImageDelta,
    apply_delta,
    delta_between,
    delta_steps,
    for_broker,
    for_broker_steps,
)
from tidelog.metadata.image import ClusterImage
from tidelog.metadata.records import (
    RECORDS_PER_STEP,
    BeginDecision,
    CreatePartition,
    CreateTopic,
    EndDecision,
    Record,
    RemoveTopic,
    decode_records,
    decode_steps,
    encode_records,
)
from tidelog.metadata.replay import Replay
from tidelog.metadata.tail import MetadataTail
from tidelog.model.ids import NodeId, Offset
from tidelog.model.steps import Steps
from tidelog.raft.messages import Entry

PARTITIONS = 3 * PARTITIONS_PER_STEP
TOPIC = UUID(int=7)


def made(partitions: int = PARTITIONS) -> list[Record]:
    rows = [
        CreatePartition(
            topic_id=TOPIC,
            partition=number,
            replicas=(1, 2),
            directories=(UUID(int=1), UUID(int=2)),
            isr=(1, 2),
            leader=1 + number % 2,
            leader_epoch=0,
            partition_epoch=0,
        )
        for number in range(partitions)
    ]
    return [CreateTopic(topic_id=TOPIC, name="orders"), *rows]


def counted(steps: Steps[object]) -> tuple[int, object]:
    """How many steps it took, and what came of it."""
    number = 0
    while True:
        number += 1
        try:
            next(steps)
        except StopIteration as end:
            return number, end.value


def test_steps_give_what_is_given_at_once() -> None:
    records = made()
    data = encode_records(records)
    number, decoded = counted(decode_steps(data))
    assert number == -(-len(records) // RECORDS_PER_STEP)
    assert decoded == decode_records(data) == tuple(records)
    whole = ClusterImage().apply_all(records)
    number, image = counted(Replay(ClusterImage()).apply_steps(records))
    assert number == -(-len(records) // RECORDS_PER_STEP)
    assert image == whole
    number, delta = counted(delta_steps(ClusterImage(), whole, records))
    assert number > PARTITIONS // PARTITIONS_PER_STEP
    assert delta == delta_between(ClusterImage(), whole, records) == delta_between(ClusterImage(), whole)
    assert isinstance(delta, ImageDelta)
    assert apply_delta(ClusterImage(), delta) == whole
    number, work = counted(for_broker_steps(delta, ClusterImage(), 1))
    assert number > 2
    assert work == for_broker(delta, ClusterImage(), 1)
    gone = whole.apply_all([RemoveTopic(topic_id=TOPIC)])
    back = delta_between(whole, gone)
    number, work = counted(for_broker_steps(back, whole, 2))
    assert number > 2
    assert work == for_broker(back, whole, 2)


def test_an_image_shows_nothing_before_the_last_step() -> None:
    replay = Replay(ClusterImage())
    replay.apply([BeginDecision(name="large")])
    replay.apply(made())
    before = replay.image
    steps = replay.apply_steps([EndDecision()])
    for _ in range(PARTITIONS // RECORDS_PER_STEP):
        next(steps)
        assert replay.image is before
    with pytest.raises(StopIteration):
        next(steps)
    assert len(replay.image.topics[TOPIC].partitions) == PARTITIONS


@pytest.mark.sim
def test_a_large_decision_leaves_the_loop_its_turns_and_is_handed_on_as_one(monkeypatch: pytest.MonkeyPatch) -> None:
    turns: list[int] = []
    prepare: Callable[..., object] = MetadataTail.prepare

    async def watched(tail: MetadataTail, first: Offset, entries: Sequence[Entry]) -> None:
        passed, is_over = 0, False

        def turn() -> None:
            nonlocal passed
            passed += 1
            if not is_over:
                asyncio.get_running_loop().call_soon(turn)

        before = tail.image
        asyncio.get_running_loop().call_soon(turn)
        await prepare(tail, first, entries)  # type: ignore[misc]
        is_over = True
        assert tail.image is before, "nothing shows before it is applied"
        turns.append(passed)

    monkeypatch.setattr(MetadataTail, "prepare", watched)
    with Quorum(31) as quorum:
        quorum.start()
        quorum.start_brokers(11, 12, 13)
        tail = quorum.brokers[NodeId(11)].tail
        seen: list[int] = []

        def handed(delta: ImageDelta, older: ClusterImage, newer: ClusterImage) -> None:
            assert apply_delta(older, delta) == newer
            seen.append(sum(len(topic.partitions) for topic in newer.topics.values()))

        tail.subscribe(handed)
        quorum.create("orders", partitions=1_000)
        controller = quorum.controller(quorum.active())
        quorum.world.run_until(lambda: tail.image == controller.image and bool(tail.image.topics), timeout=20)
        assert set(seen) <= {0, 1_000}, "all of it, or nothing"
        assert max(turns) > 3, "others had their turns meanwhile"
        # What it has written is what it has shown: the next life reads the same.
        known = tail.offset
        quorum.kill(NodeId(11))
        quorum.start_brokers(11, wait=False)
        again = quorum.brokers[NodeId(11)].tail
        assert again.offset >= known
        assert len(again.image.topic_named("orders").partitions) == 1_000  # type: ignore[union-attr]
