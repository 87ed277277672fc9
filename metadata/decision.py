"""Decisions: records to be logged and a reply, computed from an image and a request, changing nothing. Pure.

A rejection is an exception of the catalogue, raised before any record exists: the image stays as it was. A request for
several topics or partitions has one `Outcome` for each, as in Kafka: some may succeed and others fail.
"""

from collections import Counter
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass, field
from typing import Generic, TypeVar
from uuid import UUID

from tidelog.metadata.image import ClusterImage
from tidelog.metadata.log_ends import LogEnd, LogEnds
from tidelog.metadata.records import Record
from tidelog.model.errors import ErrorCode, InvalidRequestError, TidelogError
from tidelog.model.uuids import RandomBits

T = TypeVar("T")
I = TypeVar("I")  # noqa: E741 - an item


@dataclass(frozen=True, slots=True)
class Decision(Generic[T]):
    records: tuple[Record, ...]
    reply: T
    image: ClusterImage | None = field(default=None, compare=False, repr=False)
    """The image after the records, if it is known already: saves applying them."""


@dataclass(frozen=True, slots=True)
class Done:
    """A reply without a value."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """How one item of a request ended; `error` is None if it was done."""

    name: str
    error: ErrorCode | None = None
    message: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcomes:
    """How each item of a request ended, in its order."""

    items: tuple[Outcome, ...]


@dataclass(slots=True)
class Context:
    """The inputs of a decision beside the image and the request."""

    now_ms: int
    random: RandomBits
    next_offset: int = 0
    """The log offset of the decision. Broker epochs are offsets, so that they only rise."""
    controller_features: tuple[tuple[int, tuple[tuple[str, int, int], ...]], ...] = ()
    """(controller, (feature, lowest level, highest level)...): the levels that the members of the quorum support."""
    log_ends: LogEnds = field(default_factory=LogEnds)
    """Log ends that brokers have reported: an unclean election elects the candidate with the best log."""

    def log_end(self, image: ClusterImage, topic_id: UUID, partition: int, broker: int) -> LogEnd:
        """Returns what the present incarnation of the broker has reported of this replica."""
        registered = image.brokers.get(broker)
        epoch = -1 if registered is None else registered.broker_epoch
        return self.log_ends.get(topic_id, partition, broker, epoch, now_ms=self.now_ms)

    def new_id(self) -> UUID:
        """A random (version 4) UUID."""
        return UUID(int=self.random.getrandbits(128), version=4)


class Draft:
    """Records of several steps, with the resulting image: a later step sees what an earlier one decided."""

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
    items: Iterable[I],
    name: Callable[[I], str],
    decide: Callable[[I], None],
    *,
    key: Callable[[I], Hashable] | None = None,
    duplicate: type[TidelogError] | None = InvalidRequestError,
) -> Outcomes:
    """Decides item by item; the error of a rejected one is its outcome. An item is rejected with `duplicate`, if
    that is not None, where another one has the same `key` (by default the same name)."""
    items = tuple(items)
    counts = Counter(map(key or name, items))
    outcomes = []
    for item in items:
        label = name(item)
        try:
            if duplicate is not None and counts[(key or name)(item)] > 1:
                raise duplicate(f"{label[:300]} is named more than once in one request")
            decide(item)
        except TidelogError as error:
            outcomes.append(Outcome(label, error.code, str(error)))
        else:
            outcomes.append(Outcome(label))
    return Outcomes(items=tuple(outcomes))
