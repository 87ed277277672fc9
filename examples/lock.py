"""A lock in one partition: the program with the newest claim holds it, without another system.

The offset of a claim is a fencing token. Updates carry the token, and the partition's leader stores them only if no
newer claim is there. So a holder that was slow, and was replaced meanwhile, changes nothing.

python examples/lock.py [HOST:PORT]
"""

import sys

import tidelog
from tidelog.errors import OffsetMismatchError, StaleFencingTokenError

BOOTSTRAP = sys.argv[1] if len(sys.argv) > 1 else "localhost:9292"
TOPIC = "example-lock"
PARTITION = tidelog.TopicPartition(TOPIC, 0)


class Candidate:
    """A program that wants the lock."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.token: int | None = None
        self._producer = tidelog.Producer(BOOTSTRAP)

    def close(self) -> None:
        self._producer.close()

    def claim(self, end: int) -> bool:
        """Take the lock, if nobody has written since the partition ended at `end`."""
        try:
            claim = self._producer.send(TOPIC, f"{self.name} claims", partition=0, claim=True, expected_offset=end)
            self.token = claim.result(timeout=30).offset
        except OffsetMismatchError:
            return False
        return True

    def update(self, value: str) -> bool:
        """Store a value, if this program holds the lock."""
        try:
            self._producer.send(TOPIC, value, partition=0, fencing_token=self.token).result(timeout=30)
        except StaleFencingTokenError:
            self.token = None
            return False
        return True


def end_of_partition() -> int:
    with tidelog.Consumer(BOOTSTRAP) as consumer:
        return consumer.end_offsets(PARTITION)[PARTITION]


def updates() -> list[str]:
    """All values; claims are records, too."""
    found: list[str] = []
    end = end_of_partition()
    with tidelog.Consumer(BOOTSTRAP) as consumer:
        consumer.assign([PARTITION])
        consumer.seek_to_beginning()
        while (consumer.position(PARTITION) or 0) < end:
            found += [(record.value or b"").decode() for record in consumer.poll(timeout=1)]
    return [value for value in found if not value.endswith("claims")]


def main() -> None:
    with tidelog.Admin(BOOTSTRAP) as admin:
        admin.create_topic(TOPIC, partitions=1, if_not_exists=True)
    first, second = Candidate("first"), Candidate("second")
    seen_by_second = end_of_partition()
    if first.claim(end_of_partition()):
        print("first holds the lock")
    first.update("of first")
    if not second.claim(seen_by_second):
        print("second does not get it while first holds it")
    # The first program seems to be dead (a program of your own would wait, say, for its last update to be old).
    if second.claim(end_of_partition()):
        print("second holds the lock")
    second.update("of second")
    if not first.update("late, of first"):
        print("first has lost the lock: its update was not stored")
    print(f"updates: {updates()}")
    first.close()
    second.close()


if __name__ == "__main__":
    main()
