"""Snapshot files: one file holds the whole state up to an offset, and the membership that was in force there. Pure.

    name      %020d-%010d.snapshot     offset, epoch of the last entry below it

    position      bytes  field
    0             8      magic "TLSNAP01"
    8             4      length of the header, big endian as all numbers
    12            4      CRC-32C of the header
    16            n      header: msgpack ["snapshot", 1, {offset, epoch, membership, bytes}]
    16 + n               chunks, each: 4 length (1 to CHUNK_BYTES), 4 CRC-32C of the data, data
                  4      0, the end of the chunks
                  4      CRC-32C of everything before it
    end

A file gets its name when it is complete and durable: it is written as `.new` (taken here) or `.part` (received), then
synced, renamed, and the directory synced. So a file with the right name and wrong bytes was damaged by the disk. It is
renamed to `.corrupt`, never removed: it may be the best copy that is left.

Readers check everything: magic, header, each chunk, the whole, and that name and header agree. The checks run in
`Work`. A transfer sends raw bytes of the file; the receiver checks the whole before it gives it a name.
"""

import re
from collections.abc import Iterable
from contextlib import closing
from struct import Struct
from typing import NamedTuple

import msgpack
from crc32c import crc32c

from tidelog.model.errors import CorruptStateError, DiskFullError, WorkFailedError
from tidelog.model.ids import Epoch, Offset
from tidelog.raft.membership import Membership
from tidelog.raft.messages import SnapshotChunk, SnapshotId
from tidelog.world.disk import Disk, File
from tidelog.world.work import Work

MAGIC = b"TLSNAP01"
CHUNK_BYTES = 256 << 10
TRANSFER_BYTES = 256 << 10
SNAPSHOT_BYTES_MAX = 4 << 30

_PREFIX = Struct(">8sII")
_CHUNK = Struct(">II")
_NAME = re.compile(r"(\d{20})-(\d{10})\.snapshot")
_LEFT_OVER = (".new", ".part")


class Snapshot(NamedTuple):
    """A snapshot that was read and checked."""

    id: SnapshotId
    membership: Membership
    data: bytes


def file_name(snapshot: SnapshotId) -> str:
    return f"{snapshot.offset:020d}-{snapshot.epoch:010d}.snapshot"


def parse_name(name: str) -> SnapshotId | None:
    match = _NAME.fullmatch(name)
    return SnapshotId(Offset(int(match[1])), Epoch(int(match[2]))) if match else None


def encode_file(snapshot: SnapshotId, membership: Membership, data: bytes) -> list[bytes]:
    """Returns the file's bytes, as buffers to be written one after the other."""
    fields = {"offset": snapshot.offset, "epoch": snapshot.epoch, "membership": membership.encode(), "bytes": len(data)}
    header: bytes = msgpack.packb(["snapshot", 1, fields])
    buffers = [_PREFIX.pack(MAGIC, len(header), crc32c(header)), header]
    for start in range(0, len(data), CHUNK_BYTES):
        chunk = data[start : start + CHUNK_BYTES]
        buffers += [_CHUNK.pack(len(chunk), crc32c(chunk)), chunk]
    buffers.append(bytes(4))
    whole = 0
    for buffer in buffers:
        whole = crc32c(buffer, whole)
    buffers.append(whole.to_bytes(4, "big"))
    return buffers


