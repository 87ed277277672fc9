"""Runs the commands and programs of a document, and compares what they print with what the document shows.

    ```console           each line that starts with `$ ` is a command of the shell; the lines below it are its output
    ```python            a program; what it prints to stdout stands in an `output` block right after it
    ```output

The output must be the real one, and nothing may be left out: a command or program without an output prints nothing.
Parts that vary are written as `...`: alone on a line it stands for any number of lines, within a line for any text.

The blocks of one document run in order, in one empty directory, on a terminal of 120 columns, with this environment's
commands first in the path. `make` lines are left to CI, which runs them itself; `kcat` runs where it is installed; and
programs that import `tidelog.spark` run in tests/spark, where there is a Spark.

`tidelog dev` stays in the foreground until Ctrl-C: it is started on free ports, awaited, serves the commands after it
(they find it by TIDELOG_BOOTSTRAP), and is stopped by Ctrl-C at the end of the document, which must go well too. What
says `localhost:9292` (or another usual port) is run with the port that was free.

`python tests/document_programs.py PAGE` prints the commands of a page with their real output.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import shlex
import shutil
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import termios
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

KCAT = re.compile(r"(?:^|\| *)kcat ")
HAS_KCAT = shutil.which("kcat") is not None
BLOCK = re.compile(
    r"^```(console|python)\n(.*?)^```$(?:\n+^```output\n(?P<output>.*?)^```$)?", re.MULTILINE | re.DOTALL
)
PORTS = (9092, 9192, 9292, 9392)
USUAL = re.compile(rf"localhost:({'|'.join(map(str, PORTS))})\b")
COLUMNS = 120
READY = "Ctrl-C stops it."
OFFSETS = 60


@dataclass(frozen=True, slots=True)
class Step:
    kind: str
    """`console`, `python` or `dev`."""
    program: str
    output: tuple[str, ...] = ()


def steps(text: str) -> list[Step]:
    """What there is to run, in order."""
    found: list[Step] = []
    for match in BLOCK.finditer(text):
        kind, body, output = match[1], match[2], match["output"]
        if kind == "python":
            if "import tidelog.spark" not in body:
                found.append(Step(kind, body, tuple((output or "").splitlines())))
            continue
        assert output is None, f"the output of a console block stands in it: {body}"
        found += [step for step in _console_steps(body) if _runs_here(step.program)]
    return found


def _console_steps(body: str) -> list[Step]:
    found: list[Step] = []
    for line in body.splitlines():
        if line.startswith("$ "):
            kind = "dev" if line.split()[1:3] == ["tidelog", "dev"] else "console"
            found.append(Step(kind, line[2:]))
        else:
            assert found, f"an output without a command: {line}"
            last = found.pop()
            found.append(Step(last.kind, last.program, (*last.output, line)))
    return found


def _runs_here(command: str) -> bool:
    return not command.startswith("make ") and (HAS_KCAT or KCAT.search(command) is None)


def matches(shown: tuple[str, ...] | list[str], real: list[str]) -> bool:
    """Whether the real lines are what a document shows. Pure."""
    pattern = "".join(
        r"(?:[^\n]*\n)*"
        if line.strip() == "..."
        else ".*".join(re.escape(part) for part in line.rstrip().split("...")) + r"[ ]*\n"
        for line in shown
    )
    return re.fullmatch(pattern, "".join(f"{line}\n" for line in real)) is not None


def port_offset() -> int:
    """Where the usual ports of three nodes are free. The ports have four digits, as in the documents: tables depend on
    how wide their cells are."""
    for number in range(OFFSETS):
        offset = 10 * (1 + (os.getpid() + number) % OFFSETS)
        try:
            with contextlib.ExitStack() as held:
                for port in (port + node for port in PORTS for node in range(3)):
                    held.enter_context(socket.create_server(("127.0.0.1", port + offset)))
                return offset
        except OSError:
            continue
    raise AssertionError("no free ports")


class Runner:
    """Runs steps in a directory; `close` stops the clusters that they have started."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._offset = port_offset()
        self._clusters = contextlib.ExitStack()
        self._environment = {
            **os.environ,
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
            "PYTHONSAFEPATH": "1",
            "TIDELOG_BOOTSTRAP": f"localhost:{9292 + self._offset}",
            "TERM": "dumb",
            "COLUMNS": str(COLUMNS),
        }

    def moved(self, text: str) -> str:
        """The text with the ports that were free."""
        return USUAL.sub(lambda match: f"localhost:{int(match[1]) + self._offset}", text)

    def run(self, step: Step) -> tuple[int, list[str]]:
        """(exit code, lines that it has printed)"""
        if step.kind == "dev":
            return 0, self._clusters.enter_context(self._dev(step.program))
        if step.kind == "python":
            done = subprocess.run(
                [sys.executable, "-"],
                input=self.moved(step.program),
                cwd=self._directory,
                env=self._environment,
                capture_output=True,
                text=True,
                check=False,
            )
            # What libraries log to stderr depends on when a leader was found: it is shown only with a failure.
            return done.returncode, (done.stdout + (done.stderr if done.returncode else "")).splitlines()
        return self._on_terminal(["bash", "-c", f"set -o pipefail\n{self.moved(step.program)}"])

    def _on_terminal(self, command: list[str]) -> tuple[int, list[str]]:
        ours, theirs = os.openpty()
        fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 40, COLUMNS, 0, 0))
        shown = b""
        try:
            with subprocess.Popen(
                command,
                cwd=self._directory,
                env=self._environment,
                stdin=subprocess.DEVNULL,
                stdout=theirs,
                stderr=theirs,
            ) as process:
                os.close(theirs)
                with contextlib.suppress(OSError):  # the end of a terminal is an error
                    while data := os.read(ours, 65_536):
                        shown += data
        finally:
            os.close(ours)
        return process.returncode, shown.decode().replace("\r\n", "\n").splitlines()

    @contextlib.contextmanager
    def _dev(self, command: str) -> Iterator[list[str]]:
        """A `tidelog dev` that serves; stopped as a person would."""
        process = subprocess.Popen(
            [*shlex.split(command), "--port-offset", str(self._offset)],
            cwd=self._directory,
            env=self._environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        with process:
            try:
                assert process.stdout is not None
                said: list[str] = []
                while READY not in said:
                    line = process.stdout.readline()
                    assert line, f"{command} has ended: {said}"
                    said.append(line.rstrip("\n"))
                yield said
            finally:
                process.send_signal(signal.SIGINT)
                rest, _ = process.communicate(timeout=60)
            assert (process.returncode, rest) == (0, "stopping...\n"), f"{command}:\n{rest}"

    def __enter__(self) -> Runner:
        return self

    def __exit__(self, *error: object) -> None:
        self._clusters.close()


def check(text: str, directory: Path) -> None:
    """Run everything that a document shows; an AssertionError says what is not as it is shown."""
    with Runner(directory) as runner:
        for step in steps(text):
            code, real = runner.run(step)
            printed = "\n".join(real)
            assert code == 0, f"exit code {code}:\n{step.program}\n{printed}"
            shown = [runner.moved(line) for line in step.output]
            wanted = "\n".join(shown)
            assert matches(shown, real), f"{step.program}\nprints\n{printed}\nand the document shows\n{wanted}"


def main() -> None:
    """Print a page's commands with their real output."""
    with tempfile.TemporaryDirectory() as directory, Runner(Path(directory)) as runner:
        for step in steps(Path(sys.argv[1]).read_text(encoding="utf-8")):
            code, real = runner.run(step)
            verdict = "as shown" if matches([runner.moved(line) for line in step.output], real) else "DIFFERS"
            print(f"--- {verdict}, exit code {code}\n$ {step.program}", *real, sep="\n", flush=True)


if __name__ == "__main__":
    main()
