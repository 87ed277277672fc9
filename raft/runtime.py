"""The runtime of replicated state machines: controller, group coordinator and transaction coordinator.

A pure machine decides and a replicated log stores its decisions; this class connects them on the node that leads the
log.

    submit(request) --decide on the speculative state--> records + reply
        records are batched for the next append, the speculative state advances at once
    flush           --one append in flight at a time; later decisions share the next ones-->
    committed       --promote--> the state that readers see; replies are sent

State, while leading an epoch:
    state          result of the committed entries (every node has it, leading or not)
    in flight      decisions that were appended and have not committed, with the state after them
    batched        decisions that wait for the append before them
    speculative    the state after all of these

Invariants:
- A decision is appended after the state that it was decided on, and in that epoch; otherwise the log rejects it.
- An entry takes as many offsets as the log says (`AppendLog.width`): one in a Raft log, one for each of its records in
  the log of a partition.
- One append is in flight at a time. With two, if an entry of the log's own (a membership) replaced the first, the
  second could be appended on top of a state that never existed.
- The entries of a large decision are appended one after the other, for the same reason. If one is rejected, the
  decision is torn: the next append begins with the machine's `abort` entry. So does that of a leader that finds a torn
  one in the log.
- *Any* reply, also a rejection, waits until the speculative state that it was decided on has committed: no reply rests
  on something that may vanish. A reply without a pending commit waits until the log confirms that this node still
  leads (`AppendLog.confirm` says how far that goes).
- Losing leadership drops what is in flight, batched and speculative. In-flight requests fail with an unknown outcome,
  batched ones with `NotLeaderError`: nothing was done.
- `state` changes only by committed entries, in order. Tests compare it with a replay of the log.

Bounds: `waiting_max` pending requests, then `OverloadedError`. The owner's own requests (`is_own`) have `OWN_MAX` more:
an overloaded node must still do what its role requires. Decisions share an append while their weight is below
`gather_max`, by `weigh`.

An error outside of the catalogue, between a decision and its commit, is a bug: the speculative state may be wrong. It
ends the leadership here, pending requests fail with an unknown outcome, and `on_failure` is called: the owner stops the
node.
"""

import asyncio
from collections import deque
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, Protocol, TypeVar

from tidelog.model.errors import MovedLogError, NotLeaderError, OverloadedError, TidelogError, UnknownOutcomeError
from tidelog.model.ids import Epoch, NodeId, Offset

S = TypeVar("S")

OWN_MAX = 1_000


class AppendLog(Protocol):
    """A replicated log, as its leader uses it."""

    @property
    def end_offset(self) -> Offset: ...

    def width(self, data: bytes) -> int:
        """Returns how many offsets this entry takes."""
        ...

    async def append_at(self, data: bytes, *, at: Offset, epoch: Epoch) -> None:
        """Appends; returns when it is committed and applied here.

        `MovedLogError`: the log does not end at `at`, or is in another epoch; nothing was done. Other rejections
        (`NotLeaderError`, `OverloadedError`) did nothing either; after `UnknownOutcomeError` it may be done, and the
        node does not lead any more.
        """
        ...

    async def confirm(self) -> None:
        """Returns when this node leads, as far as the log can tell; raises `NotLeaderError`.

        A Raft log asks a majority, so no other node led at the time of the call. The log of a partition asks nobody: a
        new leader may have been elected whose metadata has not arrived here. Then replies rest on a state that may be
        old, as in Kafka; changes do not: they need the acknowledgements of the in-sync replicas.
        """
        ...


class DecisionMachine(Protocol[S]):
    """The pure machine. `decide` changes nothing; state changes only by `apply`."""

    def decide(self, state: S, request: Any, *, offset: Offset) -> tuple[Sequence[Any], Any]:
        """Returns (records, reply) for a request on this state; the records will be at or after `offset`. Raises a
        rejection."""
        ...

    def apply(self, state: S, records: Sequence[Any]) -> S: ...

    def encode(self, records: Sequence[Any]) -> list[bytes]:
        """Returns the entries for these records: one, or several if they are too large for one."""
        ...

    def abort(self) -> bytes:
        """Returns an entry that voids the entries of a torn decision; harmless without one."""
        ...


