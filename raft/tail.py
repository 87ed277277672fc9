"""Serves committed entries to observers: any member serves them, from any offset, to any number of observers.

    observer                       member
       follow(offset, epoch)  ->              the next offset that it needs, and the epoch of the entry before it
                              <-  entries     committed entries from there on, as they commit
                              <-  snapshot    chunks of the newest one, if the entries from there on are gone here
                              <-  alive       nothing new: commit, leader and epoch as the member knows them
                              <-  fenced      the observer's log is of another group, and why; then the stream ends

Frames are msgpack `[kind, 1, [fields]]`. A member that is behind the observer waits until it has caught up, and sends
its position by `alive`: the observer may choose another source, and never moves back.

The member checks a snapshot before it sends the first chunk, and sends `alive` meanwhile. If the snapshot is corrupt,
or cannot be checked, the stream ends: the observer asks another member, or this one again when a new snapshot has been
taken.
"""

from __future__ import annotations

import asyncio
from typing import Any, NamedTuple, Protocol

import msgpack

from tidelog.model.errors import (
    CorruptStateError,
    FencedLeaderEpochError,
    RaftStoppedError,
    StreamBrokenError,
    StreamClosedError,
)
from tidelog.model.ids import Epoch, NodeId, Offset
from tidelog.raft.core import RaftCore
from tidelog.raft.membership import VoterKey
from tidelog.raft.messages import Entry, EntryKind, SnapshotId
from tidelog.world.transport import Stream, Transport

SERVICE = "raft-tail"
ENTRIES_BYTES = 1 << 20
ALIVE_EVERY_MS = 500
GONE_WAIT_MS = 100
"""Backoff after a snapshot that was to be sent is gone."""


class TailEntries(NamedTuple):
    first: Offset
    entries: tuple[Entry, ...]


class TailState(NamedTuple):
    """The group as the member knows it."""

    commit: Offset
    leader: NodeId | None
    epoch: Epoch


class TailPiece(NamedTuple):
    """Raw bytes of a snapshot file."""

    snapshot: SnapshotId
    position: int
    total_bytes: int
    data: bytes


class TailFenced(NamedTuple):
    """The observer follows the log of another group. This is a frame, because a stream that ends carries no reason."""

    why: str


TailFrame = TailEntries | TailPiece | TailState | TailFenced


def encode_frame(frame: TailFrame) -> bytes:
    fields: list[Any]
    match frame:
        case TailEntries(first, entries):
            kind, fields = "entries", [first, [[entry.epoch, int(entry.kind), entry.data] for entry in entries]]
        case TailPiece(snapshot, position, total_bytes, data):
            kind, fields = "snapshot", [snapshot.offset, snapshot.epoch, position, total_bytes, data]
        case TailState(commit, leader, epoch):
            kind, fields = "alive", [commit, leader, epoch]
        case TailFenced(why):
            kind, fields = "fenced", [why]
    return bytes(msgpack.packb([kind, 1, fields]))


def decode_frame(data: bytes) -> TailFrame:
    """Decodes a frame; raises `CorruptStateError`."""
    try:
        kind, _version, fields = msgpack.unpackb(data)
        if kind == "entries":
            first, rows = fields
            entries = tuple(Entry(Epoch(_number(epoch)), EntryKind(kind), _bytes(value)) for epoch, kind, value in rows)
            return TailEntries(Offset(_number(first)), entries)
        if kind == "snapshot":
            offset, epoch, position, total_bytes, piece = fields
            snapshot = SnapshotId(Offset(_number(offset)), Epoch(_number(epoch)))
            return TailPiece(snapshot, _number(position), _number(total_bytes), _bytes(piece))
        if kind == "alive":
            commit, leader, epoch = fields
            known = None if leader is None else NodeId(_number(leader))
            return TailState(Offset(_number(commit)), known, Epoch(_number(epoch)))
        if kind == "fenced":
            (why,) = fields
            return TailFenced(str(why))
    except (ValueError, TypeError, msgpack.UnpackException) as error:
        raise CorruptStateError(f"a tail frame is unreadable: {error}") from error
    raise CorruptStateError(f"a tail frame has the unknown kind {kind!r}")


def _number(value: object) -> int:
    if type(value) is not int or value < 0:
        raise ValueError(f"{value!r} is no number")
    return value


def _bytes(value: object) -> bytes:
    if not isinstance(value, bytes):
        raise ValueError("bytes are needed")
    return value


def encode_follow(offset: Offset, epoch: Epoch) -> bytes:
    return bytes(msgpack.packb(["follow", 1, [offset, epoch]]))


def _decode_follow(data: bytes) -> tuple[Offset, Epoch]:
    try:
        kind, _version, (offset, epoch) = msgpack.unpackb(data)
        if kind == "follow":
            return Offset(_number(offset)), Epoch(_number(epoch))
    except (ValueError, TypeError, msgpack.UnpackException) as error:
        raise CorruptStateError(f"a follow request is unreadable: {error}") from error
    raise CorruptStateError(f"a tail stream begins with {kind!r}")


class TailSource(Protocol):
    """The Raft member whose committed entries a tail serves: `raft.driver.RaftDriver`."""

    me: VoterKey

    @property
    def core(self) -> RaftCore: ...

    def has_leader_contact(self) -> bool: ...

    def check_snapshot(self, snapshot: SnapshotId) -> asyncio.Task[bool]: ...

    async def read_chunk(self, snapshot: SnapshotId, position: int) -> tuple[bytes, int] | None: ...


