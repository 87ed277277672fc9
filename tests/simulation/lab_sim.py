"""Runs of the brokers' stack with the faults of the lab on top: `STACK=lab`. Other stacks keep their seeds."""

from collections.abc import Collection
from random import Random

from simulation.broker_shape import BEGIN_S, BrokerShape, draw_broker_shape
from simulation.broker_sim import BrokerSimulation
from simulation.lab_faults import LAB_FAULTS, draw_lab_plan
from simulation.nemesis import PlanStep
from simulation.raft_sim import run_simulation
from simulation.run_result import Result
from tidelog.world.simulated import SimWorld


class LabSimulation(BrokerSimulation):
    def __init__(self, world: SimWorld, seed: int, shape: BrokerShape, *, only: Collection[int] | None = None) -> None:
        super().__init__(world, seed, shape, only=only)
        self.nemesis.add(LAB_FAULTS)

    def _draw_plan(self, draw: Random) -> list[PlanStep]:
        lab = draw_lab_plan(self.world.random("lab"), from_s=BEGIN_S, until_s=self.shape.fault_s)
        return [*super()._draw_plan(draw), *lab]


def run_lab_seed(seed: int, *, only: Collection[int] | None = None) -> Result:
    shape = draw_broker_shape(seed)
    return run_simulation(seed, shape, lambda world: LabSimulation(world, seed, shape, only=only))
