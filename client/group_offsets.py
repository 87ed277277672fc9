"""`GroupOffsets`: commits and fetches the offsets of a group.

A fetch waits until no open transaction has an offset for its partitions, whatever the isolation level: a consumer that
began at the offset before would process records twice.

The commits of one consumer are sent one at a time and in order, so that an older one never overwrites a newer one.
Commits that arrive during a request are merged into the next one.

    response                                     reaction
    stored                                       done
    not the coordinator, loading, no response    find the coordinator and retry, unless the commit is `once`
    UNSTABLE_OFFSET_COMMIT                       retry until the transaction has ended
    STALE_MEMBER_EPOCH                           the member's epoch has risen: retry with the new one
    fenced, unknown member                       CommitFailedError
    anything else                                raise the error, for each partition
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import Any, Protocol

from google.protobuf.message import Message

from tidelog.client.cluster import ClusterClient, error_in
from tidelog.client.connections import call_in_parts
from tidelog.client.consumer.errors import CommitFailedError
from tidelog.client.coordinators import Coordinators, is_retriable
from tidelog.client.record import OffsetAndMetadata, TopicPartition
from tidelog.model.errors import CallTimeoutError, ErrorCode, OverloadedError, TidelogError
from tidelog.model.ids import PartitionId
from tidelog.rpc.grpc.methods import PARTITIONS_MAX, Method, method_named
from tidelog.rpc.v1 import common_pb2 as common
from tidelog.rpc.v1 import groups_pb2 as pb

LOGGER = logging.getLogger(__name__)

_COMMIT = method_named("Groups", "CommitOffsets")
_FETCH = method_named("Groups", "FetchOffsets")
_ATTEMPT_MS = 5_000
"""Of one attempt; then find the coordinator again."""
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
    """A member of the group, whose epoch may rise, or no member (an empty id with epoch -1)."""

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
    """The offsets of one group. Used on one loop."""

    def __init__(
        self,
        cluster: ClusterClient,
        coordinators: Coordinators,
        group: str,
        identity: Callable[[], Identity],
    ) -> None:
        self.group = group
        self.commits = self.failures = 0
        self._cluster = cluster
        self._coordinators = coordinators
        self._identity = identity
        self._pending: dict[PartitionId, tuple[TopicPartition, OffsetAndMetadata]] = {}
        self._waiting: list[_Waiting] = []
        self._in_flight: list[_Waiting] = []
        self._sending: asyncio.Task[None] | None = None
        self._sequence = 0
        """Of the last commit request: a delayed one that was retried must not overwrite a newer one."""

    # Commits.

    def commit(
        self,
        offsets: Mapping[PartitionId, OffsetAndMetadata],
        names: Names,
        *,
        timeout_ms: int,
        is_once: bool = False,
    ) -> asyncio.Future[None]:
        """Resolved when all are stored; fails with the error of the first that is not. `is_once`: no retries."""
        loop = asyncio.get_running_loop()
        waiting = _Waiting(tuple(offsets), loop.create_future(), loop.time() + timeout_ms / 1000, is_once)
        waiting.done.add_done_callback(_retrieve_exception)
        if not offsets:
            waiting.done.set_result(None)
            return waiting.done
        if len(self._waiting) >= WAITING_MAX:
            self.failures += 1
            waiting.done.set_exception(
                OverloadedError(f"group '{self.group}': {WAITING_MAX} commits wait for the coordinator already")
            )
            return waiting.done
        self._pending.update({partition: (names[partition], offset) for partition, offset in offsets.items()})
        self._waiting.append(waiting)
        if self._sending is None:
            self._sending = loop.create_task(self._send_all())
        return waiting.done

    async def _send_all(self) -> None:
        try:
            while self._waiting:
                pending, self._pending = self._pending, {}
                waiting, self._waiting = self._waiting, []
                self._in_flight = waiting
                try:
                    errors = await self._send(pending, waiting)
                except TidelogError as error:
                    errors = dict.fromkeys(pending, error)
                except Exception as error:  # a bug of ours: fail the callers, do not let them wait
                    LOGGER.exception("group=%s commit failed", self.group)
                    errors = dict.fromkeys(pending, TidelogError(f"the commit failed: {error!r}"))
                self._resolve(waiting, errors)
        finally:
            self._sending = None
            for commit in [*self._in_flight, *self._waiting]:
                if not commit.done.done():
                    commit.done.cancel()

    def _resolve(
        self, waiting: Iterable[_Waiting], errors: Mapping[PartitionId, TidelogError], left: Container[PartitionId] = ()
    ) -> None:
        """Resolves the commits that wait for none of the partitions in `left`."""
        for commit in waiting:
            if commit.done.done() or any(partition in left for partition in commit.partitions):
                continue
            error = next((errors[partition] for partition in commit.partitions if partition in errors), None)
            if error is None:
                self.commits += 1
                commit.done.set_result(None)
            else:
                self.failures += 1
                commit.done.set_exception(error)

    async def _send(
        self, pending: dict[PartitionId, tuple[TopicPartition, OffsetAndMetadata]], waiting: Sequence[_Waiting]
    ) -> dict[PartitionId, TidelogError]:
        loop = asyncio.get_running_loop()
        end_s = max(commit.end_s for commit in waiting)
        backoff = self._cluster.backoff()
        left = dict(pending)
        errors: dict[PartitionId, TidelogError] = {}
        while True:
            again: dict[PartitionId, TidelogError] = {}
            unsent = iter(left)
            # Each request has a sequence number of its own, so these are not parts of one.
            while part := list(islice(unsent, PARTITIONS_MAX)):
                try:
                    request = self._commit_request({partition: left[partition] for partition in part})
                    answer = await self._call(_COMMIT, request, end_s)
                    for partition, row in zip(part, answer.offsets, strict=True):
                        error = error_in(row)
                        if error is not None:
                            error = self._translate(error)
                            (again if is_retriable(error) else errors)[partition] = error
                except TidelogError as error:
                    if not is_retriable(error):
                        raise self._translate(error) from error
                    again |= dict.fromkeys((*part, *unsent), error)
            if not again:
                return errors
            pause_s = backoff.next_s()
            # Each commit has its own limit: one that is not retried, or not for so long, delays no other.
            retried = [commit for commit in waiting if not commit.is_once and loop.time() + pause_s < commit.end_s]
            retried_partitions = {partition for commit in retried for partition in commit.partitions}
            errors |= {partition: error for partition, error in again.items() if partition not in retried_partitions}
            left = {partition: pending[partition] for partition in again if partition in retried_partitions}
            self._resolve(waiting, errors, left)
            if not left:
                return errors
            end_s = max((commit.end_s for commit in retried if not commit.done.done()), default=end_s)
            await asyncio.sleep(pause_s)

    def _translate(self, error: TidelogError) -> TidelogError:
        if error.code not in _FENCED:
            return error
        return CommitFailedError(
            f"group '{self.group}' removed this member ({error.code.name}: {error}); others read the records since "
            "the last commit again"
        )

    def _commit_request(
        self, offsets: Mapping[PartitionId, tuple[TopicPartition, OffsetAndMetadata]]
    ) -> pb.CommitOffsetsRequest:
        identity = self._identity()
        self._sequence += 1
        request = pb.CommitOffsetsRequest(
            group=self.group,
            member_id=identity.member_id,
            member_epoch=identity.member_epoch,
            instance_id=identity.instance_id,
            sequence=self._sequence,
        )
        for partition, (name, offset) in offsets.items():
            request.offsets.add(
                topic=name.topic,
                topic_id=partition.topic_id.bytes,
                partition=partition.partition,
                offset=offset.offset,
                leader_epoch=offset.leader_epoch,
                metadata=offset.metadata,
            )
        return request

    # Fetches.

    async def fetch(
        self, partitions: Sequence[PartitionId], names: Names, *, timeout_ms: int
    ) -> dict[PartitionId, OffsetAndMetadata | None]:
        """The committed offsets; None for nothing. Waits for open transactions that have offsets of these partitions:
        what they commit would be read twice. The coordinator rejects a member that it does not know
        (CommitFailedError); a consumer that has not joined yet asks without a member id."""
        if not partitions:
            return {}
        loop = asyncio.get_running_loop()
        end_s = loop.time() + timeout_ms / 1000
        backoff = self._cluster.backoff()
        while True:
            identity = self._identity()
            is_member = bool(identity.member_id) and identity.member_epoch > 0
            request = pb.FetchOffsetsRequest(
                group=self.group,
                member_id=identity.member_id if is_member else "",
                member_epoch=identity.member_epoch if is_member else None,
                require_stable=True,
                partitions=[
                    common.TopicPartition(
                        topic=names[partition].topic, topic_id=partition.topic_id.bytes, partition=partition.partition
                    )
                    for partition in partitions
                ],
            )
            try:
                answer = await self._call(_FETCH, request, end_s)
                failed = next((error for row in answer.offsets if (error := error_in(row)) is not None), None)
                if failed is not None:
                    raise failed
                return {
                    partition: OffsetAndMetadata(row.offset, row.metadata, row.leader_epoch)
                    if row.offset >= 0
                    else None
                    for partition, row in zip(partitions, answer.offsets, strict=True)
                }
            except TidelogError as error:
                if not is_retriable(error):
                    raise self._translate(error) from error
                pause_s = backoff.next_s()
                if loop.time() + pause_s >= end_s:
                    raise
                await asyncio.sleep(pause_s)

    async def _call(self, method: Method, request: Message, end_s: float) -> Any:
        """One attempt. Forgets the coordinator if it was the wrong one, or did not answer."""
        left_ms = int((end_s - asyncio.get_running_loop().time()) * 1000)
        if left_ms <= 0:
            raise CallTimeoutError(f"group '{self.group}': the coordinator did not answer in time")
        coordinator = await self._coordinators.find(self.group, timeout_ms=left_ms)
        try:
            call = partial(self._cluster.call_at, coordinator.address, method, timeout_ms=min(left_ms, _ATTEMPT_MS))
            return await call_in_parts(method, request, call)
        except TidelogError as error:
            if is_retriable(error) and error.code is not ErrorCode.STALE_MEMBER_EPOCH:
                self._coordinators.forget(self.group)
            raise

    async def flush(self, *, timeout_ms: int) -> None:
        """Wait for all commits, up to `timeout_ms`."""
        if self._sending is not None:
            await asyncio.wait([self._sending], timeout=timeout_ms / 1000)

    async def close(self) -> None:
        """Cancel all commits."""
        if self._sending is not None:
            self._sending.cancel()
            await asyncio.wait([self._sending])


def _retrieve_exception(future: asyncio.Future[None]) -> None:
    if not future.cancelled():
        future.exception()
