"""Produces records: one by one with a future or a callback, then many at once.

python examples/produce.py [HOST:PORT]
"""

import sys

import tidelog

BOOTSTRAP = sys.argv[1] if len(sys.argv) > 1 else "localhost:9292"
TOPIC = "example-orders"


def report_delivery(error: Exception | None, metadata: tidelog.RecordMetadata) -> None:
    if error is None:
        print(f"callback: stored in partition {metadata.partition} at offset {metadata.offset}")
    else:
        print(f"callback: not stored: {error}")


def main() -> None:
    with tidelog.Admin(BOOTSTRAP) as admin:
        admin.create_topics([tidelog.NewTopic(TOPIC, partitions=3)], if_not_exists=True)

    with tidelog.Producer(BOOTSTRAP, linger_ms=5, compression="zstd") as producer:
        # `send` queues a record; when `result` returns, the record is on disk.
        metadata = producer.send(TOPIC, b"first", key="42", headers={"trace": b"1"}).result(timeout=30)
        print(f"future: stored in partition {metadata.partition} at offset {metadata.offset}")

        # Records of one key keep their order, also across retries.
        for number in range(3):
            producer.send(TOPIC, f"order {number}", key="42", on_delivery=report_delivery)
        producer.flush(timeout=30)

        # Columns are several times faster than single records.
        done = producer.send_many(
            TOPIC, keys=[f"{number % 10}" for number in range(1000)], values=["bulk"] * 1000
        ).result(timeout=30)
        print(f"bulk: {done.count} records in {len(done.ranges)} batches")

    # Values other than bytes and str need a serializer.
    with tidelog.Producer(BOOTSTRAP, value_serializer=tidelog.serializers.json) as producer:
        producer.send(TOPIC, {"amount": 10, "currency": "EUR"}, key="43").result(timeout=30)
    print("json: stored")


if __name__ == "__main__":
    main()