def decode_file(data: bytes, *, path: str) -> Snapshot:
    """Returns the snapshot in these bytes; `CorruptStateError` names the first problem."""
    view = memoryview(data)
    if len(data) < _PREFIX.size + 8:
        raise _corrupt(path, f"{len(data)} bytes are too few")
    magic, header_bytes, header_crc = _PREFIX.unpack_from(data)
    position = _PREFIX.size + header_bytes
    if magic != MAGIC or position + 8 > len(data):
        raise _corrupt(path, "it has no snapshot header")
    header = view[_PREFIX.size : position]
    if crc32c(header) != header_crc:
        raise _corrupt(path, "its header fails its CRC")
    if crc32c(view[:-4]) != int.from_bytes(view[-4:], "big"):
        raise _corrupt(path, "the file fails its CRC")
    snapshot, membership, size = _parse_header(bytes(header), path)
    chunks: list[bytes] = []
    while True:
        length = int.from_bytes(view[position : position + 4], "big")
        if length == 0:
            break
        if position + _CHUNK.size + length > len(data) - 8:
            raise _corrupt(path, f"a chunk at {position} reaches past the end")
        _, crc = _CHUNK.unpack_from(data, position)
        chunk = bytes(view[position + _CHUNK.size : position + _CHUNK.size + length])
        if crc32c(chunk) != crc:
            raise _corrupt(path, f"the chunk at {position} fails its CRC")
        chunks.append(chunk)
        position += _CHUNK.size + length
    if position + 8 != len(data) or sum(map(len, chunks)) != size:
        raise _corrupt(path, "it has more or fewer bytes than it says")
    return Snapshot(snapshot, membership, b"".join(chunks))


def _parse_header(header: bytes, path: str) -> tuple[SnapshotId, Membership, int]:
    try:
        kind, version, fields = msgpack.unpackb(header)
        snapshot = SnapshotId(Offset(int(fields["offset"])), Epoch(int(fields["epoch"])))
        membership, size = Membership.decode(fields["membership"]), int(fields["bytes"])
    except (ValueError, KeyError, TypeError, msgpack.UnpackException) as error:
        raise _corrupt(path, f"its header is unreadable: {error}") from error
    if kind != "snapshot" or version != 1:
        raise _corrupt(path, f"it is a {kind} of version {version}")
    return snapshot, membership, size


def _corrupt(path: str, why: str) -> CorruptStateError:
    return CorruptStateError(f"snapshot {path}: {why}", path=path)


def read_file(disk: Disk, path: str) -> Snapshot:
    """Reads and checks a snapshot; blocks, for `Work`."""
    with closing(disk.open(path)) as file:
        return decode_file(file.read(0, file.size), path=path)


def check_file(disk: Disk, path: str) -> SnapshotId:
    """Like `read_file`, without returning the state."""
    return read_file(disk, path).id


