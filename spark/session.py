"""`tidelog.spark.session()`: a local Spark session that is ready for `format("tidelog")`.

    spark = tidelog.spark.session()
    spark.readStream.format("tidelog").options(**{"bootstrap.servers": "localhost:9292", "subscribe": "orders"}).load()

On a shared cluster use its own session; `tuned` has the settings.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

COMMON_CONF = {
    # Unix sockets between Spark and Python: over TCP each task waits 30 to 50 ms for acknowledgements.
    "spark.python.unix.domain.socket.enabled": "true",
    # transformWithState needs RocksDB; the default state store does not support it.
    "spark.sql.streaming.stateStore.providerClass": (
        "org.apache.spark.sql.execution.streaming.state.RocksDBStateStoreProvider"
    ),
}
LOCAL_CONF = {
    # Without libhadoop the default starts about twenty processes per micro-batch. The renames of this one are weaker if
    # two drivers share a checkpoint: use it with local file systems and one driver only.
    "spark.sql.streaming.checkpointFileManagerClass": (
        "org.apache.spark.sql.execution.streaming.checkpointing.FileSystemBasedCheckpointFileManager"
    ),
    "spark.ui.showConsoleProgress": "false",
}


class NoSparkError(ImportError):
    """PySpark is not installed. The message says how to install it."""


def tuned(master: str = "local[*]") -> dict[str, str]:
    """Return the settings that shorten a Python-to-Python micro-batch from about 250 to 80 ms."""
    if not master.startswith("local"):
        return dict(COMMON_CONF)
    # One task per core after a shuffle instead of 200: every task has a fixed cost.
    return COMMON_CONF | LOCAL_CONF | {"spark.sql.shuffle.partitions": str(max(2, os.cpu_count() or 2))}


def session(name: str = "tidelog", *, master: str = "local[*]", conf: Mapping[str, Any] | None = None) -> SparkSession:
    """Return the session of this process; create it if there is none. `conf` overrides the settings of `tuned`.

    Sets JAVA_HOME of this process to a suitable Java. NoSparkError or NoJavaError say what to install.
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
