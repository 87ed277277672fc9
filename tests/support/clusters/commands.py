"""The `tidelog` command: in this process where a test is about what the command does, as a process of its own where it
is about the process (signals, pipes, terminals, several at a time)."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryFile
from typing import IO, Any

import pytest

from tidelog.cli.main import main

PAGE = Path(__file__).resolve().parents[3] / "docs" / "cli.md"


@dataclass(frozen=True, slots=True)
class Done:
    """What a command has left behind."""

    code: int
    raw: bytes
    """What it has written to stdout."""
    err: str

    @property
    def out(self) -> str:
        return self.raw.decode()

    @property
    def document(self) -> Any:
        return json.loads(self.raw)


def run(
    *arguments: str,
    code: int | None = 0,
    stdin: str | bytes = b"",
    stdout: IO[str] | None = None,
    stderr: IO[str] | None = None,
    **environment: str,
) -> Done:
    """Runs the command in this process to its end, which is `code`; None: any. Its streams are files, unless
    others are passed."""
    with (
        TemporaryFile("w+", encoding="utf-8") as source,
        TemporaryFile("w+", encoding="utf-8") as out,
        TemporaryFile("w+", encoding="utf-8") as err,
        pytest.MonkeyPatch.context() as patch,
    ):
        os.pwrite(source.fileno(), stdin.encode() if isinstance(stdin, str) else stdin, 0)
        for name, stream in (("stdin", source), ("stdout", stdout or out), ("stderr", stderr or err)):
            patch.setattr(sys, name, stream)
        for name, value in environment.items():
            patch.setenv(name, value)
        ended = main(arguments)
        raw, said = (_content(stream) for stream in (out, err))
    done = Done(ended, raw, said.decode())
    assert code in (ended, None), f"{arguments} ended with {ended}\n{raw!r}\n{done.err}"
    assert "Traceback" not in done.err, done.err
    return done


def _content(stream: IO[str]) -> bytes:
    stream.flush()
    return os.pread(stream.fileno(), os.fstat(stream.fileno()).st_size, 0)


def start(*arguments: str, wrapper: Sequence[str] = (), **options: Any) -> subprocess.Popen[Any]:
    """Starts the command as a process, through `wrapper`, a command that executes its arguments. `env` is added to the
    environment; other options are those of `Popen`."""
    environment = {**os.environ, "PYTHONSAFEPATH": "1", **options.pop("env", {})}
    streams = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, **options}
    return subprocess.Popen([*wrapper, sys.executable, "-m", "tidelog", *arguments], env=environment, **streams)


class Shell:
    """Commands for one cluster."""

    def __init__(self, bootstrap: str) -> None:
        self._bootstrap = bootstrap
        self.err = ""
        """What the last command has said."""

    def start(self, *arguments: str, **options: Any) -> subprocess.Popen[Any]:
        environment = {"TIDELOG_BOOTSTRAP": self._bootstrap, **options.pop("env", {})}
        return start(*arguments, env=environment, **{"text": True, **options})

    def done(self, *arguments: str, **more: Any) -> Done:
        done = run(*arguments, TIDELOG_BOOTSTRAP=self._bootstrap, **more)
        self.err = done.err
        return done

    def run(self, *arguments: str, **more: Any) -> str:
        """What it has printed."""
        return self.done(*arguments, **more).out

    def json_lines(self, *arguments: str) -> list[Any]:
        return [json.loads(line) for line in self.run(*arguments, "--output", "jsonl").splitlines()]

    def json(self, *arguments: str, **more: Any) -> Any:
        """The document, whose keys are all listed in docs/cli.md."""
        document = self.done(*arguments, "--output", "json", **more).document
        names = [name for name in KEYS if " ".join(arguments).startswith(name)]
        assert names, f"docs/cli.md has no keys of {arguments}"
        assert keys_of(document) <= KEYS[names[0]], arguments
        return document


def documented() -> dict[str, set[str]]:
    """Keys of the JSON document of each command; that of a list may be listed by those of its elements alone."""
    found: dict[str, set[str]] = {}
    rows = re.findall(r"^Keys of (`.*`):\n\n((?:- .*\n(?: .*\n)*)+)", PAGE.read_text(encoding="utf-8"), re.MULTILINE)
    for heading, lines in rows:
        keys = set(re.findall(r"^- `([^`]+)`: ", lines, re.MULTILINE))
        for error in re.findall(r"^- `([^`]+)`: null, or why it failed$", lines, re.MULTILINE):
            keys |= {f"{error}.{key}" for key in ("code", "name", "message", "retriable")}
        keys |= {key.partition("[]")[0] for key in keys}
        found |= dict.fromkeys(re.findall(r"`([^`]+)`", heading), keys)
    return found


KEYS = documented()
FREE = ("configs", "endpoints", "counts")
"""Objects whose keys are names that users chose, or kinds."""


def keys_of(value: object, path: str = "") -> set[str]:
    if isinstance(value, dict) and not path.endswith(FREE):
        found = {f"{path}.{key}".lstrip("."): inside for key, inside in value.items()}
        return set(found).union(*(keys_of(inside, key) for key, inside in found.items()))
    if isinstance(value, list):
        return set().union(*(keys_of(inside, f"{path}[]") for inside in value if isinstance(inside, dict)))
    return set()
