"""A process that measures what seeds and tests reach, or runs them against one mutant. One job, then it ends.

    python -m mutants.worker < job.json

The job and the replies are JSON, a reply to a line. Standard output belongs to the replies: what the program prints
goes nowhere. Memory is limited, since a mutant may collect without end; time is limited by the parent (`runner`).
"""

import json
import os
import resource
import sys
from collections.abc import Callable
from typing import Any

from mutants.finder import Mutant
from mutants.hook import check_imports, install_mutant, install_probes

DATA_BYTES_MAX = 4 << 30

Reply = Callable[[dict[str, Any]], None]


def main() -> int:
    job = json.load(sys.stdin)
    replies = os.fdopen(os.dup(1), "w", buffering=1)
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    resource.setrlimit(resource.RLIMIT_DATA, (DATA_BYTES_MAX, DATA_BYTES_MAX))

    def reply(line: dict[str, Any]) -> None:
        replies.write(json.dumps(line) + "\n")
        replies.flush()

    modules = job["modules"] if "modules" in job else [job["mutant"]["module"]]
    match job["task"]:
        case "measure seeds":
            hits = install_probes(modules)
            from mutants.seed_runs import measure_seeds

            measure_seeds(job["stack"], job["seeds"], hits, reply)
        case "measure tests":
            hits = install_probes(modules)
            from mutants.pytest_runs import measure_tests

            measure_tests(job["files"], hits, reply)
        case "run seeds":
            reached = install_mutant(Mutant(**job["mutant"]))
            reply({"ready": True})
            from mutants.seed_runs import run_seeds

            run_seeds(job["seeds"], reply)
            reply({"reached": bool(reached)})
        case "run tests":
            reached = install_mutant(Mutant(**job["mutant"]))
            reply({"ready": True})
            from mutants.pytest_runs import run_tests

            run_tests(job["stages"], job["timeout_s"], reply)
            reply({"reached": bool(reached)})
        case task:
            raise ValueError(f"unknown task {task!r}")
    check_imports(modules)
    replies.close()
    # Threads that a mutant keeps from ending must not keep the process.
    os._exit(0)


if __name__ == "__main__":
    sys.exit(main())
