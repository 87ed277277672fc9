"""Shared by the Python processes that Spark starts: tasks on executors, and planners beside the driver.

Spark reuses workers: module state of one task is visible to the next.
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
"""Local properties of a streaming query's job. Spark does not guarantee these names: tests/spark reads them from a real
one.
"""

KEPT_BYTES_MAX = 64 << 20
"""Freed bytes that a worker keeps, so that one response reuses the memory of the previous one."""
MAPPED_BYTES_MIN = 32 << 20
"""Allocations from this size are mapped, and returned to the system when freed."""
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3

_is_prepared = False


def prepare_worker() -> None:
    """Tune the worker at its first task. Spark collects garbage after each task: freezing exempts imported modules.
    Keeping freed memory matters because fresh pages for each fetch response double the cost on the IO thread."""
    global _is_prepared
    if not _is_prepared:
        _is_prepared = True
        gc.freeze()
        mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
        if mallopt is not None:  # glibc
            mallopt(_M_MMAP_THRESHOLD, MAPPED_BYTES_MIN)
            mallopt(_M_TRIM_THRESHOLD, KEPT_BYTES_MAX)


@dataclass(frozen=True, slots=True)
class Attempt:
    """One attempt of a task. Spark commits one attempt per task; a replayed batch has new attempts."""

    owner: str
    """The query's id, stable across restarts; empty outside a streaming query."""
    batch_id: int
    """-1 outside a streaming query."""
    task: int
    """The task's partition number, from 0. A replayed batch may be partitioned differently."""
    attempt: int
    """Unique within this Spark application."""


def attempt() -> Attempt:
    """Return the running task's attempt; all numbers are -1 outside tasks."""
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
    """Let errors of these kinds reach the user as one line, without a planner's traceback.

    A planner exits after an error, so this hides nothing else. Other processes are not affected.
    """
    try:
        yield
    except kinds:
        main = getattr(sys.modules.get("__main__"), "__spec__", None)
        if main is not None and main.name.startswith("pyspark."):
            os.environ["SPARK_HIDE_TRACEBACK"] = "1"
        raise
