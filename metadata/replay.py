"""From log entries to images: the way in which every node, leader or not, live or after a restart, gets its state.

    Replay(image)
      .apply([record, ...])        an entry with a whole decision: a new image
      .apply([BeginDecision])      a large one begins: nothing shows
      .apply([record, ...]) ...    kept
      .apply([EndDecision])        all of it shows at once
      .apply([AbortDecision])      none of it ever does

A snapshot that is taken in between carries what is kept (`pending`), so that the rest of the log still fits on it.
"""

from __future__ import annotations

from collections.abc import Iterable

from tidelog.metadata.image import ClusterImage
from tidelog.metadata.records import RECORDS_PER_STEP, AbortDecision, BeginDecision, EndDecision, Record
from tidelog.model.errors import CorruptStateError
from tidelog.model.steps import Steps, at_once


class Replay:
    """`image` is the state after all whole decisions so far."""

    __slots__ = ("image", "pending")

    def __init__(self, image: ClusterImage, pending: tuple[Record, ...] | None = None) -> None:
        self.image = image
        self.pending: list[Record] | None = None if pending is None else list(pending)
        """The records of a decision that has begun and not ended; None if there is none."""

    @property
    def is_open(self) -> bool:
        return self.pending is not None

    def apply(self, records: Iterable[Record]) -> ClusterImage:
        """One entry of the log."""
        return at_once(self.apply_steps(records))

    def apply_steps(self, records: Iterable[Record]) -> Steps[ClusterImage]:
        """`apply`, in steps of `RECORDS_PER_STEP`. `image` changes with the last one."""
        whole: list[Record] = []
        for record in records:
            if isinstance(record, BeginDecision):
                if self.pending is not None:
                    raise CorruptStateError("a decision begins inside of another")
                self.pending = []
            elif isinstance(record, EndDecision):
                if self.pending is None:
                    raise CorruptStateError("a decision ends that has not begun")
                whole += self.pending
                self.pending = None
            elif isinstance(record, AbortDecision):
                self.pending = None
            elif self.pending is not None:
                self.pending.append(record)
            else:
                whole.append(record)
        image = self.image
        for at in range(0, len(whole), RECORDS_PER_STEP):
            if at:
                yield
            image = image.apply_all(whole[at : at + RECORDS_PER_STEP])
        self.image = image
        return image
