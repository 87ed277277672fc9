"""The streams between members: one outgoing stream to each peer, and what comes in from them.

    outgoing, a `PeerLink` for each member, and for each other node that was written to lately:

        connecting --accepted--> connected --broken, or the queue overflows--> connecting (after a short wait)
              ^--refused, after a wait that doubles--'

A link to one that is no member is kept as long as there is something to say to it: acks for a leader that is removing
itself or that is adding us, answers to a candidate that is being removed or does not know that it was. When nothing was
said for `stranger_idle_ms` it is closed and forgotten, whatever that node has open to us. A member's link is never.

Messages wait in a bounded queue. While there is no connection only young ones are kept: an old heartbeat helps nobody,
a fresh vote request or probe should leave the moment the peer is there. A queue that overflows while connected belongs
to a peer that does not read: all of it is dropped and the stream is broken, so that the core knows.

Everything that waits leaves in one frame. The first frame of a stream is a greeting with the sender's address: a node
that was just added, and knows nobody, can answer; and one that moved is found before the membership says where.

Incoming: a newer stream from a peer takes the place of the older one. The end of a stream, in whatever way, is a
`Disconnected`: what was in flight may be lost.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random
from typing import Protocol

import msgpack

from tidelog.model.errors import (
    ProtocolError,
    RemoteError,
    StreamBrokenError,
    StreamClosedError,
    TidelogError,
    TransportError,
)
from tidelog.model.ids import NodeId
from tidelog.raft import wire
from tidelog.raft.heard import HeardNodes
from tidelog.raft.messages import AppendRequest, Message, SnapshotChunk, entry_bytes
from tidelog.world.transport import Stream, Transport

LOGGER = logging.getLogger(__name__)

SERVICE = "raft"
MESSAGE_OVERHEAD_BYTES = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkConfig:
    queue_messages_max: int = 4096
    queue_bytes_max: int = 64 << 20
    frame_bytes: int = 4 << 20
    """A frame takes messages until it has this many bytes."""
    connect_wait_min_ms: int = 20
    connect_wait_max_ms: int = 300
    unsent_age_max_ms: int = 1000
    """How old a message may be that waited for a connection."""
    stranger_idle_ms: int = 5_000
    """A link to one that is no member goes when nothing was sent on it for so long."""


class Inbox(Protocol):
    """What a link tells its owner. None of these may raise."""

    def received(self, messages: Sequence[Message]) -> None: ...

    def disconnected(self, peer: NodeId) -> None: ...

    async def wait_for_room(self) -> None:
        """Returns when the owner has caught up with what it was given."""
        ...


def message_bytes(message: Message) -> int:
    """About how much room it takes."""
    if isinstance(message, AppendRequest):
        return MESSAGE_OVERHEAD_BYTES + sum(map(entry_bytes, message.entries))
    if isinstance(message, SnapshotChunk):
        return MESSAGE_OVERHEAD_BYTES + len(message.data)
    return MESSAGE_OVERHEAD_BYTES


def encode_frame(messages: Sequence[Message]) -> bytes:
    """Messages one after the other, each behind its length in 4 bytes, big endian."""
    parts: list[bytes] = []
    for message in messages:
        raw = wire.encode(message)
        parts += (len(raw).to_bytes(4, "big"), raw)
    return b"".join(parts)


def decode_frame(frame: bytes) -> list[Message]:
    """`ProtocolError` for bytes that are not a frame of sound messages."""
    messages: list[Message] = []
    view = memoryview(frame)
    position = 0
    while position < len(frame):
        end = position + 4 + int.from_bytes(view[position : position + 4], "big")
        if end > len(frame):
            raise ProtocolError("a frame ends in the middle of a message")
        messages.append(wire.decode(view[position + 4 : end]))
        position = end
    return messages


def _now_ms() -> int:
    return int(asyncio.get_running_loop().time() * 1000)


class PeerLink:
    """See the module's docstring. `run` is its task; the rest is called by the owner."""

    def __init__(
        self,
        node: NodeId,
        transport: Transport,
        greeting: bytes,
        config: LinkConfig,
        random: Random,
        disconnected: Callable[[NodeId], None],
        now_ms: int,
    ) -> None:
        self.node = node
        self.used_ms = now_ms
        """When something was given to it last."""
        self.error: str | None = "not connected yet"
        """Why there is no connection; None while there is one."""
        self.overflows = 0
        self.sent = 0
        self.frames = 0
        self._transport = transport
        self._greeting = greeting
        self._config = config
        self._random = random
        self._disconnected = disconnected
        self._queue: deque[tuple[int, int, Message]] = deque()
        self._queue_bytes = 0
        self._wake = asyncio.Event()
        self._retry = asyncio.Event()
        self._stream: Stream | None = None
        self._task: asyncio.Task[None] | None = None

    @property
    def is_connected(self) -> bool:
        return self._stream is not None

    def start(self, group: asyncio.TaskGroup) -> None:
        self._task = group.create_task(self._run(), name=f"raft-link-{self.node}")

    def stop(self) -> None:
        if self._task is not None:
            self._task.cancel()

    def send(self, message: Message, now_ms: int) -> None:
        size = message_bytes(message)
        self.used_ms = now_ms
        self._queue.append((now_ms, size, message))
        self._queue_bytes += size
        config = self._config
        if self._stream is None:
            self._drop_older(now_ms - config.unsent_age_max_ms)
        if len(self._queue) > config.queue_messages_max or self._queue_bytes > config.queue_bytes_max:
            self._overflow()
        self._wake.set()

    def _drop_older(self, than_ms: int) -> None:
        while self._queue and self._queue[0][0] < than_ms:
            self._queue_bytes -= self._queue.popleft()[1]

    def _overflow(self) -> None:
        self.overflows += 1
        self._queue.clear()
        self._queue_bytes = 0
        if self._stream is not None:
            LOGGER.warning("peer=%d does not take what is sent: its stream is broken off", self.node)
            self._stream.close()
            self._lost("it does not read")

    def _lost(self, why: str) -> None:
        """The stream broke; said once for each stream."""
        if self._stream is not None:
            self._stream = None
            self.error = why
            self._wake.set()
            self._disconnected(self.node)

    async def _run(self) -> None:
        wait_ms = self._config.connect_wait_min_ms
        while True:
            began = asyncio.get_running_loop().time()
            try:
                stream = await self._transport.open_stream(self.node, SERVICE)
            except (TransportError, RemoteError) as error:
                self._note_refusal(error)
            else:
                self.error = None
                self._stream = stream
                await self._use(stream)
            if asyncio.get_running_loop().time() - began > 1.0:
                wait_ms = self._config.connect_wait_min_ms
            await self._pause(self._random.uniform(wait_ms / 2, wait_ms) / 1000)
            wait_ms = min(wait_ms * 2, self._config.connect_wait_max_ms)

    async def _pause(self, seconds: float) -> None:
        self._retry.clear()
        try:
            async with asyncio.timeout(seconds):
                await self._retry.wait()
        except TimeoutError:
            return

    def retry(self) -> None:
        """The peer was heard: if we wait to connect again, now is the time."""
        self._retry.set()

    def _note_refusal(self, error: TidelogError) -> None:
        if str(error) != self.error:
            LOGGER.warning("peer=%d cannot be reached: %s", self.node, error)
        self.error = str(error)

    async def _use(self, stream: Stream) -> None:
        """Send until the stream breaks. A watcher receives: nothing comes, but a break is noticed at once."""
        watcher = asyncio.get_running_loop().create_task(self._watch(stream), name=f"raft-watch-{self.node}")
        loop = asyncio.get_running_loop()
        self._drop_older(int(loop.time() * 1000) - self._config.unsent_age_max_ms)
        try:
            await stream.send(self._greeting)
            while self._stream is stream:
                if not self._queue:
                    self._wake.clear()
                    await self._wake.wait()
                    continue
                await stream.send(self._next_frame())
        except StreamBrokenError as error:
            self._lost(str(error))
        finally:
            watcher.cancel()
            stream.close()
            self._stream = None if self._stream is stream else self._stream
            self.error = self.error or "disconnected"

    async def _watch(self, stream: Stream) -> None:
        try:
            while True:
                await stream.receive()
        except (StreamBrokenError, StreamClosedError) as error:
            if self._stream is stream:
                self._lost(str(error))

    def _next_frame(self) -> bytes:
        messages: list[Message] = []
        size = 0
        while self._queue and size < self._config.frame_bytes:
            _, one, message = self._queue.popleft()
            size += one
            messages.append(message)
        self._queue_bytes -= size
        self.sent += len(messages)
        self.frames += 1
        return encode_frame(messages)


