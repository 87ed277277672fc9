"""The programs of README and docs that need Spark, in the session and against the cluster of all tests of Spark."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = [pytest.mark.spark, pytest.mark.cluster, pytest.mark.timeout(600)]

ROOT = Path(__file__).resolve().parents[2]
BLOCK = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)
PROGRAMS = {
    path.name: [body for body in BLOCK.findall(path.read_text(encoding="utf-8")) if "import tidelog.spark" in body]
    for path in [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md"))]
}


def test_the_readme_shows_spark() -> None:
    assert len(PROGRAMS["README.md"]) == 1


@pytest.mark.parametrize("name", [name for name, programs in PROGRAMS.items() if programs])
def test_the_programs_of_a_document_run(
    spark: SparkSession, bootstrap: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """`tidelog.spark.session()` finds the session that is there; its Java does not follow us into a directory."""
    monkeypatch.chdir(tmp_path)
    known: dict[str, object] = {"__name__": "__main__"}
    for program in PROGRAMS[name]:
        text = program.replace("localhost:9292", bootstrap).replace('"checkpoints/', f'"{tmp_path}/checkpoints/')
        exec(compile(text, name, "exec"), known)
    assert known["spark"] is spark
