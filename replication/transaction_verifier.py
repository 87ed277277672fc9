"""Asks transaction coordinators for the leaders of this broker (`PartitionTransactions`).

Questions about the same producer and epoch share a request: while one is on its way, the next ones gather. A question
that several produce requests wait for is sent once.

    verify --> gathered by producer --> AddPartitions --> answered here, or the error of all that wait

Limits: one request of a producer at a time; the time that `TransactionPeers` tries for. A caller that is cancelled
leaves its question to the others.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from tidelog.model.errors import ErrorCode, TidelogError
from tidelog.model.group_errors import CoordinatorNotAvailableError
from tidelog.replication.leader_replica import LeaderReplica
from tidelog.replication.partition_transactions import ProducerTransaction, Question
from tidelog.replication.tasks import ReplicaTasks
from tidelog.replication.transaction_messages import AddPartitions, TransactionPeers

_KEPT = (ErrorCode.CONCURRENT_TRANSACTIONS, ErrorCode.COORDINATOR_LOAD_IN_PROGRESS)
_Key = tuple[ProducerTransaction, int, int]
"""Transaction, producer id, epoch."""


class TransactionVerifier:
    def __init__(self, peers: TransactionPeers, tasks: ReplicaTasks) -> None:
        self._peers = peers
        self._tasks = tasks
        self._gathered: dict[_Key, list[tuple[LeaderReplica, Question]]] = {}
        """Questions for the next request of a producer."""
        self._asking: set[_Key] = set()
        self._answers: dict[Question, asyncio.Future[None]] = {}

    async def verify(
        self, leaders: Sequence[LeaderReplica], transaction: ProducerTransaction, producer_id: int, epoch: int
    ) -> None:
        """Return when the coordinator has said that these partitions are part of the transaction; raise its error. An
        error that may pass is retriable. Whether the answer still counts, the append finds out."""
        key = transaction, producer_id, epoch
        answers = [self._ask(key, leader) for leader in leaders]
        if key in self._gathered and key not in self._asking:
            self._asking.add(key)
            self._tasks.spawn(self._run(key), name="verify-transaction")
        await asyncio.wait(answers)
        for answer in answers:
            answer.result()

    def _ask(self, key: _Key, leader: LeaderReplica) -> asyncio.Future[None]:
        question = leader.transactions.ask(*key)
        answer = self._answers.get(question)
        if answer is None:
            answer = self._answers[question] = asyncio.get_running_loop().create_future()
            self._gathered.setdefault(key, []).append((leader, question))
        return answer

    async def _run(self, key: _Key) -> None:
        try:
            while questions := self._gathered.pop(key, None):
                await self._send(key, questions)
        finally:
            self._asking.discard(key)
            self._finish(self._gathered.pop(key, []), CoordinatorNotAvailableError("this broker is stopping"))

    async def _send(self, key: _Key, questions: list[tuple[LeaderReplica, Question]]) -> None:
        transaction, producer_id, epoch = key
        error: TidelogError | None = CoordinatorNotAvailableError("this broker is stopping")
        try:
            reply = await self._peers.add_partitions(
                AddPartitions(
                    transactional_id=transaction.transactional_id,
                    producer_id=producer_id,
                    epoch=epoch,
                    partitions=frozenset(leader.replica.partition_id for leader, _ in questions),
                    version=transaction.version,
                    verify_only=transaction.version < 2,
                )
            )
            for leader, question in questions:
                leader.transactions.answered(question, reply.number)
            error = None
        except TidelogError as rejection:
            error = _of_produce(rejection)
        finally:
            self._finish(questions, error)

    def _finish(self, questions: Sequence[tuple[LeaderReplica, Question]], error: TidelogError | None) -> None:
        for leader, question in questions:
            leader.transactions.dropped(question)
            answer = self._answers.pop(question)
            if error is None:
                answer.set_result(None)
            else:
                answer.set_exception(error)
                answer.exception()  # retrieved, so that the loop does not report it where nobody waits any more


def _of_produce(error: TidelogError) -> TidelogError:
    """What a produce request fails with. Retriable errors of the coordinator's broker would say something else there:
    that the partition has moved, or that the batch may be stored."""
    if not error.retriable or error.code in _KEPT:
        return error
    return CoordinatorNotAvailableError(f"the transaction coordinator does not answer: {error}")
