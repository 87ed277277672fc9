"""The lane: order, numbers, what may fly, and what becomes of each batch."""

from __future__ import annotations

from dataclasses import replace
from random import Random
from uuid import UUID

import pytest
from client_world import batch_of

from tidelog.client.errors import UnknownDeliveryError
from tidelog.client.lane import Batch, Failed, Lane, Producer
from tidelog.client.produce_frame import ProduceFrame
from tidelog.log.batch_header import check_batch
from tidelog.log.producers import Duplicate, ProducerState
from tidelog.model.errors import (
    DuplicateSequenceError,
    ErrorCode,
    OutOfOrderSequenceError,
    RemoteError,
    TidelogError,
    TransportError,
)
from tidelog.model.ids import PartitionId, TopicId
from tidelog.rpc.v1 import log_pb2 as pb

PLACE = PartitionId(TopicId(UUID(int=1)), 0)
NOT_LEADER = RemoteError("moved", code=ErrorCode.NOT_LEADER_OR_FOLLOWER)
THROTTLED = RemoteError("slow down", code=ErrorCode.THROTTLING_QUOTA_EXCEEDED)
TOO_LARGE = RemoteError("too large", code=ErrorCode.MESSAGE_TOO_LARGE)
BROKEN = TransportError("broken")


def lane_with(*names: str, producer: int = 7) -> tuple[Lane[str], list[Batch[str]]]:
    lane: Lane[str] = Lane("orders", PLACE)
    batches = [made(name) for name in names]
    for batch in batches:
        lane.add(batch)
    assert lane.needs_producer
    assert lane.start(Producer(producer, 0)) == []
    return lane, batches


def made(name: str, *, deadline_ms: int = 1_000_000) -> Batch[str]:
    return Batch(batch_of(name.encode(), b"second"), count=2, deadline_ms=deadline_ms, result=name)


def fly(lane: Lane[str]) -> Batch[str] | None:
    batch = lane.next_batch(0)
    if batch is not None:
        lane.took_off(batch, 0)
    lane.validate()
    return batch


def sequence_of(batch: Batch[str]) -> tuple[int, int, int]:
    assert batch.numbered is not None
    header = check_batch(batch.numbered, size_max=1 << 20)
    return header.producer_id, header.producer_epoch, header.base_sequence


def test_the_first_batch_flies_alone_and_then_up_to_five_in_order() -> None:
    lane, batches = lane_with(*"abcdefgh")
    assert fly(lane) is batches[0]
    assert fly(lane) is None
    assert lane.stored(batches[0], 0)
    assert [fly(lane) for _ in range(6)] == [*batches[1:6], None]
    assert [sequence_of(batch)[2] for batch in batches[:6]] == [0, 2, 4, 6, 8, 10]
    assert lane.stored(batches[1], 0)
    assert fly(lane) is batches[6]


def test_numbers_are_under_the_crc_and_the_rest_is_untouched() -> None:
    lane, (batch,) = lane_with("a", producer=42)
    fly(lane)
    assert sequence_of(batch) == (42, 0, 0)
    assert batch.numbered is not None
    assert batch.numbered[61:] == batch.data[61:]


def test_after_a_failure_nothing_new_flies_until_all_are_answered_and_then_the_first_alone() -> None:
    lane, batches = lane_with(*"abcd")
    fly(lane)
    lane.stored(batches[0], 0)
    fly(lane), fly(lane)
    before = sequence_of(batches[1])
    assert lane.refused(batches[1], NOT_LEADER) is None
    assert fly(lane) is None
    assert lane.refused(batches[2], NOT_LEADER) is None
    assert fly(lane) is batches[1]
    assert sequence_of(batches[1]) == before
    assert fly(lane) is None
    assert lane.stored(batches[1], 0)
    assert fly(lane) is batches[2]


def test_an_answer_that_overtakes_a_failure_does_not_start_the_flow() -> None:
    lane, batches = lane_with(*"abcde")
    fly(lane)
    lane.stored(batches[0], 0)
    fly(lane), fly(lane)
    lane.refused(batches[1], RemoteError("late", code=ErrorCode.REQUEST_TIMED_OUT))
    assert lane.stored(batches[2], 0)
    assert fly(lane) is batches[1]
    assert fly(lane) is None


