"""One seeded run of brokers under faults, and what must hold at its end; a small forerunner of the simulator's runs.

faults      processes killed, power lost, streams cut, ways blocked, pauses, disks that stall, fail a sync, are slow
workload    records written with acks=all through the leader, each with a value of its own
checks      all along: an offset is acknowledged for one value only; what was once read at an offset is read there
            for ever; states are valid. At the end: all is healed, all replicas are in sync and hold the same bytes,
            and everything acknowledged stands at its offset, once
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from support.brokers import data_requests
from support.brokers.cluster import ReplicationCluster, RunningBroker, batch, values_of
from tidelog.metadata.partitions import ElectLeaders
from tidelog.model.ids import NodeId, PartitionId
from tidelog.services.fetch import FetchItem, FetchResult
from tidelog.services.produce import ProduceItem, ProduceResult
from tidelog.world.simulated import Loss
from tidelog.world.simulated.faults import Latency

BROKERS = (11, 12, 13)
PAUSES_S = (0.001, 0.005, 0.02, 0.02, 0.1, 0.5, 2.0)


class FaultRun:
    """See the module's docstring."""

    def __init__(self, seed: int, *, steps: int = 60) -> None:
        self.draw = random.Random(seed)
        self.steps = steps
        self.cluster = ReplicationCluster(seed)
        self.down: set[int] = set()
        self.acknowledged: dict[PartitionId, dict[int, bytes]] = {}
        self.seen: dict[PartitionId, dict[int, bytes]] = {}
        self.written = 0
        self.slow = frozenset(self.draw.sample(BROKERS, self.draw.randrange(4)))
        """Brokers whose disks take long to sync: what was not synced is lost with the power."""

    def run(self) -> int:
        """How many records were acknowledged."""
        cluster = self.cluster
        with cluster:
            cluster.network.silent_death_probability = self.draw.choice((0.0, 0.3))
            cluster.start()
            for broker in self.slow:
                cluster.world.machine(f"b{broker}").disk("logs-0").sync_latency = Latency(0.02, 0.3)
            cluster.start_brokers(*BROKERS)
            for number in range(2):
                least = self.draw.choice(("1", "2", "2"))
                configs = {"min.insync.replicas": least}
                partition = cluster.topic(f"t{number}", self.draw.sample(BROKERS, 3), configs=configs)
                self.acknowledged[partition], self.seen[partition] = {}, {}
            for _ in range(self.steps):
                self._step()
                cluster.world.run_for(self.draw.choice(PAUSES_S))
                cluster.check()
            self._heal()
            for partition in self.acknowledged:
                self._check_end(partition)
            cluster.check()
        return sum(map(len, self.acknowledged.values()))

    # What happens.

    def _step(self) -> None:
        kind = self.draw.random()
        if kind < 0.72:
            for _ in range(self.draw.randrange(1, 4)):
                self._write(self.draw.choice(list(self.acknowledged)))
            self._read(self.draw.choice(list(self.acknowledged)))
        elif kind < 0.83:
            self._take_down()
        elif kind < 0.92:
            if self.down:
                broker = self.draw.choice(sorted(self.down))
                self.down.discard(broker)
                self.cluster.start_brokers(broker, wait=False)
        elif kind < 0.98:
            one, other = (NodeId(broker) for broker in self.draw.sample(BROKERS, 2))
            (self.cluster.network.cut_streams if kind < 0.95 else self.cluster.network.block)(one, other)
        else:
            self._trouble()

    def _trouble(self) -> None:
        broker = self.draw.choice(BROKERS)
        machine = self.cluster.world.machine(f"b{broker}")
        match self.draw.randrange(4):
            case 0:
                machine.disk("logs-0").begin_stall()
            case 1:
                machine.disk("logs-0").fail("sync")
            case 2:
                if machine.node is not None and not machine.node.loop.is_held:
                    machine.pause()
            case _:
                self.cluster.network.heal()
                for other in BROKERS:
                    self.cluster.world.machine(f"b{other}").heal()

    def _take_down(self) -> None:
        up = [broker for broker in BROKERS if broker not in self.down]
        # Often all at once: then nobody is left who could make up for what was not on a device.
        together = self.draw.random() < 0.4
        for broker in up if together else up[:1] and [self.draw.choice(up)]:
            if self.draw.random() < (0.0 if together else 0.4):
                self.cluster.kill(NodeId(broker))
            else:
                self.cluster.lose_power(broker, self.draw.choice((Loss.ALL, *Loss)))
            self.down.add(broker)
            if self.draw.random() < 0.2:
                # Back before anybody has noticed.
                self.down.discard(broker)
                self.cluster.start_brokers(broker, wait=False)

    def _leaders(self, partition: PartitionId) -> Iterator[RunningBroker]:
        """Everybody who believes to lead."""
        for found in list(self.cluster.brokers.values()):
            if found.replicas.leader_of(partition) is not None and not found.node.loop.is_held:
                yield found

    def _write(self, partition: PartitionId) -> None:
        for found in self._leaders(partition):
            self.written += 1
            value = b"v%d" % self.written
            items = [ProduceItem(partition, batch(value))]
            task: Any = found.node.spawn(data_requests.produce(found.service, items, acks=-1, timeout_ms=5000))
            task.add_done_callback(lambda done, value=value: self._answered(partition, value, done))

    def _answered(self, partition: PartitionId, value: bytes, task: Any) -> None:
        if task.cancelled() or task.exception() is not None:
            return
        result: ProduceResult = task.result()[0]
        if result.error is None:
            known = self.acknowledged[partition].setdefault(result.base_offset, value)
            assert known == value, f"offset {result.base_offset} is acknowledged for {known!r} and {value!r}"

    def _read(self, partition: PartitionId) -> None:
        for found in self._leaders(partition):
            items = [FetchItem(partition, 0, 1 << 20)]
            task: Any = found.node.spawn(
                data_requests.fetch(found.service, items, min_bytes=1, max_bytes=1 << 20, max_wait_ms=0), name="read"
            )
            task.add_done_callback(lambda done: self._has_read(partition, done))

    def _has_read(self, partition: PartitionId, task: Any) -> None:
        if task.cancelled() or task.exception() is not None:
            return
        result: FetchResult = task.result()[0]
        if result.error is None:
            for offset, value in enumerate(values_of(result.data)):
                known = self.seen[partition].setdefault(offset, value)
                assert known == value, f"{known!r} and {value!r} were read at offset {offset}"

    # The end.

    def _heal(self) -> None:
        cluster = self.cluster
        cluster.network.heal()
        for broker in BROKERS:
            cluster.world.machine(f"b{broker}").heal()
            running = cluster.brokers.get(NodeId(broker))
            if running is not None and any(directory.failed for directory in running.logs.directories):
                cluster.kill(NodeId(broker))
                self.down.add(broker)
        for broker in sorted(self.down):
            cluster.start_brokers(broker, wait=False)
        cluster.until_live(*BROKERS, timeout=60)

    def _check_end(self, partition: PartitionId) -> None:
        cluster = self.cluster
        is_lost = self._was_lost(partition)
        cluster.until_in_sync(partition, *BROKERS, timeout=60)
        cluster.write(partition, b"end")
        cluster.until_equal(partition, *BROKERS, timeout=30)
        contents = {cluster.on_broker(broker, lambda found: contents_of(found, partition)) for broker in BROKERS}
        assert len(contents) == 1, "replicas differ"
        values = values_of(contents.pop())
        for kept in () if is_lost else (self.acknowledged[partition], self.seen[partition]):
            for offset, value in sorted(kept.items()):
                assert offset < len(values), f"{value!r} at offset {offset} is lost"
                assert values[offset] == value, f"{value!r} at offset {offset} is lost, {values[offset]!r} is there"
        assert len(set(values) - {b"end"}) == len([value for value in values if value != b"end"]), "stored twice"

    def _was_lost(self, partition: PartitionId) -> bool:
        """The disk of the last replica in sync has failed: nobody may lead until an admin takes what is left."""
        found = self.cluster.partition(partition)
        if found.leader >= 0 or found.isr or found.eligible:
            return False
        topic = self.cluster.image().topics[partition.topic_id].name
        (outcome,) = self.cluster.ask(ElectLeaders(kind="unclean", partitions=((topic, 0),))).items
        assert outcome.error is None, outcome.message
        return True


async def contents_of(found: RunningBroker, partition: PartitionId) -> bytes:
    """All bytes of a replica."""
    log = found.logs.get(partition)
    assert log is not None
    data, offset = b"", log.start_offset
    while offset < log.end_offset:
        piece = await log.read(offset, bytes_max=1 << 20)
        data, offset = data + bytes(piece.data), piece.next_offset
    return data


@contextmanager
def patched(*patches: tuple[Any, str, Any]) -> Iterator[None]:
    """These attributes are others for a while."""
    originals = [(owner, name, owner.__dict__[name]) for owner, name, _ in patches]
    try:
        for owner, name, replacement in patches:
            setattr(owner, name, replacement)
        yield
    finally:
        for owner, name, original in originals:
            setattr(owner, name, original)
