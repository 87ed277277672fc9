"""The server's side of a login, as a state machine without IO. Pure.

A listener passes each frame of a client to `Exchange.step` and does what the outcome says:

    step(frame) -> Reply    send its frame, wait for the next one
                -> Derive   run `derive.run()` off the event loop, pass its result to `Exchange.derived`
                -> Done     send its frame; the connection is the principal's
                -> Failed   send FAILURE_TEXT and nothing else, log the reason; the exchange is over

Limits: the size of a frame and the number of frames. Time is the caller's: an exchange holds no resource, so the caller
forgets it. Every failed login has one text, which says nothing of users; `Failed.reason` is for logs and metrics.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum
from typing import Protocol

from tidelog.model.principals import Principal

FAILURE_TEXT = "authentication failed: check the mechanism, the user name and the password or token"


class Reason(Enum):
    """Why a login failed. Never for the client."""

    MALFORMED = "malformed"
    """The frame is no message of the mechanism, or not the next one."""
    TOO_LONG = "too-long"
    """The frame exceeds the limit of the mechanism."""
    OVER = "over"
    """A frame after the end of the exchange."""
    REJECTED = "rejected"
    """No such user, a wrong password, or a credential that changed meanwhile."""


@dataclass(frozen=True, slots=True)
class Reply:
    frame: bytes


@dataclass(frozen=True, slots=True)
class Done:
    principal: Principal
    frame: bytes = b""
    """The last message of the mechanism."""
    lifetime_ms: int | None = None
    """How long the credential is valid from now on. None: it does not expire."""


@dataclass(frozen=True, slots=True)
class Failed:
    reason: Reason
    user: str = ""
    """The user that the client claims to be, if it said so: any characters, to be logged with `repr`."""


@dataclass(frozen=True, slots=True)
class Derive:
    """Work of many milliseconds. `function` is at module level and its arguments are picklable, as `world.Work` wants
    them; they contain the password."""

    function: Callable[..., tuple[bytes, ...]]
    arguments: tuple[object, ...] = field(repr=False)

    def run(self) -> tuple[bytes, ...]:
        return self.function(*self.arguments)


Outcome = Reply | Derive | Done | Failed


class Mechanism(Protocol):
    """One login by one mechanism. `Exchange` has checked the size of a frame, and calls nothing after the end."""

    frame_bytes_max: int

    def step(self, frame: bytes) -> Outcome: ...

    def derived(self, keys: tuple[bytes, ...]) -> Outcome: ...


class _State(Enum):
    FRAME = "waits for a frame"
    KEYS = "waits for derived keys"
    OVER = "over"


class Exchange:
    """One login. A new one begins with a new exchange."""

    FRAMES_MAX = 8

    def __init__(self, mechanism: Mechanism) -> None:
        self._mechanism = mechanism
        self._state = _State.FRAME
        self._frames = 0

    @property
    def is_over(self) -> bool:
        return self._state is _State.OVER

    def step(self, frame: bytes) -> Outcome:
        """Takes any bytes at any time, as a client may send them."""
        self._frames += 1
        if self._state is not _State.FRAME:
            return self._next(Failed(Reason.OVER if self.is_over else Reason.MALFORMED))
        if len(frame) > self._mechanism.frame_bytes_max:
            return self._next(Failed(Reason.TOO_LONG))
        if self._frames > self.FRAMES_MAX:
            return self._next(Failed(Reason.MALFORMED))
        return self._next(self._mechanism.step(frame))

    def derived(self, keys: tuple[bytes, ...]) -> Outcome:
        """Takes the result of `Derive.run`. The exchange may be over: the client sent a frame meanwhile."""
        if self._state is not _State.KEYS:
            return self._next(Failed(Reason.OVER))
        return self._next(self._mechanism.derived(keys))

    def _next(self, outcome: Outcome) -> Outcome:
        match outcome:
            case Reply():
                self._state = _State.FRAME
            case Derive():
                self._state = _State.KEYS
            case Done() | Failed():
                self._state = _State.OVER
        return outcome
