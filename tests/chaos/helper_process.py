"""A native helper that takes commands, a line each, and answers each with a line. It ends when its stdin does."""

from __future__ import annotations

import select
import subprocess
from collections.abc import Sequence

END_S = 20.0
ANSWER_S = 60.0


class HelperProcess:
    def __init__(self, command: Sequence[str]) -> None:
        """Returns when it is ready. Raises `OSError` with its words otherwise."""
        self._process = subprocess.Popen(
            list(command),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            bufsize=1,
            start_new_session=True,
        )
        if self._line() != "ready":
            _, words = self._process.communicate(timeout=END_S)
            raise OSError(f"{command[0]}: {words.strip()}")

    def call(self, command: str) -> str:
        assert self._process.stdin is not None, "a pipe was asked for"
        self._process.stdin.write(command + "\n")
        answer = self._line()
        assert answer, f"{command}: it has ended"
        assert not answer.startswith("unknown"), answer
        return answer

    def last_line(self) -> str:
        """What it says when it ends by itself."""
        line = self._line()
        self.end()
        return line

    def end(self) -> None:
        assert self._process.stdin is not None, "a pipe was asked for"
        self._process.stdin.close()
        try:
            self._process.wait(END_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        for pipe in (self._process.stdout, self._process.stderr):
            if pipe is not None:
                pipe.close()

    def _line(self) -> str:
        # Commands and answers alternate, so no line waits in the buffer of `readline`.
        assert self._process.stdout is not None, "a pipe was asked for"
        ready, _, _ = select.select([self._process.stdout], [], [], ANSWER_S)
        if not ready:
            raise OSError(f"{self._process.args!r} does not answer within {ANSWER_S:.0f} s")
        return self._process.stdout.readline().rstrip("\n")
