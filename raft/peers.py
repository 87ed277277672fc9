"""The streams between members: one outgoing stream to each peer, and the incoming ones.

    outgoing, a `PeerLink` for each member, and for each other node with recent messages:

        connecting --accepted--> connected --broken, or the queue overflows--> connecting (after a backoff)
              ^--refused, after a backoff that doubles--'

A link to a non-member stays while there are messages for it: acks to a leader that removes itself or adds this node,
responses to a candidate that is being removed or does not know that it was. After `nonmember_idle_ms` without messages
it is closed. Links to members stay open.

Messages wait in a bounded queue. Without a connection it keeps only recent ones: an old heartbeat is useless, a fresh
vote request should leave as soon as the peer is there. When the queue of a connected peer overflows, the peer does not
read: all of it is dropped and the stream is broken, so that the core knows.

All pending messages leave in one frame. The first frame of a stream is a greeting with the sender's address: a node
that was just added and knows no peer can respond, and peers find a node that moved before the membership has its
address.

Incoming: a newer stream from a peer replaces the older one. The end of a stream is always a `Disconnected`: what was in
flight may be lost.
"""

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
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
from tidelog.raft.messages import AppendRequest, Message, SnapshotChunk, entry_bytes
from tidelog.raft.seen_peers import SeenPeers
from tidelog.world.transport import Stream, Transport

LOGGER = logging.getLogger(__name__)

SERVICE = "raft"
MESSAGE_OVERHEAD_BYTES = 64
WARN_AFTER_S = 2.0
"""A peer that starts or moves is out of reach for less; a line about it is no warning."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkConfig:
    queue_messages_max: int = 4096
    queue_bytes_max: int = 64 << 20
    frame_bytes: int = 4 << 20
    """A frame takes messages until it has this many bytes."""
    connect_wait_min_ms: int = 20
    connect_wait_max_ms: int = 300
    unsent_age_max_ms: int = 1000
    """Maximum age of a message that waited for a connection."""
    nonmember_idle_ms: int = 5_000
    """A link to a non-member closes after this time without messages."""


class Inbox(Protocol):
    """Callbacks of a link to its owner. They do not raise."""

    def received(self, messages: Sequence[Message]) -> None: ...

    def disconnected(self, peer: NodeId) -> None: ...

    async def wait_for_capacity(self) -> None:
        """Returns when the owner's inbox has capacity."""
        ...


def message_bytes(message: Message) -> int:
    """Returns the approximate size in memory."""
    if isinstance(message, AppendRequest):
        return MESSAGE_OVERHEAD_BYTES + sum(map(entry_bytes, message.entries))
    if isinstance(message, SnapshotChunk):
        return MESSAGE_OVERHEAD_BYTES + len(message.data)
    return MESSAGE_OVERHEAD_BYTES


def encode_frame(messages: Sequence[Message]) -> bytes:
    """Encodes messages, each after its length in 4 bytes, big endian."""
    parts: list[bytes] = []
    for message in messages:
        raw = wire.encode(message)
        parts += (len(raw).to_bytes(4, "big"), raw)
    return b"".join(parts)


def decode_frame(frame: bytes) -> list[Message]:
    """Decodes a frame; raises `ProtocolError` for an invalid one."""
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


