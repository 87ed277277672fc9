"""The log as a source and a sink of Spark. It imports neither Spark nor Arrow before they are used.

session              a local Spark session: finds a Java, carries the settings that make micro-batches short
foreach_batch        a function for `foreachBatch`: the sink of queries in update mode
TidelogDataSource    for `spark.dataSource.register`; where the package is installed, Spark finds it by itself

Importing this sets PYSPARK_PYTHON to the interpreter that runs, if it is not set: Spark's workers would otherwise be
the `python3` of the PATH, which need not have this package.
"""

import os
import sys
from importlib import import_module
from typing import TYPE_CHECKING, Any

# At once, not on demand: a module of the same name would stand in the function's place otherwise.
from tidelog.spark.foreach_batch import foreach_batch as foreach_batch
from tidelog.spark.session import session as session

if TYPE_CHECKING:
    from tidelog.spark.data_source import TidelogDataSource as TidelogDataSource

if sys.executable:
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)


def __getattr__(name: str) -> Any:
    if name != "TidelogDataSource":
        raise AttributeError(f"module 'tidelog.spark' has no attribute '{name}'")
    found = import_module("tidelog.spark.data_source").TidelogDataSource
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), "TidelogDataSource"})
