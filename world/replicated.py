"""The one replicated-state-machine runtime: controller, group coordinator and transaction coordinator run in it.

A pure machine decides; a replicated log remembers; this class stands between them on the node that leads the log.

    submit(request) --decide on the speculative state--> records + reply
        records are gathered for the next entry, the speculative state advances at once
    flush           --one append is under way at a time; what is decided meanwhile shares the next ones-->
    committed       --promote--> the state that readers see; replies go out

State, while leading an epoch:
    state          what the committed entries made (every node has this, leading or not)
    under way      decisions that were handed to the log and have not committed, with the state after them
    gathered       decisions that wait for the append before them
    speculative    the state after all of these

Invariants:
- A decision is appended behind the state that it was decided on, and in that epoch; the log refuses it otherwise.
- An entry takes as many offsets as the log says (`AppendLog.width`): one in a Raft log, one for each of its records in
  the log of a partition.
- One append is under way at a time. If two were, and an entry of the log's own (a membership) took the place of the
  first, the second could stand where it belongs, on top of a state that never was.
- The entries of a large decision go one after the other, for the same reason. If one is refused the decision is torn:
  the next append begins with the machine's `abort` entry. So does that of a leader who finds a torn one in the log.
- *Any* reply, a refusal too, waits until the speculative state that it was decided on has committed: nobody is told of
  something that may yet vanish. A reply that no commit stands behind waits until the log confirms that this node still
  leads: nobody is told of something that is over.
- Losing leadership drops what is under way, gathered and speculative. Who is under way hears that the outcome is not
  known, who is gathered that nothing was done.
- `state` changes only by committed entries, in order. Tests compare it with a replay of the log.

Bounds: `waiting_max` requests without a reply, then `OverloadedError`. What the owner itself decides (`is_own`) has
`OWN_MAX` places more: a node that is flooded must still be able to do what its role asks of it. Decisions share an
append as long as they weigh less than `gather_max` together, by `weigh`; the others wait for the next one.

An error that is not of the catalogue, in what runs between a decision and its commit, is one of ours: the speculation
may be anything. It ends the leadership here, whoever waits hears that the outcome is not known, and `on_failure` is
told: the owner ends the node.
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
    """The leader's end of a replicated log."""

    @property
    def end_offset(self) -> Offset: ...

    def width(self, data: bytes) -> int:
        """How many offsets this entry will take."""
        ...

    async def append_at(self, data: bytes, *, at: Offset, epoch: Epoch) -> None:
        """Append; returns when it is committed and applied here.

        `MovedLogError`: the log does not end at `at`, or this is another epoch; nothing was done. Other refusals
        (`NotLeaderError`, `OverloadedError`) did nothing either; after `UnknownOutcomeError` it may be done, and the
        node does not lead any more.
        """
        ...

    async def confirm(self) -> None:
        """Returns when this node is known to have led at some moment since the call; raises `NotLeaderError`."""
        ...


class Machine(Protocol[S]):
    """The pure part. `decide` changes nothing; `apply` is the one way in which state changes."""

    def decide(self, state: S, request: Any, *, offset: Offset) -> tuple[Sequence[Any], Any]:
        """(records, reply) for a request on this state, whose records will stand at or after `offset`; or raises."""
        ...

    def apply(self, state: S, records: Sequence[Any]) -> S: ...

    def encode(self, records: Sequence[Any]) -> list[bytes]:
        """The entries that hold these records: one, or several where they are too large for one."""
        ...

    def abort(self) -> bytes:
        """An entry after which the entries of a torn decision mean nothing; harmless where there is none."""
        ...


@dataclass(slots=True)
class _Waiter:
    request: Any
    future: "asyncio.Future[Any]"
    reply: Any = None
    refusal: TidelogError | None = None

    def answer(self) -> None:
        if self.future.done():  # the caller is gone
            return
        if self.refusal is not None:
            self.fail(self.refusal)
        else:
            self.future.set_result(self.reply)

    def fail(self, error: TidelogError) -> None:
        if not self.future.done():
            self.future.set_exception(error)
            self.future.exception()  # a caller that is gone must not make the loop complain


