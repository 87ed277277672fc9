"""Every operation, struck at every call: `make crashes`.

    python -m support.crashes [--mode crash|error|double] [--share 1/20] [NAME ...]

Prints one line for each operation, and each trial that fails with the error. Ends with a JSON line, and with status 1
if one failed, or if a place of the product that changes a disk was not reached.
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
    result = {"trials": totals, "failed": failed, "missed": missed, "seconds": round(time.monotonic() - began_s)}
    print(json.dumps(result))
    is_whole = not options.names and every == 1 and len(modes) == len(Mode)
    return 1 if failed or (is_whole and set(missed) - set(NOT_REACHED)) else 0


def _error_of(trial: Trial, lines: set[tuple[str, int]]) -> str | None:
    try:
        lines |= run_trial(trial).lines
    except Exception as error:
        return f"{type(error).__name__}: {str(error)[:500]}"
    return None


if __name__ == "__main__":
    sys.exit(main())
