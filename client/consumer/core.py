"""`ConsumerCore`: what a consumer does on the IO loop: membership, positions, fetching, commits.

Each public coroutine is a call of the user, who waits on another thread or loop. Callbacks run there (`call_user`).
`fill` puts fetched data into the `FetchBuffer`, from which the user's thread decodes records.

    the user is ...                  the core
    in `fill`                        puts data, runs rebalance callbacks
    processing records               sends heartbeats, fetches ahead up to `prefetch_bytes`; a rebalance sets
                                     `FetchBuffer.attention` and waits: a partition is revoked only in a call
    idle for longer than             leaves the group and logs the reason; the next `fill` runs `on_lost` and joins
    again
      max_poll_interval_ms
    interrupted in a call            completes or cancels the call; the next call goes on from there

Used on one loop; one task at a time calls `fill`. Time and randomness come from the `ClusterClient`.
"""

from __future__ import annotations

import asyncio
import functools
import logging
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Sequence
from contextlib import asynccontextmanager
from re import Pattern
from typing import Any, Concatenate, ParamSpec, TypeVar

from tidelog.client.cluster import ClusterClient
from tidelog.client.consumer.arguments import (
    CLOSE_S,
    ByPartition,
    PartitionLike,
    Topics,
    interceptor_methods,
    read_offset,
    read_offsets,
    read_partition,
    read_partitions,
    read_timeout,
    read_times,
    read_topics,
)
from tidelog.client.consumer.background_tasks import BackgroundTasks
from tidelog.client.consumer.commits import CommitCallback, Commits, Offsets
from tidelog.client.consumer.errors import CommitFailedError, ConsumerClosedError, SubscriptionError, WakeupError
from tidelog.client.consumer.fetch_buffer import FetchBuffer
from tidelog.client.consumer.lookups import Lookups
from tidelog.client.consumer.membership import Membership
from tidelog.client.consumer.metrics import core_metrics
from tidelog.client.consumer.offset_reset import OffsetReset
from tidelog.client.consumer.reader import CHECK_S, Reader
from tidelog.client.consumer.rebalance import RebalanceCallback, RebalanceListener
from tidelog.client.consumer.reconciler import Reconciler, topic_of
from tidelog.client.consumer.settings import isolation_of, member_settings, reader_config
from tidelog.client.consumer.subscription_state import PartitionState, SubscriptionState
from tidelog.client.coordinators import Coordinators
from tidelog.client.durations import TimeLike
from tidelog.client.errors import OffsetOutOfRangeError, QueryTimeoutError, fresh
from tidelog.client.group_offsets import GroupOffsets, Identity, Nobody
from tidelog.client.offsets import EARLIEST, LATEST
from tidelog.client.option_table import ConsumerConfig
from tidelog.client.record import GroupMetadata, OffsetAndMetadata, OffsetAndTimestamp, TopicPartition
from tidelog.client.tasks import Ending, Tasks
from tidelog.model.errors import InvalidRequestError, TidelogError, UnknownTopicIdError

LOGGER = logging.getLogger(__name__)

_LEAVE_TIMEOUT_S = 5.0
"""Long enough for a coordinator to move; otherwise the session timeout removes the member."""
FILL_BYTES = 4 << 20
"""Data that one `fill` puts into the buffer."""


P = ParamSpec("P")
T = TypeVar("T")
Operation = Callable[Concatenate[Any, P], Coroutine[Any, Any, T]]


def timed(operation: Operation[P, T]) -> Operation[P, T]:
    """Ends it after its `timeout` in seconds, by default `default_api_timeout_ms`, whatever it waits for."""

    @functools.wraps(operation)
    async def run(self: Any, /, *args: P.args, **kwargs: P.kwargs) -> T:
        timeout: Any = kwargs.get("timeout")
        timeout_s = read_timeout(timeout, self.config.default_api_timeout_ms / 1000)
        async with _limited(operation.__name__, timeout_s, self.cluster):
            return await operation(self, *args, **kwargs)

    return run


@asynccontextmanager
async def _limited(name: str, timeout_s: float, cluster: ClusterClient) -> AsyncIterator[None]:
    limit = asyncio.timeout(timeout_s)
    try:
        async with limit:
            yield
    except TimeoutError:
        if not limit.expired():
            raise
        raise QueryTimeoutError(f"{name}: not done in {timeout_s:g} s{cluster.reason_text()}") from None


