"""Three controller processes with 100,000 partitions: takeover, fencing and topic creation as clients and brokers see
them.

1,000 topics of 100 partitions with 3 replicas on 30 brokers; broker 0 leads 10,000 of them. The processes, their disks,
gRPC and the kills are real; two brokers follow and send heartbeats, the others only answer identity requests. All of
them share the machine's cores with the measuring client.

- takeover: from kill -9 of the active controller to the first change that another one has committed
- fencing: from the death of broker 0 until another broker's image has new leaders for all its partitions
- a topic of 1,000 partitions: from the call to the response

Ratios are to the same in a cluster without partitions (takeover), or to the commit of one setting.
"""

from __future__ import annotations

import asyncio
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bench.harness import Result, at_most
from tidelog.metadata.config_changes import AlterConfigs, ConfigChange, ResourceChange
from tidelog.metadata.controller_node import INCARNATION
from tidelog.metadata.features import bootstrap_records, supported
from tidelog.metadata.image import ClusterImage
from tidelog.metadata.records import ChangeBroker, CreatePartition, CreateTopic, Record, RegisterBroker, SetConfig
from tidelog.metadata.snapshot import snapshot_bytes
from tidelog.metadata.topics import CreateTopics, NewTopic

if TYPE_CHECKING:
    from uuid import UUID

ROOT = Path(__file__).resolve().parent.parent
BROKERS, TOPICS, PER_TOPIC = 30, 1_000, 100
LED, WIDE = 10_000, 1_000
KILLS = 5
LIMIT_S = 120.0


def _import_processes() -> Any:
    # The nodes' program and the client are part of the tests, which are not a package.
    sys.path.insert(0, str(ROOT / "tests" / "cluster"))
    import metadata_processes

    return metadata_processes


def _records(brokers: list[Any]) -> Iterator[Record]:
    """Broker 0 leads the first 10,000 partitions, the others share the rest."""
    from uuid import UUID

    yield from bootstrap_records()
    # Most of the brokers send no heartbeats.
    yield SetConfig(resource_type="cluster", resource="", key="broker.session.timeout.ms", value="3600000")
    for broker in brokers:
        yield RegisterBroker(
            broker=broker.broker,
            broker_epoch=broker.broker,
            incarnation=broker.incarnation,
            endpoints=broker.endpoints,
            directories=(broker.directory,),
            features=supported(),
        )
        yield ChangeBroker(broker=broker.broker, broker_epoch=broker.broker, fenced=False)
    directories: dict[int, UUID] = {broker.broker: broker.directory for broker in brokers}
    for topic in range(TOPICS):
        topic_id = UUID(int=(topic + 1) << 64)
        yield CreateTopic(topic_id=topic_id, name=f"topic-{topic}")
        for number in range(PER_TOPIC):
            place = topic * PER_TOPIC + number
            ring = [1 + (place * 3 + step) % (BROKERS - 1) for step in range(3)]
            first = 0 if place < LED else ring[0]
            replicas = (first, *ring[1:])
            yield CreatePartition(
                topic_id=topic_id,
                partition=number,
                replicas=replicas,
                directories=tuple(directories[broker] for broker in replicas),
                isr=replicas,
                leader=first,
            )


def _setting(number: int) -> AlterConfigs:
    change = ConfigChange(key="log.retention.ms", operation="set", value=str(3_600_000 + number))
    return AlterConfigs(resources=(ResourceChange(resource_type="cluster", changes=(change,)),))


async def _takeovers(cluster: Any, topics: int) -> list[float]:
    """Kill the active controller repeatedly; it is back, with all data, before the next kill."""
    await cluster.change(_setting(0), timeout_s=LIMIT_S)
    times = []
    for number in range(1, KILLS + 1):
        victim = cluster.leader
        cluster.kill(victim)
        began = time.monotonic()
        _, committed = await cluster.change(_setting(number), timeout_s=LIMIT_S, without=victim)
        times.append(committed - began)
        offset = (await cluster.look(cluster.leader))["offset"]
        cluster.start(victim)

        async def is_back(node: int = victim, offset: int = offset) -> bool:
            found = await cluster.look(node)
            return bool(found["topics"] == topics and found["offset"] >= offset)

        await cluster.until(is_back, timeout_s=LIMIT_S)
    return times


async def _small(processes: Any, path: Path) -> list[float]:
    async with processes.MetadataCluster(path) as cluster:
        cluster.start()
        return await _takeovers(cluster, 0)


class _Figures:
    def __init__(self) -> None:
        self.small: list[float] = []
        self.large: list[float] = []
        self.load_stall_ms = 0.0
        self.commit_s = 0.0
        self.create_s = 0.0
        self.fence_s = 0.0
        self.fence_stall_ms = 0.0


