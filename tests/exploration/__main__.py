"""`make explore [STATES=n] [ONLY=name]`: each exploration of `campaign`; the last line is JSON."""

from __future__ import annotations

import argparse
import json
import time

from exploration.campaign import EXPLORATIONS
from exploration.explorer import Bounds, ViolationError, explore


def main() -> int:
    parser = argparse.ArgumentParser(prog="make explore", description=__doc__)
    parser.add_argument("--states", type=int, default=200_000, help="of each exploration, at most (200000)")
    parser.add_argument("--progress-every", type=int, default=500, help="checks progress from each n-th state (500)")
    parser.add_argument("--only", help="explorations whose names contain this")
    options = parser.parse_args()
    chosen = {name: model for name, model in EXPLORATIONS.items() if options.only is None or options.only in name}
    if not chosen:
        parser.error(f"no exploration contains {options.only!r}: {', '.join(EXPLORATIONS)}")
    results: dict[str, object] = {}
    failures = states = 0
    for name, model in chosen.items():
        began = time.monotonic()
        try:
            report = explore(model, Bounds(states_max=options.states, progress_every=options.progress_every))
        except ViolationError as error:
            failures += 1
            print(f"{name}: {error}", flush=True)
            results[name] = {"violation": str(error), "path": error.path}
            continue
        states += report.states
        extent = "complete" if report.is_complete else f"all paths of {report.depth} steps"
        seconds = time.monotonic() - began
        print(
            f"{name}: {report.states} states, {report.transitions} transitions, {extent}, {seconds:.0f} s", flush=True
        )
        results[name] = report.as_dict()
    print(json.dumps({"failures": failures, "states": states, "explorations": results}))
    return 1 if failures else 0


if __name__ == "__main__":
    raise SystemExit(main())
