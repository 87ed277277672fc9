"""The transactional ids of one partition of `__transaction_state`, while this broker leads it (`partition_shard`).

After each commit, for each changed id:

    ONGOING      a deadline is set: the timeout of the transaction, or that of a prepared one
    PREPARE      its markers are sent (`marker_sender`), then `Complete` is submitted until it is committed
    others       requests that wait for the end of the transaction go on, if they have not when it was decided

Requests that wait go on when `Complete` is decided, before it is committed: they are decided on that state, and share
its append. A reply always waits for the commit of what it rests on.

A new coordinator does the same for each id that it has loaded. So a decision that is committed is carried out, whatever
ends in between; what is not committed was never decided.

Deadlines count from when this broker has learned of the transaction, by a clock that does not jump; one that was loaded
has what is left by the record's time, and at most all of it. So clocks that differ between brokers end a transaction
early, which its owner hears as TRANSACTION_ABORTABLE, or late by at most its timeout.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace
from heapq import heappop, heappush
from typing import Any, Protocol

from tidelog.coordinator.loading import LogFormat, Turns
from tidelog.coordinator.partition_shard import RETRY_S, PartitionHost, PartitionShard
from tidelog.coordinator.transactions.initializing import is_idle
from tidelog.coordinator.transactions.limits import TransactionLimits
from tidelog.coordinator.transactions.machine import TransactionMachine
from tidelog.coordinator.transactions.marker_sender import EndingTransaction, MarkerSender
from tidelog.coordinator.transactions.queries import due_ms, markers_count, markers_to_write
from tidelog.coordinator.transactions.records import (
    Cause,
    Decision,
    Status,
    Transaction,
    TransactionRecord,
    decode_record,
)
from tidelog.coordinator.transactions.requests import Complete, ForgetIdle, ProducerIdNeeded, TimeOut
from tidelog.coordinator.transactions.state import EMPTY, TransactionsState, apply
from tidelog.model.errors import TidelogError
from tidelog.model.group_errors import NotCoordinatorError
from tidelog.model.ids import Offset
from tidelog.model.transaction_errors import ConcurrentTransactionsError
from tidelog.replication.leader_replica import LeaderReplica
from tidelog.world.slicing import sliced

LOGGER = logging.getLogger(__name__)

_REASONS = {
    Cause.TIMEOUT: "its timeout",
    Cause.FENCED: "another instance has initialized the id",
    Cause.OPERATOR: "an operator",
}
"""Who has aborted a transaction, if not its owner."""

TRANSACTIONS: LogFormat[TransactionsState, TransactionRecord] = LogFormat(EMPTY, decode_record, apply)
"""A partition of `__transaction_state`."""
COMPLETIONS_MAX = 500
"""`Complete` requests in progress; the others wait."""
TIMEOUTS_MAX = 500
"""The same of `TimeOut`."""
IDS_PER_SLICE = 500
"""Ids looked at in one turn of the event loop."""
_ID_NEEDED = object()
"""The reply to a request that needs a new producer id."""


@dataclass(slots=True)
class TransactionCounts:
    """For metrics; of what this broker has seen committed."""

    commits: int = 0
    aborts: int = 0
    timeouts: int = 0
    """Those of `aborts` that the coordinator decided because the time was over."""


class TransactionHost(PartitionHost, Protocol):
    """The broker's transaction coordinator, as its shards use it."""

    limits: TransactionLimits
    sender: MarkerSender
    transactions: TransactionCounts

    async def new_producer_id(self) -> int:
        """Returns an id that nobody has used."""
        ...

    @property
    def expiration_ms(self) -> int: ...


class _Machine(TransactionMachine):
    """Tracks the ids that the append in flight changes. A request that needs a producer id has a reply like any other:
    it waits until the state that it was decided on has committed."""

    def __init__(self, limits: TransactionLimits, on_complete: Callable[[str], None]) -> None:
        """`on_complete(transactional id)` is called when the end of a transaction is decided."""
        super().__init__(limits)
        self.in_flight: dict[str, None] = {}
        self._on_complete = on_complete

    def decide(self, state: TransactionsState, request: Any, *, offset: Offset) -> tuple[Sequence[Decision], Any]:
        try:
            decisions, reply = super().decide(state, request, offset=offset)
        except ProducerIdNeeded:
            return (), _ID_NEEDED
        if isinstance(request, Complete) and decisions:
            self._on_complete(request.transactional_id)
        return decisions, reply

    def encode(self, records: Sequence[Decision]) -> list[bytes]:
        entries = super().encode(records)
        assert len(entries) == 1, "gathered decisions fit one batch"
        self.in_flight = {record.transactional_id: None for each in records for record in each.records}
        return entries


