"""Reads the metadata of a running cluster from its committed log, in the form that files have."""

import argparse

from tidelog.cli.clients import open_admin
from tidelog.cli.messages import report_if_stale
from tidelog.cli.metadata_reading import Snapshot, StoredMetadata
from tidelog.client.admin.values import MetadataSnapshot, QuorumDescription
from tidelog.metadata.snapshot import decode_snapshot
from tidelog.model.ids import Epoch, NodeId, Offset
from tidelog.raft.membership import Member, Membership
from tidelog.raft.messages import Entry, EntryKind, SnapshotId

_KINDS = {"no-op": EntryKind.NO_OP, "records": EntryKind.DATA, "membership": EntryKind.MEMBERSHIP}
TIMEOUT_S = 60.0


def read_live(options: argparse.Namespace) -> StoredMetadata:
    """Reads the committed log."""
    with open_admin(options, default_s=TIMEOUT_S) as admin:
        quorum = admin.describe_quorum(allow_stale=True)
        log = admin.read_metadata_log(allow_stale=True)
        stored = StoredMetadata(admin.answered_by)
        stored.stale_ms = admin.stale_ms
    if log.snapshot is not None:
        stored.snapshots.append(_snapshot(log.snapshot))
    for row in log.entries:
        stored.entries.append((Offset(row.offset), Entry(Epoch(row.epoch), _KINDS[row.kind], row.data), "live"))
    stored.membership = _membership(quorum)
    report_if_stale(stored.stale_ms, admin.answered_by)
    return stored


def _snapshot(snapshot: MetadataSnapshot) -> Snapshot:
    state = decode_snapshot(snapshot.data)
    snapshot_id = SnapshotId(Offset(snapshot.end_offset), Epoch(snapshot.epoch))
    return Snapshot(snapshot_id, Membership(), state.image, state.pending, "live snapshot")


def _membership(quorum: QuorumDescription) -> Membership:
    def members(*, are_voters: bool) -> tuple[Member, ...]:
        return tuple(
            Member(
                NodeId(member.node),
                b"" if member.directory_id is None else member.directory_id.bytes,
                tuple(member.endpoints.items()),
            )
            for member in quorum.members
            if member.is_voter == are_voters
        )

    return Membership(members(are_voters=True), members(are_voters=False))
