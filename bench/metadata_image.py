"""The metadata image at size: loading it, what it weighs, and the largest single decisions. Pure parts only.

100,000 partitions of 3 replicas: 1,000 topics of 100 partitions on 30 brokers. For the fencing, one broker leads 10,000
partitions. Raft, disk and network have their share in `metadata_takeover`.
"""

import gc
import time
import tracemalloc
from collections.abc import Callable, Iterable, Iterator
from random import Random
from uuid import UUID

import msgpack

from bench.harness import Result, alternate, at_most, seconds
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
from tidelog.metadata.snapshot import RECORDS, SnapshotReader, chunks, decode_snapshot, snapshot_bytes
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


def _decided(image: ClusterImage, request: object) -> tuple[ClusterImage, list[bytes]]:
    """What the active controller does: decide, apply, encode."""
    decision = Controller("bench").decide(image, request, _context())
    after = decision.image if decision.image is not None else image.apply_all(decision.records)
    return after, split_decision(decision.records, name="bench")


def _fenced(image: ClusterImage) -> tuple[ClusterImage, list[list[bytes]], float]:
    """Broker 0 fenced, step by step; the entries of each step, and the longest one in CPU seconds."""
    steps: list[list[bytes]] = []
    longest = 0.0
    while not image.brokers[0].fenced:
        began = time.process_time()
        image, entries = _decided(image, Fence(broker=0, broker_epoch=0))
        longest = max(longest, time.process_time() - began)
        steps.append(entries)
    return image, steps, longest


def _followed(image: ClusterImage, entries: Iterable[bytes]) -> ClusterImage:
    """What every other node does: decode and apply."""
    replay = Replay(image)
    for entry in entries:
        replay.apply(decode_records(entry))
    return replay.image


def _cpu_seconds(work: Callable[[], object], *, repeat: int = 5) -> float:
    """Of the calling thread, best of a few: what is asked is how long the event loop is held."""
    best = float("inf")
    for _ in range(repeat):
        gc.collect()
        gc.disable()
        began = time.process_time()
        work()
        best = min(best, time.process_time() - began)
        gc.enable()
    return best


def _longest_slice(data: bytes) -> float:
    """Of `metadata.snapshot_loader`, which gives others a turn after each chunk."""
    reader, longest = SnapshotReader(), 0.0
    gc.collect()
    gc.disable()
    for kind, payload in chunks(data):
        began = time.process_time()
        reader.take(kind, payload)
        longest = max(longest, time.process_time() - began)
    gc.enable()
    return longest


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
    payloads = [payload for kind, payload in chunks(data) if kind == RECORDS]
    loading, bare = alternate(
        lambda: decode_snapshot(data), lambda: [msgpack.unpackb(p, strict_map_key=False) for p in payloads], repeat=3
    )
    yield at_most("snapshot to image, 100,000 partitions", loading, "s", target=10.0)
    yield Result("the same", loading, "s", ratio=loading / bare, anchor="msgpack alone")
    longest = min(_longest_slice(data) for _ in range(3))
    yield at_most("the longest slice in which it is read, CPU", longest, "s", target=0.2)
    took = _cpu_seconds(lambda: delta_between(ClusterImage(), image), repeat=3)
    yield at_most("delta from nothing to that image, CPU", took, "s", target=0.2)
    yield at_most("memory of a partition in the image", _weight(data), "bytes", target=1024.0)

    led = _image(LED // 100, LED, leader=0)
    assert sum(1 for _, _, partition in led.partitions_on(0) if partition.leader == 0) == LED
    fenced, steps, _ = _fenced(led)
    entries = [entry for step in steps for entry in step]
    assert not any(partition.leader in (0, -1) for _, _, partition in fenced.partitions_on(0))
    assert _followed(led, entries) == fenced, "both ways lead to one state"
    took = _cpu_seconds(lambda: _fenced(led))
    yield at_most("fence a broker that leads 10,000 partitions, CPU of the active controller", took, "s", target=0.3)
    longest = min(_fenced(led)[2] for _ in range(5))
    yield at_most(f"the longest of its {len(steps)} steps", longest, "s", target=0.2)
    yield Result("the same on every other node", _cpu_seconds(lambda: _followed(led, entries)), "s")
    yield Result("delta of that fencing", _cpu_seconds(lambda: delta_between(led, fenced)), "s")

    wide = CreateTopics(topics=(NewTopic(name="wide", partitions=WIDE, replication_factor=3),))
    grown, entries = _decided(image, wide)
    assert len(grown.topics) == TOPICS + 1
    assert _followed(image, entries) == grown, "both ways lead to one state"
    took = _cpu_seconds(lambda: _decided(image, wide))
    yield Result("create a topic of 1,000 partitions among 100,000, CPU of the active controller", took, "s")
    yield Result("the same on every other node", _cpu_seconds(lambda: _followed(image, entries)), "s")
