"""`tidelog server --config FILE`: runs one node until it is stopped.

Exit code 2 if another start would end the same way: a wrong file, a directory that was never formatted, or
one of another node or cluster. systemd does not start such a node again.
"""

import argparse

from tidelog.cli.config import read_config
from tidelog.cli.main import UsageError
from tidelog.model.errors import UnformattedDirectoryError, WrongDirectoryError
from tidelog.server.run import run_node


def run(options: argparse.Namespace) -> int:
    try:
        return run_node(read_config(options.config), ends_with_stdin=options.ends_with_stdin)
    except (UnformattedDirectoryError, WrongDirectoryError) as error:
        raise UsageError(str(error)) from error
