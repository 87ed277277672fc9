"""The metadata in a stopped node's files: snapshots and entries, each checked. Only reads; what is bad is named.

    <directory>/raft/       of a controller: snapshots, and the log `__cluster_metadata` (`raft.storage`)
    <directory>/metadata/   of a broker: snapshots, and tail files (`metadata.tail`)

A file that ends in the middle of a write is what a crash leaves, and is a note. Anything else that does not check is a
problem. The end of a controller's log may hold entries that were never committed: only a leader knows.
"""

import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from tidelog.cli.files import LogDirectory, ReadOnlyFile
from tidelog.cli.main import UsageError
from tidelog.log.dump import FileKind, Problem, parse_name, read_batches
from tidelog.metadata.image import ClusterImage
from tidelog.metadata.records import Record, decode_records
from tidelog.metadata.replay import Replay
from tidelog.metadata.snapshot import decode_snapshot, image_records
from tidelog.metadata.tail import decode_entries as decode_tail
from tidelog.model.errors import CorruptStateError, TidelogError
from tidelog.model.ids import Epoch, Offset
from tidelog.raft.directory_identity import ROOT
from tidelog.raft.entries import CorruptEntriesError, decode_entries
from tidelog.raft.membership import Membership
from tidelog.raft.messages import Entry, EntryKind, SnapshotId
from tidelog.raft.snapshots import decode_file
from tidelog.raft.snapshots import parse_name as parse_snapshot_name
from tidelog.raft.storage import METADATA_LOG_PATH

TAIL_DIRECTORY = "metadata"
_LOG_NAME = os.path.basename(METADATA_LOG_PATH)


class Line(NamedTuple):
    """One record, as `metadata dump` prints it."""

    offset: int
    epoch: int
    record: Record | Membership | None
    """None: an entry without content, which begins an epoch."""
    source: str


@dataclass(slots=True)
class Snapshot:
    id: SnapshotId
    membership: Membership
    image: ClusterImage
    pending: tuple[Record, ...] | None
    name: str


@dataclass(slots=True)
class StoredMetadata:
    """What the files hold."""

    path: str
    snapshots: list[Snapshot] = field(default_factory=list)
    """The sound ones, oldest first."""
    entries: list[tuple[Offset, Entry, str]] = field(default_factory=list)
    membership: Membership | None = None
    """Who votes, where the entries do not say it."""
    problems: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    stale_ms: int | None = None
    """Age of what a running node without an active controller knows."""

    def lines(self) -> Iterator[Line]:
        """Every record: those of the snapshot before the first entry, then the entries."""
        start = self.entries[0][0] if self.entries else None
        base = next((one for one in self.snapshots if start is None or one.id.offset >= start), None)
        first = 0
        if base is not None and base.id.offset > 0:
            first = base.id.offset
            for record in (*image_records(base.image), *(base.pending or ())):
                yield Line(base.id.offset - 1, base.id.epoch, record, base.name)
        for offset, entry, name in self.entries:
            if offset >= first:
                yield from self._entry_lines(offset, entry, name)

    def _entry_lines(self, offset: Offset, entry: Entry, name: str) -> Iterator[Line]:
        try:
            if entry.kind is EntryKind.MEMBERSHIP:
                yield Line(offset, entry.epoch, Membership.decode(entry.data), name)
            elif entry.kind is EntryKind.NO_OP:
                yield Line(offset, entry.epoch, None, name)
            else:
                for record in decode_records(entry.data):
                    yield Line(offset, entry.epoch, record, name)
        except CorruptStateError as error:
            self.problems.append(f"{name}: offset {offset}: {error}")

    def state(self) -> "MetadataState":
        """The newest sound snapshot and the entries that continue it."""
        newest = self.snapshots[-1] if self.snapshots else None
        replay = Replay(ClusterImage() if newest is None else newest.image, None if newest is None else newest.pending)
        membership = Membership() if newest is None else newest.membership
        end, epoch = (Offset(0), Epoch(0)) if newest is None else newest.id
        for offset, entry, name in self.entries:
            if offset < end:
                continue
            if offset > end:
                self.problems.append(f"{name}: entries {end} to {offset - 1} are missing; what follows is left out")
                break
            try:
                if entry.kind is EntryKind.MEMBERSHIP:
                    membership = Membership.decode(entry.data)
                elif entry.kind is EntryKind.DATA:
                    replay.apply(decode_records(entry.data))
            except (TidelogError, KeyError, AssertionError, TypeError) as error:
                self.problems.append(f"{name}: the entry at {offset} cannot be applied: {error!r}")
                break
            end, epoch = Offset(offset + 1), entry.epoch
        return MetadataState(replay.image, end, epoch, self.membership or membership)


