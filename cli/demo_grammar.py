"""The grammar of `tidelog demo`; nothing is imported until it runs."""

import argparse
from typing import Any


def add(commands: Any, kind: type[argparse.ArgumentParser]) -> None:
    """Add the command to the grammar of `tidelog`."""
    demo = commands.add_parser(
        "demo",
        help="a cluster of three nodes loses its leader, and nothing else",
        description="Starts three nodes on free ports of this machine, writes to a topic with three replicas, kills "
        "the leader with SIGKILL, goes on writing, and reads everything back. `tidelog demo log` shows the same of one "
        "log on one disk.",
    )
    _options(demo, records=20_000, what="records to write, half of them after the kill")
    demo.set_defaults(run="tidelog.cli.demo:run")
    kinds = demo.add_subparsers(dest="demo command", metavar="[log]", parser_class=kind, required=False)
    log = kinds.add_parser(
        "log",
        help="one log on one disk: write it, kill the writer, recover, read everything that was acknowledged",
        description="Writes a log in a child process, kills it with SIGKILL in the middle, recovers the log and checks "
        "that every acknowledged record is there.",
    )
    _options(log, records=20_000, what="acknowledged records before the kill")
    log.set_defaults(run="tidelog.cli.demo_log:run")


def _options(made: argparse.ArgumentParser, *, records: int, what: str) -> None:
    made.add_argument("--data", metavar="DIR", help="keep the data in this directory (default: a temporary one)")
    made.add_argument("--records", type=int, default=records, metavar="N", help=f"{what} (default {records:,})")
