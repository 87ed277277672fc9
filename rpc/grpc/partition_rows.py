"""Partitions that a request names, and their outcomes in its response."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tidelog.model.errors import InvalidRequestError, TidelogError
from tidelog.rpc.grpc.errors import as_message
from tidelog.rpc.v1 import common_pb2 as common
from tidelog.services.partition_lookup import PARTITIONS_PER_SLICE, REPEATED, PartitionRef, topic_ref
from tidelog.world.slicing import sliced


def ref(named: Any) -> PartitionRef:
    return topic_ref(named.topic, named.topic_id), named.partition


async def refs(named: Sequence[Any]) -> list[PartitionRef]:
    """Return the partitions; raise if one is named twice: results are matched by the name of their partition."""
    found = [ref(item) async for item in sliced(named, PARTITIONS_PER_SLICE)]
    if len(set(found)) != len(found):
        raise InvalidRequestError(REPEATED)
    return found


async def outcomes(
    named: Sequence[Any], errors: Mapping[PartitionRef, TidelogError | None]
) -> list[common.PartitionOutcome]:
    """In the order of the request."""
    rows = []
    async for item in sliced(named, PARTITIONS_PER_SLICE):
        error = errors[ref(item)]
        message = None if error is None else as_message(error)
        rows.append(common.PartitionOutcome(topic=item.topic, partition=item.partition, error=message))
    return rows
