"""The grammar of `tidelog demo`; nothing is imported until it runs."""

import argparse
from typing import Any


def add(commands: Any, kind: type[argparse.ArgumentParser]) -> None:
    """Add the command to the grammar of `tidelog`."""
    demo = commands.add_parser(
        "demo",
        help="kill the leader of a three-node cluster and show that no record is lost",
        description="Starts three nodes on free ports of this machine, writes to a topic with three replicas, kills "
        "the leader with SIGKILL, goes on writing, and reads everything back. `tidelog demo log` shows the same of one "
        "log on one disk, `tidelog demo spark` a query of Spark over a topic.",
    )
    _options(demo, records=20_000, what="records to write, half of them after the kill")
    demo.set_defaults(run="tidelog.cli.demo:run")
    kinds = demo.add_subparsers(dest="demo command", metavar="[log|spark]", parser_class=kind, required=False)
    log = kinds.add_parser(
        "log",
        help="one log on one disk: write it, kill the writer, recover, read everything that was acknowledged",
        description="Writes a log in a child process, kills it with SIGKILL in the middle, recovers the log and checks "
        "that every acknowledged record is there.",
    )
    _options(log, records=20_000, what="acknowledged records before the kill")
    log.set_defaults(run="tidelog.cli.demo_log:run")
    spark = kinds.add_parser(
        "spark",
        help="Spark reads a topic as a stream and writes its result to another one",
        description="Starts three nodes, writes orders to a topic, and runs a streaming query of Spark over it whose "
        "result goes into another topic and is printed. Needs PySpark and a Java; says what to install if there is "
        "none, and fails only if REQUIRE_SPARK is set.",
    )
    _options(spark, records=20_000, what="orders to write")
    spark.set_defaults(run="tidelog.cli.demo_spark:run")


def _options(made: argparse.ArgumentParser, *, records: int, what: str) -> None:
    made.add_argument("--data", metavar="DIR", help="keep the data in this directory (default: a temporary one)")
    made.add_argument("--records", type=int, default=records, metavar="N", help=f"{what} (default {records:,})")
