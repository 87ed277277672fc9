"""Tables in, tables out: pyarrow columns without a Python object for each record. Needs `tidelog[arrow]`.

python examples/bulk_arrow.py [HOST:PORT]
"""

import sys

import pyarrow
from pyarrow import compute

import tidelog

BOOTSTRAP = sys.argv[1] if len(sys.argv) > 1 else "localhost:9292"
TOPIC = "example-measurements"
ROWS = 20_000


def main() -> None:
    with tidelog.Admin(BOOTSTRAP) as admin:
        admin.create_topics([tidelog.NewTopic(TOPIC, partitions=4)], partial=True)  # it may be there

    numbers = range(ROWS)
    table = pyarrow.table(
        {
            "key": pyarrow.array([f"sensor-{number % 100}".encode() for number in numbers]),
            "value": pyarrow.array([f"{number}".encode() for number in numbers]),
        }
    )
    with tidelog.Producer(BOOTSTRAP, compression="lz4") as producer:
        done = producer.send_many(TOPIC, table).result(timeout=60)
    print(f"stored {done.count} rows in {len(done.ranges)} batches")

    # All of the last hour, up to what is the end now.
    found = tidelog.read_arrow(TOPIC, since="1h", columns=["partition", "offset", "key", "value"], bootstrap=BOOTSTRAP)
    print(f"read {found.num_rows} rows of {len(compute.unique(found['partition']))} partitions")
    total = compute.sum(found["value"].cast("string").cast("int64")).as_py()
    print(f"sum of the values: {total}")

    # The same as a stream, a table at a time.
    with tidelog.Consumer(BOOTSTRAP, auto_offset_reset="earliest") as consumer:
        consumer.assign(consumer.partitions_for(TOPIC))
        rows = 0
        while rows < found.num_rows:
            rows += consumer.poll_arrow(timeout_ms=1_000, max_records=5_000).num_rows
    print(f"streamed {rows} rows")


if __name__ == "__main__":
    main()
