"""Broker sessions: soft state of the active controller, rebuilt by every active controller, never logged. Pure.

    event                                  action
    ------------------------------------   -----------------------------------------------------------------------
    this controller becomes active         every unfenced broker gets a full session
    a broker without session is unfenced   it gets a full session, and the controller connects to it
    a heartbeat                            its session restarts
    silence for the session timeout        fence
    its stream breaks                      the controller connects again and reports the outcome
      refused, or another incarnation      fence, after `grouping_ms` (see below)
      the same incarnation, or no answer   the session timeout decides
    more than one broker, and at least     the fault is on this side: for breaks of that second only the timeout
    half of them, break within 1 s         decides

The last rule needs a moment to see that a break is not alone: a refused broker is fenced `grouping_ms` later, if by
then fewer than half have broken. A refused connection without a break before it (a new active controller connects to
all brokers) counts as a break.

Time during which this controller did not run does not count against brokers: their heartbeats may wait to be read.
Time counts in steps of at most `step_max_ms` between two events of any kind, so the owner calls `tick` more often than
that; a longer gap counts as one step.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum

SESSION_TIMEOUT_MS = 3000
MASS_WINDOW_MS = 1000
GROUPING_MS = 20
STEP_MAX_MS = 250


class ProbeResult(Enum):
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
    """Its stream broke together with half of all streams, so the fault may be on this side: until its next heartbeat,
    refused connections do not fence it."""


class BrokerSessions:
    """Sessions of the unfenced brokers, and of others that send heartbeats.

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
        """Milliseconds that this controller ran. Sessions are measured in this time, not in wall time."""
        self._sessions: dict[int, _Session] = {}
        self._breaks: list[tuple[int, int]] = []
        """(`_clock`, broker) of each break in the last second."""

    def _advance(self, now_ms: int) -> int:
        self._clock += min(max(0, now_ms - self._last_ms), self._step_max_ms)
        self._last_ms = max(now_ms, self._last_ms)
        return self._clock

    def begin(self, now_ms: int, brokers: Iterable[tuple[int, int]]) -> None:
        """This controller has become active: gives each live broker (broker, broker epoch) a full session."""
        clock = self._advance(now_ms)
        self._breaks = []
        self._sessions = {broker: _Session(epoch, clock) for broker, epoch in brokers}

    def expect(self, now_ms: int, broker: int, broker_epoch: int) -> bool:
        """Gives an unfenced broker a session if it has none; returns whether it had none.

        A decision may have unfenced it after its session had ended.
        """
        clock = self._advance(now_ms)
        known = self._sessions.get(broker)
        if known is not None and known.broker_epoch >= broker_epoch:
            return False
        self._sessions[broker] = _Session(broker_epoch, clock)
        return True

    def heard(self, now_ms: int, broker: int, broker_epoch: int) -> None:
        """Notes a heartbeat. Called when it is received, before it waits for anything."""
        clock = self._advance(now_ms)
        known = self._sessions.get(broker)
        if known is not None and broker_epoch < known.broker_epoch:
            return
        self._sessions[broker] = _Session(broker_epoch, clock)

    def stream_broke(self, now_ms: int, broker: int, broker_epoch: int) -> bool:
        """Notes a broken stream; returns whether to connect again and call `probed` with the outcome."""
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

    def probed(self, now_ms: int, broker: int, broker_epoch: int, answer: ProbeResult) -> None:
        """Notes the outcome of a new connection."""
        clock = self._advance(now_ms)
        session = self._sessions.get(broker)
        if session is None or session.broker_epoch != broker_epoch:
            return
        if answer in (ProbeResult.REFUSED, ProbeResult.OTHER_INCARNATION):
            if not session.has_broken:
                self._note_break(clock, broker, session)
            if not session.by_timeout_only:
                session.refused_at = clock

    def tick(self, now_ms: int) -> tuple[FenceNow, ...]:
        """Returns the brokers to fence, ordered by id, each once: their sessions end."""
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
