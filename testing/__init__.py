"""Tools for tests of programs that use Tidelog. What is here is imported when it is first asked for.

LocalCluster                             a real cluster of processes on this machine
MemoryCluster                            a cluster in this process, without ports, with faults by name and seed
MockProducer, MockConsumer, MockAdmin    no cluster at all: they record, and do as they are told
plugin                                   the pytest fixtures `tidelog_cluster` and `tidelog_memory`
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tidelog.testing.cluster import LocalCluster as LocalCluster
    from tidelog.testing.memory import ClusterFailedError as ClusterFailedError
    from tidelog.testing.memory import MemoryCluster as MemoryCluster
    from tidelog.testing.mocks import MockAdmin as MockAdmin
    from tidelog.testing.mocks import MockConsumer as MockConsumer
    from tidelog.testing.mocks import MockProducer as MockProducer

_HOMES = {
    "ClusterFailedError": "tidelog.testing.memory",
    "LocalCluster": "tidelog.testing.cluster",
    "MemoryCluster": "tidelog.testing.memory",
    "MockAdmin": "tidelog.testing.mocks",
    "MockConsumer": "tidelog.testing.mocks",
    "MockProducer": "tidelog.testing.mocks",
}


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'tidelog.testing' has no attribute '{name}'")
    found = getattr(import_module(home), name)
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOMES})