class SnapshotFiles:
    """The snapshots in one directory of a disk. One task writes (takes or receives) at a time.

    Methods that check a file raise `WorkFailedError` if the helper process died: that says nothing about the file.

    Invariant: `ids` are the files that have a snapshot's name, oldest first.
    """

    def __init__(self, disk: Disk, work: Work, path: str) -> None:
        self._disk = disk
        self._work = work
        self._path = path
        self._part: tuple[SnapshotId, File] | None = None
        self.ids: list[SnapshotId] = []

    def path_of(self, snapshot: SnapshotId) -> str:
        return f"{self._path}/{file_name(snapshot)}"

    def open(self) -> None:
        """Lists the snapshots; removes what an interrupted write left."""
        for name in self._disk.list(self._path):
            if name.endswith(_LEFT_OVER):
                self._disk.remove(f"{self._path}/{name}")
        found = (parse_name(name) for name in self._disk.list(self._path))
        self.ids = sorted(snapshot for snapshot in found if snapshot is not None)

    def close(self) -> None:
        self._drop_part()

    async def read(self, snapshot: SnapshotId) -> Snapshot:
        """Returns the snapshot, checked; `CorruptStateError` if it is damaged, or not the one that its name says."""
        path = self.path_of(snapshot)
        read = await self._work.run(read_file, self._disk, path)
        if read.id != snapshot:
            raise _corrupt(path, f"it holds the snapshot {read.id.offset}-{read.id.epoch}")
        return read

    async def check(self, snapshot: SnapshotId) -> None:
        """Like `read`, without the state."""
        path = self.path_of(snapshot)
        found = await self._work.run(check_file, self._disk, path)
        if found != snapshot:
            raise _corrupt(path, f"it holds the snapshot {found.offset}-{found.epoch}")

    async def write(self, snapshot: SnapshotId, membership: Membership, data: bytes) -> None:
        """Writes a snapshot; it is durable under its name when this returns. Replaces one of the same name."""
        path = self.path_of(snapshot)
        self._disk.remove(path + ".new")
        file = self._disk.open(path + ".new", create=True)
        try:
            file.append(*encode_file(snapshot, membership, data))
            await self._disk.sync_many([file])
        except DiskFullError:
            self._disk.remove(path + ".new")
            raise
        finally:
            file.close()
        await self._name(path + ".new", snapshot)

    async def _name(self, source: str, snapshot: SnapshotId) -> None:
        self._disk.rename(source, self.path_of(snapshot))
        await self._disk.sync_many([], [self._path])
        if snapshot not in self.ids:
            self.ids = sorted([*self.ids, snapshot])

    async def name_again(self, snapshot: SnapshotId) -> None:
        """Makes the name of a snapshot durable that a former process may have failed to sync: it is visible, but the
        next sync writes only what changes from now on. After a crash in between the snapshot is gone."""
        self._disk.rename(self.path_of(snapshot), self.path_of(snapshot) + ".new")
        await self._name(self.path_of(snapshot) + ".new", snapshot)

    async def remove(self, snapshots: Iterable[SnapshotId]) -> None:
        for snapshot in snapshots:
            self._disk.remove(self.path_of(snapshot))
            self.ids.remove(snapshot)
        await self._disk.sync_many([], [self._path])

    async def set_aside(self, snapshot: SnapshotId) -> str:
        """Renames a corrupt file and keeps its bytes; returns its new path."""
        kept = self.path_of(snapshot) + ".corrupt"
        self._disk.rename(self.path_of(snapshot), kept)
        self.ids.remove(snapshot)  # before the sync: another reader of the file must see that it is gone
        await self._disk.sync_many([], [self._path])
        return kept

    # Transfer.

    async def read_chunk(self, snapshot: SnapshotId, position: int) -> tuple[bytes, int] | None:
        """Returns raw bytes of the file from `position`, and its size; None if it is gone."""
        if snapshot not in self.ids:
            return None
        with closing(self._disk.open(self.path_of(snapshot))) as file:
            return await file.read_async(position, TRANSFER_BYTES), file.size

    async def write_chunk(self, chunk: SnapshotChunk) -> int | Snapshot:
        """Stores a received chunk. Returns the next position or, after the last chunk, the snapshot: checked, durable,
        under its name. Raises `CorruptStateError` if the received bytes are not a sound snapshot of this id."""
        if chunk.position == 0:
            self._drop_part()
            path = self.path_of(chunk.snapshot) + ".part"
            self._disk.remove(path)
            self._part = (chunk.snapshot, self._disk.open(path, create=True))
        if self._part is None or self._part[0] != chunk.snapshot:
            return 0
        file = self._part[1]
        if file.size != chunk.position:
            return file.size
        if not 0 < chunk.total_bytes <= SNAPSHOT_BYTES_MAX or chunk.position + len(chunk.data) > chunk.total_bytes:
            self._drop_part()
            raise _corrupt(file.path, f"a chunk at {chunk.position} exceeds its {chunk.total_bytes} bytes")
        file.append(chunk.data)
        if file.size < chunk.total_bytes:
            return file.size
        return await self._finish_part(chunk.snapshot, file)

    async def _finish_part(self, snapshot: SnapshotId, file: File) -> Snapshot:
        await self._disk.sync_many([file])
        try:
            found = await self._work.run(read_file, self._disk, file.path)
            if found.id != snapshot:
                raise _corrupt(file.path, f"it holds the snapshot {found.id.offset}-{found.id.epoch}")
        except (CorruptStateError, WorkFailedError):
            self._drop_part()  # a complete part without a name would block the next one
            raise
        file.close()
        self._part = None
        await self._name(file.path, snapshot)
        return found

    def _drop_part(self) -> None:
        if self._part is not None:
            self._part[1].close()
            self._disk.remove(self._part[1].path)
            self._part = None
