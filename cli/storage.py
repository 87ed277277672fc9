"""`tidelog storage format|random-uuid|info`. Keys of the JSON documents are listed in docs/cli.md."""

import argparse
import asyncio
import json
import os
import sys
from random import SystemRandom

from tidelog.cli import table
from tidelog.cli.config import read_config
from tidelog.cli.exit_codes import EXIT_FAILURE, EXIT_OK
from tidelog.cli.main import UsageError
from tidelog.cli.messages import wrong_id
from tidelog.model.errors import InvalidRequestError
from tidelog.model.uuids import from_text, random_uuid, to_text
from tidelog.server.config import NodeConfig
from tidelog.server.quorum_check import ASK_TIMEOUT_S, ask_controllers, check_first_voters, unknown_note
from tidelog.server.storage import (
    LOST_VOTER,
    Formatted,
    Meta,
    Voters,
    format_node,
    inspect,
    parse_controllers,
    read_meta,
    standalone,
    voters_of_file,
)


def run_random_uuid(_options: argparse.Namespace) -> int:
    print(to_text(random_uuid(SystemRandom())))
    return EXIT_OK


def run_format(options: argparse.Namespace) -> int:
    config = read_config(options.config)
    if from_text(options.cluster_id) is None:
        raise UsageError(f"--cluster-id {options.cluster_id!r}: {wrong_id(options.cluster_id)}")
    if options.node_id is not None and options.node_id != config.node:
        raise UsageError(f"--node-id {options.node_id}: {options.config} says node.id={config.node}")
    try:
        voters = _voters(options, config)
        note = None if voters is None else _check_voters(options, config, voters)
        done = asyncio.run(
            format_node(
                config,
                options.cluster_id,
                voters,
                ignore_formatted=options.ignore_formatted,
                random=SystemRandom(),
            )
        )
    except InvalidRequestError as error:
        raise UsageError(str(error)) from error
    if options.output == "json":
        print(json.dumps({"directories": [_row(one) for one in done]}, indent=2))
    else:
        for one in done:
            what = "was formatted before" if one.was_there else "formatted"
            print(f"{one.path}: {what}, directory id {to_text(one.meta.directory)}")
    if voters is not None and any(one.path == config.metadata_dir and not one.was_there for one in done):
        _warn_of_another_port(config, voters)
    if note is None and voters is not None and voters.are_derived and not all(one.was_there for one in done):
        note = f"if this directory is ever lost, do not format it so again: {LOST_VOTER}"
    if note is not None:
        print(f"tidelog: note: {note}", file=sys.stderr)
    return EXIT_OK


def _warn_of_another_port(config: NodeConfig, voters: Voters) -> None:
    """Warns if the first voters name this node at a port that it does not advertise. Hosts have several names: those
    are not compared."""
    advertised = str(config.own.advertised)
    for node, address, _ in voters.members:
        if node == config.node and address.rpartition(":")[2] != advertised.rpartition(":")[2]:
            print(
                f"tidelog: the first voters have node {node} at {address}, but this node advertises {advertised} "
                f"(advertised.listeners, listeners). The other voters call {address}. If that is not this node, "
                f"do not start it: empty {config.metadata_dir} and format again with the right address.",
                file=sys.stderr,
            )


def _check_voters(options: argparse.Namespace, config: NodeConfig, voters: Voters) -> str | None:
    """Reject voters that the other controllers contradict. Returns a note if they could not be asked; None if there is
    nothing to format."""
    if os.path.isdir(config.metadata_dir) and read_meta(config.metadata_dir) is not None:
        return None
    timeout_s = options.timeout or ASK_TIMEOUT_S
    answers = asyncio.run(ask_controllers(config, options.cluster_id, voters, timeout_s=timeout_s))
    check_first_voters(config, options.cluster_id, voters, answers)
    return unknown_note(config, voters, answers)


def _voters(options: argparse.Namespace, config: NodeConfig) -> Voters | None:
    has_choice = options.standalone or options.initial_controllers or options.no_initial_controllers
    if not config.is_controller:
        if options.standalone or options.initial_controllers:
            raise UsageError("this node is not a controller (process.roles): leave out the options about voters")
        return None
    if options.standalone:
        return standalone(config)
    if options.initial_controllers:
        return parse_controllers(options.initial_controllers)
    if options.no_initial_controllers:
        return Voters(())
    assert not has_choice, "every choice is handled above"
    if config.voters:
        return voters_of_file(config, options.cluster_id)
    raise UsageError(
        "who votes first? --standalone for a cluster of one controller, --initial-controllers "
        "id@host:port:directory-id,... for several, --no-initial-controllers to join a running cluster"
    )


def _meta(meta: Meta | None) -> dict[str, object]:
    return {
        "cluster_id": None if meta is None else meta.cluster_id,
        "node_id": None if meta is None else meta.node,
        "directory_id": None if meta is None else to_text(meta.directory),
        "version": None if meta is None else meta.version,
    }


def _row(one: Formatted) -> dict[str, object]:
    return {"path": one.path, "was_formatted": one.was_there, **_meta(one.meta)}


def run_info(options: argparse.Namespace) -> int:
    config = read_config(options.config)
    reports = inspect(config)
    problems = [f"{report.path}: {problem}" for report in reports for problem in report.problems]
    if options.output == "json":
        rows = [
            {
                "path": report.path,
                "holds": report.role,
                "logs": report.logs,
                "free_bytes": report.free_bytes,
                **_meta(report.meta),
                "problems": report.problems,
            }
            for report in reports
        ]
        print(json.dumps({"node_id": config.node, "directories": rows}, indent=2))
    else:
        headings = ["directory", "holds", "cluster id", "node", "directory id", "logs"]
        cells = [
            [
                report.path,
                report.role,
                None if report.meta is None else report.meta.cluster_id,
                None if report.meta is None else report.meta.node,
                None if report.meta is None else to_text(report.meta.directory),
                report.logs,
            ]
            for report in reports
        ]
        table.write(sys.stdout, headings, cells, right=["node", "logs"])
        for problem in problems:
            print(table.red(problem, sys.stdout))
    sys.stdout.flush()
    if problems:
        print(f"tidelog: {len(problems)} problem{'s' if len(problems) > 1 else ''} found", file=sys.stderr)
        return EXIT_FAILURE
    return EXIT_OK
