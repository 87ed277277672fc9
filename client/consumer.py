"""`tidelog.Consumer`: records out of a cluster, for one thread.

    with tidelog.Consumer("localhost:9292", group="billing", auto_offset_reset="earliest") as consumer:
        consumer.subscribe(["orders"])
        for record in consumer:
            handle(record.key, record.value, record.offset)
            consumer.commit()

Heartbeats, fetching ahead and commits run on the IO thread of the process, whatever the program does meanwhile: a
handler that takes long never costs the membership by itself. `max_poll_interval_ms` (5 minutes) is another matter: a
member that does not come back for so long leaves the group, with a line in the log that says so. Its next poll calls
`on_lost` and joins again.

Callbacks, of rebalances and of commits, run in the program's own thread, inside of `poll` and of the iteration; a
partition is given up only when its `on_revoked` has returned.

Delivery is at least once: what was given out and not committed is given out again after a crash. Automatic commits
(`enable_auto_commit`, every 5 s, on closing and before partitions are given up) take only what the program has come
back for: asking for the next record, or the next poll, says that those before are done. So does `close`, but not a
`with` block that ends by an error.

One thread uses a consumer at a time; only `wakeup` and `metrics` may be called by others. A process that is forked
cannot use a consumer of its parent: it gets a `ForkedError`, since two would be one member.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Coroutine, Iterable, Iterator, Mapping
from re import Pattern
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, TypeVar

from tidelog.client import io_thread
from tidelog.client.arrow import Part, table_of
from tidelog.client.commits import Offsets, Told
from tidelog.client.consumer_errors import ConcurrentUseError, ConsumerClosedError, SubscriptionError
from tidelog.client.consumer_front import (
    CLOSE_MS,
    Partitions,
    Topics,
    When,
    new_core,
    read_offset,
    read_offsets,
    read_partition,
    read_partitions,
    read_times,
    read_topics,
)
from tidelog.client.errors import ForkedError
from tidelog.client.names import ConsumerOptions, read_options
from tidelog.client.rebalance import Listener
from tidelog.client.record import (
    ConsumerRecord,
    GroupMetadata,
    OffsetAndMetadata,
    OffsetAndTimestamp,
    TopicPartition,
)
from tidelog.client.user_side import Asked, UserSide, drive

if TYPE_CHECKING:
    import pyarrow

T = TypeVar("T")
Callback = Callable[[list[TopicPartition]], object]


class Consumer:
    """Options are keywords (`max_poll_records=100`), or a dict of Kafka's names (`{"group.id": "billing"}`); see
    `tidelog.client.names`."""

    def __init__(self, bootstrap: object = None, /, **options: Any) -> None:
        """`bootstrap` is "host:port,host:port", a list of addresses, or a dict of options. Connects to nothing yet."""
        self.options = read_options(ConsumerOptions, bootstrap, options)
        self._host: io_thread.IoThread | None = io_thread.acquire(self)
        self._is_closed = self._is_forked = False
        self._lock = threading.RLock()
        self._side = UserSide(new_core(self._host, self.options), self.options, Asked, time.monotonic)

    # How calls get to the core.

    def _drive(self, work: Coroutine[Any, Any, T]) -> T:
        try:
            host = self._open_host()
            if not self._lock.acquire(blocking=False):
                raise ConcurrentUseError("another thread uses this consumer; it may only call wakeup and metrics")
        except BaseException:
            work.close()
            raise
        try:
            return drive(work, host.run)
        finally:
            self._lock.release()

    def _open_host(self) -> io_thread.IoThread:
        host = self._host
        if self._is_forked:
            raise ForkedError("this consumer belongs to the process that this one was forked from: make another")
        if self._is_closed or host is None:
            raise ConsumerClosedError("this consumer was closed")
        return host

    # What to read.

    def subscribe(
        self,
        topics: Topics = None,
        *,
        pattern: str | Pattern[str] | None = None,
        on_assigned: Callback | None = None,
        on_revoked: Callback | None = None,
        on_lost: Callback | None = None,
    ) -> None:
        """Read these topics as a member of the group; it joins at the next poll. `pattern` must match names of topics
        as a whole, also of topics that are made later. Calls replace each other.

        `on_assigned(partitions)` is called at every rebalance, before anything of them is read: `seek` there to begin
        elsewhere. `on_revoked(partitions)` before they are given up: commit there what is processed; their next owner
        begins only after it. `on_lost(partitions)` when others have them already (without it `on_revoked`).
        """
        names, text = read_topics(topics, pattern)
        self._drive(self._side.subscribe(names, text, Listener(on_assigned, on_revoked, on_lost)))

    def assign(self, partitions: Iterable[Partitions]) -> None:
        """Read these partitions, and no others, without a membership; see `partitions_for`. Not together with
        `subscribe`. New partitions of a topic are not noticed."""
        self._drive(self._side.assign(read_partitions(partitions)))

    def unsubscribe(self) -> None:
        """Leave the group, or give up what was assigned. Commits and callbacks are as at closing."""
        self._drive(self._side.unsubscribe())

    def assignment(self) -> set[TopicPartition]:
        """What is read now. A subscription has nothing before the first polls."""
        return self._drive(self._side.assignment())

    # Records.

    def poll(self, timeout_ms: float = 1_000, max_records: int | None = None) -> list[ConsumerRecord]:
        """Records, as soon as there are any, and at most `max_records` (`max_poll_records`); after `timeout_ms` perhaps
        none. Callbacks run in here. Says that all records of former calls are done.

        Raises `WakeupError`; `TruncatedError`, `NoOffsetError`, `DeserializationError` for a partition that cannot go
        on, again at each call until `seek`; and errors of the membership that will not pass.
        """
        return self._drive(self._side.poll(timeout_ms, max_records))

    def __iter__(self) -> Iterator[ConsumerRecord]:
        """Records, one by one, without an end. To ask for the next says that the one before is done."""
        hand = self._side.hand
        while True:
            self._drive(self._side.fill())
            for record in hand.rows:
                hand.last = record
                yield record
                if hand.attention:
                    break

    def poll_arrow(self, timeout_ms: float = 1_000, max_records: int | None = None) -> pyarrow.Table:
        """As `poll`, but many records as columns, without a Python object for each: topic, partition, offset,
        timestamp, key, value, headers. Key and value are bytes; deserializers are not asked. Needs pyarrow."""
        return table_of(self.poll_parts(timeout_ms, max_records))

    def poll_parts(self, timeout_ms: float = 1_000, max_records: int | None = None) -> list[Part]:
        """What `poll_arrow` makes its table of: batches as columns, without pyarrow."""
        return self._drive(self._side.poll_columns(timeout_ms, max_records))

    def wakeup(self) -> None:
        """From any thread: the poll that is under way, or else the next one, raises `WakeupError`."""
        host = self._host
        if host is not None and not self._is_closed and not self._is_forked:
            host.call_soon(self._side.core.wakeup)

    # Positions.

    def position(self, partition: Partitions) -> int:
        """The offset of the next record that will be given out."""
        return self._drive(self._side.position(read_partition(partition)))

    def seek(self, partition: Partitions, offset: int, *, leader_epoch: int = -1) -> None:
        """Go on there. That the log has no such offset is told by the next polls (see `auto_offset_reset`)."""
        name = read_partition(partition)
        self._drive(self._side.seek(name, read_offset(name, offset), leader_epoch))

    def seek_to_beginning(self, *partitions: Partitions) -> None:
        """Of these, or of all that are assigned."""
        self._drive(self._side.seek_to(read_partitions(partitions), "earliest"))

    def seek_to_end(self, *partitions: Partitions) -> None:
        """Of these, or of all that are assigned."""
        self._drive(self._side.seek_to(read_partitions(partitions), "latest"))

    def seek_to_time(self, when: When | Mapping[TopicPartition, When], *partitions: Partitions) -> None:
        """To the first record at or after a time: ms since 1970, a datetime, or so long ago ("1h"). Of these, of all
        that are assigned, or one for each: {partition: time}. Without such a record to the end."""
        chosen = partitions or tuple(self.assignment())
        self._drive(self._side.seek_to_times(read_times(when, chosen, self._side.now_ms())))

    def pause(self, *partitions: Partitions) -> None:
        """Nothing of these is given out until `resume`. Poll on: the membership and the other partitions need it."""
        self._drive(self._side.pause(read_partitions(partitions)))

    def resume(self, *partitions: Partitions) -> None:
        """Go on with these, where they stopped."""
        self._drive(self._side.resume(read_partitions(partitions)))

    def paused(self) -> set[TopicPartition]:
        """Those of `pause`, as far as they are assigned."""
        return self._drive(self._side.paused())

    # Commits.

    def commit(self, offsets: Offsets | None = None, *, timeout_ms: int | None = None) -> None:
        """Commit all that was given out, or these: {partition: offset or OffsetAndMetadata}, each the NEXT offset to
        read. Returns when it is stored. Tries again what may pass, up to `timeout_ms` (`default_api_timeout_ms`).

        Raises `CommitFailedError` if the group has given the partitions to others.
        """
        self._drive(self._side.commit(read_offsets(offsets), timeout_ms))

    def commit_async(self, offsets: Offsets | None = None, on_commit: Told | None = None) -> None:
        """The same without waiting, and without another attempt. Commits keep their order. `on_commit(offsets, error)`
        runs in one of the next polls, or in `close`; without it a failure is logged."""
        self._drive(self._side.commit_once(read_offsets(offsets), on_commit))

    def committed(self, *partitions: Partitions) -> dict[TopicPartition, OffsetAndMetadata | None]:
        """What the group has committed; None where it has nothing."""
        return self._drive(self._side.committed(read_partitions(partitions)))

    # Questions.

    def beginning_offsets(self, *partitions: Partitions) -> dict[TopicPartition, int]:
        """Where each of these begins; not 0 after retention or `delete_records`."""
        return self._drive(self._side.ends(read_partitions(partitions), is_start=True))

    def end_offsets(self, *partitions: Partitions) -> dict[TopicPartition, int]:
        """Where the next record will be; with read_committed the end of what can be read."""
        return self._drive(self._side.ends(read_partitions(partitions), is_start=False))

    def offsets_for_times(
        self, times: Mapping[TopicPartition, When]
    ) -> dict[TopicPartition, OffsetAndTimestamp | None]:
        """The first record at or after a time; None where there is none."""
        return self._drive(self._side.times(read_times(times, (), self._side.now_ms())))

    def partitions_for(self, topic: str) -> list[TopicPartition]:
        """All partitions of a topic, whoever reads them. `UnknownTopicError` if there is none."""
        return self._drive(self._side.partitions_for(topic))

    def group_metadata(self) -> GroupMetadata:
        """Who it is in its group now."""
        return self._drive(self._side.group_metadata())

    def metrics(self) -> dict[str, float]:
        """Counts since it was made, and the state of now; `records_lag.<partition>` as of the last fetch. From any
        thread."""
        host = self._open_host()
        return drive(self._side.metrics(), host.run)

    # The end.

    def close(self, *, timeout_ms: int = CLOSE_MS) -> None:
        """Commit what was given out (if commits are automatic), call `on_revoked`, and leave the group, so that others
        take over at once. A second call does nothing."""
        self._close(timeout_ms, is_done=True)

    def _close(self, timeout_ms: int, *, is_done: bool) -> None:
        host = self._host
        if self._is_closed or self._is_forked or host is None:
            return
        if self._side.is_in_callback:
            raise SubscriptionError("a rebalance callback cannot close its consumer: return from it first")
        if not self._lock.acquire(blocking=False):
            raise ConcurrentUseError("another thread uses this consumer: `wakeup` it, and close it there")
        try:
            self._drive(self._side.close(timeout_ms, is_done=is_done))
        finally:
            self._is_closed = True
            self._host = None
            host.release(self)
            self._lock.release()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # What was in hand when an error came may not be processed: it is not committed, and given out again.
        self._close(CLOSE_MS, is_done=error is None)

    def at_exit(self, deadline_s: float) -> None:
        """The interpreter ends: leave the group, without a word about what was in hand."""
        left_ms = max(1, int((deadline_s - time.monotonic()) * 1000))
        try:
            self._close(left_ms, is_done=False)
        except ConcurrentUseError:  # a thread that is about to end is in it
            if self._host is not None:
                self._host.run(self._side.core.close(timeout_ms=left_ms))

    def forked(self) -> None:
        self._is_forked = True
        io_thread.leave_behind(self._side, self._host)
        self._host = None
