"""The simulated world: a whole machine room in one process, on one seed, with an exact replay.

`machine` is where to begin (`SimWorld`, `SimMachine`, `SimNode`); `scheduler` and `loop` are virtual time, `device` is
what a disk remembers through a loss of power, `disk` and `store` are the handles that the code under test gets.
"""

from tidelog.world.simulated.device import Loss
from tidelog.world.simulated.disk import SimDevice, SimDisk, SimFile
from tidelog.world.simulated.faults import Latency
from tidelog.world.simulated.guard import NondeterminismError, forbid_nondeterminism
from tidelog.world.simulated.loop import SimLoop
from tidelog.world.simulated.machine import Mortal, SimMachine, SimNode, SimWorld
from tidelog.world.simulated.scheduler import MachineDied, NodeDiedError, Scheduler, SimulationError
from tidelog.world.simulated.store import SimStore, SimStoreDevice

__all__ = [
    "Latency",
    "Loss",
    "MachineDied",
    "Mortal",
    "NodeDiedError",
    "NondeterminismError",
    "Scheduler",
    "SimDevice",
    "SimDisk",
    "SimFile",
    "SimLoop",
    "SimMachine",
    "SimNode",
    "SimStore",
    "SimStoreDevice",
    "SimWorld",
    "SimulationError",
    "forbid_nondeterminism",
]
