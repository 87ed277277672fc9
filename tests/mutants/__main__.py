"""`make mutants`: puts small defects into modules, one at a time, and shows what notices each.

    MODULE=a,b        modules, packages or groups of tests/mutants/modules.toml; all without it
    SAMPLE=n SEED=k   n mutants of each module, drawn with k
    SEEDS=n           seeds 1 to n of each stack that fits the module
    BY=simulation|tests|all   all: tests run only against what the simulation has not noticed
    BY=recorded       run nothing, and show what is recorded
    BY=reach          run nothing, and list mutants that no seed and no test executes; SEEDS=0: no seed is asked
    MATCH=text        only mutants with this text in their key
    TEST_SECONDS=n    CPU time for the tests of one mutant
    AGAIN=1           run what is recorded, too

Outcomes are kept in build/mutants.jsonl: a run continues where it was interrupted. Mutants that stay alive are in
build/mutants/alive.toml. The last line is JSON; the exit status is 1 if a mutant is alive or executed by nothing.
"""

import argparse
import signal
import sys
import time

from mutants.equivalents import read_equivalents
from mutants.hook import ROOT
from mutants.reach import Reach
from mutants.results import Results, summary, table
from mutants.runner import Options, Runner, write_alive
from mutants.table import read_groups, select


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="make mutants", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--module", default="")
    parser.add_argument("--sample", type=int)
    parser.add_argument("--sample-seed", type=int, default=1)
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument("--by", choices=("simulation", "tests", "all", "recorded", "reach"), default="all")
    parser.add_argument("--match", default="")
    parser.add_argument("--test-seconds", type=float, default=60.0)
    parser.add_argument("--again", action="store_true")
    given = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # so that a worker does not stay
    began = time.monotonic()
    groups = read_groups()
    try:
        modules = select(groups, given.module)
    except ValueError as error:
        parser.error(str(error))
    options = Options(
        sample=given.sample,
        sample_seed=given.sample_seed,
        seeds=given.seeds,
        only_reach=given.by == "reach",
        simulate=given.by in ("simulation", "all"),
        test=given.by in ("tests", "all"),
        test_cpu_s=given.test_seconds,
        match=given.match,
        again=given.again,
    )
    build = ROOT / "build"
    reach, results = Reach(build / "mutants" / "reach.jsonl", groups), Results(build / "mutants.jsonl")
    runner = Runner(options, reach, results, read_equivalents())
    rows = []
    for module, group in modules:
        row = runner.run_module(module, group)
        if row.mutants:
            rows.append(row)
    write_alive(runner.alive, build / "mutants" / "alive.toml")
    for mutant, why in runner.alive:
        print(f"ALIVE {mutant.key}  [line {mutant.line}]: {why}")
    print(table(rows))
    print(summary(rows, wall_s=time.monotonic() - began))
    return 1 if runner.alive else 0


if __name__ == "__main__":
    sys.exit(main())
