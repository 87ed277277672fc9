"""Strikes at the k-th call that a simulated machine's processes make to their disks and stores.

    Crash(at, loss)      the power goes before the k-th call that changes something; `loss` decides what unsynced writes
                         survive
    Fail(at, number)     the k-th call of any kind fails with this error number; with `lasts`, every later one as well,
                         until `disarm`

A sync that fails does so when the device completes it, and loses writes; a commit that fails may have happened.
"""

import errno
import sys
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from tidelog.world.simulated import Loss, SimMachine
from tidelog.world.simulated.disk import CHANGING, SimDevice
from tidelog.world.simulated.scheduler import MachineDied
from tidelog.world.simulated.store import SimStoreDevice

ROOT = Path(__file__).resolve().parents[3]
ERRORS = (
    errno.EIO, errno.ENOSPC, errno.EROFS, errno.EMFILE, errno.ENFILE, errno.EACCES, errno.EPERM, errno.ENOMEM,
    errno.EINTR, errno.EBUSY, errno.ESTALE, errno.ETIMEDOUT, errno.EDQUOT,
)  # fmt: skip
CRASH_CALLS = CHANGING | {"commit"}
NO_SPACE = (errno.ENOSPC, errno.EDQUOT)
NO_FILES = (errno.EMFILE, errno.ENFILE)
OPENS = ("open", "create", "list")


def is_sensible(number: int, operation: str) -> bool:
    """Whether such a call can fail so."""
    if number in NO_FILES:
        return operation in OPENS
    if number in (*NO_SPACE, errno.EROFS):
        return operation in CRASH_CALLS
    return True


@dataclass(frozen=True, slots=True)
class Crash:
    at: int
    loss: Loss

    def __str__(self) -> str:
        return f"power lost at change {self.at}, {self.loss.name}"


@dataclass(frozen=True, slots=True)
class Fail:
    at: int
    number: int
    lasts: bool = False

    def __str__(self) -> str:
        return f"{errno.errorcode[self.number]} at call {self.at}{' and later' if self.lasts else ''}"


Strike = Crash | Fail


class Strikes:
    """Counts the calls to all devices of a machine, and strikes. Which lines of ours made them is in `lines`."""

    def __init__(self, machine: SimMachine, labels: list[str]) -> None:
        self.operations: list[str] = []
        """All calls since `arm`."""
        self.changes = 0
        """How many of them changed something."""
        self.has_struck = ""
        """The call that was struck."""
        self.lines: set[tuple[str, int]] = set()
        self._strike: Strike | None = None
        self._is_armed = False
        self._devices: list[SimDevice | SimStoreDevice] = []
        for label in labels:
            self._devices += [machine.disk(label), machine.store(label)]
        for device in self._devices:
            device.on_call = partial(self._called, device)
        self._machine = machine

    def arm(self, strike: Strike | None) -> None:
        """Counts from here; strikes if there is one."""
        self._strike, self._is_armed = strike, True
        self.operations, self.changes, self.has_struck = [], 0, ""

    def disarm(self) -> None:
        self._strike, self._is_armed = None, False
        for device in self._devices:
            device.faults.clear()

    def _called(self, device: SimDevice | SimStoreDevice, operation: str, paths: tuple[str, ...]) -> None:
        if not self._is_armed:
            return
        self.operations.append(operation)
        is_change = operation in CRASH_CALLS
        self.changes += is_change
        if is_change:
            self._note_lines()
        strike, at = self._strike, len(self.operations)
        if isinstance(strike, Crash) and is_change and self.changes == strike.at:
            self.has_struck = f"{operation} {paths}"
            self._machine.crash_loss = strike.loss
            assert device.on_crash_point is not None, "a machine that can lose its power"
            device.on_crash_point()
            raise MachineDied(f"power lost before {operation} {paths}")
        if isinstance(strike, Fail) and (
            at == strike.at or (strike.lasts and at > strike.at and is_sensible(strike.number, operation))
        ):
            self.has_struck = self.has_struck or f"{operation} {paths}"
            # What is asynchronous fails when the device completes it.
            device.faults.arm({"read_async": "read"}.get(operation, operation), number=strike.number)

    def _note_lines(self) -> None:
        frame = sys._getframe(2)
        while frame is not None:
            _, is_ours, path = frame.f_code.co_filename.rpartition("/src/tidelog/")
            if is_ours and not path.startswith("world/"):
                self.lines.add((path, frame.f_lineno))
            frame = frame.f_back  # type: ignore[assignment]
