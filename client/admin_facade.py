"""`tidelog.Admin`: topics, settings, groups, records and replicas of a cluster. Any thread may use it.

    with tidelog.Admin("localhost:9292") as admin:
        admin.create_topic("orders", partitions=6, replication_factor=3)
        for row in admin.group_lag("billing"):
            print(row.partition, row.lag)

All calls stand on the client itself. Each takes `timeout_ms` (`default_api_timeout_ms`, 60 s) over all its attempts:
then it is a CallTimeoutError, and a change may have been made. A question is asked again where that may help; a change
only if it was not begun, or may be made twice.

A call about one item gives its value or raises its error. A call about several raises the first error too, so that none
passes unseen; with `partial=True` it raises none of them: the `Outcomes` that it gives have `done` and `errors`.

Changes are answered when the cluster has decided them; a broker may hear of them a little later.

After a fork the client connects anew, in both processes. On an event loop use `tidelog.aio.Admin`.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from datetime import timedelta
from os import PathLike
from types import TracebackType
from typing import Any, Literal, Self, TypeVar
from uuid import UUID

from tidelog.client import io_thread
from tidelog.client.admin_core import AdminClosedError, AdminCore
from tidelog.client.admin_front import (
    Resource,
    Scope,
    new_core,
    read_asked,
    read_before,
    read_members,
    read_new_topics,
    read_offsets,
    read_resource,
    read_scope,
)
from tidelog.client.admin_values import (
    ClusterDescription,
    ConfigEntry,
    ConfigResource,
    CreatedTopic,
    GroupDescription,
    GroupList,
    GroupOffset,
    ListedOffset,
    LogDir,
    NewTopic,
    OffsetChange,
    Outcomes,
    PartitionLag,
    QuorumDescription,
    Reassignment,
    TopicDescription,
    TopicListing,
)
from tidelog.client.consumer_front import Partitions, When, read_partitions
from tidelog.client.names import AdminOptions, read_options
from tidelog.client.record import OffsetAndMetadata, TopicPartition

T = TypeVar("T")


class Admin:
    """Options are keywords (`request_timeout_ms=5_000`), or a dict of Kafka's names; see `tidelog.client.names`."""

    def __init__(self, bootstrap: object = None, /, **options: Any) -> None:
        """`bootstrap` is "host:port,host:port", a list of addresses, or a dict of options. Connects to nothing yet."""
        self.options = read_options(AdminOptions, bootstrap, options)
        self._is_closed = False
        self._begin()

    def _begin(self) -> None:
        """Connected to nothing: at first, and in a child after a fork."""
        self._lock = threading.Lock()
        self._host: io_thread.IoThread | None = None
        self._core: AdminCore | None = None

    def _connected(self) -> tuple[io_thread.IoThread, AdminCore]:
        with self._lock:
            if self._is_closed:
                raise AdminClosedError("this admin client was closed")
            if self._host is None or self._core is None:
                host = io_thread.acquire(self)
                try:
                    self._core = host.run(_made(host, self.options))
                except BaseException:
                    host.release(self)
                    raise
                self._host = host
            return self._host, self._core

    def _call(self, what: str, job: Callable[[AdminCore], Coroutine[Any, Any, T]], timeout_ms: int | None) -> T:
        host, core = self._connected()
        return host.run(core.run(what, job, timeout_ms))

    # Topics.

    def create_topic(
        self,
        name: str,
        *,
        partitions: int | None = None,
        replication_factor: int | None = None,
        configs: Mapping[str, object] | None = None,
        assignment: Iterable[Iterable[int]] = (),
        validate_only: bool = False,
        timeout_ms: int | None = None,
    ) -> CreatedTopic:
        """Numbers that are not given are the cluster's. `assignment` names the brokers of each partition instead of
        both. TOPIC_ALREADY_EXISTS if there is one. Answered when it is decided; a broker may hear of it a little
        later."""
        topic = NewTopic(name, partitions, replication_factor, configs, tuple(tuple(row) for row in assignment))
        found = self._call(
            "create_topic",
            lambda core: core.create_topics([topic], validate_only=validate_only, timeout_ms=timeout_ms),
            timeout_ms,
        )
        return found[name]

    def create_topics(
        self,
        topics: Iterable[NewTopic | str],
        *,
        validate_only: bool = False,
        partial: bool = False,
        timeout_ms: int | None = None,
    ) -> Outcomes[str, CreatedTopic]:
        """The same for several."""
        wanted = read_new_topics(topics)
        return self._call(
            "create_topics",
            lambda core: core.whole(
                core.create_topics(wanted, validate_only=validate_only, timeout_ms=timeout_ms), partial=partial
            ),
            timeout_ms,
        )

    def delete_topic(self, name: str, *, validate_only: bool = False, timeout_ms: int | None = None) -> None:
        """Its records are gone. UNKNOWN_TOPIC_OR_PARTITION if there is none."""
        found = self._call(
            "delete_topic",
            lambda core: core.delete_topics([name], validate_only=validate_only, timeout_ms=timeout_ms),
            timeout_ms,
        )
        return found[name]

    def delete_topics(
        self, names: Iterable[str], *, validate_only: bool = False, partial: bool = False, timeout_ms: int | None = None
    ) -> Outcomes[str, None]:
        """The same for several."""
        wanted = list(dict.fromkeys(names))
        return self._call(
            "delete_topics",
            lambda core: core.whole(
                core.delete_topics(wanted, validate_only=validate_only, timeout_ms=timeout_ms), partial=partial
            ),
            timeout_ms,
        )

    def list_topics(self, *, internal: bool = False, timeout_ms: int | None = None) -> list[TopicListing]:
        """By name, as the broker that is asked knows them; `internal`: those of the cluster itself too."""
        return self._call("list_topics", lambda core: core.list_topics(internal=internal), timeout_ms)

    def describe_topic(self, name: str, *, timeout_ms: int | None = None) -> TopicDescription:
        """Its partitions, with leader, replicas and those in sync."""
        found = self._call(
            "describe_topic", lambda core: core.describe_topics([name], timeout_ms=timeout_ms), timeout_ms
        )
        return found[name]

    def describe_topics(
        self, names: Iterable[str] | None = None, *, partial: bool = False, timeout_ms: int | None = None
    ) -> Outcomes[str, TopicDescription]:
        """Of these, or of all."""
        wanted = None if names is None else list(dict.fromkeys(names))
        return self._call(
            "describe_topics",
            lambda core: core.whole(core.describe_topics(wanted, timeout_ms=timeout_ms), partial=partial),
            timeout_ms,
        )

    def add_partitions(
        self,
        totals: Mapping[str, int],
        *,
        validate_only: bool = False,
        partial: bool = False,
        timeout_ms: int | None = None,
    ) -> Outcomes[str, int]:
        """{topic: how many it shall have, all told}. There are never fewer. Keys may go to other partitions
        afterwards."""
        return self._call(
            "add_partitions",
            lambda core: core.whole(
                core.add_partitions(totals, validate_only=validate_only, timeout_ms=timeout_ms), partial=partial
            ),
            timeout_ms,
        )

    # Settings.

    def describe_config(
        self, resource: Resource, keys: Iterable[str] = (), *, timeout_ms: int | None = None
    ) -> dict[str, ConfigEntry]:
        """Settings of ConfigResource("topic", name), ("broker", id) or ("cluster"), with value, source and default."""
        wanted = read_resource(resource)
        found = self._call(
            "describe_config",
            lambda core: core.describe_configs([wanted], list(keys), timeout_ms=timeout_ms),
            timeout_ms,
        )
        return found[wanted]

    def describe_configs(
        self,
        resources: Iterable[Resource],
        keys: Iterable[str] = (),
        *,
        partial: bool = False,
        timeout_ms: int | None = None,
    ) -> Outcomes[ConfigResource, dict[str, ConfigEntry]]:
        """The same for several, of any kind."""
        wanted = [read_resource(one) for one in resources]
        return self._call(
            "describe_configs",
            lambda core: core.whole(core.describe_configs(wanted, list(keys), timeout_ms=timeout_ms), partial=partial),
            timeout_ms,
        )

    def alter_config(
        self,
        resource: Resource,
        *,
        sets: Mapping[str, object] | None = None,
        deletes: Iterable[str] = (),
        appends: Mapping[str, object] | None = None,
        subtracts: Mapping[str, object] | None = None,
        validate_only: bool = False,
        timeout_ms: int | None = None,
    ) -> None:
        """Change some settings and leave the others: `sets` them, `deletes` them (back to the default), `appends` to
        and `subtracts` from those that are lists. All of one call are taken, or none. INVALID_CONFIG says what is
        wrong."""
        wanted = read_resource(resource)
        self._call(
            "alter_config",
            lambda core: core.alter_configs(
                wanted,
                sets=sets or {},
                deletes=list(deletes),
                appends=appends or {},
                subtracts=subtracts or {},
                validate_only=validate_only,
                timeout_ms=timeout_ms,
            ),
            timeout_ms,
        )

    # Groups.

    def list_groups(
        self,
        *,
        states: Iterable[str] = (),
        types: Iterable[str] = (),
        partial: bool = False,
        timeout_ms: int | None = None,
    ) -> GroupList:
        """Groups of all brokers, or those in these states ("empty", "stable", ...) and of these types. Asks again
        until all have answered; with `partial` once, and tells which did not (`errors`), and who is still
        `loading`."""
        return self._call(
            "list_groups",
            lambda core: core.list_groups(list(states), list(types), partial=partial, timeout_ms=timeout_ms),
            timeout_ms,
        )

    def describe_group(self, group: str, *, timeout_ms: int | None = None) -> GroupDescription:
        """State, coordinator, members with host and assignment. GROUP_ID_NOT_FOUND if there is none."""
        found = self._call(
            "describe_group", lambda core: core.describe_groups([group], timeout_ms=timeout_ms), timeout_ms
        )
        return found[group]

    def describe_groups(
        self, groups: Iterable[str], *, partial: bool = False, timeout_ms: int | None = None
    ) -> Outcomes[str, GroupDescription]:
        """The same for several."""
        return self._call(
            "describe_groups",
            lambda core: core.whole(core.describe_groups(list(groups), timeout_ms=timeout_ms), partial=partial),
            timeout_ms,
        )

    def group_lag(self, group: str, *, timeout_ms: int | None = None) -> list[PartitionLag]:
        """How far the group is behind, in each partition that it has committed or holds."""
        _, found = self._call("group_lag", lambda core: core.group_lag(group, timeout_ms=timeout_ms), timeout_ms)
        return found

    def group_offsets(
        self, group: str, partitions: Iterable[Partitions] | None = None, *, timeout_ms: int | None = None
    ) -> dict[TopicPartition, GroupOffset]:
        """What is committed, of these partitions or of all; those without are left out. A topic that was deleted
        goes by its id."""
        wanted = None if partitions is None else read_partitions(partitions)
        return self._call(
            "group_offsets", lambda core: core.group_offsets(group, wanted, timeout_ms=timeout_ms), timeout_ms
        )

    def alter_group_offsets(
        self,
        group: str,
        offsets: Mapping[TopicPartition, int | OffsetAndMetadata],
        *,
        partial: bool = False,
        timeout_ms: int | None = None,
    ) -> Outcomes[TopicPartition, int]:
        """Commit for a group that has no members: {partition: the next offset to read}. NON_EMPTY_GROUP while it has
        some. A program that keeps state of its own (counts, windows) has to be set back with it."""
        wanted = read_offsets(offsets)
        return self._call(
            "alter_group_offsets",
            lambda core: core.whole(core.alter_group_offsets(group, wanted, timeout_ms=timeout_ms), partial=partial),
            timeout_ms,
        )

    def reset_group_offsets(
        self,
        group: str,
        *,
        to: Literal["earliest", "latest"] | int | Mapping[TopicPartition, int] | None = None,
        to_time: When | None = None,
        shift_by: int | None = None,
        by_duration: str | timedelta | None = None,
        from_file: str | PathLike[str] | None = None,
        topics: Scope = None,
        dry_run: bool = False,
        timeout_ms: int | None = None,
    ) -> list[OffsetChange]:
        """Let a group without members begin elsewhere, and tell what has changed; `dry_run` only tells.

        One of these says where: `to` ("earliest", "latest", an offset, or {partition: offset}), `to_time` (the first
        record at or after it), `shift_by` (so many, back if negative), `by_duration` (so long ago), `from_file`
        (lines of topic,partition,offset). `topics` says for what: topics, partitions, or None for all that the group
        has committed. Offsets outside of the log become its start or end. NON_EMPTY_GROUP while the group has
        members.
        """
        asked = read_asked(to, to_time, shift_by, by_duration, from_file)
        scope = read_scope(topics)
        return self._call(
            "reset_group_offsets",
            lambda core: core.reset_group_offsets(group, asked, scope, dry_run=dry_run, timeout_ms=timeout_ms),
            timeout_ms,
        )

    def delete_group_offsets(
        self, group: str, topics: Scope, *, partial: bool = False, timeout_ms: int | None = None
    ) -> Outcomes[TopicPartition, None]:
        """Forget what is committed of these topics or partitions. GROUP_SUBSCRIBED_TO_TOPIC while members read them."""
        scope = read_scope(topics) or []
        return self._call(
            "delete_group_offsets",
            lambda core: core.whole(core.delete_group_offsets(group, scope, timeout_ms=timeout_ms), partial=partial),
            timeout_ms,
        )

    def delete_group(self, group: str, *, timeout_ms: int | None = None) -> None:
        """With its offsets. NON_EMPTY_GROUP while it has members."""
        found = self._call("delete_group", lambda core: core.delete_groups([group], timeout_ms=timeout_ms), timeout_ms)
        return found[group]

    def delete_groups(
        self, groups: Iterable[str], *, partial: bool = False, timeout_ms: int | None = None
    ) -> Outcomes[str, None]:
        """The same for several."""
        return self._call(
            "delete_groups",
            lambda core: core.whole(core.delete_groups(list(groups), timeout_ms=timeout_ms), partial=partial),
            timeout_ms,
        )

    def remove_members(
        self,
        group: str,
        *,
        member_ids: Iterable[str] = (),
        instance_ids: Iterable[str] = (),
        everybody: bool = False,
        partial: bool = False,
        timeout_ms: int | None = None,
    ) -> Outcomes[str, None]:
        """Take members out, by member id or by the instance id of static ones, as if they had left. One that runs
        joins again. `everybody` takes out all."""
        members, instances = read_members(member_ids, instance_ids, everybody=everybody)
        return self._call(
            "remove_members",
            lambda core: core.whole(
                core.remove_members(group, members, instances, timeout_ms=timeout_ms), partial=partial
            ),
            timeout_ms,
        )

    # Records.

    def list_offsets(
        self,
        topics: Scope,
        *,
        at: Literal["earliest", "latest", "max_timestamp"] | When = "latest",
        partial: bool = False,
        timeout_ms: int | None = None,
    ) -> Outcomes[TopicPartition, ListedOffset]:
        """Of all partitions of topics, or of those that are named: where the log begins ("earliest"), the next offset
        that readers will see ("latest"), the record with the greatest time ("max_timestamp"), or the first one at or
        after a time: ms since 1970, a datetime, or so long ago ("1h")."""
        scope = read_scope(topics)
        return self._call(
            "list_offsets",
            lambda core: core.whole(core.list_offsets(scope, at, timeout_ms=timeout_ms), partial=partial),
            timeout_ms,
        )

    def delete_records(
        self,
        before: Mapping[TopicPartition, int | Literal["end"]],
        *,
        partial: bool = False,
        timeout_ms: int | None = None,
    ) -> Outcomes[TopicPartition, int]:
        """Delete what lies before an offset of each partition, or all that can be read ("end"). The new starts."""
        wanted = read_before(before)
        return self._call(
            "delete_records",
            lambda core: core.whole(core.delete_records(wanted, timeout_ms=timeout_ms), partial=partial),
            timeout_ms,
        )

    def delete_records_by_time(
        self, topics: Scope, when: When, *, partial: bool = False, timeout_ms: int | None = None
    ) -> Outcomes[TopicPartition, int]:
        """Delete what was written before a time: ms since 1970, a datetime, or so long ago ("7d"). The new starts."""
        scope = read_scope(topics)
        return self._call(
            "delete_records_by_time",
            lambda core: core.whole(core.delete_records_by_time(scope, when, timeout_ms=timeout_ms), partial=partial),
            timeout_ms,
        )

    # Replicas and leaders.

    def alter_reassignments(
        self,
        targets: Mapping[TopicPartition, Sequence[int] | None],
        *,
        validate_only: bool = False,
        partial: bool = False,
        timeout_ms: int | None = None,
    ) -> Outcomes[TopicPartition, None]:
        """Move partitions to these brokers, the preferred leader first; None cancels what is under way. Answered
        when it has begun; `list_reassignments` tells how it goes."""
        return self._call(
            "alter_reassignments",
            lambda core: core.whole(
                core.alter_reassignments(targets, validate_only=validate_only, timeout_ms=timeout_ms), partial=partial
            ),
            timeout_ms,
        )

    def list_reassignments(
        self, partitions: Iterable[Partitions] | None = None, *, timeout_ms: int | None = None
    ) -> list[Reassignment]:
        """What is under way, of these or of all."""
        wanted = None if partitions is None else read_partitions(partitions)
        return self._call(
            "list_reassignments", lambda core: core.list_reassignments(wanted, timeout_ms=timeout_ms), timeout_ms
        )

    def elect_leaders(
        self,
        partitions: Iterable[Partitions] | None = None,
        *,
        unclean: bool = False,
        validate_only: bool = False,
        partial: bool = False,
        timeout_ms: int | None = None,
    ) -> Outcomes[TopicPartition, None]:
        """Give leadership to the preferred replicas, of these partitions or of all that need it. ELECTION_NOT_NEEDED
        where it is so already. `unclean` lets any live replica lead where nobody does: acknowledged records may
        be lost."""
        wanted = None if partitions is None else read_partitions(partitions)
        return self._call(
            "elect_leaders",
            lambda core: core.whole(
                core.elect_leaders(wanted, unclean=unclean, validate_only=validate_only, timeout_ms=timeout_ms),
                partial=partial,
            ),
            timeout_ms,
        )

    # The cluster.

    def describe_cluster(self, *, timeout_ms: int | None = None) -> ClusterDescription:
        """Its id, brokers and active controller."""
        return self._call("describe_cluster", lambda core: core.describe_cluster(timeout_ms=timeout_ms), timeout_ms)

    def describe_quorum(self, *, timeout_ms: int | None = None) -> QuorumDescription:
        """The controllers, and how far each has come."""
        return self._call("describe_quorum", lambda core: core.describe_quorum(timeout_ms=timeout_ms), timeout_ms)

    def describe_log_dirs(
        self,
        brokers: Iterable[int] = (),
        topics: Iterable[str] = (),
        *,
        partial: bool = False,
        timeout_ms: int | None = None,
    ) -> Outcomes[int, tuple[LogDir, ...]]:
        """Log directories of these brokers or of all live ones: what is free, and the replicas in them."""
        return self._call(
            "describe_log_dirs",
            lambda core: core.whole(
                core.describe_log_dirs(list(brokers), list(topics), timeout_ms=timeout_ms), partial=partial
            ),
            timeout_ms,
        )

    def move_replicas(
        self,
        broker: int,
        to: Mapping[TopicPartition, UUID | str],
        *,
        partial: bool = False,
        timeout_ms: int | None = None,
    ) -> Outcomes[TopicPartition, None]:
        """Move replicas of a broker to other log directories of it, by their ids or paths (`describe_log_dirs`). They
        are used meanwhile. Returns when they are there; a move that takes longer goes on, and asking again waits."""
        return self._call(
            "move_replicas",
            lambda core: core.whole(core.move_replicas(broker, to, timeout_ms=timeout_ms), partial=partial),
            timeout_ms,
        )

    # The end.

    def metrics(self) -> dict[str, float]:
        """Calls since it was made, those that failed, those that are under way."""
        core = self._core
        return core.metrics() if core is not None else {"calls": 0, "failures": 0, "under_way": 0}

    def close(self, timeout: float | None = None) -> None:
        """No calls from now on; those of other threads have `timeout` seconds to end, and end with a CallTimeoutError
        then. None: as long as they take. A second call does nothing."""
        with self._lock:
            if self._is_closed:
                return
            self._is_closed = True
            host, core = self._host, self._core
            self._host = None
        if host is not None:
            try:
                if core is not None:
                    host.run(core.close(timeout))
            finally:
                host.release(self)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def at_exit(self, deadline_s: float) -> None:
        self.close(max(0.0, deadline_s - time.monotonic()))

    def forked(self) -> None:
        io_thread.leave_behind(self._core, self._host)
        self._begin()


async def _made(host: io_thread.IoThread, options: AdminOptions) -> AdminCore:
    return new_core(host, options)
