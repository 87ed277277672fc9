"""The leader's end of a replication stream: takes subscriptions and acks of one follower broker, pushes to it.

    subscribe --not led here in that epoch yet--> parked --the metadata comes--> decided
    subscribe --decided--> Ended(diverged, too far behind, ...)  |  its history, if the log has gaps; pushed to

All partitions share the stream. `dirty` has those with something to push, in turn: a message gathers up to
`message_bytes` of what is pending, and who has more goes to the end of the line. Two bounds:

- of one partition at most `partition_bytes` are pushed and not yet durable at the follower: a partition whose device is
  slow over there stops by itself, and holds up no other;
- of the stream at most `stream_bytes` are pushed and not yet taken by the follower.

A batch that is larger than a message between brokers can be ends its subscription with an error in the log; none is
taken that large (`max.message.bytes`), so it is from before there was that bound.

A high watermark alone waits a few milliseconds for batches to ride with. Batches that are not in memory are read by a
task of their own, a few at a time, while the others go on.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING

from tidelog.log.batch import check_batch
from tidelog.log.log import Slice
from tidelog.model.errors import (
    CorruptBatchError,
    DamagedLogError,
    InvalidRequestError,
    OffsetOutOfRangeError,
    RecordTooLargeError,
    StreamBrokenError,
    StreamClosedError,
    TidelogError,
    UnsupportedCompressionError,
    UnsupportedMagicError,
)
from tidelog.model.ids import NO_EPOCH, NodeId, Offset, PartitionId
from tidelog.replication.divergence import Continue, TooFarBehind, Truncate, divergence
from tidelog.replication.leading import Leading, Subscription
from tidelog.replication.messages import (
    NO_PUSH_OFFSET,
    Acks,
    Ended,
    Histories,
    History,
    Push,
    Pushed,
    Reason,
    Subscribe,
    Subscribes,
    Unsubscribe,
)
from tidelog.replication.wire import MESSAGE_OVERHEAD_BYTES, PUSH_OVERHEAD_BYTES, decode_from_follower, encode
from tidelog.world.disk import Buffer
from tidelog.world.transport import FRAME_BYTES_MAX, Stream

if TYPE_CHECKING:
    from tidelog.replication.replicas import Replicas

LOGGER = logging.getLogger(__name__)

PARKED_MAX = 1_000_000
PUSHES_MAX = 20_000
"""In one message."""
HISTORY_ENTRIES_MAX = 10_000
"""Epochs of one partition that a follower is sent, the newest; a leader a minute for a week makes as many."""
HISTORIES_PER_FRAME_MAX = 100
ITEMS_PER_SLICE = 100
"""Subscriptions and acks of one message that are looked at in one turn of the event loop: some 5 ms."""
PUSHED_BYTES_MAX = FRAME_BYTES_MAX - MESSAGE_OVERHEAD_BYTES - PUSHES_MAX * PUSH_OVERHEAD_BYTES
"""Of batches in one message."""
_Reading = tuple[Subscription, int, int]
_ROT = CorruptBatchError, DamagedLogError, UnsupportedCompressionError, UnsupportedMagicError
"""A batch is not what was written."""


class LeaderStream:
    """See the module. `run` is the handler of the stream; everything else is called on its event loop."""

    def __init__(self, host: Replicas, stream: Stream) -> None:
        self._host = host
        self._stream = stream
        self._subscriptions: dict[int, Subscription] = {}
        self._parked: dict[PartitionId, Subscribe] = {}
        self._parked_numbers: dict[int, PartitionId] = {}
        self._outgoing: deque[Ended | History] = deque()
        self._dirty: dict[Subscription, None] = {}
        self._behind: dict[Subscription, None] = {}
        """Those that lack a high watermark only."""
        self._is_lingering = False
        self._held_back: dict[Subscription, None] = {}
        """Throttled: one timer brings them all back into the line."""
        self._pushed_bytes = 0
        self._received_bytes = 0
        self._wake = asyncio.Event()
        self._readers: set[asyncio.Task[None]] = set()
        self._to_read: deque[_Reading] = deque()
        self._is_over = False

    @property
    def peer(self) -> NodeId:
        return self._stream.peer

    async def run(self) -> None:
        sender = asyncio.get_running_loop().create_task(self._send_all())
        sender.add_done_callback(lambda _: self._stream.close())
        try:
            await self._receive_all()
        finally:
            self._is_over = True
            for subscription in list(self._subscriptions.values()):
                subscription.leading.drop(subscription, None)
            for partition in self._parked:
                self._host.unpark(partition, self)
            tasks = [sender, *self._readers]
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)
            for task in tasks:
                self._host.check(task)

    async def _receive_all(self) -> None:
        while True:
            try:
                frame = await self._stream.receive()
            except (StreamClosedError, StreamBrokenError):
                return
            match decode_from_follower(frame):
                case Subscribe() as asked:
                    self._subscribe(asked)
                case Subscribes(asked=several):
                    await self._subscribe_all(several)
                case Unsubscribe(number=number):
                    self._unsubscribe(number)
                case Acks() as acks:
                    await self._acked(acks)

    # Subscriptions.

    async def _subscribe_all(self, several: Sequence[Subscribe]) -> None:
        for at, asked in enumerate(several, 1):
            self._subscribe(asked)
            if at % ITEMS_PER_SLICE == 0:
                await asyncio.sleep(0)

    def _subscribe(self, asked: Subscribe) -> None:
        former = self._parked.get(asked.partition)
        if former is not None and former.number > asked.number:
            raise InvalidRequestError(f"subscription {asked.number} after {former.number}")
        leading = self._host.leading(asked.partition)
        replica = self._host.get(asked.partition)
        partition = replica.partition if replica is not None else None
        if partition is not None and partition.leader_epoch > asked.leader_epoch:
            self._unpark(asked.partition)
            self.tell(Ended(number=asked.number, reason=Reason.NOT_LEADER))
        elif leading is None or leading.leader_epoch != asked.leader_epoch or not self._is_replica(leading):
            # Our metadata is behind the follower's, or our log is not open yet: it is decided when that has come.
            if len(self._parked) >= PARKED_MAX:
                raise InvalidRequestError(f"more than {PARKED_MAX} subscriptions wait")
            self._park(asked)
            self._host.park(asked.partition, self)
        else:
            self._unpark(asked.partition)
            self._decide(leading, asked)

    def _is_replica(self, leading: Leading) -> bool:
        partition = leading.replica.partition
        return partition is not None and int(self.peer) in partition.replicas

    def retry(self, partition: PartitionId) -> None:
        """Something has changed for a partition that this follower waits for."""
        asked = self._parked.get(partition)
        if asked is not None:
            self._subscribe(asked)

    def _park(self, asked: Subscribe) -> None:
        if self._parked_numbers.get(asked.number, asked.partition) != asked.partition:
            raise InvalidRequestError(f"subscription {asked.number} is of two partitions")
        former = self._parked.get(asked.partition)
        if former is not None:
            del self._parked_numbers[former.number]
        self._parked[asked.partition] = asked
        self._parked_numbers[asked.number] = asked.partition

    def _unpark(self, partition: PartitionId) -> None:
        asked = self._parked.pop(partition, None)
        if asked is not None:
            del self._parked_numbers[asked.number]
            self._host.unpark(partition, self)

    def _decide(self, leading: Leading, asked: Subscribe) -> None:
        known = leading.subscriptions.get(int(self.peer))
        if known is not None and (known.broker_epoch, known.number) > (asked.broker_epoch, asked.number):
            return  # a later one has come by another stream
        broker = self._host.image.brokers.get(int(self.peer))
        if broker is not None and broker.broker_epoch > asked.broker_epoch:
            self.tell(Ended(number=asked.number, reason=Reason.NOT_LEADER))
            return
        log = leading.log
        if known is not None:
            leading.drop(known, None)
        start = leading.first_offset if asked.last_epoch == NO_EPOCH else log.start_offset
        answer = divergence(
            log.epochs, start, log.end_offset, last_epoch=asked.last_epoch, next_offset=asked.next_offset
        )
        match answer:
            case Truncate(epoch, end):
                self.tell(Ended(number=asked.number, reason=Reason.DIVERGED, epoch=epoch, offset=end))
            case TooFarBehind(start):
                self.tell(Ended(number=asked.number, reason=Reason.TOO_FAR_BEHIND, offset=start))
            case Continue() if log.gaps and not asked.takes_gaps:
                self.tell(Ended(number=asked.number, reason=Reason.NEEDS_GAPS))
            case Continue() if leading.must_copy(int(self.peer), asked):
                LOGGER.warning(
                    "log=%s follower=%d ends at %d and is copied from the start: deletes below %d are compacted away",
                    *(log.path, self.peer, asked.next_offset, log.lineage.deletes_end),
                )
                self.tell(Ended(number=asked.number, reason=Reason.TOO_FAR_BEHIND, offset=leading.first_offset))
            case Continue():
                subscription = Subscription(leading, self, asked)
                self._subscriptions[asked.number] = subscription
                self.tell_history(subscription)
                leading.subscribe(subscription, asked.durable_end)
            case _:
                # It knows an epoch that we do not: whoever gave it that one leads, or led after us.
                self.tell(Ended(number=asked.number, reason=Reason.NOT_LEADER))

    def _unsubscribe(self, number: int) -> None:
        subscription = self._subscriptions.get(number)
        if subscription is not None:
            subscription.leading.drop(subscription, None)
        partition = self._parked_numbers.get(number)
        if partition is not None:
            self._unpark(partition)

    async def _acked(self, acks: Acks) -> None:
        if acks.received_bytes > self._pushed_bytes:
            raise InvalidRequestError(f"{acks.received_bytes} bytes are acknowledged of {self._pushed_bytes}")
        if acks.received_bytes > self._received_bytes:
            self._received_bytes = acks.received_bytes
            if self._dirty:
                self._wake.set()  # there may be room for it now
        for at, ack in enumerate(acks.acks, 1):
            if at % ITEMS_PER_SLICE == 0:
                await asyncio.sleep(0)
            subscription = self._subscriptions.get(ack.number)
            if subscription is None or ack.leader_epoch != subscription.leading.leader_epoch:
                continue  # of a subscription that is over
            if ack.durable_end > subscription.next_offset:
                raise InvalidRequestError(f"offset {ack.durable_end} is acknowledged past {subscription.next_offset}")
            subscription.leading.acked(subscription, ack.durable_end)
            self.mark(subscription)

    def forget(self, subscription: Subscription) -> None:
        if self._subscriptions.get(subscription.number) is subscription:
            del self._subscriptions[subscription.number]
        self._dirty.pop(subscription, None)
        self._behind.pop(subscription, None)

    # Pushing.

    def mark(self, subscription: Subscription) -> None:
        """There may be something to push."""
        if subscription.next_offset < subscription.leading.log.end_offset or subscription.ready is not None:
            self._dirty[subscription] = None
            self._wake.set()
        else:
            self.mark_high_watermark(subscription)

    def mark_high_watermark(self, subscription: Subscription) -> None:
        if subscription.sent_high_watermark < subscription.leading.high_watermark:
            self._behind[subscription] = None
            if not self._is_lingering and not self._is_over:
                self._is_lingering = True
                linger_s = self._host.config.high_watermark_linger_ms / 1000
                asyncio.get_running_loop().call_later(linger_s, self._linger_ended)

    def _linger_ended(self) -> None:
        self._is_lingering = False
        if self._behind:
            self._wake.set()

    def tell(self, message: Ended | History) -> None:
        self._outgoing.append(message)
        self._wake.set()

    def tell_history(self, subscription: Subscription) -> None:
        """Before the first batch of a log with gaps, and when more deletes have gone."""
        log = subscription.leading.log
        deletes_end = log.lineage.deletes_end
        if log.gaps and subscription.takes_history and subscription.sent_deletes_end != deletes_end:
            subscription.sent_deletes_end = deletes_end
            entries = tuple((int(epoch), int(start)) for epoch, start in log.epochs)[-HISTORY_ENTRIES_MAX:]
            self.tell(History(subscription.number, deletes_end, entries))

    def _next_outgoing(self) -> Ended | Histories:
        """The next, with all histories that stand right behind it: a new leader has them for all its partitions."""
        first = self._outgoing.popleft()
        if isinstance(first, Ended):
            return first
        histories = [first]
        while self._outgoing and len(histories) < HISTORIES_PER_FRAME_MAX:
            following = self._outgoing[0]
            if not isinstance(following, History):
                break
            histories.append(following)
            self._outgoing.popleft()
        return Histories(tuple(histories))

    async def _send_all(self) -> None:
        try:
            while True:
                await self._wake.wait()
                self._wake.clear()
                while True:
                    while self._outgoing:
                        await self._stream.send(encode(self._next_outgoing()))
                    pushes = self._gather()
                    if not pushes:
                        break
                    await self._stream.send(encode(Pushed(pushes)))
        except (StreamBrokenError, StreamClosedError):
            return  # whoever receives finds out

    def _gather(self) -> list[Push]:
        """What goes out now, and who comes next."""
        pushes: list[Push] = []
        if not self._dirty and (self._is_lingering or not self._behind):
            return pushes
        room = self._host.config.fetch_message_bytes
        window = self._host.config.inflight_bytes_max
        size = 0
        for _ in range(min(len(self._dirty), PUSHES_MAX)):
            if not self._dirty or room <= 0 or self._pushed_bytes - self._received_bytes >= window:
                break
            subscription = next(iter(self._dirty))
            del self._dirty[subscription]
            batches = self._next_batches(subscription, room)
            if batches is None:
                continue
            if size + len(batches) > PUSHED_BYTES_MAX:
                subscription.ready = batches  # with the next message
                self._dirty[subscription] = None
                break
            size += len(batches)
            room -= len(batches)
            self._pushed_bytes += len(batches)
            pushes.append(self._push(subscription, batches))
            if subscription.next_offset < subscription.leading.log.end_offset:
                self._dirty[subscription] = None
        if pushes or not self._is_lingering:
            while self._behind and len(pushes) < PUSHES_MAX:
                subscription = next(iter(self._behind))
                del self._behind[subscription]
                if subscription.sent_high_watermark < subscription.leading.high_watermark:
                    pushes.append(self._push(subscription, b""))
        return pushes

    def _push(self, subscription: Subscription, batches: Buffer) -> Push:
        high_watermark = subscription.leading.high_watermark
        subscription.sent_high_watermark = high_watermark
        offset = subscription.sent_end if subscription.takes_history else NO_PUSH_OFFSET
        if batches:
            subscription.sent_end = subscription.next_offset
        return Push(subscription.number, high_watermark, batches, offset)

    def _next_batches(self, subscription: Subscription, room: int) -> Buffer | None:
        """None if this partition has nothing to push now: something else brings it back into the line."""
        if subscription.is_reading or subscription.is_over:
            return None
        if subscription.ready is not None:
            # Counted when it was read.
            batches, subscription.ready = subscription.ready, None
            return batches
        leading, log = subscription.leading, subscription.leading.log
        room = min(room, self._host.config.partition_inflight_bytes_max - subscription.unacked_bytes)
        if room <= 0 or self._is_held_back(subscription):
            return None
        if self._counts(subscription):
            room = max(1, min(room, self._host.leader_bucket.room(asyncio.get_running_loop().time())))
        if log.gaps and not subscription.takes_gaps:
            leading.drop(subscription, Reason.NEEDS_GAPS)
            return None
        if log.gaps and subscription.takes_history and subscription.sent_deletes_end < 0:
            self.tell_history(subscription)  # it has become a log with gaps; this goes out before the next message
            self._dirty[subscription] = None
            return None
        at = _read_from(subscription)
        try:
            found = leading.read_nowait(at, room)
            if found is not None:
                _check_first(subscription, found.data)
        except TidelogError as error:
            self._unreadable(subscription, error)
            return None
        if found is None:
            self._read_later(subscription, at, room)
            return None
        return self._taken(subscription, at, found)

    def _taken(self, subscription: Subscription, at: int, found: Slice) -> Buffer | None:
        if not found.data:
            return None
        if found.base_offset < subscription.next_offset:
            self._ends_inside(subscription, at, found.base_offset)
            return None
        if len(found.data) > PUSHED_BYTES_MAX:
            limit = f"at most {PUSHED_BYTES_MAX} fit a message between brokers"
            too_large = f"the batch at offset {subscription.next_offset} has {len(found.data)} bytes, {limit}"
            self._unreadable(subscription, RecordTooLargeError(too_large))
            return None
        subscription.pushed(found.next_offset, len(found.data))
        self._spend(subscription, len(found.data))
        return found.data

    def _ends_inside(self, subscription: Subscription, at: int, base_offset: Offset) -> None:
        """The follower's log ends inside of a batch of ours. An empty one may, which begins where records were deleted
        up to; any other has whole batches, and it is ours that is not what was written."""
        leading, start = subscription.leading, subscription.leading.log.start_offset
        if not subscription.is_empty:
            wrong = f"a batch at {base_offset} holds offset {at}, where a follower's ends"
            self._unreadable(subscription, CorruptBatchError(wrong))
        elif at < start:  # which has moved while it was read
            leading.drop(subscription, Reason.TOO_FAR_BEHIND, offset=leading.first_offset)
        else:
            if base_offset < start:
                leading.holds_start(base_offset)
            leading.drop(subscription, Reason.TOO_FAR_BEHIND, offset=base_offset)

    def _unreadable(self, subscription: Subscription, error: Exception) -> None:
        leading = subscription.leading
        if isinstance(error, OffsetOutOfRangeError) and subscription.next_offset < leading.log.start_offset:
            leading.drop(subscription, Reason.TOO_FAR_BEHIND, offset=leading.log.start_offset)
            return
        LOGGER.error("log=%s follower=%d cannot be served: %s", leading.log.path, self.peer, error)
        leading.drop(subscription, Reason.UNREADABLE)
        if isinstance(error, _ROT):
            self._host.found_rot(leading.replica, _read_from(subscription))

    # From the device.

    def _read_later(self, subscription: Subscription, at: int, room: int) -> None:
        subscription.is_reading = True
        self._to_read.append((subscription, at, room))
        if len(self._readers) < self._host.config.cold_reads_max:
            task = asyncio.get_running_loop().create_task(self._read_cold())
            self._readers.add(task)
            task.add_done_callback(self._reader_ended)

    def _reader_ended(self, task: asyncio.Task[None]) -> None:
        self._readers.discard(task)
        self._host.check(task)

    async def _read_cold(self) -> None:
        while self._to_read:
            subscription, offset, room = self._to_read.popleft()
            if subscription.is_over:
                continue
            try:
                found = await subscription.leading.log.read(offset, bytes_max=room)
                _check_first(subscription, found.data)
            except TidelogError as error:
                # A helper that died while it rebuilt an index, too: the follower subscribes again after a moment.
                if not subscription.is_over:
                    self._unreadable(subscription, error)
                continue
            finally:
                subscription.is_reading = False
            if not subscription.is_over:
                subscription.ready = self._taken(subscription, offset, found)
            if not subscription.is_over:
                self.mark(subscription)

    # Throttle.

    def _is_held_back(self, subscription: Subscription) -> bool:
        bucket = self._host.leader_bucket
        if not self._counts(subscription):
            return False
        wait_s = bucket.wait_s(asyncio.get_running_loop().time())
        if wait_s <= 0:
            return False
        if not self._held_back:
            asyncio.get_running_loop().call_later(min(wait_s, 1.0), self._let_go)
        self._held_back[subscription] = None
        return True

    def _let_go(self) -> None:
        held_back, self._held_back = self._held_back, {}
        for subscription in held_back:
            if not subscription.is_over:
                self.mark(subscription)

    def _spend(self, subscription: Subscription, size: int) -> None:
        if self._counts(subscription):
            self._host.leader_bucket.spend(size, asyncio.get_running_loop().time())

    def _counts(self, subscription: Subscription) -> bool:
        replica = subscription.leading.replica
        return replica.is_leader_throttled and subscription.follower not in subscription.leading.state.isr


def _read_from(subscription: Subscription) -> int:
    leading = subscription.leading
    is_first = subscription.is_empty and subscription.next_offset == leading.first_offset
    return leading.log.start_offset if is_first else subscription.next_offset


def _check_first(subscription: Subscription, data: Buffer) -> None:
    """What is pushed first is checked as its follower will check it: CorruptBatchError.

    Reads do not look at CRCs. A follower that has refused a batch asks again from there, so this is where the leader
    finds out that its own log has rotted.
    """
    if subscription.is_checked:
        return
    position = 0
    while position < len(data):
        try:
            position += check_batch(data, position, size_max=len(data)).size
        except (UnsupportedMagicError, UnsupportedCompressionError, RecordTooLargeError) as error:
            raise CorruptBatchError(f"a stored batch is not as it was taken: {error}") from error
    subscription.is_checked = position > 0
