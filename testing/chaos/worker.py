"""A client in a process of its own: `python -m tidelog.testing.chaos.worker SPEC`, SPEC being the JSON of `WorkerSpec`.

It runs until its stdin ends, so that it ends with the process that started it, however that ends. Then it closes its
client; a client that does not close within `CLOSE_S` is left where it is, with exit code 3.
"""

from __future__ import annotations

import json
import os
import sys
import threading

from tidelog.testing.chaos.worker_spec import CLOSE_S, EXIT_NOT_CLOSED, WorkerSpec


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
        from tidelog.testing.chaos.producers import run_producer

        run_producer(spec, is_over)
    elif spec.role == "pipeline":
        from tidelog.testing.chaos.pipeline_worker import run_pipeline

        code = run_pipeline(spec, is_over)
        if code:
            os._exit(code)  # a thread still reads stdin, which an ordinary end does not survive
    elif spec.role == "committed-reader":
        from tidelog.testing.chaos.committed_reader import run_committed_reader

        run_committed_reader(spec, is_over)
    else:
        from tidelog.testing.chaos.readers import run_reader

        run_reader(spec, is_over)


if __name__ == "__main__":
    main(sys.argv[1])
