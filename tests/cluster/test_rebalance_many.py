"""A topic gets many partitions while a group reads it: all are dealt, all flow, and nothing that was dealt moves.

How fast, `bench/rebalance.py` measures; here only that it happens.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import pytest
from support.clusters.waiting import DEADLINE_S, until

import tidelog
from tidelog.client.consumer.errors import WakeupError
from tidelog.client.record import TopicPartition
from tidelog.testing import LocalCluster

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(240)]

TOPIC, GROUP = "many", "four"
OLD, NEW = 20, 200
CONSUMERS = 4


class Member:
    """A consumer in a thread of its own, and what has happened to it."""

    def __init__(self, cluster: LocalCluster) -> None:
        self.held: set[int] = set()
        self.taken: set[int] = set()
        """What it had and had to give up, or lost."""
        self.read: dict[int, set[bytes | None]] = {}
        self.order: dict[int, list[int]] = {}
        """The offsets of each partition as they came."""
        self.error: BaseException | None = None
        self._consumer = tidelog.Consumer(cluster.bootstrap, group=GROUP, auto_offset_reset="earliest")
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _assigned(self, names: list[TopicPartition]) -> None:
        self.held |= {name.partition for name in names}

    def _revoked(self, names: list[TopicPartition]) -> None:
        numbers = {name.partition for name in names}
        self.held -= numbers
        self.taken |= numbers

    def _run(self) -> None:
        try:
            with self._consumer as consumer:
                consumer.subscribe([TOPIC], on_assigned=self._assigned, on_revoked=self._revoked)
                for record in consumer:
                    self.read.setdefault(record.partition, set()).add(record.value)
                    self.order.setdefault(record.partition, []).append(record.offset)
        except WakeupError:
            return
        except BaseException as error:
            self.error = error

    def close(self) -> None:
        self._consumer.wakeup()
        self._thread.join(DEADLINE_S)


@pytest.fixture
def members(admin: tidelog.Admin) -> Iterator[list[Member]]:
    """Members of the group; the topic goes after them."""
    made: list[Member] = []
    yield made
    for member in made:
        member.close()
    admin.delete_topic(TOPIC)


def is_shared(members: list[Member], count: int) -> bool:
    """Whether each partition has one owner, and all owners have as many."""
    assert not [member.error for member in members if member.error is not None]
    held = [set(member.held) for member in members]
    return sorted(number for some in held for number in some) == list(range(count)) and all(
        len(some) == count // CONSUMERS for some in held
    )


def send_all(producer: tidelog.Producer, numbers: range, value: bytes) -> None:
    for delivery in [producer.send(TOPIC, value, partition=number) for number in numbers]:
        delivery.result()


@pytest.mark.requirement("a:F-05", "a:F-31")
def test_many_partitions_that_are_added_are_dealt_and_flow_and_none_that_was_dealt_moves(
    cluster: LocalCluster, admin: tidelog.Admin, members: list[Member]
) -> None:
    with tidelog.Producer(cluster.bootstrap) as producer:
        admin.create_topic(TOPIC, partitions=OLD, replication_factor=3)
        members += [Member(cluster) for _ in range(CONSUMERS)]
        until(lambda: is_shared(members, OLD), "the old partitions are dealt")
        before = [set(member.held) for member in members]
        for member in members:
            member.taken.clear()
        is_over = threading.Event()
        sent = [0]

        def trickle() -> None:
            while not is_over.wait(0.1):
                sent[0] += 1
                for numbers in before:
                    producer.send(TOPIC, b"%d" % sent[0], partition=min(numbers))

        thread = threading.Thread(target=trickle)
        thread.start()
        try:
            until(
                lambda: all(min(one) in member.read for one, member in zip(before, members, strict=True)), "they flow"
            )
            began_s = time.monotonic()
            admin.add_partitions({TOPIC: OLD + NEW})
            send_all(producer, range(OLD, OLD + NEW), b"first")
            left_s = DEADLINE_S - (time.monotonic() - began_s)
            until(lambda: is_shared(members, OLD + NEW), "the new partitions are dealt", timeout_s=left_s)

            def has_flowed() -> bool:
                return all(member.read.get(number) for member in members for number in set(member.held) - {*range(OLD)})

            left_s = DEADLINE_S - (time.monotonic() - began_s)
            until(has_flowed, "the first record of each was read by its owner", timeout_s=left_s)
        finally:
            is_over.set()
            thread.join()
        producer.flush()
        last = b"%d" % sent[0]
        until(
            lambda: all(last in member.read[min(one)] for one, member in zip(before, members, strict=True)),
            "what did not move has flowed all the time",
        )
        for one, member in zip(before, members, strict=True):
            assert one <= member.held
            assert member.taken == set()
            assert len(member.read[min(one)]) == sent[0]  # nothing is left out
            for offsets in member.order.values():
                assert offsets == list(range(len(offsets)))  # nothing comes twice, nothing out of order
        # With the files there, a second round goes the same way.
        send_all(producer, range(OLD, OLD + NEW), b"second")
        until(
            lambda: all({b"first", b"second"} == member.read[n] for member in members for n in member.held if n >= OLD),
            "the second record of each was read by its owner",
        )
