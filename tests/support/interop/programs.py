"""Kafka clients in other languages: programs that print one JSON line for each record, run as processes.

`make interop-clients` builds them into build/interop where Go and Node.js are installed.
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
import threading
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[3]
BUILT = ROOT / "build" / "interop"
GO_PROGRAM = BUILT / "go-clients"
NODE_MODULES = BUILT / "node"
NODE_PROGRAM = ROOT / "tests" / "interop" / "node" / "client.js"


def is_built(client: str) -> bool:
    return (NODE_MODULES / "node_modules" / client).exists() if client == "kafkajs" else GO_PROGRAM.exists()


def needs(client: str) -> pytest.MarkDecorator:
    """Skips the test, by name, where the client is not built; with REQUIRE_INTEROP_CLIENTS=1 it fails instead."""
    return pytest.mark.skipif(
        not is_built(client) and os.environ.get("REQUIRE_INTEROP_CLIENTS") != "1",
        reason=f"{client} is not built: `make interop-clients` does it where Go and Node.js are installed",
    )


def command_of(client: str, *arguments: str) -> list[str]:
    if client == "kafkajs":
        node = shutil.which("node")
        assert node is not None, "node is installed where its modules are"
        return [node, str(NODE_PROGRAM), *arguments]
    return [str(GO_PROGRAM), client, *arguments]


class Program:
    """A client's process; `rows` grows while it runs."""

    def __init__(self, client: str, *arguments: str) -> None:
        self.rows: list[dict[str, Any]] = []
        self._command = shlex.join(command_of(client, *arguments))
        self._process = subprocess.Popen(
            command_of(client, *arguments),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "INTEROP_NODE_MODULES": str(NODE_MODULES)},
        )
        self._errors: list[str] = []
        self._threads = [
            threading.Thread(target=self._read_rows, daemon=True),
            threading.Thread(target=self._read_errors, daemon=True),
        ]
        for thread in self._threads:
            thread.start()

    def _read_rows(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self.rows.append(json.loads(line))

    def _read_errors(self) -> None:
        assert self._process.stderr is not None
        for line in self._process.stderr:
            self._errors.append(line)

    def check(self) -> None:
        """Raises if it has failed."""
        code = self._process.poll()
        assert code in (None, 0), f"{self._command} ended with {code}: {''.join(self._errors)[-2000:]}"

    def wait(self, timeout_s: float) -> list[dict[str, Any]]:
        """Its rows, once it has ended well."""
        try:
            self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            distinct = len({row.get("value") for row in self.rows})
            raise AssertionError(
                f"{self._command} has not ended in {timeout_s} s; {len(self.rows)} rows, {distinct} distinct; "
                f"{''.join(self._errors)[-2000:]}"
            ) from None
        for thread in self._threads:
            thread.join(10)
        self.check()
        return self.rows

    def end(self) -> None:
        self._process.kill()
        self._process.wait()
        for thread in self._threads:
            thread.join(10)
        for stream in (self._process.stdout, self._process.stderr):
            if stream is not None:
                stream.close()
