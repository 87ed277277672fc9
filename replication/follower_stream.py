"""The follower's end of replication streams: one for each leader broker and channel, while anything follows there.

    no member --add--> connecting --accepted--> open (every member subscribes) --breaks--> connecting, after a moment
    the last member leaves --> closed

Members are the partitions that follow this leader on this channel. Each connection begins with fresh subscriptions: a
number is used once, so whatever an old connection still brings is known for what it is.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING

from tidelog.model.errors import StreamBrokenError, StreamClosedError, TidelogError
from tidelog.model.ids import NodeId
from tidelog.replication.following import NO_NUMBER, Following
from tidelog.replication.messages import (
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
from tidelog.replication.wire import decode_from_leader, encode
from tidelog.world.transport import Stream

if TYPE_CHECKING:
    from tidelog.replication.replicas import Replicas

LOGGER = logging.getLogger(__name__)

ACKS_PER_FRAME_MAX = 10_000
SUBSCRIPTIONS_PER_FRAME_MAX = 1_000
PUSHES_PER_SLICE = 25
"""Pushes with batches that are written in one turn of the event loop: some 5 ms, more where they make files."""


class FollowerStream:
    """See the module. Made and ended by `FollowerStreams`."""

    def __init__(self, host: Replicas, leader: NodeId, service: str) -> None:
        self._host = host
        self.leader = leader
        self.service = service
        self._members: dict[Following, None] = {}
        self._by_number: dict[int, Following] = {}
        self._outgoing: deque[Subscribe | Unsubscribe] = deque()
        self._to_ack: dict[Following, None] = {}
        self._wake = asyncio.Event()
        self.is_open = False
        self._is_hurried = asyncio.Event()
        self._received_bytes = 0
        self._reported_bytes = 0

    def __len__(self) -> int:
        return len(self._members)

    # Members.

    def add(self, following: Following) -> None:
        self._members[following] = None
        following.stream = self
        if self.is_open:
            self._subscribe(following)
        else:
            self._is_hurried.set()

    def remove(self, following: Following) -> None:
        self._members.pop(following, None)
        self._to_ack.pop(following, None)
        following.stream = None
        if following.number != NO_NUMBER and self._by_number.pop(following.number, None) is not None:
            self._outgoing.append(Unsubscribe(number=following.number))
            self._wake.set()
        if not self._members:
            self._host.streams.is_idle(self)

    def _subscribe(self, following: Following) -> None:
        asked = following.subscribe(self._host.next_subscription(), self._host.broker_epoch)
        self._by_number[asked.number] = following
        self._outgoing.append(asked)
        self._wake.set()

    def acknowledge(self, following: Following) -> None:
        """Something of this member is durable now."""
        wait_s = self._host.ack_delay_s(following)
        if wait_s > 0:
            asyncio.get_running_loop().call_later(wait_s, self._acknowledge_late, following, following.number)
            return
        self._to_ack[following] = None
        self._wake.set()

    def _acknowledge_late(self, following: Following, number: int) -> None:
        if following.stream is self and following.number == number:
            self._to_ack[following] = None
            self._wake.set()

    # The connection.

    async def run(self) -> None:
        """Until it is cancelled."""
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
        config = self._host.config
        wait_ms = min(config.retry_min_ms << min(attempt, 10), config.retry_max_ms)
        self._is_hurried.clear()
        try:
            async with asyncio.timeout(self._host.random.uniform(wait_ms / 2, wait_ms) / 1000):
                await self._is_hurried.wait()
        except TimeoutError:
            return

    async def _connect(self) -> None:
        stream = await self._host.transport.open_stream(self.leader, self.service)
        self._received_bytes = self._reported_bytes = 0
        self._outgoing.clear()
        self._to_ack.clear()
        self.is_open = True
        for following in self._members:
            self._subscribe(following)
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
            for following in self._members:
                following.broken()
            stream.close()
            sender.cancel()
            await asyncio.wait([sender])
            self._host.check(sender)

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
            return  # whoever receives finds out, and connects again

    def _next_outgoing(self) -> Subscribe | Subscribes | Unsubscribe:
        """The next, with all subscriptions that stand right behind it: a new topic brings hundreds."""
        first = self._outgoing.popleft()
        if not isinstance(first, Subscribe) or not self._outgoing:
            return first
        asked = [first]
        while self._outgoing and len(asked) < SUBSCRIPTIONS_PER_FRAME_MAX:
            following = self._outgoing[0]
            if not isinstance(following, Subscribe):
                break
            asked.append(following)
            self._outgoing.popleft()
        return Subscribes(tuple(asked))

    def _take_acks(self) -> tuple[Ack, ...]:
        acks: list[Ack] = []
        while self._to_ack and len(acks) < ACKS_PER_FRAME_MAX:
            following = next(iter(self._to_ack))
            del self._to_ack[following]
            if following.number != NO_NUMBER:
                acks.append(following.ack())
        return tuple(acks)

    def _owes_report(self) -> bool:
        return self._received_bytes - self._reported_bytes >= self._host.config.inflight_bytes_max // 4

    async def _take(self, pushes: Sequence[Push]) -> None:
        written = 0
        for push in pushes:
            self._pushed(push)
            written += len(push.batches) > 0
            if written == PUSHES_PER_SLICE:
                written = 0
                await asyncio.sleep(0)  # the next frame waits, others do not
        if self._owes_report():
            self._wake.set()

    def _pushed(self, push: Push) -> None:
        size = len(push.batches)
        self._received_bytes += size
        following = self._by_number.get(push.number)
        if following is not None and following.number == push.number:
            self._host.spend_follower(following, size)
            following.pushed(push)

    def _informed(self, history: History) -> None:
        following = self._by_number.get(history.number)
        if following is not None and following.number == history.number:
            following.informed(history)

    def _ended(self, ended: Ended) -> None:
        following = self._by_number.pop(ended.number, None)
        if following is not None and following.number == ended.number:
            following.number = NO_NUMBER
            following.ended(ended)


class FollowerStreams:
    """All streams to leaders, by leader and channel."""

    def __init__(self, host: Replicas) -> None:
        self._host = host
        self._streams: dict[tuple[NodeId, str], tuple[FollowerStream, asyncio.Task[None]]] = {}
        self._is_closed = False

    def add(self, following: Following, service: str) -> None:
        """Follow on this channel, and on no other."""
        assert following.stream is None, "a partition follows on one stream"
        key = (NodeId(following.leader), service)
        if key not in self._streams:
            stream = FollowerStream(self._host, *key)
            task = self._host.spawn(stream.run(), name=f"replication-{key[0]}")
            self._streams[key] = stream, task
        self._streams[key][0].add(following)

    def is_idle(self, stream: FollowerStream) -> None:
        """Its last member has left. Not at once: it may be back in a moment, on another subscription."""
        if not self._is_closed:
            asyncio.get_running_loop().call_later(self._host.config.idle_stream_ms / 1000, self._close_idle, stream)

    def _close_idle(self, stream: FollowerStream) -> None:
        key = stream.leader, stream.service
        found = self._streams.get(key)
        if found is not None and found[0] is stream and not stream:
            del self._streams[key]
            found[1].cancel()

    def close(self) -> None:
        self._is_closed = True
        for _, task in self._streams.values():
            task.cancel()
        self._streams.clear()
