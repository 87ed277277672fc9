"""A bit that flips anywhere in the files of a sealed segment is found by the scrub and repaired, byte for byte."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.brokers.cluster import ReplicationCluster, RunningBroker, batch
from support.brokers.verification import verify

from tidelog.client.admin.verification import AGREE
from tidelog.log.batch import ControlKind, encode_control
from tidelog.log.segment import INDEX, LOG, SUFFIXES, TIME_INDEX
from tidelog.model.ids import NodeId
from tidelog.replication.partition_transactions import ProducerTransaction
from tidelog.replication.replica import ReplicaConfig
from tidelog.replication.scrubbing import Scrubbing

BROKERS = (11, 12, 13)
CONFIG = ReplicaConfig(cleaner_backoff_ms=1_000, scrub_delay_ms=3_600_000)
TRANSACTIONS = 12
CONFIGS = {"segment.bytes": "700", "index.interval.bytes": "120", "retention.ms": "-1"}
FIELDS = (0, 7, 9, 12, 15, 16, 18, 22, 25, 30, 45, 52, 55, 58, 62, 70)
"""Bytes of the first batch, of each field of its header and of its records."""


class Rotting:
    """A replicated log with sealed segments of several batches, aborted transactions and all index files."""

    def __init__(self, cluster: ReplicationCluster, replicas: tuple[int, ...] = BROKERS, **configs: str) -> None:
        self.cluster = cluster
        cluster.start()
        cluster.start_brokers(*replicas)
        min_isr = {"min.insync.replicas": str(min(2, len(replicas)))}
        self.orders = cluster.topic("orders", replicas, configs={**CONFIGS, **min_isr, **configs})
        for number in range(TRANSACTIONS):
            self._abort(number)
            cluster.write(self.orders, b"%d" % number, b"more")
        cluster.until_equal(self.orders, *replicas)
        self.until_whole()
        self.values = cluster.values(self.orders)
        self.sound = {broker: self.files(broker) for broker in replicas}
        self.size = cluster.log(replicas[0], self.orders).size

    def _abort(self, number: int) -> None:
        data = batch(b"aborted", producer_id=9, producer_epoch=0, base_sequence=number, is_transactional=True)
        marker = encode_control(
            ControlKind.ABORT, coordinator_epoch=1, timestamp=1_000, producer_id=9, producer_epoch=0
        )

        async def append(found: RunningBroker) -> None:
            leader = found.replicas.leader_of(self.orders)
            assert leader is not None
            transaction = ProducerTransaction("t", version=1)
            leader.transactions.answered(leader.transactions.ask(transaction, 9, 0), number)
            leader.append(data, transaction=transaction)
            leader.append(marker, is_coordinator=True)

        self.cluster.on_broker(self.cluster.leader(self.orders), append)

    def until_whole(self) -> None:
        self.cluster.until_whole(self.orders)
        self.cluster.world.run_for(2)  # infos of sealed segments, and the indexes, are stored

    def scrub(self, broker: int) -> Scrubbing:
        return self.cluster.brokers[NodeId(broker)].replicas.background_tasks.scrubbing

    def files(self, broker: int) -> dict[str, bytes]:
        """The files of all sealed segments."""
        log = self.cluster.log(broker, self.orders)
        bases = {info.base_offset for info in log.segments.sealed}
        paths = [log.segments.file_path(base, suffix) for base in sorted(bases) for suffix in SUFFIXES]
        found = {}
        for path in paths:
            if log.disk.exists(path):
                file = log.disk.open(path)
                found[path.rpartition("/")[2]] = file.read(0, file.size)
                file.close()
        return found

    def flip(self, broker: int, name: str, at: int, bit: int) -> None:
        path = f"{self.cluster.log(broker, self.orders).path}/{name}"
        self.cluster.world.machine(f"b{broker}").disk("logs-0").flip_bit(path, at, bit)

    def check(self, *brokers: int) -> None:
        for broker in brokers:
            self.scrub(broker).check_soon(self.orders)
        self.cluster.world.run_for(3)

    def is_as_it_was(self, *brokers: int) -> bool:
        return all(self.files(broker) == self.sound[broker] for broker in brokers or self.sound)


@pytest.fixture(scope="module")
def rotting() -> Iterator[Rotting]:
    """One cluster for all examples: each leaves it as it was."""
    with ReplicationCluster(601, replica_config=CONFIG) as cluster:
        yield Rotting(cluster)


def flips() -> st.SearchStrategy[tuple[int, int, int, int]]:
    """(broker, file, place in it in thousandths, bit)."""
    return st.tuples(st.integers(0, 2), st.integers(0, 1_000), st.integers(0, 999), st.integers(0, 7))


@settings(max_examples=max(10, settings.default.max_examples // 3))  # type: ignore[union-attr]
@given(flips())
def test_any_flipped_bit_of_a_sealed_segment_is_repaired_byte_for_byte(
    rotting: Rotting, flip: tuple[int, int, int, int]
) -> None:
    broker = BROKERS[flip[0]]
    names = sorted(name for name, data in rotting.sound[broker].items() if data)
    name = names[flip[1] % len(names)]
    was_leader = rotting.cluster.leader(rotting.orders) == broker
    rotting.flip(broker, name, flip[2] * len(rotting.sound[broker][name]) // 1_000, flip[3])
    assert not rotting.is_as_it_was(broker)
    rotting.check(broker)
    rotting.until_whole()
    assert rotting.is_as_it_was(*BROKERS), f"{name} of broker {broker}"
    assert rotting.cluster.values(rotting.orders) == rotting.values
    if was_leader and name.endswith(LOG):
        assert rotting.cluster.leader(rotting.orders) != broker, "a sound replica serves while it is repaired"
    assert not rotting.cluster.brokers[NodeId(broker)].logs.kept.copies, "nothing was cut"


def test_every_field_of_a_batch_and_every_index_is_repaired_on_every_replica(rotting: Rotting) -> None:
    for broker in BROKERS[:2]:
        names = list(rotting.sound[broker])
        logs = [name for name in names if name.endswith(LOG)]
        for first in range(0, len(FIELDS), len(logs)):
            for name, at in zip(logs, FIELDS[first:], strict=False):
                rotting.flip(broker, name, at, at % 8)
            rotting.check(broker)
            rotting.cluster.until(rotting.is_as_it_was, timeout=60)
            rotting.until_whole()
        for suffix in SUFFIXES:
            name = next(name for name in names if name.endswith(suffix) and rotting.sound[broker][name])
            for at in range(len(rotting.sound[broker][name]) if suffix != LOG else 1):
                rotting.flip(broker, name, at, at % 8)
            rotting.check(broker)
            rotting.until_whole()
            assert rotting.is_as_it_was(broker), name


def verified(rotting: Rotting, through: int) -> str:
    found = rotting.cluster.brokers[NodeId(through)].broker
    return rotting.cluster.on_broker(through, lambda _: verify(found, rotting.orders), timeout=120).state


@pytest.mark.parametrize(
    ("replicas", "is_same_segment"),
    [((11, 12), True), (BROKERS, False)],
    ids=["two replicas, one segment", "three replicas, three segments"],
)
def test_replicas_that_are_damaged_at_different_places_are_repaired_from_each_other(
    replicas: tuple[int, ...], is_same_segment: bool
) -> None:
    with ReplicationCluster(602, replica_config=CONFIG) as cluster:
        rotting = Rotting(cluster, replicas)
        names = [name for name in rotting.sound[11] if name.endswith(LOG)]
        for number, broker in enumerate(replicas):
            rotting.flip(broker, names[1 if is_same_segment else 1 + number], 20 + 61 * number, 3)
        rotting.check(*replicas)
        cluster.world.run_for(20)
        rotting.check(*replicas)
        rotting.until_whole()
        assert rotting.is_as_it_was()
        assert cluster.values(rotting.orders) == rotting.values
        assert verified(rotting, 11) == AGREE


@pytest.mark.parametrize("replicas", [(11,), BROKERS], ids=["one replica", "three replicas"])
def test_where_all_are_damaged_at_one_place_nothing_is_deleted_and_the_operator_is_notified(
    replicas: tuple[int, ...], caplog: pytest.LogCaptureFixture
) -> None:
    with ReplicationCluster(603, replica_config=CONFIG) as cluster:
        rotting = Rotting(cluster, replicas)
        name = [name for name in rotting.sound[11] if name.endswith(LOG)][2]
        for broker in replicas:
            rotting.flip(broker, name, 70, 1)
        damaged = {broker: rotting.files(broker) for broker in replicas}
        rotting.check(*replicas)
        cluster.world.run_for(20)
        assert {broker: rotting.files(broker) for broker in replicas} == damaged
        assert all(rotting.scrub(broker).unrepairable == 1 for broker in replicas)
        assert all(cluster.log(broker, rotting.orders).damaged is None for broker in replicas)
        assert cluster.write(rotting.orders, b"goes on").error is None
        said = [row.getMessage() for row in caplog.records if "Nothing is removed" in row.getMessage()]
        assert any(f"segment={int(name[:20])} is corrupt" in text for text in said), said


def test_index_files_that_are_gone_are_rebuilt(rotting: Rotting) -> None:
    for suffix in (INDEX, TIME_INDEX):
        name = next(name for name in rotting.sound[12] if name.endswith(suffix))
        log = rotting.cluster.log(12, rotting.orders)
        log.context.files.discard(f"{log.path}/{name}")
        log.disk.remove(f"{log.path}/{name}")
        rotting.check(12)
        assert rotting.is_as_it_was(12)
