"""The queue of a partition: order, sequence numbers, what may be in flight, and the outcome of each batch."""

from __future__ import annotations

from dataclasses import replace
from random import Random
from uuid import UUID

import pytest
from support.clients.cluster import batch_of

from tidelog.client.errors import DeliveryOutcomeUnknownError
from tidelog.client.producer.fast_path import ProducerBatch
from tidelog.client.producer.partition_queue import PartitionQueue, ProducerIdAndEpoch, Stored
from tidelog.client.producer.produce_frame import ProduceFrame
from tidelog.log.batch_header import check_batch
from tidelog.log.producers import Duplicate, ProducerState
from tidelog.model.errors import (
    CallTimeoutError,
    DuplicateSequenceError,
    ErrorCode,
    OutOfOrderSequenceError,
    RemoteError,
    TidelogError,
    TransportError,
)
from tidelog.model.ids import PartitionId, TopicId
from tidelog.model.transaction_errors import OffsetMismatchError
from tidelog.rpc.v1 import log_pb2 as pb

PARTITION = PartitionId(TopicId(UUID(int=1)), 0)
NOT_LEADER = RemoteError("moved", code=ErrorCode.NOT_LEADER_OR_FOLLOWER)
THROTTLED = RemoteError("slow down", code=ErrorCode.THROTTLING_QUOTA_EXCEEDED)
TOO_LARGE = RemoteError("too large", code=ErrorCode.MESSAGE_TOO_LARGE)
BROKEN = TransportError("broken")
STORED = Stored(0, -1)

Queue = PartitionQueue[ProducerBatch]


def queue_with(*names: str, producer: int = 7) -> tuple[Queue, list[ProducerBatch]]:
    queue: Queue = PartitionQueue("orders", PARTITION)
    batches = [new_batch(name) for name in names]
    for batch in batches:
        queue.add(batch)
    assert queue.needs_producer
    assert queue.start(ProducerIdAndEpoch(producer, 0)) == []
    return queue, batches


def new_batch(name: str) -> ProducerBatch:
    """Two records; the topic is its name."""
    batch = ProducerBatch(name, 0, 1_000, 0.0)
    batch.data, batch.count, batch.deadline_s = bytearray(batch_of(name.encode(), b"second")), 2, 1_000.0
    return batch


def send_next(queue: Queue) -> ProducerBatch | None:
    batch = queue.next_batch(0)
    if batch is not None:
        queue.send(batch, 0)
    queue.validate()
    return batch


def numbers_of(batch: ProducerBatch) -> tuple[int, int, int]:
    assert batch.sequence >= 0
    header = check_batch(batch.data, size_max=1 << 20)
    return header.producer_id, header.producer_epoch, header.base_sequence


def test_first_batch_goes_alone_and_then_up_to_five_in_order() -> None:
    queue, batches = queue_with(*"abcdefgh")
    assert send_next(queue) is batches[0]
    assert send_next(queue) is None
    queue.stored(batches[0], STORED, 0)
    assert [send_next(queue) for _ in range(6)] == [*batches[1:6], None]
    assert [numbers_of(batch)[2] for batch in batches[:6]] == [0, 2, 4, 6, 8, 10]
    queue.stored(batches[1], STORED, 0)
    assert send_next(queue) is batches[6]


def test_numbers_are_under_the_crc_and_the_batch_is_not_copied() -> None:
    queue, (batch,) = queue_with("a", producer=42)
    data, before = batch.data, bytes(batch.data)
    send_next(queue)
    assert numbers_of(batch) == (42, 0, 0)
    assert batch.data is data
    assert batch.data[61:] == before[61:]


def test_batch_that_gets_new_numbers_leaves_the_bytes_of_the_last_attempt_alone() -> None:
    queue, (batch,) = queue_with("a")
    send_next(queue)
    sent, before = batch.data, bytes(batch.data)
    queue.rejected(batch, OutOfOrderSequenceError("gap"))
    assert queue.start(ProducerIdAndEpoch(8, 0)) == []
    send_next(queue)
    assert numbers_of(batch) == (8, 0, 0)
    assert sent == before


