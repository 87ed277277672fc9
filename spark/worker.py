"""What the processes that Spark starts for Python have in common: tasks on executors, and planners beside the driver.

Workers are reused: what one task leaves in a module is there for the next one.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass

BATCH_PROPERTY = "streaming.sql.batchId"
QUERY_PROPERTY = "sql.streaming.queryId"
"""Of a job of a streaming query. Spark does not promise these names: tests/spark reads them from a real one."""

KEPT_BYTES_MAX = 64 << 20
"""Freed memory that a worker keeps, so that megabytes of one answer are made of those of the one before."""
MAPPED_BYTES_MIN = 32 << 20
"""From this size on memory is the system's, given back when it is freed."""
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3

_settled = False


def settle() -> None:
    """Once in a worker, at its first task: Spark collects garbage after each task, and what was imported stays. And
    fetched megabytes come and go: of fresh pages each time they cost the IO thread twice as much."""
    global _settled
    if not _settled:
        _settled = True
        gc.freeze()
        mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
        if mallopt is not None:  # glibc
            mallopt(_M_MMAP_THRESHOLD, MAPPED_BYTES_MIN)
            mallopt(_M_TRIM_THRESHOLD, KEPT_BYTES_MAX)


@dataclass(frozen=True, slots=True)
class Attempt:
    """One attempt of one task. Of all attempts of a task Spark commits one; of a batch that is replayed all are new."""

    owner: str
    """The query's id, the same after a restart; empty outside of a streaming query."""
    batch_id: int
    """-1 outside of a streaming query."""
    task: int
    """The number of the part of the data, from 0 on. A replayed batch may be cut otherwise."""
    attempt: int
    """Unlike any other attempt of this Spark application."""


def attempt() -> Attempt:
    """That of the task that runs; all -1 outside of tasks."""
    from pyspark import TaskContext

    context = TaskContext.get()
    if context is None:
        return Attempt("", -1, -1, -1)
    batch = context.getLocalProperty(BATCH_PROPERTY)
    return Attempt(
        context.getLocalProperty(QUERY_PROPERTY) or "",
        -1 if batch is None else int(batch),
        context.partitionId(),
        context.taskAttemptId(),
    )


@contextlib.contextmanager
def plain_errors(*kinds: type[Exception]) -> Iterator[None]:
    """Errors of these kinds reach the user as their own line, without the trace of a planner.

    A planner ends after an error, so that hiding it there hides nothing else. Any other process is left as it is.
    """
    try:
        yield
    except kinds:
        main = getattr(sys.modules.get("__main__"), "__spec__", None)
        if main is not None and main.name.startswith("pyspark."):
            os.environ["SPARK_HIDE_TRACEBACK"] = "1"
        raise
