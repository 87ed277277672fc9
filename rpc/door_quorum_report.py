"""The controllers' quorum as its active controller describes it; both front doors tell it."""

from __future__ import annotations

from tidelog.metadata.shell import ControllerNode
from tidelog.raft.report import MemberReport, RaftReport
from tidelog.rpc.door import method_named
from tidelog.rpc.door_quorum import QuorumLink
from tidelog.rpc.v1 import cluster_pb2 as pb


async def describe_quorum(link: QuorumLink, *, timeout_ms: int) -> pb.DescribeQuorumResponse:
    """By the active controller, whichever node that is."""

    async def local(controller: ControllerNode) -> pb.DescribeQuorumResponse:
        return await described_by(controller)

    method = method_named("Cluster", "DescribeQuorum")
    found = await link.forward(method, pb.DescribeQuorumRequest(), local, is_repeatable=True, timeout_ms=timeout_ms)
    assert isinstance(found, pb.DescribeQuorumResponse), "the response of its method"
    return found


async def describe_or_recall(link: QuorumLink, *, timeout_ms: int) -> pb.DescribeQuorumResponse:
    """By the active controller, else as this node sees the quorum; `stale_ms` is set then."""
    found, stale_ms = await link.prefer_active(describe_quorum(link, timeout_ms=timeout_ms))
    if stale_ms is None:
        assert isinstance(found, pb.DescribeQuorumResponse), "the response of its method"
        return found
    if link.controller is not None:
        message = quorum_message(link.controller.driver.describe())
    else:
        # A broker alone knows who the controllers are, and no more.
        members = [pb.QuorumMember(node=node, is_voter=True, error="it does not answer") for node in link.controllers()]
        for member in members:
            member.log_end_offset = member.lag = member.silent_ms = -1
        message = pb.DescribeQuorumResponse(node=link.me, role="broker", leader=-1, members=members)
        message.without_leader_ms = stale_ms
    message.stale_ms = stale_ms
    return message


async def described_by(controller: ControllerNode) -> pb.DescribeQuorumResponse:
    await controller.driver.read_index()  # raises unless it leads now
    return quorum_message(controller.driver.describe())


def quorum_message(report: RaftReport) -> pb.DescribeQuorumResponse:
    return pb.DescribeQuorumResponse(
        node=report.node,
        role=report.role.value,
        leader=-1 if report.leader is None else report.leader,
        epoch=report.epoch,
        high_watermark=report.commit,
        log_start_offset=report.log_start,
        log_end_offset=report.log_end,
        durable_end_offset=report.durable_end,
        without_leader_ms=report.without_leader_ms,
        members=[_member_message(member) for member in report.members],
        observers=[pb.QuorumObserver(node=node, offset=offset) for node, offset in report.observers],
        snapshot_offset=report.snapshot.offset,
        snapshot_epoch=report.snapshot.epoch,
    )


def _member_message(member: MemberReport) -> pb.QuorumMember:
    return pb.QuorumMember(
        node=member.node,
        directory_id=member.directory,
        endpoints=[pb.VoterEndpoint(listener=name, address=address) for name, address in member.endpoints],
        is_voter=member.is_voter,
        is_connected=member.is_connected,
        error=member.error or "",
        log_end_offset=-1 if member.match is None else member.match,
        lag=-1 if member.lag is None else member.lag,
        silent_ms=-1 if member.silent_ms is None else member.silent_ms,
        is_recovering=not member.counts,
        stuck_ms=member.stuck_ms or 0,
    )
