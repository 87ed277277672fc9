"""The frames of a replication stream, the throttle and those who wait: parts that need no broker."""

from collections.abc import Callable
from dataclasses import replace
from uuid import UUID

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.async_tests import asyncio_test

from tidelog.model.errors import InvalidRequestError, NotLeaderOrFollowerError, UnsupportedVersionError
from tidelog.model.ids import PartitionId, TopicId
from tidelog.replication.messages import (
    Ack,
    Acks,
    Ended,
    FromFollower,
    Histories,
    History,
    Push,
    Pushed,
    Reason,
    Subscribe,
    Subscribes,
    Unsubscribe,
)
from tidelog.replication.throttle import NO_LIMIT, Bucket
from tidelog.replication.waiters import AckWaiters, Waker, Wakers
from tidelog.replication.wire import decode_from_follower, decode_from_leader, encode

PARTITION = PartitionId(TopicId(UUID(int=7)), 3)
SUBSCRIBE = Subscribe(
    partition=PARTITION,
    number=9,
    leader_epoch=4,
    broker_epoch=77,
    next_offset=100,
    last_epoch=-1,
    durable_end=90,
    takes_gaps=True,
)


@given(
    st.lists(st.tuples(st.integers(0, 2**63), st.integers(0, 2**62), st.binary(max_size=300)), max_size=20),
)
def test_pushes_come_back_as_they_were(rows: list[tuple[int, int, bytes]]) -> None:
    decoded = decode_from_leader(encode(Pushed([Push(*row) for row in rows])))
    assert isinstance(decoded, Pushed)
    assert [(push.number, push.high_watermark, bytes(push.batches)) for push in decoded.pushes] == rows


@pytest.mark.parametrize(
    "message",
    [
        SUBSCRIBE,
        replace(SUBSCRIBE, takes_gaps=False, takes_history=True),
        Subscribes((SUBSCRIBE, replace(SUBSCRIBE, number=10, takes_gaps=False))),
        Subscribes(()),
        Unsubscribe(number=5),
        Acks(12, (Ack(1, 2, 3), Ack(4, 5, 6))),
        Acks(0, ()),
    ],
)
def test_what_a_follower_says_comes_back_as_it_was(message: FromFollower) -> None:
    assert decode_from_follower(encode(message)) == message


@pytest.mark.parametrize("reason", list(Reason))
def test_an_end_comes_back_with_its_reason(reason: Reason) -> None:
    ended = Ended(number=3, reason=reason, epoch=2, offset=40)
    assert decode_from_leader(encode(ended)) == ended


@given(
    st.lists(st.tuples(st.integers(0, 2**63), st.integers(0, 2**62), st.binary(max_size=300)), max_size=20),
    st.integers(0, 2**62),
)
def test_pushes_with_their_offsets_come_back_as_they_were(rows: list[tuple[int, int, bytes]], offset: int) -> None:
    decoded = decode_from_leader(encode(Pushed([Push(*row, offset) for row in rows])))
    assert isinstance(decoded, Pushed)
    assert [(push.number, push.high_watermark, bytes(push.batches), push.offset) for push in decoded.pushes] == [
        (*row, offset) for row in rows
    ]


def test_an_older_follower_is_sent_pushes_in_the_form_that_it_knows() -> None:
    assert encode(Pushed([Push(1, 2, b"batches")]))[1] == 1
    assert encode(Pushed([Push(1, 2, b"batches", 40)]))[1] == 8


def test_a_subscription_differs_from_an_older_one_in_a_flag_that_older_leaders_ignore() -> None:
    older, newer = encode(SUBSCRIBE), encode(replace(SUBSCRIBE, takes_history=True))
    assert (older[:-1], len(older)) == (newer[:-1], len(newer))


def test_histories_come_back_as_they_were() -> None:
    message = Histories((History(7, 40, ((0, 0), (3, 10), (4, 10))), History(8, 0, ())))
    assert decode_from_leader(encode(message)) == message


@pytest.mark.parametrize(
    "history",
    [History(7, 40, ((3, 10), (3, 11))), History(7, 40, ((3, 10), (4, 9))), History(7, -1, ())],
    ids=["an epoch twice", "starts that go down", "a negative offset"],
)
def test_a_history_that_cannot_be_is_refused(history: History) -> None:
    with pytest.raises(InvalidRequestError):
        decode_from_leader(encode(Histories((history,))))


def test_a_history_that_is_cut_short_is_refused() -> None:
    frame = encode(Histories((History(7, 40, ((0, 0), (3, 10))),)))
    for size in range(6, len(frame)):
        with pytest.raises(InvalidRequestError):
            decode_from_leader(frame[:size])


def test_the_batches_of_a_push_are_not_copied() -> None:
    frame = encode(Pushed([Push(1, 2, b"batches")]))
    decoded = decode_from_leader(frame)
    assert isinstance(decoded, Pushed)
    (push,) = decoded.pushes
    assert isinstance(push.batches, memoryview)
    assert push.batches.obj is frame


