"""The topic configs that the unit tests go by are those of Kafka's own jars."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from kafka_tools import JARS, needs_tools

pytestmark = [pytest.mark.interop, pytest.mark.timeout(120), needs_tools]

HERE = Path(__file__).parent
COMMITTED = HERE.parent / "unit" / "metadata" / "kafka_topic_configs.tsv"


def test_list_of_topic_configs_is_that_of_the_jars() -> None:
    command = [
        "java",
        "-Dorg.slf4j.simpleLogger.defaultLogLevel=warn",
        "-cp",
        f"{JARS}/*",
        str(HERE / "TopicConfigs.java"),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=90, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout == COMMITTED.read_text(encoding="utf-8"), f"write it into {COMMITTED.name}:\n{done.stdout}"
