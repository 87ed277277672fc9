"""`tidelog quorum describe|add|remove|update-voter`. Keys of the JSON document are listed in docs/cli.md."""

import argparse
import json
import sys
from typing import Any
from uuid import UUID

from tidelog.cli import session, table
from tidelog.cli.channel import ClusterChannel
from tidelog.cli.main import EXIT_OK, EXIT_REFUSED, WrongCallError
from tidelog.model.errors import TidelogError
from tidelog.rpc.v1 import cluster_pb2 as pb
from tidelog.server.listeners import ListenerError, parse_address
from tidelog.server.uuids import from_text, to_text

CHANGE_TIMEOUT_S = 60.0
ANSWER_SLACK_S = 15.0
"""The controller gives up first, and says what it has undone."""
ASK_SLACK_S = 2.0
PROGRESS_S = 1.0
SILENT_MS = 3_000
STUCK_MS = 5_000
"""From then on a member that lags and does not move on is called behind."""


def run_describe(options: argparse.Namespace) -> int:
    with ClusterChannel(options) as channel:
        request = pb.DescribeQuorumRequest(allow_stale=True, timeout_ms=int(channel.timeout_s * 1000))
        found = channel.call(
            "Cluster/DescribeQuorum",
            request,
            pb.DescribeQuorumResponse,
            timeout_s=channel.timeout_s + ASK_SLACK_S,
            is_read=True,
        )
    document = describe_document(found)
    session.tell_if_stale(document["age_ms"], channel.address)
    if options.output == "json":
        print(json.dumps(document, indent=2))
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
            _or_none(member["silent_ms"]),
            member["state"],
        ]
        for member in document["members"]
    ]
    headings = ["node", "is", "directory id", "address", "log end", "lag", "silent ms", "state"]
    table.write(sys.stdout, headings, rows, right=["node", "log end", "lag", "silent ms"])
    if document["observers"]:
        told = ", ".join(f"{one['node']} at {one['offset']}" for one in document["observers"])
        print(f"observers here: {told}")
    return EXIT_OK


def summary(document: dict[str, Any]) -> str:
    """The line above the table of members."""
    leader = document["leader"] if document["leader"] >= 0 else "none"
    pairs = [("epoch", "epoch"), ("high watermark", "high_watermark")]
    pairs += [("log start", "log_start_offset"), ("log end", "log_end_offset")]
    return ", ".join([f"leader {leader}", *(f"{name} {document[key]}" for name, key in pairs)])


def _or_none(value: int) -> int | None:
    return None if value < 0 else value


def _state(member: pb.QuorumMember) -> str:
    """How a member is, in words. Only the active controller knows how far each is."""
    if member.is_recovering:
        return "recovers"
    if member.error:
        return member.error
    if member.lag < 0:
        return "connected"
    if member.silent_ms > SILENT_MS:
        return f"silent for {member.silent_ms / 1000:.0f} s"
    if member.stuck_ms > STUCK_MS:
        return f"behind by {member.lag:,} entries for {member.stuck_ms / 1000:.0f} s: see its log"
    return "good"


def describe_document(found: pb.DescribeQuorumResponse) -> dict[str, Any]:
    names = ("node", "role", "leader", "epoch", "high_watermark", "log_start_offset", "log_end_offset")
    more = ("durable_end_offset", "without_leader_ms", "snapshot_offset", "snapshot_epoch")
    document: dict[str, Any] = {name: getattr(found, name) for name in (*names, *more)}
    document["members"] = [
        {
            "node": member.node,
            "directory_id": to_text(UUID(bytes=member.directory_id)) if member.directory_id else None,
            "endpoints": {one.listener: one.address for one in member.endpoints},
            "is_voter": member.is_voter,
            "is_connected": member.is_connected,
            "error": member.error or None,
            "log_end_offset": member.log_end_offset,
            "lag": member.lag,
            "silent_ms": member.silent_ms,
            "is_recovering": member.is_recovering,
            "stuck_ms": member.stuck_ms,
            "state": _state(member),
        }
        for member in found.members
    ]
    document["observers"] = [{"node": one.node, "offset": one.offset} for one in found.observers]
    document |= session.stale_fields(found.stale_ms if found.HasField("stale_ms") else None)
    return document


