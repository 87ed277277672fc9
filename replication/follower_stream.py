"""The follower's side of replication streams: one stream per leader broker and channel with a following partition.

    no member --add--> connecting --accepted--> open (every member subscribes) --breaks--> connecting, after a backoff
    the last member leaves --> closed

Members are the partitions that follow this leader on this channel. Each connection begins with new subscriptions. A
number is used once, so late messages of an old connection are recognized and dropped.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Sequence
from random import Random

from tidelog.model.errors import StreamBrokenError, StreamClosedError, TidelogError
from tidelog.model.ids import NodeId
from tidelog.replication.broker_context import BrokerContext
from tidelog.replication.follower_replica import NO_NUMBER, FollowerReplica
from tidelog.replication.messages import (
    CATCH_UP,
    MAIN,
    Ack,
    Acks,
    Ended,
    Histories,
    History,
    Push,
    Pushed,
    Subscribe,
    Subscribes,
    Unsubscribe,
)
from tidelog.replication.replica import ackable_end
from tidelog.replication.throttle import NO_LIMIT, Bucket
from tidelog.replication.wire import decode_from_leader, encode
from tidelog.world.events import is_asleep
from tidelog.world.transport import Stream, Transport

LOGGER = logging.getLogger(__name__)

ACKS_PER_FRAME_MAX = 10_000
SUBSCRIPTIONS_PER_FRAME_MAX = 1_000
PUSHES_PER_SLICE = 25
"""Pushes with batches that are written in one turn of the event loop: about 5 ms, more if they create files."""


class FollowerStream:
    """See the module. `FollowerStreams` creates and closes it."""

    def __init__(self, streams: FollowerStreams, leader: NodeId, service: str) -> None:
        self._streams = streams
        self._context = streams.context
        self._config = streams.context.config
        self.leader = leader
        self.service = service
        self._members: dict[FollowerReplica, None] = {}
        self._by_number: dict[int, FollowerReplica] = {}
        self._outgoing: deque[Subscribe | Unsubscribe] = deque()
        self._to_ack: dict[FollowerReplica, None] = {}
        self._wake = asyncio.Event()
        self.is_open = False
        self._is_hurried = asyncio.Event()
        self._received_bytes = 0
        self._reported_bytes = 0

    def __len__(self) -> int:
        return len(self._members)

    def validate(self) -> None:
        """Assert that the members know this stream, and that numbers are those of subscriptions of its connection; a
        member of an open one is subscribed, and what it has to ack is on its way."""
        assert self.is_open or not self._by_number, "subscriptions without a connection"
        assert all(member.stream is self for member in self._members), "a member of another stream"
        for number, member in self._by_number.items():
            assert member in self._members, f"subscription {number} of a replica that has left"
            assert member.number == number, f"subscription {member.number} is known as {number}"
        assert self._to_ack.keys() <= self._members.keys(), "a replica that has left is to ack"
        for member in self._members if self.is_open else ():
            assert self._by_number.get(member.number) is member, f"{member.log.path} is a member, and not subscribed"
            is_acked = not member.is_accepted or member.acked_end == ackable_end(member.log)
            assert is_acked or member in self._to_ack or self._streams.is_throttled(member), (
                f"{member.log.path} has acked {member.acked_end} of {ackable_end(member.log)}"
            )
        is_due = self.is_open and (self._outgoing or self._to_ack or self._owes_report())
        assert not (is_due and is_asleep(self._wake)), "something is to be sent, and the sender sleeps"
        assert self._reported_bytes <= self._received_bytes, "more bytes are reported than received"

    # Members.

    def add(self, follower: FollowerReplica) -> None:
        self._members[follower] = None
        if self.is_open:
            self._subscribe(follower)
        else:
            self._is_hurried.set()

    def remove(self, follower: FollowerReplica) -> None:
        self._members.pop(follower, None)
        self._to_ack.pop(follower, None)
        if follower.number != NO_NUMBER and self._by_number.pop(follower.number, None) is not None:
            self._outgoing.append(Unsubscribe(number=follower.number))
            self._wake.set()
        if not self._members:
            self._streams.is_idle(self)

    def _subscribe(self, follower: FollowerReplica) -> None:
        request = follower.subscribe(self._streams.next_number(), self._context.metadata.broker_epoch)
        self._by_number[request.number] = follower
        self._outgoing.append(request)
        self._wake.set()

    def acknowledge(self, follower: FollowerReplica) -> None:
        """Send an ack of this member's durable end, delayed by its throttle."""
        wait_s = self._streams.ack_delay_s(follower)
        if wait_s > 0:
            asyncio.get_running_loop().call_later(wait_s, self._acknowledge_late, follower, follower.number)
            return
        self._to_ack[follower] = None
        self._wake.set()

    def _acknowledge_late(self, follower: FollowerReplica, number: int) -> None:
        if follower.stream is self and follower.number == number:
            self._to_ack[follower] = None
            self._wake.set()

    # The connection.

    async def run(self) -> None:
        """Connect and reconnect until cancelled."""
        attempt = 0
        while True:
            began_s = asyncio.get_running_loop().time()
            try:
                await self._connect()
            except TidelogError as error:
                LOGGER.warning("leader=%d service=%s stream broke: %s", self.leader, self.service, error)
            attempt = 0 if asyncio.get_running_loop().time() - began_s > 1 else attempt + 1
            await self._pause(attempt)

    async def _pause(self, attempt: int) -> None:
        wait_ms = min(self._config.retry_min_ms << min(attempt, 10), self._config.retry_max_ms)
        self._is_hurried.clear()
        try:
            async with asyncio.timeout(self._streams.random.uniform(wait_ms / 2, wait_ms) / 1000):
                await self._is_hurried.wait()
        except TimeoutError:
            return

    async def _connect(self) -> None:
        stream = await self._streams.transport.open_stream(self.leader, self.service)
        self._received_bytes = self._reported_bytes = 0
        self._outgoing.clear()
        self._to_ack.clear()
        self.is_open = True
        for follower in self._members:
            self._subscribe(follower)
        sender = asyncio.get_running_loop().create_task(self._send_all(stream))
        sender.add_done_callback(lambda _: stream.close())
        try:
            while True:
                match decode_from_leader(await stream.receive()):
                    case Pushed(pushes):
                        await self._take(pushes)
                    case Ended() as ended:
                        self._ended(ended)
                    case Histories(histories):
                        for history in histories:
                            self._informed(history)
        finally:
            self.is_open = False
            self._by_number.clear()
            for follower in self._members:
                follower.broken()
            stream.close()
            sender.cancel()
            await asyncio.wait([sender])
            self._context.tasks.check(sender)

    async def _send_all(self, stream: Stream) -> None:
        try:
            while True:
                await self._wake.wait()
                self._wake.clear()
                while self._outgoing:
                    await stream.send(encode(self._next_outgoing()))
                while self._to_ack or self._owes_report():
                    await stream.send(encode(Acks(self._received_bytes, self._take_acks())))
                    self._reported_bytes = self._received_bytes
        except (StreamBrokenError, StreamClosedError):
            return  # the receiver sees the same error and reconnects

    def _next_outgoing(self) -> Subscribe | Subscribes | Unsubscribe:
        """Return the next message, merged with the subscriptions right behind it: a new topic brings hundreds."""
        first = self._outgoing.popleft()
        if not isinstance(first, Subscribe) or not self._outgoing:
            return first
        requests = [first]
        while self._outgoing and len(requests) < SUBSCRIPTIONS_PER_FRAME_MAX:
            message = self._outgoing[0]
            if not isinstance(message, Subscribe):
                break
            requests.append(message)
            self._outgoing.popleft()
        return Subscribes(tuple(requests))

    def _take_acks(self) -> tuple[Ack, ...]:
        acks: list[Ack] = []
        while self._to_ack and len(acks) < ACKS_PER_FRAME_MAX:
            follower = next(iter(self._to_ack))
            del self._to_ack[follower]
            if follower.number != NO_NUMBER:
                acks.append(follower.ack())
        return tuple(acks)

    def _owes_report(self) -> bool:
        return self._received_bytes - self._reported_bytes >= self._config.inflight_bytes_max // 4

    async def _take(self, pushes: Sequence[Push]) -> None:
        written = 0
        for push in pushes:
            self._pushed(push)
            written += len(push.batches) > 0
            if written == PUSHES_PER_SLICE:
                written = 0
                await asyncio.sleep(0)  # other tasks run before the next push
        if self._owes_report():
            self._wake.set()

    def _pushed(self, push: Push) -> None:
        size = len(push.batches)
        self._received_bytes += size
        follower = self._by_number.get(push.number)
        if follower is not None and follower.number == push.number:
            self._streams.spend(follower, size)
            follower.pushed(push)

    def _informed(self, history: History) -> None:
        follower = self._by_number.get(history.number)
        if follower is not None and follower.number == history.number:
            follower.informed(history)

    def _ended(self, ended: Ended) -> None:
        follower = self._by_number.pop(ended.number, None)
        if follower is not None and follower.number == ended.number:
            follower.ended(ended)


