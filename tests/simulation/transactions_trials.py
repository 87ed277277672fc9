"""What happens to a program when faults have ended and all else is well. The plan of a run says which it has.

lost for good     a pipeline goes for good with its transaction open, and perhaps its coordinator, which comes back:
                  the timeout ends the transaction, and other pipelines do the work
members removed   a pipeline pauses with records that it has polled, until its group has removed it and others may
                  have processed them; it goes on with its transaction: its offsets must be refused
records lost      a pipeline does not reach the leader of an output, or gets no answers of it, and reaches its
                  coordinators: records fail while their transaction could commit
"""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import TYPE_CHECKING, TypeVar

from simulation.broker_sim import CONVERGE_S
from simulation.cluster import Station
from simulation.transactions_plan import Trial
from simulation.transactions_workload import Pipeline
from tidelog.client.record import GroupMetadata
from tidelog.model.ids import NodeId

if TYPE_CHECKING:
    from simulation.transactions_sim import TransactionsSimulation

T = TypeVar("T")

LOOK_S, LOOKS_MAX = 0.003, 1_500
OTHERS_S = 0.3
"""How long other members have for what a removed one has polled."""


def run_trials(run: TransactionsSimulation) -> None:
    for trial in run.transactions.trials:
        run.trials[trial.value] += _TRIALS[trial](run, run.world.random(trial.value))


def _wait_for(run: TransactionsSimulation, find: Callable[[], T | None]) -> T | None:
    for _ in range(LOOKS_MAX):
        run.world.run_for(LOOK_S)
        found = find()
        if found is not None:
            return found
    return None


def _station(run: TransactionsSimulation, pipeline: Pipeline) -> Station:
    return run.cluster.station(NodeId(pipeline.number))


def _is_alone(run: TransactionsSimulation, pipeline: Pipeline) -> bool:
    """Nobody else has its transactional id, and fences it."""
    return not any(other is not pipeline and other.owner == pipeline.owner for other in run.pipelines)


def _coordinator(run: TransactionsSimulation, pipeline: Pipeline) -> Station | None:
    """Of its transaction, if that is open and has partitions."""
    for station in run.brokers:
        app = run.broker(station)
        for shard in () if app is None else app.broker.transactions.leading_shards():
            transaction = shard.state.get(pipeline.owner)
            if transaction is not None and transaction.is_open and transaction.partitions:
                return station
    return None


def _lose(run: TransactionsSimulation, draw: Random) -> int:
    alone = [one for one in run.pipelines if _is_alone(run, one) and not one.is_second]
    if len(run.pipelines) - run.transactions.is_chained < 2 or not alone:
        return 0
    gone = draw.choice(alone)
    coordinator = _wait_for(run, lambda: _coordinator(run, gone))
    if coordinator is None:
        return 0
    run.world.scheduler.trace("nemesis", f"for good: kill t{gone.number}, whose transaction is open")
    _station(run, gone).kill()
    if draw.random() < 0.7:
        coordinator.kill()
        run.world.run_for(draw.choice((0.0, 2.0)))
        coordinator.start()
    run._demand("partitions are not whole", run._are_whole, CONVERGE_S)
    return 1


def _remove(run: TransactionsSimulation, draw: Random) -> int:
    pipeline, identity = _held(run, draw)
    if identity is None:
        return 0
    station = _station(run, pipeline)
    run.world.scheduler.trace("nemesis", f"{station.name} pauses until it is no member: {identity.member_id}")
    station.pause()
    removed = _wait_for(run, lambda: None if run.watch.is_member(identity) else identity)
    run.world.run_for(draw.choice((0.0, OTHERS_S)))
    pipeline.is_held = False
    station.resume()
    return removed is not None


def _silence(run: TransactionsSimulation, draw: Random) -> int:
    pipeline, identity = _held(run, draw)
    if identity is None:
        return 0
    is_deaf = draw.random() < 0.7
    what = "are not acknowledged" if is_deaf else "do not arrive"
    run.world.scheduler.trace("nemesis", f"records of t{pipeline.number} {what}")
    (run.postman.deaf if is_deaf else run.postman.mute).add(NodeId(pipeline.number))
    pipeline.is_held = False
    run.world.run_for(run.transactions.delivery_ms / 1000 + 0.2)
    run.postman.deaf.clear()
    run.postman.mute.clear()
    return 1


def _held(run: TransactionsSimulation, draw: Random) -> tuple[Pipeline, GroupMetadata | None]:
    """A pipeline that waits with records that it has polled, and whom it is in its group; None: it has got none."""
    pipeline = draw.choice([one for one in run.pipelines if _is_alone(run, one)] or run.pipelines)
    pipeline.is_held = True
    identity = _wait_for(run, lambda: pipeline.waiting if _station(run, pipeline).is_up else None)
    if identity is None:
        pipeline.is_held = False
    return pipeline, identity


_TRIALS: dict[Trial, Callable[[TransactionsSimulation, Random], int]] = {
    Trial.LOSS: _lose,
    Trial.REMOVAL: _remove,
    Trial.SILENCE: _silence,
}
