"""The condition of an append that a client may give. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from tidelog.model.transaction_errors import OffsetMismatchError, StaleFencingTokenError


@dataclass(frozen=True, slots=True, kw_only=True)
class AppendCondition:
    """What must be so for an append of one batch; -1: not asked. A batch that is stored already is a duplicate all the
    same."""

    expected_offset: int = -1
    """The log ends here: the batch gets this offset."""
    fencing_token: int = -1
    """The newest claim in the log has this offset."""

    def check(self, *, end_offset: int, claim: int) -> None:
        if self.fencing_token not in (-1, claim):
            newest = f"the newest claim is at {claim}: stop, or claim again"
            if claim < 0:
                newest = "no claim is known: claim again"
            raise StaleFencingTokenError(f"fencing token {self.fencing_token}: {newest}", claim=claim)
        if self.expected_offset not in (-1, end_offset):
            raise OffsetMismatchError(
                f"the partition ends at {end_offset}, not at {self.expected_offset}: read to its end, and decide again",
                end_offset=end_offset,
            )
