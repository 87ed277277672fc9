"""Seeded runs of brokers with compacted topics under faults: tombstones live for half a second, brokers stay away for
longer.

workload    records of a few keys, every third a tombstone, written with acks=all to every broker that leads
checks      all along: what was once read at an offset is the only record ever read there. At the end, on every replica:
            for each key, the latest record is the latest that was acknowledged or a later one that was not answered; a
            key whose acknowledged tombstone is its latest record is not there, or only as that tombstone; replicas that
            both keep the record of an offset have the same; all name the same epoch for every offset
"""

from __future__ import annotations

from typing import Any

from replication_cluster import RunningBroker
from replication_faults import BROKERS, FaultRun, contents_of

from tidelog.log.batch import Record, decode, encode, read_header
from tidelog.metadata.settings import AlterConfigs, ConfigChange, ResourceChange
from tidelog.model.ids import NodeId, PartitionId
from tidelog.replication.service import FetchItem, FetchResult, ProduceItem, ProduceResult

KEYS = 6
CONFIGS = {
    "cleanup.policy": "compact",
    "segment.bytes": "1000",
    "min.cleanable.dirty.ratio": "0.01",
    "delete.retention.ms": "500",
}
LAG_MAX_MS = 1_500
Pair = tuple[bytes, bytes | None]


def pairs_of(data: bytes | memoryview) -> dict[int, Pair]:
    """By offset: key and value."""
    found: dict[int, Pair] = {}
    position, data = 0, bytes(data)
    while position < len(data):
        header = read_header(data, position)
        for record in decode(data[position : position + header.size], decompressed_bytes_max=1 << 24):
            assert record.key is not None
            found[int(record.offset)] = (record.key, record.value)
        position += header.size
    return found


class CompactedFaultRun(FaultRun):
    """See the module's docstring."""

    def __init__(self, seed: int, *, steps: int = 80) -> None:
        super().__init__(seed, steps=steps)
        self.stored: dict[PartitionId, dict[int, Pair]] = {}
        """By offset: acknowledged."""
        self.read: dict[PartitionId, dict[int, Pair]] = {}
        self.sent: set[Pair] = set()
        self.unanswered: dict[int, tuple[PartitionId, bytes]] = {}
        """Deletes of which it is not known whether they are stored, by number of the write."""
        self.tombstones_gone = 0
        """Replicas that have removed a delete by the end of the run."""

    def run(self) -> int:
        cluster = self.cluster
        with cluster:
            cluster.start()
            cluster.start_brokers(*BROKERS)
            change = ConfigChange(key="replica.lag.time.max.ms", operation="set", value=str(LAG_MAX_MS))
            cluster.ask(
                AlterConfigs(resources=(ResourceChange(resource_type="cluster", resource="", changes=(change,)),))
            )
            for number in range(2):
                configs = {**CONFIGS, "min.insync.replicas": self.draw.choice(("1", "2"))}
                partition = cluster.topic(f"t{number}", self.draw.sample(BROKERS, 3), configs=configs)
                self.acknowledged[partition], self.stored[partition], self.read[partition] = {}, {}, {}
            for _ in range(self.steps):
                self._step()
                cluster.world.run_for(self.draw.choice((0.02, 0.1, 0.5, 1.0, 3.0)))
                cluster.check()
            self._heal()
            for partition in self.stored:
                self._check_end(partition)
            cluster.check()
        return sum(map(len, self.stored.values()))

    def _take_down(self) -> None:
        """One at a time, as a rule: the others go on, delete and clean."""
        if self.draw.random() < 0.2:
            super()._take_down()
        elif not self.down:
            broker = self.draw.choice(BROKERS)
            self.cluster.kill(NodeId(broker))
            self.down.add(broker)

    def _write(self, partition: PartitionId) -> None:
        for _ in range(5):
            for found in self._leaders(partition):
                self.written += 1
                key = b"k%d" % self.draw.randrange(KEYS)
                value = None if self.draw.random() < 0.35 else b"v%d" % self.written + b"." * 60
                self.sent.add((key, value))
                if value is None:
                    self.unanswered[self.written] = (partition, key)
                items = [ProduceItem(partition, encode([Record(0, 1_000, key, value, ())]))]
                task: Any = found.node.spawn(found.service.produce(items, acks=-1, timeout_ms=5000))
                task.add_done_callback(
                    lambda done, pair=(key, value), number=self.written: self._was_answered(
                        partition, pair, number, done
                    )
                )

    def _was_answered(self, partition: PartitionId, pair: Pair, number: int, task: Any) -> None:
        if task.cancelled() or task.exception() is not None:
            return
        result: ProduceResult = task.result()[0]
        if result.error is None:
            self.unanswered.pop(number, None)
            known = self.stored[partition].setdefault(int(result.base_offset), pair)
            assert known == pair, f"offset {result.base_offset} is acknowledged for {known!r} and {pair!r}"

    def _read(self, partition: PartitionId) -> None:
        for found in self._leaders(partition):
            items = [FetchItem(partition, 0, 1 << 20)]
            task: Any = found.node.spawn(
                found.service.fetch(items, min_bytes=1, max_bytes=1 << 20, max_wait_ms=0), name="read"
            )
            task.add_done_callback(lambda done: self._was_read(partition, done))

    def _was_read(self, partition: PartitionId, task: Any) -> None:
        if task.cancelled() or task.exception() is not None:
            return
        result: FetchResult = task.result()[0]
        if result.error is None:
            self._same(partition, pairs_of(result.data))

    def _same(self, partition: PartitionId, pairs: dict[int, Pair]) -> None:
        for offset, pair in pairs.items():
            known = self.read[partition].setdefault(offset, pair)
            assert known == pair, f"{known!r} and {pair!r} were read at offset {offset}"

    def _check_end(self, partition: PartitionId) -> None:
        cluster = self.cluster
        if self._was_lost(partition):
            return
        cluster.until_in_sync(partition, *BROKERS, timeout=60)
        cluster.until_equal(partition, *BROKERS, timeout=30)
        ends, epochs = set(), set()
        for broker in BROKERS:

            async def pairs(found: RunningBroker) -> dict[int, Pair]:
                return pairs_of(await contents_of(found, partition))

            log = cluster.log(broker, partition)
            self.tombstones_gone += log.lineage.deletes_end > 0
            ends.add(log.end_offset)
            epochs.add(tuple(log.epochs.epoch_for(offset) for offset in range(log.end_offset)))
            self._check_replica(partition, broker, cluster.on_broker(broker, pairs))
        assert len(ends) == 1, f"replicas end at {ends}"
        assert len(epochs) == 1, "replicas name other epochs"

    def _check_replica(self, partition: PartitionId, broker: int, pairs: dict[int, Pair]) -> None:
        self._same(partition, pairs)
        for key in {key for key, _ in self.sent}:
            acked = max((offset for offset, pair in self.stored[partition].items() if pair[0] == key), default=-1)
            latest = max((offset for offset, pair in pairs.items() if pair[0] == key), default=None)
            where = f"broker {broker}, key {key!r}: the latest acknowledged is at {acked}"
            if latest is None:
                may_be_deleted = (partition, key) in self.unanswered.values()
                is_deleted = acked < 0 or self.stored[partition][acked][1] is None
                assert is_deleted or may_be_deleted, f"{where}, and there is none"
            else:
                assert latest >= acked, f"{where}, the record at {latest} is back: {pairs[latest]!r}"
                assert pairs[latest] in self.sent, f"{where}, at {latest} is {pairs[latest]!r}, which nobody sent"