def _directory(options: argparse.Namespace) -> bytes:
    if options.directory_id is None:
        return b""
    found = from_text(options.directory_id)
    if found is None:
        raise WrongCallError(f"--directory-id {options.directory_id!r}: an id has 22 characters, see `storage info`")
    return found.bytes


def _endpoints(options: argparse.Namespace) -> list[pb.VoterEndpoint]:
    found = []
    for index, text in enumerate(options.endpoint):
        try:
            address = str(parse_address(text))
        except ListenerError as error:
            raise WrongCallError(f"--endpoint: {error}") from error
        name = options.listener if index == 0 else f"{options.listener}_{index + 1}"
        found.append(pb.VoterEndpoint(listener=name, address=address))
    return found


def _check_node(options: argparse.Namespace) -> None:
    if not 0 <= options.node_id < 1 << 31:
        raise WrongCallError(f"--node-id {options.node_id}: from 0 to {(1 << 31) - 1}")


def run_add(options: argparse.Namespace) -> int:
    _check_node(options)
    timeout_s = options.timeout or CHANGE_TIMEOUT_S
    request = pb.AddVoterRequest(
        node=options.node_id,
        directory_id=_directory(options),
        endpoints=_endpoints(options),
        timeout_ms=int(timeout_s * 1000),
    )
    with ClusterChannel(options) as channel:
        _tell(f"asks node {options.node_id} at {', '.join(options.endpoint)} who it is")
        call = channel.begin("Cluster/AddVoter", request, pb.AddVoterResponse, timeout_s=timeout_s + ANSWER_SLACK_S)
        try:
            said = ""
            while not call.is_done(PROGRESS_S):
                said = _tell_progress(channel, options.node_id, said)
            call.result()
        except KeyboardInterrupt:
            _tell(
                f"the controller goes on adding node {options.node_id}, and removes it again if it has not caught up "
                f"{timeout_s:g} s after it began; see: tidelog quorum describe"
            )
            raise
    print(f"node {options.node_id} is a voter")
    return EXIT_OK


def _tell(message: str) -> None:
    print(f"tidelog: {message}", file=sys.stderr, flush=True)


def _tell_progress(channel: ClusterChannel, node: int, said: str) -> str:
    """How far a learner has come; only what is new is printed."""
    try:
        found = channel.call(
            "Cluster/DescribeQuorum",
            pb.DescribeQuorumRequest(),
            pb.DescribeQuorumResponse,
            timeout_s=PROGRESS_S,
            is_read=True,
        )
    except TidelogError:
        return said  # the outcome of the change is told by its own answer
    rows = [member for member in found.members if member.node == node and member.log_end_offset >= 0]
    text = f"node {node} has {rows[0].log_end_offset:,} of {found.log_end_offset:,} entries" if rows else said
    if text != said:
        _tell(text)
    return text


def _change(options: argparse.Namespace, channel: ClusterChannel, name: str, request: Any, response: Any) -> None:
    timeout_s = options.timeout or CHANGE_TIMEOUT_S
    request.timeout_ms = int(timeout_s * 1000)
    channel.call(f"Cluster/{name}", request, response, timeout_s=timeout_s + ANSWER_SLACK_S)


def run_update_voter(options: argparse.Namespace) -> int:
    _check_node(options)
    request = pb.UpdateVoterRequest(
        node=options.node_id, directory_id=_directory(options), endpoints=_endpoints(options)
    )
    with ClusterChannel(options) as channel:
        _change(options, channel, "UpdateVoter", request, pb.UpdateVoterResponse)
    print(f"node {options.node_id} is at {', '.join(options.endpoint)}")
    return EXIT_OK


def run_remove(options: argparse.Namespace) -> int:
    _check_node(options)
    request = pb.RemoveVoterRequest(node=options.node_id, directory_id=_directory(options))
    with ClusterChannel(options) as channel:
        if not options.yes and sys.stdin.isatty():
            print(
                f"Take node {options.node_id} out of the quorum at {channel.address}? [y/N] ", end="", file=sys.stderr
            )
            sys.stderr.flush()
            if sys.stdin.readline().strip().lower() not in ("y", "yes"):
                print("tidelog: nothing was changed", file=sys.stderr)
                return EXIT_REFUSED
        _change(options, channel, "RemoveVoter", request, pb.RemoveVoterResponse)
    print(f"node {options.node_id} is no voter any more")
    return EXIT_OK
