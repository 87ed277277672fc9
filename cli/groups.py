"""`tidelog groups list|describe|reset-offsets|delete|delete-offsets|remove-members`. Keys of the JSON documents are
listed in docs/cli.md."""

import argparse
import json
import sys
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

from tidelog.cli import session, table
from tidelog.cli.consume import timestamp_of
from tidelog.cli.main import EXIT_OK, EXIT_REFUSED, WrongCallError
from tidelog.client.admin_core import AdminCore
from tidelog.client.admin_values import GroupDescription, OffsetChange, Outcomes, PartitionLag
from tidelog.client.cluster import ClusterClient
from tidelog.client.durations import duration_ms
from tidelog.client.offset_resets import decode_table, encode_table
from tidelog.client.record import TopicPartition
from tidelog.model.errors import ErrorCode, InvalidRequestError, TidelogError

LIST_MS = 10_000
"""How long `list` waits for a broker that does not answer, or has not loaded its groups."""


def _run(options: argparse.Namespace, job: Callable[[AdminCore], Awaitable[int]]) -> int:
    async def with_core(cluster: ClusterClient) -> int:
        await cluster.refresh()  # that there is no cluster is said once, not of each item
        return await job(AdminCore(cluster, timeout_ms=session.timeout_ms(options)))

    return session.run(options, with_core)


def _document(error: TidelogError | None) -> dict[str, Any] | None:
    if error is None:
        return None
    return {"code": error.code.value.code, "name": error.code.name, "message": str(error), "retriable": error.retriable}


def _tell(name: str, error: TidelogError) -> None:
    session.tell(session.named_error_text(name, error, creates=False))


# What there is.


def run_list(options: argparse.Namespace) -> int:
    async def job(core: AdminCore) -> int:
        try:
            found = await core.list_groups(
                options.state, options.type, partial=False, timeout_ms=session.timeout_ms(options, LIST_MS)
            )
        except TidelogError:
            # Some of it is better than nothing; what is missing is told.
            found = await core.list_groups(
                options.state, options.type, partial=True, timeout_ms=session.timeout_ms(options, LIST_MS)
            )
        if options.output == "json":
            groups = [
                {
                    "group": one.group,
                    "type": one.type,
                    "state": one.state,
                    "members": one.members,
                    "coordinator": one.coordinator,
                }
                for one in found
            ]
            errors = [{"broker": broker, "error": _document(error)} for broker, error in found.errors.items()]
            loading = [{"broker": broker, "partitions": count} for broker, count in found.loading.items()]
            print(json.dumps({"groups": groups, "errors": errors, "loading": loading}, indent=2))
        elif found.groups:
            cells = [[one.group, one.type, one.state, one.members, one.coordinator] for one in found]
            headings = ["group", "type", "state", "members", "coordinator"]
            table.write(sys.stdout, headings, cells, right=["members", "coordinator"])
        elif not found.errors and not found.loading:
            session.tell("there are no groups")
        for broker, error in found.errors.items():
            session.tell(f"groups of broker {broker} are missing: {session.error_text(error)}")
        for broker, count in found.loading.items():
            session.tell(f"broker {broker} has {table.count(count, 'partition')} of groups to load: ask again")
        return EXIT_REFUSED if found.errors or found.loading else EXIT_OK

    return _run(options, job)


def run_describe(options: argparse.Namespace) -> int:
    async def job(core: AdminCore) -> int:
        names = list(dict.fromkeys(options.group))
        if not names:
            found = await core.list_groups((), (), partial=False, timeout_ms=session.timeout_ms(options))
            names = [one.group for one in found]
        code = EXIT_OK
        documents = []
        for number, name in enumerate(names):
            try:
                description, lags = await core.group_lag(name, timeout_ms=session.timeout_ms(options))
            except TidelogError as error:
                if error.code is not ErrorCode.GROUP_ID_NOT_FOUND:
                    raise
                _tell(name, error)
                documents.append({"group": name, "error": _document(error)})
                code = EXIT_REFUSED
                continue
            if options.output == "json":
                documents.append(_described(description, lags))
            else:
                if number:
                    print()
                _print_group(description, lags)
        if options.output == "json":
            print(json.dumps({"groups": documents}, indent=2))
        elif not names:
            session.tell("there are no groups")
        return code

    return _run(options, job)


