"""Where there is no Spark: the suite names what it did not run, and fails if Spark is required."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from support.spark.availability import need

TESTS = Path(__file__).resolve().parents[2]
HIDING = """
import importlib.util
found = importlib.util.find_spec
importlib.util.find_spec = lambda name, package=None: None if name.startswith("pyspark") else found(name, package)
"""
"""A plugin of pytest: PySpark is not there for any importer."""


def suite(tmp_path: Path, *paths: str, **environment: str) -> tuple[int, str]:
    """The exit code and the report of a run without PySpark."""
    (tmp_path / "hide_spark.py").write_text(HIDING)
    given = {name: value for name, value in os.environ.items() if name not in ("REQUIRE_SPARK", "PYTEST_ADDOPTS")}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "hide_spark", "-p", "no:cacheprovider", "--basetemp"]
    run = subprocess.run(
        [*command, str(tmp_path / "base"), *(str(TESTS / path) for path in paths)],
        cwd=TESTS.parent,
        env={**given, "PYTHONPATH": str(tmp_path), **environment},
        capture_output=True,
        text=True,
        check=False,
    )
    return run.returncode, run.stdout


@pytest.mark.timeout(180)
def test_what_was_not_run_is_named(tmp_path: Path) -> None:
    code, output = suite(tmp_path, "spark/test_source.py", "unit/spark/test_spark_data_source.py")
    assert "passed" not in output
    assert "failed" not in output
    lines = [line for line in output.splitlines() if line.startswith("SKIPPED")]
    assert any("tests/spark/test_source.py" in line and "make setup-spark" in line for line in lines), output
    assert any("test_spark_data_source: pyspark" in line and "make setup-spark" in line for line in lines), output
    assert code == 0, output


@pytest.mark.timeout(180)
def test_it_is_a_failure_where_spark_is_required(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    code, output = suite(tmp_path, "spark/test_spark_modes.py", REQUIRE_SPARK="1")
    assert code == 1
    assert "AssertionError: pyspark is not installed" in output
    assert "passed" not in output
    assert "skipped" not in output
    monkeypatch.setenv("REQUIRE_SPARK", "1")
    with pytest.raises(pytest.fail.Exception, match="these tests: no_such_module is not installed"):
        need("no_such_module", by="these tests")