@dataclass(slots=True)
class _Waiter:
    request: Any
    future: "asyncio.Future[Any]"
    reply: Any = None
    rejection: TidelogError | None = None

    def answer(self) -> None:
        if self.future.done():  # the caller was cancelled
            return
        if self.rejection is not None:
            self.fail(self.rejection)
        else:
            self.future.set_result(self.reply)

    def fail(self, error: TidelogError) -> None:
        if not self.future.done():
            self.future.set_exception(error)
            self.future.exception()  # retrieved, so that the loop does not report it for a cancelled caller


@dataclass(slots=True)
class _Batch(Generic[S]):
    """Decisions that will share an append, and the resulting state."""

    state: S
    records: list[Any] = field(default_factory=list)
    waiters: list[_Waiter] = field(default_factory=list)
    weight: int = 0


@dataclass(slots=True)
class _InFlight(Generic[S]):
    """Decisions whose entries take the offsets [first, end), and the resulting state."""

    first: Offset
    end: Offset
    epoch: Epoch
    state: S
    waiters: list[_Waiter]
    entries: int


class StateMachineRuntime(Generic[S]):
    def __init__(
        self,
        machine: DecisionMachine[S],
        log: AppendLog,
        initial: S,
        *,
        waiting_max: int = 10_000,
        gather_max: int | None = None,
        weigh: Callable[[Sequence[Any]], int] = len,
        on_failure: Callable[[BaseException], None] | None = None,
    ) -> None:
        self._on_failure = on_failure
        self._gather_max = gather_max
        self._weigh = weigh
        self._machine = machine
        self._log = log
        self.state = initial
        self.applied = Offset(0)
        """Everything below is in `state`."""
        self.epoch: Epoch | None = None
        """The epoch that this node leads and decides in; None otherwise."""
        self.leader: NodeId | None = None
        """The leader, as far as this node knows."""
        self.appends = 0
        """Number of appends so far."""
        self._waiting_max = waiting_max
        self._waiting = 0
        self._speculative = initial
        self._in_flight: _InFlight[S] | None = None
        self._batches: deque[_Batch[S]] = deque()
        """In the order of their appends; none is empty."""
        self._base = Offset(0)
        """First offset of the next append."""
        self._is_torn = False
        self._flush_is_due = False
        self._tasks: set[asyncio.Task[None]] = set()

    # Leadership. The owner calls these in order with `committed`.

    def lead(self, epoch: Epoch, me: NodeId, *, is_torn: bool = False) -> None:
        """This node leads in `epoch`, and everything before it has committed and was applied here.

        `is_torn`: a former leader has left a large decision without its end.
        """
        assert self._in_flight is None, "a leader starts without speculation"
        assert not self._batches, "a leader starts without speculation"
        self.epoch = epoch
        self.leader = me
        self._is_torn = is_torn
        self._speculative = self.state

    def follow(self, leader: NodeId | None) -> None:
        """This node does not lead, or no longer."""
        self.leader = leader
        if self.epoch is None:
            return
        self.epoch = None
        for waiter in () if self._in_flight is None else self._in_flight.waiters:
            waiter.fail(UnknownOutcomeError("leadership was lost before the change committed: it may be done or not"))
        for waiter in self._drop_speculation():
            waiter.fail(self.not_leader())

    def _failed(self, error: Exception, waiters: Sequence[_Waiter] = ()) -> None:
        """Reports a bug and stops leading; also fails `waiters`, which are in no queue any more."""
        for waiter in waiters:
            waiter.fail(UnknownOutcomeError(f"the change may be done or not: {error}"))
        self.follow(None)
        if self._on_failure is None:
            raise error
        self._on_failure(error)

    def _drop_speculation(self) -> list[_Waiter]:
        """Drops uncommitted decisions; returns the requests that waited for the next append."""
        waiters = [waiter for batch in self._batches for waiter in batch.waiters]
        self._in_flight = None
        self._batches.clear()
        self._speculative = self.state
        return waiters

    def not_leader(self) -> NotLeaderError:
        who = "no leader is known" if self.leader is None else f"node {self.leader} leads"
        return NotLeaderError(f"this node does not lead; {who}", leader=self.leader)

    # Requests.

    @property
    def is_leading(self) -> bool:
        return self.epoch is not None

    async def submit(self, request: Any, *, is_own: bool = False) -> Any:
        """Decides, appends, waits for the commit, returns the reply; raises the rejection or failure."""
        if self.epoch is None:
            raise self.not_leader()
        pending = self._pending()
        if pending >= self._waiting_max + (OWN_MAX if is_own else 0):
            raise OverloadedError(f"{pending} requests are pending: retry later")
        waiter = _Waiter(request, asyncio.get_running_loop().create_future())
        self._decide(waiter)
        self._waiting += 1
        try:
            return await waiter.future
        finally:
            self._waiting -= 1

    def _pending(self) -> int:
        """Number of pending requests. Those of cancelled callers count while their decisions are kept."""
        kept = 0 if self._in_flight is None else len(self._in_flight.waiters)
        return max(self._waiting, kept + sum(len(batch.waiters) for batch in self._batches))

    def _decide(self, waiter: _Waiter) -> None:
        records: Sequence[Any] = ()
        waiter.reply = waiter.rejection = None  # of a decision that did not count
        if not self._batches:
            self._base = self._log.end_offset if self._in_flight is None else self._in_flight.end
        offset = self._base
        if self._is_torn and self._in_flight is None:
            offset = Offset(self._base + self._log.width(self._machine.abort()))
        try:
            records, waiter.reply = self._machine.decide(self._speculative, waiter.request, offset=offset)
        except TidelogError as rejection:
            waiter.rejection = rejection
        if records:
            self._gather(records)
        if self._batches:
            self._batches[-1].waiters.append(waiter)
            self._flush_soon()
        elif self._in_flight is not None:
            self._in_flight.waiters.append(waiter)
        else:
            assert self.epoch is not None, "only a leader decides"
            self._spawn(self._confirm(waiter, self.epoch))

    def _gather(self, records: Sequence[Any]) -> None:
        self._speculative = self._machine.apply(self._speculative, records)
        weight = 0 if self._gather_max is None else self._weigh(records)
        last = self._batches[-1] if self._batches else None
        if last is None or (self._gather_max is not None and last.weight + weight > self._gather_max):
            last = _Batch(self._speculative)
            self._batches.append(last)
        last.state = self._speculative
        last.records.extend(records)
        last.weight += weight

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _confirm(self, waiter: _Waiter, epoch: Epoch) -> None:
        """Confirms leadership for a read or a rejection on the committed state, with nothing in flight."""
        try:
            await self._log.confirm()
        except TidelogError as error:
            waiter.fail(error)
            return
        except Exception as error:
            self._failed(error, [waiter])
            return
        if self.epoch == epoch:
            waiter.answer()
        else:
            waiter.fail(self.not_leader())

    def _flush_soon(self) -> None:
        """Flushes at the end of this turn of the event loop: decisions of one turn share an append."""
        if self._in_flight is None and not self._flush_is_due:
            self._flush_is_due = True
            asyncio.get_running_loop().call_soon(self._flush)

    def _flush(self) -> None:
        self._flush_is_due = False
        if self.epoch is None or self._in_flight is not None or not self._batches:
            return
        batch = self._batches[0]
        try:
            entries = self._machine.encode(batch.records)
            if self._is_torn:
                entries.insert(0, self._machine.abort())
            widths = [self._log.width(data) for data in entries]
        except Exception as error:
            self._failed(error)
            return
        self._batches.popleft()
        end = Offset(self._base + sum(widths))
        flight = self._in_flight = _InFlight(
            self._base, end, self.epoch, batch.state, batch.waiters, entries=len(entries)
        )
        self._base = end  # of the next batch
        self.appends += 1
        self._spawn(self._append(flight, list(zip(entries, widths, strict=True))))

    async def _append(self, flight: _InFlight[S], entries: list[tuple[bytes, int]]) -> None:
        at = flight.first
        try:
            for data, width in entries:
                await self._log.append_at(data, at=at, epoch=flight.epoch)
                at = Offset(at + width)
        except TidelogError as error:
            if self._in_flight is flight:
                self._roll_back(flight, error, is_begun=at > flight.first)
        except Exception as error:
            self._failed(error)

    def _roll_back(self, flight: _InFlight[S], error: TidelogError, *, is_begun: bool) -> None:
        """The log rejected the append or a part of it: speculate from the committed state again."""
        if is_begun:
            # If only the abort entry was appended, no decision is open; a second abort is harmless.
            self._is_torn = True
        waiters = [*flight.waiters, *self._drop_speculation()]
        if isinstance(error, MovedLogError):
            # An entry of the log's own came in between: decide again.
            try:
                for waiter in waiters:
                    self._decide(waiter)
            except Exception as failure:
                self._failed(failure, waiters)
            return
        for waiter in waiters:
            waiter.fail(error)

    # From the log, on every node.

    def is_mine(self, offset: Offset, epoch: Epoch) -> bool:
        """Whether the data entry of this epoch at this offset is in flight here."""
        flight = self._in_flight
        return flight is not None and flight.epoch == epoch and flight.first <= offset < flight.end

    def validate(self) -> None:
        """Asserts the invariants: only a leader speculates, in its epoch, and on top of what is committed."""
        flight, batches = self._in_flight, self._batches
        if self.epoch is None:
            assert flight is None, "a node that does not lead speculates"
            assert not batches, "a node that does not lead speculates"
            assert self._speculative is self.state, "a node that does not lead has a speculative state"
            return
        if flight is not None:
            assert flight.epoch == self.epoch, f"an append of epoch {flight.epoch} is in flight in {self.epoch}"
            assert flight.first < flight.end, "an append of nothing is in flight"
            assert not batches or self._base == flight.end, "the next append does not follow the one in flight"
        assert all(batch.records for batch in batches), "a batch of nothing waits"
        newest = batches[-1].state if batches else self.state if flight is None else flight.state
        assert self._speculative is newest, "the speculative state is not that of the newest decision"

    @property
    def speculative(self) -> S:
        """The state after all decisions, committed or not."""
        return self._speculative

    @property
    def pending_state(self) -> S | None:
        """The state after the append in flight, if that is a single entry."""
        flight = self._in_flight
        return flight.state if flight is not None and flight.entries == 1 else None

    @property
    def is_speculating(self) -> bool:
        """Whether there are uncommitted decisions."""
        return self._in_flight is not None or bool(self._batches)

    def committed(self, end: Offset, state: S, *, mine: bool) -> None:
        """The entries below `end` are committed and resulted in this state.

        `mine`: the last of them is in flight here (`is_mine`). An entry of the log's own may commit at the offset of a
        pending append, before that append is rejected: it completes no request.
        """
        self.state = state
        self.applied = end
        flight = self._in_flight
        if flight is None:
            if not self._batches:
                self._speculative = state
            return
        if mine and flight.end == end:
            self._in_flight = None
            self._is_torn = False
            for waiter in flight.waiters:
                waiter.answer()
            if self._batches:
                self._flush_soon()
            else:
                self._speculative = state

    def load(self, state: S, end: Offset) -> None:
        """Replaces the state by a snapshot."""
        assert self.epoch is None, "a leader is not overtaken by a snapshot"
        self.state = self._speculative = state
        self.applied = end
