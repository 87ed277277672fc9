"""What a chaos run strikes: a cluster, and the faults that can be injected into it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import Protocol, Self

import tidelog
from tidelog.client.admin.values import TopicDescription
from tidelog.coordinator.hashing import partition_for
from tidelog.model.errors import TidelogError
from tidelog.testing.chaos.plan import Fault, Kind

CALL_S = 10.0


class Stage(Protocol):
    """What a fault may ask of the run."""

    def wait(self, seconds: float) -> None:
        """Passes the time, while the histories are read."""
        ...

    def detail(self, text: str) -> None:
        """Notes what the fault does."""
        ...


Strike = Callable[[int, Fault, Stage], None]
"""Begins a fault on a node, waits for `fault.seconds`, and ends it. A fault without a node is given one, too."""


class FaultError(Exception):
    """An operation under fire did not succeed in time, or a fault could not be injected."""


class Target(Protocol):
    bootstrap: str
    """For clients: gRPC listeners."""
    kafka_bootstrap: str
    """For Kafka's clients; empty: there are none of them."""
    operator_bootstrap: str
    """gRPC listeners as this process reaches them."""
    wrapper: Sequence[str]
    """What to put before the command of a client."""
    topics: Mapping[str, int]
    """Partitions of the topics that are written."""
    kinds: Mapping[str, Kind]
    strikes: Mapping[str, Strike]
    facts: dict[str, object]
    """What the run's report should say beside its figures."""

    @property
    def nodes(self) -> Sequence[int]:
        """Those that run, and may be struck."""
        ...

    def recover(self) -> list[str]:
        """Returns when all nodes run and are ready, with what went wrong."""
        ...

    def logged_failures(self) -> list[str]:
        """Failures in the logs of the nodes, after the run."""
        ...


class ClusterView:
    """Answers to who leads what, by the Admin API. An unknown answer is None, or False."""

    def __init__(self, bootstrap: str, topics: Mapping[str, int]) -> None:
        self.topics = topics
        """Those that `leader` chooses from, and `is_whole` looks at."""
        self._bootstrap = bootstrap
        self.admin = tidelog.Admin(bootstrap)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.admin.close(0)

    def leader(self, pick: int) -> int | None:
        places = [(topic, number) for topic, count in self.topics.items() for number in range(count)]
        topic, number = places[pick % len(places)]
        return self._leader_of(self._described(topic), number)

    def coordinator(self, topic: str, key: str) -> int | None:
        """Of a group, whose `topic` is `OFFSETS_TOPIC`, or of a transactional id (`TRANSACTIONS_TOPIC`)."""
        found = self._described(topic)
        return None if found is None else self._leader_of(found, partition_for(key, len(found.partitions)))

    def controller(self) -> int | None:
        try:
            return self.admin.describe_quorum(timeout=CALL_S).leader
        except TidelogError:
            return None

    def _described(self, topic: str) -> TopicDescription | None:
        try:
            return self.admin.describe_topic(topic, timeout=CALL_S)
        except TidelogError:
            return None

    def _leader_of(self, topic: TopicDescription | None, number: int) -> int | None:
        if topic is None:
            return None
        return next((row.leader for row in topic.partitions if row.partition == number), None)

    def is_whole(self) -> bool:
        """All replicas of all topics are in sync."""
        found = [self._described(topic) for topic in self.topics]
        return all(
            topic is not None
            and all(row.leader is not None and set(row.isr) == set(row.replicas) for row in topic.partitions)
            for topic in found
        )

    def ends(self, topics: Mapping[str, int]) -> dict[tuple[str, int], int]:
        """The end of every partition of these topics."""
        with tidelog.Consumer(self._bootstrap, default_api_timeout_ms=120_000) as consumer:
            places = [(topic, number) for topic, count in topics.items() for number in range(count)]
            found = consumer.end_offsets(*(tidelog.TopicPartition(*place) for place in places))
        return {(one.topic, one.partition): offset for one, offset in found.items()}
