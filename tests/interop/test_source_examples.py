"""Programs in the shape of the sources' examples run as they are; only the address is another."""

from __future__ import annotations

import subprocess
import sys

import pytest
from support.interop.clients import make_topic

from tidelog.testing import LocalCluster

pytestmark = [pytest.mark.interop, pytest.mark.cluster]

ADDRESS = "localhost:9092"
PRODUCER = """
from confluent_kafka import Producer

producer = Producer({"bootstrap.servers": "localhost:9092", "partitioner": "murmur2_random"})


def delivery_report(err, msg):
    if err is not None:
        print(f"failed: {msg.key()}: {err}")
        return
    print(f"{msg.key().decode()} to {msg.topic()} [{msg.partition()}] at {msg.offset()}")


for number in range(10):
    producer.produce(topic="customers", key=str(number), value=f"customer {number}", on_delivery=delivery_report)
    producer.poll(0)
producer.flush()
"""
CONSUMER = """
from confluent_kafka import Consumer

consumer = Consumer(
    {"bootstrap.servers": "localhost:9092", "group.id": "billing", "auto.offset.reset": "earliest"}
)
consumer.subscribe(["customers"])
count = 0
try:
    while count < 10:
        msg = consumer.poll(1.0)
        if msg is None:
            continue
        if msg.error():
            print(f"error: {msg.error()}")
            continue
        print(f"{msg.key().decode()} is {msg.value().decode()}")
        count += 1
finally:
    consumer.close()
"""


def run(cluster: LocalCluster, program: str) -> list[str]:
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", program.replace(ADDRESS, cluster.kafka_bootstrap)],
        capture_output=True, text=True, check=False, timeout=60,
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, ""), done.stderr
    return done.stdout.splitlines()


@pytest.mark.requirement("a:D-11", "b:U-01")
def test_a_producer_with_a_delivery_report_and_a_consumer_loop(cluster: LocalCluster) -> None:
    make_topic(cluster, "customers", 3)
    reported = run(cluster, PRODUCER)
    assert sorted(line.split(" to ")[0] for line in reported) == sorted(map(str, range(10)))
    assert all(" to customers [" in line for line in reported)
    assert sorted(run(cluster, CONSUMER)) == sorted(f"{number} is customer {number}" for number in range(10))
