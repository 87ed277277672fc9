"""Runs of other stacks with the faults of the lab on top: `STACK=lab`. Those stacks keep their seeds.

Most seeds have a cluster of `STACK=brokers`, each third one has the consumer groups of `STACK=groups`.
"""

from collections.abc import Collection
from random import Random

from simulation.broker_shape import BEGIN_S, BrokerShape, draw_broker_shape
from simulation.broker_sim import BrokerSimulation
from simulation.groups_sim import GroupsSimulation, draw_groups_shape
from simulation.lab_faults import LAB_FAULTS, draw_lab_plan
from simulation.nemesis import PlanStep
from simulation.opening_faults import OPENING_FAULTS, draw_opening_steps
from simulation.raft_sim import run_simulation
from simulation.run_result import Result
from tidelog.world.simulated import SimWorld


class _WithLabFaults(BrokerSimulation):
    """Mixed into a simulation of brokers."""

    def __init__(self, world: SimWorld, seed: int, shape: BrokerShape, *, only: Collection[int] | None = None) -> None:
        super().__init__(world, seed, shape, only=only)
        self.nemesis.add((*LAB_FAULTS, *OPENING_FAULTS))

    def _draw_plan(self, draw: Random) -> list[PlanStep]:
        lab = draw_lab_plan(self.world.random("lab"), from_s=BEGIN_S, until_s=self.shape.fault_s)
        plan = [*super()._draw_plan(draw), *lab]
        opening = draw_opening_steps(self.world.random("opening"), plan, from_s=BEGIN_S, until_s=self.shape.fault_s)
        return [*plan, *opening]


class LabSimulation(_WithLabFaults):
    pass


class LabGroupsSimulation(_WithLabFaults, GroupsSimulation):
    processing_s = 160.0
    """Members that were cut off for long have much to process, on disks that may be slow."""


def run_lab_seed(seed: int, *, only: Collection[int] | None = None) -> Result:
    has_groups = seed % 3 == 1
    shape = draw_groups_shape(seed) if has_groups else draw_broker_shape(seed)
    kind = LabGroupsSimulation if has_groups else LabSimulation
    return run_simulation(seed, shape, lambda world: kind(world, seed, shape, only=only))