@dataclass(slots=True)
class _Gathered(Generic[S]):
    """Decisions that will share an append, and the state that they lead to."""

    state: S
    records: list[Any] = field(default_factory=list)
    waiters: list[_Waiter] = field(default_factory=list)
    weight: int = 0


@dataclass(slots=True)
class _Flight(Generic[S]):
    """Decisions whose entries take the offsets [first, end), and the state that they lead to."""

    first: Offset
    end: Offset
    epoch: Epoch
    state: S
    waiters: list[_Waiter]
    entries: int


class ReplicatedMachine(Generic[S]):
    def __init__(
        self,
        machine: Machine[S],
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
        """Who leads, as far as is known here."""
        self.appends = 0
        """How many were begun."""
        self._waiting_max = waiting_max
        self._waiting = 0
        self._speculative = initial
        self._flight: _Flight[S] | None = None
        self._gathered: deque[_Gathered[S]] = deque()
        """In the order of their appends; none is without records."""
        self._base = Offset(0)
        """Where the append of what was gathered first begins."""
        self._is_torn = False
        self._flush_is_due = False
        self._tasks: set[asyncio.Task[None]] = set()

    # Leadership. The owner calls these in order with `committed`.

    def lead(self, epoch: Epoch, me: NodeId, *, is_torn: bool = False) -> None:
        """This node leads in `epoch`, and everything before it has committed and was applied here.

        `is_torn`: a former leader has left a large decision without its end.
        """
        assert self._flight is None, "a leader starts without speculation"
        assert not self._gathered, "a leader starts without speculation"
        self.epoch = epoch
        self.leader = me
        self._is_torn = is_torn
        self._speculative = self.state

    def follow(self, leader: NodeId | None) -> None:
        """This node does not lead, or not any more."""
        self.leader = leader
        if self.epoch is None:
            return
        self.epoch = None
        for waiter in () if self._flight is None else self._flight.waiters:
            waiter.fail(UnknownOutcomeError("leadership was lost before the change committed: it may be done or not"))
        for waiter in self._drop_speculation():
            waiter.fail(self.not_leader())

    def _failed(self, error: Exception, waiters: Sequence[_Waiter] = ()) -> None:
        """An error of ours; `waiters` are those that stand in no list any more."""
        for waiter in waiters:
            waiter.fail(UnknownOutcomeError(f"the change may be done or not: {error}"))
        self.follow(None)
        if self._on_failure is None:
            raise error
        self._on_failure(error)

    def _drop_speculation(self) -> list[_Waiter]:
        """Returns who was gathered."""
        waiters = [waiter for gathered in self._gathered for waiter in gathered.waiters]
        self._flight = None
        self._gathered.clear()
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
        """Decide, log, wait for the commit, reply; raises the refusal, or why it could not be done."""
        if self.epoch is None:
            raise self.not_leader()
        held = self._held()
        if held >= self._waiting_max + (OWN_MAX if is_own else 0):
            raise OverloadedError(f"{held} requests wait already")
        waiter = _Waiter(request, asyncio.get_running_loop().create_future())
        self._decide(waiter)
        self._waiting += 1
        try:
            return await waiter.future
        finally:
            self._waiting -= 1

    def _held(self) -> int:
        """Requests without a reply. Those whose callers have given up count as long as their decisions are kept."""
        kept = 0 if self._flight is None else len(self._flight.waiters)
        return max(self._waiting, kept + sum(len(gathered.waiters) for gathered in self._gathered))

    def _decide(self, waiter: _Waiter) -> None:
        records: Sequence[Any] = ()
        if not self._gathered:
            self._base = self._log.end_offset if self._flight is None else self._flight.end
        offset = self._base
        if self._is_torn and self._flight is None:
            offset = Offset(self._base + self._log.width(self._machine.abort()))
        try:
            records, waiter.reply = self._machine.decide(self._speculative, waiter.request, offset=offset)
        except TidelogError as refusal:
            waiter.refusal = refusal
        if records:
            self._gather(records)
        if self._gathered:
            self._gathered[-1].waiters.append(waiter)
            self._flush_soon()
        elif self._flight is not None:
            self._flight.waiters.append(waiter)
        else:
            assert self.epoch is not None, "only a leader decides"
            self._spawn(self._confirm(waiter, self.epoch))

    def _gather(self, records: Sequence[Any]) -> None:
        self._speculative = self._machine.apply(self._speculative, records)
        weight = 0 if self._gather_max is None else self._weigh(records)
        last = self._gathered[-1] if self._gathered else None
        if last is None or (self._gather_max is not None and last.weight + weight > self._gather_max):
            last = _Gathered(self._speculative)
            self._gathered.append(last)
        last.state = self._speculative
        last.records.extend(records)
        last.weight += weight

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _confirm(self, waiter: _Waiter, epoch: Epoch) -> None:
        """A question or a refusal on the committed state, with nothing under way."""
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
        """At the end of this turn of the event loop: what is decided in one turn shares an entry."""
        if self._flight is None and not self._flush_is_due:
            self._flush_is_due = True
            asyncio.get_running_loop().call_soon(self._flush)

    def _flush(self) -> None:
        self._flush_is_due = False
        if self.epoch is None or self._flight is not None or not self._gathered:
            return
        gathered = self._gathered[0]
        try:
            entries = self._machine.encode(gathered.records)
            if self._is_torn:
                entries.insert(0, self._machine.abort())
            widths = [self._log.width(data) for data in entries]
        except Exception as error:
            self._failed(error)
            return
        self._gathered.popleft()
        end = Offset(self._base + sum(widths))
        flight = self._flight = _Flight(
            self._base, end, self.epoch, gathered.state, gathered.waiters, entries=len(entries)
        )
        self._base = end  # of what was gathered next
        self.appends += 1
        self._spawn(self._append(flight, list(zip(entries, widths, strict=True))))

    async def _append(self, flight: _Flight[S], entries: list[tuple[bytes, int]]) -> None:
        at = flight.first
        try:
            for data, width in entries:
                await self._log.append_at(data, at=at, epoch=flight.epoch)
                at = Offset(at + width)
        except TidelogError as error:
            if self._flight is flight:
                self._roll_back(flight, error, is_begun=at > flight.first)
        except Exception as error:
            self._failed(error)

    def _roll_back(self, flight: _Flight[S], error: TidelogError, *, is_begun: bool) -> None:
        """The log did not take it, or not all of it: speculate from the committed state again."""
        if is_begun:
            # After the abort entry alone nothing is open, and another one does no harm.
            self._is_torn = True
        waiters = [*flight.waiters, *self._drop_speculation()]
        if isinstance(error, MovedLogError):
            # An entry of the log's own came in between: decide anew.
            try:
                for waiter in waiters:
                    self._decide(waiter)
            except Exception as failure:
                self._failed(failure, waiters)
            return
        for waiter in waiters:
            waiter.fail(error)

    # The log's side, on every node.

    def is_mine(self, offset: Offset, epoch: Epoch) -> bool:
        """Whether the data entry of this epoch at this offset is one that this leader waits for."""
        flight = self._flight
        return flight is not None and flight.epoch == epoch and flight.first <= offset < flight.end

    @property
    def promised(self) -> S | None:
        """The state after the append that is under way, if that is a single entry."""
        flight = self._flight
        return flight.state if flight is not None and flight.entries == 1 else None

    @property
    def is_speculating(self) -> bool:
        """Whether something is decided that has not committed."""
        return self._flight is not None or bool(self._gathered)

    def committed(self, end: Offset, state: S, *, mine: bool) -> None:
        """The entries below `end` are committed, and made this state.

        `mine`: the last of them is one that this leader waits for (`is_mine`). An entry of the log's own may commit at
        an offset where an append was to stand, before that append is refused: it answers nobody.
        """
        self.state = state
        self.applied = end
        flight = self._flight
        if flight is None:
            if not self._gathered:
                self._speculative = state
            return
        if mine and flight.end == end:
            self._flight = None
            self._is_torn = False
            for waiter in flight.waiters:
                waiter.answer()
            if self._gathered:
                self._flush_soon()
            else:
                self._speculative = state

    def load(self, state: S, end: Offset) -> None:
        """A snapshot replaces the state."""
        assert self.epoch is None, "a leader is not overtaken by a snapshot"
        self.state = self._speculative = state
        self.applied = end
