"""In a worker: seeds of the simulator, measured or run against the mutant that is installed."""

import gc
import time

from simulation.raft_sim import run_seed
from simulation.run_result import Result, Symptom

from mutants.hook import Hits
from mutants.worker import Reply

CRASHES_MAX = 3
"""After so many crashed runs no further seed is tried: a checker will not name what cannot run."""


def measure_seeds(stack: str, seeds: list[int], hits: Hits, reply: Reply) -> None:
    """For each seed what it costs, whether it holds, and which blocks it reaches."""
    hits.take()
    for seed in seeds:
        began = time.process_time()
        result = run_seed(seed, stack=stack)
        spent_s = time.process_time() - began
        reply(
            {
                "seed": seed,
                "s": round(spent_s, 3),
                "holds": result.failure is None,
                "hits": {module: f"{mask:x}" for module, mask in hits.take().items()},
            }
        )
        del result
        gc.collect()


def run_seeds(seeds: list[tuple[str, int]], reply: Reply) -> None:
    """Stops at the first failure that a checker names, or that is something that did not happen in its time."""
    crashes = 0
    for stack, seed in seeds:
        result = run_seed(seed, stack=stack)
        kind = kind_of(result)
        reply({"stack": stack, "seed": seed, "kind": kind, "why": _why(result)})
        crashes += kind == "crashed"
        if kind in ("checker", "progress") or crashes == CRASHES_MAX:
            return
        del result
        gc.collect()


def kind_of(result: Result) -> str:
    """`holds`, `checker`, `progress` or `crashed`."""
    if result.failure is None:
        return "holds"
    kinds = {Symptom.CHECKER: "checker", Symptom.PROGRESS: "progress", Symptom.CRASH: "crashed"}
    assert result.symptom is not None, "a failure has one"
    return kinds[result.symptom]


def _why(result: Result) -> str:
    what = (result.failure or "").strip().splitlines()
    cause = "" if result.error is None else f" ({result.error!r})"
    return ((what[0] if what else "") + cause)[:300]