def test_after_a_failure_all_are_answered_and_then_the_first_goes_alone() -> None:
    queue, batches = queue_with(*"abcd")
    send_next(queue)
    queue.stored(batches[0], STORED, 0)
    send_next(queue), send_next(queue)
    before = numbers_of(batches[1])
    queue.rejected(batches[1], NOT_LEADER)
    assert send_next(queue) is None
    queue.rejected(batches[2], NOT_LEADER)
    assert send_next(queue) is batches[1]
    assert numbers_of(batches[1]) == before
    assert send_next(queue) is None
    queue.stored(batches[1], STORED, 0)
    assert send_next(queue) is batches[2]


def test_response_that_overtakes_a_failure_does_not_start_the_flow() -> None:
    queue, batches = queue_with(*"abcde")
    send_next(queue)
    queue.stored(batches[0], STORED, 0)
    send_next(queue), send_next(queue)
    queue.rejected(batches[1], RemoteError("late", code=ErrorCode.REQUEST_TIMED_OUT))
    queue.stored(batches[2], STORED, 0)
    assert send_next(queue) is batches[1]
    assert send_next(queue) is None


def test_rejected_batch_leaves_a_gap_and_those_behind_it_get_new_numbers() -> None:
    queue, batches = queue_with(*"abc")
    send_next(queue)
    queue.stored(batches[0], STORED, 0)
    send_next(queue), send_next(queue)
    queue.rejected(batches[1], TOO_LARGE)
    assert batches[1].outcome is TOO_LARGE
    queue.rejected(batches[2], OutOfOrderSequenceError("gap"))
    assert queue.needs_producer
    assert send_next(queue) is None
    assert queue.start(ProducerIdAndEpoch(8, 0)) == []
    assert send_next(queue) is batches[2]
    assert numbers_of(batches[2]) == (8, 0, 0)
    assert queue.resets == 1


def test_batch_that_may_be_stored_never_gets_new_numbers() -> None:
    queue, batches = queue_with(*"ab")
    send_next(queue)
    queue.lost(batches[0], BROKEN, was_carried=True)
    assert send_next(queue) is batches[0]
    queue.rejected(batches[0], OutOfOrderSequenceError("gap"))
    assert queue.needs_producer
    assert queue.start(ProducerIdAndEpoch(8, 0)) == [batches[0]]
    assert isinstance(batches[0].outcome, DeliveryOutcomeUnknownError)
    assert send_next(queue) is batches[1]
    assert numbers_of(batches[1]) == (8, 0, 0)


def test_leader_of_an_old_epoch_cannot_report_a_gap() -> None:
    queue, (batch,) = queue_with("a")
    send_next(queue)
    queue.lost(batch, BROKEN, was_carried=True)
    send_next(queue)
    before = numbers_of(batch)
    queue.rejected(batch, OutOfOrderSequenceError("gap"), answered_epoch=4, known_epoch=5)
    assert not queue.needs_producer
    assert send_next(queue) is batch
    assert numbers_of(batch) == before, "again, with the same sequence"
    queue.rejected(batch, OutOfOrderSequenceError("gap"), answered_epoch=5, known_epoch=5)
    assert queue.needs_producer, "the newest leader can"


def test_newer_leader_that_becomes_known_later_revokes_a_gap() -> None:
    queue, (batch,) = queue_with("a")
    send_next(queue)
    queue.rejected(batch, OutOfOrderSequenceError("gap"), answered_epoch=4, known_epoch=4)
    assert queue.needs_producer
    assert send_next(queue) is None
    queue.learn_epoch(4)
    assert send_next(queue) is None, "there is no newer one"
    queue.learn_epoch(5)
    assert send_next(queue) is batch
    assert queue.resets == 0


def test_batch_that_never_left_gets_new_numbers() -> None:
    queue, batches = queue_with("a")
    send_next(queue)
    queue.lost(batches[0], BROKEN, was_carried=False)
    send_next(queue)
    queue.rejected(batches[0], OutOfOrderSequenceError("gap"))
    assert queue.start(ProducerIdAndEpoch(8, 0)) == []
    assert send_next(queue) is batches[0]


