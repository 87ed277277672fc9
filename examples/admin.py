"""Manages topics, configs and groups.

python examples/admin.py [HOST:PORT]
"""

import sys

import tidelog

BOOTSTRAP = sys.argv[1] if len(sys.argv) > 1 else "localhost:9292"
TOPIC = "example-admin"
GROUP = "example-reports"


def main() -> None:
    with tidelog.Admin(BOOTSTRAP) as admin:
        try:
            created = admin.create_topic(TOPIC, partitions=2, configs={"retention.ms": 86_400_000})
            print(f"{created.name}: created, {created.partitions} partitions")
        except tidelog.errors.TopicAlreadyExistsError:
            print(f"{TOPIC}: exists already")

        topic = tidelog.ConfigResource("topic", TOPIC)
        admin.alter_config(topic, sets={"retention.ms": 3_600_000})
        retention = admin.describe_config(topic, ["retention.ms"])["retention.ms"]
        print(f"retention.ms: {retention.value}, set on the {retention.source}")

        # `partial=True` returns results and errors side by side.
        outcomes = admin.describe_topics([TOPIC, "no-such-topic"], partial=True)
        for name, description in outcomes.succeeded.items():
            leaders = [partition.leader for partition in description.partitions]
            print(f"{name}: led by {leaders}")
        for name, failed in outcomes.errors.items():
            print(f"{name}: {failed.code.name}")

        # A group that has read 4 of 10 records.
        with tidelog.Producer(BOOTSTRAP) as producer:
            producer.send_many(TOPIC, values=["x"] * 10, partition=0).result(timeout=30)
        partition = tidelog.TopicPartition(TOPIC, 0)
        admin.alter_group_offsets(GROUP, {partition: 4})
        (lag,) = [row.lag for row in admin.group_lag(GROUP) if row.partition == partition]
        print(f"{GROUP}: {lag} records behind")
        (change,) = admin.reset_group_offsets(GROUP, to="earliest", topics=[partition])
        print(f"{GROUP}: {change.partition} from {change.before} to {change.after}")

        admin.delete_group(GROUP)
        admin.delete_topic(TOPIC)
        print("deleted")


if __name__ == "__main__":
    main()