@dataclass(frozen=True, slots=True)
class MetadataState:
    """The cluster's state up to an offset."""

    image: ClusterImage
    offset: int
    epoch: int
    membership: Membership


def read_stored(path: str, copy: str | None) -> StoredMetadata:
    """`path` is a node's directory, one of the two inside of it, or one file."""
    if not os.path.exists(path):
        raise UsageError(f"{path}: no such file or directory")
    stored = StoredMetadata(path)
    if os.path.isfile(path):
        _read_one(stored, path)
        return stored
    directory = _choose(path, copy)
    for name in sorted(os.listdir(directory)):
        where = os.path.join(directory, name)
        if parse_snapshot_name(name) is not None:
            _read_snapshot(stored, where)
        elif name.endswith(".corrupt"):
            stored.problems.append(f"{where}: was set aside as damaged by the node")
    log = os.path.join(directory, _LOG_NAME)
    if os.path.isdir(log):
        _read_log(stored, log)
    tails = [name for name in sorted(os.listdir(directory)) if name.endswith(".tail")]
    for name in tails:
        _read_tail(stored, os.path.join(directory, name))
    stored.snapshots.sort(key=lambda one: one.id)
    return stored


def _choose(path: str, copy: str | None) -> str:
    if os.path.basename(os.path.normpath(path)) in (ROOT, TAIL_DIRECTORY) and not _copies(path):
        return path
    copies = _copies(path)
    if not copies:
        raise UsageError(f"{path}: no metadata here; use the metadata directory of a node")
    if copy is not None and copy not in copies:
        raise UsageError(f"--copy {copy}: {path} has that of a {' and a '.join(copies)} only")
    return copies[copy] if copy is not None else next(iter(copies.values()))


def _copies(path: str) -> dict[str, str]:
    places = {"controller": os.path.join(path, ROOT), "broker": os.path.join(path, TAIL_DIRECTORY)}
    return {name: where for name, where in places.items() if os.path.isdir(where)}


def _read_one(stored: StoredMetadata, path: str) -> None:
    name = os.path.basename(path)
    parsed = parse_name(name)
    if parse_snapshot_name(name.removesuffix(".corrupt")) is not None:
        _read_snapshot(stored, path)
    elif parsed is not None and parsed[0] is FileKind.SEGMENT:
        file = ReadOnlyFile(path)
        try:
            _read_segment(stored, name, file, is_last=True)
        finally:
            file.close()
    elif name.endswith(".tail"):
        _read_tail(stored, path)
    else:
        raise UsageError(f"{path}: not a file of metadata (.snapshot, .log or .tail)")


def _read_snapshot(stored: StoredMetadata, path: str) -> None:
    try:
        with open(path, "rb") as file:
            found = decode_file(file.read(), path=path)
        if found.data:
            inner = decode_snapshot(found.data)
            image, pending = inner.image, inner.pending
        else:
            image, pending = ClusterImage(), None
    except TidelogError as error:
        stored.problems.append(str(error) if path in str(error) else f"{path}: {error}")
        return
    stored.snapshots.append(Snapshot(found.id, found.membership, image, pending, os.path.basename(path)))


def _read_log(stored: StoredMetadata, path: str) -> None:
    with LogDirectory(path) as directory:
        names = [name for name in directory.files if (parse_name(name) or (None,))[0] is FileKind.SEGMENT]
        for name in names:
            _read_segment(stored, name, directory.files[name], is_last=name == names[-1])


def _read_segment(stored: StoredMetadata, name: str, file: ReadOnlyFile, *, is_last: bool) -> None:
    for batch in read_batches(file, name):
        if isinstance(batch, Problem):
            is_torn = is_last and batch.what.startswith("torn")
            (stored.notes if is_torn else stored.problems).append(str(batch))
            return
        try:
            first = Offset(batch.header.base_offset)
            for offset, entry in decode_entries(batch.data, first=first, last_epoch=Epoch(0)):
                stored.entries.append((offset, entry, name))
        except CorruptEntriesError as error:
            stored.problems.append(f"{name}: byte {batch.position}: {error}")


def _read_tail(stored: StoredMetadata, path: str) -> None:
    name = os.path.basename(path)
    with open(path, "rb") as file:
        data = file.read()
    entries, good = decode_tail(data)
    stored.entries += [(offset, entry, name) for offset, entry in entries]
    if good < len(data):
        rest = data[good:]
        if len(rest) < 8 or len(rest) < 8 + int.from_bytes(rest[:4], "big") or not any(rest):
            stored.notes.append(f"{name}: its last {len(rest)} bytes were never finished")
        else:
            stored.problems.append(f"{name}: byte {good}: a frame fails its CRC; what follows is left out")