@dataclass(eq=False)
class PeerLink:
    """See the module's docstring. `run` is its task; the owner calls the rest."""

    node: NodeId
    _transport: Transport
    _greeting: bytes
    _config: LinkConfig
    _random: Random
    _disconnected: Callable[[NodeId], None]
    used_ms: int
    """Time of the last message."""
    error: str | None = "not connected yet"
    """Why there is no connection; None while there is one."""
    overflows: int = 0
    sent: int = 0
    frames: int = 0
    _queue: deque[tuple[int, int, Message]] = field(default_factory=deque)
    _queue_bytes: int = 0
    _wake: asyncio.Event = field(default_factory=asyncio.Event)
    _retry: asyncio.Event = field(default_factory=asyncio.Event)
    _stream: Stream | None = None
    _unreachable_since_s: float | None = None
    _has_warned: bool = False
    _task: asyncio.Task[None] | None = None

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
            LOGGER.warning("peer=%d does not read: breaking its stream", self.node)
            self._stream.close()
            self._lost("it does not read")

    def _lost(self, why: str) -> None:
        """Notes that the stream broke; reports it once for each stream."""
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
                self._note_unreachable(error)
            else:
                self.error = None
                self._unreachable_since_s, self._has_warned = None, False
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
        """The peer made contact: connects now instead of waiting for the backoff."""
        self._retry.set()

    def _note_unreachable(self, error: TidelogError) -> None:
        now_s = asyncio.get_running_loop().time()
        if self._unreachable_since_s is None:
            self._unreachable_since_s = now_s
        is_lasting = now_s - self._unreachable_since_s >= WARN_AFTER_S
        if str(error) != self.error or (is_lasting and not self._has_warned):
            self._has_warned = is_lasting
            LOGGER.log(logging.WARNING if is_lasting else logging.INFO, "peer=%d is unreachable: %s", self.node, error)
        self.error = str(error)

    async def _use(self, stream: Stream) -> None:
        """Sends until the stream breaks. A watcher receives, to detect a break at once."""
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
            _, message_size, message = self._queue.popleft()
            size += message_size
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
        seen_peers: SeenPeers,
    ) -> None:
        self.links: dict[NodeId, PeerLink] = {}
        self.received = 0
        self._transport = transport
        self._config = config
        self._random = random
        self._inbox = inbox
        self._seen_peers = seen_peers
        self._greeting: bytes = msgpack.packb(["raft-greeting", 1, {"address": address}])
        self._incoming: dict[NodeId, Stream] = {}
        self._known: frozenset[NodeId] = frozenset()
        self._addresses: dict[NodeId, str] = {}
        """The last address of each in the membership."""
        self._forgotten = (0, 0)
        """Messages and overflows of closed links."""
        self._sweep: asyncio.TimerHandle | None = None
        """Set while there are links to non-members."""
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
        """Sets the other members and their addresses, and opens links to them."""
        for node, address in addresses.items():
            if address and self._addresses.get(node) != address:
                # Only a changed address is set: a member that moved may have sent its new one in a greeting since.
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
        """Schedules the next sweep for when the first link to a non-member may be idle for long enough."""
        nonmembers = [link for node, link in self.links.items() if node not in self._known]
        if nonmembers and self._sweep is None:
            # One millisecond more: in whole milliseconds a moment is reached when the clock shows it.
            wait_ms = min(link.used_ms for link in nonmembers) + self._config.nonmember_idle_ms - _now_ms() + 1
            self._sweep = asyncio.get_running_loop().call_later(max(wait_ms, 1) / 1000, self._sweep_nonmembers)

    def _sweep_nonmembers(self) -> None:
        self._sweep = None
        idle_since_ms = _now_ms() - self._config.nonmember_idle_ms
        for node, link in list(self.links.items()):
            if node not in self._known and link.used_ms <= idle_since_ms:
                LOGGER.info("peer=%d is not a member and had no messages for a while: closing its link", node)
                self._forget(node)
                # If it is added again, its address in the membership counts as new, even if it is the old one.
                self._addresses.pop(node, None)
        self._sweep_later()

    def _forget(self, node: NodeId) -> None:
        link = self.links.pop(node)
        link.stop()
        self._forgotten = (self._forgotten[0] + link.sent, self._forgotten[1] + link.overflows)

    @property
    def sent(self) -> int:
        """Messages sent, including those of closed links."""
        return self._forgotten[0] + sum(link.sent for link in self.links.values())

    @property
    def overflows(self) -> int:
        return self._forgotten[1] + sum(link.overflows for link in self.links.values())

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
            await self._seen_peers.add(peer)
            if peer in self.links:
                self.links[peer].retry()
            while self._incoming.get(peer) is stream:
                messages = decode_frame(await stream.receive())
                for message in messages:
                    if message.sender != peer:
                        raise StreamBrokenError(f"node {peer} sends messages of node {message.sender}", node=peer)
                self.received += len(messages)
                self._inbox.received(messages)
                await self._inbox.wait_for_capacity()
        except ProtocolError as error:
            LOGGER.error("peer=%d sent an unreadable frame, breaking its stream: %s", peer, error)
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
            raise StreamBrokenError(f"node {peer} did not send a greeting first: {error}", node=peer) from error
        if kind != "raft-greeting":
            raise StreamBrokenError(f"node {peer} did not send a greeting first", node=peer)
        link = self.links.get(peer)
        if address and (peer not in self._known or link is None or not link.is_connected):
            # A member that moved is not at the membership's address, and cannot change that before it is reachable.
            self._transport.set_address(peer, address)