@given(st.data())
def test_frames_that_are_cut_or_changed_are_refused_or_read_but_never_break_the_reader(data: st.DataObject) -> None:
    follower = [
        encode(SUBSCRIBE),
        encode(Subscribes((SUBSCRIBE,) * 2)),
        encode(Unsubscribe(number=5)),
        encode(Acks(12, (Ack(1, 2, 3),))),
    ]
    leader = [encode(Pushed([Push(1, 2, b"x" * 30)])), encode(Ended(number=1, reason=Reason.DIVERGED))]
    frame = bytearray(data.draw(st.sampled_from(follower + leader)))
    if data.draw(st.booleans()):
        frame = frame[: data.draw(st.integers(0, len(frame)))]
    for _ in range(data.draw(st.integers(0, 3))):
        if frame:
            frame[data.draw(st.integers(0, len(frame) - 1))] = data.draw(st.integers(0, 255))
    known = (Subscribe, Subscribes, Unsubscribe, Acks, Pushed, Ended, InvalidRequestError, UnsupportedVersionError)
    for decode in (decode_from_follower, decode_from_leader):
        assert isinstance(_outcome(decode, bytes(frame)), known)


def _outcome(decode: Callable[[bytes], object], frame: bytes) -> object:
    try:
        return decode(frame)
    except (InvalidRequestError, UnsupportedVersionError) as error:
        return error


def test_another_version_and_the_wrong_side_are_refused() -> None:
    with pytest.raises(UnsupportedVersionError):
        decode_from_follower(b"\x02" + encode(SUBSCRIBE)[1:])
    with pytest.raises(InvalidRequestError):
        decode_from_leader(encode(SUBSCRIBE))
    with pytest.raises(InvalidRequestError):
        decode_from_follower(encode(Pushed([])))
    with pytest.raises(InvalidRequestError):
        decode_from_follower(b"")


def test_a_bucket_gives_its_rate_and_no_more() -> None:
    bucket = Bucket(1000, 0.0)
    spent, now_s = 0, 0.0
    while now_s < 10:
        wait_s = bucket.wait_s(now_s)
        if wait_s > 0:
            now_s += wait_s
            continue
        piece = max(1, min(300, bucket.room(now_s)))
        bucket.spend(piece, now_s)
        spent += piece
    assert 10_000 <= spent <= 11_300, "a second's worth at the beginning, and the rate"


def test_a_bucket_follows_its_rate() -> None:
    bucket = Bucket(NO_LIMIT, 0.0)
    bucket.spend(1 << 40, 0.0)
    assert bucket.wait_s(0.0) == 0.0
    assert bucket.room(0.0) == NO_LIMIT
    bucket.set_rate(10, 1.0)
    bucket.spend(50, 1.0)
    assert 3.9 < bucket.wait_s(1.0) < 4.2
    bucket.set_rate(0, 1.0)
    assert bucket.wait_s(1.0) == 3600.0


@asyncio_test
async def test_producers_are_answered_in_the_order_of_their_offsets() -> None:
    waiters = AckWaiters()
    first, second, third = waiters.wait(5), waiters.wait(3), waiters.wait(9)
    waiters.advance(4)
    assert (first.done(), second.done(), third.done()) == (False, True, False)
    third.cancel()
    waiters.advance(9)
    assert first.done()
    assert len(waiters) == 0
    late = waiters.wait(20)
    waiters.fail(NotLeaderOrFollowerError("over", leader=2))
    assert isinstance(late.exception(), NotLeaderOrFollowerError)
    gone = waiters.wait(30)
    waiters.forget(gone)
    assert len(waiters) == 0


@asyncio_test
async def test_producers_that_give_up_together_are_looked_through_a_few_times_not_once_for_each() -> None:
    waiters = AckWaiters()
    futures = [waiters.wait(end) for end in range(1, 1_001)]
    passes, held = 0, waiters._waiters
    for number, future in enumerate(futures[:999], start=1):
        waiters.forget(future)
        passes += waiters._waiters is not held
        held = waiters._waiters
        assert len(held) <= 2 * (1_000 - number) + 1, "who has given up does not stay for long"
    assert passes <= 11, "each halves what is left"
    assert len(waiters) == 1
    waiters.advance(2_000)
    assert futures[-1].result() is None, "who has not given up is answered"
    assert all(future.cancelled() for future in futures[:-1])


@asyncio_test
async def test_nothing_is_held_for_a_partition_that_nobody_waits_for() -> None:
    wakers, waker = Wakers(), Waker()
    other = PartitionId(TopicId(UUID(int=8)), 0)
    wakers.add(waker, [PARTITION, other])
    wakers.wake(other)
    wakers.wake(other)
    await waker.wait()
    assert waker.take() == [other]
    wakers.remove(waker, [PARTITION, other])
    wakers.wake(PARTITION)
    assert len(wakers) == 0
    assert waker.take() == []
