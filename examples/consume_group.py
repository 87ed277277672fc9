"""Consumes as a member of a group and commits. Start it twice: the two share the partitions.

python examples/consume_group.py [HOST:PORT] [COUNT]

It stops after COUNT records, or at Ctrl-C. Run produce.py first.
"""

import signal
import sys

import tidelog

BOOTSTRAP = sys.argv[1] if len(sys.argv) > 1 else "localhost:9292"
COUNT = int(sys.argv[2]) if len(sys.argv) > 2 else None
TOPIC = "example-orders"
COMMIT_EVERY = 100


def handle(record: tidelog.ConsumerRecord) -> None:
    if record.offset == 0:
        print(f"{record.topic_partition}: begins with key={record.key!r} value={record.value!r}")


def main() -> None:
    consumer = tidelog.Consumer(
        BOOTSTRAP,
        group="example-billing",
        auto_offset_reset="earliest",
        enable_auto_commit=False,
    )
    signal.signal(signal.SIGINT, lambda *_: consumer.wakeup())
    handled = 0

    def revoked(partitions: list[tidelog.TopicPartition]) -> None:
        # The next owner starts at the offsets that are committed when this returns.
        print(f"gives up {', '.join(map(str, partitions))}")
        consumer.commit()

    with consumer:
        consumer.subscribe(
            [TOPIC],
            on_assigned=lambda partitions: print(f"reads {', '.join(map(str, partitions))}"),
            on_revoked=revoked,
            on_lost=lambda partitions: print(f"lost {', '.join(map(str, partitions))}: other members have them"),
        )
        try:
            for record in consumer:
                handle(record)
                handled += 1
                if handled % COMMIT_EVERY == 0 or handled == COUNT:
                    try:
                        consumer.commit()
                    except tidelog.errors.CommitFailedError:
                        print("the group continued without this member; uncommitted records are read again")
                if handled == COUNT:
                    break
        except tidelog.errors.WakeupError:
            print("asked to stop")
    print(f"handled {handled} records")


if __name__ == "__main__":
    main()
