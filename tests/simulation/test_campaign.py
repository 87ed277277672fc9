"""A campaign of many seeds: what becomes of it when a worker process dies."""

import os
import signal
from multiprocessing.connection import Connection

import pytest

from simulation import campaign
from simulation.run_result import Result, draw_shape

pytestmark = pytest.mark.sim

DEADLY = (3, 4)


def work_and_die(connection: Connection, stack: str | None) -> None:
    """In the place of `campaign._work`: two of the seeds kill the process that runs them."""
    while True:
        try:
            seed = connection.recv()
        except EOFError:
            return
        if seed in DEADLY:
            os.kill(os.getpid(), signal.SIGKILL)
        connection.send(Result(seed, None, 1.0, 1, "", [], draw_shape(seed, stack)))


def test_a_worker_that_dies_fails_its_seed_and_the_others_are_run(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(campaign, "_work", work_and_die)
    totals = campaign.run_campaign(1, 8, minutes=None, stack="core", processes=2, quiet=True)
    assert totals.seeds == 8
    assert sorted(seed for seed, _ in totals.failures) == list(DEADLY)
    assert all("exit code -9" in failure for _, failure in totals.failures)
    assert "replay: make sim SEED=3 STACK=core" in capfd.readouterr().out
