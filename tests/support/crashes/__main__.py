"""Every operation, struck at every call: `make crashes`.

    python -m support.crashes [--mode crash|error|double] [--share 1/20] [NAME ...]

Prints one line for each operation, and each trial that fails with the error. Ends with a JSON line, and with status 1
if a trial failed, or if a whole run (all modes, operations and trials) does not reach a place of the product that
changes a disk and that `NOT_REACHED` does not excuse: those places are printed, and `not_reached` of the JSON line.
`missed` has the excused ones, too.
"""

import argparse
import json
import logging
import sys
import time

from support.crashes.table import NOT_REACHED, Mode, all_operations, missed_places, trials_of
from support.crashes.trials import Trial, run_trial

FAILURES_MAX = 5


def main() -> int:
    parser = argparse.ArgumentParser(prog="support.crashes", description="Strikes every operation at every call.")
    parser.add_argument("--mode", choices=[mode.value for mode in Mode], action="append", help="default: all")
    parser.add_argument("--share", default="1/1", help="1/20: each twentieth trial")
    parser.add_argument("names", nargs="*", help="operations; default: all")
    options = parser.parse_args()
    every = int(options.share.partition("/")[2])
    modes = [Mode(mode) for mode in options.mode or [mode.value for mode in Mode]]
    logging.getLogger("tidelog").setLevel(logging.CRITICAL + 1)
    lines: set[tuple[str, int]] = set()
    began_s, totals, failed = time.monotonic(), dict.fromkeys((mode.value for mode in modes), 0), 0
    for operation in all_operations():
        if options.names and operation.name not in options.names:
            continue
        found = []
        for mode in modes:
            for number, trial in enumerate(trials_of(operation, mode)):
                if number % every:
                    continue
                totals[mode.value] += 1
                error = _error_of(trial, lines)
                if error is not None:
                    found.append(f"  {trial}\n    {error}")
        failed += len(found)
        print(f"{operation.name}: {f'{len(found)} failed' if found else 'ok'}", flush=True)
        for text in found[:FAILURES_MAX]:
            print(text, flush=True)
    missed = sorted(missed_places(lines))
    is_whole = not options.names and every == 1 and len(modes) == len(Mode)
    unknown = [place for place in missed if place not in NOT_REACHED] if is_whole else []
    for place in unknown:
        print(f"no trial reaches {place}: add an operation that does, or the reason to NOT_REACHED in table.py")
    seconds = round(time.monotonic() - began_s)
    print(
        json.dumps({"trials": totals, "failed": failed, "not_reached": unknown, "missed": missed, "seconds": seconds})
    )
    return 1 if failed or unknown else 0


def _error_of(trial: Trial, lines: set[tuple[str, int]]) -> str | None:
    try:
        lines |= run_trial(trial).lines
    except Exception as error:
        return f"{type(error).__name__}: {str(error)[:500]}"
    return None


if __name__ == "__main__":
    sys.exit(main())
