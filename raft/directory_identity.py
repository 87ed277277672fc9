"""The identity of a directory: formatting writes it, and every start checks it. Pure.

It is stored twice, as `raft/format` in the state store and as the file `raft/identity`, to distinguish a new directory
from one that has lost its store. The file is written last: where it exists, there must be a store. The next start
repairs a crash before that.

    store       file        meaning
    nothing     nothing     not formatted
    nothing     something   lost: it may have voted, and the vote is unknown
    ours        nothing     formatted up to the last step: the file is written
    ours        the same    ours
    another's   anything    of another node or cluster: rejected
    ours        another's   files and store are mixed up: rejected
"""

from contextlib import closing

from tidelog.model.errors import (
    CorruptStateError,
    LostStateError,
    StorageError,
    UnformattedDirectoryError,
    WrongDirectoryError,
)
from tidelog.model.ids import NodeId
from tidelog.raft.persistent_state import Identity, pack, unpack
from tidelog.world.disk import Disk
from tidelog.world.store import StateStore

ROOT = "raft"
IDENTITY = f"{ROOT}/identity"
FORMAT_KEY = b"raft/format"


def lost(disk: Disk, why: str) -> LostStateError:
    return LostStateError(
        f"{disk.label} was formatted, but {why}: the vote of this node is unknown, and it must not vote "
        "again under this directory id. Remove this voter (`tidelog quorum remove`), empty the directory, format it "
        "with --no-initial-controllers, start the node and add it with its new directory id (`tidelog quorum add`).",
        path=disk.label,
    )


def read(disk: Disk, store: StateStore, key: bytes) -> bytes | None:
    try:
        return store.get(key)
    except CorruptStateError as error:
        raise lost(disk, f"{key.decode()} is unreadable ({error})") from error


def check_unformatted(disk: Disk, store: StateStore) -> None:
    if store.get(FORMAT_KEY) is not None:
        raise StorageError(f"{disk.label} is formatted already", path=disk.label)
    if disk.exists(IDENTITY):
        raise lost(disk, "its state store is gone")


def pack_identity(identity: Identity) -> bytes:
    """Returns the value in the store."""
    return pack("format", [identity.cluster_id, identity.directory, identity.node])


async def write_identity(disk: Disk, identity: Identity) -> None:
    disk.remove(IDENTITY + ".new")
    with closing(disk.open(IDENTITY + ".new", create=True)) as file:
        file.append(identity.text().encode())
        await disk.sync_many([file])
    disk.rename(IDENTITY + ".new", IDENTITY)
    await disk.sync_many([], [ROOT])


async def check_identity(disk: Disk, store: StateStore, *, cluster_id: str, node: NodeId) -> Identity:
    """Returns the identity, or raises by the table above."""
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
    with closing(disk.open(IDENTITY)) as file:
        text = file.read(0, file.size)
    if text != identity.text().encode():
        raise WrongDirectoryError(
            f"{disk.label}: its files and its state store belong to different directories", path=disk.label
        )
    return identity
