"""Tasks that fail and a driver that is killed: every row arrives, and only replayed batches come twice."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from counting_driver import BATCH, count
from support.clusters.waiting import until
from support.spark.streams import run_to_end

import tidelog

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = [pytest.mark.spark, pytest.mark.cluster, pytest.mark.timeout(600)]

DRIVER = Path(__file__).parent / "counting_driver.py"
RUN_S = 240.0
ROWS = 5 * BATCH

Line = tuple[int, list[tuple[int, int, str]]]


class Driver:
    def __init__(self, *arguments: object, log: Path) -> None:
        self._log = log
        with log.open("ab") as file:
            self._process = subprocess.Popen(
                [sys.executable, DRIVER, *map(str, arguments)],
                stdout=file,
                stderr=file,
                start_new_session=True,  # so that Java dies with it
            )

    def check(self) -> bool:
        """Spark gives its processes ten seconds to start; on a busy machine a driver may end for that."""
        if self._process.poll() is not None:
            raise AssertionError(f"the driver has ended: {self._log.read_text(errors='replace')[-3000:]}")
        return True

    def kill(self) -> None:
        if self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()


def lines(out: Path) -> list[Line]:
    if not out.exists():
        return []
    whole = [line for line in out.read_text(encoding="utf-8").splitlines(keepends=True) if line.endswith("\n")]
    return [(number, [tuple(row) for row in rows]) for number, rows in map(json.loads, whole)]


def test_a_driver_killed_while_tasks_fail_is_followed_by_another_that_goes_on(
    spark: SparkSession, bootstrap: str, topic: Callable[..., str], producer: tidelog.Producer, tmp_path: Path
) -> None:
    """With executors in processes of their own first, in threads of the driver then: the checkpoint is the same."""
    name = topic("faulty", partitions=3)
    for part in range(ROWS // 100):
        values = [str(number) for number in range(100 * part, 100 * part + 100)]
        producer.send_many(name, values=values, partition=part % 3).result(60)
    out = tmp_path / "out"
    arguments = (bootstrap, name, str(tmp_path / "checkpoint"), out)
    driver = Driver(*arguments, log=tmp_path / "log")
    try:
        until(lambda: driver.check() and lines(out), "a batch", timeout_s=RUN_S)
    finally:
        driver.kill()
    assert len(lines(out)) < ROWS // BATCH, "there is something left to do"
    run_to_end(lambda: count(spark, *arguments, now=True))
    found = lines(out)
    batches = dict(found)
    assert all(sorted(rows) == sorted(batches[number]) for number, rows in found), "a replayed batch is the same"
    assert len(found) - len(batches) <= 1, "one for the kill at most"
    assert sorted(batches) == list(range(len(batches)))
    rows = [row for _, one in sorted(batches.items()) for row in one]
    assert sorted(int(value) for *_, value in rows) == list(range(ROWS))
    for number in range(3):
        offsets = [offset for partition, offset, _ in rows if partition == number]
        assert offsets == list(range(len(offsets))), "in order, by partition"
