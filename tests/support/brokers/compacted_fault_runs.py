"""Seeded runs of brokers with compacted topics under faults: tombstones live for half a second, brokers stay away for
longer.

workload    records of a few keys, every third a tombstone, written with acks=all to every broker that leads
checks      all along: what was once read at an offset is the only record ever read there. At the end, on every replica:
            what `compacted_history` says; replicas that both keep the record of an offset have the same; all name the
            same epoch for every offset
"""

from __future__ import annotations

from typing import Any

from support.brokers import data_requests
from support.brokers.cluster import RunningBroker
from support.brokers.compacted_history import CompactedHistory, Pair, pairs_of
from support.brokers.fault_runs import BROKERS, FaultRun, contents_of
from tidelog.log.batch import Record, encode
from tidelog.metadata.config_changes import AlterConfigs, ConfigChange, ResourceChange
from tidelog.model.ids import NodeId, PartitionId
from tidelog.services.fetch import FetchItem, FetchResult
from tidelog.services.produce import ProduceItem, ProduceResult

KEYS = 6
CONFIGS = {
    "cleanup.policy": "compact",
    "segment.bytes": "1000",
    "min.cleanable.dirty.ratio": "0.01",
    "delete.retention.ms": "500",
}
LAG_MAX_MS = 1_500


class CompactedFaultRun(FaultRun):
    """See the module's docstring."""

    def __init__(self, seed: int, *, steps: int = 80) -> None:
        super().__init__(seed, steps=steps)
        self.histories: dict[PartitionId, CompactedHistory] = {}
        self.read: dict[PartitionId, dict[int, Pair]] = {}
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
                self.acknowledged[partition], self.read[partition] = {}, {}
                self.histories[partition] = CompactedHistory()
            for _ in range(self.steps):
                self._step()
                cluster.world.run_for(self.draw.choice((0.02, 0.1, 0.5, 1.0, 3.0)))
                cluster.check()
            self._heal()
            for partition in self.histories:
                self._check_end(partition)
            cluster.check()
        return sum(len(history.acked) for history in self.histories.values())

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
                self.histories[partition].sends([(key, value)])
                items = [ProduceItem(partition, encode([Record(0, 1_000, key, value, ())]))]
                task: Any = found.node.spawn(data_requests.produce(found.service, items, acks=-1, timeout_ms=5000))
                task.add_done_callback(lambda done, pair=(key, value): self._was_answered(partition, pair, done))

    def _was_answered(self, partition: PartitionId, pair: Pair, task: Any) -> None:
        if task.cancelled() or task.exception() is not None:
            return
        result: ProduceResult = task.result()[0]
        if result.error is None:
            wrong = list(self.histories[partition].answered(int(result.base_offset), [pair]))
            assert not wrong, wrong[0]

    def _read(self, partition: PartitionId) -> None:
        for found in self._leaders(partition):
            items = [FetchItem(partition, 0, 1 << 20)]
            task: Any = found.node.spawn(
                data_requests.fetch(found.service, items, min_bytes=1, max_bytes=1 << 20, max_wait_ms=0), name="read"
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
        history = self.histories[partition]
        wrong = [*history.lost(pairs, history.latest), *history.returned(pairs, history.latest).values()]
        assert not wrong, f"broker {broker}, {wrong[0]}"