def test_batch_that_expires_in_flight_is_reported_at_once_and_keeps_its_slot() -> None:
    queue, batches = queue_with("a", "b")
    batches[0].deadline_s = 10
    send_next(queue)
    assert queue.expired(9) == []
    assert queue.expired(10) == [batches[0]]
    late = CallTimeoutError("late")
    queue.fail(batches[0], late)
    assert queue.expired(11) == []
    assert queue.pop_reportable() == [batches[0]]
    queue.validate()
    assert queue.in_flight == 1
    queue.stored(batches[0], STORED, 11)
    assert batches[0].outcome is late
    assert list(queue.batches) == [batches[1]]
    assert queue.pop_reportable() == [], "it is reported once"


def test_batches_are_reported_in_order() -> None:
    queue, batches = queue_with(*"abcd")
    send_next(queue)
    queue.stored(batches[0], STORED, 0)
    send_next(queue), send_next(queue)
    queue.rejected(batches[1], NOT_LEADER)
    queue.stored(batches[2], STORED, 0)
    assert queue.pop_reportable() == [batches[0]]
    queue.fail(batches[1], BROKEN)
    assert queue.pop_reportable() == batches[1:3]
    failed = new_batch("e")
    failed.outcome = BROKEN
    queue.add(failed)
    assert queue.unsent() == [batches[3]]
    assert queue.pop_reportable() == []
    queue.fail(batches[3], BROKEN)
    assert queue.pop_reportable() == [batches[3], failed]


def test_first_batch_after_a_long_pause_goes_alone() -> None:
    queue, batches = queue_with(*"abc")
    send_next(queue)
    queue.stored(batches[0], STORED, 0)
    later_s = 3_600.0
    assert queue.next_batch(later_s) is batches[1]
    queue.send(batches[1], later_s)
    assert queue.next_batch(later_s) is None


class _Log:
    """A log with the real rules for producers, behind a connection that loses requests and responses."""

    def __init__(self) -> None:
        self.producers = ProducerState()
        self.stored: list[str] = []

    def append(self, data: bytearray, name: str) -> TidelogError | None:
        header = check_batch(data, size_max=1 << 20, from_client=True)
        try:
            verdict = self.producers.check(header)
        except (OutOfOrderSequenceError, DuplicateSequenceError) as error:
            return error
        if isinstance(verdict, Duplicate):
            return None
        self.producers.apply(replace(header, base_offset=2 * len(self.stored)), now_ms=0)
        self.stored.append(name)
        return None


class _Chaos:
    """A connection that loses requests and responses, and delivers lost requests late."""

    def __init__(self, seed: int) -> None:
        self.random = Random(seed)
        self.queue: Queue = PartitionQueue("orders", PARTITION)
        self.log = _Log()
        self.sent: list[tuple[ProducerBatch, bytearray]] = []
        self.late: list[list[tuple[str, bytearray]]] = []
        self.acked: list[str] = []
        self.failed: dict[str, bool] = {}
        """Whether it may be stored."""
        self.producer_ids = iter(range(1, 100_000))
        self.eagerness = self.random.choice((0.2, 0.5, 0.9))

    def run(self, names: list[str]) -> None:
        waiting = list(names)
        for _ in range(20_000):
            if waiting and self.random.random() < self.eagerness:
                self.queue.add(new_batch(waiting.pop(0)))
            self.send()
            if self.sent and self.random.random() < 1.1 - self.eagerness:
                self.answer()
            if self.late and self.random.random() < 0.05:
                for name, data in self.late.pop(0):
                    self.log.append(data, name)
            for batch in self.queue.pop_reportable():
                if batch.outcome is STORED:
                    self.acked.append(batch.topic)
                else:
                    self.failed[batch.topic] = batch.may_be_stored
            if not waiting and not self.queue.unreported and not self.late:
                return
        raise AssertionError("it does not end")

    def send(self) -> None:
        if self.queue.needs_producer:
            self.queue.start(ProducerIdAndEpoch(next(self.producer_ids), 0))
        batch = self.queue.next_batch(0)
        if batch is not None:
            self.sent.append((batch, self.queue.send(batch, 0)))
        self.queue.validate()

    def answer(self) -> None:
        """One response, or the end of the connection: of what was sent some prefix arrives, now or later."""
        if self.random.random() < 0.1:
            arrived = self.sent[: self.random.randint(0, len(self.sent))]
            self.late.append([(batch.topic, data) for batch, data in arrived])
            if self.random.random() < 0.5:
                for name, data in self.late.pop():
                    self.log.append(data, name)
            for batch, _ in self.sent:
                self.queue.lost(batch, BROKEN, was_carried=True)
            self.sent.clear()
            return
        batch, data = self.sent.pop(0)
        draw = self.random.random()
        if draw < 0.05:
            self.queue.rejected(batch, TOO_LARGE)
            assert batch.outcome is TOO_LARGE
        elif draw < 0.15:
            self.queue.rejected(batch, THROTTLED)
        elif draw < 0.2:
            self.log.append(data, batch.topic)
            self.queue.rejected(batch, NOT_LEADER)
        else:
            error = self.log.append(data, batch.topic)
            if error is None or error.code is ErrorCode.DUPLICATE_SEQUENCE_NUMBER:
                self.queue.stored(batch, STORED, 0)
            else:
                self.queue.rejected(batch, error)


