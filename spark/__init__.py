"""Reads and writes the log with Spark. Spark and Arrow are imported on first use.

session              returns a local Spark session: finds a Java and applies settings that shorten micro-batches
tuned                returns these settings, for a session of your own
foreach_batch        returns a function for `foreachBatch`: the sink for queries in update mode
TidelogDataSource    for `spark.dataSource.register`; an installed package needs no registration

The import sets PYSPARK_PYTHON to the running interpreter unless it is set: Spark would otherwise start its workers with
the `python3` of the PATH, which may lack this package.
"""

import os
import sys
from importlib import import_module
from typing import TYPE_CHECKING, Any

# Eager: importing the module of the same name later would replace the function.
from tidelog.spark.foreach_batch import foreach_batch as foreach_batch
from tidelog.spark.session import NoSparkError as NoSparkError
from tidelog.spark.session import session as session
from tidelog.spark.session import tuned as tuned

if TYPE_CHECKING:
    from tidelog.spark.data_source import TidelogDataSource as TidelogDataSource

if sys.executable:
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)


def __getattr__(name: str) -> Any:
    if name != "TidelogDataSource":
        raise AttributeError(f"module 'tidelog.spark' has no attribute '{name}'")
    data_source = import_module("tidelog.spark.data_source").TidelogDataSource
    globals()[name] = data_source
    return data_source


def __dir__() -> list[str]:
    return sorted({*globals(), "TidelogDataSource"})