def _described(description: GroupDescription, lags: Sequence[PartitionLag]) -> dict[str, Any]:
    return {
        "group": description.group,
        "error": None,
        "type": description.type,
        "state": description.state,
        "epoch": description.epoch,
        "assignor": description.assignor or None,
        "coordinator": description.coordinator,
        "coordinator_address": description.coordinator_address,
        "lag": _total(lags),
        "members": [
            {
                "member_id": member.member_id,
                "instance_id": member.instance_id or None,
                "client_id": member.client_id or None,
                "host": member.host,
                "rack": member.rack or None,
                "epoch": member.epoch,
                "topics": list(member.topics),
                "pattern": member.pattern or None,
                "assignment": _places(member.assignment),
                "target": _places(member.target),
            }
            for member in description.members
        ],
        "partitions": [
            {
                "topic": row.partition.topic,
                "partition": row.partition.partition,
                "committed": row.committed,
                "end": row.end,
                "lag": row.lag,
                "metadata": row.metadata or None,
                "member_id": row.member_id or None,
                "error": _document(row.error),
            }
            for row in lags
        ],
    }


def _places(places: Sequence[TopicPartition]) -> list[dict[str, Any]]:
    return [{"topic": place.topic, "partition": place.partition} for place in places]


def _total(lags: Sequence[PartitionLag]) -> int:
    return sum(row.lag or 0 for row in lags)


def _print_group(description: GroupDescription, lags: Sequence[PartitionLag]) -> None:
    facts = [description.type, description.state, table.count(len(description.members), "member")]
    if description.assignor:
        facts.append(description.assignor)
    facts.append(f"coordinator {description.coordinator} ({description.coordinator_address})")
    facts.append(f"lag {_total(lags)}")
    said = table.wrapped(f"{description.group}: {', '.join(facts)}", sys.stdout)
    print(said.replace(description.group, table.bold(description.group, sys.stdout), 1))
    if lags:
        cells = [
            [
                row.partition.topic,
                row.partition.partition,
                "-" if row.committed is None else row.committed,
                "-" if row.end is None else row.end,
                "-" if row.lag is None else row.lag,
                row.member_id or "-",
                row.client_id or "-",
                row.host or "-",
            ]
            for row in lags
        ]
        headings = ["topic", "partition", "committed", "end", "lag", "member", "client", "host"]
        table.write(sys.stdout, headings, cells, right=["partition", "committed", "end", "lag"])
    idle = [member for member in description.members if not member.assignment]
    for member in idle:
        print(f"{member.member_id} ({member.client_id or 'no client id'}, {member.host}): has no partitions")


# Changes.


def scope_of(options: argparse.Namespace) -> list[str | TopicPartition] | None:
    """What --topic and --all-topics name; None: all that is committed."""
    if options.all_topics == bool(options.topic):
        raise WrongCallError("--topic T[:P,P], or --all-topics for all that the group has committed")
    if options.all_topics:
        return None
    found: list[str | TopicPartition] = []
    for text in options.topic:
        name, colon, numbers = text.partition(":")
        parts = numbers.split(",") if colon else []
        if not name or not all(part.isdecimal() for part in parts):
            raise WrongCallError(f"--topic {text!r}: a name, or a name and partitions, like orders:0,2")
        found += [TopicPartition(name, int(part)) for part in parts] if colon else [name]
    return found


def asked_of(options: argparse.Namespace) -> dict[str, Any]:
    """Where to go, as `AdminCore.reset_group_offsets` takes it."""
    if options.to_earliest or options.to_latest:
        return {"to": "earliest" if options.to_earliest else "latest"}
    if options.to_offset is not None:
        if options.to_offset < 0:
            raise WrongCallError(f"--to-offset {options.to_offset}: from 0 on")
        return {"to": options.to_offset}
    if options.to_datetime is not None:
        return {"to_time": timestamp_of(options.to_datetime, "--to-datetime")}
    if options.by_duration is not None:
        if duration_ms(options.by_duration) is None:
            raise WrongCallError(f"--by-duration {options.by_duration!r}: a span like 90s, 1h30m, PT1H")
        return {"by_duration": options.by_duration}
    if options.shift_by is not None:
        return {"shift_by": options.shift_by}
    if options.from_file is not None:
        try:
            text = Path(options.from_file).read_text(encoding="utf-8")
            return {"to": decode_table(text, where=options.from_file)}
        except FileNotFoundError as error:
            raise WrongCallError(f"--from-file {options.from_file}: no such file") from error
        except (InvalidRequestError, UnicodeDecodeError) as error:
            raise WrongCallError(f"--from-file {error}") from error
    if options.to_current:
        return {"shift_by": 0}
    raise WrongCallError(
        "where to? --to-earliest, --to-latest, --to-offset, --to-datetime, --by-duration, --shift-by, --from-file or "
        "--to-current"
    )