class Peers:
    """All links of a member, and the incoming streams."""

    def __init__(
        self,
        transport: Transport,
        address: str,
        config: LinkConfig,
        random: Random,
        inbox: Inbox,
        heard: HeardNodes,
    ) -> None:
        self.links: dict[NodeId, PeerLink] = {}
        self.received = 0
        self._transport = transport
        self._config = config
        self._random = random
        self._inbox = inbox
        self._heard = heard
        self._greeting: bytes = msgpack.packb(["raft-greeting", 1, {"address": address}])
        self._incoming: dict[NodeId, Stream] = {}
        self._known: frozenset[NodeId] = frozenset()
        self._addresses: dict[NodeId, str] = {}
        """What the membership said last of each."""
        self._forgotten = (0, 0)
        """Messages and overflows of links that are gone."""
        self._sweep: asyncio.TimerHandle | None = None
        """Set while there are links to nodes that are no members."""
        self._group: asyncio.TaskGroup | None = None
        transport.serve_stream(SERVICE, self._serve)

    def start(self, group: asyncio.TaskGroup) -> None:
        self._group = group

    def stop(self) -> None:
        self._group = None
        if self._sweep is not None:
            self._sweep.cancel()
            self._sweep = None
        for node in list(self.links):
            self._forget(node)
        for stream in list(self._incoming.values()):
            stream.close()
        self._incoming.clear()

    def set_members(self, addresses: dict[NodeId, str]) -> None:
        """The others in the membership in force, and where they are. Links to them are opened now."""
        for node, address in addresses.items():
            if address and self._addresses.get(node) != address:
                # Only what is new: a member that moved may have told us its address itself since (R18).
                self._addresses[node] = address
                self._transport.set_address(node, address)
        self._known = frozenset(addresses)
        now_ms = _now_ms()
        for node in addresses:
            self._link(node, now_ms)
        self._sweep_later()

    def send(self, node: NodeId, message: Message, now_ms: int) -> None:
        self._link(node, now_ms).send(message, now_ms)

    def _link(self, node: NodeId, now_ms: int) -> PeerLink:
        link = self.links.get(node)
        if link is None:
            assert self._group is not None, "start first"
            link = PeerLink(
                node, self._transport, self._greeting, self._config, self._random, self._inbox.disconnected, now_ms
            )
            self.links[node] = link
            link.start(self._group)
            self._sweep_later()
        return link

    def _sweep_later(self) -> None:
        """Look again when the first of the links to strangers may have been idle for long enough."""
        strangers = [link for node, link in self.links.items() if node not in self._known]
        if strangers and self._sweep is None:
            # One millisecond more: in whole milliseconds a moment is reached when the clock shows it.
            wait_ms = min(link.used_ms for link in strangers) + self._config.stranger_idle_ms - _now_ms() + 1
            self._sweep = asyncio.get_running_loop().call_later(max(wait_ms, 1) / 1000, self._sweep_strangers)

    def _sweep_strangers(self) -> None:
        self._sweep = None
        idle_since_ms = _now_ms() - self._config.stranger_idle_ms
        for node, link in list(self.links.items()):
            if node not in self._known and link.used_ms <= idle_since_ms:
                LOGGER.info("peer=%d is no member and was not written to for a while: its link is closed", node)
                self._forget(node)
                # If it is added again, what the membership then says is news, though it be the old address.
                self._addresses.pop(node, None)
        self._sweep_later()

    def _forget(self, node: NodeId) -> None:
        link = self.links.pop(node)
        link.stop()
        self._forgotten = (self._forgotten[0] + link.sent, self._forgotten[1] + link.overflows)

    @property
    def sent(self) -> int:
        """Messages that left, on links that are and that were."""
        return self._forgotten[0] + sum(link.sent for link in self.links.values())

    @property
    def overflows(self) -> int:
        return self._forgotten[1] + sum(link.overflows for link in self.links.values())

    def is_heard(self, node: NodeId) -> bool:
        """Whether a stream from this peer is open."""
        return node in self._incoming

    async def _serve(self, stream: Stream) -> None:
        if self._group is None:
            return
        peer = stream.peer
        older = self._incoming.get(peer)
        self._incoming[peer] = stream
        if older is not None:
            older.close()
            self._inbox.disconnected(peer)
        try:
            self._greet(peer, await stream.receive())
            await self._heard.add(peer)
            if peer in self.links:
                self.links[peer].retry()
            while self._incoming.get(peer) is stream:
                messages = decode_frame(await stream.receive())
                for message in messages:
                    if message.sender != peer:
                        raise StreamBrokenError(f"node {peer} speaks for node {message.sender}", node=peer)
                self.received += len(messages)
                self._inbox.received(messages)
                await self._inbox.wait_for_room()
        except ProtocolError as error:
            LOGGER.error("peer=%d sent what cannot be read, its stream is broken off: %s", peer, error)
            stream.close()
        except (StreamBrokenError, StreamClosedError):
            stream.close()
        finally:
            if self._incoming.get(peer) is stream:
                del self._incoming[peer]
                self._inbox.disconnected(peer)

    def _greet(self, peer: NodeId, frame: bytes) -> None:
        try:
            kind, _version, fields = msgpack.unpackb(frame)
            address = str(fields["address"])
        except (ValueError, KeyError, TypeError, msgpack.UnpackException) as error:
            raise StreamBrokenError(f"node {peer} does not begin with a greeting: {error}", node=peer) from error
        if kind != "raft-greeting":
            raise StreamBrokenError(f"node {peer} does not begin with a greeting", node=peer)
        link = self.links.get(peer)
        if address and (peer not in self._known or link is None or not link.is_connected):
            # A member that moved is not where the membership says; it cannot change that before it is heard (R18).
            self._transport.set_address(peer, address)
