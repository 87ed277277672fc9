"""What a decision is: records to be logged and a reply, made from an image and a request, changing nothing.

A refusal is an exception of the catalogue, raised before any record is made: the image stays as it was. A request for
several topics or partitions answers each by itself (`Outcome`), as Kafka does: some may succeed and others fail.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Generic, Protocol, TypeVar
from uuid import UUID

from tidelog.metadata.image import ClusterImage
from tidelog.metadata.log_ends import LogEnd, LogEnds
from tidelog.metadata.records import Record
from tidelog.model.errors import ErrorCode, TidelogError

T = TypeVar("T")
I = TypeVar("I")  # noqa: E741 - an item


@dataclass(frozen=True, slots=True)
class Decision(Generic[T]):
    records: tuple[Record, ...]
    reply: T
    image: ClusterImage | None = field(default=None, compare=False, repr=False)
    """What the records make of the image that was decided on, where that is known already: it spares applying them."""


@dataclass(frozen=True, slots=True)
class Done:
    """A reply that says only that it was done."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """How one item of a request ended; `error` is None if it was done."""

    name: str
    error: ErrorCode | None = None
    message: str = ""


class RandomBits(Protocol):
    """What is needed of a `random.Random`."""

    def getrandbits(self, k: int, /) -> int: ...


@dataclass(slots=True)
class Context:
    """What a decision may use beside the image and the request."""

    now_ms: int
    random: RandomBits
    next_offset: int = 0
    """The offset that the decision will get in the log: broker epochs are made of it, so that they only rise."""
    caught_up_from: int = 0
    """A fenced broker that has applied the log up to here, and its own registration, may be unfenced."""
    controller_features: tuple[tuple[int, tuple[tuple[str, int, int], ...]], ...] = ()
    """(controller, (feature, lowest level, highest level)...): what the members of the quorum support."""
    log_ends: LogEnds = field(default_factory=LogEnds)
    """What brokers have reported to this controller: the candidate with the best log is elected uncleanly."""

    def log_end(self, image: ClusterImage, topic_id: UUID, partition: int, broker: int) -> LogEnd:
        """What the broker has reported of this replica in its present life."""
        found = image.brokers.get(broker)
        epoch = -1 if found is None else found.broker_epoch
        return self.log_ends.get(topic_id, partition, broker, epoch, now_ms=self.now_ms)

    def new_id(self) -> UUID:
        """A random (version 4) UUID."""
        return UUID(int=self.random.getrandbits(128), version=4)


class Draft:
    """Records gathered step by step, with the image that they make: a later step sees what an earlier one decided."""

    __slots__ = ("image", "records")

    def __init__(self, image: ClusterImage) -> None:
        self.image = image
        self.records: list[Record] = []

    def add(self, records: Iterable[Record]) -> None:
        new = tuple(records)
        self.records.extend(new)
        self.image = self.image.apply_all(new)

    def decide(self, reply: T) -> Decision[T]:
        return Decision(tuple(self.records), reply, self.image)


def each(
    draft: Draft, items: Iterable[I], name: Callable[[I], str], decide: Callable[[ClusterImage, I], Iterable[Record]]
) -> tuple[Outcome, ...]:
    """Decide item by item: a refused one leaves no record."""
    outcomes = []
    for item in items:
        try:
            draft.add(decide(draft.image, item))
        except TidelogError as error:
            outcomes.append(Outcome(name(item), error.code, str(error)))
        else:
            outcomes.append(Outcome(name(item)))
    return tuple(outcomes)
