"""`tidelog.aio.Admin`: `tidelog.Admin` for a program on an event loop. Its methods are coroutines; see `tidelog.Admin`.

async with tidelog.aio.Admin("localhost:9292") as admin:
    await admin.create_topic("orders", partitions=6, replication_factor=3)
"""

from __future__ import annotations

from typing import Any, Unpack

from tidelog.client import io_thread
from tidelog.client.admin.calls import AdminClosedError
from tidelog.client.admin.core import AdminCore
from tidelog.client.admin.frontend import AdminFrontend
from tidelog.client.closing import AsyncClosing
from tidelog.client.core_host import CoreHost
from tidelog.client.durations import check_timeout
from tidelog.client.operations import awaited
from tidelog.client.option_table import AdminConfig, read_options
from tidelog.client.options import AdminOptions, Bootstrap
from tidelog.client.tasks import Ending


class Admin(AdminFrontend, AsyncClosing):
    """Any number of tasks of one loop may use it."""

    def __init__(self, bootstrap: Bootstrap = None, /, **options: Unpack[AdminOptions]) -> None:
        self.options = read_options(AdminConfig, bootstrap, options)
        self._host = CoreHost(
            self._new_core, name="admin client", closed_error=AdminClosedError, acquire=self._acquire_io
        )
        self._run = self._host.run_async
        self._ending = Ending()

    def _acquire_io(self, owner: io_thread.Owner) -> Any:
        """Tests replace it."""
        return io_thread.acquire(owner)

    # Topics.

    create_topic = awaited(AdminCore.create_topic)
    create_topics = awaited(AdminCore.create_topics)
    delete_topic = awaited(AdminCore.delete_topic)
    delete_topics = awaited(AdminCore.delete_topics)
    list_topics = awaited(AdminCore.list_topics)
    describe_topic = awaited(AdminCore.describe_topic)
    describe_topics = awaited(AdminCore.describe_topics)
    add_partitions = awaited(AdminCore.add_partitions)

    # Configs.

    describe_config = awaited(AdminCore.describe_config)
    describe_configs = awaited(AdminCore.describe_configs)
    alter_config = awaited(AdminCore.alter_config)

    # Groups.

    list_groups = awaited(AdminCore.list_groups)
    describe_group = awaited(AdminCore.describe_group)
    describe_groups = awaited(AdminCore.describe_groups)
    group_lag = awaited(AdminCore.group_lag)
    group_offsets = awaited(AdminCore.group_offsets)
    alter_group_offsets = awaited(AdminCore.alter_group_offsets)
    reset_group_offsets = awaited(AdminCore.reset_group_offsets)
    delete_group_offsets = awaited(AdminCore.delete_group_offsets)
    delete_group = awaited(AdminCore.delete_group)
    delete_groups = awaited(AdminCore.delete_groups)
    remove_members = awaited(AdminCore.remove_members)

    # Transactions.

    list_transactions = awaited(AdminCore.list_transactions)
    describe_transaction = awaited(AdminCore.describe_transaction)
    describe_transactions = awaited(AdminCore.describe_transactions)
    abort_transaction = awaited(AdminCore.abort_transaction)
    find_hanging_transactions = awaited(AdminCore.find_hanging_transactions)

    # Offsets and records.

    list_offsets = awaited(AdminCore.list_offsets)
    delete_records = awaited(AdminCore.delete_records)
    delete_records_by_time = awaited(AdminCore.delete_records_by_time)

    # Replicas and leaders.

    alter_reassignments = awaited(AdminCore.alter_reassignments)
    list_reassignments = awaited(AdminCore.list_reassignments)
    elect_leaders = awaited(AdminCore.elect_leaders)

    # Brokers.

    describe_cluster = awaited(AdminCore.describe_cluster)
    describe_brokers = awaited(AdminCore.describe_brokers)
    drain_broker = awaited(AdminCore.drain_broker)
    unregister_broker = awaited(AdminCore.unregister_broker)
    describe_log_dirs = awaited(AdminCore.describe_log_dirs)
    move_replicas = awaited(AdminCore.move_replicas)
    verify_replicas = awaited(AdminCore.verify_replicas)

    # The controller quorum.

    describe_quorum = awaited(AdminCore.describe_quorum)
    add_voter = awaited(AdminCore.add_voter)
    update_voter = awaited(AdminCore.update_voter)
    remove_voter = awaited(AdminCore.remove_voter)
    describe_features = awaited(AdminCore.describe_features)
    update_features = awaited(AdminCore.update_features)
    read_metadata_log = awaited(AdminCore.read_metadata_log)

    # Access control lists.

    describe_acls = awaited(AdminCore.describe_acls)
    create_acls = awaited(AdminCore.create_acls)
    delete_acls = awaited(AdminCore.delete_acls)

    # The end.

    async def close(self, timeout: float | None = None) -> None:
        """As `tidelog.Admin.close`."""
        check_timeout(timeout)
        await self._ending.run(lambda: self._host.close_async(timeout))
