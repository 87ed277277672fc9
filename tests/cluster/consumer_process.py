"""A program that consumes, for tests that kill it: `python consumer_process.py BOOTSTRAP GROUP TOPIC [OPTIONS]`.

Each thing that happens is a line of JSON: [seconds of the machine's monotonic clock, what, details]. Options are JSON:
those of a consumer, and `handler_s`: how long each record takes, `commits`: whether each record is committed. A line on
stdin closes it in order.
"""

from __future__ import annotations

import json
import sys
import threading
import time
from typing import Any

import tidelog
from tidelog.client.consumer.errors import WakeupError


def say(what: str, details: Any) -> None:
    print(json.dumps([time.monotonic(), what, details]), flush=True)


def main(bootstrap: str, group: str, topic: str, text: str = "{}") -> None:
    options = json.loads(text)
    handler_s = options.pop("handler_s", 0.0)
    commits = options.pop("commits", False)
    with tidelog.Consumer(bootstrap, group=group, auto_offset_reset="earliest", **options) as consumer:

        def wait_for_the_end() -> None:
            sys.stdin.readline()
            consumer.wakeup()

        threading.Thread(target=wait_for_the_end, daemon=True).start()
        consumer.subscribe(
            [topic],
            on_assigned=lambda names: say("assigned", [name.partition for name in names]),
            on_revoked=lambda names: say("revoked", [name.partition for name in names]),
            on_lost=lambda names: say("lost", [name.partition for name in names]),
        )
        try:
            for record in consumer:
                say("record", [record.partition, record.offset, record.value.decode()])
                time.sleep(handler_s)
                if commits:
                    consumer.commit()
        except WakeupError:
            say("woken", threading.current_thread().name)
    say("closed", None)


if __name__ == "__main__":
    main(*sys.argv[1:])
