"""The metadata of a running cluster, from its committed log: the same form as that of files."""

import argparse

from tidelog.cli import session
from tidelog.cli.channel import ClusterChannel
from tidelog.cli.metadata_reading import Snapshot, StoredMetadata
from tidelog.metadata.snapshot import decode_snapshot
from tidelog.model.errors import CorruptStateError
from tidelog.model.ids import Epoch, NodeId, Offset
from tidelog.raft.membership import Member, Membership
from tidelog.raft.messages import Entry, EntryKind, SnapshotId
from tidelog.rpc.v1 import cluster_pb2 as pb

_KINDS = {
    pb.MetadataEntry.NO_OP: EntryKind.NO_OP,
    pb.MetadataEntry.RECORDS: EntryKind.DATA,
    pb.MetadataEntry.MEMBERSHIP: EntryKind.MEMBERSHIP,
}
TIMEOUT_S = 60.0


def read_live(options: argparse.Namespace) -> StoredMetadata:
    """What is committed now."""
    with ClusterChannel(options) as channel:
        stored = StoredMetadata(channel.address)
        pieces: list[bytes] = []
        parts = channel.stream(
            "Cluster/MetadataRecords",
            pb.MetadataRecordsRequest(allow_stale=True),
            pb.MetadataRecordsResponse,
            timeout_s=options.timeout or TIMEOUT_S,
        )
        for part in parts:
            if part.HasField("stale_ms"):
                stored.stale_ms = part.stale_ms
            if part.HasField("snapshot"):
                pieces.append(part.snapshot.data)
                if part.snapshot.is_last:
                    stored.snapshots.append(_snapshot(part.snapshot, b"".join(pieces)))
                    pieces.clear()
            for entry in part.entries.entries:
                found = Entry(Epoch(entry.epoch), _KINDS[entry.kind], entry.data)
                stored.entries.append((Offset(entry.offset), found, "live"))
        if pieces:
            raise CorruptStateError(f"{channel.address}: a snapshot ended before its last piece")
        quorum = channel.call(
            "Cluster/DescribeQuorum",
            pb.DescribeQuorumRequest(allow_stale=True),
            pb.DescribeQuorumResponse,
            is_read=True,
        )
        if quorum.HasField("stale_ms"):
            stored.stale_ms = max(quorum.stale_ms, stored.stale_ms or 0)
    stored.membership = _membership(quorum)
    session.tell_if_stale(stored.stale_ms, channel.address)
    return stored


def _snapshot(piece: pb.MetadataSnapshotPiece, data: bytes) -> Snapshot:
    found = decode_snapshot(data)
    where = SnapshotId(Offset(piece.end_offset), Epoch(piece.epoch))
    return Snapshot(where, Membership(), found.image, found.pending, "live snapshot")


def _membership(quorum: pb.DescribeQuorumResponse) -> Membership:
    def members(*, are_voters: bool) -> tuple[Member, ...]:
        return tuple(
            Member(NodeId(one.node), one.directory_id, tuple((at.listener, at.address) for at in one.endpoints))
            for one in quorum.members
            if one.is_voter == are_voters
        )

    return Membership(members(are_voters=True), members(are_voters=False))
