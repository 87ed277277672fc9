"""`Placing`: where to begin in a partition: at the committed offset, or where `auto_offset_reset` says."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Sequence

from tidelog.client.cluster import ClusterClient, error_in
from tidelog.client.consumer_errors import NoOffsetError
from tidelog.client.durations import duration_ms
from tidelog.client.group_offsets import GroupOffsets
from tidelog.client.offsets import EARLIEST, LATEST, FoundOffset
from tidelog.client.positions import Held, Positions
from tidelog.model.errors import TidelogError
from tidelog.model.ids import PartitionId
from tidelog.rpc.v1 import log_pb2 as pb

LOGGER = logging.getLogger(__name__)

_ATTEMPT_MS = 15_000
"""What takes longer is tried again: partitions may have come and gone."""


class Placing:
    """One task at a time, as long as there is something to place."""

    def __init__(
        self,
        cluster: ClusterClient,
        positions: Positions,
        offsets: GroupOffsets | None,
        *,
        reset: str,
        isolation: int,
        placed: Callable[[], None],
    ) -> None:
        self._cluster = cluster
        self._positions = positions
        self._offsets = offsets
        self._reset = reset
        self._isolation = isolation
        self._placed = placed
        self._out_of_range: set[PartitionId] = set()
        self._task: asyncio.Task[None] | None = None

    def look(self) -> None:
        """Something may have to be placed."""
        if self._task is None and self._unplaced():
            self._task = asyncio.get_running_loop().create_task(self._run())
            self._task.add_done_callback(self._ended)

    def reset(self, held: Held, why: str) -> None:
        """Its position is outside of the log: begin as if nothing were committed."""
        LOGGER.warning("partition=%s auto_offset_reset=%s: %s", held.name, self._reset, why)
        held.offset = held.processed = held.epoch = -1
        self._out_of_range.add(held.partition)
        self.look()

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])

    def _unplaced(self) -> list[Held]:
        return [held for held in self._positions if held.offset < 0 and held.error is None]

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._task = None
        if not task.cancelled() and (error := task.exception()) is not None:
            LOGGER.error("positions cannot be found", exc_info=error)
            told = error if isinstance(error, TidelogError) else TidelogError(f"positions cannot be found: {error!r}")
            for held in self._unplaced():
                held.error = told
            self._placed()

    async def _run(self) -> None:
        backoff = self._cluster.backoff()
        while unplaced := self._unplaced():
            try:
                await self._place(unplaced)
                backoff.reset()
            except TidelogError as error:
                # Fenced or without a coordinator: the membership finds out, and takes them away or does not.
                LOGGER.info("positions are not known yet: %s", error)
                await asyncio.sleep(backoff.next_s())
            self._placed()

    async def _place(self, unplaced: Sequence[Held]) -> None:
        self._out_of_range &= {held.partition for held in unplaced}
        asked = [held for held in unplaced if held.partition not in self._out_of_range]
        if self._offsets is not None and asked:
            names = {held.partition: held.name for held in asked}
            fetching = self._offsets.fetch(list(names), names, timeout_ms=_ATTEMPT_MS)
            found, _ = await asyncio.gather(fetching, self._learn_leaders(asked))
            for held in asked:
                committed = found[held.partition]
                if committed is not None and held.offset < 0:
                    held.place(committed.offset, epoch=committed.leader_epoch)
                    held.stored = committed.offset
        left = [held for held in unplaced if held.offset < 0]
        if left:
            await self._begin(left)

    async def _learn_leaders(self, places: Iterable[Held]) -> None:
        """Of partitions that were not there when this client last looked: they are asked and read in a moment."""
        names = dict.fromkeys(held.topic.name for held in places if self._cluster.leader(held.partition) is None)
        if names:
            await self._cluster.refresh_quietly(*names)

    async def _begin(self, left: Sequence[Held]) -> None:
        if self._reset == "none":
            for held in left:
                why = "is outside of the log" if held.partition in self._out_of_range else "is not there"
                held.error = NoOffsetError(
                    f"{held.name}: the committed offset {why}, and auto_offset_reset is 'none'; seek to where to begin",
                    partitions=[held.name],
                )
            return
        for held, row in (await self.find(left, self._reset)).items():
            if row.error is not None and not row.error.retriable:
                held.error = row.error
            elif row.error is None and held.offset < 0:
                held.place(row.offset)
                self._out_of_range.discard(held.partition)

    async def find(self, places: Iterable[Held], where: str | int) -> dict[Held, FoundOffset]:
        """The offsets of "earliest", "latest", of so long ago, or of a time in ms; the end, where there is nothing as
        young as that."""
        asked = list(places)
        timestamp = {"earliest": EARLIEST, "latest": LATEST}.get(where, where) if isinstance(where, str) else where
        if isinstance(timestamp, str):
            ago_ms = duration_ms(timestamp)
            assert ago_ms is not None, f"{where} is checked when the consumer is made"
            timestamp = self._cluster.clock.now_ms() - ago_ms
        found = await self.ask(asked, timestamp)
        young = [held for held, row in found.items() if row.error is None and row.offset < 0]
        return found | (await self.ask(young, LATEST) if young else {})

    async def ask(self, places: Sequence[Held], timestamp: int) -> dict[Held, FoundOffset]:
        """As `offsets.list_offsets`, of partitions of many topics, one request to each of their leaders."""
        items = {
            held.partition: pb.ListOffsetsPartition(
                topic_id=held.partition.topic_id.bytes, partition=held.partition.partition, timestamp=timestamp
            )
            for held in places
        }
        rows = await self._cluster.ask_leaders(
            "ListOffsets",
            items,
            lambda asked: pb.ListOffsetsRequest(partitions=asked, isolation=self._isolation),  # type: ignore[arg-type]
            topics=list(dict.fromkeys(held.topic.name for held in places)),
            timeout_ms=_ATTEMPT_MS,
        )
        answers = ((held, rows[held.partition]) for held in places)
        return {held: FoundOffset(row.offset, row.timestamp, row.leader_epoch, error_in(row)) for held, row in answers}
