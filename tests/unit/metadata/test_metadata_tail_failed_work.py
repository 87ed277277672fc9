"""A broker's copy of the metadata when the helper process that encodes its snapshot dies."""

import pytest
from support.metadata.quorum import Quorum

from tidelog.model.ids import Epoch, NodeId

pytestmark = pytest.mark.sim
B = NodeId(11)


def snapshots(quorum: Quorum) -> list[str]:
    files = dict(quorum.world.machine(f"b{B}").disk().files())
    return [path for path in files if path.endswith(".snapshot")]


def test_a_snapshot_that_cannot_be_taken_ends_nothing_and_is_taken_later(caplog: pytest.LogCaptureFixture) -> None:
    with Quorum(3) as quorum:
        quorum.start()
        quorum.start_brokers(11, 12, 13)
        broker = quorum.brokers[B]
        broker.tail._snapshot_bytes = 2_000
        broker.node.work.dying.add("snapshot_bytes")

        def failures() -> int:
            return sum("metadata snapshot not taken" in row.getMessage() for row in caplog.records)

        for number in range(8):
            quorum.create(f"t{number}", partitions=4)
            quorum.world.run_for(0.5)
        assert failures() >= 2, "tried again when more had come"
        assert snapshots(quorum) == []
        broker.node.work.dying.clear()
        for number in range(8, 16):
            quorum.create(f"t{number}", partitions=4)
        quorum.world.run_until(lambda: bool(snapshots(quorum)), timeout=20)
        image = quorum.controller(quorum.active()).image
        quorum.world.run_until(lambda: broker.tail.image == image, timeout=20)


def test_a_tail_that_cannot_follow_says_why() -> None:
    with Quorum(3) as quorum:
        quorum.start()
        quorum.start_brokers(11, 12, 13)
        tail = quorum.brokers[B].tail
        before = tail.unhealthy_reason
        tail._observer.epoch = Epoch(tail.epoch + 70)  # as if it had followed another group until now
        source = tail._observer.source
        assert source is not None
        quorum.kill(source)  # the next source compares
        quorum.world.run_until(lambda: tail.unhealthy_reason is not None, timeout=30)
        assert before is None
        assert tail.unhealthy_reason is not None
        assert "is of another group" in tail.unhealthy_reason
