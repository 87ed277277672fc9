"""Many seeds, in parallel processes; a failing one is named with the command that replays it, and its plan is shrunk.

Shrinking leaves out steps of the fault plan, halves first, as long as the run still fails with what is left, within a
bound of runs. It is the same seed: what is left of the plan does what it did before.
"""

import functools
import gc
import json
import multiprocessing
import os
import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait

from simulation.coverage import Counts
from simulation.defects import DEFECTS, Defect, StaleDefectError
from simulation.raft_sim import run_seed
from simulation.run_result import Result, draw_shape
from simulation.seeds import read_catching_seeds, write_catching_seeds

SHRINK_RUNS_MAX = 60
DEFECT_SEEDS_MAX = 500
COLLECT_EVERY = 50
REPORT_EVERY_S = 10.0
BAR_WIDTH = 30
FAILURES_MAX = 5
"""A campaign stops after so many: they are mostly the same one."""


@dataclass(slots=True)
class Totals:
    seeds: int = 0
    virtual_s: float = 0.0
    events: int = 0
    acknowledged: int = 0
    elections: int = 0
    faults: dict[str, int] = field(default_factory=dict)
    failures: list[tuple[int, str]] = field(default_factory=list)
    coverage: Counts = field(default_factory=Counts)

    def add(self, result: Result) -> None:
        self.seeds += 1
        self.virtual_s += result.virtual_s
        self.events += result.events
        self.acknowledged += result.acknowledged
        self.elections += result.elections
        for name, count in result.faults.items():
            self.faults[name] = self.faults.get(name, 0) + count
        self.coverage.add(result.coverage)
        if result.failure is not None:
            self.failures.append((result.seed, result.failure))


def replay_command(seed: int, *, stack: str | None = None, only: Iterable[int] | None = None) -> str:
    parts = [f"make sim SEED={seed}"]
    if stack is not None:
        parts.append(f"STACK={stack}")
    if only is not None:
        parts.append(f"FAULTS={','.join(map(str, sorted(only))) or 'none'}")
    return " ".join(parts)


def run_campaign(
    first: int, count: int | None, *, minutes: float | None, stack: str | None, processes: int, quiet: bool = False
) -> Totals:
    """Seeds from `first` on, `count` of them, or as many as fit into `minutes`."""
    began = time.monotonic()
    totals = Totals()
    progress = Progress(count, minutes, quiet=quiet)
    for result in run_parallel(first, count, minutes=minutes, stack=stack, processes=processes):
        totals.add(result)
        progress.show(totals, time.monotonic() - began)
        if result.failure is not None:
            progress.clear()
            print(f"seed {result.seed} ({result.shape.stack}): {result.failure}", flush=True)
            print(f"  replay: {replay_command(result.seed, stack=stack)}", flush=True)
            if len(totals.failures) >= FAILURES_MAX:
                break
    progress.clear()
    return totals


def run_parallel(
    first: int, count: int | None, *, minutes: float | None, stack: str | None, processes: int
) -> Iterator[Result]:
    """Results as they come. Each worker takes the next seed when it has done one."""
    deadline = None if minutes is None else time.monotonic() + 60 * minutes
    workers: dict[Connection, multiprocessing.process.BaseProcess] = {}
    next_seed = first
    try:
        for _ in range(processes):
            _start_worker(workers, stack)
        idle = list(workers)
        busy: dict[Connection, int] = {}
        while True:
            while idle and (count is None or next_seed < first + count):
                if deadline is not None and time.monotonic() >= deadline:
                    break
                connection = idle.pop()
                with suppress(BrokenPipeError):  # of a worker that has died, as the answer will tell
                    connection.send(next_seed)
                busy[connection] = next_seed
                next_seed += 1
            if not busy:
                return
            for ready in wait(list(busy)):
                assert isinstance(ready, Connection)
                seed = busy.pop(ready)
                try:
                    result = ready.recv()
                    idle.append(ready)
                except (EOFError, ConnectionResetError):
                    result = _died(seed, stack, workers.pop(ready))
                    ready.close()
                    idle.append(_start_worker(workers, stack))
                yield result
    finally:
        for connection, process in workers.items():
            connection.close()
            process.terminate()
            process.join()


def _start_worker(workers: dict[Connection, multiprocessing.process.BaseProcess], stack: str | None) -> Connection:
    context = multiprocessing.get_context("spawn")
    mine, theirs = context.Pipe()
    worker = context.Process(target=_work, args=(theirs, stack), daemon=True)
    worker.start()
    theirs.close()
    workers[mine] = worker
    return mine


def _died(seed: int, stack: str | None, worker: multiprocessing.process.BaseProcess) -> Result:
    """A worker that ended in the middle of a seed: by a signal, by memory, by an error outside of the run."""
    worker.join()
    failure = f"its worker process died: exit code {worker.exitcode}"
    return Result(seed, failure, virtual_s=0.0, events=0, digest="", plan=[], shape=draw_shape(seed, stack))


def _work(connection: Connection, stack: str | None) -> None:
    """A worker: seeds in, results out, until the other side is gone."""
    done = 0
    while True:
        try:
            seed = connection.recv()
        except (EOFError, KeyboardInterrupt):
            return
        result = run_seed(seed, stack=stack)
        result.trace, result.error = [], None  # neither is worth sending, and not every error can be sent
        connection.send(result)
        done += 1
        if done % COLLECT_EVERY == 0:
            gc.collect()  # a run collects only its youngest objects


