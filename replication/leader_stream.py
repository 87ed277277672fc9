"""The leader's side of a replication stream: takes subscriptions and acks of one follower broker, pushes batches to it.

    subscribe --not leader in that epoch yet--> parked --metadata arrives--> decided
    subscribe --decided--> Ended(diverged, too far behind, ...)  |  history, if the log has gaps; then pushes

All partitions share the stream. `_dirty` queues subscriptions with something to push. A message gathers up to
`fetch_message_bytes`; a partition with more goes to the end of the queue. Two limits:

- `partition_inflight_bytes_max` of one partition are pushed and not yet durable at the follower: a partition on a slow
  disk there stops alone and delays no other;
- `inflight_bytes_max` of the stream are pushed and not yet received by the follower.

A batch larger than a message between brokers ends its subscription with an error in the log. `max.message.bytes`
rejects such batches, so it was written before that limit existed.

A high watermark without batches waits a few milliseconds for batches to travel with. Tasks read batches that are not in
memory, a few at a time, while other partitions go on.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Sequence

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
from tidelog.replication.broker_context import BrokerContext
from tidelog.replication.divergence import Continue, TooFarBehind, Truncate, divergence
from tidelog.replication.leader_replica import LeaderReplica, Subscription
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
from tidelog.replication.throttle import NO_LIMIT, Bucket
from tidelog.replication.wire import MESSAGE_OVERHEAD_BYTES, PUSH_OVERHEAD_BYTES, decode_from_follower, encode
from tidelog.world.disk import Buffer
from tidelog.world.events import is_asleep
from tidelog.world.slicing import sliced
from tidelog.world.transport import FRAME_BYTES_MAX, Stream

LOGGER = logging.getLogger(__name__)

PARKED_MAX = 1_000_000
PUSHES_MAX = 20_000
"""Pushes in one message."""
HISTORY_ENTRIES_MAX = 10_000
"""Newest epochs of one partition that a history holds; a new leader every minute for a week makes as many."""
HISTORIES_PER_FRAME_MAX = 100
ITEMS_PER_SLICE = 100
"""Subscriptions and acks of one message that are handled in one turn of the event loop: about 5 ms."""
PUSHED_BYTES_MAX = FRAME_BYTES_MAX - MESSAGE_OVERHEAD_BYTES - PUSHES_MAX * PUSH_OVERHEAD_BYTES
"""Bytes of batches in one message."""
_Reading = tuple[Subscription, int, int]
_CORRUPTION_ERRORS = CorruptBatchError, DamagedLogError, UnsupportedCompressionError, UnsupportedMagicError
"""Errors that prove a corrupt batch."""


class LeaderStream:
    """See the module. `run` handles the stream; all other methods are called on its event loop."""

    def __init__(self, streams: LeaderStreams, stream: Stream) -> None:
        self._streams = streams
        self._context = streams.context
        self._config = streams.context.config
        self._stream = stream
        self._subscriptions: dict[int, Subscription] = {}
        self._parked: dict[PartitionId, Subscribe] = {}
        self._parked_numbers: dict[int, PartitionId] = {}
        self._outgoing: deque[Ended | History] = deque()
        self._dirty: dict[Subscription, None] = {}
        self._high_watermark_due: dict[Subscription, None] = {}
        """Subscriptions that lack only the high watermark."""
        self._is_lingering = False
        self._throttled: dict[Subscription, None] = {}
        """Throttled subscriptions; one timer enqueues all of them again."""
        self._pushed_bytes = 0
        self._received_bytes = 0
        self._wake = asyncio.Event()
        self._readers: set[asyncio.Task[None] | None] = set()
        self._to_read: deque[_Reading] = deque()
        """While it is not empty, a reader runs."""
        self._is_over = False

    @property
    def peer(self) -> NodeId:
        return self._stream.peer

    def validate(self) -> None:
        """Assert that only subscriptions of this stream wait for something, and that each waits for what it lacks;
        parked ones are found by number, and cannot be decided yet. Nothing wakes a sender that has missed its turn."""
        live = self._subscriptions
        assert all(live.get(s.number) is s for s in (*self._dirty, *self._high_watermark_due)), "an ended one waits"
        if not self._is_over:
            self._validate_due()
        assert all(s.leader.subscriptions.get(s.follower) is s for s in live.values()), "one that its leader dropped"
        assert {r.number: p for p, r in self._parked.items()} == self._parked_numbers, (
            "parked numbers mirror the parked"
        )
        for partition, request in self._parked.items():
            assert self in self._streams._parked.get(partition, ()), (
                f"nobody decides subscription {request.number} later"
            )
            replica = self._context.replicas.get(partition)
            assert replica is None or replica.role is None or replica.role.leader_epoch <= request.leader_epoch, (
                f"a subscription of epoch {request.leader_epoch} is parked in epoch {replica.role.leader_epoch}"
            )
        assert self._received_bytes <= self._pushed_bytes, f"{self._received_bytes} arrived of {self._pushed_bytes}"
        assert not self._to_read or self._readers, "batches are to be read, and nobody reads"

    def _validate_due(self) -> None:
        for s in self._subscriptions.values():
            is_lagging = s.next_offset < s.leader.log.end_offset or s.ready is not None
            is_full = s.unacked_bytes >= self._config.partition_inflight_bytes_max
            assert not is_lagging or s in self._dirty or s in self._throttled or s.is_reading or is_full, (
                f"subscription {s.number} ends at {s.next_offset} of {s.leader.log.end_offset}, and waits for nothing"
            )
            assert s.sent_high_watermark >= s.leader.high_watermark or s in self._high_watermark_due or is_lagging, (
                f"subscription {s.number} has the high watermark {s.sent_high_watermark}, not {s.leader.high_watermark}"
            )
        has_room = self._pushed_bytes - self._received_bytes < self._config.inflight_bytes_max
        is_due = self._outgoing or (self._dirty and has_room) or (self._high_watermark_due and not self._is_lingering)
        assert not (is_due and is_asleep(self._wake)), "something is to be sent, and the sender sleeps"

    async def run(self) -> None:
        sender = asyncio.get_running_loop().create_task(self._send_all())
        sender.add_done_callback(lambda _: self._stream.close())
        try:
            await self._receive_all()
        finally:
            self._is_over = True
            for subscription in list(self._subscriptions.values()):
                subscription.leader.drop(subscription, None)
            for partition in self._parked:
                self._streams.unpark(partition, self)
            tasks = [sender, *(reader for reader in self._readers if reader is not None)]
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)
            for task in tasks:
                self._context.tasks.check(task)

    async def _receive_all(self) -> None:
        while True:
            try:
                frame = await self._stream.receive()
            except (StreamClosedError, StreamBrokenError):
                return
            match decode_from_follower(frame):
                case Subscribe() as request:
                    self._subscribe(request)
                case Subscribes(requests=several):
                    await self._subscribe_all(several)
                case Unsubscribe(number=number):
                    self._unsubscribe(number)
                case Acks() as acks:
                    await self._acked(acks)

    # Subscriptions.

    async def _subscribe_all(self, several: Sequence[Subscribe]) -> None:
        async for request in sliced(several, ITEMS_PER_SLICE):
            self._subscribe(request)

    def _subscribe(self, request: Subscribe) -> None:
        former = self._parked.get(request.partition)
        if former is not None and former.number > request.number:
            raise InvalidRequestError(f"subscription {request.number} after {former.number}")
        replica = self._context.replicas.get(request.partition)
        leader = None if replica is None else replica.role
        if replica is not None and replica.partition.leader_epoch > request.leader_epoch:
            self._unpark(request.partition)
            self.send_later(Ended(number=request.number, reason=Reason.NOT_LEADER))
        elif (
            not isinstance(leader, LeaderReplica)
            or leader.leader_epoch != request.leader_epoch
            or int(self.peer) not in leader.replica.partition.replicas
        ):
            # This broker's metadata is behind the follower's, or its log is not open yet: decide later.
            if former is None and len(self._parked) >= PARKED_MAX:
                raise InvalidRequestError(f"more than {PARKED_MAX} subscriptions are parked")
            self._park(request)
            self._streams.park(request.partition, self)
        else:
            self._unpark(request.partition)
            self._decide(leader, request)

    def retry(self, partition: PartitionId) -> None:
        """Decide a parked subscription again: its partition has changed. Never raises: it is a metadata change."""
        request = self._parked.get(partition)
        if request is not None:
            self._subscribe(request)

    def _park(self, request: Subscribe) -> None:
        if self._parked_numbers.get(request.number, request.partition) != request.partition:
            raise InvalidRequestError(f"subscription {request.number} names two partitions")
        former = self._parked.get(request.partition)
        if former is not None:
            del self._parked_numbers[former.number]
        self._parked[request.partition] = request
        self._parked_numbers[request.number] = request.partition

    def _unpark(self, partition: PartitionId) -> None:
        request = self._parked.pop(partition, None)
        if request is not None:
            del self._parked_numbers[request.number]
            self._streams.unpark(partition, self)

    def _decide(self, leader: LeaderReplica, request: Subscribe) -> None:
        known = leader.subscriptions.get(int(self.peer))
        if known is not None and (known.broker_epoch, known.number) > (request.broker_epoch, request.number):
            return  # a later subscription came over another stream
        broker = self._context.metadata.image.brokers.get(int(self.peer))
        if broker is not None and broker.broker_epoch > request.broker_epoch:
            self.send_later(Ended(number=request.number, reason=Reason.NOT_LEADER))
            return
        log = leader.log
        if known is not None:
            leader.drop(known, None)
        start = leader.first_offset if request.last_epoch == NO_EPOCH else log.start_offset
        answer = divergence(
            log.epochs, start, log.end_offset, last_epoch=request.last_epoch, next_offset=request.next_offset
        )
        match answer:
            case Truncate(epoch, end):
                self.send_later(Ended(number=request.number, reason=Reason.DIVERGED, epoch=epoch, offset=end))
            case TooFarBehind(start):
                self.send_later(Ended(number=request.number, reason=Reason.TOO_FAR_BEHIND, offset=start))
            case Continue() if log.gaps and not request.takes_gaps:
                self.send_later(Ended(number=request.number, reason=Reason.NEEDS_GAPS))
            case Continue() if leader.must_copy(int(self.peer), request):
                LOGGER.warning(
                    "log=%s follower=%d ends at %d and copies the log from its start: deletes below %d are compacted",
                    *(log.path, self.peer, request.next_offset, log.lineage.deletes_end),
                )
                self.send_later(Ended(number=request.number, reason=Reason.TOO_FAR_BEHIND, offset=leader.first_offset))
            case Continue():
                subscription = Subscription(leader, self, request)
                self._subscriptions[request.number] = subscription
                self.send_history(subscription)
                leader.subscribe(subscription, request.durable_end)
            case _:
                # The follower knows a newer epoch: another broker leads, or led after this one.
                self.send_later(Ended(number=request.number, reason=Reason.NOT_LEADER))

    def _unsubscribe(self, number: int) -> None:
        subscription = self._subscriptions.get(number)
        if subscription is not None:
            subscription.leader.drop(subscription, None)
        partition = self._parked_numbers.get(number)
        if partition is not None:
            self._unpark(partition)

    async def _acked(self, acks: Acks) -> None:
        if acks.received_bytes > self._pushed_bytes:
            raise InvalidRequestError(f"{acks.received_bytes} bytes are acknowledged of {self._pushed_bytes}")
        if acks.received_bytes > self._received_bytes:
            self._received_bytes = acks.received_bytes
            if self._dirty:
                self._wake.set()  # the stream may be below its limit again
        async for ack in sliced(acks.acks, ITEMS_PER_SLICE):
            subscription = self._subscriptions.get(ack.number)
            if subscription is None or ack.leader_epoch != subscription.leader.leader_epoch:
                continue  # the subscription has ended
            if ack.durable_end > subscription.next_offset:
                raise InvalidRequestError(f"offset {ack.durable_end} is acknowledged past {subscription.next_offset}")
            subscription.leader.acked(subscription, ack.durable_end)
            self.mark(subscription)

    def forget(self, subscription: Subscription) -> None:
        if self._subscriptions.get(subscription.number) is subscription:
            del self._subscriptions[subscription.number]
        self._dirty.pop(subscription, None)
        self._high_watermark_due.pop(subscription, None)

    # Pushing.

    def mark(self, subscription: Subscription) -> None:
        """Enqueue the subscription if it has something to push."""
        if subscription.next_offset < subscription.leader.log.end_offset or subscription.ready is not None:
            self._dirty[subscription] = None
            self._wake.set()
        else:
            self.mark_high_watermark(subscription)

    def mark_high_watermark(self, subscription: Subscription) -> None:
        if subscription.sent_high_watermark < subscription.leader.high_watermark:
            self._high_watermark_due[subscription] = None
            if not self._is_lingering and not self._is_over:
                self._is_lingering = True
                linger_s = self._config.high_watermark_linger_ms / 1000
                asyncio.get_running_loop().call_later(linger_s, self._linger_ended)

    def _linger_ended(self) -> None:
        self._is_lingering = False
        if self._high_watermark_due:
            self._wake.set()

    def send_later(self, message: Ended | History) -> None:
        self._outgoing.append(message)
        self._wake.set()

    def send_history(self, subscription: Subscription) -> None:
        """Send the epoch history: before the first batch of a log with gaps, and when `deletes_end` has advanced."""
        log = subscription.leader.log
        deletes_end = log.lineage.deletes_end
        if log.gaps and subscription.takes_history and subscription.sent_deletes_end != deletes_end:
            subscription.sent_deletes_end = deletes_end
            entries = tuple((int(epoch), int(start)) for epoch, start in log.epochs)[-HISTORY_ENTRIES_MAX:]
            self.send_later(History(subscription.number, deletes_end, entries))

    def _next_outgoing(self) -> Ended | Histories:
        """Return the next message, merged with the histories right behind it: a new leader sends one per partition."""
        first = self._outgoing.popleft()
        if isinstance(first, Ended):
            return first
        histories = [first]
        while self._outgoing and len(histories) < HISTORIES_PER_FRAME_MAX:
            message = self._outgoing[0]
            if not isinstance(message, History):
                break
            histories.append(message)
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
            return  # the receiver sees the same error

    def _gather(self) -> list[Push]:
        """Return the pushes of the next message; enqueue subscriptions that have more."""
        pushes: list[Push] = []
        if not self._dirty and (self._is_lingering or not self._high_watermark_due):
            return pushes
        room = self._config.fetch_message_bytes
        window = self._config.inflight_bytes_max
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
            if subscription.next_offset < subscription.leader.log.end_offset:
                self._dirty[subscription] = None
        if pushes or not self._is_lingering:
            while self._high_watermark_due and len(pushes) < PUSHES_MAX:
                subscription = next(iter(self._high_watermark_due))
                del self._high_watermark_due[subscription]
                if subscription.sent_high_watermark < subscription.leader.high_watermark:
                    pushes.append(self._push(subscription, b""))
        return pushes

    def _push(self, subscription: Subscription, batches: Buffer) -> Push:
        high_watermark = subscription.leader.high_watermark
        subscription.sent_high_watermark = high_watermark
        offset = subscription.sent_end if subscription.takes_history else NO_PUSH_OFFSET
        if batches:
            subscription.sent_end = subscription.next_offset
        return Push(subscription.number, high_watermark, batches, offset)

    def _next_batches(self, subscription: Subscription, room: int) -> Buffer | None:
        """Return the next batches of a subscription, or None; an ack, read, timer or append enqueues it again."""
        if subscription.is_reading or subscription.is_over:
            return None
        if subscription.ready is not None:
            # Throttle and limits counted these batches when they were read.
            batches, subscription.ready = subscription.ready, None
            return batches
        leader, log = subscription.leader, subscription.leader.log
        room = min(room, self._config.partition_inflight_bytes_max - subscription.unacked_bytes)
        if room <= 0 or self._is_throttled(subscription):
            return None
        if self._counts(subscription):
            room = max(1, min(room, self._streams.bucket.room(asyncio.get_running_loop().time())))
        if log.gaps and not subscription.takes_gaps:
            leader.drop(subscription, Reason.NEEDS_GAPS)
            return None
        if log.gaps and subscription.takes_history and subscription.sent_deletes_end < 0:
            self.send_history(subscription)  # the log has gaps now; the history leaves before the next push
            self._dirty[subscription] = None
            return None
        at = _read_from(subscription)
        try:
            read_slice = leader.read_nowait(at, room)
            if read_slice is not None:
                _check_first(subscription, read_slice.data)
        except TidelogError as error:
            self._unreadable(subscription, error)
            return None
        if read_slice is None:
            self._read_later(subscription, at, room)
            return None
        return self._note_read(subscription, at, read_slice)

    def _note_read(self, subscription: Subscription, at: int, read_slice: Slice) -> Buffer | None:
        if not read_slice.data:
            return None
        if read_slice.base_offset < subscription.next_offset:
            self._ends_inside(subscription, at, read_slice.base_offset)
            return None
        if len(read_slice.data) > PUSHED_BYTES_MAX:
            limit = f"a message between brokers holds at most {PUSHED_BYTES_MAX}"
            too_large = f"the batch at offset {subscription.next_offset} has {len(read_slice.data)} bytes, {limit}"
            self._unreadable(subscription, RecordTooLargeError(too_large))
            return None
        subscription.pushed(read_slice.next_offset, len(read_slice.data))
        self._spend(subscription, len(read_slice.data))
        return read_slice.data

    def _ends_inside(self, subscription: Subscription, at: int, base_offset: Offset) -> None:
        """Handle a follower whose log ends inside a batch of this log. An empty follower may begin inside a batch:
        records were deleted up to its middle. Any other has whole batches, so this log is corrupt."""
        leader, start = subscription.leader, subscription.leader.log.start_offset
        if not subscription.is_empty:
            wrong = f"the batch at {base_offset} contains offset {at}, where the follower's log ends"
            self._unreadable(subscription, CorruptBatchError(wrong))
        elif at < start:  # the log start advanced during the read
            leader.drop(subscription, Reason.TOO_FAR_BEHIND, offset=leader.first_offset)
        else:
            if base_offset < start:
                leader.note_first_batch(base_offset)
            leader.drop(subscription, Reason.TOO_FAR_BEHIND, offset=base_offset)

    def _unreadable(self, subscription: Subscription, error: Exception) -> None:
        leader = subscription.leader
        if isinstance(error, OffsetOutOfRangeError) and subscription.next_offset < leader.log.start_offset:
            leader.drop(subscription, Reason.TOO_FAR_BEHIND, offset=leader.log.start_offset)
            return
        LOGGER.error("log=%s follower=%d read failed: %s", leader.log.path, self.peer, error)
        leader.drop(subscription, Reason.UNREADABLE)
        if isinstance(error, _CORRUPTION_ERRORS):
            self._context.queue.report_corruption(leader.replica, _read_from(subscription))

    # Reads from disk.

    def _read_later(self, subscription: Subscription, at: int, room: int) -> None:
        subscription.is_reading = True
        self._to_read.append((subscription, at, room))
        if len(self._readers) < self._config.cold_reads_max:
            task = asyncio.get_running_loop().create_task(self._read_cold())
            self._readers.add(task)
            task.add_done_callback(self._context.tasks.check)

    async def _read_cold(self) -> None:
        try:
            while self._to_read:
                await self._read_next()
        finally:
            # Not when the task is done: the sender that `mark` wakes runs before that, and would start no reader.
            self._readers.discard(asyncio.current_task())

    async def _read_next(self) -> None:
        subscription, offset, room = self._to_read.popleft()
        if subscription.is_over:
            return
        try:
            read_slice = await subscription.leader.log.read(offset, bytes_max=room)
            _check_first(subscription, read_slice.data)
        except TidelogError as error:
            # Includes a worker process that died while it rebuilt an index. The follower subscribes again later.
            if not subscription.is_over:
                self._unreadable(subscription, error)
            return
        finally:
            subscription.is_reading = False
        if not subscription.is_over:
            subscription.ready = self._note_read(subscription, offset, read_slice)
        if not subscription.is_over:
            self.mark(subscription)

    # Throttle.

    def _is_throttled(self, subscription: Subscription) -> bool:
        if not self._counts(subscription):
            return False
        wait_s = self._streams.bucket.wait_s(asyncio.get_running_loop().time())
        if wait_s <= 0:
            return False
        if not self._throttled:
            asyncio.get_running_loop().call_later(min(wait_s, 1.0), self._retry_throttled)
        self._throttled[subscription] = None
        return True

    def _retry_throttled(self) -> None:
        throttled, self._throttled = self._throttled, {}
        for subscription in throttled:
            if not subscription.is_over:
                self.mark(subscription)

    def _spend(self, subscription: Subscription, size: int) -> None:
        if self._counts(subscription):
            self._streams.bucket.spend(size, asyncio.get_running_loop().time())

    def _counts(self, subscription: Subscription) -> bool:
        replica = subscription.leader.replica
        return replica.is_leader_throttled and subscription.follower not in subscription.leader.state.isr


class LeaderStreams:
    """All streams of a broker to followers: their throttle, and which of them have parked subscriptions."""

    def __init__(self, context: BrokerContext) -> None:
        self.context = context
        self.bucket = Bucket(NO_LIMIT, 0.0)
        """Limits pushes to throttled replicas (`leader.replication.throttled.rate`)."""
        self._parked: dict[PartitionId, dict[LeaderStream, None]] = {}

    async def serve(self, stream: Stream) -> None:
        await LeaderStream(self, stream).run()

    def park(self, partition_id: PartitionId, stream: LeaderStream) -> None:
        self._parked.setdefault(partition_id, {})[stream] = None

    def unpark(self, partition_id: PartitionId, stream: LeaderStream) -> None:
        streams = self._parked.get(partition_id)
        if streams is not None:
            streams.pop(stream, None)
            if not streams:
                del self._parked[partition_id]

    def retry_parked(self, partition_id: PartitionId) -> None:
        """Decide the parked subscriptions of a partition that has changed."""
        for stream in list(self._parked.get(partition_id, ())):
            stream.retry(partition_id)


def _read_from(subscription: Subscription) -> int:
    leader = subscription.leader
    is_first = subscription.is_empty and subscription.next_offset == leader.first_offset
    return leader.log.start_offset if is_first else subscription.next_offset


def _check_first(subscription: Subscription, data: Buffer) -> None:
    """Check the CRCs of the first pushed batches, as the follower does. Raises CorruptBatchError.

    Reads do not check CRCs. A follower that rejected a batch subscribes again at that offset, so the leader
    detects here that its own log is corrupt.
    """
    if subscription.is_checked:
        return
    position = 0
    while position < len(data):
        try:
            position += check_batch(data, position, size_max=len(data)).size
        except (UnsupportedMagicError, UnsupportedCompressionError, RecordTooLargeError) as error:
            raise CorruptBatchError(f"a stored batch is invalid: {error}") from error
    subscription.is_checked = position > 0
