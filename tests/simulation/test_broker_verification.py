"""The operator who compares replicas: proves that they agree, and notices a bit that flipped without a known cause."""

from random import Random

import pytest

from simulation.broker_sim import run_broker_seed
from simulation.broker_verification import ReplicaVerifier
from tidelog.replication.scrubbing import Scrubbing

SEED = 8_001
pytestmark = [pytest.mark.sim, pytest.mark.timeout(120)]


def test_replicas_are_compared_while_faults_strike_and_agree_in_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("simulation.broker_verification.SHARE", 1.0)
    result = run_broker_seed(SEED)
    assert result.failure is None
    assert result.counts["replicas_verified"] >= 2, "at least those of the end"


def test_a_difference_without_known_rot_fails_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("simulation.broker_verification.SHARE", 1.0)

    async def idle(_: Scrubbing) -> None:
        """The scrub would repair it."""

    def flip_and_check(verifier: ReplicaVerifier) -> None:
        simulation, draw = verifier.simulation, Random(1)
        flipped = [
            simulation.stack.flip_in_log(station, partition_id, draw)
            for _, partition_id in verifier._partitions()
            for station in simulation.brokers[:1]
        ]
        assert any(flipped), "no bit was flipped"
        original(verifier)

    original = ReplicaVerifier.check_all
    monkeypatch.setattr(Scrubbing, "run", idle)
    monkeypatch.setattr(ReplicaVerifier, "check_all", flip_and_check)
    failure = run_broker_seed(SEED).failure
    assert failure is not None
    assert "no bit of the suspects has changed" in str(failure)


def test_four_runs_in_ten_have_such_an_operator() -> None:
    verifiers = [ReplicaVerifier(None, Random(seed), lambda *_: None) for seed in range(200)]  # type: ignore[arg-type]
    assert 60 <= sum(verifier.is_on for verifier in verifiers) <= 100