def shrink(seed: int, *, stack: str | None, runs_max: int = SHRINK_RUNS_MAX) -> tuple[list[int], int]:
    """Steps of the plan that are enough to fail, and how many runs it took to find out."""
    result = run_seed(seed, stack=stack)
    needed = [step.number for step in result.plan]
    runs = 1
    size = max(1, len(needed) // 2)
    while size >= 1 and runs < runs_max:
        position, shrunk = 0, False
        while position < len(needed) and runs < runs_max:
            candidate = needed[:position] + needed[position + size :]
            runs += 1
            if run_seed(seed, stack=stack, only=candidate).failure is not None:
                needed, shrunk = candidate, True
            else:
                position += size
        if size == 1 and not shrunk:
            break
        size = max(1, size // 2) if size > 1 or not shrunk else 1
    return needed, runs


def catch(defect: Defect, *, remembered: int | None, seeds: int = DEFECT_SEEDS_MAX) -> int | None:
    """A seed on which the defect is caught: the remembered one if it still is, else the first."""
    candidates: list[int] = [*([] if remembered is None else [remembered]), *range(1, seeds + 1)]
    for seed in candidates:
        with defect.switched_on() as calls:
            result = run_seed(seed, stack=defect.stack)
        # A seed that fails without the defect as well proves nothing about it.
        if defect.is_caught(result, calls) and _holds(seed, defect.stack):
            return seed
    return None


@functools.cache
def _holds(seed: int, stack: str) -> bool:
    """Whether a run without defects is good: many defects share a seed."""
    return run_seed(seed, stack=stack).failure is None


def all_defects() -> tuple[Defect, ...]:
    from simulation.broker_defects import DEFECTS as BROKER_DEFECTS
    from simulation.groups_defects import DEFECTS as GROUPS_DEFECTS
    from simulation.invariant_defects import DEFECTS as INVARIANT_DEFECTS
    from simulation.kafka_defects import DEFECTS as KAFKA_DEFECTS
    from simulation.metadata_defects import DEFECTS as METADATA_DEFECTS
    from simulation.product_defects import DEFECTS as PRODUCT_DEFECTS
    from simulation.transactions_defects import DEFECTS as TRANSACTIONS_DEFECTS

    broker_stacks = (*BROKER_DEFECTS, *PRODUCT_DEFECTS, *GROUPS_DEFECTS, *KAFKA_DEFECTS, *TRANSACTIONS_DEFECTS)
    return (*DEFECTS, *METADATA_DEFECTS, *broker_stacks, *INVARIANT_DEFECTS)


def catch_all(*, processes: int, stack: str | None = None) -> list[str]:
    """Look for the seed that catches each defect (of this kind of node), remember it, and return the names of those
    that are not caught."""
    remembered = read_catching_seeds()
    missed: list[str] = []
    known = {defect.name for defect in all_defects()}
    wanted = [defect.name for defect in all_defects() if stack in (None, defect.stack)]
    with multiprocessing.get_context("spawn").Pool(processes) as pool:
        for name, seed, elapsed_s in pool.imap(_catch_by_name, [(name, remembered.get(name)) for name in wanted]):
            print(f"{name:28} {f'seed {seed}' if seed is not None else 'NOT CAUGHT':12} {elapsed_s:6.1f} s", flush=True)
            if seed is None:
                missed.append(name)
            else:
                remembered[name] = seed
                write_catching_seeds({name: seed for name, seed in remembered.items() if name in known})
    return missed


def _catch_by_name(job: tuple[str, int | None]) -> tuple[str, int | None, float]:
    name, remembered = job
    began = time.monotonic()
    defect = next(defect for defect in all_defects() if defect.name == name)
    try:
        seed = catch(defect, remembered=remembered)
    except StaleDefectError as error:
        print(error, flush=True)
        seed = None
    return name, seed, time.monotonic() - began


class Progress:
    """A bar on a terminal, a line now and then elsewhere."""

    def __init__(self, count: int | None, minutes: float | None, *, quiet: bool) -> None:
        self._count = count
        self._minutes = minutes
        self._quiet = quiet
        self._is_terminal = sys.stderr.isatty() and not quiet
        self._shown_s = 0.0

    def show(self, totals: Totals, elapsed_s: float) -> None:
        every_s = 0.2 if self._is_terminal else REPORT_EVERY_S
        if self._quiet or elapsed_s - self._shown_s < every_s:
            return
        self._shown_s = elapsed_s
        share = totals.seeds / self._count if self._count else elapsed_s / (60 * (self._minutes or 1))
        rate = totals.seeds / max(elapsed_s, 0.001)
        text = (
            f"{totals.seeds}{f'/{self._count}' if self._count else ''} seeds, {rate:.1f}/s, "
            f"{totals.virtual_s / 3600:.1f} virtual hours, {len(totals.failures)} failed"
        )
        if self._is_terminal:
            full = int(BAR_WIDTH * min(share, 1.0))
            sys.stderr.write(f"\r[{'#' * full}{'.' * (BAR_WIDTH - full)}] {text}\x1b[K")
        else:
            sys.stderr.write(f"{text}\n")
        sys.stderr.flush()

    def clear(self) -> None:
        if self._is_terminal:
            sys.stderr.write("\r\x1b[K")
            sys.stderr.flush()


def summary(totals: Totals, wall_s: float) -> str:
    """The one line of JSON that a campaign ends with."""
    return json.dumps(
        {
            "seeds": totals.seeds,
            "failures": len(totals.failures),
            "failed_seeds": [seed for seed, _ in totals.failures],
            "virtual_hours": round(totals.virtual_s / 3600, 3),
            "wall_s": round(wall_s, 1),
            "events": totals.events,
            "acknowledged": totals.acknowledged,
            "elections": totals.elections,
            "faults": sum(totals.faults.values()),
        }
    )


def default_processes() -> int:
    return max(1, min(os.cpu_count() or 1, 8))
