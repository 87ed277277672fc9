"""Whose directory it is: the identity that formatting writes, and the checks that every start begins with.

It stands in two places, `raft/format` in the state store and `raft/identity` among the files, so that a directory that
is new can be told from one that has lost its store. The file is written last: where it stands, there must be a store. A
crash before it is mended at the next start.

    store       file        what it is
    nothing     nothing     not formatted
    nothing     something   lost: what it voted for is not known (R11)
    ours        nothing     formatted up to the last step: the file is written
    ours        the same    ours
    another's   anything    of another node or cluster: refused
    ours        another's   files and store were mixed up: refused
"""

from __future__ import annotations

from tidelog.model.errors import (
    CorruptStateError,
    LostStateError,
    StorageError,
    UnformattedDirectoryError,
    WrongDirectoryError,
)
from tidelog.model.ids import NodeId
from tidelog.raft.stored import Identity, pack, unpack
from tidelog.world.disk import Disk
from tidelog.world.store import StateStore

ROOT = "raft"
IDENTITY = f"{ROOT}/identity"
FORMAT_KEY = b"raft/format"


def lost(disk: Disk, why: str) -> LostStateError:
    return LostStateError(
        f"{disk.label} was formatted, but {why}: what this node voted for is not known, and it must not vote "
        "again under this directory id. Remove this voter (`tidelog quorum remove`), empty the directory, format it "
        "with --no-initial-controllers, start the node and add it with its new directory id (`tidelog quorum add`).",
        path=disk.label,
    )


def read(disk: Disk, store: StateStore, key: bytes) -> bytes | None:
    try:
        return store.get(key)
    except CorruptStateError as error:
        raise lost(disk, f"{key.decode()} cannot be read ({error})") from error


def check_unformatted(disk: Disk, store: StateStore) -> None:
    if store.get(FORMAT_KEY) is not None:
        raise StorageError(f"{disk.label} is formatted already", path=disk.label)
    if disk.exists(IDENTITY):
        raise lost(disk, "its state store is gone")


def pack_identity(identity: Identity) -> bytes:
    """What stands in the store."""
    return pack("format", [identity.cluster_id, identity.directory, identity.node])


async def write_identity(disk: Disk, identity: Identity) -> None:
    disk.remove(IDENTITY + ".new")
    file = disk.open(IDENTITY + ".new", create=True)
    try:
        file.append(identity.text().encode())
        await disk.sync_many([file])
    finally:
        file.close()
    disk.rename(IDENTITY + ".new", IDENTITY)
    await disk.sync_many([], [ROOT])


async def check_identity(disk: Disk, store: StateStore, *, cluster_id: str, node: NodeId) -> Identity:
    """See the table above: the identity, or what is wrong with it."""
    stored = read(disk, store, FORMAT_KEY)
    if stored is None:
        if disk.exists(IDENTITY):
            raise lost(disk, "its state store is gone")
        raise UnformattedDirectoryError(
            f"{disk.label} is not formatted: run `tidelog storage format` first", path=disk.label
        )
    of_cluster, directory, of_node = unpack("format", stored)
    identity = Identity(of_cluster, directory, NodeId(of_node))
    if (identity.cluster_id, identity.node) != (cluster_id, node):
        raise WrongDirectoryError(
            f"{disk.label} belongs to node {of_node} of cluster {of_cluster}, "
            f"this is node {node} of cluster {cluster_id}",
            path=disk.label,
        )
    if not disk.exists(IDENTITY):
        disk.make_directory(ROOT)
        await write_identity(disk, identity)
    file = disk.open(IDENTITY)
    try:
        text = file.read(0, file.size)
    finally:
        file.close()
    if text != identity.text().encode():
        raise WrongDirectoryError(
            f"{disk.label}: its files and its state store are not of one directory", path=disk.label
        )
    return identity