class Tail:
    """Follows the committed entries of a member. Created by `RaftDriver.tail`; one task calls `next`.

    The creator closes it; otherwise the member wakes it for ever. It also ends when the member stops.
    """

    def __init__(self, driver: TailSource, server: TailServer, offset: Offset, epoch: Epoch) -> None:
        self.offset = offset
        self.epoch = epoch
        self.wake = asyncio.Event()
        self._driver = driver
        self._server = server
        self._is_checked = False
        self._ended: str | None = None
        """Why the tail has ended."""

    def close(self) -> None:
        """Ends the tail: a pending `next` raises. Idempotent."""
        self.end("this tail is closed")
        self._server.forget(self)

    def end(self, why: str) -> None:
        self._ended = self._ended or why
        self.wake.set()

    async def next(self) -> TailEntries | SnapshotId:
        """Returns the next committed entries, at least one; or the snapshot before them, if they are gone here: then
        the tail continues after it. Raises `FencedLeaderEpochError` if the observer's log is of another group, and
        `RaftStoppedError` when the member has stopped or the tail is closed."""
        log = self._driver.core.log
        while True:
            if self._ended is not None:
                raise RaftStoppedError(self._ended)
            commit = self._driver.core.commit
            if self.offset < log.start:
                self.offset, self.epoch = log.snapshot
                self._is_checked = True
                return log.snapshot
            if not self._is_checked and self.offset <= commit:
                self._check()
            if self.offset < commit:
                return self._take(commit)
            self.wake.clear()
            await self.wake.wait()

    def _check(self) -> None:
        here = self._driver.core.log.epoch_before(self.offset)
        if here != self.epoch:
            raise FencedLeaderEpochError(
                f"the committed entry before {self.offset} has epoch {here} here, not {self.epoch}"
            )
        self._is_checked = True

    def _take(self, commit: Offset) -> TailEntries:
        first = self.offset
        entries = self._driver.core.log.slice(first, ENTRIES_BYTES)[: commit - first]
        self.offset, self.epoch = Offset(first + len(entries)), entries[-1].epoch
        return TailEntries(first, entries)


class TailServer:
    """Serves tails to observers over streams, and wakes them on commits."""

    def __init__(self, driver: TailSource, transport: Transport) -> None:
        self._driver = driver
        self._tails: list[tuple[NodeId, Tail]] = []
        self._is_running = False
        transport.serve_stream(SERVICE, self._serve)

    def start(self) -> None:
        self._is_running = True

    def stop(self) -> None:
        self._is_running = False
        tails, self._tails = self._tails, []
        for _, tail in tails:
            tail.end(f"node {self._driver.me.node} has stopped")

    def open(self, offset: Offset, epoch: Epoch, follower: NodeId | None = None) -> Tail:
        tail = Tail(self._driver, self, offset, epoch)
        self._tails.append((self._driver.me.node if follower is None else follower, tail))
        return tail

    def forget(self, tail: Tail) -> None:
        """Called by `Tail.close`."""
        self._tails = [row for row in self._tails if row[1] is not tail]

    def wake(self) -> None:
        for _, tail in self._tails:
            tail.wake.set()

    def describe(self) -> tuple[tuple[NodeId, Offset], ...]:
        return tuple((follower, tail.offset) for follower, tail in self._tails)

    def _state(self) -> TailState:
        core = self._driver.core
        leader = core.leader if self._driver.has_leader_contact() else None
        return TailState(core.commit, leader, core.epoch)

    async def _serve(self, stream: Stream) -> None:
        if not self._is_running:
            return
        try:
            tail = self.open(*_decode_follow(await stream.receive()), stream.peer)
        except StreamClosedError:
            return
        try:
            await stream.send(encode_frame(self._state()))
            await self._follow(stream, tail)
        except FencedLeaderEpochError as error:
            await _send_last(stream, TailFenced(str(error)))
        except (StreamBrokenError, RaftStoppedError):
            return
        finally:
            tail.close()

    async def _follow(self, stream: Stream, tail: Tail) -> None:
        while self._is_running:
            try:
                async with asyncio.timeout(ALIVE_EVERY_MS / 1000):
                    found = await tail.next()
            except TimeoutError:
                await stream.send(encode_frame(self._state()))
                continue
            if isinstance(found, TailEntries):
                await stream.send(encode_frame(found))
            elif not await self._send_snapshot(stream, found):
                if found == self._driver.core.log.snapshot:
                    return  # no snapshot here: the observer tries another member
                tail.offset = Offset(-1)  # a newer one has replaced it: the tail starts over
                await asyncio.sleep(GONE_WAIT_MS / 1000)

    async def _send_snapshot(self, stream: Stream, snapshot: SnapshotId) -> bool:
        """Sends a snapshot; returns False if it is gone or corrupt."""
        checking = self._driver.check_snapshot(snapshot)
        while not (await asyncio.wait([checking], timeout=ALIVE_EVERY_MS / 1000))[0]:
            await stream.send(encode_frame(self._state()))
        if checking.cancelled() or checking.exception() is not None:
            raise RaftStoppedError(f"node {self._driver.me.node} stops")
        position = 0
        while checking.result():
            found = await self._driver.read_chunk(snapshot, position)
            if found is None:
                return False
            data, total_bytes = found
            await stream.send(encode_frame(TailPiece(snapshot, position, total_bytes, data)))
            position += len(data)
            if position >= total_bytes:
                return True
        return False


async def _send_last(stream: Stream, frame: TailFrame) -> None:
    try:
        await stream.send(encode_frame(frame))
    except StreamBrokenError:
        return  # the observer is gone
