"""Confirmations on a terminal."""

import argparse
import os
import signal
import sys
import threading
from collections.abc import Iterator

import pytest

from tidelog.cli.messages import confirm

OPTIONS = argparse.Namespace(yes=False)


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    """The keyboard's side of a terminal that is stdin."""
    keyboard, device = os.openpty()
    with os.fdopen(device, encoding="utf-8") as stdin:
        monkeypatch.setattr(sys, "stdin", stdin)
        yield keyboard
    os.close(keyboard)


@pytest.mark.parametrize(
    ("typed", "is_confirmed"), [(b"y\n", True), (b"YES\n", True), (b"n\n", False), (b"\x04", False)]
)
def test_confirmation_takes_yes_only(terminal: int, typed: bytes, is_confirmed: bool) -> None:
    os.write(terminal, typed)
    assert confirm(OPTIONS, "Delete it?") is is_confirmed


@pytest.mark.parametrize("is_main_thread", [True, False])
def test_ctrl_c_ends_a_confirmation_whichever_thread_receives_it(
    terminal: int, is_main_thread: bool, capfd: pytest.CaptureFixture[str]
) -> None:
    """A signal that the client's IO thread receives does not interrupt the read of the main thread."""
    main = threading.get_ident()
    waits = threading.Event()
    set_wakeup_fd = signal.set_wakeup_fd

    def set_and_report(*arguments: int, **options: bool) -> int:
        waits.set()
        return set_wakeup_fd(*arguments, **options)

    def interrupt() -> None:
        assert waits.wait(30)
        signal.pthread_kill(main if is_main_thread else threading.get_ident(), signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(signal, "set_wakeup_fd", set_and_report)
        thread.start()
        with pytest.raises(KeyboardInterrupt):
            confirm(OPTIONS, "Delete it?")
    thread.join(30)
    assert "nothing was changed" in capfd.readouterr().err
    assert signal.set_wakeup_fd(-1) == -1, "the wakeup descriptor is restored"


def test_ctrl_c_as_the_question_appears_changes_nothing(
    terminal: int, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """The signal may arrive as the write of the question returns."""
    write = sys.stderr.write

    def write_and_interrupt(text: str) -> int:
        size = write(text)
        if "[y/N]" in text:
            signal.raise_signal(signal.SIGINT)
        return size

    with monkeypatch.context() as patch:
        patch.setattr(sys.stderr, "write", write_and_interrupt)
        with pytest.raises(KeyboardInterrupt):
            confirm(OPTIONS, "Delete it?")
    assert "nothing was changed" in capfd.readouterr().err
