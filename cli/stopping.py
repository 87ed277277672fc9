"""SIGINT (Ctrl-C) and SIGTERM for commands that finish their work before they end.

The first signal calls the handler, which lets the command flush, close its JSON document and leave its group. A second
one ends the command at once. Exit codes are those of a shell: 130 and 143.
"""

import asyncio
import contextlib
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from types import FrameType

from tidelog.cli.main import TerminatedError

SIGNALS = (signal.SIGINT, signal.SIGTERM)


def raise_for(number: int) -> None:
    """End the command as the signal would."""
    if number == signal.SIGTERM:
        raise TerminatedError
    raise KeyboardInterrupt


def _at_once(number: int, _frame: FrameType | None) -> None:
    raise_for(number)


@contextlib.contextmanager
def stop_requested(stop: Callable[[int], None]) -> Iterator[None]:
    """Calls `stop` with the number of the first signal. For commands without an event loop in this thread."""

    def first(number: int, _frame: FrameType | None) -> None:
        for each in SIGNALS:
            signal.signal(each, _at_once)
        stop(number)

    before = {number: signal.signal(number, first) for number in SIGNALS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextlib.contextmanager
def stop_requested_in_loop(stop: Callable[[int], None]) -> Iterator[None]:
    """The same inside of a task: the second signal cancels the task, and the command ends as that signal ends it."""
    with _signals_in_loop(SIGNALS, stop):
        yield


@contextlib.contextmanager
def terminated_in_loop() -> Iterator[None]:
    """SIGTERM cancels the task, as asyncio does it for SIGINT: whatever is open is closed."""
    if threading.current_thread() is not threading.main_thread():
        yield  # signals belong to the main thread
        return
    with _signals_in_loop((signal.SIGTERM,), None):
        yield


@contextlib.contextmanager
def _signals_in_loop(numbers: Sequence[int], stop: Callable[[int], None] | None) -> Iterator[None]:
    loop = asyncio.get_running_loop()
    task = asyncio.current_task()
    assert task is not None, "called inside of a task"
    received: list[int] = []

    def handle(number: int) -> None:
        received.append(number)
        if stop is not None and len(received) == 1:
            stop(number)
        else:
            task.cancel()

    for number in numbers:
        loop.add_signal_handler(number, handle, number)
    try:
        yield
    except asyncio.CancelledError:
        if not received:
            raise
        raise_for(received[-1])
    finally:
        for number in numbers:
            loop.remove_signal_handler(number)
