"""`tidelog quorum describe|add|remove|update-voter`. docs/cli.md lists the keys of the JSON document."""

import argparse
import sys
import threading
from typing import Any
from uuid import UUID

from tidelog.cli import table
from tidelog.cli.clients import open_admin, timeout_s
from tidelog.cli.exit_codes import EXIT_FAILURE, EXIT_OK
from tidelog.cli.main import UsageError
from tidelog.cli.messages import confirm, id_text, print_json, report, report_if_stale, stale_fields, wrong_id
from tidelog.client.admin.threaded import Admin
from tidelog.client.admin.values import QuorumDescription, QuorumMember
from tidelog.model.errors import TidelogError
from tidelog.model.uuids import from_text
from tidelog.server.listeners import ListenerError, parse_address

CHANGE_TIMEOUT_S = 60.0
PROGRESS_S = 1.0
SILENT_MS = 3_000
STUCK_MS = 5_000
"""A lagging member whose log end did not advance for this long is reported as behind."""


def run_describe(options: argparse.Namespace) -> int:
    with open_admin(options) as admin:
        document = describe_document(admin.describe_quorum(allow_stale=True), admin.stale_ms)
        report_if_stale(admin.stale_ms, admin.answered_by)
    if options.output == "json":
        print_json(document)
        return EXIT_OK
    print(table.wrapped(summary(document), sys.stdout))
    rows = [
        [
            member["node"],
            "voter" if member["is_voter"] else "learner",
            member["directory_id"],
            ",".join(member["endpoints"].values()),
            _or_none(member["log_end_offset"]),
            _or_none(member["lag"]),
            _or_none(member["last_response_age_ms"]),
            member["state"],
        ]
        for member in document["members"]
    ]
    headings = ["node", "is", "directory id", "address", "log end", "lag", "silent ms", "state"]
    table.write(sys.stdout, headings, rows, right=["node", "log end", "lag", "silent ms"])
    if document["observers"]:
        observers = ", ".join(f"{row['node']} at {row['offset']}" for row in document["observers"])
        print(f"observers here: {observers}")
    return EXIT_OK


def summary(document: dict[str, Any]) -> str:
    """The line above the table of members."""
    leader = document["leader"] if document["leader"] >= 0 else "none"
    pairs = [("epoch", "epoch"), ("high watermark", "high_watermark")]
    pairs += [("log start", "log_start_offset"), ("log end", "log_end_offset")]
    return ", ".join([f"leader {leader}", *(f"{name} {document[key]}" for name, key in pairs)])


def _or_none(value: int) -> int | None:
    return None if value < 0 else value


def _state(member: QuorumMember) -> str:
    """Describes the state of a member. Only the active controller knows how far each has replicated."""
    if member.is_recovering:
        return "recovers"
    if member.error:
        return member.error
    if member.lag < 0:
        return "connected"
    if member.last_response_age_ms > SILENT_MS:
        return f"silent for {member.last_response_age_ms / 1000:.0f} s"
    if member.lag_age_ms > STUCK_MS:
        return f"behind by {member.lag:,} entries for {member.lag_age_ms / 1000:.0f} s: see its log"
    return "good"


def describe_document(quorum: QuorumDescription, stale_ms: int | None = None) -> dict[str, Any]:
    names = ("node", "role", "leader", "epoch", "high_watermark", "log_start_offset", "log_end_offset")
    more = ("durable_end_offset", "without_leader_ms", "snapshot_offset", "snapshot_epoch")
    document: dict[str, Any] = {name: getattr(quorum, name) for name in (*names, *more)}
    document["leader"] = -1 if quorum.leader is None else quorum.leader
    document["members"] = [
        {
            "node": member.node,
            "directory_id": id_text(member.directory_id),
            "endpoints": dict(member.endpoints),
            "is_voter": member.is_voter,
            "is_connected": member.is_connected,
            "error": member.error or None,
            "log_end_offset": member.log_end_offset,
            "lag": member.lag,
            "last_response_age_ms": member.last_response_age_ms,
            "is_recovering": member.is_recovering,
            "lag_age_ms": member.lag_age_ms,
            "state": _state(member),
        }
        for member in quorum.members
    ]
    document["observers"] = [{"node": node, "offset": offset} for node, offset in quorum.observers.items()]
    return {**document, **stale_fields(stale_ms)}


def _directory(text: str) -> UUID:
    directory_id = from_text(text)
    if directory_id is None:
        raise UsageError(f"--directory-id {text!r}: {wrong_id(text)}; `tidelog storage info` shows it")
    return directory_id


def _endpoints(options: argparse.Namespace) -> dict[str, str]:
    endpoints = {}
    for index, text in enumerate(options.endpoint):
        try:
            address = str(parse_address(text))
        except ListenerError as error:
            raise UsageError(f"--endpoint: {error}") from error
        endpoints[options.listener if index == 0 else f"{options.listener}_{index + 1}"] = address
    return endpoints


def _check_node(options: argparse.Namespace) -> None:
    if not 0 <= options.node_id < 1 << 31:
        raise UsageError(f"--node-id {options.node_id}: from 0 to {(1 << 31) - 1}")


def run_add(options: argparse.Namespace) -> int:
    _check_node(options)
    node, directory_id, endpoints = options.node_id, _directory(options.directory_id), _endpoints(options)
    with open_admin(options, CHANGE_TIMEOUT_S) as admin:
        report(f"asking node {node} at {', '.join(options.endpoint)} for its identity")
        is_done = threading.Event()
        progress = threading.Thread(target=_tell_progress, args=(admin, node, is_done), daemon=True)
        progress.start()
        try:
            admin.add_voter(node, directory_id, endpoints)
        except KeyboardInterrupt:
            report(
                f"the controller continues to add node {node}, and removes it again if it has not caught up "
                f"{timeout_s(options, CHANGE_TIMEOUT_S):g} s after the start; see: tidelog quorum describe"
            )
            raise
        finally:
            is_done.set()
            progress.join(PROGRESS_S)
    print(f"node {node} is a voter")
    return EXIT_OK


def _tell_progress(admin: Admin, node: int, is_done: threading.Event) -> None:
    """Prints how far a learner has replicated, when that changes."""
    last = ""
    while not is_done.wait(PROGRESS_S):
        try:
            quorum = admin.describe_quorum(timeout=PROGRESS_S)
        except TidelogError:
            continue  # the change itself reports its error
        for member in quorum.members:
            if member.node == node and member.log_end_offset >= 0:
                text = f"node {node} has {member.log_end_offset:,} of {quorum.log_end_offset:,} entries"
                if text != last and not is_done.is_set():
                    report(text)
                last = text


def run_update_voter(options: argparse.Namespace) -> int:
    _check_node(options)
    directory_id, endpoints = _directory(options.directory_id), _endpoints(options)
    with open_admin(options, CHANGE_TIMEOUT_S) as admin:
        admin.update_voter(options.node_id, directory_id, endpoints)
    print(f"node {options.node_id} is at {', '.join(options.endpoint)}")
    return EXIT_OK


def run_remove(options: argparse.Namespace) -> int:
    _check_node(options)
    directory_id = None if options.directory_id is None else _directory(options.directory_id)
    with open_admin(options, CHANGE_TIMEOUT_S) as admin:
        admin.describe_cluster()  # the question names the node that answers
        if not confirm(options, f"Remove node {options.node_id} from the quorum at {admin.answered_by}?"):
            return EXIT_FAILURE
        admin.remove_voter(options.node_id, directory_id)
    print(f"node {options.node_id} is not a voter any more")
    return EXIT_OK
