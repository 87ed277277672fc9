"""Replays log entries into images, on every node, after a restart as in operation. Pure.

    Replay(image)
      .apply([record, ...])        an entry with a whole decision: a new image
      .apply([BeginDecision])      a large decision begins: the image stays
      .apply([record, ...]) ...    kept as pending
      .apply([EndDecision])        all of it is applied at once
      .apply([AbortDecision])      none of it is

A snapshot in between contains the pending records, so that the rest of the log continues it.
"""

from collections.abc import Iterable

from tidelog.metadata.image import ClusterImage
from tidelog.metadata.records import RECORDS_PER_STEP, AbortDecision, BeginDecision, EndDecision, Record
from tidelog.model.errors import CorruptStateError
from tidelog.model.steps import Steps, run_steps


class Replay:
    """`image` is the state after all complete decisions so far."""

    __slots__ = ("image", "pending")

    def __init__(self, image: ClusterImage, pending: tuple[Record, ...] | None = None) -> None:
        self.image = image
        self.pending: list[Record] | None = None if pending is None else list(pending)
        """The records of an open decision; None if there is none."""

    @property
    def is_open(self) -> bool:
        return self.pending is not None

    def apply(self, records: Iterable[Record]) -> ClusterImage:
        """Applies one entry of the log."""
        return run_steps(self.apply_steps(records))

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