def test_a_refused_batch_leaves_a_gap_and_those_behind_it_are_numbered_anew() -> None:
    lane, batches = lane_with(*"abc")
    fly(lane)
    lane.stored(batches[0], 0)
    fly(lane), fly(lane)
    assert lane.refused(batches[1], TOO_LARGE) == Failed(batches[1], TOO_LARGE)
    assert lane.refused(batches[2], OutOfOrderSequenceError("gap")) is None
    assert lane.needs_producer
    assert fly(lane) is None
    assert lane.start(Producer(8, 0)) == []
    assert fly(lane) is batches[2]
    assert sequence_of(batches[2]) == (8, 0, 0)
    assert lane.resets == 1


def test_a_batch_of_unknown_outcome_is_never_numbered_anew() -> None:
    lane, batches = lane_with(*"ab")
    fly(lane)
    lane.lost(batches[0], BROKEN, was_carried=True)
    assert fly(lane) is batches[0]
    assert lane.refused(batches[0], OutOfOrderSequenceError("gap")) is None
    assert lane.needs_producer
    (failed,) = lane.start(Producer(8, 0))
    assert failed.batch is batches[0]
    assert isinstance(failed.error, UnknownDeliveryError)
    assert fly(lane) is batches[1]
    assert sequence_of(batches[1]) == (8, 0, 0)


def test_a_leader_of_the_past_says_nothing_of_a_gap() -> None:
    lane, (batch,) = lane_with("a")
    fly(lane)
    lane.lost(batch, BROKEN, was_carried=True)
    fly(lane)
    before = sequence_of(batch)
    assert lane.refused(batch, OutOfOrderSequenceError("gap"), answered_epoch=4, known_epoch=5) is None
    assert not lane.needs_producer
    assert fly(lane) is batch
    assert sequence_of(batch) == before, "again, under its number"
    assert lane.refused(batch, OutOfOrderSequenceError("gap"), answered_epoch=5, known_epoch=5) is None
    assert lane.needs_producer, "the newest leader is believed"


def test_a_newer_leader_that_is_heard_of_later_takes_back_what_was_said_of_a_gap() -> None:
    lane, (batch,) = lane_with("a")
    fly(lane)
    lane.refused(batch, OutOfOrderSequenceError("gap"), answered_epoch=4, known_epoch=4)
    assert lane.needs_producer
    assert fly(lane) is None
    lane.learned(4)
    assert fly(lane) is None, "no newer one: it is believed"
    lane.learned(5)
    assert fly(lane) is batch
    assert lane.resets == 0


def test_a_batch_that_never_left_is_numbered_anew() -> None:
    lane, batches = lane_with("a")
    fly(lane)
    lane.lost(batches[0], BROKEN, was_carried=False)
    fly(lane)
    lane.refused(batches[0], OutOfOrderSequenceError("gap"))
    assert lane.start(Producer(8, 0)) == []
    assert fly(lane) is batches[0]


def test_what_expires_in_flight_is_told_at_once_and_leaves_when_it_lands() -> None:
    lane, batches = lane_with("a", "b")
    batches[0].deadline_ms = 10
    fly(lane)
    assert lane.expire(9) == []
    assert lane.expire(10) == [batches[0]]
    assert lane.expire(11) == []
    lane.validate()
    assert lane.flying == 1
    assert not lane.stored(batches[0], 11)
    assert list(lane.batches) == [batches[1]]


def test_a_long_pause_makes_the_next_one_fly_alone() -> None:
    lane, batches = lane_with(*"abc")
    fly(lane)
    lane.stored(batches[0], 0)
    later = 3_600_000
    assert lane.next_batch(later) is batches[1]
    lane.took_off(batches[1], later)
    assert lane.next_batch(later) is None


def test_abandoned_batches_are_told_once() -> None:
    lane, batches = lane_with("a", "b")
    fly(lane)
    assert lane.abandon() == batches
    assert lane.abandon() == []
    lane.lost(batches[0], BROKEN, was_carried=True)
    assert not lane.batches


class _Log:
    """A log with the real rules for producers, behind a connection that loses requests and answers."""

    def __init__(self) -> None:
        self.producers = ProducerState()
        self.stored: list[str] = []

    def append(self, data: bytearray, name: str) -> TidelogError | None:
        header = check_batch(data, size_max=1 << 20, from_client=True)
        try:
            found = self.producers.check(header)
        except (OutOfOrderSequenceError, DuplicateSequenceError) as error:
            return error
        if isinstance(found, Duplicate):
            return None
        self.producers.apply(replace(header, base_offset=2 * len(self.stored)), now_ms=0)
        self.stored.append(name)
        return None


