"""A node that measures the processor time of the stages of a produce request, for `kafka_api`.

    python -m bench.kafka_stages node.toml stages.json

It runs like `tidelog server`, with clocks around some functions of the Kafka API server. At SIGUSR1 it writes the
counts since the last time, {stage: seconds of the event loop's thread}. The clocks cost a few microseconds per request.
Not a benchmark: it has no `run()`.
"""

from __future__ import annotations

import json
import signal
import sys
import time
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Any

from tidelog.rpc.kafka import produce
from tidelog.rpc.kafka.connection import Connection
from tidelog.server.config import load
from tidelog.server.run import run_node
from tidelog.services.produce import ProduceService

FRAMING, FINDING, APPENDING, ANSWERING = "framing and decoding", "finding and checking", "append", "answer and encoding"
STAGES = (FRAMING, FINDING, APPENDING, ANSWERING)


class Clocks:
    """One clock per stage; recursion within a stage counts once."""

    def __init__(self) -> None:
        self.spent_ns = dict.fromkeys(STAGES, 0)
        self._running: str | None = None

    def around(self, stage: str, function: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(function)
        def timed(*arguments: Any, **named: Any) -> Any:
            if self._running is not None:
                return function(*arguments, **named)
            self._running = stage
            began_ns = time.thread_time_ns()
            try:
                return function(*arguments, **named)
            finally:
                self.spent_ns[stage] += time.thread_time_ns() - began_ns
                self._running = None

        return timed

    def around_async(self, stage: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap a coroutine that does not wait in this benchmark: otherwise the clock would count other tasks."""

        @wraps(function)
        async def timed(*arguments: Any, **named: Any) -> Any:
            began_ns = time.thread_time_ns()
            try:
                return await function(*arguments, **named)
            finally:
                self.spent_ns[stage] += time.thread_time_ns() - began_ns

        return timed

    def tell(self, path: Path) -> None:
        spent_s = {stage: spent / 1e9 for stage, spent in self.spent_ns.items()}
        self.spent_ns = dict.fromkeys(STAGES, 0)
        new = path.with_suffix(".new")
        new.write_text(json.dumps(spent_s), encoding="utf-8")
        new.rename(path)


def install(clocks: Clocks) -> None:
    for owner, name, stage in (
        (Connection, "buffer_updated", FRAMING),
        (Connection, "_read", FRAMING),
        (produce, "_produce_request", FINDING),
        (Connection, "_start", ANSWERING),
        (Connection, "_make", ANSWERING),
        (Connection, "_respond", ANSWERING),
        (Connection, "_flush", ANSWERING),
    ):
        setattr(owner, name, clocks.around(stage, getattr(owner, name)))
    for home, name, stage in (
        (ProduceService, "start", APPENDING),
        (produce, "_respond", ANSWERING),
    ):
        setattr(home, name, clocks.around_async(stage, getattr(home, name)))


def main(config: str, out: str) -> int:
    clocks = Clocks()
    install(clocks)
    signal.signal(signal.SIGUSR1, lambda *_: clocks.tell(Path(out)))
    return run_node(load(config, {}), ends_with_stdin=True)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
