"""Produces and reads pyarrow tables, without a Python object for each record. Needs `tidelog[arrow]`.

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
        admin.create_topics([tidelog.NewTopic(TOPIC, partitions=4)], if_not_exists=True)

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

    # Reads the records of the last hour, up to the current end.
    recent = tidelog.read_arrow(TOPIC, since="1h", columns=["partition", "offset", "key", "value"], bootstrap=BOOTSTRAP)
    print(f"read {recent.num_rows} rows of {len(compute.unique(recent['partition']))} partitions")
    total = compute.sum(recent["value"].cast("string").cast("int64")).as_py()
    print(f"sum of the values: {total}")

    # Reads the same records as a stream of tables.
    with tidelog.Consumer(BOOTSTRAP, auto_offset_reset="earliest") as consumer:
        consumer.assign(consumer.partitions_for(TOPIC))
        rows = 0
        while rows < recent.num_rows:
            rows += consumer.poll_arrow(timeout=1.0, max_records=5_000).num_rows
    print(f"streamed {rows} rows")


if __name__ == "__main__":
    main()