class FollowerStreams:
    """All streams of a broker to leaders, by leader and channel; their throttle, and the numbers of subscriptions."""

    def __init__(self, context: BrokerContext, transport: Transport, random: Random) -> None:
        self.context = context
        self.transport = transport
        self.random = random
        self.bucket = Bucket(NO_LIMIT, 0.0)
        """Limits acks of throttled replicas (`follower.replication.throttled.rate`)."""
        self._number = 0
        self._streams: dict[tuple[NodeId, str], tuple[FollowerStream, asyncio.Task[None]]] = {}
        self._is_closed = False

    def _channel(self, follower: FollowerReplica) -> str:
        return MAIN if self.context.metadata.me in follower.replica.partition.isr else CATCH_UP

    def add(self, follower: FollowerReplica) -> None:
        """Follow on the channel of the replica only."""
        assert follower.stream is None, "a partition follows on one stream"
        key = (NodeId(follower.leader), self._channel(follower))
        if key not in self._streams:
            stream = FollowerStream(self, *key)
            task = self.context.tasks.spawn(stream.run(), name=f"replication-{key[0]}")
            self._streams[key] = stream, task
        follower.join(self._streams[key][0])

    def check_channel(self, follower: FollowerReplica) -> None:
        """Let the follower leave a stream of the other channel: the in-sync set has changed."""
        if follower.stream is not None and follower.stream.service != self._channel(follower):
            follower.leave()

    def validate(self) -> None:
        for stream, _ in self._streams.values():
            stream.validate()

    def next_number(self) -> int:
        self._number += 1
        return self._number

    def is_idle(self, stream: FollowerStream) -> None:
        """Close the stream after `idle_stream_ms`: its last member may return soon with another subscription."""
        if not self._is_closed:
            asyncio.get_running_loop().call_later(self.context.config.idle_stream_ms / 1000, self._close_idle, stream)

    def _close_idle(self, stream: FollowerStream) -> None:
        key = stream.leader, stream.service
        entry = self._streams.get(key)
        if entry is not None and entry[0] is stream and not stream:
            del self._streams[key]
            entry[1].cancel()

    def close(self) -> None:
        self._is_closed = True
        for _, task in self._streams.values():
            task.cancel()
        self._streams.clear()

    # Throttle.

    def is_throttled(self, follower: FollowerReplica) -> bool:
        replica = follower.replica
        return replica.is_follower_throttled and self.context.metadata.me not in replica.partition.isr

    def spend(self, follower: FollowerReplica, size: int) -> None:
        if self.is_throttled(follower):
            self.bucket.spend(size, asyncio.get_running_loop().time())

    def ack_delay_s(self, follower: FollowerReplica) -> float:
        if not self.is_throttled(follower):
            return 0.0
        return min(self.bucket.wait_s(asyncio.get_running_loop().time()), 10.0)
