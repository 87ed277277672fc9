"""The clients that ship, on the machines of a run; what programs need of it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from random import Random
from typing import TYPE_CHECKING, Any, Protocol

from support.clients.aio_consumer import SameLoopConsumer
from support.clients.producers import SameLoop

from simulation.broker_checker import KnownTopic
from simulation.cluster import Context
from simulation.groups_node import Connections
from simulation.groups_workload import new_cluster
from simulation.transactions_checker import TransactionHistory
from simulation.transactions_plan import TransactionsPlan
from tidelog.client.cluster import ClusterClient
from tidelog.client.connections import Exchange
from tidelog.client.errors import TransactionTimeoutError
from tidelog.client.producer.aio import Producer
from tidelog.model.errors import TidelogError
from tidelog.rpc.grpc.methods import Method

if TYPE_CHECKING:
    from simulation.transactions_postman import Postman
    from simulation.transactions_watch import TransactionsWatch
    from tidelog.coordinator.transactions.records import ProducerIdentity

CALL_S = 2.0
CLOSE_S = 1.0
HASTY_S = 0.002
"""The request is sent, and its answer comes too late."""
REPEATS_MAX = 20
"""Of a commit whose answer is missing; then its outcome stays unknown."""
PRODUCER = {
    "max_block_ms": int(CALL_S * 1000),
    "delivery_timeout_ms": 3_000,
    "request_timeout_ms": 1_500,
    "linger_ms": 0,
}
CONSUMER = {"fetch_max_wait_ms": 300, "request_timeout_ms": 2_000, "auto_offset_reset": "earliest"}


class Run(Protocol):
    """What programs need of the simulation."""

    history: TransactionHistory
    watch: TransactionsWatch
    postman: Postman
    is_steady: bool
    bootstrap: tuple[str, ...]

    @property
    def transactions(self) -> TransactionsPlan: ...

    @property
    def input(self) -> KnownTopic: ...

    @property
    def outputs(self) -> Sequence[KnownTopic]: ...

    def fail(self, who: str, what: str) -> None: ...

    async def are_topics_made(self) -> None: ...

    def life_ended(self, name: str, owner: str, error: TidelogError) -> None:
        """A program begins again, because of this error."""
        ...


class PostedConnections(Connections):
    """Produce requests may arrive again."""

    def __init__(self, context: Context, postman: Postman) -> None:
        super().__init__(context.transport)
        self._context = context
        self._postman = postman

    async def open(self, address: str, method: Method, request: Any = None) -> Exchange:
        exchange = await super().open(address, method, request)
        return self._postman.carry(self._context, self._node(address), method, exchange)


class StationProducer(Producer):
    """The asyncio producer on the machine of a run."""

    def __init__(self, context: Context, run: Run, **options: Any) -> None:
        self._context = context
        self._run_of = run
        self._now_s = context.node.loop.time
        self._clock_ms = context.node.clock.now_ms
        super().__init__(list(run.bootstrap), **{**PRODUCER, **options})

    @property
    def identity(self) -> ProducerIdentity:
        """Its producer id and epoch now."""
        assert self._host.core is not None, "it is initialized"
        identity = self._host.core.transactions._identity
        return identity.id, identity.epoch

    def _acquire(self, owner: object) -> SameLoop:
        return SameLoop(asyncio.get_running_loop())

    def _new_random(self) -> Random:
        return self._context.node.random

    def _new_cluster(self, io: Any) -> ClusterClient:
        connections = PostedConnections(self._context, self._run_of.postman)
        return new_cluster(self._context, list(self._config.bootstrap), connections)


def new_reader(context: Context, run: Run, **options: Any) -> SameLoopConsumer:
    """Of committed data."""
    cluster = new_cluster(context, run.bootstrap, Connections(context.transport))
    return SameLoopConsumer(cluster, isolation="read_committed", **CONSUMER, **options)


def place_of(topic: str, partition: int) -> str:
    return f"{topic}-{partition}"


class GivenUpError(Exception):
    """The program aborts."""


async def committed(
    producer: StationProducer, draw: Random, run: Run, name: str, *, haste: float = 0.1, **how: Any
) -> bool:
    """Repeats a commit without an answer: the outcome is known at the end, or the last error is raised. Some programs
    do not wait for the answer, and some of these end then."""
    run.history.commit(name)
    is_hasty = not run.is_steady and draw.random() < haste
    gives_up = is_hasty and draw.random() < 0.5
    for attempt in range(REPEATS_MAX + 1):
        try:
            timeout = CALL_S if run.is_steady else draw.choice((0.05, 0.5, CALL_S))
            if is_hasty and attempt == 0:
                timeout = HASTY_S
            return await producer.commit_transaction(timeout=timeout, **how)
        except TransactionTimeoutError:
            if gives_up or attempt == REPEATS_MAX:
                raise
    raise AssertionError("the last attempt raises")


async def closed(*closings: Coroutine[Any, Any, object]) -> None:
    for closing in closings:
        try:
            await closing
        except TidelogError:
            continue  # what it could not end is ended by timeouts; the next life says how


Acked = Callable[[str, int, bytes, int], None]
"""Called with a writer's name, a partition of the input, a value and its offset."""
