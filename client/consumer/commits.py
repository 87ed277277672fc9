"""`Commits`: what a consumer commits, and when.

The user commits what it received, or the offsets that it names. Automatic commits, every `auto_commit_interval_ms`,
before a revocation and on close, take what the user has processed (`Position.processed`).
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial

from tidelog.client.bridge import call_user
from tidelog.client.consumer.arguments import ByPartition
from tidelog.client.consumer.errors import CommitFailedError, ConsumerClosedError
from tidelog.client.consumer.subscription_state import SubscriptionState
from tidelog.client.group_offsets import GroupOffsets
from tidelog.client.option_table import ConsumerConfig
from tidelog.client.record import OffsetAndMetadata, TopicPartition
from tidelog.model.errors import InvalidRequestError, TidelogError
from tidelog.model.ids import PartitionId

LOGGER = logging.getLogger(__name__)

Offsets = ByPartition[OffsetAndMetadata | int]
CommitCallback = Callable[[TidelogError | None, dict[TopicPartition, OffsetAndMetadata]], object]
"""on_commit(error, offsets); the error is None after a success."""
_Chosen = dict[PartitionId, OffsetAndMetadata]
_Names = Mapping[PartitionId, TopicPartition]


class Commits:
    def __init__(
        self,
        config: ConsumerConfig,
        subscription: SubscriptionState,
        offsets: GroupOffsets | None,
        *,
        partition_of: Callable[[TopicPartition], Awaitable[PartitionId]],
        notify: Callable[[], None],
        listeners: Sequence[CommitCallback] = (),
    ) -> None:
        """`listeners` hear of every commit: the interceptors' `on_commit`."""
        self.is_subscribed = False
        self._config = config
        self._subscription = subscription
        self._offsets = offsets
        self._partition_of = partition_of
        self._notify = notify
        self._listeners = listeners
        self._callbacks: deque[Callable[[], object]] = deque()
        self._auto_commit: asyncio.Future[None] | None = None

    async def run_callbacks(self) -> None:
        """Of finished commits, on the user's thread or loop."""
        while self._callbacks:
            await call_user(self._callbacks.popleft())

    async def run_callbacks_in_commit(self) -> None:
        """Their errors are not those of the commit: the next poll raises them."""
        errors: list[Exception] = []
        while self._callbacks:
            try:
                await call_user(self._callbacks.popleft())
            except Exception as error:
                errors.append(error)
        self._callbacks.extend(partial(_raise, error) for error in errors)

    def _report(self, error: TidelogError | None, chosen: _Chosen, names: _Names) -> None:
        """A commit has ended."""
        if error is None:
            self._subscription.note_commit(chosen)
        if self._listeners and chosen:
            offsets = {names[partition]: offset for partition, offset in chosen.items()}
            self._callbacks.extend(partial(_call_listener, listener, error, offsets) for listener in self._listeners)
            self._notify()

    # By the user.

    async def choose(self, offsets: Offsets | None) -> tuple[_Chosen, _Names]:
        """What to commit, and the names of its partitions."""
        self._store()
        chosen = await self._choose(offsets)
        return chosen, await self._names(chosen, offsets)

    async def commit(self, chosen: _Chosen, names: _Names, *, timeout_ms: int) -> None:
        try:
            await asyncio.shield(self._store().commit(chosen, names, timeout_ms=timeout_ms))
        except TidelogError as error:
            self._report(error, chosen, names)
            raise
        self._report(None, chosen, names)

    def start_commit(self, chosen: _Chosen, names: _Names, on_commit: CommitCallback | None) -> None:
        """One attempt, in order with all others; nobody waits for its end."""

        def finish(result: asyncio.Future[None]) -> None:
            error: BaseException | None = ConsumerClosedError("the consumer was closed before the response")
            if not result.cancelled():
                error = result.exception()
            failure = _as_tidelog_error(error)
            self._report(failure, chosen, names)
            if on_commit is not None:
                by_name = {names[partition]: offset for partition, offset in chosen.items()}
                self._callbacks.append(lambda: on_commit(failure, by_name))
                self._notify()
            elif error is not None:
                LOGGER.warning("group=%s commit failed: %s", self._config.group, error)

        timeout_ms = self._config.default_api_timeout_ms
        self._store().commit(chosen, names, timeout_ms=timeout_ms, is_once=True).add_done_callback(finish)

    def _store(self) -> GroupOffsets:
        if self._offsets is None:
            raise InvalidRequestError("commits need a group: set `group` when you create the consumer")
        return self._offsets

    async def _choose(self, offsets: Offsets | None) -> _Chosen:
        if offsets is None:
            return self._subscription.to_commit()
        chosen: _Chosen = {}
        for name, value in offsets.items():
            key = TopicPartition(*name)
            state = self._subscription.named(key)
            if state is None and self.is_subscribed:
                raise CommitFailedError(f"{key} is not assigned to this member now")
            offset = value if isinstance(value, OffsetAndMetadata) else OffsetAndMetadata(int(value))
            chosen[await self._partition_of(key) if state is None else state.partition] = offset
        return chosen

    async def _names(self, chosen: _Chosen, offsets: Offsets | None = None) -> dict[PartitionId, TopicPartition]:
        assigned = self._subscription.partitions
        names = {partition: assigned[partition].name for partition in chosen if partition in assigned}
        if len(names) < len(chosen):  # offsets of partitions that are not assigned
            keys = [TopicPartition(*name) for name in offsets or ()]
            names |= {await self._partition_of(key): key for key in keys if self._subscription.named(key) is None}
        return names

    async def committed(self, names: Sequence[TopicPartition]) -> dict[TopicPartition, OffsetAndMetadata | None]:
        """What the group has committed, by any member."""
        store = self._store()
        partitions = {await self._partition_of(name): name for name in names}
        offsets = await store.fetch(list(partitions), partitions, timeout_ms=self._config.default_api_timeout_ms)
        return {partitions[partition]: offset for partition, offset in offsets.items()}

    # Automatic.

    def start_auto_commit(self) -> None:
        """One attempt in the background; the next one comes after the interval."""
        if not self._config.enable_auto_commit or self._offsets is None or self._auto_commit is not None:
            return
        chosen = self._subscription.to_auto_commit()
        if not chosen:
            return
        names = {partition: self._subscription.partitions[partition].name for partition in chosen}

        def finish(result: asyncio.Future[None]) -> None:
            self._auto_commit = None
            if result.cancelled():
                return
            error = result.exception()
            if error is not None:
                LOGGER.warning("group=%s automatic commit failed: %s", self._config.group, error)
            self._report(_as_tidelog_error(error), chosen, names)

        timeout_ms = self._config.default_api_timeout_ms
        self._auto_commit = self._offsets.commit(chosen, names, timeout_ms=timeout_ms, is_once=True)
        self._auto_commit.add_done_callback(finish)

    async def before_revocation(self, partitions: Sequence[PartitionId], *, timeout_ms: int | None = None) -> None:
        """The automatic commit before partitions go. A failure is logged: the next owner reads some records again."""
        if not self._config.enable_auto_commit or self._offsets is None:
            return
        chosen = self._subscription.to_auto_commit(partitions)
        names = {partition: self._subscription.partitions[partition].name for partition in chosen}
        limit_ms = self._config.max_poll_interval_ms if timeout_ms is None else timeout_ms
        timeout_ms = min(self._config.default_api_timeout_ms, limit_ms)
        try:
            await asyncio.shield(self._offsets.commit(chosen, names, timeout_ms=timeout_ms))
            self._report(None, chosen, names)
        except TidelogError as error:
            self._report(error, chosen, names)
            LOGGER.warning("group=%s commit before a revocation failed: %s", self._config.group, error)


def _raise(error: Exception) -> None:
    raise error


def _as_tidelog_error(error: BaseException | None) -> TidelogError | None:
    return error if error is None or isinstance(error, TidelogError) else TidelogError(repr(error))


def _call_listener(
    listener: CommitCallback, error: TidelogError | None, offsets: dict[TopicPartition, OffsetAndMetadata]
) -> None:
    try:
        listener(error, offsets)
    except Exception:
        LOGGER.exception("interceptor failed in on_commit")
