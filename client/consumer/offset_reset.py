"""`OffsetReset`: finds the first position of a partition: the committed offset, or by `auto_offset_reset`."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Sequence

from tidelog.client.cluster import ClusterClient, error_in
from tidelog.client.consumer.errors import NoOffsetForPartitionError
from tidelog.client.consumer.subscription_state import PartitionState, SubscriptionState
from tidelog.client.durations import duration_ms
from tidelog.client.group_offsets import GroupOffsets
from tidelog.client.offsets import EARLIEST, LATEST, FoundOffset
from tidelog.model.errors import TidelogError
from tidelog.model.ids import PartitionId
from tidelog.rpc.v1 import log_pb2 as pb

LOGGER = logging.getLogger(__name__)

_ATTEMPT_MS = 15_000
"""Of one attempt; the next one takes the partitions that are assigned then."""


class OffsetReset:
    """Runs one task while a partition has no position."""

    def __init__(
        self,
        cluster: ClusterClient,
        subscription: SubscriptionState,
        offsets: GroupOffsets | None,
        *,
        reset: str,
        isolation: int,
        changed: Callable[[], None],
    ) -> None:
        self._cluster = cluster
        self._subscription = subscription
        self._offsets = offsets
        self._reset = reset
        self._isolation = isolation
        self._changed = changed
        self._out_of_range: set[PartitionId] = set()
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Partitions may have no position."""
        if self._task is None and self._without_position():
            self._task = asyncio.get_running_loop().create_task(self._run())
            self._task.add_done_callback(self._finish)

    def reset(self, state: PartitionState, reason: str) -> None:
        """Its position is outside of the log: begin as if nothing were committed."""
        LOGGER.warning("partition=%s auto_offset_reset=%s: %s", state.name, self._reset, reason)
        state.reset()
        self._out_of_range.add(state.partition)
        self.start()

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])

    def _without_position(self) -> list[PartitionState]:
        return [state for state in self._subscription if state.position is None and state.error is None]

    def _finish(self, task: asyncio.Task[None]) -> None:
        self._task = None
        if not task.cancelled() and (error := task.exception()) is not None:
            LOGGER.error("offset reset failed", exc_info=error)
            failure = error if isinstance(error, TidelogError) else TidelogError(f"offset reset failed: {error!r}")
            for state in self._without_position():
                state.error = failure
            self._changed()

    async def _run(self) -> None:
        backoff = self._cluster.backoff()
        while states := self._without_position():
            try:
                await self._find_positions(states)
                backoff.reset()
            except TidelogError as error:
                # Fenced, or no coordinator: the membership notices it and keeps the partitions or loses them.
                LOGGER.info("positions are unknown, will retry: %s", error)
                await asyncio.sleep(backoff.next_s())
            self._changed()

    async def _find_positions(self, states: Sequence[PartitionState]) -> None:
        self._out_of_range &= {state.partition for state in states}
        in_range = [state for state in states if state.partition not in self._out_of_range]
        if self._offsets is not None and in_range:
            names = {state.partition: state.name for state in in_range}
            fetch = self._offsets.fetch(list(names), names, timeout_ms=_ATTEMPT_MS)
            offsets, _ = await asyncio.gather(fetch, self._refresh_leaders(in_range))
            for state in in_range:
                committed = offsets[state.partition]
                if committed is not None and state.position is None:
                    state.seek(committed.offset, committed.leader_epoch)
                    state.committed = committed.offset
        if left := [state for state in states if state.position is None]:
            await self._apply_policy(left)

    async def _refresh_leaders(self, states: Iterable[PartitionState]) -> None:
        """Of new partitions, which are fetched next."""
        names = dict.fromkeys(state.topic.name for state in states if self._cluster.leader(state.partition) is None)
        if names:
            await self._cluster.refresh_quietly(*names)

    async def _apply_policy(self, states: Sequence[PartitionState]) -> None:
        if self._reset == "none":
            for state in states:
                reason = "is outside of the log" if state.partition in self._out_of_range else "does not exist"
                state.error = NoOffsetForPartitionError(
                    f"{state.name}: the committed offset {reason}, and auto_offset_reset is 'none': seek to an offset",
                    partitions=[state.name],
                )
            return
        for state, row in (await self.find(states, self._reset)).items():
            if row.error is not None and not row.error.retriable:
                state.error = row.error
            elif row.error is None and state.position is None:
                state.seek(row.offset)
                self._out_of_range.discard(state.partition)

    async def find(self, states: Sequence[PartitionState], where: str | int) -> dict[PartitionState, FoundOffset]:
        """The offsets at "earliest", "latest", a duration ago, or a time in ms; the end if no record is as young."""
        timestamp = {"earliest": EARLIEST, "latest": LATEST}.get(where, where) if isinstance(where, str) else where
        if isinstance(timestamp, str):
            ago_ms = duration_ms(timestamp)
            assert ago_ms is not None, f"{where} is checked when the consumer is created"
            timestamp = self._cluster.clock.now_ms() - ago_ms
        offsets = await self.list_offsets(states, timestamp)
        at_end = [state for state, row in offsets.items() if row.error is None and row.offset < 0]
        return offsets | (await self.list_offsets(at_end, LATEST) if at_end else {})

    async def list_offsets(self, states: Sequence[PartitionState], timestamp: int) -> dict[PartitionState, FoundOffset]:
        """As `offsets.list_offsets`, for partitions of many topics; one request to each leader."""
        items = {
            state.partition: pb.ListOffsetsPartition(
                topic_id=state.partition.topic_id.bytes, partition=state.partition.partition, timestamp=timestamp
            )
            for state in states
        }
        rows = await self._cluster.ask_leaders(
            "ListOffsets",
            items,
            lambda chosen: pb.ListOffsetsRequest(partitions=chosen, isolation=self._isolation),  # type: ignore[arg-type]
            topics=list(dict.fromkeys(state.topic.name for state in states)),
            timeout_ms=_ATTEMPT_MS,
        )
        found = ((state, rows[state.partition]) for state in states)
        return {state: FoundOffset(row.offset, row.timestamp, row.leader_epoch, error_in(row)) for state, row in found}