class TransactionShard(PartitionShard[TransactionsState]):
    """See the module."""

    CONTENTS = "transactions"
    SUBJECT = "transactional id"

    def __init__(self, host: TransactionHost, leader: LeaderReplica) -> None:
        self.machine = _Machine(host.limits, self._wake)
        super().__init__(host, leader, self.machine, TRANSACTIONS)
        self._host = host
        self.endings: dict[str, EndingTransaction] = {}
        """The ids in PREPARE."""
        self._waiting: dict[str, list[asyncio.Future[None]]] = {}
        """Of requests that wait until a transaction is complete, by transactional id; each has its own future, so that
        it goes on in the turn of the event loop that comes before the append."""
        self._written: deque[EndingTransaction] = deque()
        """Those whose markers are written, and whose completion is not submitted yet."""
        self._completing = 0
        self._overdue: deque[tuple[str, tuple[int, int]]] = deque()
        """Ids whose deadline has passed, with what it counted from."""
        self._timing_out = 0
        self._forgetting: asyncio.Task[None] | None = None

    @property
    def size(self) -> int:
        return len(self.state.ids)

    # Lifecycle.

    async def _begin(self, state: TransactionsState) -> None:
        turns = Turns()
        running: list[str] = []  # a heap: sorting 100,000 at once takes too long
        async for transactional_id, transaction in sliced(state.ids.items(), IDS_PER_SLICE):
            if transaction.is_open or transaction.is_ending:
                heappush(running, transactional_id)
        while running:
            transactional_id = heappop(running)
            transaction = state.ids[transactional_id]
            if self.state.get(transactional_id) is transaction:  # else a commit has taken care of it
                self._carry_out(transactional_id, transaction)
            await turns.maybe_yield()

    def _close(self, error: NotCoordinatorError) -> None:
        for ending in self.endings.values():
            self._host.sender.end(ending)
        self.endings.clear()
        self._written.clear()
        self._overdue.clear()
        for waiters in self._waiting.values():
            for waiter in waiters:
                if not waiter.done():
                    waiter.set_exception(error)
                    waiter.exception()  # retrieved, so that the loop does not report it where nobody waits any more
        self._waiting.clear()
        if self._forgetting is not None:
            self._forgetting.cancel()

    def validate(self, *, thorough: bool = True) -> None:
        """As `PartitionShard.validate`; with `thorough`, deadlines are those of open transactions, and markers those of
        ids in PREPARE. The ids themselves: `invariants.validate`."""
        super().validate(thorough=thorough)
        assert self.is_leading or not (self.endings or self._waiting), "does something for ids that it does not lead"
        if not thorough or not self.is_leading:
            return
        for key in self.timers:
            assert isinstance(key, str), "timer keys are transactional ids"
            transaction = self.state.get(key)
            assert transaction is not None, f"{key} has a deadline, and is unknown"
            assert transaction.is_open, f"{key} has a deadline, and is not open"
        for transactional_id, ending in self.endings.items():
            transaction = self.state.get(transactional_id)
            assert transaction is not None, f"{transactional_id} has markers, and is unknown"
            assert transaction.is_ending, f"{transactional_id} has markers, and is not ending"
            assert transaction.number == ending.number, f"{transactional_id} has markers of another transaction"
            assert not ending.is_over, f"{transactional_id} has markers that are over"

    # Requests.

    async def submit(self, request: Any, *, is_own: bool = False) -> Any:
        """As `PartitionShard.submit`; fetches a producer id if the decision needs one."""
        reply = await super().submit(request, is_own=is_own)
        if reply is _ID_NEEDED:
            request = replace(request, new_producer_id=await self._host.new_producer_id())
            reply = await super().submit(request, is_own=is_own)
            assert reply is not _ID_NEEDED, "one id is enough"
        return reply

    async def submit_after_end(self, request: Any, *, wait_s: float) -> Any:
        """As `submit`, once the transaction before is complete. `ConcurrentTransactionsError` if that takes longer than
        `wait_s`."""
        end_s = asyncio.get_running_loop().time() + wait_s
        while True:
            try:
                return await self.submit(request)
            except ConcurrentTransactionsError:
                if not await self.wait_for_end(request.transactional_id, end_s):
                    raise

    async def wait_for_end(self, transactional_id: str, end_s: float) -> bool:
        """Return True once the decided state of the id is not PREPARE, False at `end_s` of the event loop."""
        transaction = self.runtime.speculative.get(transactional_id)
        if transaction is None or not transaction.is_ending:
            return asyncio.get_running_loop().time() < end_s
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(transactional_id, []).append(waiter)
        try:
            async with asyncio.timeout_at(end_s):
                await waiter
        except TimeoutError:
            return False
        finally:
            self._forget_waiter(transactional_id, waiter)
        return True

    def _forget_waiter(self, transactional_id: str, waiter: asyncio.Future[None]) -> None:
        waiters = self._waiting.get(transactional_id, [])
        if waiter in waiters:
            waiters.remove(waiter)
            if not waiters:
                del self._waiting[transactional_id]

    def _wake(self, transactional_id: str) -> None:
        for waiter in self._waiting.pop(transactional_id, ()):
            if not waiter.done():
                waiter.set_result(None)

    # Commits.

    def _state_changed(self, before: TransactionsState, after: TransactionsState) -> None:
        changed, self.machine.in_flight = self.machine.in_flight, {}
        for transactional_id in changed:
            old, new = before.get(transactional_id), after.get(transactional_id)
            if new is not None and new.is_ending and (old is None or not old.is_ending or old.number != new.number):
                self._count(new)
                _log_abort(transactional_id, new)
            if old is None or new is None or _begin_of_wait(old) != _begin_of_wait(new):
                self.timers.cancel(transactional_id)
            self._carry_out(transactional_id, new)

    def _carry_out(self, transactional_id: str, transaction: Transaction | None) -> None:
        """Do what the committed state asks for."""
        if transaction is not None and transaction.is_open:
            if self.timers.at(transactional_id) is None:
                self._set_deadline(transactional_id, transaction)
        elif transaction is not None and transaction.is_ending:
            ending = self.endings.get(transactional_id)
            if ending is None or ending.number != transaction.number:
                self._end(transactional_id, transaction)
            return
        former = self.endings.pop(transactional_id, None)
        if former is not None:
            self._host.sender.end(former)
        self._wake(transactional_id)

    def _count(self, transaction: Transaction) -> None:
        counts = self._host.transactions
        counts.commits += transaction.status == Status.PREPARE_COMMIT
        counts.aborts += transaction.status == Status.PREPARE_ABORT
        counts.timeouts += transaction.cause == Cause.TIMEOUT

    # Ends.

    def _end(self, transactional_id: str, transaction: Transaction) -> None:
        former = self.endings.get(transactional_id)
        if former is not None:
            self._host.sender.end(former)
        now_s = asyncio.get_running_loop().time()
        ending = EndingTransaction(transactional_id, transaction.number, self._markers_written, begun_s=now_s)
        self.endings[transactional_id] = ending
        epoch = self.leader.leader_epoch
        markers = markers_to_write(transactional_id, transaction, coordinator_epoch=epoch)
        self._host.sender.begin(ending, markers, markers_count(transaction))

    def _markers_written(self, ending: EndingTransaction) -> None:
        self._written.append(ending)
        self._complete_written()

    def _complete_written(self) -> None:
        while self._written and self._completing < COMPLETIONS_MAX:
            self._completing += 1
            self._host.spawn(self._complete(self._written.popleft()), name="complete-transaction")

    async def _complete(self, ending: EndingTransaction) -> None:
        who, number = ending.transactional_id, ending.number
        try:
            while not ending.is_over:
                try:
                    await self.submit(
                        Complete(transactional_id=who, number=number, now_ms=self._host.now_ms()), is_own=True
                    )
                    return
                except TidelogError as error:
                    LOGGER.info("transactional_id=%s number=%d is not complete yet: %s", who, number, error)
                await asyncio.sleep(RETRY_S)
        finally:
            self._completing -= 1
            self._complete_written()

    # Deadlines.

    def _set_deadline(self, transactional_id: str, transaction: Transaction) -> None:
        due = due_ms(transaction, self.machine.limits)
        assert due is not None, "an open transaction has a deadline"
        full_ms = max(transaction.timeout_ms, self.machine.limits.prepared_timeout_ms if transaction.is_prepared else 0)
        left_ms = min(max(due - self._host.now_ms(), 0), full_ms)
        self.timers.set(transactional_id, asyncio.get_running_loop().time() + left_ms / 1000)

    def limits_changed(self, limits: TransactionLimits) -> None:
        self.machine.limits = limits
        for key in list(self.timers):
            transaction = self.state.get(str(key))
            if transaction is not None and transaction.is_prepared:
                self._set_deadline(str(key), transaction)

    def _due(self, key: Hashable) -> None:
        assert isinstance(key, str), "timer keys are transactional ids"
        transaction = self.state.get(key)
        begun = None if transaction is None else _begin_of_wait(transaction)
        if begun is not None:
            self._overdue.append((key, begun))
            self._time_out_overdue()

    def _time_out_overdue(self) -> None:
        while self._overdue and self._timing_out < TIMEOUTS_MAX:
            transactional_id, begun = self._overdue.popleft()
            transaction = self.state.get(transactional_id)
            # Meanwhile it may have ended, or have been prepared: then it has another deadline.
            if transaction is not None and _begin_of_wait(transaction) == begun:
                self._timing_out += 1
                self._host.spawn(self._time_out(transactional_id, transaction), name="transaction-timeout")

    async def _time_out(self, transactional_id: str, transaction: Transaction) -> None:
        try:
            await self._submit_time_out(transactional_id, transaction)
        finally:
            self._timing_out -= 1
            self._time_out_overdue()

    async def _submit_time_out(self, transactional_id: str, transaction: Transaction) -> None:
        due = due_ms(transaction, self.machine.limits)
        assert due is not None, "an open transaction has a deadline"
        # The deadline was counted without this broker's date.
        now_ms = max(self._host.now_ms(), due)
        try:
            request = TimeOut(transactional_id=transactional_id, number=transaction.number, now_ms=now_ms)
            await self.submit(request, is_own=True)
        except TidelogError as error:
            LOGGER.warning("transactional_id=%s is not aborted yet: %s", transactional_id, error)
        current = self.state.get(transactional_id)
        if self.is_leading and current is not None and current.is_open and self.timers.at(transactional_id) is None:
            # Not done, or the transaction has changed meanwhile.
            self.timers.set(transactional_id, asyncio.get_running_loop().time() + RETRY_S)

    # Ids that nobody uses.

    def forget_idle(self) -> None:
        if self.is_leading and (self._forgetting is None or self._forgetting.done()):
            self._forgetting = self._host.spawn(self._forget_idle(), name=f"forget-ids-{self.number}")

    async def _forget_idle(self) -> None:
        request = ForgetIdle(now_ms=self._host.now_ms(), expiration_ms=self._host.expiration_ms)
        idle: list[str] = []
        async for transactional_id, transaction in sliced(self.state.ids.items(), IDS_PER_SLICE):
            if is_idle(transaction, request):
                heappush(idle, transactional_id)
        try:
            while idle:
                ids = [heappop(idle) for _ in range(min(IDS_PER_SLICE, len(idle)))]
                while await self.submit(replace(request, ids=tuple(ids)), is_own=True):
                    pass
        except TidelogError as error:
            LOGGER.info("transactions of partition %d: unused ids stay until the next time: %s", self.number, error)


def _log_abort(transactional_id: str, transaction: Transaction) -> None:
    reason = _REASONS.get(Cause(transaction.cause))
    if transaction.status == Status.PREPARE_ABORT and reason is not None:
        open_s = max(0, transaction.updated_ms - transaction.started_ms) / 1000
        LOGGER.info(
            "transactional_id=%s number=%d is aborted after %.1f s: %s",
            *(transactional_id, transaction.number, open_s, reason),
        )


def _begin_of_wait(transaction: Transaction) -> tuple[int, int] | None:
    """What the deadline of an open transaction counts from; None for any other."""
    return (transaction.number, transaction.prepared_ms) if transaction.is_open else None
