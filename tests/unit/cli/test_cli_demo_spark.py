"""`tidelog demo spark` where there is no Spark: it says what to install, and fails only if it was asked to."""

from __future__ import annotations

import importlib.util

import pytest

from tidelog.cli import demo_spark
from tidelog.cli import main as cli
from tidelog.spark.java import NoJavaError


def _no_java() -> None:
    raise NoJavaError("Spark needs a Java: install one")


@pytest.fixture
def nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "pyspark" else found(name))
    monkeypatch.setattr(demo_spark, "java_home", _no_java)
    monkeypatch.delenv("REQUIRE_SPARK", raising=False)


@pytest.mark.usefixtures("nothing")
def test_what_is_missing_is_named_with_the_way_to_get_it(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["demo", "spark"]) == 0
    text = capsys.readouterr()
    assert text.out.splitlines() == [
        "Now Spark, over the same kind of cluster. This needs PySpark and a Java, 17 or 21.",
        "Not shown, for it lacks PySpark (make setup-spark, or: pip install 'tidelog[spark-local]') and a Java "
        "(Spark needs a Java: install one).",
    ]
    assert text.err == ""


@pytest.mark.usefixtures("nothing")
def test_it_is_a_failure_where_spark_is_required(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("REQUIRE_SPARK", "1")
    assert cli.main(["demo", "spark"]) == 1
    assert capsys.readouterr().err.startswith("tidelog: REQUIRE_SPARK is set, and there is not everything that Spark")


def test_too_few_orders_are_a_wrong_call(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["demo", "spark", "--records", "1"]) == 2
    assert capsys.readouterr().err == "tidelog: --records: at least 5\n"


def test_orders_are_spread_over_all_shops() -> None:
    found = [demo_spark.order(number) for number in range(100)]
    assert {shop for shop, _ in found} == set(demo_spark.SHOPS)
    assert all(10 <= amount < 100 for _, amount in found)
