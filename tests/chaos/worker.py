"""A client in a process of its own: `python -m chaos.worker SPEC`, SPEC being the JSON of `WorkerSpec`.

It runs until its stdin ends, so that it ends with the process that started it, however that ends. Then it closes its
client; a client that does not close within `CLOSE_S` is left where it is, with exit code 3.
"""

from __future__ import annotations

import json
import os
import sys
import threading
from dataclasses import asdict, dataclass, field

CLOSE_S = 60.0
EXIT_NOT_CLOSED = 3
TIDELOG, CLASSIC, CONSUMER, AIOKAFKA = "tidelog", "classic", "consumer", "aiokafka"
"""Clients: ours; librdkafka under each of its group protocols; aiokafka, which has the classic one only."""


@dataclass(frozen=True, slots=True)
class WorkerSpec:
    role: str
    """"producer" or "reader"."""
    client: str
    name: str
    bootstrap: str
    topics: dict[str, int] = field(default_factory=dict)
    """Partitions by topic."""
    history: str = ""
    client_log: str = ""
    """Where the client's own debug output goes."""
    group: str = ""
    commits_itself: bool = False
    """The client commits in the background, as most programs let it; otherwise the reader commits and waits."""
    rate: int = 0
    """Records a second of a producer."""

    def text(self) -> str:
        return json.dumps(asdict(self))


def stop_event() -> threading.Event:
    """Set when stdin ends; from then on the process has `CLOSE_S` to end."""
    is_over = threading.Event()

    def wait() -> None:
        sys.stdin.buffer.read()
        is_over.set()
        watchdog = threading.Timer(CLOSE_S, os._exit, (EXIT_NOT_CLOSED,))
        watchdog.daemon = True
        watchdog.start()

    threading.Thread(target=wait, name="stdin", daemon=True).start()
    return is_over


def main(text: str) -> None:
    spec = WorkerSpec(**json.loads(text))
    is_over = stop_event()
    # A process imports the client that it runs, and no other.
    if spec.role == "producer":
        from chaos.producers import run_producer

        run_producer(spec, is_over)
    else:
        from chaos.readers import run_reader

        run_reader(spec, is_over)


if __name__ == "__main__":
    main(sys.argv[1])
