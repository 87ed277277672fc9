"""The metadata image at size: loading it, what it weighs, and the largest single decisions. Pure parts only.

100,000 partitions of 3 replicas: 1,000 topics of 100 partitions on 30 brokers. For the fencing, one broker leads 10,000
partitions. Limits are those of the issue; the share of Raft and of the network is measured elsewhere.
"""

import gc
import tracemalloc
from collections.abc import Iterator
from random import Random
from uuid import UUID

from bench.harness import Result, at_most, seconds
from tidelog.metadata.brokers import Fence
from tidelog.metadata.controller import Controller
from tidelog.metadata.decision import Context
from tidelog.metadata.delta import delta_between
from tidelog.metadata.image import ClusterImage
from tidelog.metadata.records import (
    ChangeBroker,
    CreatePartition,
    CreateTopic,
    Record,
    RegisterBroker,
    decode_records,
    split_decision,
)
from tidelog.metadata.replay import Replay
from tidelog.metadata.snapshot import decode_snapshot, snapshot_bytes
from tidelog.metadata.topics import CreateTopics, NewTopic

BROKERS = 30
TOPICS = 1_000
PARTITIONS = 100_000
LED = 10_000
WIDE = 1_000


def _directory(broker: int) -> UUID:
    return UUID(int=broker + 1)


def _brokers(count: int) -> Iterator[Record]:
    for broker in range(count):
        yield RegisterBroker(
            broker=broker,
            broker_epoch=broker,
            incarnation=UUID(int=broker + 1000),
            endpoints=(("CLIENT", "PLAINTEXT", f"host-{broker}", 9092),),
            rack=f"rack-{broker % 3}",
            directories=(_directory(broker),),
        )
        yield ChangeBroker(broker=broker, broker_epoch=broker, fenced=False)


def _topics(count: int, partitions: int, *, leader: int | None = None) -> Iterator[Record]:
    """Topics with their replicas side by side over the brokers; all led by one broker if it is named."""
    per_topic = partitions // count
    for topic in range(count):
        topic_id = UUID(int=(topic + 1) << 64)
        yield CreateTopic(topic_id=topic_id, name=f"topic-{topic}")
        for number in range(per_topic):
            first = leader if leader is not None else (topic * per_topic + number) % BROKERS
            step = 1 + (number + topic) % (BROKERS - 2)
            replicas = (first, (first + step) % BROKERS, (first + step + 1) % BROKERS)
            yield CreatePartition(
                topic_id=topic_id,
                partition=number,
                replicas=replicas,
                directories=tuple(_directory(broker) for broker in replicas),
                isr=replicas,
                leader=first,
            )


def _image(count: int, partitions: int, *, leader: int | None = None) -> ClusterImage:
    return ClusterImage().apply_all([*_brokers(BROKERS), *_topics(count, partitions, leader=leader)])


def _context() -> Context:
    return Context(now_ms=0, random=Random(1), next_offset=1000)


def _logged(image: ClusterImage, request: object) -> ClusterImage:
    """Decide, encode, decode and apply: what the active controller and then every other node does."""
    decision = Controller("bench").decide(image, request, _context())
    speculative = image.apply_all(decision.records)
    replay = Replay(image)
    for entry in split_decision(decision.records, name="bench"):
        replay.apply(decode_records(entry))
    assert len(replay.image.topics) == len(speculative.topics), "both ways lead to one state"
    return replay.image


def _weight(data: bytes) -> float:
    """Bytes of memory for each partition of the image in this snapshot."""
    gc.collect()
    tracemalloc.start()
    try:
        image = decode_snapshot(data).image
        gc.collect()
        held, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert len(image.topics) == TOPICS
    return held / PARTITIONS


def run() -> Iterator[Result]:
    image = _image(TOPICS, PARTITIONS)
    data = snapshot_bytes(image)
    yield Result("snapshot, 100,000 partitions", len(data) / (1 << 20), "MiB")
    yield Result("image to snapshot, 100,000 partitions", seconds(lambda: snapshot_bytes(image)), "s")
    assert decode_snapshot(data).image == image
    yield at_most("snapshot to image, 100,000 partitions", seconds(lambda: decode_snapshot(data)), "s", target=10.0)
    yield at_most("memory of a partition in the image", _weight(data), "bytes", target=1024.0)

    led = _image(LED // 100, LED, leader=0)
    assert sum(1 for _, _, partition in led.partitions_on(0) if partition.leader == 0) == LED
    fenced = _logged(led, Fence(broker=0, broker_epoch=0))
    assert not any(partition.leader in (0, -1) for _, _, partition in fenced.partitions_on(0))
    took = seconds(lambda: _logged(led, Fence(broker=0, broker_epoch=0)))
    yield at_most("fence a broker that leads 10,000 partitions", took, "s", target=2.0)
    yield Result("delta of that fencing", seconds(lambda: delta_between(led, fenced)), "s")

    wide = CreateTopics(topics=(NewTopic(name="wide", partitions=WIDE, replication_factor=3),))
    grown = _logged(image, wide)
    assert len(grown.topics) == TOPICS + 1
    took = seconds(lambda: _logged(image, wide))
    yield at_most("create a topic of 1,000 partitions among 100,000", took, "s", target=1.0)
