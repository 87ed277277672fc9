"""A member of a consumer group: reads, handles, commits. Start it twice, and the two share the partitions.

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

    def given_up(partitions: list[tidelog.TopicPartition]) -> None:
        # Their next owner begins at what is committed when this returns.
        print(f"gives up {', '.join(map(str, partitions))}")
        consumer.commit()

    with consumer:
        consumer.subscribe(
            [TOPIC],
            on_assigned=lambda partitions: print(f"reads {', '.join(map(str, partitions))}"),
            on_revoked=given_up,
            on_lost=lambda partitions: print(f"others have {', '.join(map(str, partitions))} already"),
        )
        try:
            for record in consumer:
                handle(record)
                handled += 1
                if handled % COMMIT_EVERY == 0 or handled == COUNT:
                    try:
                        consumer.commit()
                    except tidelog.errors.CommitFailedError:
                        print("the group has gone on without this member; what was not committed is read again")
                if handled == COUNT:
                    break
        except tidelog.errors.WakeupError:
            print("asked to stop")
    print(f"handled {handled} records")


if __name__ == "__main__":
    main()
