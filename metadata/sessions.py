"""Whom the active controller hears of: soft state, made anew by every active controller, never logged.

    event                                  what follows
    ------------------------------------   -----------------------------------------------------------------------
    this controller becomes active         every broker that is not fenced has a full session
    a broker without session is live       it has a full session, and the shell connects to it
    a heartbeat                            its session begins anew
    silence for the session timeout        fence
    its stream breaks                      the shell connects anew and says how that ended
      refused, or another incarnation      fence, after `grouping_ms` (see below)
      the same incarnation, or no answer   the session timeout decides
    more than one broker, and at least     the fault is ours: for breaks of that second only the timeout decides
    half of them, break within 1 s

The last rule needs a moment to see that a break is not alone: a refused broker is fenced `grouping_ms` later, if by
then fewer than half have broken. A connection that is refused without a break before it (a new active controller
connects to everybody) counts as a break.

Time during which this controller itself did not run does not count against brokers (R17): they may have sent heartbeats
that wait to be read. Time is counted in steps of at most `step_max_ms` between two events of any kind, so the owner
calls `tick` more often than that; a longer gap counts as one step.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum

SESSION_TIMEOUT_MS = 3000
MASS_WINDOW_MS = 1000
GROUPING_MS = 20
STEP_MAX_MS = 250


class Answer(Enum):
    """How a new connection to a broker ended."""

    REFUSED = "refused"
    OTHER_INCARNATION = "other incarnation"
    SAME_INCARNATION = "same incarnation"
    SILENT = "no answer"


@dataclass(frozen=True, slots=True)
class FenceNow:
    """Propose `brokers.Fence` for this incarnation."""

    broker: int
    broker_epoch: int
    reason: str


@dataclass(slots=True)
class _Session:
    broker_epoch: int
    heard_at: int
    has_broken: bool = False
    refused_at: int | None = None
    by_timeout_only: bool = False
    """It broke together with half of the others: until it is heard again, no refusal counts."""


class BrokerSessions:
    """Sessions of the brokers that are not fenced in the image, and of others that are heard of.

    All times are ms of one monotonic clock.
    """

    def __init__(
        self,
        now_ms: int,
        *,
        session_timeout_ms: int = SESSION_TIMEOUT_MS,
        grouping_ms: int = GROUPING_MS,
        step_max_ms: int = STEP_MAX_MS,
    ) -> None:
        assert 0 < step_max_ms < session_timeout_ms, "a gap must not end a session by itself"
        self.session_timeout_ms = session_timeout_ms
        self._grouping_ms = grouping_ms
        self._step_max_ms = step_max_ms
        self._last_ms = now_ms
        self._clock = 0
        """Time that counts: as far as this controller was awake."""
        self._sessions: dict[int, _Session] = {}
        self._breaks: list[tuple[int, int]] = []
        """(time that counts, broker) of the last second."""

    def _advance(self, now_ms: int) -> int:
        self._clock += min(max(0, now_ms - self._last_ms), self._step_max_ms)
        self._last_ms = max(now_ms, self._last_ms)
        return self._clock

    def begin(self, now_ms: int, brokers: Iterable[tuple[int, int]]) -> None:
        """This controller has become active: (broker, broker epoch) of the live ones, each with a full session."""
        clock = self._advance(now_ms)
        self._breaks = []
        self._sessions = {broker: _Session(epoch, clock) for broker, epoch in brokers}

    def expect(self, now_ms: int, broker: int, broker_epoch: int) -> bool:
        """The broker is not fenced: it has a session from now on, if it has none; whether it had none.

        It may have been let in by a decision that committed when its session had ended already.
        """
        clock = self._advance(now_ms)
        known = self._sessions.get(broker)
        if known is not None and known.broker_epoch >= broker_epoch:
            return False
        self._sessions[broker] = _Session(broker_epoch, clock)
        return True

    def heard(self, now_ms: int, broker: int, broker_epoch: int) -> None:
        """A heartbeat has arrived. Called when it is received, before it waits for anything."""
        clock = self._advance(now_ms)
        known = self._sessions.get(broker)
        if known is not None and broker_epoch < known.broker_epoch:
            return
        self._sessions[broker] = _Session(broker_epoch, clock)

    def ended(self, broker: int) -> None:
        """The broker is fenced or gone: nothing is expected of it."""
        self._sessions.pop(broker, None)

    def stream_broke(self, now_ms: int, broker: int, broker_epoch: int) -> bool:
        """Its stream has broken; whether to connect anew and tell `answered`."""
        clock = self._advance(now_ms)
        session = self._sessions.get(broker)
        if session is None or session.broker_epoch != broker_epoch:
            return False
        self._note_break(clock, broker, session)
        return True

    def _note_break(self, clock: int, broker: int, session: _Session) -> None:
        session.has_broken = True
        self._breaks = [entry for entry in self._breaks if clock - entry[0] < MASS_WINDOW_MS and entry[1] != broker]
        self._breaks.append((clock, broker))
        broken = {number for _, number in self._breaks}
        if len(broken) > 1 and 2 * len(broken) >= len(self._sessions.keys() | broken):
            for number in broken & self._sessions.keys():
                self._sessions[number].by_timeout_only = True
                self._sessions[number].refused_at = None

    def answered(self, now_ms: int, broker: int, broker_epoch: int, answer: Answer) -> None:
        """How a new connection to it ended."""
        clock = self._advance(now_ms)
        session = self._sessions.get(broker)
        if session is None or session.broker_epoch != broker_epoch:
            return
        if answer in (Answer.REFUSED, Answer.OTHER_INCARNATION):
            if not session.has_broken:
                self._note_break(clock, broker, session)
            if not session.by_timeout_only:
                session.refused_at = clock

    def tick(self, now_ms: int) -> tuple[FenceNow, ...]:
        """Who is to be fenced now, in the order of ids. Told once: the session is over."""
        clock = self._advance(now_ms)
        fenced = []
        for broker, session in sorted(self._sessions.items()):
            if clock - session.heard_at >= self.session_timeout_ms:
                fenced.append(FenceNow(broker, session.broker_epoch, f"silent for {self.session_timeout_ms} ms"))
            elif session.refused_at is not None and clock - session.refused_at >= self._grouping_ms:
                fenced.append(FenceNow(broker, session.broker_epoch, "its address refuses connections"))
        for entry in fenced:
            del self._sessions[entry.broker]
        return tuple(fenced)

    def due_in_ms(self) -> int | None:
        """Until `tick` may have something to say, if nothing happens; None without sessions."""
        waits = [
            self.session_timeout_ms - (self._clock - session.heard_at)
            if session.refused_at is None
            else self._grouping_ms - (self._clock - session.refused_at)
            for session in self._sessions.values()
        ]
        return max(0, min(waits)) if waits else None
