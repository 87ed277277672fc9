"""`Commits`: what a consumer commits, when, and in whose name.

By hand: all that was given out to the user, or what he names. By itself, every `auto_commit_interval_ms`, before
partitions are given up and on closing: what the user has come back for (`Positions.processed`), never a record that he
may still work on.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial

from tidelog.client.consumer_errors import CommitFailedError, ConsumerClosedError
from tidelog.client.group_offsets import GroupOffsets
from tidelog.client.names import ConsumerOptions
from tidelog.client.positions import Positions
from tidelog.client.record import OffsetAndMetadata, TopicPartition
from tidelog.model.errors import InvalidRequestError, TidelogError
from tidelog.model.ids import PartitionId

LOGGER = logging.getLogger(__name__)

Offsets = Mapping[TopicPartition, OffsetAndMetadata | int]
Told = Callable[[dict[TopicPartition, OffsetAndMetadata], TidelogError | None], None]
"""Of a commit that nobody waits for: (offsets, error or None)."""
Chosen = dict[PartitionId, OffsetAndMetadata]


class Commits:
    def __init__(
        self,
        options: ConsumerOptions,
        positions: Positions,
        offsets: GroupOffsets | None,
        *,
        partition_of: Callable[[TopicPartition], Awaitable[PartitionId]],
        attend: Callable[[], None],
    ) -> None:
        self.ended: deque[Callable[[], None]] = deque()
        """Callbacks of commits that have ended, to be called on the user's side."""
        self.is_subscribed = False
        self.hearers: tuple[Callable[[dict[TopicPartition, OffsetAndMetadata]], object], ...] = ()
        self._options = options
        self._positions = positions
        self._offsets = offsets
        self._partition_of = partition_of
        self._attend = attend
        self._auto: asyncio.Future[None] | None = None

    def _stored(self, chosen: Chosen, names: Mapping[PartitionId, TopicPartition]) -> None:
        self._positions.committed(chosen)
        if self.hearers and chosen:
            told = {names[place]: what for place, what in chosen.items()}
            self.ended.extend(partial(_tell, hear, told) for hear in self.hearers)
            self._attend()

    # By hand.

    async def commit(self, offsets: Offsets | None, *, timeout_ms: int | None) -> None:
        store = self._store()
        chosen = await self._chosen(offsets)
        timeout_ms = timeout_ms or self._options.default_api_timeout_ms
        names = await self._names(chosen, offsets)
        await asyncio.shield(store.commit(chosen, names, timeout_ms=timeout_ms))
        self._stored(chosen, names)

    async def commit_once(self, offsets: Offsets | None, told: Told | None) -> None:
        """One attempt, which is in order with all others and for whose end nobody waits: `told` joins `ended`."""
        store = self._store()
        chosen = await self._chosen(offsets)
        names = await self._names(chosen, offsets)

        def done(found: asyncio.Future[None]) -> None:
            error: BaseException | None = ConsumerClosedError("the consumer was closed before the answer")
            if not found.cancelled():
                error = found.exception()
            if error is None:
                self._stored(chosen, names)
            if told is not None:
                failure = error if error is None or isinstance(error, TidelogError) else TidelogError(repr(error))
                self.ended.append(lambda: told({names[place]: what for place, what in chosen.items()}, failure))
                self._attend()
            elif error is not None:
                LOGGER.warning("group=%s a commit failed: %s", self._options.group, error)

        timeout_ms = self._options.default_api_timeout_ms
        store.commit(chosen, names, timeout_ms=timeout_ms, is_once=True).add_done_callback(done)

    def _store(self) -> GroupOffsets:
        if self._offsets is None:
            raise InvalidRequestError("committed offsets belong to a group: give `group` when the consumer is made")
        return self._offsets

    async def _chosen(self, offsets: Offsets | None) -> Chosen:
        if offsets is None:
            return self._positions.to_commit()
        chosen: Chosen = {}
        for name, what in offsets.items():
            key = TopicPartition(*name)
            held = self._positions.named(key)
            if held is None and self.is_subscribed:
                raise CommitFailedError(f"{key} is not assigned to this member now: others have it, or nobody")
            offset = what if isinstance(what, OffsetAndMetadata) else OffsetAndMetadata(int(what))
            if offset.offset < 0:
                raise InvalidRequestError(f"{key}: offset {offset.offset} cannot be committed")
            chosen[await self._partition_of(key) if held is None else held.partition] = offset
        return chosen

    async def _names(self, chosen: Chosen, offsets: Offsets | None = None) -> dict[PartitionId, TopicPartition]:
        names = {place: self._positions.held[place].name for place in chosen if place in self._positions}
        if len(names) < len(chosen):  # of a program that commits what it does not read
            named = [TopicPartition(*name) for name in offsets or ()]
            names |= {await self._partition_of(name): name for name in named if self._positions.named(name) is None}
        return names

    # By itself.

    def auto_soon(self) -> None:
        """One attempt in the background; the next one comes by itself."""
        options = self._options
        if not options.enable_auto_commit or self._offsets is None or self._auto is not None:
            return
        chosen = self._positions.to_auto_commit()
        if not chosen:
            return
        names = {place: self._positions.held[place].name for place in chosen}

        def done(found: asyncio.Future[None]) -> None:
            self._auto = None
            if found.cancelled():
                return
            if (error := found.exception()) is not None:
                LOGGER.warning("group=%s the automatic commit failed: %s", options.group, error)
            else:
                self._stored(chosen, names)

        self._auto = self._offsets.commit(chosen, names, timeout_ms=options.default_api_timeout_ms, is_once=True)
        self._auto.add_done_callback(done)

    async def before_giving_up(self, partitions: Sequence[PartitionId], *, timeout_ms: int) -> None:
        """A failure costs repeats, and is told in the log."""
        options = self._options
        if not options.enable_auto_commit or self._offsets is None:
            return
        chosen = self._positions.to_auto_commit(partitions)
        names = {place: self._positions.held[place].name for place in chosen}
        timeout_ms = min(options.default_api_timeout_ms, timeout_ms)
        try:
            await asyncio.shield(self._offsets.commit(chosen, names, timeout_ms=timeout_ms))
            self._stored(chosen, names)
        except TidelogError as error:
            LOGGER.warning("group=%s the commit before giving partitions up failed: %s", options.group, error)

    async def committed(self, names: Sequence[TopicPartition]) -> dict[TopicPartition, OffsetAndMetadata | None]:
        """What the group has committed, whoever did it."""
        store = self._store()
        places = {await self._partition_of(name): name for name in names}
        found = await store.fetch(list(places), places, timeout_ms=self._options.default_api_timeout_ms)
        return {places[place]: what for place, what in found.items()}


def _tell(
    hear: Callable[[dict[TopicPartition, OffsetAndMetadata]], object], told: dict[TopicPartition, OffsetAndMetadata]
) -> None:
    try:
        hear(told)
    except Exception:
        LOGGER.exception("an interceptor failed: on_commit")
