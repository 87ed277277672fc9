"""The programs of examples/spark/, each in the session and against the cluster of all tests of Spark."""

from __future__ import annotations

import importlib.util
import json
import sqlite3
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

import pytest
from support.spark.availability import need

import tidelog
from tidelog.cli import demo_spark

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = [pytest.mark.spark, pytest.mark.cluster, pytest.mark.timeout(600)]

EXAMPLES = Path(__file__).resolve().parents[2] / "examples" / "spark"
COVERED = {"sessions.py", "fraud.py", "change_log.py", "files_to_parquet.py", "late_counts.py", "logger.py"}


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
    need("pandas", by=__name__)  # transformWithState asks for it
    assert run("sessions", spark, bootstrap, tmp_path) == [
        "ada: 2 clicks from minute 70 to 75",
        "ada: 3 clicks from minute 1 to 20",
        "ben: 4 clicks from minute 10 to 85",
    ]


@pytest.mark.requirement("b:EX-34")
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


LINES = 60


@dataclass(frozen=True)
class Logged:
    """What examples/spark/logger.py has left."""

    example: ModuleType
    lines: list[str]
    home: Path
    wanted: dict[tuple[str, str], int]
    """How many lines of a program and a level were logged."""


@pytest.fixture(scope="module")
def logged(spark: SparkSession, bootstrap: str, tmp_path_factory: pytest.TempPathFactory) -> Logged:
    example, home = load("logger"), tmp_path_factory.mktemp("logger")
    lines = example.main(spark, bootstrap, str(home), LINES)
    levels = Counter("ERROR" if n % 10 == 9 else "WARNING" if n % 3 == 2 else "INFO" for n in range(LINES))
    wanted = {(program, level): count for program in example.TEAMS for level, count in levels.items()}
    return Logged(example, lines, home, wanted)


def records_of(bootstrap: str, topic: str) -> list[dict[str, Any]]:
    table = tidelog.read_arrow(topic, bootstrap=bootstrap)
    return sorted(table.to_pylist(), key=lambda row: (row["partition"], row["offset"]))


@pytest.mark.requirement("b:EX-29", "b:S-05")
def test_what_programs_log_is_in_files_and_in_sqlite(logged: Logged) -> None:
    """Logger, topic, stream job, two sinks; files and SQLite stand for HDFS and Cassandra."""
    teams = logged.example.TEAMS
    reported = {f"example-for-{teams[program]}: {n} {level}" for (program, level), n in logged.wanted.items()}
    assert set(logged.lines) == reported
    assert len(logged.lines) == len(reported)
    stored: Counter[tuple[str, str, str]] = Counter()
    for file in (logged.home / "lines").glob("batch=*/*.json"):
        for line in file.read_text(encoding="utf-8").splitlines():
            row = json.loads(line)
            stored[row["program"], row["level"], row["text"]] += 1
    assert set(stored.values()) == {1}, "each line once"
    assert Counter((program, level) for program, level, _ in stored) == logged.wanted
    with sqlite3.connect(logged.home / "counts.db") as connection:
        ((total,),) = connection.execute("SELECT sum(n) FROM counts").fetchall()
    assert total == 2 * LINES


@pytest.mark.requirement("b:S-01")
def test_a_stream_goes_from_several_topics_to_several_topics(logged: Logged, bootstrap: str) -> None:
    read = {topic: len(records_of(bootstrap, topic)) for topic in logged.example.PROGRAMS}
    assert read == {"example-log-shop": LINES, "example-log-bank": LINES}
    written = {f"example-for-{team}" for team in logged.example.TEAMS.values()}
    assert {topic: len(records_of(bootstrap, topic)) for topic in written} == dict.fromkeys(written, LINES)


@pytest.mark.requirement("b:S-03")
def test_a_stream_counts_sorts_for_others_and_joins_two_sources(logged: Logged, bootstrap: str) -> None:
    counts: Counter[str] = Counter()
    for record in records_of(bootstrap, logged.example.COUNTS):
        counts[record["key"].decode()] += int(record["value"])
    for program, team in logged.example.TEAMS.items():
        records = records_of(bootstrap, f"example-for-{team}")
        rows = [json.loads(record["value"]) for record in records]
        # For another application: only what is its own, each program in one partition, in order.
        assert len({record["partition"] for record in records}) == 1
        assert [(row["program"], row["text"]) for row in rows] == [(program, f"line {n}") for n in range(LINES)]
        # The team is known from the second source only.
        assert {row["team"] for row in rows} == {team}
        for level in ("INFO", "WARNING", "ERROR"):
            assert counts[f"example-for-{team} {level}"] == logged.wanted[program, level]


@pytest.mark.requirement("b:S-04")
def test_a_job_reads_operates_and_writes_back_for_the_next_one(logged: Logged, bootstrap: str) -> None:
    """The second job has read what the first one wrote, and its result is in the log again."""
    between = sum(len(records_of(bootstrap, f"example-for-{team}")) for team in logged.example.TEAMS.values())
    back = sum(int(record["value"]) for record in records_of(bootstrap, logged.example.COUNTS))
    assert between == back == 2 * LINES


def test_the_demo_gets_what_it_has_written(
    spark: SparkSession, bootstrap: str, admin: tidelog.Admin, tmp_path: Path
) -> None:
    for name in (demo_spark.ORDERS, demo_spark.TOTALS):
        admin.create_topic(name, partitions=2)
    wanted = demo_spark._write(bootstrap, 1_234)
    assert demo_spark._query(spark, bootstrap, tmp_path / "checkpoint") == 1_234
    assert demo_spark._read(bootstrap) == wanted
    assert sum(count for count, _ in wanted.values()) == 1_234
