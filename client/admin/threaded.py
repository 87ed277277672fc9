"""`tidelog.Admin`: topics, configs, groups, records and replicas of a cluster. Any thread may use it.

    with tidelog.Admin("localhost:9292") as admin:
        admin.create_topic("orders", partitions=6, replication_factor=3)
        for row in admin.group_lag("billing"):
            print(row.partition, row.lag)

Each method takes `timeout` in seconds (default: the option `default_api_timeout_ms`, 60 s) over all its attempts. When
time is up it raises CallTimeoutError, and a change may have been made. A query is retried where that may help; a change
only if the broker had not started it, or if it is idempotent.

A call about one item returns its value or raises its error. A call about several items raises the first error. With
`partial=True` it raises none of them and returns `Outcomes`, which have `succeeded` and `errors`.

A change is complete when the controller has committed it; brokers may learn of it a little later.

After a fork both processes can use the client; it connects again. On an event loop use `tidelog.aio.Admin`.
"""

from __future__ import annotations

from typing import Unpack

from tidelog.client.admin.calls import AdminClosedError
from tidelog.client.admin.core import AdminCore
from tidelog.client.admin.frontend import AdminFrontend
from tidelog.client.closing import Closing
from tidelog.client.core_host import CoreHost
from tidelog.client.durations import check_timeout
from tidelog.client.operations import blocking
from tidelog.client.option_table import AdminConfig, read_options
from tidelog.client.options import AdminOptions, Bootstrap


class Admin(AdminFrontend, Closing):
    """Options are keywords (`request_timeout_ms=5_000`) or a dict of Kafka names; see `tidelog.client.option_table`."""

    def __init__(self, bootstrap: Bootstrap = None, /, **options: Unpack[AdminOptions]) -> None:
        """`bootstrap` is "host:port,host:port", a list of addresses, or a dict of options. Connects with the first
        call."""
        self.options = read_options(AdminConfig, bootstrap, options)
        self._host = CoreHost(self._new_core, name="admin client", closed_error=AdminClosedError)
        self._run = self._host.run

    # Topics.

    create_topic = blocking(AdminCore.create_topic)
    create_topics = blocking(AdminCore.create_topics)
    delete_topic = blocking(AdminCore.delete_topic)
    delete_topics = blocking(AdminCore.delete_topics)
    list_topics = blocking(AdminCore.list_topics)
    describe_topic = blocking(AdminCore.describe_topic)
    describe_topics = blocking(AdminCore.describe_topics)
    add_partitions = blocking(AdminCore.add_partitions)

    # Configs.

    describe_config = blocking(AdminCore.describe_config)
    describe_configs = blocking(AdminCore.describe_configs)
    alter_config = blocking(AdminCore.alter_config)

    # Groups.

    list_groups = blocking(AdminCore.list_groups)
    describe_group = blocking(AdminCore.describe_group)
    describe_groups = blocking(AdminCore.describe_groups)
    group_lag = blocking(AdminCore.group_lag)
    group_offsets = blocking(AdminCore.group_offsets)
    alter_group_offsets = blocking(AdminCore.alter_group_offsets)
    reset_group_offsets = blocking(AdminCore.reset_group_offsets)
    delete_group_offsets = blocking(AdminCore.delete_group_offsets)
    delete_group = blocking(AdminCore.delete_group)
    delete_groups = blocking(AdminCore.delete_groups)
    remove_members = blocking(AdminCore.remove_members)

    # Transactions.

    list_transactions = blocking(AdminCore.list_transactions)
    describe_transaction = blocking(AdminCore.describe_transaction)
    describe_transactions = blocking(AdminCore.describe_transactions)
    abort_transaction = blocking(AdminCore.abort_transaction)
    find_hanging_transactions = blocking(AdminCore.find_hanging_transactions)

    # Offsets and records.

    list_offsets = blocking(AdminCore.list_offsets)
    delete_records = blocking(AdminCore.delete_records)
    delete_records_by_time = blocking(AdminCore.delete_records_by_time)

    # Replicas and leaders.

    alter_reassignments = blocking(AdminCore.alter_reassignments)
    list_reassignments = blocking(AdminCore.list_reassignments)
    elect_leaders = blocking(AdminCore.elect_leaders)

    # Brokers.

    describe_cluster = blocking(AdminCore.describe_cluster)
    describe_brokers = blocking(AdminCore.describe_brokers)
    drain_broker = blocking(AdminCore.drain_broker)
    unregister_broker = blocking(AdminCore.unregister_broker)
    describe_log_dirs = blocking(AdminCore.describe_log_dirs)
    move_replicas = blocking(AdminCore.move_replicas)
    verify_replicas = blocking(AdminCore.verify_replicas)

    # The controller quorum.

    describe_quorum = blocking(AdminCore.describe_quorum)
    add_voter = blocking(AdminCore.add_voter)
    update_voter = blocking(AdminCore.update_voter)
    remove_voter = blocking(AdminCore.remove_voter)
    describe_features = blocking(AdminCore.describe_features)
    update_features = blocking(AdminCore.update_features)
    read_metadata_log = blocking(AdminCore.read_metadata_log)

    # Access control lists.

    describe_acls = blocking(AdminCore.describe_acls)
    create_acls = blocking(AdminCore.create_acls)
    delete_acls = blocking(AdminCore.delete_acls)

    # The end.

    def close(self, timeout: float | None = None) -> None:
        """Reject new calls. Running calls of other threads have `timeout` seconds, then they raise CallTimeoutError;
        None: waits for them. Further calls wait for the first one."""
        check_timeout(timeout)
        self._host.close(timeout)
