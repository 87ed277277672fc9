"""The programs of examples/spark/, each in the session and against the cluster of all tests of Spark."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

import pytest

import tidelog
from tidelog.cli import demo_spark

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = [pytest.mark.spark, pytest.mark.cluster, pytest.mark.timeout(600)]

EXAMPLES = Path(__file__).resolve().parents[2] / "examples" / "spark"
COVERED = {"sessions.py", "fraud.py", "change_log.py", "files_to_parquet.py", "late_counts.py"}


def load(name: str) -> ModuleType:
    """Not into `sys.modules`: what a worker could not import goes to it by value, as from a program of its own."""
    spec = importlib.util.spec_from_file_location(f"example_{name}", EXAMPLES / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def run(name: str, spark: SparkSession, bootstrap: str, directory: Path) -> list[str]:
    lines: list[str] = load(name).main(spark, bootstrap, str(directory))
    return lines


def test_every_example_is_run() -> None:
    assert {path.name for path in EXAMPLES.glob("*.py")} == COVERED


def test_a_change_log_becomes_a_table(spark: SparkSession, bootstrap: str, tmp_path: Path) -> None:
    assert run("change_log", spark, bootstrap, tmp_path) == ["ada lives in Rome", "cleo lives in Bern"]


def test_files_go_into_the_log_and_the_log_into_parquet(spark: SparkSession, bootstrap: str, tmp_path: Path) -> None:
    assert run("files_to_parquet", spark, bootstrap, tmp_path) == [
        "s0: 3 rows, 10.5 degrees",
        "s1: 3 rows, 11.5 degrees",
        "s2: 3 rows, 12.5 degrees",
        "s3: 3 rows, 13.5 degrees",
    ]


def test_what_is_late_counts_until_its_window_is_closed(spark: SparkSession, bootstrap: str, tmp_path: Path) -> None:
    assert run("late_counts", spark, bootstrap, tmp_path) == [
        "minutes 0 to 9: 3 views",
        "minutes 10 to 19: 3 views",
        "minutes 20 to 29: 7 views",
    ]


def test_clicks_become_sessions(spark: SparkSession, bootstrap: str, tmp_path: Path) -> None:
    pytest.importorskip("pandas", reason="transformWithState asks for pandas: make setup-spark")
    assert run("sessions", spark, bootstrap, tmp_path) == [
        "ada: 2 clicks from minute 70 to 75",
        "ada: 3 clicks from minute 1 to 20",
        "ben: 4 clicks from minute 10 to 85",
    ]


@pytest.mark.source("b:EX-34")
def test_every_payment_gets_one_decision(spark: SparkSession, bootstrap: str, tmp_path: Path) -> None:
    example = load("fraud")
    lines: list[str] = example.main(spark, bootstrap, str(tmp_path))
    wanted: dict[str, int] = {}
    for payment in example.payments(1_000):
        if payment["card"] in example.STOLEN:
            reason = "stolen card"
        elif payment["amount"] <= 0:
            reason = "no amount"
        elif payment["amount"] > example.AMOUNT_MAX:
            reason = "over the limit"
        elif payment["country"] != payment["home"] and payment["amount"] > example.AMOUNT_MAX / 4:
            reason = "far from home"
        else:
            reason = "approved"
        wanted[reason] = wanted.get(reason, 0) + 1
    assert len(wanted) == 5, "each rule is met"
    assert lines == [
        *(f"{reason}: {count}" for reason, count in sorted(wanted.items())),
        "without a decision: 0, with two: 0",
    ]


def test_the_demo_gets_what_it_has_written(
    spark: SparkSession, bootstrap: str, admin: tidelog.Admin, tmp_path: Path
) -> None:
    for name in (demo_spark.ORDERS, demo_spark.TOTALS):
        admin.create_topic(name, partitions=2)
    wanted = demo_spark._write(bootstrap, 1_234)
    assert demo_spark._query(spark, bootstrap, tmp_path / "checkpoint") == 1_234
    assert demo_spark._read(bootstrap) == wanted
    assert sum(count for count, _ in wanted.values()) == 1_234
