"""`tidelog server --config FILE`: one node, until it is told to stop."""

import argparse

from tidelog.cli.config import read_config
from tidelog.server.run import run_node


def run(options: argparse.Namespace) -> int:
    return run_node(read_config(options.config), ends_with_stdin=options.ends_with_stdin)
