"""Requests of one partition to the data services, for tests: results are plain values, errors are raised."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

from tidelog.model.errors import TidelogError
from tidelog.model.ids import PartitionId
from tidelog.replication.leader_replica import LeaderReplica
from tidelog.services.context import INTERNAL
from tidelog.services.data import DataServices
from tidelog.services.fetch import FetchItem, FetchRequest, FetchResult, ReadMemory
from tidelog.services.offsets import EpochQuery, InitProducerId, OffsetQuery, OffsetRange, RecordDeletion
from tidelog.services.produce import PendingProduce, ProduceItem, ProduceRequest, ProduceResult

T = TypeVar("T")


async def start_produce(
    services: DataServices, items: Sequence[ProduceItem], *, acks: int = -1, timeout_ms: int = 5_000
) -> PendingProduce:
    return await services.produce.start(INTERNAL, ProduceRequest(items=items, acks=acks, timeout_ms=timeout_ms))


async def produce(
    services: DataServices,
    items: Sequence[ProduceItem],
    *,
    acks: int = -1,
    timeout_ms: int = 5_000,
    transactional_id: str | None = None,
    transaction_version: int = 2,
) -> list[ProduceResult]:
    request = ProduceRequest(
        items=items,
        acks=acks,
        timeout_ms=timeout_ms,
        transactional_id=transactional_id,
        transaction_version=transaction_version,
    )
    return await services.produce.produce(INTERNAL, request)


async def fetch(
    services: DataServices,
    items: Sequence[FetchItem],
    *,
    min_bytes: int = 0,
    max_bytes: int = 0,
    max_wait_ms: int = 0,
    isolation: int = 0,
    rack: str = "",
    memory: ReadMemory | None = None,
) -> list[FetchResult]:
    request = FetchRequest(
        items=items,
        min_bytes=min_bytes,
        max_bytes=max_bytes,
        max_wait_ms=max_wait_ms,
        isolation=isolation,
        rack=rack,
    )
    return await services.fetch.fetch(INTERNAL, request, memory)


def leading(services: DataServices, partition: PartitionId, leader_epoch: int = -1) -> LeaderReplica:
    return services.produce.find_leader(partition, leader_epoch)


def _only(results: Sequence[T | TidelogError]) -> T:
    (result,) = results
    if isinstance(result, TidelogError):
        raise result
    return result


async def list_offsets(services: DataServices, partition: PartitionId, timestamp: int) -> tuple[int, int, int]:
    listed = _only(await services.offsets.list_offsets(INTERNAL, [OffsetQuery(partition, timestamp)]))
    return listed.offset, listed.timestamp, listed.leader_epoch


async def offset_for_leader_epoch(services: DataServices, partition: PartitionId, epoch: int) -> tuple[int, int]:
    end = _only(await services.offsets.offset_for_leader_epoch(INTERNAL, [EpochQuery(partition, epoch)]))
    return end.epoch, end.end_offset


async def range_bytes(services: DataServices, partition: PartitionId, start: int, end: int) -> int:
    return _only(await services.offsets.range_bytes(INTERNAL, [OffsetRange(partition, start, end)]))


async def delete_records(services: DataServices, partition: PartitionId, before_offset: int) -> int:
    return _only(await services.offsets.delete_records(INTERNAL, [RecordDeletion(partition, before_offset)]))


async def init_producer_id(services: DataServices) -> tuple[int, int]:
    return await services.offsets.init_producer_id(INTERNAL, InitProducerId())
