"""Tools for tests of programs that use Tidelog. Each name is imported on first use.

LocalCluster                             a real cluster of processes on this machine
MemoryCluster                            a cluster in this process, without ports, with injected faults and a seed
MockProducer, MockConsumer, MockAdmin    no cluster: they record calls and follow the test's script
SentRecord                               a record that a MockProducer has got
ClusterFailedError                       a node of a MemoryCluster failed without an injected fault

The pytest fixtures `tidelog_cluster` and `tidelog_memory` need no import.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tidelog.testing.cluster import LocalCluster as LocalCluster
    from tidelog.testing.memory import ClusterFailedError as ClusterFailedError
    from tidelog.testing.memory import MemoryCluster as MemoryCluster
    from tidelog.testing.mock_admin import MockAdmin as MockAdmin
    from tidelog.testing.mock_consumer import MockConsumer as MockConsumer
    from tidelog.testing.mock_producer import MockProducer as MockProducer
    from tidelog.testing.mock_transactions import SentRecord as SentRecord

_HOMES = {
    "ClusterFailedError": "tidelog.testing.memory",
    "LocalCluster": "tidelog.testing.cluster",
    "MemoryCluster": "tidelog.testing.memory",
    "MockAdmin": "tidelog.testing.mock_admin",
    "MockConsumer": "tidelog.testing.mock_consumer",
    "MockProducer": "tidelog.testing.mock_producer",
    "SentRecord": "tidelog.testing.mock_transactions",
}

__all__ = [
    "ClusterFailedError",
    "LocalCluster",
    "MemoryCluster",
    "MockAdmin",
    "MockConsumer",
    "MockProducer",
    "SentRecord",
]

if not TYPE_CHECKING:  # a type checker rejects names that it does not see above

    def __getattr__(name: str) -> Any:
        home = _HOMES.get(name)
        if home is None:
            raise AttributeError(f"module 'tidelog.testing' has no attribute '{name}'")
        found = getattr(import_module(home), name)
        globals()[name] = found
        return found

    def __dir__() -> list[str]:
        return sorted({*globals(), *_HOMES})
