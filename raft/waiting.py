"""Who waits for what: proposals for their commit, reads for a confirmed leader, callers for an applied offset.

A proposal that this leader has accepted is in one of three states: it commits (the entry at its offset has its epoch),
it is lost (another entry commits at its offset), or it is not known (leadership ends before either is seen).
"""

from __future__ import annotations

import asyncio
import heapq
from collections import deque
from collections.abc import Sequence

from tidelog.model.errors import (
    MembershipChangeError,
    MovedLogError,
    NotLeaderError,
    OverloadedError,
    TidelogError,
    UnknownOutcomeError,
)
from tidelog.model.ids import Epoch, NodeId, Offset
from tidelog.raft.effects import Refusal, Role, RoleChange
from tidelog.raft.messages import Entry

OffsetFuture = asyncio.Future[Offset]


def refusal_error(refusal: Refusal, leader: NodeId | None) -> TidelogError:
    """What the caller gets for it. Nothing was done in all of these cases but `UNKNOWN`."""
    if refusal in (Refusal.NOT_LEADER, Refusal.TRANSFERRING):
        who = "" if leader is None else f"; node {leader} leads"
        return NotLeaderError(f"{refusal.value}{who}", leader=leader)
    if refusal is Refusal.UNKNOWN:
        return UnknownOutcomeError(refusal.value)
    if refusal is Refusal.MOVED:
        return MovedLogError(refusal.value)
    if refusal is Refusal.OVERLOADED:
        return OverloadedError(refusal.value)
    return MembershipChangeError(refusal.value)


class Waiting:
    """Tokens are given out in order; each is answered once."""

    def __init__(self) -> None:
        self.committed = 0
        self._token = 0
        self._asked: dict[int, OffsetFuture] = {}
        self._accepted: deque[tuple[Offset, Epoch, OffsetFuture]] = deque()
        self._applied: list[tuple[Offset, int, OffsetFuture]] = []

    @property
    def count(self) -> int:
        """Proposals, reads and changes that have no answer yet."""
        return len(self._asked) + len(self._accepted)

    def ask(self) -> tuple[int, OffsetFuture]:
        self._token += 1
        future: OffsetFuture = asyncio.get_running_loop().create_future()
        self._asked[self._token] = future
        return self._token, future

    def accepted(self, token: int, offset: Offset, epoch: Epoch) -> None:
        future = self._asked.pop(token)
        if not self._accepted or self._accepted[-1][0] < offset:
            self._accepted.append((offset, epoch, future))
        else:
            self._accepted = deque(sorted((*self._accepted, (offset, epoch, future)), key=lambda row: row[0]))

    def refused(self, token: int, refusal: Refusal, leader: NodeId | None) -> None:
        _fail(self._asked.pop(token), refusal_error(refusal, leader))

    def read(self, token: int, offset: Offset) -> None:
        _resolve(self._asked.pop(token), offset)

    def applied(self, first: Offset, entries: Sequence[Entry]) -> None:
        """These entries are committed, and applied."""
        accepted, end = self._accepted, first + len(entries)
        while accepted and accepted[0][0] < end:
            offset, epoch, future = accepted.popleft()
            if offset >= first and entries[offset - first].epoch == epoch:
                self.committed += 1
                _resolve(future, offset)
            elif offset >= first:
                _fail(future, NotLeaderError("another leader's entry took its place: it is not done", leader=None))
            else:
                _fail(future, UnknownOutcomeError("a snapshot took the place of its entry: it may be done or not"))
        self.reached(Offset(end))

    def reached(self, applied: Offset) -> None:
        while self._applied and self._applied[0][0] <= applied:
            _resolve(heapq.heappop(self._applied)[2], applied)

    def role_changed(self, change: RoleChange) -> None:
        """Who does not lead any more, or leads in another epoch, cannot say what becomes of what it accepted."""
        if change.role is Role.LEADER:
            lost = [row for row in self._accepted if row[1] != change.epoch]
            self._accepted = deque(row for row in self._accepted if row[1] == change.epoch)
        else:
            lost = list(self._accepted)
            self._accepted.clear()
        for offset, epoch, future in lost:
            _fail(
                future,
                UnknownOutcomeError(
                    f"leadership of epoch {epoch} ended before {offset} committed: it may yet, or never"
                ),
            )

    def until_applied(self, offset: Offset, applied: Offset) -> OffsetFuture:
        future: OffsetFuture = asyncio.get_running_loop().create_future()
        if applied >= offset:
            future.set_result(applied)
        else:
            self._token += 1
            heapq.heappush(self._applied, (offset, self._token, future))
        return future

    def end(self, error: TidelogError) -> None:
        """The node stops: nobody waits any longer."""
        for offset, epoch, future in self._accepted:
            # In the log of this node at least: whoever leads next may commit it.
            _fail(future, UnknownOutcomeError(f"{error}; {offset} in epoch {epoch} may commit yet, or never"))
        for future in (*self._asked.values(), *(row[2] for row in self._applied)):
            _fail(future, error)
        self._asked.clear()
        self._accepted.clear()
        self._applied.clear()


def _resolve(future: OffsetFuture, offset: Offset) -> None:
    if not future.done():  # the caller may be gone
        future.set_result(offset)


def _fail(future: OffsetFuture, error: TidelogError) -> None:
    if not future.done():
        future.set_exception(error)
        future.exception()  # a caller that is gone must not make the loop complain
