"""The simulated environment: several machines in one process, on one seed, with an exact replay.

Start with `machine` (`SimWorld`, `SimMachine`, `SimNode`). `scheduler` and `loop` implement virtual time, `device` is
what a disk keeps through a power loss, `disk` and `store` are the handles that the code under test gets.
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