class _Chaos:
    """A connection that loses requests and answers, and delivers what was lost later, when nobody expects it."""

    def __init__(self, seed: int) -> None:
        self.random = Random(seed)
        self.lane: Lane[str] = Lane("orders", PLACE)
        self.log = _Log()
        self.pipe: list[tuple[Batch[str], bytearray]] = []
        self.ghosts: list[list[tuple[str, bytearray]]] = []
        self.acked: list[str] = []
        self.failed: dict[str, bool] = {}
        """Whether it may be stored all the same."""
        self.fresh = iter(range(1, 100_000))
        self.eagerness = self.random.choice((0.2, 0.5, 0.9))

    def run(self, names: list[str]) -> None:
        waiting = list(names)
        for _ in range(20_000):
            if waiting and self.random.random() < self.eagerness:
                self.lane.add(made(waiting.pop(0)))
            self.launch()
            if self.pipe and self.random.random() < 1.1 - self.eagerness:
                self.answer()
            if self.ghosts and self.random.random() < 0.05:
                for name, data in self.ghosts.pop(0):
                    self.log.append(data, name)
            if not waiting and not self.lane.batches and not self.ghosts:
                return
        raise AssertionError("it does not end")

    def launch(self) -> None:
        if self.lane.needs_producer:
            for one in self.lane.start(Producer(next(self.fresh), 0)):
                self.failed[one.batch.result] = True
        batch = self.lane.next_batch(0)
        if batch is not None:
            self.pipe.append((batch, self.lane.took_off(batch, 0)))
        self.lane.validate()

    def answer(self) -> None:
        """One answer, or the end of the connection: of what was sent some prefix arrives, now or later."""
        if self.random.random() < 0.1:
            arrived = self.pipe[: self.random.randint(0, len(self.pipe))]
            frames = [(batch.result, data) for batch, data in arrived]
            self.ghosts.append(frames)
            if self.random.random() < 0.5:
                for name, data in self.ghosts.pop():
                    self.log.append(data, name)
            for batch, _ in self.pipe:
                self.lane.lost(batch, BROKEN, was_carried=True)
            self.pipe.clear()
            return
        batch, data = self.pipe.pop(0)
        draw = self.random.random()
        if draw < 0.05:
            assert self.lane.refused(batch, TOO_LARGE) is not None
            self.failed[batch.result] = batch.is_unknown
        elif draw < 0.15:
            self.lane.refused(batch, THROTTLED)
        elif draw < 0.2:
            self.log.append(data, batch.result)
            self.lane.refused(batch, NOT_LEADER)
        else:
            error = self.log.append(data, batch.result)
            if error is None or error.code is ErrorCode.DUPLICATE_SEQUENCE_NUMBER:
                assert self.lane.stored(batch, 0)
                self.acked.append(batch.result)
            else:
                self.lane.refused(batch, error)


@pytest.mark.parametrize("seed", range(150))
def test_whatever_is_lost_nothing_is_stored_twice_or_out_of_order(seed: int) -> None:
    names = [f"{number:03}" for number in range(60)]
    chaos = _Chaos(seed)
    chaos.run(names)
    stored, acked, failed = chaos.log.stored, set(chaos.acked), chaos.failed
    assert acked | set(failed) == set(names), "every batch has ended"
    assert not acked & set(failed)
    assert acked <= set(stored)
    assert len(stored) == len(set(stored)), "nothing is stored twice"
    # What has failed with an unknown outcome may arrive late.
    in_order = [name for name in stored if name in acked]
    assert in_order == sorted(in_order)
    assert not {name for name, may_be_stored in failed.items() if not may_be_stored} & set(stored)


def test_a_frame_is_the_message_that_it_stands_for() -> None:
    frame = ProduceFrame(acks=-1, timeout_ms=5_000)
    assert pb.ProduceRequest.FromString(frame.SerializeToString()) == pb.ProduceRequest(acks=-1, timeout_ms=5_000)
    rows = [("a", 0, b"x" * 3), ("b", 7, b"y" * 200), ("c", 300, b"z" * 70_000)]
    for topic, partition, batches in rows:
        frame.add(topic, PartitionId(PLACE.topic_id, partition), bytearray(batches))
    wanted = pb.ProduceRequest(acks=-1, timeout_ms=5_000)
    for topic, partition, batches in rows:
        wanted.partitions.add(topic=topic, topic_id=PLACE.topic_id.bytes, partition=partition, batches=batches)
    assert pb.ProduceRequest.FromString(frame.SerializeToString()) == wanted
    assert (frame.count, frame.size) == (3, 70_203)
