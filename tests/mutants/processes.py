"""Starts workers and reads their replies, with a deadline for each reply."""

import json
import os
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mutants.hook import ROOT

LOG_TAIL_LINES = 15
READY = b'{"ready": true}'


class WorkerError(Exception):
    """A worker ended without finishing its job."""


class WorkerHangsError(WorkerError):
    """No reply in time: the worker has been killed."""


class Worker:
    """Use it as a context: its process group is gone at the end."""

    def __init__(self, job: dict[str, Any], log: Path) -> None:
        self._log = log
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("wb") as errors:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "mutants.worker"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                cwd=ROOT,
                env=os.environ | {"PYTHONPATH": str(ROOT / "tests"), "HYPOTHESIS_PROFILE": "ci"},
                start_new_session=True,
            )
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(job).encode())
        self._process.stdin.close()

    def __enter__(self) -> "Worker":
        return self

    def __exit__(self, *_: object) -> None:
        if self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        assert self._process.stdout is not None
        self._process.stdout.close()

    def replies(self, *, within_s: float) -> Iterator[dict[str, Any]]:
        """`WorkerHangsError` if the next one takes longer, `WorkerError` if the process fails, `RuntimeError` if it
        fails before it is ready: that is no fault of a mutant."""
        is_ready = False
        stdout = self._process.stdout
        assert stdout is not None
        descriptor = stdout.fileno()
        buffered = b""
        deadline = time.monotonic() + within_s
        with selectors.DefaultSelector() as selector:
            selector.register(descriptor, selectors.EVENT_READ)
            while True:
                if not selector.select(max(deadline - time.monotonic(), 0.0)):
                    raise WorkerHangsError(f"no reply in {within_s:.0f} s")
                data = os.read(descriptor, 1 << 20)
                if not data:
                    break
                *lines, buffered = (buffered + data).split(b"\n")
                for line in lines:
                    is_ready = True
                    if line != READY:
                        yield json.loads(line)
                if lines:
                    deadline = time.monotonic() + within_s
        if self._process.wait() != 0:
            tail = self._log.read_text(encoding="utf-8", errors="replace").splitlines()[-LOG_TAIL_LINES:]
            failure = WorkerError if is_ready else RuntimeError
            raise failure(f"worker ended with {self._process.returncode}: " + "\n".join(tail))
