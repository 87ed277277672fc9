"""Committed entries for those who do not vote: any member serves them, from any offset, to as many as ask.

    observer                       member
       follow(offset, epoch)  ->              the next offset it wants, and the epoch of the entry before that
                              <-  entries     committed ones from there on, as they commit
                              <-  snapshot    pieces of the newest one, if the entries from there on are gone here
                              <-  alive       nothing new: commit, leader and epoch as the member sees them
                              <-  fenced      what the observer has is not of this log, and why; then the stream ends

Frames are msgpack `[kind, 1, [fields]]`. A member that is behind the observer waits until it has caught up, and says by
`alive` how far it is: the observer may choose another source, and never moves back.

A snapshot is checked before its first piece is sent, with `alive` meanwhile. If it is spoilt, or the check cannot be
made, the stream ends: the observer asks another member, or this one again when a new snapshot has been taken (R19).
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import msgpack

from tidelog.model.errors import (
    CorruptStateError,
    FencedLeaderEpochError,
    RaftStoppedError,
    StreamBrokenError,
    StreamClosedError,
)
from tidelog.model.ids import Epoch, NodeId, Offset
from tidelog.raft.messages import Entry, EntryKind, SnapshotId
from tidelog.world.transport import Stream, Transport

if TYPE_CHECKING:
    from tidelog.raft.driver import RaftDriver

SERVICE = "raft-tail"
ENTRIES_BYTES = 1 << 20
ALIVE_EVERY_MS = 500
GONE_WAIT_MS = 100
"""After a snapshot that was to be sent is gone."""


class TailEntries(NamedTuple):
    first: Offset
    entries: tuple[Entry, ...]


class TailState(NamedTuple):
    """How the member sees the group."""

    commit: Offset
    leader: NodeId | None
    epoch: Epoch


class TailPiece(NamedTuple):
    """Raw bytes of a snapshot's file."""

    snapshot: SnapshotId
    position: int
    total_bytes: int
    data: bytes


class TailFenced(NamedTuple):
    """What the observer has is not of this log. A frame of its own, since a stream that ends does not say why."""

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
    """`CorruptStateError` for bytes that are no frame."""
    try:
        kind, _version, fields = msgpack.unpackb(data)
        if kind == "entries":
            rows = [Entry(Epoch(int(epoch)), EntryKind(kind), bytes(value)) for epoch, kind, value in fields[1]]
            return TailEntries(Offset(int(fields[0])), tuple(rows))
        if kind == "snapshot":
            offset, epoch, position, total_bytes, piece = fields
            return TailPiece(
                SnapshotId(Offset(int(offset)), Epoch(int(epoch))), int(position), int(total_bytes), bytes(piece)
            )
        if kind == "alive":
            commit, leader, epoch = fields
            return TailState(Offset(int(commit)), None if leader is None else NodeId(int(leader)), Epoch(int(epoch)))
        if kind == "fenced":
            return TailFenced(str(fields[0]))
    except (ValueError, TypeError, IndexError, msgpack.UnpackException) as error:
        raise CorruptStateError(f"a frame of a tail cannot be read: {error}") from error
    raise CorruptStateError(f"a frame of a tail is of kind {kind!r}")


def encode_follow(offset: Offset, epoch: Epoch) -> bytes:
    return bytes(msgpack.packb(["follow", 1, [offset, epoch]]))


def _decode_follow(data: bytes) -> tuple[Offset, Epoch]:
    try:
        kind, _version, (offset, epoch) = msgpack.unpackb(data)
        if kind == "follow":
            return Offset(int(offset)), Epoch(int(epoch))
    except (ValueError, TypeError, msgpack.UnpackException) as error:
        raise CorruptStateError(f"a request to follow cannot be read: {error}") from error
    raise CorruptStateError(f"a stream of a tail begins with {kind!r}")


class Tail:
    """Follows the committed entries of a member. Made by `RaftDriver.tail`; one task calls `next`.

    Whoever made it closes it, or the member wakes it for ever. It also ends when the member stops.
    """

    def __init__(self, driver: RaftDriver, server: TailServer, offset: Offset, epoch: Epoch) -> None:
        self.offset = offset
        self.epoch = epoch
        self.wake = asyncio.Event()
        self._driver = driver
        self._server = server
        self._is_checked = False
        self._ended: str | None = None
        """Why there is nothing more to come."""

    def close(self) -> None:
        """No more of it: a `next` that waits is told so. Closing twice is no error."""
        self.end("this tail is closed")
        self._server.forget(self)

    def end(self, why: str) -> None:
        self._ended = self._ended or why
        self.wake.set()

    async def next(self) -> TailEntries | SnapshotId:
        """The next committed entries, at least one; or the snapshot that comes before them, since they are gone here:
        then the tail goes on behind it. Raises `FencedLeaderEpochError` if the follower's log is not of this group, and
        `RaftStoppedError` when the member has stopped or the tail is closed, also to one that waits."""
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
    """Serves tails to observers by stream, and wakes all of them when something commits."""

    def __init__(self, driver: RaftDriver, transport: Transport) -> None:
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
        """For `Tail.close`."""
        self._tails = [row for row in self._tails if row[1] is not tail]

    def wake(self) -> None:
        for _, tail in self._tails:
            tail.wake.set()

    def describe(self) -> tuple[tuple[NodeId, Offset], ...]:
        return tuple((follower, tail.offset) for follower, tail in self._tails)

    def _state(self) -> TailState:
        core = self._driver.core
        leader = core.leader if self._driver.hears_leader() else None
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
                    return  # there is none to send now: others may have one
                tail.offset = Offset(-1)  # a newer one has replaced it meanwhile: the tail finds that by itself
                await asyncio.sleep(GONE_WAIT_MS / 1000)

    async def _send_snapshot(self, stream: Stream, snapshot: SnapshotId) -> bool:
        """False if it is gone or not to be trusted."""
        checking = self._driver.check_snapshot(snapshot)
        while not (await asyncio.wait([checking], timeout=ALIVE_EVERY_MS / 1000))[0]:
            await stream.send(encode_frame(self._state()))
        if checking.cancelled() or checking.exception() is not None:
            raise RaftStoppedError(f"node {self._driver.me.node} stops")
        position = 0
        while checking.result():
            found = await self._driver.read_piece(snapshot, position)
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
        return  # whoever it was for has gone


def data_entries(entries: Sequence[Entry]) -> list[bytes]:
    """What the owner of the state machine proposed."""
    return [entry.data for entry in entries if entry.kind is EntryKind.DATA]