class ConsumerCore:
    """Implements `core_host.Core`."""

    def __init__(self, cluster: ClusterClient, config: ConsumerConfig, buffer: FetchBuffer) -> None:
        """The user's thread takes from `buffer`."""
        self.cluster = cluster
        self.config = config
        self.subscription = SubscriptionState()
        self.polls = self.poll_interval_exceeded = 0
        self._buffer = buffer
        self._reader = Reader(cluster, reader_config(config), self.subscription)
        self._signal = self._reader.arrived
        self._membership: Membership | None = None
        self._offsets: GroupOffsets | None = None
        coordinators = self._coordinators = Coordinators(cluster)
        settings = member_settings(config)
        if settings is not None:
            self._offsets = GroupOffsets(cluster, coordinators, settings.group, self._identity)
        self._offset_reset = OffsetReset(
            cluster,
            self.subscription,
            self._offsets,
            reset=config.auto_offset_reset,
            isolation=isolation_of(config),
            changed=self._update,
        )
        self._lookups = Lookups(cluster, self._offset_reset)
        self._commits = Commits(
            config,
            self.subscription,
            self._offsets,
            partition_of=self._lookups.partition,
            notify=self._set_attention,
            listeners=interceptor_methods(config.interceptors, "on_commit"),
        )
        self.reconciler = Reconciler(
            self.subscription,
            self._commits,
            positions_needed=self._offset_reset.start,
            changed=self._update,
            notify=self._notify,
        )
        if settings is not None:
            self._membership = Membership(cluster, coordinators, settings, self.reconciler)
            self.reconciler.membership = self._membership
        self._is_assigned = False
        self._background = BackgroundTasks(
            config,
            self.subscription,
            self._reader,
            self._commits,
            self.reconciler,
            notify=self._set_attention,
            leave=self._leave_for_polling,
        )
        self._polling = asyncio.Lock()
        self._is_background_started = self._is_woken = self._is_closed = False
        self._tasks = Tasks(self._task_failed)
        self._ending = Ending()

    @asynccontextmanager
    async def call(self) -> AsyncIterator[None]:
        """Around each call of the user: `max_poll_interval_ms` does not run meanwhile."""
        if self._is_closed:
            raise ConsumerClosedError("this consumer is closed")
        self._background.poll_timer.enter(self._now_s())
        try:
            yield
        finally:
            self._background.poll_timer.leave(self._now_s())

    def _now_s(self) -> float:
        return asyncio.get_running_loop().time()

    def _set_attention(self) -> None:
        self._buffer.attention = True

    def _notify(self) -> None:
        self._signal.set()
        self._set_attention()

    def _update(self) -> None:
        """The subscription has changed."""
        self._reader.update()
        self._notify()

    # What to read.

    async def subscribe(
        self,
        topics: Topics = None,
        *,
        pattern: str | Pattern[str] | None = None,
        on_assigned: RebalanceCallback | None = None,
        on_revoked: RebalanceCallback | None = None,
        on_lost: RebalanceCallback | None = None,
    ) -> None:
        """Read these topics as a member of the group; it joins in the next poll. `pattern` matches whole topic names,
        also of topics that are created later. A call replaces the former subscription.

        `on_assigned(partitions)` is called in every rebalance, before anything of them is fetched: `seek` there to
        begin elsewhere. `on_revoked(partitions)` is called before they are revoked: commit there; their next owner
        begins only after it. `on_lost(partitions)` is called when others own them already (without it `on_revoked`).
        The poll raises an error of a callback once; the partitions are assigned, or revoked, all the same.
        """
        names, text = read_topics(topics, pattern)
        if self._membership is None:
            raise SubscriptionError("subscribe needs a group: set `group`, or use assign")
        if self._is_assigned:
            raise SubscriptionError("this consumer uses assign: call unsubscribe before subscribe")
        if not names and not text:
            raise SubscriptionError("no topics to subscribe to; unsubscribe ends a subscription")
        self.reconciler.is_subscribed = self._commits.is_subscribed = True
        self.reconciler.listener = RebalanceListener(on_assigned, on_revoked, on_lost)
        self.reconciler.fatal = None
        self._membership.subscribe(names, text)
        self._tasks.spawn(self._lookups.check_topics(names, may_create=self.config.allow_auto_create_topics))

    @timed
    async def assign(self, partitions: Iterable[PartitionLike], *, timeout: float | None = None) -> None:
        """Read these partitions, and no others, without a membership; see `partitions_for`. Not together with
        `subscribe`. Does not add new partitions of a topic."""
        names = read_partitions(partitions)
        if self.reconciler.is_subscribed:
            raise SubscriptionError("this consumer has subscribed: call unsubscribe before assign")
        if self.config.allow_auto_create_topics:
            await self._lookups.create(name.topic for name in names)
        chosen = {await self._lookups.partition(name): name for name in names}
        self.reconciler.forget([partition for partition in self.subscription.partitions if partition not in chosen])
        for partition, name in chosen.items():
            if partition not in self.subscription:
                self.subscription.add(PartitionState(topic_of(name.topic, partition), partition))
        self._is_assigned = bool(chosen)
        self._update()
        self._offset_reset.start()

    async def unsubscribe(self) -> None:
        """Leave the group, or drop the assignment. Commits and callbacks are those of `close`."""
        await self.reconciler.leave(timeout_ms=self.config.default_api_timeout_ms)
        self.reconciler.reset()
        self._commits.is_subscribed = self._is_assigned = False
        if self._membership is not None and self._membership.is_running:
            await self._leave_group(self._membership, _LEAVE_TIMEOUT_S)

    async def assignment(self) -> set[TopicPartition]:
        """Return the assigned partitions; none before the first poll of a subscription."""
        return {state.name for state in self.subscription}

    # Records.

    async def fill(self, timeout: float | None, *, has_records: bool = False, bytes_max: int = FILL_BYTES) -> None:
        """Puts data into the buffer, or returns without after `timeout` seconds. With `has_records` it only runs the
        callbacks that are due. Raises `WakeupError`, errors of the membership, and the error of a partition: again in
        each call until a seek."""
        self._background.poll_timer.reset(self._now_s())
        end_s = None if timeout is None else self._now_s() + timeout
        # An interrupted call may still be in here: its caller does not wait for its end.
        async with self._polling:
            if not self.reconciler.is_subscribed and not self._is_assigned:
                raise SubscriptionError("nothing to read: subscribe or assign first")
            self.polls += not has_records
            await self._fill(end_s, has_records, bytes_max)

    async def _fill(self, end_s: float | None, has_records: bool, bytes_max: int) -> None:
        while True:
            if self._is_closed:  # by another task
                raise ConsumerClosedError("this consumer is closed")
            # In each iteration: a member that was fenced while it had no partitions joins again here.
            self._start()
            self._signal.clear()
            self._buffer.attention = False
            self._raise_if_woken()
            await self._commits.run_callbacks()
            await self.reconciler.reconcile()
            if has_records:
                return
            if self.reconciler.fatal is not None:
                raise fresh(self.reconciler.fatal)
            self._handle_partition_errors()
            if pieces := self._reader.take(bytes_max, is_consumed=False):
                self._buffer.put(pieces)
                return
            left_s = CHECK_S if end_s is None else end_s - self._now_s()
            if left_s <= 0:
                return
            try:
                async with asyncio.timeout(min(left_s, CHECK_S)):
                    await self._signal.wait()
            except TimeoutError:
                continue

    def _start(self) -> None:
        if not self._is_background_started:
            self._is_background_started = True
            self._tasks.spawn(self._background.run())
        if self._membership is not None and self.reconciler.may_join:
            self._membership.start()

    def _handle_partition_errors(self) -> None:
        while (state := self._reader.next_error()) is not None:
            if isinstance(state.error, OffsetOutOfRangeError):
                self._offset_reset.reset(state, str(state.error))
            elif self._is_deleted(state):
                LOGGER.warning("group=%s partition=%s is gone: %s", self.config.group, state.name, state.error)
        for state in self.subscription:
            if state.error is not None and self._is_reported(state) and not self._is_deleted(state):
                raise fresh(state.error)

    def _is_reported(self, state: PartitionState) -> bool:
        return state.is_error_reported or state.position is None

    def _is_deleted(self, state: PartitionState) -> bool:
        """The coordinator notices it too and takes the partition away."""
        return isinstance(state.error, UnknownTopicIdError) and self.reconciler.is_subscribed

    def wakeup(self) -> None:
        """The `fill` in progress, or else the next one, raises `WakeupError`."""
        self._is_woken = True
        self._notify()

    def _raise_if_woken(self) -> None:
        if self._is_woken:
            self._is_woken = False
            raise WakeupError("woken by wakeup()")

    # Commits.

    async def commit(self, offsets: Offsets | None = None, *, timeout: float | None = None) -> None:
        """Commit everything that you received, or {partition: offset or OffsetAndMetadata}, each the NEXT offset to
        read. Returns when it is stored. Retries up to `timeout` seconds (`default_api_timeout_ms`).

        Raises `CommitFailedError` if the partitions have other owners.
        """
        self._check_may_commit()
        timeout_s = read_timeout(timeout, self.config.default_api_timeout_ms / 1000)
        end_s = self._now_s() + timeout_s
        async with _limited("commit", timeout_s, self.cluster):
            chosen = await self._commits.choose(read_offsets(offsets))
        try:
            await self._commits.commit(*chosen, timeout_ms=max(0, int((end_s - self._now_s()) * 1000)))
        finally:
            await self._commits.run_callbacks_in_commit()

    @timed
    async def commit_async(self, offsets: Offsets | None = None, on_commit: CommitCallback | None = None) -> None:
        """Commit without waiting and without retries. Commits keep their order. `on_commit(error, offsets)` runs in
        the next `commit`, a later poll, or `close`; without it a failure is logged. A poll raises its error."""
        self._check_may_commit()
        self._commits.start_commit(*await self._commits.choose(read_offsets(offsets)), on_commit)

    def _check_may_commit(self) -> None:
        reconciler = self.reconciler
        if reconciler.is_subscribed and not reconciler.is_member and reconciler.departure is not None:
            raise CommitFailedError(
                f"this consumer is not a member of group '{self.config.group}' now: {reconciler.departure}"
            )

    @timed
    async def committed(
        self, *partitions: PartitionLike, timeout: float | None = None
    ) -> dict[TopicPartition, OffsetAndMetadata | None]:
        """Return what the group has committed, by any member; None for nothing."""
        return await self._commits.committed(read_partitions(partitions))

    # Positions.

    def _state(self, partition: PartitionLike) -> PartitionState:
        name = read_partition(partition)
        state = self.subscription.named(name)
        if state is None:
            raise SubscriptionError(f"{name} is not assigned to this consumer")
        return state

    def _states(self, partitions: Sequence[PartitionLike]) -> list[PartitionState]:
        """These, or all that are assigned."""
        states = [self._state(name) for name in read_partitions(partitions)]
        return states or sorted(self.subscription, key=lambda state: state.name)

    @timed
    async def position(self, partition: PartitionLike, *, timeout: float | None = None) -> int:
        """Return the offset of the next record that you receive."""
        state = self._state(partition)
        while state.position is None:
            if state.error is not None:
                raise fresh(state.error)
            self._offset_reset.start()
            await asyncio.sleep(0.01)
        return state.position.consumed[0]

    async def seek(self, partition: PartitionLike, offset: int, *, leader_epoch: int = -1) -> None:
        """Continue at `offset`. An offset outside of the log is handled by the next poll (`auto_offset_reset`)."""
        state = self._state(partition)
        state.seek(read_offset(state.name, offset), leader_epoch)
        self._update()

    @timed
    async def seek_to_beginning(self, *partitions: PartitionLike, timeout: float | None = None) -> None:
        """Continue at the log start of these, or of all assigned partitions."""
        await self._seek_to(self._states(partitions), "earliest")

    @timed
    async def seek_to_end(self, *partitions: PartitionLike, timeout: float | None = None) -> None:
        """Continue at the end of these, or of all assigned partitions."""
        await self._seek_to(self._states(partitions), "latest")

    @timed
    async def seek_to_time(
        self, when: TimeLike | ByPartition[TimeLike], *partitions: PartitionLike, timeout: float | None = None
    ) -> None:
        """Continue at the first record at or after a time: ms since 1970, a datetime, or a duration ago ("1h"); at the
        end if there is no such record. For these, for all assigned partitions, or {partition: time}."""
        assigned = [state.name for state in self.subscription]
        by_time: dict[int, list[PartitionState]] = {}
        for name, time_ms in read_times(when, partitions, assigned, self.cluster.clock.now_ms()).items():
            by_time.setdefault(time_ms, []).append(self._state(name))
        for time_ms, states in by_time.items():
            await self._seek_to(states, time_ms)

    async def _seek_to(self, states: Sequence[PartitionState], where: str | int) -> None:
        for state, row in (await self._offset_reset.find(states, where)).items():
            if row.error is not None:
                raise row.error
            if state.partition in self.subscription:
                state.seek(row.offset)
        self._update()

    async def pause(self, *partitions: PartitionLike) -> None:
        """`poll` returns nothing of these, or of all assigned partitions, until `resume`. Keep polling to stay in the
        group and to read the other partitions."""
        for state in self._states(partitions):
            if not state.is_paused:
                state.is_paused = True
                state.drop_fetched()  # and fetched again after `resume`
        self._update()

    async def resume(self, *partitions: PartitionLike) -> None:
        """Fetch these, or all assigned partitions, again, from their positions."""
        for state in self._states(partitions):
            state.is_paused = False
        self._update()

    async def paused(self) -> set[TopicPartition]:
        """Return the paused ones of the assigned partitions."""
        return {state.name for state in self.subscription if state.is_paused}

    # The cluster.

    @timed
    async def beginning_offsets(
        self, *partitions: PartitionLike, timeout: float | None = None
    ) -> dict[TopicPartition, int]:
        """Return the first offset of each; not 0 after retention or `delete_records`."""
        return await self._lookups.offsets(read_partitions(partitions), EARLIEST)

    @timed
    async def end_offsets(self, *partitions: PartitionLike, timeout: float | None = None) -> dict[TopicPartition, int]:
        """Return the high watermark of each; with read_committed the last stable offset."""
        return await self._lookups.offsets(read_partitions(partitions), LATEST)

    @timed
    async def offsets_for_times(
        self, times: ByPartition[TimeLike], *, timeout: float | None = None
    ) -> dict[TopicPartition, OffsetAndTimestamp | None]:
        """Return the first record at or after a time; None if there is none."""
        return await self._lookups.times(read_times(times, (), (), self.cluster.clock.now_ms()))

    @timed
    async def partitions_for(self, topic: str, timeout: float | None = None) -> list[TopicPartition]:
        """Return all partitions of a topic. Raises `UnknownTopicError`."""
        return await self._lookups.partitions_for(topic)

    # This consumer.

    def _identity(self) -> Identity:
        if self.reconciler.is_subscribed and self._membership is not None:
            return self._membership
        return Nobody()

    async def group_metadata(self) -> GroupMetadata:
        """Return group, member id and member epoch of this consumer, for `Producer.send_offsets`.

        Raises `CommitFailedError` if this consumer has subscribed and is not a member now: without an identity its
        offsets would not be fenced, and others may own its partitions.
        """
        if self.config.group is None:
            raise InvalidRequestError("this consumer has no group")
        if self.reconciler.is_subscribed and not self.reconciler.is_member:
            reason = self.reconciler.departure or "it joins in a poll"
            raise CommitFailedError(f"this consumer is not a member of group '{self.config.group}' now: {reason}")
        identity = self._identity()
        return GroupMetadata(
            self.config.group, identity.member_id, max(-1, identity.member_epoch), identity.instance_id
        )

    def metrics(self) -> dict[str, float]:
        """From any thread."""
        return {
            "polls": self.polls,
            "rebalances": self.reconciler.rebalances,
            "poll_interval_exceeded": self.poll_interval_exceeded,
            **core_metrics(self.subscription, self._reader, self._offsets, self._membership),
        }

    def _task_failed(self, error: BaseException) -> None:
        LOGGER.error("a task of the consumer failed", exc_info=error)
        failure = error if isinstance(error, TidelogError) else TidelogError(f"the consumer failed: {error!r}")
        self.reconciler.failed(failure)

    # The end.

    async def _leave_for_polling(self, reason: str) -> None:
        assert self._membership is not None, "only members leave"
        LOGGER.warning("group=%s member=%s %s", self.config.group, self._membership.member_id, reason)
        self.poll_interval_exceeded += 1
        self.reconciler.lost(CommitFailedError(reason))
        await self._membership.leave()

    async def leave(self, timeout: float) -> None:
        """Before `close`, in a call of the user: commits and runs `on_revoked`."""
        await self._commits.run_callbacks()
        await self.reconciler.leave(timeout_ms=int(timeout * 1000))
        if self._offsets is not None:
            await self._offsets.flush(timeout_ms=int(min(timeout, _LEAVE_TIMEOUT_S) * 500))
        await self._commits.run_callbacks()

    async def close(self, timeout: float | None = None) -> None:
        """Leaves the group. After `timeout` seconds the session timeout does it."""
        self._is_closed = True
        self._notify()
        await self._ending.run(lambda: self._close(CLOSE_S if timeout is None else timeout))

    async def _close(self, timeout: float) -> None:
        try:
            if self._membership is not None:
                await self._leave_group(self._membership, max(0.001, min(timeout, _LEAVE_TIMEOUT_S)))
        finally:
            await self._tasks.end()
            await self._offset_reset.close()
            if self._offsets is not None:
                await self._offsets.close()
            await self._reader.close()
            await self.cluster.close()

    async def _leave_group(self, membership: Membership, timeout: float) -> None:
        """After the commits in progress, which the coordinator would reject later; they get half of the time."""
        end_s = self._now_s() + timeout
        if self._offsets is not None:
            await self._offsets.flush(timeout_ms=int(timeout * 500))
        await membership.leave(timeout_ms=max(1, int((end_s - self._now_s()) * 1000)))
