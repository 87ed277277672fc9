"""The grammar of `tidelog transactions`; nothing is imported until one of them runs."""

import argparse
from collections.abc import Callable
from typing import Any

Add = Callable[..., argparse.ArgumentParser]
STATES = ("Empty", "Ongoing", "PrepareCommit", "PrepareAbort", "CompleteCommit", "CompleteAbort")


def add(transactions: Any, command: Add, yes: Callable[[argparse.ArgumentParser], None]) -> None:
    listed = command(transactions, "list", "transactions:run_list", "transactional ids with state, of all brokers")
    listed.add_argument(
        "--state", action="append", default=[], choices=STATES, metavar="STATE", help=f"one of {', '.join(STATES)}"
    )
    listed.add_argument(
        "--producer-id", action="append", default=[], type=int, metavar="N", help="of this owner or member"
    )
    listed.add_argument("--open-for", metavar="D", help="only transactions that are open for longer: 90s, 15m")
    describe = command(
        transactions,
        "describe",
        "transactions:run_describe",
        "state, partitions and members of transactional ids",
        more="Exits with 1 if an id is not there.",
    )
    describe.add_argument("id", metavar="ID", nargs="*", help="default: all with an open transaction")
    abort = command(
        transactions,
        "abort",
        "transactions:run_abort",
        "abort the open transaction of a transactional id",
        more="Its owner's commit fails then, and it may begin another one.",
    )
    abort.add_argument("id", metavar="ID", nargs="+")
    yes(abort)
    hanging = command(
        transactions,
        "find-hanging",
        "transactions:run_find_hanging",
        "transactions that are open in a log and known to no coordinator",
        more="Exits with 1 if there is one: readers of committed data stop there.",
    )
    hanging.add_argument("--topic", action="append", default=[], metavar="T", help="only of this topic (default: all)")
    hanging.add_argument(
        "--open-for", default="15m", metavar="D", help="only with a last record older than this (default 15m)"
    )
