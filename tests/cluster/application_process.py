"""An application, for tests that kill it and its brokers: `python application_process.py BOOTSTRAP GROUP ORDERS DEAD`.

Handles orders, which are numbers: a multiple of 17 makes no sense and goes to the topic DEAD, a multiple of 13 fails
at the first attempt and is tried again. It commits after every fifth order, and before it gives partitions up. What
happens is printed as lines of JSON: [what, details]. A line on stdin closes it in order.
"""

from __future__ import annotations

import json
import sys
import threading
from typing import Any

import tidelog
from tidelog.client.consumer.errors import CommitFailedError, WakeupError

COMMIT_EVERY = 5


def say(what: str, details: Any) -> None:
    print(json.dumps([what, details]), flush=True)


def main(bootstrap: str, group: str, orders: str, dead: str) -> None:
    tried: set[int] = set()

    def handle(number: int) -> None:
        if number % 17 == 0:
            raise ValueError(f"order {number} makes no sense")
        if number % 13 == 0 and number not in tried:
            tried.add(number)
            raise ConnectionError("the bank does not answer")

    options: dict[str, Any] = {
        "group": group,
        "auto_offset_reset": "earliest",
        "enable_auto_commit": False,
        # A coordinator that takes over gives a whole session to those that it has not heard of yet.
        "session_timeout_ms": 6_000,
        "heartbeat_interval_ms": 1_000,
    }
    with tidelog.Producer(bootstrap) as letters, tidelog.Consumer(bootstrap, **options) as consumer:

        def commit() -> None:
            try:
                consumer.commit()
            except CommitFailedError as error:
                say("refused", str(error))  # others have these partitions now, and handle it again

        def revoked(names: list[tidelog.TopicPartition]) -> None:
            commit()
            say("revoked", [name.partition for name in names])

        def wait_for_the_end() -> None:
            sys.stdin.readline()
            consumer.wakeup()

        threading.Thread(target=wait_for_the_end, daemon=True).start()
        consumer.subscribe(
            [orders],
            on_assigned=lambda names: say("assigned", [name.partition for name in names]),
            on_revoked=revoked,
            on_lost=lambda names: say("lost", [name.partition for name in names]),
        )
        count = 0
        try:
            for record in consumer:
                while True:
                    try:
                        handle(int(record.value))
                        break
                    except ConnectionError:
                        say("retry", int(record.value))
                    except ValueError:
                        letters.send(dead, record.value).result(60)
                        break
                say("handled", [record.partition, record.offset, int(record.value)])
                count += 1
                if count % COMMIT_EVERY == 0:
                    commit()
        except WakeupError:
            commit()
    say("closed", None)


if __name__ == "__main__":
    main(*sys.argv[1:])
