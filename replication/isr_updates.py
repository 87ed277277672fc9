"""Changes of in-sync sets, on their way to the controller: gathered over all partitions, one request at a time.

    look --wanted by the leader's state--> gathered --AlterPartition--> answered, each for itself
                                                    --no answer-------> whether it was done shows in the metadata

What a partition wants, and that it has one change under way at most, is `partition.LeaderState`'s to know. An answer
counts only for the leader epoch that asked.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import TYPE_CHECKING

from tidelog.metadata.leadership import can_serve, has_full_directory
from tidelog.metadata.partitions import AlteredPartition, AlteredPartitions, AlterPartition
from tidelog.model.errors import ErrorCode, RemoteError, TidelogError, TransportError
from tidelog.replication.leading import Leading
from tidelog.replication.partition import IsrProposal

if TYPE_CHECKING:
    from tidelog.replication.replica import Replica
    from tidelog.replication.replicas import Replicas

LOGGER = logging.getLogger(__name__)

PARTITIONS_PER_REQUEST_MAX = 5_000
RETRY_S = 0.1


class IsrUpdates:
    """See the module. `run` is its task."""

    def __init__(self, host: Replicas) -> None:
        self._host = host
        self._dirty: dict[Replica, None] = {}
        self._cooling: dict[Replica, None] = {}
        """Refused, or without an answer, a moment ago."""
        self._wake = asyncio.Event()
        self.shrinks = 0
        self.expands = 0

    def look(self, replica: Replica) -> None:
        """The in-sync set of this partition may have to change."""
        if replica not in self._cooling:
            self._dirty[replica] = None
            self._wake.set()

    def _look_later(self, replica: Replica) -> None:
        self._cooling[replica] = None
        self._host.call_later(RETRY_S, self._has_cooled, replica)

    def _has_cooled(self, replica: Replica) -> None:
        self._cooling.pop(replica, None)
        self.look(replica)

    async def run(self) -> None:
        while True:
            await self._wake.wait()
            self._wake.clear()
            while proposals := self._gather():
                await self._propose(proposals)

    def _gather(self) -> list[tuple[Leading, IsrProposal]]:
        found: list[tuple[Leading, IsrProposal]] = []
        now_ms = self._host.now_ms()
        while self._dirty and len(found) < PARTITIONS_PER_REQUEST_MAX:
            replica = next(iter(self._dirty))
            del self._dirty[replica]
            leading = replica.role
            if isinstance(leading, Leading):
                proposal = leading.state.wanted_isr(self._live_of(replica), now_ms)
                if proposal is not None:
                    leading.state.sent(proposal)
                    found.append((leading, proposal))
        return found

    def _live_of(self, replica: Replica) -> Callable[[int], int | None]:
        image, partition = self._host.image, replica.partition
        others = [broker for broker in partition.replicas if broker != self._host.me and broker in image.brokers]
        full = [broker for broker in others if has_full_directory(image.brokers[broker], partition)]
        in_sync = [broker for broker in full if broker in partition.isr]
        # A follower without room holds up every acknowledgement, so it does not wait for the lag; `min.insync.replicas`
        # stay, and one that is out does not come in.
        stays = in_sync[max(0, len(partition.isr) - self._host.min_isr(replica)) :] if full else in_sync

        def live(broker: int) -> int | None:
            if not can_serve(image, partition, broker) or (broker in full and broker not in stays):
                return None
            return image.brokers[broker].broker_epoch

        return live

    async def _propose(self, proposals: list[tuple[Leading, IsrProposal]]) -> None:
        request = AlterPartition(
            broker=self._host.me,
            broker_epoch=self._host.broker_epoch,
            partitions=tuple(
                AlteredPartition(
                    topic_id=leading.replica.partition_id.topic_id,
                    partition=leading.replica.partition_id.partition,
                    leader_epoch=proposal.leader_epoch,
                    partition_epoch=proposal.partition_epoch,
                    isr=proposal.isr,
                    is_barrier=proposal.is_barrier,
                )
                for leading, proposal in proposals
            ),
        )
        try:
            reply = await self._host.agent.ask(request)
        except (TransportError, RemoteError) as error:
            may_be_done = isinstance(error, TransportError) or error.code is ErrorCode.REQUEST_TIMED_OUT
            self._failed(proposals, error, may_be_done=may_be_done)
            await asyncio.sleep(RETRY_S)
            return
        assert isinstance(reply, AlteredPartitions), "the answer to a change of in-sync sets"
        for (leading, proposal), state in zip(proposals, reply.partitions, strict=True):
            if leading.replica.role is not leading:
                continue
            self._count(leading, proposal, is_done=state.error is None)
            leading.answered(state)
            if state.error is not None:
                LOGGER.info("log=%s in-sync set %s is refused: %s", leading.log.path, proposal.isr, state.message)
                self._look_later(leading.replica)

    def _failed(self, proposals: list[tuple[Leading, IsrProposal]], error: TidelogError, *, may_be_done: bool) -> None:
        LOGGER.info("in-sync sets of %d partitions: %s", len(proposals), error)
        for leading, _ in proposals:
            if leading.replica.role is leading:
                leading.failed(may_be_done=may_be_done)
                self._look_later(leading.replica)

    def _count(self, leading: Leading, proposal: IsrProposal, *, is_done: bool) -> None:
        if is_done:
            before = len(leading.state.isr)
            self.shrinks += len(proposal.isr) < before
            self.expands += len(proposal.isr) > before
