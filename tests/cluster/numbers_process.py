"""A program that produces, for tests that kill it: `python numbers_process.py BOOTSTRAP TOPIC NAME FIRST`.

Sends "NAME-number" from FIRST on, a few hundred a second, until it is killed or a line on stdin ends it. Each number
that is acknowledged is a line of stdout.
"""

from __future__ import annotations

import sys
import threading
import time

import tidelog


def main(bootstrap: str, topic: str, name: str, first: str) -> None:
    is_over = threading.Event()

    def wait_for_the_end() -> None:
        sys.stdin.readline()
        is_over.set()

    threading.Thread(target=wait_for_the_end, daemon=True).start()
    with tidelog.Producer(bootstrap, linger_ms=2) as producer:
        number = int(first)
        while not is_over.is_set():

            def on_delivery(error: Exception | None, _: tidelog.RecordMetadata, number: int = number) -> None:
                if error is None:
                    print(number, flush=True)

            producer.send(topic, f"{name}-{number}", key=name, on_delivery=on_delivery)
            number += 1
            time.sleep(0.003)


if __name__ == "__main__":
    main(*sys.argv[1:])