async def _large(processes: Any, path: Path, figures: _Figures) -> None:
    from raft_cluster import NODES

    brokers = [processes.RunningBroker(number, path / f"broker{number}") for number in range(BROKERS)]
    for broker in brokers:
        await broker.transport.start()
    image = ClusterImage().apply_all(_records(brokers))
    async with processes.MetadataCluster(path, first=snapshot_bytes(image)) as cluster:
        cluster.brokers.update((broker.broker, broker) for broker in brokers)
        doomed, watching, *others = brokers
        for broker in others:
            broker.transport.serve(INCARNATION, _answer(broker.incarnation.bytes))
        cluster.start()
        await cluster.change(_setting(0), timeout_s=LIMIT_S)
        for broker in (doomed, watching):
            await broker.start(cluster.addresses)
        async with asyncio.timeout(LIMIT_S):
            await watching.tail.until(lambda image: len(image.topics) == TOPICS)
            await doomed.tail.until(lambda _: not doomed.agent.is_fenced)
        figures.large = await _takeovers(cluster, TOPICS)
        ready = [line for node in NODES for line in cluster.output(node).splitlines() if "ready, stalled" in line]
        figures.load_stall_ms = max(float(line.split()[-2]) for line in ready)
        await _decisions(cluster, doomed, watching, figures)


async def _decisions(cluster: Any, doomed: Any, watching: Any, figures: _Figures) -> None:
    from raft_cluster import NODES

    began = time.monotonic()
    for number in range(20):
        _, ended = await cluster.change(_setting(100 + number), timeout_s=LIMIT_S)
    figures.commit_s = (ended - began) / 20
    wide = CreateTopics(topics=(NewTopic(name="wide", partitions=WIDE, replication_factor=3),))
    began = time.monotonic()
    reply, ended = await cluster.change(wide, timeout_s=LIMIT_S, call_timeout_ms=30_000)
    assert reply.topics[0].error is None, reply.topics[0].message
    figures.create_s = ended - began
    before = watching.tail.image
    led = [(topic_id, number) for topic_id, number, p in before.partitions_on(0) if p.leader == 0]
    assert len(led) >= LED
    for node in NODES:
        await cluster.look(node)
    del cluster.brokers[0]
    began = time.monotonic()
    dying = asyncio.ensure_future(doomed.die())
    async with asyncio.timeout(LIMIT_S):
        await watching.tail.until(lambda image: bool(image.brokers[0].fenced))
    figures.fence_s = time.monotonic() - began
    await dying
    after = watching.tail.image
    assert all(after.topics[topic_id].partitions[number].leader > 0 for topic_id, number in led), "all have a leader"
    figures.fence_stall_ms = max([(await cluster.look(node))["stall_ms"] for node in NODES])


def _answer(data: bytes) -> Any:
    async def answer(_sender: int, _request: bytes) -> bytes:
        return data

    return answer


async def _measure(path: Path) -> _Figures:
    processes, figures = _import_processes(), _Figures()
    for name in ("small", "large"):
        (path / name).mkdir()
    figures.small = await _small(processes, path / "small")
    await _large(processes, path / "large", figures)
    return figures


def run() -> Iterator[Result]:
    (ROOT / "build").mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(dir=ROOT / "build", prefix="metadata-takeover-") as path:
        found = asyncio.run(_measure(Path(path)))
    small, large = sorted(found.small)[KILLS // 2], sorted(found.large)[KILLS // 2]
    yield Result("takeover after kill -9, no partitions: the middle one", small * 1000, "ms")
    yield Result(
        "takeover after kill -9, 100,000 partitions: the middle one",
        large * 1000,
        "ms",
        ratio=large / small,
        anchor="no partitions",
    )
    yield at_most("takeover after kill -9, 100,000 partitions: the slowest", max(found.large), "s", target=1.0)
    yield Result("a controller's event loop stands still while it loads those", found.load_stall_ms, "ms")
    yield Result("commit of one setting", found.commit_s * 1000, "ms")
    ratio = found.create_s / found.commit_s
    yield at_most("create a topic of 1,000 partitions, call to reply", found.create_s, "s", target=1.0)
    yield Result("the same for each partition", ratio / WIDE, "of a commit")
    yield at_most("a leader of 10,000 partitions dies: all have new leaders", found.fence_s, "s", target=2.0)
    yield Result("the same for each partition", found.fence_s / found.commit_s / LED, "of a commit")
    yield Result("a controller's event loop stands still meanwhile", found.fence_stall_ms, "ms")
