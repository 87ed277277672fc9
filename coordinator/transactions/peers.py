"""Asks the coordinator of a transactional id: this broker or another one (`TransactionPeers`).

    no broker is the coordinator, it loads, it has moved, it does not answer    asked again, by newer metadata
    the transaction before is being ended                                       the coordinator waits for its end
    anything else                                                               raised

Adding partitions again changes nothing, so a lost answer is asked for again.
"""

from __future__ import annotations

import asyncio
from typing import Protocol

from tidelog.coordinator.hashing import partition_for
from tidelog.coordinator.transactions.wire import ADD_PARTITIONS, decode_add_reply, encode_add_partitions
from tidelog.metadata.tail import MetadataTail
from tidelog.model.errors import ErrorCode, RequestTimedOutError, TidelogError, TransportError
from tidelog.model.group_errors import CoordinatorNotAvailableError
from tidelog.model.ids import NodeId
from tidelog.replication.transaction_messages import AddPartitions, AddReply
from tidelog.world.transport import Transport

WAIT_S = 5.0
"""Time for all attempts."""
ATTEMPT_S = 3.0
PAUSE_MIN_S = 0.01
PAUSE_MAX_S = 0.2
TRANSACTIONS_TOPIC = "__transaction_state"
_PASSING = frozenset(
    {
        ErrorCode.COORDINATOR_LOAD_IN_PROGRESS,
        ErrorCode.COORDINATOR_NOT_AVAILABLE,
        ErrorCode.NOT_COORDINATOR,
        ErrorCode.REQUEST_TIMED_OUT,
        ErrorCode.THROTTLING_QUOTA_EXCEEDED,
    }
)


class LocalCoordinator(Protocol):
    async def add_partitions(self, request: AddPartitions) -> AddReply: ...


class CoordinatorPeers:
    """Implements `TransactionPeers`."""

    def __init__(self, own: LocalCoordinator, tail: MetadataTail, transport: Transport) -> None:
        self._own = own
        self._tail = tail
        self._transport = transport

    async def add_partitions(self, request: AddPartitions) -> AddReply:
        """Return when the partitions are in the committed record of the transaction."""
        problem: TidelogError | None = None
        pause_s = PAUSE_MIN_S
        try:
            async with asyncio.timeout(WAIT_S):
                while True:
                    try:
                        return await self._attempt(request)
                    except TidelogError as error:
                        if error.code not in _PASSING and not isinstance(error, TransportError):
                            raise
                        problem = error
                    await asyncio.sleep(pause_s)
                    pause_s = min(2 * pause_s, PAUSE_MAX_S)
        except TimeoutError:
            reason = "it does not answer" if problem is None else str(problem)
            raise CoordinatorNotAvailableError(
                f"the coordinator of transactional id {request.transactional_id!r} has not answered in"
                f" {WAIT_S:g} s: {reason}"
            ) from problem

    async def _attempt(self, request: AddPartitions) -> AddReply:
        broker = self._coordinator(request.transactional_id)
        try:
            async with asyncio.timeout(ATTEMPT_S):
                if broker == self._transport.me:
                    return await self._own.add_partitions(request)
                timeout_ms = int(ATTEMPT_S * 1000)
                data = encode_add_partitions(request)
                reply = await self._transport.call(broker, ADD_PARTITIONS, data, timeout_ms=timeout_ms)
                return decode_add_reply(reply)
        except TimeoutError:
            raise RequestTimedOutError(f"broker {broker} has not answered") from None

    def _coordinator(self, transactional_id: str) -> NodeId:
        topic = self._tail.image.topic_named(TRANSACTIONS_TOPIC)
        if topic is None:
            raise CoordinatorNotAvailableError(f"{TRANSACTIONS_TOPIC} does not exist yet")
        number = partition_for(transactional_id, len(topic.partitions))
        leader = topic.partitions[number].leader
        if leader < 0:
            raise CoordinatorNotAvailableError(f"partition {number} of {TRANSACTIONS_TOPIC} has no leader")
        return NodeId(leader)
