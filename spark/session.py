"""`tidelog.spark.session()`: a Spark session on this machine that is ready for `format("tidelog")`.

    spark = tidelog.spark.session()
    spark.readStream.format("tidelog").options(**{"bootstrap.servers": "localhost:9292", "subscribe": "orders"}).load()

On a cluster that others run, their session does as well; `tuned` has the settings.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

EVERYWHERE = {
    # Between Spark and Python: over TCP each task waits 30 to 50 ms for acknowledgements.
    "spark.python.unix.domain.socket.enabled": "true",
    # What transformWithState needs; the default one cannot do it.
    "spark.sql.streaming.stateStore.providerClass": (
        "org.apache.spark.sql.execution.streaming.state.RocksDBStateStoreProvider"
    ),
}
ON_THIS_MACHINE = {
    # The usual one starts some twenty processes for each micro-batch where there is no libhadoop. This one's renames
    # are weaker against two drivers with one checkpoint: for local file systems and one driver only.
    "spark.sql.streaming.checkpointFileManagerClass": (
        "org.apache.spark.sql.execution.streaming.checkpointing.FileSystemBasedCheckpointFileManager"
    ),
    "spark.ui.showConsoleProgress": "false",
}


class NoSparkError(ImportError):
    """PySpark is not installed; the message says how to install it."""


def tuned(master: str = "local[*]") -> dict[str, str]:
    """The settings that shorten a micro-batch with Python at both ends from about 250 to 80 ms."""
    if not master.startswith("local"):
        return dict(EVERYWHERE)
    # One task for each core, not 200, after a shuffle: every task has a fixed cost.
    return EVERYWHERE | ON_THIS_MACHINE | {"spark.sql.shuffle.partitions": str(max(2, os.cpu_count() or 2))}


def session(name: str = "tidelog", *, master: str = "local[*]", conf: Mapping[str, Any] | None = None) -> SparkSession:
    """The session of this process, made if there is none. `conf` wins over the settings of `tuned`.

    Sets JAVA_HOME to a Java that fits, for this process. NoSparkError or NoJavaError say what to install.
    """
    try:
        from pyspark.sql import SparkSession
    except ImportError:
        raise NoSparkError("this needs pyspark: pip install 'tidelog[spark-local]'") from None
    from tidelog.spark.java import java_home

    os.environ["JAVA_HOME"] = str(java_home())
    builder = SparkSession.builder.appName(name).master(master)
    for key, value in (tuned(master) | {key: _text(value) for key, value in (conf or {}).items()}).items():
        builder = builder.config(key, value)
    return builder.getOrCreate()


def _text(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
