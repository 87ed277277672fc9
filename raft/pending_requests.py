"""Pending requests: proposals wait for their commit, reads for a confirmed leader, callers for an applied offset.

A proposal that this leader has accepted either commits (the entry at its offset has its epoch), is lost (another entry
commits at its offset), or has an unknown outcome (leadership ends before either).
"""

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
from tidelog.raft.effects import Rejection, Role, RoleChange
from tidelog.raft.messages import Entry

OffsetFuture = asyncio.Future[Offset]


def rejection_error(rejection: Rejection, leader: NodeId | None) -> TidelogError:
    """Returns the error for the caller. Nothing was done in all of these cases but `UNKNOWN`."""
    if rejection in (Rejection.NOT_LEADER, Rejection.TRANSFERRING):
        who = "" if leader is None else f"; node {leader} leads"
        return NotLeaderError(f"{rejection.value}{who}", leader=leader)
    if rejection is Rejection.UNKNOWN:
        return UnknownOutcomeError(rejection.value)
    if rejection is Rejection.MOVED:
        return MovedLogError(rejection.value)
    if rejection is Rejection.OVERLOADED:
        return OverloadedError(rejection.value)
    return MembershipChangeError(rejection.value)


class PendingRequests:
    """Tokens rise; each is resolved once."""

    def __init__(self) -> None:
        self.committed = 0
        self._token = 0
        self._pending: dict[int, OffsetFuture] = {}
        self._changes: set[int] = set()
        """Those of `_pending` that change the membership: a learner is in the log before its addition is accepted."""
        self._accepted: deque[tuple[Offset, Epoch, OffsetFuture]] = deque()
        self._applied: list[tuple[Offset, int, OffsetFuture]] = []

    @property
    def count(self) -> int:
        """Number of pending proposals, reads and changes."""
        return len(self._pending) + len(self._accepted)

    def add(self, *, is_change: bool = False) -> tuple[int, OffsetFuture]:
        self._token += 1
        future: OffsetFuture = asyncio.get_running_loop().create_future()
        self._pending[self._token] = future
        if is_change:
            self._changes.add(self._token)
        return self._token, future

    def _pop(self, token: int) -> OffsetFuture:
        self._changes.discard(token)
        return self._pending.pop(token)

    def accepted(self, token: int, offset: Offset, epoch: Epoch) -> None:
        future = self._pop(token)
        if not self._accepted or self._accepted[-1][0] < offset:
            self._accepted.append((offset, epoch, future))
        else:
            self._accepted = deque(sorted((*self._accepted, (offset, epoch, future)), key=lambda row: row[0]))

    def rejected(self, token: int, rejection: Rejection, leader: NodeId | None) -> None:
        _fail(self._pop(token), rejection_error(rejection, leader))

    def read(self, token: int, offset: Offset) -> None:
        _resolve(self._pop(token), offset)

    def applied(self, first: Offset, entries: Sequence[Entry]) -> None:
        """Resolves the proposals among these committed and applied entries."""
        accepted, end = self._accepted, first + len(entries)
        while accepted and accepted[0][0] < end:
            offset, epoch, future = accepted.popleft()
            if offset >= first and entries[offset - first].epoch == epoch:
                self.committed += 1
                _resolve(future, offset)
            elif offset >= first:
                _fail(
                    future, NotLeaderError("another leader's entry replaced the proposal: it was not done", leader=None)
                )
            else:
                _fail(
                    future, UnknownOutcomeError("a snapshot replaced the entry of the proposal: it may be done or not")
                )
        self.reached(Offset(end))

    def reached(self, applied: Offset) -> None:
        while self._applied and self._applied[0][0] <= applied:
            _resolve(heapq.heappop(self._applied)[2], applied)

    def role_changed(self, change: RoleChange) -> None:
        """A node that no longer leads, or leads in another epoch, does not know the outcome of what it accepted."""
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
                    f"leadership of epoch {epoch} ended before offset {offset} committed: it may commit later, or never"
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
        """Fails all pending requests: the node stops."""
        for offset, epoch, future in self._accepted:
            # It is in the log of this node: the next leader may commit it.
            _fail(future, UnknownOutcomeError(f"{error}; offset {offset} in epoch {epoch} may commit later, or never"))
        for token in self._changes:
            _fail(
                self._pending[token], UnknownOutcomeError(f"{error}; the next leader may complete the change, or not")
            )
        for future in (*self._pending.values(), *(row[2] for row in self._applied)):
            _fail(future, error)
        self._pending.clear()
        self._changes.clear()
        self._accepted.clear()
        self._applied.clear()


def _resolve(future: OffsetFuture, offset: Offset) -> None:
    if not future.done():  # the caller may be cancelled
        future.set_result(offset)


def _fail(future: OffsetFuture, error: TidelogError) -> None:
    if not future.done():
        future.set_exception(error)
        future.exception()  # retrieved, so that the loop does not report it for a cancelled caller
