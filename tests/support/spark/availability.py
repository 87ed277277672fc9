"""Whether Spark is there. Without it tests are skipped, each with this line; with REQUIRE_SPARK=1 they fail."""

from __future__ import annotations

import importlib.util
import os

import pytest


def missing() -> str:
    """What is not there, in one line; empty if all is."""
    if importlib.util.find_spec("pyspark") is None:
        return "pyspark is not installed: make setup-spark, or pip install 'tidelog[spark-local]'"
    from tidelog.spark.java import NoJavaError, java_home

    try:
        java_home()
    except NoJavaError as error:
        return str(error)
    return ""


def is_required() -> bool:
    """As `make` and `tidelog demo spark` read it: any value, unless it is empty."""
    return bool(os.environ.get("REQUIRE_SPARK"))


def need(*modules: str, by: str) -> None:
    """For tests that import parts of Spark, or what only some of its calls want; no Java is needed for these. `by` is
    the name of the tests, for pytest tells of this line otherwise."""
    for module in modules:
        if importlib.util.find_spec(module) is not None:
            continue
        reason = f"{by}: {module} is not installed: make setup-spark"
        if is_required():
            pytest.fail(f"REQUIRE_SPARK is set. {reason}", pytrace=False)
        pytest.skip(reason, allow_module_level=True)
