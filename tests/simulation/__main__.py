"""`make sim`: one seed with its trace, or many seeds from one on.

    SEED=n            run one seed, show what happened
    FAULTS=0,3,7      with SEED: only these steps of its plan (what shrinking prints)
    SEEDS=n FIRST=k   run seeds k to k + n - 1 in parallel
    MINUTES=m         as many seeds from FIRST on as fit
    STACK=core|driver only this kind of node (the seed decides otherwise)
    STACK=metadata    controllers and brokers instead of Raft nodes alone
    STACK=brokers     a whole cluster: controllers, brokers with their logs, clients
    STACK=lab         the same with more faults: errors at every call, dying helpers, jumping clocks, empty disks
    STACK=product     the same in which topics, configs, producers and brokers change (`product_shape`)
    STACK=groups      the same with consumer groups: coordinators, members, writers
    STACK=transactions    the same with pipelines and joint transactions
    DEFECTS=1         look for a seed that catches each deliberate defect (of STACK), and remember it

A campaign of clusters prints which faults struck which features on which roles, and writes build/sim-coverage.json.
The last line is JSON; the exit status is 1 if a seed failed.
"""

import argparse
import sys
import time

from simulation.campaign import Totals, catch_all, default_processes, replay_command, run_campaign, shrink, summary
from simulation.raft_sim import run_seed
from simulation.run_result import Result
from simulation.seeds import ROOT

COVERAGE = ROOT / "build" / "sim-coverage.json"


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="make sim", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--seed", type=int)
    parser.add_argument("--faults", help="steps of the plan, with commas; 'none' for none")
    parser.add_argument("--seeds", type=int)
    parser.add_argument("--first", type=int, default=1)
    parser.add_argument("--minutes", type=float)
    stacks = ("core", "driver", "metadata", "brokers", "product", "groups", "lab", "transactions")
    parser.add_argument("--stack", choices=stacks)
    parser.add_argument("--processes", type=int, default=default_processes())
    parser.add_argument("--no-shrink", action="store_true")
    parser.add_argument("--defects", action="store_true")
    options = parser.parse_args()
    began = time.monotonic()
    if options.defects:
        return 1 if catch_all(processes=options.processes, stack=options.stack) else 0
    if options.seed is not None:
        only = None
        if options.faults is not None:
            only = [int(number) for number in options.faults.split(",") if number != "none"]
        result = run_seed(options.seed, stack=options.stack, only=only)
        show(result)
        totals = Totals()
        totals.add(result)
    else:
        count = options.seeds if options.seeds is not None or options.minutes is not None else 1000
        totals = run_campaign(
            options.first, count, minutes=options.minutes, stack=options.stack, processes=options.processes
        )
        if totals.failures and not options.no_shrink:
            seed, _ = totals.failures[0]
            needed, runs = shrink(seed, stack=options.stack)
            print(f"seed {seed} still fails with {len(needed)} steps of its plan ({runs} runs):")
            print(f"  {replay_command(seed, stack=options.stack, only=needed)}")
    if totals.coverage.features:
        print(totals.coverage.table())
        totals.coverage.write(COVERAGE)
    print(summary(totals, time.monotonic() - began))
    return 1 if totals.failures else 0


def show(result: Result) -> None:
    print(result.shape)
    for step in result.plan:
        print(step)
    print("\n".join(result.trace))
    print(f"digest {result.digest}")
    print(f"seed {result.seed}: {result.failure or 'held'}")


if __name__ == "__main__":
    sys.exit(main())
