"""What the exercises share: topics, all records of one, bare requests, workers, and programs of their own."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from random import Random
from typing import Any, TypeVar

from patience import DEADLINE_S, until

import tidelog
from tidelog.client.cluster import ClusterClient, error_in
from tidelog.client.consumer_errors import WakeupError
from tidelog.client.grpc_connections import GrpcConnections
from tidelog.client.record import TopicPartition
from tidelog.log.batch import encode_columns
from tidelog.model.errors import ErrorCode
from tidelog.rpc.door import method_named
from tidelog.rpc.v1 import log_pb2
from tidelog.testing import LocalCluster
from tidelog.world.real.clock import SystemClock

T = TypeVar("T")

HERE = Path(__file__).parent
_PRODUCE, _FETCH = (method_named("Log", name) for name in ("Produce", "Fetch"))


def make(
    admin: tidelog.Admin, name: str, partitions: int = 1, *, replicas: Sequence[int] = (), **configs: object
) -> str:
    """A topic whose leaders serve already, on all brokers or on these, the first of which leads."""
    named = {key.replace("_", "."): value for key, value in configs.items()}
    if replicas:
        admin.create_topic(name, assignment=[replicas] * partitions, configs=named)
    else:
        admin.create_topic(name, partitions=partitions, replication_factor=3, configs=named)
    until(lambda: all(row.leader is not None for row in admin.describe_topic(name).partitions), f"{name} is led")
    admin.list_offsets([name])  # Asks every leader, until it has confirmed its epoch and answers.
    return name


def records_of(cluster: LocalCluster, topic: str) -> list[tidelog.ConsumerRecord]:
    """All that is there now, in the order of each partition."""
    with tidelog.Consumer(cluster.bootstrap, auto_offset_reset="earliest") as consumer:
        names = consumer.partitions_for(topic)
        consumer.assign(names)
        wanted = sum(consumer.end_offsets(*names).values())
        found: list[tidelog.ConsumerRecord] = []

        def is_read() -> bool:
            found.extend(consumer.poll(1_000))
            return len(found) >= wanted

        until(is_read, f"{topic} is read")
    return found


def with_client(bootstrap: str, job: Callable[[ClusterClient], Awaitable[T]]) -> T:
    """Bare requests, for what no client of ours would send."""

    async def whole() -> T:
        client = ClusterClient(bootstrap.split(","), GrpcConnections(), random=Random(1), clock=SystemClock())
        try:
            return await job(client)
        finally:
            await client.close()

    return asyncio.run(whole())


class Program:
    """A process of its own that writes lines; a line to it ends it."""

    def __init__(self, file: str, *arguments: str) -> None:
        self.lines: list[Any] = []
        self._process = subprocess.Popen(
            [sys.executable, str(HERE / file), *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "GRPC_VERBOSITY": "NONE"},
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.endswith("\n"):
                self.lines.append(json.loads(line))

    def said(self, what: str) -> list[Any]:
        return [details for kind, details in list(self.lines) if kind == what]

    def kill(self) -> None:
        """kill -9; all it has said is read."""
        self._process.kill()
        self._process.wait(10)
        self._reader.join(10)

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write("\n")
        self._process.stdin.flush()
        assert self._process.wait(60) == 0
        self._reader.join(10)

    def end(self) -> None:
        if self._process.poll() is None:
            self.kill()
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            pipe.close()


class Door:
    """Bare requests about partition 0 of a topic."""

    def __init__(self, client: ClusterClient, topic: str) -> None:
        self.client, self.topic = client, topic

    async def produce(self, node: int, *values: bytes, **fields: int) -> tuple[int, ErrorCode | None]:
        """The offset that it has, or the refusal."""
        batch = encode_columns([1] * len(values), [None] * len(values), list(values), **fields)  # type: ignore[arg-type]
        row = log_pb2.ProducePartition(topic=self.topic, partition=0, batches=batch)
        request = log_pb2.ProduceRequest(partitions=[row], acks=-1, timeout_ms=20_000)
        answer = await self.client.call_node(node, _PRODUCE, request, timeout_ms=30_000)
        (done,) = answer.partitions
        error = error_in(done)
        return done.base_offset, None if error is None else error.code

    async def leader(self) -> int:
        await self.client.refresh(self.topic)
        (place,) = (await self.client.topic(self.topic)).partitions
        found = self.client.leader(place)
        assert found is not None
        return found.node

    async def fetch(self, offset: int, *, min_bytes: int, max_wait_ms: int) -> tuple[int, float]:
        """How many bytes came, and after how many seconds."""
        row = log_pb2.FetchPartition(topic=self.topic, partition=0, offset=offset, max_bytes=4 << 20)
        request = log_pb2.FetchRequest(
            partitions=[row], min_bytes=min_bytes, max_bytes=4 << 20, max_wait_ms=max_wait_ms
        )
        leader, began_s = await self.leader(), time.monotonic()
        answer = await self.client.call_node(leader, _FETCH, request, timeout_ms=60_000)
        (found,) = answer.partitions
        assert error_in(found) is None
        return len(found.data), time.monotonic() - began_s


class Worker:
    """A consumer in a thread of its own that commits what it has handled when partitions are taken from it."""

    def __init__(self, cluster: LocalCluster, topic: str, events: list[tuple[str, object, int, int]]) -> None:
        self.handled: list[tuple[int, int]] = []
        self.error: BaseException | None = None
        self._topic = topic
        self._events = events
        self._next: dict[TopicPartition, int] = {}
        self._consumer = tidelog.Consumer(
            cluster.bootstrap, group=topic, auto_offset_reset="earliest", enable_auto_commit=False, max_poll_records=20
        )
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _assigned(self, names: list[TopicPartition]) -> None:
        self._events.extend(("assigned", self, name.partition, -1) for name in names)

    def _revoked(self, names: list[TopicPartition]) -> None:
        done = {name: self._next[name] for name in names if name in self._next}
        if done:
            self._consumer.commit(done)
        self._events.extend(("revoked", self, name.partition, -1) for name in names)

    def _run(self) -> None:
        pace = threading.Event()
        try:
            with self._consumer as consumer:
                consumer.subscribe([self._topic], on_assigned=self._assigned, on_revoked=self._revoked)
                for record in consumer:
                    self._events.append(("record", self, record.partition, record.offset))
                    pace.wait(0.002)
                    self.handled.append((record.partition, record.offset))
                    self._next[record.topic_partition] = record.offset + 1
        except WakeupError:
            return
        except BaseException as error:
            self.error = error

    def close(self) -> None:
        self._consumer.wakeup()
        self._thread.join(DEADLINE_S)