@pytest.mark.parametrize("seed", range(150))
def test_nothing_is_stored_twice_or_out_of_order_whatever_is_lost(seed: int) -> None:
    names = [f"{number:03}" for number in range(60)]
    chaos = _Chaos(seed)
    chaos.run(names)
    stored, acked, failed = chaos.log.stored, set(chaos.acked), chaos.failed
    assert acked | set(failed) == set(names), "every batch has ended"
    assert not acked & set(failed)
    assert acked <= set(stored)
    assert len(stored) == len(set(stored)), "nothing is stored twice"
    # A batch that failed with an unknown outcome may arrive late.
    in_order = [name for name in stored if name in acked]
    assert in_order == sorted(in_order)
    assert not {name for name, may_be_stored in failed.items() if not may_be_stored} & set(stored)


def test_frame_is_the_message_that_it_encodes() -> None:
    frame = ProduceFrame(acks=-1, timeout_ms=5_000)
    assert pb.ProduceRequest.FromString(frame.SerializeToString()) == pb.ProduceRequest(acks=-1, timeout_ms=5_000)
    rows = [("a", 0, b"x" * 3), ("b", 7, b"y" * 200), ("c", 300, b"z" * 70_000)]
    for topic, partition, batches in rows:
        frame.add(topic, PartitionId(PARTITION.topic_id, partition), bytearray(batches))
    expected = pb.ProduceRequest(acks=-1, timeout_ms=5_000)
    for topic, partition, batches in rows:
        expected.partitions.add(topic=topic, topic_id=PARTITION.topic_id.bytes, partition=partition, batches=batches)
    assert pb.ProduceRequest.FromString(frame.SerializeToString()) == expected
    assert (frame.count, frame.size) == (3, 70_203)


def test_a_batch_whose_condition_is_unmet_gives_its_sequence_to_the_next() -> None:
    queue, batches = queue_with("a", "b", "c")
    send_next(queue)
    queue.stored(batches[0], STORED, 0)
    assert send_next(queue) is batches[1]
    queue.rejected(batches[1], OffsetMismatchError("not there"))
    assert send_next(queue) is batches[2]
    assert numbers_of(batches[2]) == (7, 0, 2), "the log expects it"


def test_an_unmet_batch_with_others_behind_it_or_in_doubt_keeps_its_sequence() -> None:
    queue, batches = queue_with("a", "b", "c", "d")
    send_next(queue)
    queue.stored(batches[0], STORED, 0)
    assert (send_next(queue), send_next(queue)) == (batches[1], batches[2])
    queue.rejected(batches[1], OffsetMismatchError("not there"))
    queue.rejected(batches[2], OutOfOrderSequenceError("a gap"))
    assert queue.needs_producer, "a gap: its sequence is not given away"
    queue, batches = queue_with("a", "b")
    send_next(queue)
    queue.lost(batches[0], TidelogError("no answer"), was_carried=True)
    assert send_next(queue) is batches[0]
    queue.rejected(batches[0], OffsetMismatchError("perhaps by itself"))
    assert send_next(queue) is batches[1]
    assert numbers_of(batches[1]) == (7, 0, 2)
