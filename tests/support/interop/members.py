"""Members of groups, each a client on a thread of its own that polls, commits what it has read, and goes on.

`held` is what it is assigned, `history` every change of that, `records` what it has read: partition, offset and value.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine
from contextlib import suppress
from typing import Any, TypeVar

import aiokafka
import confluent_kafka

import tidelog
from support.clusters.waiting import until
from support.interop.clients import DEADLINE_S, kafka
from tidelog.client.consumer.errors import CommitFailedError
from tidelog.testing import LocalCluster

T = TypeVar("T")
Read = tuple[int, int, bytes | None]

POLL_S = 0.1
SESSION_MS = 6_000
HEARTBEAT_MS = 300


class Member:
    """Of a group that reads one topic, from the beginning if nothing is committed. A subclass is a client."""

    def __init__(self, cluster: LocalCluster, group: str, topic: str, **options: Any) -> None:
        self.held: frozenset[int] = frozenset()
        self.history: list[frozenset[int]] = []
        self.records: list[Read] = []
        self.error: BaseException | None = None
        self._begin = (cluster, group, topic, options)
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"{type(self).__name__} of {group}", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self.open(*self._begin)
            try:
                while not self._end.is_set():
                    read = self.poll()
                    self._look()
                    self.records += read
                    if read:
                        self.commit()
            finally:
                self.close()
        except BaseException as error:
            self.error = error

    def _look(self) -> None:
        now = frozenset(self.assignment())
        if now != self.held:
            self.history.append(now)
            self.held = now

    def check(self) -> None:
        if self.error is not None:
            raise AssertionError(f"{self._thread.name} has failed") from self.error

    def stop(self) -> None:
        """Leave as a client does that is closed."""
        self._end.set()
        self._thread.join(DEADLINE_S)
        assert not self._thread.is_alive(), f"{self._thread.name} does not close"
        self.check()

    # Of a client, on the thread.

    def open(self, cluster: LocalCluster, group: str, topic: str, options: dict[str, Any]) -> None:
        raise NotImplementedError

    def poll(self) -> list[Read]:
        raise NotImplementedError

    def assignment(self) -> set[int]:
        raise NotImplementedError

    def commit(self) -> None:
        """What was read. A refusal, because others have the partitions by now, is no error: they read it again."""
        raise NotImplementedError

    def close(self) -> None:
        raise NotImplementedError


class ConfluentMember(Member):
    protocol = "classic"

    def open(self, cluster: LocalCluster, group: str, topic: str, options: dict[str, Any]) -> None:
        config = {
            "bootstrap.servers": cluster.kafka_bootstrap,
            "group.id": group,
            "group.protocol": self.protocol,
            "auto.offset.reset": "earliest",
            "enable.auto.commit": False,
            "fetch.wait.max.ms": 100,
            "log_level": 2,
            "topic.metadata.refresh.interval.ms": 2_000,
        }
        if self.protocol == "classic":
            config |= {"session.timeout.ms": SESSION_MS, "heartbeat.interval.ms": HEARTBEAT_MS}
        if "instance" in options:
            config["group.instance.id"] = options["instance"]
        if "assignor" in options:
            config["partition.assignment.strategy"] = options["assignor"]
        self.consumer = confluent_kafka.Consumer(config)
        self.consumer.subscribe([topic])

    def poll(self) -> list[Read]:
        read: list[Read] = []
        for one in self.consumer.consume(500, POLL_S):
            error = one.error()
            if error is None:
                read.append((one.partition(), one.offset(), one.value()))  # type: ignore[arg-type]
            elif not error.retriable() and error.code() != confluent_kafka.KafkaError._ALL_BROKERS_DOWN:
                raise confluent_kafka.KafkaException(error)
        return read

    def assignment(self) -> set[int]:
        return {one.partition for one in self.consumer.assignment()}

    def commit(self) -> None:
        try:
            self.consumer.commit(asynchronous=False)
        except confluent_kafka.KafkaException as error:
            if error.args[0].code() not in (
                confluent_kafka.KafkaError.REBALANCE_IN_PROGRESS,
                confluent_kafka.KafkaError.ILLEGAL_GENERATION,
                confluent_kafka.KafkaError.UNKNOWN_MEMBER_ID,
                confluent_kafka.KafkaError._NO_OFFSET,
            ):
                raise

    def close(self) -> None:
        self.consumer.close()


class ConfluentConsumerProtocolMember(ConfluentMember):
    protocol = "consumer"


def _classic(cluster: LocalCluster, group: str, options: dict[str, Any]) -> dict[str, Any]:
    """Options of aiokafka and of kafka-python: they have the same names."""
    return {
        "bootstrap_servers": cluster.kafka_bootstrap,
        "group_id": group,
        "group_instance_id": options.get("instance"),
        "auto_offset_reset": "earliest",
        "enable_auto_commit": False,
        "session_timeout_ms": SESSION_MS,
        "heartbeat_interval_ms": HEARTBEAT_MS,
        "metadata_max_age_ms": 2_000,
        "fetch_max_wait_ms": 100,
    }


class AioKafkaMember(Member):
    def open(self, cluster: LocalCluster, group: str, topic: str, options: dict[str, Any]) -> None:
        self.runner = asyncio.Runner()
        self.run(self._start(cluster, group, topic, options))

    async def _start(self, cluster: LocalCluster, group: str, topic: str, options: dict[str, Any]) -> None:
        self.consumer = aiokafka.AIOKafkaConsumer(topic, **_classic(cluster, group, options))
        await self.consumer.start()

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        return self.runner.run(work)

    def poll(self) -> list[Read]:
        found = self.run(self.consumer.getmany(timeout_ms=int(POLL_S * 1000)))
        return [(one.partition, one.offset, one.value) for records in found.values() for one in records]

    def assignment(self) -> set[int]:
        return {one.partition for one in self.consumer.assignment()}

    def commit(self) -> None:
        with suppress(aiokafka.errors.CommitFailedError, aiokafka.errors.IllegalStateError):
            self.run(self.consumer.commit())

    def close(self) -> None:
        try:
            self.run(self.consumer.stop())
        finally:
            self.runner.close()


class KafkaPythonMember(Member):
    """Its poll forgets an assignment whose time is up between the answers to JoinGroup and SyncGroup, and the member
    sends no heartbeats ever after. So here it joins without a limit of time, and joins again after such an accident."""

    def open(self, cluster: LocalCluster, group: str, topic: str, options: dict[str, Any]) -> None:
        self.consumer = kafka.KafkaConsumer(topic, **_classic(cluster, group, options))

    def poll(self) -> list[Read]:
        coordinator = self.consumer._coordinator
        if coordinator.rejoining:
            coordinator.request_rejoin()
        coordinator.poll(timeout_ms=int(DEADLINE_S * 1000))
        found = self.consumer.poll(timeout_ms=int(POLL_S * 1000))
        return [(one.partition, one.offset, one.value) for records in found.values() for one in records]

    def assignment(self) -> set[int]:
        return {one.partition for one in self.consumer.assignment()}

    def commit(self) -> None:
        with suppress(kafka.errors.CommitFailedError):
            self.consumer.commit()

    def close(self) -> None:
        self.consumer.close()


class TidelogMember(Member):
    def open(self, cluster: LocalCluster, group: str, topic: str, options: dict[str, Any]) -> None:
        self.consumer = tidelog.Consumer(
            cluster.bootstrap,
            group=group,
            auto_offset_reset="earliest",
            enable_auto_commit=False,
            heartbeat_interval_ms=HEARTBEAT_MS,
        )
        self.consumer.subscribe([topic])

    def poll(self) -> list[Read]:
        return [(one.partition, one.offset, one.value) for one in self.consumer.poll(POLL_S)]

    def assignment(self) -> set[int]:
        return {one.partition for one in self.consumer.assignment()}

    def commit(self) -> None:
        with suppress(CommitFailedError):
            self.consumer.commit()

    def close(self) -> None:
        self.consumer.close()


def until_shared(members: list[Member], partitions: int, *, timeout_s: float = DEADLINE_S) -> None:
    """Every partition has one owner among them, and nobody has more than one above his share."""

    def is_so() -> bool:
        for member in members:
            member.check()
        held = [member.held for member in members]
        numbers = sorted(number for one in held for number in one)
        sizes = [len(one) for one in held]
        return numbers == list(range(partitions)) and max(sizes) - min(sizes) <= 1

    until(is_so, f"{partitions} partitions are shared by {len(members)} members", timeout_s=timeout_s)


def until_read(members: list[Member], values: set[bytes], *, timeout_s: float = DEADLINE_S) -> None:
    def is_so() -> bool:
        for member in members:
            member.check()
        return {value for member in members for _, _, value in list(member.records)} >= values

    until(is_so, f"{len(values)} records are read", timeout_s=timeout_s)


def until_committed(cluster: LocalCluster, group: str) -> None:
    """The group has committed all that there is: a member that takes over now reads nothing twice."""
    with tidelog.Admin(cluster.bootstrap) as admin:
        until(lambda: {row.lag for row in admin.group_lag(group)} == {0}, f"{group} has committed everything")
