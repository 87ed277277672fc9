"""Sends changes of in-sync sets to the controller: gathered over all partitions, one request at a time.

    check --LeaderState proposes a change--> gathered --AlterPartition--> answered, each partition for itself
                                                      --no answer-------> the metadata shows whether it was done

`partition.LeaderState` decides what a partition proposes, and allows one proposal in flight. An answer counts only for
the leader epoch that sent the proposal.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from tidelog.metadata.partition_changes import can_serve, has_full_directory
from tidelog.metadata.partitions import AlteredPartition, AlteredPartitions, AlterPartition
from tidelog.model.errors import ErrorCode, RemoteError, TidelogError
from tidelog.replication.broker_context import BrokerContext
from tidelog.replication.leader_replica import LeaderReplica
from tidelog.replication.partition import IsrProposal
from tidelog.replication.replica import Replica, now_ms

LOGGER = logging.getLogger(__name__)

PARTITIONS_PER_REQUEST_MAX = 5_000
RETRY_S = 0.1
_REJECTIONS = frozenset(
    {
        ErrorCode.BROKER_ID_NOT_REGISTERED,
        ErrorCode.INVALID_REQUEST,
        ErrorCode.NOT_CONTROLLER,
        ErrorCode.STALE_BROKER_EPOCH,
        ErrorCode.UNSUPPORTED_VERSION,
    }
)
"""Errors of a controller that has decided nothing. After any other error the change may be done: a leader that counted
the smaller in-sync set then would acknowledge records that a new member, which may be elected, does not have."""


class IsrUpdates:
    """See the module. `run` is its task."""

    def __init__(self, context: BrokerContext) -> None:
        self._context = context
        self._metadata = context.metadata
        self._dirty: dict[Replica, None] = {}
        self._backing_off: dict[Replica, None] = {}
        """Partitions whose last proposal was rejected or got no reply; checked again after `RETRY_S`."""
        self._wake = asyncio.Event()
        self.shrinks = 0
        self.expands = 0

    def check(self, replica: Replica) -> None:
        """Propose another in-sync set for this partition if its state asks for one."""
        if replica not in self._backing_off:
            self._dirty[replica] = None
            self._wake.set()

    def _check_later(self, replica: Replica) -> None:
        self._backing_off[replica] = None
        self._context.tasks.call_later(RETRY_S, self._backoff_ended, replica)

    def _backoff_ended(self, replica: Replica) -> None:
        self._backing_off.pop(replica, None)
        self.check(replica)

    async def run(self) -> None:
        while True:
            await self._wake.wait()
            self._wake.clear()
            while proposals := self._gather():
                await self._propose(proposals)

    def _gather(self) -> list[tuple[LeaderReplica, IsrProposal]]:
        proposals: list[tuple[LeaderReplica, IsrProposal]] = []
        at_ms = now_ms()
        while self._dirty and len(proposals) < PARTITIONS_PER_REQUEST_MAX:
            replica = next(iter(self._dirty))
            del self._dirty[replica]
            leader = replica.role
            if isinstance(leader, LeaderReplica):
                proposal = leader.state.next_proposal(self._live_of(replica), at_ms)
                if proposal is not None:
                    leader.state.sent(proposal)
                    proposals.append((leader, proposal))
        return proposals

    def _live_of(self, replica: Replica) -> Callable[[int], int | None]:
        image, partition = self._metadata.image, replica.partition
        others = [broker for broker in partition.replicas if broker != self._metadata.me and broker in image.brokers]
        full = [broker for broker in others if has_full_directory(image.brokers[broker], partition)]
        in_sync = [broker for broker in full if broker in partition.isr]
        # A follower with a full disk delays every acknowledgement, so it leaves without waiting for the lag limit.
        # `min.insync.replicas` members stay, and no full follower joins.
        stays = in_sync[max(0, len(partition.isr) - self._metadata.min_isr(replica)) :] if full else in_sync

        def live(broker: int) -> int | None:
            if not can_serve(image, partition, broker) or (broker in full and broker not in stays):
                return None
            return image.brokers[broker].broker_epoch

        return live

    async def _propose(self, proposals: list[tuple[LeaderReplica, IsrProposal]]) -> None:
        request = AlterPartition(
            broker=self._metadata.me,
            broker_epoch=self._metadata.broker_epoch,
            partitions=tuple(
                AlteredPartition(
                    topic_id=leader.replica.partition_id.topic_id,
                    partition=leader.replica.partition_id.partition,
                    leader_epoch=proposal.leader_epoch,
                    partition_epoch=proposal.partition_epoch,
                    isr=proposal.isr,
                    is_barrier=proposal.is_barrier,
                )
                for leader, proposal in proposals
            ),
        )
        try:
            reply = await self._context.agent.ask(request)
        except TidelogError as error:
            is_rejected = isinstance(error, RemoteError) and error.code in _REJECTIONS
            self._failed(proposals, error, may_be_done=not is_rejected)
            await asyncio.sleep(RETRY_S)
            return
        assert isinstance(reply, AlteredPartitions), "the answer to a change of in-sync sets"
        for (leader, proposal), state in zip(proposals, reply.partitions, strict=True):
            if leader.replica.role is not leader:
                continue
            self._count(leader, proposal, is_done=state.error is None)
            leader.answered(state)
            if state.error is not None:
                LOGGER.info("log=%s controller rejected ISR %s: %s", leader.log.path, proposal.isr, state.message)
                self._check_later(leader.replica)

    def _failed(
        self, proposals: list[tuple[LeaderReplica, IsrProposal]], error: TidelogError, *, may_be_done: bool
    ) -> None:
        LOGGER.info("in-sync sets of %d partitions: %s", len(proposals), error)
        for leader, _ in proposals:
            if leader.replica.role is leader:
                leader.failed(may_be_done=may_be_done)
                self._check_later(leader.replica)

    def _count(self, leader: LeaderReplica, proposal: IsrProposal, *, is_done: bool) -> None:
        if is_done:
            before = len(leader.state.isr)
            self.shrinks += len(proposal.isr) < before
            self.expands += len(proposal.isr) > before
