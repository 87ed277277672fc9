"""`GroupOffsets`: a group's committed offsets, asked of and told to its coordinator.

Commits of one consumer go out one at a time and in the order in which they were asked for, so that an older one never
ends up on top of a newer one. What is asked for while one is under way is put together into the next.

    answer                                       what happens
    done                                         done
    not the coordinator, loading, no answer      find it anew and repeat, unless the commit is `once`
    STALE_MEMBER_EPOCH                           the member's epoch has risen: repeat with the new one
    fenced, unknown member                       CommitFailedError
    anything else                                raised, or for one partition told
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from google.protobuf.message import Message

from tidelog.client.cluster import ClusterClient, error_in
from tidelog.client.consumer_errors import CommitFailedError
from tidelog.client.coordinators import Coordinators, is_passing
from tidelog.client.record import OffsetAndMetadata, TopicPartition
from tidelog.model.errors import CallTimeoutError, ErrorCode, OverloadedError, TidelogError
from tidelog.model.ids import PartitionId
from tidelog.rpc.door import Method, method_named
from tidelog.rpc.v1 import common_pb2 as common
from tidelog.rpc.v1 import groups_pb2 as pb

LOGGER = logging.getLogger(__name__)

_COMMIT = method_named("Groups", "CommitOffsets")
_FETCH = method_named("Groups", "FetchOffsets")
_ATTEMPT_MS = 5_000
"""A coordinator that does not answer so long is looked for anew."""
WAITING_MAX = 10_000
_FENCED = frozenset(
    {
        ErrorCode.FENCED_MEMBER_EPOCH,
        ErrorCode.UNKNOWN_MEMBER_ID,
        ErrorCode.ILLEGAL_GENERATION,
        ErrorCode.FENCED_INSTANCE_ID,
    }
)

Names = Mapping[PartitionId, TopicPartition]


class Identity(Protocol):
    """Who commits: a member of the group, whose epoch may rise, or nobody (an empty id with epoch -1)."""

    @property
    def member_id(self) -> str: ...
    @property
    def member_epoch(self) -> int: ...
    @property
    def instance_id(self) -> str: ...


@dataclass(frozen=True, slots=True)
class Nobody:
    member_id: str = ""
    member_epoch: int = -1
    instance_id: str = ""


@dataclass(slots=True)
class _Waiting:
    partitions: tuple[PartitionId, ...]
    done: asyncio.Future[None]
    end_s: float
    is_once: bool


class GroupOffsets:
    """Of one group; used on one loop."""

    def __init__(
        self, cluster: ClusterClient, coordinators: Coordinators, group: str, identity: Callable[[], Identity]
    ) -> None:
        self.group = group
        self.commits = self.failures = 0
        self._cluster = cluster
        self._coordinators = coordinators
        self._identity = identity
        self._pending: dict[PartitionId, tuple[TopicPartition, OffsetAndMetadata]] = {}
        self._waiting: list[_Waiting] = []
        self._under_way: list[_Waiting] = []
        self._sending: asyncio.Task[None] | None = None
        self._sequence = 0
        """Of the last request that commits: one that is held up on the way and repeated must not come on top."""

    # Commits.

    def commit(
        self,
        offsets: Mapping[PartitionId, OffsetAndMetadata],
        names: Names,
        *,
        timeout_ms: int,
        is_once: bool = False,
    ) -> asyncio.Future[None]:
        """Resolved when they are stored; fails with the error of the first that was not. `is_once`: an error that may
        pass is told, not tried again."""
        loop = asyncio.get_running_loop()
        waiting = _Waiting(tuple(offsets), loop.create_future(), loop.time() + timeout_ms / 1000, is_once)
        waiting.done.add_done_callback(_looked_at)
        if not offsets:
            waiting.done.set_result(None)
            return waiting.done
        if len(self._waiting) >= WAITING_MAX:
            self.failures += 1
            waiting.done.set_exception(
                OverloadedError(f"group '{self.group}': {WAITING_MAX} commits wait for its coordinator already")
            )
            return waiting.done
        self._pending.update({partition: (names[partition], told) for partition, told in offsets.items()})
        self._waiting.append(waiting)
        if self._sending is None:
            self._sending = loop.create_task(self._send_all())
        return waiting.done

    async def _send_all(self) -> None:
        try:
            while self._waiting:
                pending, self._pending = self._pending, {}
                waiting, self._waiting = self._waiting, []
                self._under_way = waiting
                try:
                    errors = await self._send(pending, waiting)
                except TidelogError as whole:
                    errors = dict.fromkeys(pending, whole)
                except Exception as ours:  # nobody shall wait for what will not come
                    LOGGER.exception("group=%s a commit failed", self.group)
                    errors = dict.fromkeys(pending, TidelogError(f"the commit failed: {ours!r}"))
                self._tell(waiting, errors)
        finally:
            self._sending = None
            for one in [*self._under_way, *self._waiting]:
                if not one.done.done():
                    one.done.cancel()

    def _tell(
        self, waiting: Iterable[_Waiting], errors: Mapping[PartitionId, TidelogError], left: Container[PartitionId] = ()
    ) -> None:
        """Whoever waits for none of those that are left hears how it ended."""
        for one in waiting:
            if one.done.done() or any(place in left for place in one.partitions):
                continue
            error = next((errors[place] for place in one.partitions if place in errors), None)
            if error is None:
                self.commits += 1
                one.done.set_result(None)
            else:
                self.failures += 1
                one.done.set_exception(error)

    async def _send(
        self, pending: dict[PartitionId, tuple[TopicPartition, OffsetAndMetadata]], waiting: Sequence[_Waiting]
    ) -> dict[PartitionId, TidelogError]:
        loop = asyncio.get_running_loop()
        end_s = max(one.end_s for one in waiting)
        backoff = self._cluster.backoff()
        left = dict(pending)
        errors: dict[PartitionId, TidelogError] = {}
        while True:
            again: dict[PartitionId, TidelogError] = {}
            try:
                answer = await self._ask(_COMMIT, self._commit_request(left), end_s)
                for place, row in zip(left, answer.offsets, strict=True):
                    error = error_in(row)
                    if error is not None:
                        error = self._judged(error)
                        (again if is_passing(error) else errors)[place] = error
            except TidelogError as error:
                if not is_passing(error):
                    raise self._judged(error) from error
                again = dict.fromkeys(left, error)
            if not again:
                return errors
            pause_s = backoff.next_s()
            # Each by its own word: one that is not to be tried again, or not for so long, holds up no other.
            patient = [one for one in waiting if not one.is_once and loop.time() + pause_s < one.end_s]
            wanted = {place for one in patient for place in one.partitions}
            errors |= {place: error for place, error in again.items() if place not in wanted}
            left = {place: pending[place] for place in again if place in wanted}
            self._tell(waiting, errors, left)
            if not left:
                return errors
            end_s = max((one.end_s for one in patient if not one.done.done()), default=end_s)
            await asyncio.sleep(pause_s)

    def _judged(self, error: TidelogError) -> TidelogError:
        if error.code not in _FENCED:
            return error
        return CommitFailedError(
            f"group '{self.group}' has gone on without this member ({error.code.name}: {error}); what was read since "
            "the last commit is read again by others"
        )

    def _commit_request(
        self, offsets: Mapping[PartitionId, tuple[TopicPartition, OffsetAndMetadata]]
    ) -> pb.CommitOffsetsRequest:
        me = self._identity()
        self._sequence += 1
        request = pb.CommitOffsetsRequest(
            group=self.group,
            member_id=me.member_id,
            member_epoch=me.member_epoch,
            instance_id=me.instance_id,
            sequence=self._sequence,
        )
        for place, (name, told) in offsets.items():
            request.offsets.add(
                topic=name.topic,
                topic_id=place.topic_id.bytes,
                partition=place.partition,
                offset=told.offset,
                leader_epoch=told.leader_epoch,
                metadata=told.metadata,
            )
        return request

    # Questions.

    async def fetch(
        self, partitions: Sequence[PartitionId], names: Names, *, timeout_ms: int
    ) -> dict[PartitionId, OffsetAndMetadata | None]:
        """What is committed of these; None where nothing is. A member's question is refused by a coordinator that does
        not know it (CommitFailedError). Who is about to join asks as anybody may."""
        if not partitions:
            return {}
        loop = asyncio.get_running_loop()
        end_s = loop.time() + timeout_ms / 1000
        backoff = self._cluster.backoff()
        while True:
            me = self._identity()
            is_member = bool(me.member_id) and me.member_epoch > 0
            request = pb.FetchOffsetsRequest(
                group=self.group,
                member_id=me.member_id if is_member else "",
                member_epoch=me.member_epoch if is_member else None,
                partitions=[
                    common.TopicPartition(
                        topic=names[place].topic, topic_id=place.topic_id.bytes, partition=place.partition
                    )
                    for place in partitions
                ],
            )
            try:
                answer = await self._ask(_FETCH, request, end_s)
                failed = next((error for row in answer.offsets if (error := error_in(row)) is not None), None)
                if failed is not None:
                    raise failed
                return {
                    place: OffsetAndMetadata(row.offset, row.metadata, row.leader_epoch) if row.offset >= 0 else None
                    for place, row in zip(partitions, answer.offsets, strict=True)
                }
            except TidelogError as error:
                if not is_passing(error):
                    raise self._judged(error) from error
                pause_s = backoff.next_s()
                if loop.time() + pause_s >= end_s:
                    raise
                await asyncio.sleep(pause_s)

    async def _ask(self, method: Method, request: Message, end_s: float) -> Any:
        """One attempt; the coordinator is forgotten if it was not the one, or did not answer."""
        left_ms = int((end_s - asyncio.get_running_loop().time()) * 1000)
        if left_ms <= 0:
            raise CallTimeoutError(f"group '{self.group}': no answer of its coordinator in time")
        coordinator = await self._coordinators.find(self.group, timeout_ms=left_ms)
        try:
            return await self._cluster.connections.call(
                coordinator.address, method, request, timeout_ms=min(left_ms, _ATTEMPT_MS)
            )
        except TidelogError as error:
            if is_passing(error) and error.code is not ErrorCode.STALE_MEMBER_EPOCH:
                self._coordinators.forget(self.group)
            raise

    async def settled(self, *, timeout_ms: int) -> None:
        """Wait for the commits that are under way and behind it, and not longer than that."""
        if self._sending is not None:
            await asyncio.wait([self._sending], timeout=timeout_ms / 1000)

    async def close(self) -> None:
        """What is under way is given up."""
        if self._sending is not None:
            self._sending.cancel()
            await asyncio.wait([self._sending])


def _looked_at(future: asyncio.Future[None]) -> None:
    if not future.cancelled():
        future.exception()