def run_reset(options: argparse.Namespace) -> int:
    asked = asked_of(options)
    scope = None if options.from_file is not None and not options.topic else scope_of(options)
    if options.export and options.output == "json":
        raise WrongCallError("--export prints lines of its own; leave --output out")

    async def job(core: AdminCore) -> int:
        try:
            changes = await core.reset_group_offsets(
                options.group, asked, scope, dry_run=not options.execute, timeout_ms=session.timeout_ms(options)
            )
        except InvalidRequestError as error:
            raise WrongCallError(str(error)) from error
        _print_changes(options, changes)
        if not options.execute:
            if not options.export:
                session.tell("nothing was changed; --execute does it")
            await _warn_of_members(core, options.group, session.timeout_ms(options))
        return EXIT_OK

    return _run(options, job)


async def _warn_of_members(core: AdminCore, group: str, timeout_ms: int) -> None:
    try:
        await core.groups.check_inactive(group, timeout_ms=timeout_ms)
    except TidelogError as error:
        if error.code is not ErrorCode.NON_EMPTY_GROUP:
            raise
        session.tell(str(error))


def _print_changes(options: argparse.Namespace, changes: Sequence[OffsetChange]) -> None:
    if options.export:
        sys.stdout.write(encode_table({row.partition: row.after for row in changes}))
    elif options.output == "json":
        rows = [
            {
                "topic": row.partition.topic,
                "partition": row.partition.partition,
                "before": row.before,
                "after": row.after,
                "note": row.note or None,
            }
            for row in changes
        ]
        print(json.dumps({"group": options.group, "executed": options.execute, "partitions": rows}, indent=2))
    else:
        cells = [
            [
                row.partition.topic,
                row.partition.partition,
                "-" if row.before is None else row.before,
                row.after,
                row.note,
            ]
            for row in changes
        ]
        headings = ["topic", "partition", "now", "then", "note"]
        table.write(sys.stdout, headings, cells, right=["partition", "now", "then"])


def run_delete(options: argparse.Namespace) -> int:
    async def job(core: AdminCore) -> int:
        names = list(dict.fromkeys(options.group))
        if not await session.is_sure(options, f"Delete {', '.join(names)} and what they have committed?"):
            return EXIT_REFUSED
        return _end(
            options, "groups", await core.delete_groups(names, timeout_ms=session.timeout_ms(options)), "deleted"
        )

    return _run(options, job)


def run_delete_offsets(options: argparse.Namespace) -> int:
    scope = scope_of(options)

    async def job(core: AdminCore) -> int:
        try:
            places = await core.groups.partitions_of(options.group, scope, timeout_ms=session.timeout_ms(options))
        except InvalidRequestError as error:
            raise WrongCallError(str(error)) from error
        told = ", ".join(map(str, places[:5])) + (f" and {len(places) - 5} more" if len(places) > 5 else "")
        if not await session.is_sure(options, f"Forget what {options.group} has committed of {told}?"):
            return EXIT_REFUSED
        outcomes = await core.groups.delete_offsets(options.group, places, timeout_ms=session.timeout_ms(options))
        return _end(options, "partitions", outcomes, "forgotten")

    return _run(options, job)


def run_remove_members(options: argparse.Namespace) -> int:
    if options.all == bool(options.member or options.instance):
        raise WrongCallError("--member ID, --instance ID, or --all")

    async def job(core: AdminCore) -> int:
        named = ", ".join([*options.member, *options.instance]) or "all members"
        if not await session.is_sure(options, f"Take {named} out of {options.group}?"):
            return EXIT_REFUSED
        outcomes = await core.remove_members(
            options.group, options.member, options.instance, timeout_ms=session.timeout_ms(options)
        )
        return _end(options, "members", outcomes, "removed")

    return _run(options, job)


def _end(options: argparse.Namespace, what: str, outcomes: Outcomes[Any, None], done: str) -> int:
    """How each item of a change ended."""
    if options.output == "json":
        items = [{"name": str(name), "error": _document(outcomes.errors.get(name))} for name in outcomes]
        print(json.dumps({what: items}, indent=2))
    else:
        for name in outcomes.done:
            print(f"{name}: {done}")
        if not len(outcomes):
            session.tell(f"there were no {what}")
    for name, error in outcomes.errors.items():
        _tell(str(name), error)
    return EXIT_REFUSED if outcomes.errors else EXIT_OK
