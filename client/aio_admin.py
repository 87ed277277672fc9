"""`tidelog.aio.Admin`: the same for a program on an event loop. See `client.admin_facade` for what its methods do.

async with tidelog.aio.Admin("localhost:9292") as admin:
    await admin.create_topic("orders", partitions=6, replication_factor=3)
"""

from __future__ import annotations

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
from tidelog.client.tasks import Ending

T = TypeVar("T")


class Admin:
    """Used on one loop, by any number of tasks. Methods are those of `tidelog.Admin`."""

    def __init__(self, bootstrap: object = None, /, **options: Any) -> None:
        self.options = read_options(AdminOptions, bootstrap, options)
        self._is_closed = False
        self._begin()

    def _begin(self) -> None:
        """Connected to nothing: at first, and in a child after a fork."""
        self._host: Any = None
        self._core: AdminCore | None = None
        self._ending = Ending()

    # The host: the IO thread, or what a test has instead.

    def _acquire_host(self) -> Any:
        return io_thread.acquire(self)

    def _new_core(self, host: Any) -> AdminCore:
        return new_core(host, self.options)

    async def _call(self, what: str, job: Callable[[AdminCore], Coroutine[Any, Any, T]], timeout_ms: int | None) -> T:
        if self._is_closed:
            raise AdminClosedError("this admin client was closed")
        if self._host is None:
            self._host = self._acquire_host()
        found: T = await self._host.do(self._run(self._host, what, job, timeout_ms))
        return found

    async def _run(
        self, host: Any, what: str, job: Callable[[AdminCore], Coroutine[Any, Any, T]], timeout_ms: int | None
    ) -> T:
        # On the host's loop, where the first of several calls at once makes the core for all.
        if self._core is None:
            self._core = self._new_core(host)
        return await self._core.run(what, job, timeout_ms)

    # Topics.

    async def create_topic(
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
        topic = NewTopic(name, partitions, replication_factor, configs, tuple(tuple(row) for row in assignment))
        found = await self._call(
            "create_topic",
            lambda core: core.create_topics([topic], validate_only=validate_only, timeout_ms=timeout_ms),
            timeout_ms,
        )
        return found[name]

    async def create_topics(
        self,
        topics: Iterable[NewTopic | str],
        *,
        validate_only: bool = False,
        partial: bool = False,
        timeout_ms: int | None = None,
    ) -> Outcomes[str, CreatedTopic]:
        wanted = read_new_topics(topics)
        return await self._call(
            "create_topics",
            lambda core: core.whole(
                core.create_topics(wanted, validate_only=validate_only, timeout_ms=timeout_ms), partial=partial
            ),
            timeout_ms,
        )

    async def delete_topic(self, name: str, *, validate_only: bool = False, timeout_ms: int | None = None) -> None:
        found = await self._call(
            "delete_topic",
            lambda core: core.delete_topics([name], validate_only=validate_only, timeout_ms=timeout_ms),
            timeout_ms,
        )
        return found[name]

    async def delete_topics(
        self, names: Iterable[str], *, validate_only: bool = False, partial: bool = False, timeout_ms: int | None = None
    ) -> Outcomes[str, None]:
        wanted = list(dict.fromkeys(names))
        return await self._call(
            "delete_topics",
            lambda core: core.whole(
                core.delete_topics(wanted, validate_only=validate_only, timeout_ms=timeout_ms), partial=partial
            ),
            timeout_ms,
        )

    async def list_topics(self, *, internal: bool = False, timeout_ms: int | None = None) -> list[TopicListing]:
        return await self._call("list_topics", lambda core: core.list_topics(internal=internal), timeout_ms)

    async def describe_topic(self, name: str, *, timeout_ms: int | None = None) -> TopicDescription:
        found = await self._call(
            "describe_topic", lambda core: core.describe_topics([name], timeout_ms=timeout_ms), timeout_ms
        )
        return found[name]

    async def describe_topics(
        self, names: Iterable[str] | None = None, *, partial: bool = False, timeout_ms: int | None = None
    ) -> Outcomes[str, TopicDescription]:
        wanted = None if names is None else list(dict.fromkeys(names))
        return await self._call(
            "describe_topics",
            lambda core: core.whole(core.describe_topics(wanted, timeout_ms=timeout_ms), partial=partial),
            timeout_ms,
        )

    async def add_partitions(
        self,
        totals: Mapping[str, int],
        *,
        validate_only: bool = False,
        partial: bool = False,
        timeout_ms: int | None = None,
    ) -> Outcomes[str, int]:
        return await self._call(
            "add_partitions",
            lambda core: core.whole(
                core.add_partitions(totals, validate_only=validate_only, timeout_ms=timeout_ms), partial=partial
            ),
            timeout_ms,
        )

    # Settings.

    async def describe_config(
        self, resource: Resource, keys: Iterable[str] = (), *, timeout_ms: int | None = None
    ) -> dict[str, ConfigEntry]:
        wanted = read_resource(resource)
        found = await self._call(
            "describe_config",
            lambda core: core.describe_configs([wanted], list(keys), timeout_ms=timeout_ms),
            timeout_ms,
        )
        return found[wanted]

    async def describe_configs(
        self,
        resources: Iterable[Resource],
        keys: Iterable[str] = (),
        *,
        partial: bool = False,
        timeout_ms: int | None = None,
    ) -> Outcomes[ConfigResource, dict[str, ConfigEntry]]:
        wanted = [read_resource(one) for one in resources]
        return await self._call(
            "describe_configs",
            lambda core: core.whole(core.describe_configs(wanted, list(keys), timeout_ms=timeout_ms), partial=partial),
            timeout_ms,
        )

    async def alter_config(
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
        wanted = read_resource(resource)
        await self._call(
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

    async def list_groups(
        self,
        *,
        states: Iterable[str] = (),
        types: Iterable[str] = (),
        partial: bool = False,
        timeout_ms: int | None = None,
    ) -> GroupList:
        return await self._call(
            "list_groups",
            lambda core: core.list_groups(list(states), list(types), partial=partial, timeout_ms=timeout_ms),
            timeout_ms,
        )

    async def describe_group(self, group: str, *, timeout_ms: int | None = None) -> GroupDescription:
        found = await self._call(
            "describe_group", lambda core: core.describe_groups([group], timeout_ms=timeout_ms), timeout_ms
        )
        return found[group]

    async def describe_groups(
        self, groups: Iterable[str], *, partial: bool = False, timeout_ms: int | None = None
    ) -> Outcomes[str, GroupDescription]:
        return await self._call(
            "describe_groups",
            lambda core: core.whole(core.describe_groups(list(groups), timeout_ms=timeout_ms), partial=partial),
            timeout_ms,
        )

    async def group_lag(self, group: str, *, timeout_ms: int | None = None) -> list[PartitionLag]:
        _, found = await self._call("group_lag", lambda core: core.group_lag(group, timeout_ms=timeout_ms), timeout_ms)
        return found

    async def group_offsets(
        self, group: str, partitions: Iterable[Partitions] | None = None, *, timeout_ms: int | None = None
    ) -> dict[TopicPartition, GroupOffset]:
        wanted = None if partitions is None else read_partitions(partitions)
        return await self._call(
            "group_offsets", lambda core: core.group_offsets(group, wanted, timeout_ms=timeout_ms), timeout_ms
        )

    async def alter_group_offsets(
        self,
        group: str,
        offsets: Mapping[TopicPartition, int | OffsetAndMetadata],
        *,
        partial: bool = False,
        timeout_ms: int | None = None,
    ) -> Outcomes[TopicPartition, int]:
        wanted = read_offsets(offsets)
        return await self._call(
            "alter_group_offsets",
            lambda core: core.whole(core.alter_group_offsets(group, wanted, timeout_ms=timeout_ms), partial=partial),
            timeout_ms,
        )

    async def reset_group_offsets(
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
        asked = read_asked(to, to_time, shift_by, by_duration, from_file)
        scope = read_scope(topics)
        return await self._call(
            "reset_group_offsets",
            lambda core: core.reset_group_offsets(group, asked, scope, dry_run=dry_run, timeout_ms=timeout_ms),
            timeout_ms,
        )

    async def delete_group_offsets(
        self, group: str, topics: Scope, *, partial: bool = False, timeout_ms: int | None = None
    ) -> Outcomes[TopicPartition, None]:
        scope = read_scope(topics) or []
        return await self._call(
            "delete_group_offsets",
            lambda core: core.whole(core.delete_group_offsets(group, scope, timeout_ms=timeout_ms), partial=partial),
            timeout_ms,
        )

    async def delete_group(self, group: str, *, timeout_ms: int | None = None) -> None:
        found = await self._call(
            "delete_group", lambda core: core.delete_groups([group], timeout_ms=timeout_ms), timeout_ms
        )
        return found[group]

    async def delete_groups(
        self, groups: Iterable[str], *, partial: bool = False, timeout_ms: int | None = None
    ) -> Outcomes[str, None]:
        return await self._call(
            "delete_groups",
            lambda core: core.whole(core.delete_groups(list(groups), timeout_ms=timeout_ms), partial=partial),
            timeout_ms,
        )

    async def remove_members(
        self,
        group: str,
        *,
        member_ids: Iterable[str] = (),
        instance_ids: Iterable[str] = (),
        everybody: bool = False,
        partial: bool = False,
        timeout_ms: int | None = None,
    ) -> Outcomes[str, None]:
        members, instances = read_members(member_ids, instance_ids, everybody=everybody)
        return await self._call(
            "remove_members",
            lambda core: core.whole(
                core.remove_members(group, members, instances, timeout_ms=timeout_ms), partial=partial
            ),
            timeout_ms,
        )

    # Records.

    async def list_offsets(
        self,
        topics: Scope,
        *,
        at: Literal["earliest", "latest", "max_timestamp"] | When = "latest",
        partial: bool = False,
        timeout_ms: int | None = None,
    ) -> Outcomes[TopicPartition, ListedOffset]:
        scope = read_scope(topics)
        return await self._call(
            "list_offsets",
            lambda core: core.whole(core.list_offsets(scope, at, timeout_ms=timeout_ms), partial=partial),
            timeout_ms,
        )

    async def delete_records(
        self,
        before: Mapping[TopicPartition, int | Literal["end"]],
        *,
        partial: bool = False,
        timeout_ms: int | None = None,
    ) -> Outcomes[TopicPartition, int]:
        wanted = read_before(before)
        return await self._call(
            "delete_records",
            lambda core: core.whole(core.delete_records(wanted, timeout_ms=timeout_ms), partial=partial),
            timeout_ms,
        )

    async def delete_records_by_time(
        self, topics: Scope, when: When, *, partial: bool = False, timeout_ms: int | None = None
    ) -> Outcomes[TopicPartition, int]:
        scope = read_scope(topics)
        return await self._call(
            "delete_records_by_time",
            lambda core: core.whole(core.delete_records_by_time(scope, when, timeout_ms=timeout_ms), partial=partial),
            timeout_ms,
        )

    # Replicas and leaders.

    async def alter_reassignments(
        self,
        targets: Mapping[TopicPartition, Sequence[int] | None],
        *,
        validate_only: bool = False,
        partial: bool = False,
        timeout_ms: int | None = None,
    ) -> Outcomes[TopicPartition, None]:
        return await self._call(
            "alter_reassignments",
            lambda core: core.whole(
                core.alter_reassignments(targets, validate_only=validate_only, timeout_ms=timeout_ms), partial=partial
            ),
            timeout_ms,
        )

    async def list_reassignments(
        self, partitions: Iterable[Partitions] | None = None, *, timeout_ms: int | None = None
    ) -> list[Reassignment]:
        wanted = None if partitions is None else read_partitions(partitions)
        return await self._call(
            "list_reassignments", lambda core: core.list_reassignments(wanted, timeout_ms=timeout_ms), timeout_ms
        )

    async def elect_leaders(
        self,
        partitions: Iterable[Partitions] | None = None,
        *,
        unclean: bool = False,
        validate_only: bool = False,
        partial: bool = False,
        timeout_ms: int | None = None,
    ) -> Outcomes[TopicPartition, None]:
        wanted = None if partitions is None else read_partitions(partitions)
        return await self._call(
            "elect_leaders",
            lambda core: core.whole(
                core.elect_leaders(wanted, unclean=unclean, validate_only=validate_only, timeout_ms=timeout_ms),
                partial=partial,
            ),
            timeout_ms,
        )

    # The cluster.

    async def describe_cluster(self, *, timeout_ms: int | None = None) -> ClusterDescription:
        return await self._call(
            "describe_cluster", lambda core: core.describe_cluster(timeout_ms=timeout_ms), timeout_ms
        )

    async def describe_quorum(self, *, timeout_ms: int | None = None) -> QuorumDescription:
        return await self._call("describe_quorum", lambda core: core.describe_quorum(timeout_ms=timeout_ms), timeout_ms)

    async def describe_log_dirs(
        self,
        brokers: Iterable[int] = (),
        topics: Iterable[str] = (),
        *,
        partial: bool = False,
        timeout_ms: int | None = None,
    ) -> Outcomes[int, tuple[LogDir, ...]]:
        return await self._call(
            "describe_log_dirs",
            lambda core: core.whole(
                core.describe_log_dirs(list(brokers), list(topics), timeout_ms=timeout_ms), partial=partial
            ),
            timeout_ms,
        )

    async def move_replicas(
        self,
        broker: int,
        to: Mapping[TopicPartition, UUID | str],
        *,
        partial: bool = False,
        timeout_ms: int | None = None,
    ) -> Outcomes[TopicPartition, None]:
        return await self._call(
            "move_replicas",
            lambda core: core.whole(core.move_replicas(broker, to, timeout_ms=timeout_ms), partial=partial),
            timeout_ms,
        )

    # The end.

    def metrics(self) -> dict[str, float]:
        core = self._core
        return core.metrics() if core is not None else {"calls": 0, "failures": 0, "under_way": 0}

    async def close(self, timeout: float | None = None) -> None:
        if self._is_closed:
            return
        self._is_closed = True
        host, self._host = self._host, None
        if host is not None:
            # To its end, though who waits for it may be cancelled.
            await self._ending.run(lambda: self._end(host, timeout))

    async def _end(self, host: Any, timeout: float | None) -> None:
        try:
            if self._core is not None:
                await host.do(self._core.close(timeout))
        finally:
            host.release(self, is_awaited=False)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    def at_exit(self, deadline_s: float) -> None:
        """The interpreter ends, and with it the loop that the client was used on."""
        host, core = self._host, self._core
        if host is not None and core is not None and not self._is_closed:
            self._is_closed = True
            host.run(core.close(max(0.0, deadline_s - time.monotonic())))

    def forked(self) -> None:
        io_thread.leave_behind(self._core, self._host)
        self._begin()
