"""The comparison of replicas with scripted ones."""

from __future__ import annotations

from tidelog.client.admin.replica_comparison import CHANGES_MAX, Comparison, Layout
from tidelog.client.admin.verification import UNVERIFIED, PartitionVerification
from tidelog.log.range_digests import DigestQuery, ReplicaDigest
from tidelog.model.errors import ReplicaNotAvailableError
from tidelog.world.simulated import SimNode, SimWorld


class FakeReplicas:
    """Two replicas without records. Broker 2 never follows, and leads when it was left out."""

    def __init__(self) -> None:
        self.attempts = 0

    async def layout(self) -> Layout:
        self.attempts += 1
        return Layout(1, 5, (1, 2)) if self.attempts <= CHANGES_MAX + 1 else Layout(2, 6, (1, 2))

    async def digest(self, broker: int, query: DigestQuery) -> ReplicaDigest:
        is_later = self.attempts > CHANGES_MAX + 1
        leader = 2 if is_later else 1
        if not is_later and broker == 1 and self.attempts > CHANGES_MAX:
            raise ReplicaNotAvailableError("broker 1 is fenced")  # so that another attempt follows
        return ReplicaDigest(
            broker=broker,
            leader=leader,
            leader_epoch=6 if is_later else 5,
            follows=broker == leader or is_later,
            start_offset=0,
            high_watermark=0,
            generation=0,
            has_gaps=False,
        )


def test_a_follower_that_was_left_out_is_compared_when_it_leads() -> None:
    replicas = FakeReplicas()

    async def compare(_node: SimNode) -> PartitionVerification:
        return await Comparison("orders", 0, replicas).run()

    with SimWorld(seed=1) as world:
        found = world.run(world.machine("admin").boot(), compare, timeout=60)
    assert replicas.attempts == CHANGES_MAX + 2
    assert found.state != UNVERIFIED, found
    assert found.unverified == {}
    assert set(found.verified) == {1, 2}
