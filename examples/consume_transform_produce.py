"""Consume, transform, produce, exactly once: each batch of results and the offsets of its orders are one transaction.

Kill it at any time and start it again: it continues after the last committed batch, and readers of committed data see
each result once. Start it twice, with two names: the two share the partitions of the input.

python examples/consume_transform_produce.py [HOST:PORT] [NAME] [COUNT]

NAME is part of the transactional id: the same in each start of one instance, another one in each instance. It stops
when it has processed COUNT orders, or at Ctrl-C.
"""

import signal
import sys

import tidelog
from tidelog import errors

BOOTSTRAP = sys.argv[1] if len(sys.argv) > 1 else "localhost:9292"
NAME = sys.argv[2] if len(sys.argv) > 2 else "1"
COUNT = int(sys.argv[3]) if len(sys.argv) > 3 else None
SOURCE = "example-incoming"
TARGET = "example-invoices"
GROUP = "example-invoicing"
BATCH = 100


def transform(record: tidelog.ConsumerRecord) -> bytes:
    """What depends on the record alone: it may run twice, if a transaction is aborted."""
    return b"invoice of " + (record.value or b"")


def rewind(consumer: tidelog.Consumer) -> None:
    """Read again what an aborted transaction has read."""
    for partition, committed in consumer.committed(*consumer.assignment()).items():
        if committed is None:
            consumer.seek_to_beginning(partition)
        else:
            consumer.seek(partition, committed.offset)


def process(records: list[tidelog.ConsumerRecord], consumer: tidelog.Consumer, producer: tidelog.Producer) -> None:
    with producer.transaction():
        for record in records:
            producer.send(TARGET, transform(record), key=record.key)
        # Offsets are in order within a partition: the last one of each counts.
        offsets = {record.topic_partition: record.offset + 1 for record in records}
        producer.send_offsets(offsets, consumer.group_metadata())


def main() -> None:
    with tidelog.Admin(BOOTSTRAP) as admin:
        topics = [tidelog.NewTopic(name, partitions=3) for name in (SOURCE, TARGET)]
        admin.create_topics(topics, if_not_exists=True)
    done = 0
    with (
        tidelog.Producer(BOOTSTRAP, transactional_id=f"example-invoicing-{NAME}") as producer,
        tidelog.Consumer(
            BOOTSTRAP,
            group=GROUP,
            isolation="read_committed",  # the input may be the output of another transaction
            enable_auto_commit=False,  # offsets are committed by transactions only
            auto_offset_reset="earliest",
        ) as consumer,
    ):
        signal.signal(signal.SIGINT, lambda *_: consumer.wakeup())
        consumer.subscribe([SOURCE])
        producer.init_transactions()  # aborts what an earlier instance of this name has left open
        print("ready", flush=True)
        try:
            while COUNT is None or done < COUNT:
                records = consumer.poll(timeout=1, max_records=BATCH)
                if not records:
                    continue
                try:
                    process(records, consumer, producer)
                except errors.TransactionAbortableError as error:
                    # For example: the group has moved the partitions to another instance.
                    print(f"aborted: {error}", flush=True)
                    rewind(consumer)
                    continue
                done += len(records)
                print(f"committed {done}", flush=True)
        except errors.WakeupError:
            print("asked to stop")
        except errors.TransactionFatalError as error:
            sys.exit(f"ended: {error}")  # for example: a newer instance of this name has taken over


if __name__ == "__main__":
    main()
