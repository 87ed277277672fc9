"""Batches that are as large as a message between brokers, or larger: they hold up one subscription at most."""

import logging

import pytest
from support.brokers.cluster import NodeId, ReplicationCluster, batch
from test_replicas import BROKERS

from tidelog.metadata import configs
from tidelog.metadata.config_table import BATCH_BYTES_MOST, TABLES, Scope
from tidelog.model.maps import Map
from tidelog.replication import leader_stream
from tidelog.replication.leader_stream import PUSHED_BYTES_MAX
from tidelog.replication.messages import Push, Pushed
from tidelog.replication.wire import encode
from tidelog.world.transport import FRAME_BYTES_MAX


def test_the_largest_batch_that_a_topic_may_allow_fits_a_frame_with_its_table() -> None:
    assert TABLES[Scope.TOPIC]["max.message.bytes"].most == BATCH_BYTES_MOST <= PUSHED_BYTES_MAX
    frame = encode(Pushed([Push(1, 1, b"") for _ in range(leader_stream.PUSHES_MAX)]))
    assert len(frame) + PUSHED_BYTES_MAX <= FRAME_BYTES_MAX


def test_a_limit_from_before_the_bound_is_lowered_to_it() -> None:
    found = configs._log_config(Map({"max.message.bytes": str(200 << 20)}), Map())
    assert found.message_bytes_max == BATCH_BYTES_MOST


def test_a_batch_that_fits_no_frame_ends_its_subscription_and_nothing_else(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with ReplicationCluster(711, brokers=BROKERS) as cluster:
        large, small = cluster.topic("large", BROKERS), cluster.topic("small", BROKERS)
        cluster.write(large, b"0")
        with monkeypatch.context() as bounded, caplog.at_level(logging.ERROR):
            bounded.setattr(leader_stream, "PUSHED_BYTES_MAX", 50_000)
            assert cluster.produce(11, large, batch(bytes(60_000)), acks=1).error is None
            cluster.write_numbers(small, 5)
            cluster.world.run_for(3)
            cluster.check()
            assert cluster.log(12, large).end_offset == 1
            reported = [
                record.getMessage()
                for record in caplog.records
                if "a message between brokers holds at most" in record.message
            ]
            assert reported
            assert "offset 1 has 60" in reported[0]
        cluster.until(lambda: cluster.log(12, large).end_offset == 2, timeout=60)
        cluster.until_equal(small, *BROKERS)


def test_large_batches_of_several_partitions_go_in_messages_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []

    def noted(message: object) -> bytes:
        frame = encode(message)  # type: ignore[arg-type]
        sizes.append(len(frame))
        return frame

    monkeypatch.setattr(leader_stream, "PUSHED_BYTES_MAX", 100_000)
    monkeypatch.setattr(leader_stream, "encode", noted)
    with ReplicationCluster(712, brokers=BROKERS) as cluster:
        partitions = [cluster.topic(f"t{number}", BROKERS) for number in range(6)]
        cluster.kill(NodeId(13))
        for partition in partitions:
            cluster.until_in_sync(partition, 11, 12)
            cluster.write(partition, bytes(70_000))
        cluster.start_brokers(13)
        for partition in partitions:
            cluster.until_in_sync(partition, *BROKERS)
            cluster.until_equal(partition, *BROKERS)
        assert 70_000 < max(sizes) <= 100_000 + 1_000
