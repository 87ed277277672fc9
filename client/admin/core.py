"""`AdminCore`: every admin operation once, as a coroutine on the loop that owns the connections.

`threaded.Admin` and `aio.Admin` call it through the bridge. `topics`, `groups`, `transactions`, `cluster` and `acls`
have the operations, `calls` sends their requests.
"""

from __future__ import annotations

from tidelog.client.admin.acls import AclOperations
from tidelog.client.admin.cluster import ClusterOperations
from tidelog.client.admin.replica_verification import ReplicaVerification
from tidelog.client.admin.transactions import TransactionOperations
from tidelog.client.io_thread import IoThread
from tidelog.client.new_cluster import new_cluster
from tidelog.client.option_table import AdminConfig


class AdminCore(TransactionOperations, ClusterOperations, ReplicaVerification, AclOperations):
    @property
    def answered_by(self) -> str:
        return self.cluster.answered


def new_core(io: IoThread, config: AdminConfig) -> AdminCore:
    """Runs on the IO thread."""
    return AdminCore(new_cluster(io, config), timeout_ms=config.default_api_timeout_ms)
