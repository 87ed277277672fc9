"""Spark Connect. Executors in processes of their own are in `test_source_faults`."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from support.spark.availability import need

import tidelog

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = [pytest.mark.spark, pytest.mark.cluster, pytest.mark.timeout(600)]

PROGRAM = """
import sys

from pyspark.sql.connect.session import SparkSession

_, url, bootstrap, source, target, checkpoint = sys.argv
spark = SparkSession.builder.remote(url).getOrCreate()
servers = {"bootstrap.servers": bootstrap}
rows = spark.readStream.format("tidelog").options(**servers, subscribe=source, startingOffsets="earliest").load()
query = (
    rows.selectExpr("key", "upper(CAST(value AS STRING)) AS value")
    .writeStream.format("tidelog")
    .options(**servers, topic=target, checkpointLocation=checkpoint)
    .trigger(availableNow=True)
    .start()
)
query.awaitTermination()
found = spark.read.format("tidelog").options(**servers, subscribe=target).load()
print(sorted(bytes(row.value).decode() for row in found.select("value").collect()))
frame = spark.createDataFrame([("by hand",)], "value string")
frame.write.format("tidelog").options(**servers, topic=target).mode("append").save()
try:
    spark.read.format("tidelog").options(**servers, subscribe="nowhere").load().collect()
except Exception as error:
    print([line for line in str(error).splitlines() if "nowhere" in line])
spark.stop()
"""


def test_source_and_sink_through_spark_connect(
    spark: SparkSession, bootstrap: str, topic: Callable[..., str], producer: tidelog.Producer, tmp_path: Path
) -> None:
    need("grpc_status", "google.rpc", "zstandard", by=__name__)
    source, target = topic("connect-in", 2), topic("connect-out")
    producer.send_many(source, values=["a", "b", "c"], keys=["1", "2", "3"]).result(60)
    jvm = spark.sparkContext._jvm
    assert jvm is not None
    service = getattr(jvm.org.apache.spark.sql.connect.service, "SparkConnectService$")
    port = getattr(service, "MODULE$").localPort()
    run = subprocess.run(
        [sys.executable, "-c", PROGRAM, f"sc://localhost:{port}", bootstrap, source, target, str(tmp_path / "c")],
        env={**os.environ, "PYTHONWARNINGS": "ignore"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    rows, refused = run.stdout.splitlines()
    assert rows == "['A', 'B', 'C']"
    assert "subscribe: there is no topic 'nowhere'" in refused
    values = tidelog.read_arrow(target, columns=["value"], bootstrap=bootstrap)["value"].to_pylist()
    assert sorted(values) == [b"A", b"B", b"C", b"by hand"]
