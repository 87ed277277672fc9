"""A ledger in one partition: each entry is stored at the offset that its writer expects, or not at all.

A writer reads the partition up to its end, decides, and appends with `expected_offset`. If another writer was faster,
nothing is stored: it reads on and decides again. So the balance never falls below zero, without another system.

python examples/ledger.py [HOST:PORT]
"""

import sys
import threading

import tidelog

BOOTSTRAP = sys.argv[1] if len(sys.argv) > 1 else "localhost:9292"
TOPIC = "example-ledger"


class Ledger:
    """One writer's view of the ledger. `end` is where the next entry goes."""

    def __init__(self, producer: tidelog.Producer, consumer: tidelog.Consumer) -> None:
        self.producer = producer
        self.consumer = consumer
        self.balance = 0
        self.end = 0

    def read_to(self, end: int) -> None:
        while self.end < end:
            for record in self.consumer.poll(timeout=1):
                self.balance += int(record.value or b"0")
                self.end = record.offset + 1

    def book(self, amount: int) -> bool:
        """Returns whether the amount was booked; False if the balance would fall below zero."""
        while self.balance + amount >= 0:
            try:
                self.producer.send(TOPIC, str(amount), partition=0, expected_offset=self.end).result(timeout=30)
            except tidelog.errors.OffsetMismatchError as error:
                self.read_to(error.end_offset)
            else:
                self.read_to(self.end + 1)
                return True
        return False


def withdraw(names: list[str], results: list[bool]) -> None:
    with tidelog.Producer(BOOTSTRAP) as producer, tidelog.Consumer(BOOTSTRAP) as consumer:
        partition = tidelog.TopicPartition(TOPIC, 0)
        consumer.assign([partition])
        consumer.seek_to_beginning()
        ledger = Ledger(producer, consumer)
        ledger.read_to(consumer.end_offsets(partition)[partition])
        results += [ledger.book(-10) for _ in names]


def main() -> None:
    with tidelog.Admin(BOOTSTRAP) as admin:
        admin.create_topics([tidelog.NewTopic(TOPIC, partitions=1)], if_not_exists=True)
    with tidelog.Producer(BOOTSTRAP) as producer:
        try:
            producer.send(TOPIC, "100", partition=0, expected_offset=0).result(timeout=30)
        except tidelog.errors.OffsetMismatchError:
            print("the ledger has entries already: it is not opened again")
    results: list[bool] = []
    writers = [threading.Thread(target=withdraw, args=(["a withdrawal"] * 6, results)) for _ in range(3)]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
    print(f"{results.count(True)} of {len(results)} withdrawals of 10 were booked from 100")


if __name__ == "__main__":
    main()
