"""The grammar of the commands for nodes and their directories; nothing is imported until one of them runs."""

import argparse
from typing import Any

BOOTSTRAP_HELP = "a node of the cluster (default: TIDELOG_BOOTSTRAP, the profile, or localhost:9292)"

TIMEOUT_MAX_S = 86_400
CHANGE_TIMEOUT_HELP = "how long the change may take (default: 60); a node that is not a voter then is not added"


def _output(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--output", choices=("table", "json"), default="table", help="output format")


def _seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value <= TIMEOUT_MAX_S:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds above 0 and up to {TIMEOUT_MAX_S}")
    return value


def add_timeout(parser: argparse.ArgumentParser, says: str = "") -> None:
    """For every command that talks to a cluster; None if it is not given."""
    says = says or "how long to wait for an answer of the cluster (default: 30)"
    parser.add_argument("--timeout", type=_seconds, metavar="SECONDS", help=says)


def _bootstrap(parser: argparse.ArgumentParser, timeout_says: str = "") -> None:
    parser.add_argument("--bootstrap", "--bootstrap-server", metavar="HOST:PORT", help=BOOTSTRAP_HELP)
    add_timeout(parser, timeout_says)


def _group(commands: Any, kind: type[argparse.ArgumentParser], name: str, says: str) -> Any:
    """A command that has commands of its own."""
    made = commands.add_parser(name, help=says, description=says[0].upper() + says[1:] + ".")
    return made.add_subparsers(dest=f"{name} command", metavar="command", parser_class=kind, required=True)


def add(commands: Any, kind: type[argparse.ArgumentParser]) -> None:
    """Add the commands to the grammar of `tidelog`."""
    _add_storage(_group(commands, kind, "storage", "format and inspect a node's directories"))
    _add_config(_group(commands, kind, "config", "a node's configuration file"))
    _add_metadata(_group(commands, kind, "metadata", "show the metadata log of files or of a running cluster"))
    _add_quorum(_group(commands, kind, "quorum", "the controllers that vote"))
    server = commands.add_parser(
        "server",
        help="run one node",
        description="Runs one node until SIGTERM or Ctrl-C; a second one stops it at once.",
    )
    server.add_argument("--config", required=True, metavar="FILE", help="node.toml, or Kafka's server.properties")
    server.add_argument("--ends-with-stdin", action="store_true", help="stop when stdin is closed: for supervisors")
    server.set_defaults(run="tidelog.cli.server:run")
    dev = commands.add_parser(
        "dev",
        help="an embedded cluster in the foreground, ready in seconds",
        description="Runs a cluster of one or more nodes as processes on this machine, until Ctrl-C.",
    )
    dev.add_argument("--nodes", type=int, default=1, metavar="N", help="how many nodes (default 1)")
    dev.add_argument("--data", metavar="DIR", help="where its data is kept (default: tidelog-data)")
    dev.add_argument("--ephemeral", action="store_true", help="keep nothing: a temporary directory")
    dev.add_argument("--port-offset", type=int, default=0, metavar="N", help="add N to every port")
    dev.set_defaults(run="tidelog.cli.dev:run")


def _add_storage(storage: Any) -> None:
    make = storage.add_parser(
        "format",
        help="prepare a node's directories, once",
        description="Writes cluster id, node id and directory id into each directory of a node. A controller is also "
        "given the first voters: --standalone, --initial-controllers, --no-initial-controllers (it joins a running "
        "group by `tidelog quorum add`), or the file's controller.quorum.voters.",
    )
    make.add_argument("--config", "-c", required=True, metavar="FILE", help="the node's configuration")
    make.add_argument(
        "--cluster-id", "-t", required=True, metavar="ID", help="22 characters; tidelog storage random-uuid"
    )
    make.add_argument("--node-id", type=int, metavar="N", help="must be what the configuration says")
    first = make.add_mutually_exclusive_group()
    first.add_argument("--standalone", "-s", action="store_true", help="this node is the only voter")
    first.add_argument(
        "--initial-controllers", "-I", metavar="LIST", help="the first voters: id@host:port:directory-id,..."
    )
    first.add_argument("--no-initial-controllers", "-N", action="store_true", help="this node joins later")
    make.add_argument(
        "--ignore-formatted", "-g", action="store_true", help="leave directories as they are that are formatted"
    )
    add_timeout(make, "how long to ask other controllers whether they know this voter (default: 2)")
    _output(make)
    make.set_defaults(run="tidelog.cli.storage:run_format")
    fresh = storage.add_parser("random-uuid", help="a new id for a cluster or a directory")
    fresh.set_defaults(run="tidelog.cli.storage:run_random_uuid")
    info = storage.add_parser("info", help="what is in a node's directories, and what is wrong with them")
    info.add_argument("--config", "-c", required=True, metavar="FILE", help="the node's configuration")
    _output(info)
    info.set_defaults(run="tidelog.cli.storage:run_info")


def _add_config(config: Any) -> None:
    for name, says in (
        ("check", "say what is wrong with a file"),
        ("show", "print value, source and default of each key"),
    ):
        made = config.add_parser(name, help=says)
        made.add_argument(
            "--config", "-c", required=True, metavar="FILE", help="node.toml, or Kafka's server.properties"
        )
        if name == "show":
            made.add_argument("--all", action="store_true", help="also what is not set")
            _output(made)
        made.set_defaults(run=f"tidelog.cli.config:run_{name}")


def _add_metadata(metadata: Any) -> None:
    show = metadata.add_parser(
        "show",
        help="topics, brokers, partitions and configs, as a tree",
        description="Shows the cluster's state: from a stopped node's metadata directory, from one snapshot file, or "
        "of a running cluster. PATH inside the state is like /topics/orders or /brokers/1.",
    )
    show.add_argument("--data", metavar="DIR", help="a node's metadata directory, or a snapshot file")
    show.add_argument("path", nargs="?", default="/", metavar="PATH", help="what to show (default: /)")
    dump = metadata.add_parser(
        "dump",
        help="every record as a line of JSON, with offset and epoch",
        description="Prints the records of the metadata log, from files or live. Damaged files are named and left "
        "alone; what can be read of them is printed.",
    )
    dump.add_argument("--data", metavar="DIR", help="a node's metadata directory, or one file of it")
    for parser in (show, dump):
        parser.add_argument(
            "--copy", choices=("controller", "broker"), help="which one, in the directory of a node that is both"
        )
        _bootstrap(parser)
    _output(show)
    show.set_defaults(run="tidelog.cli.metadata_files:run_show")
    dump.set_defaults(run="tidelog.cli.metadata_files:run_dump")


def _add_quorum(quorum: Any) -> None:
    describe = quorum.add_parser("describe", help="leader, voters, and the lag of each")
    _bootstrap(describe)
    _output(describe)
    describe.set_defaults(run="tidelog.cli.quorum:run_describe")
    voter = {"required": True, "type": int, "metavar": "N", "help": "its node id"}
    for name, says in (
        ("add", "make a running controller a voter"),
        ("update-voter", "change the endpoints of a voter"),
    ):
        made = quorum.add_parser(name, help=says)
        made.add_argument("--node-id", **voter)
        made.add_argument("--directory-id", required=True, metavar="ID", help="of its metadata directory: storage info")
        made.add_argument(
            "--endpoint", required=True, action="append", metavar="HOST:PORT", help="where the others reach it"
        )
        made.add_argument("--listener", default="CONTROLLER", metavar="NAME", help="the endpoint's listener")
        _bootstrap(made, CHANGE_TIMEOUT_HELP)
        made.set_defaults(run=f"tidelog.cli.quorum:run_{name.replace('-', '_')}")
    remove = quorum.add_parser("remove", help="remove a voter")
    remove.add_argument("--node-id", **voter)
    remove.add_argument("--directory-id", metavar="ID", help="only if it is this one")
    remove.add_argument("--yes", action="store_true", help="do not ask; without a terminal nothing is asked either")
    _bootstrap(remove, CHANGE_TIMEOUT_HELP)
    remove.set_defaults(run="tidelog.cli.quorum:run_remove")
