"""`tidelog groups list|describe|reset-offsets|delete|delete-offsets|remove-members`. docs/cli.md lists the keys of the
JSON documents."""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tidelog.cli import table
from tidelog.cli.clients import open_admin, timeout_s
from tidelog.cli.consume import timestamp_of
from tidelog.cli.exit_codes import EXIT_FAILURE, EXIT_OK
from tidelog.cli.main import UsageError
from tidelog.cli.messages import (
    confirm,
    error_document,
    error_text,
    named_error_text,
    print_json,
    print_outcomes,
    report,
)
from tidelog.client.admin.groups import active_group_error
from tidelog.client.admin.offset_resets import decode_table, encode_table
from tidelog.client.admin.threaded import Admin
from tidelog.client.admin.values import GroupDescription, OffsetChange, Outcomes, PartitionLag
from tidelog.client.durations import duration_ms
from tidelog.client.errors import NoClusterError
from tidelog.client.record import TopicPartition
from tidelog.model.errors import ErrorCode, InvalidRequestError, TidelogError

LIST_S = 10.0
"""How long `list` waits for a broker that does not answer, or loads groups."""


# Queries.


def run_list(options: argparse.Namespace) -> int:
    with open_admin(options) as admin:
        limit_s = timeout_s(options, LIST_S)
        try:
            groups = admin.list_groups(states=options.state, types=options.type, timeout=limit_s)
        except NoClusterError:
            raise
        except TidelogError:
            # A part of the list is better than none; messages name the brokers that are missing.
            groups = admin.list_groups(states=options.state, types=options.type, partial=True, timeout=limit_s)
    if options.output == "json":
        rows = [
            {
                "group": group.group,
                "type": group.type,
                "state": group.state,
                "members": group.members,
                "coordinator": group.coordinator,
            }
            for group in groups
        ]
        errors = [{"broker": broker, "error": error_document(error)} for broker, error in groups.errors.items()]
        loading = [{"broker": broker, "partitions": count} for broker, count in groups.loading.items()]
        print_json({"groups": rows, "errors": errors, "loading": loading})
    elif groups.groups:
        cells = [[group.group, group.type, group.state, group.members, group.coordinator] for group in groups]
        headings = ["group", "type", "state", "members", "coordinator"]
        table.write(sys.stdout, headings, cells, right=["members", "coordinator"])
    elif not groups.errors and not groups.loading:
        report("there are no groups")
    for broker, error in groups.errors.items():
        report(f"groups of broker {broker} are missing: {error_text(error)}")
    for broker, count in groups.loading.items():
        report(f"broker {broker} has {table.count(count, 'partition')} of groups to load: try again")
    return EXIT_FAILURE if groups.errors or groups.loading else EXIT_OK


def run_describe(options: argparse.Namespace) -> int:
    code = EXIT_OK
    documents: list[dict[str, Any]] = []
    with open_admin(options) as admin:
        names = list(dict.fromkeys(options.group)) or [group.group for group in admin.list_groups()]
        for number, name in enumerate(names):
            try:
                description, lags = admin.describe_group(name), admin.group_lag(name)
            except TidelogError as error:
                if error.code is not ErrorCode.GROUP_ID_NOT_FOUND:
                    raise
                report(named_error_text(name, error, creates=False))
                documents.append({"group": name, "error": error_document(error)})
                code = EXIT_FAILURE
                continue
            if options.output == "json":
                documents.append(_described(description, lags))
            else:
                if number:
                    print()
                _print_group(description, lags)
    if options.output == "json":
        print_json({"groups": documents})
    elif not names:
        report("there are no groups")
    return code


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
                "assignment": _partitions(member.assignment),
                "target": _partitions(member.target),
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
                "error": error_document(row.error),
            }
            for row in lags
        ],
    }


def _partitions(partitions: Sequence[TopicPartition]) -> list[dict[str, Any]]:
    return [{"topic": row.topic, "partition": row.partition} for row in partitions]


def _total(lags: Sequence[PartitionLag]) -> int:
    return sum(row.lag or 0 for row in lags)


def _print_group(description: GroupDescription, lags: Sequence[PartitionLag]) -> None:
    parts = [description.type, description.state, table.count(len(description.members), "member")]
    if description.assignor:
        parts.append(description.assignor)
    parts.append(f"coordinator {description.coordinator} ({description.coordinator_address})")
    parts.append(f"lag {_total(lags)}")
    line = table.wrapped(f"{description.group}: {', '.join(parts)}", sys.stdout)
    print(line.replace(description.group, table.bold(description.group, sys.stdout), 1))
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
    """Returns topics and partitions of --topic; None for --all-topics."""
    if options.all_topics == bool(options.topic):
        raise UsageError("use --topic T[:P,P], or --all-topics for all that the group has committed")
    if options.all_topics:
        return None
    scope: list[str | TopicPartition] = []
    for text in options.topic:
        name, colon, numbers = text.partition(":")
        parts = numbers.split(",") if colon else []
        if not name or not all(part.isdecimal() for part in parts):
            raise UsageError(f"--topic {text!r}: write a name, or a name and partitions, like orders:0,2")
        scope += [TopicPartition(name, int(part)) for part in parts] if colon else [name]
    return scope


def target_of(options: argparse.Namespace) -> dict[str, Any]:
    """Returns the target as arguments of `Admin.reset_group_offsets`."""
    if options.to_earliest or options.to_latest:
        return {"to": "earliest" if options.to_earliest else "latest"}
    if options.to_offset is not None:
        if options.to_offset < 0:
            raise UsageError(f"--to-offset {options.to_offset}: from 0 on")
        return {"to": options.to_offset}
    if options.to_datetime is not None:
        return {"to_time": timestamp_of(options.to_datetime, "--to-datetime")}
    if options.by_duration is not None:
        if duration_ms(options.by_duration) is None:
            raise UsageError(f"--by-duration {options.by_duration!r}: write a duration like 90s, 1h30m, PT1H")
        return {"by_duration": options.by_duration}
    if options.shift_by is not None:
        return {"shift_by": options.shift_by}
    if options.from_file is not None:
        try:
            text = Path(options.from_file).read_text(encoding="utf-8")
            return {"to": decode_table(text, where=options.from_file)}
        except FileNotFoundError as error:
            raise UsageError(f"--from-file {options.from_file}: no such file") from error
        except (InvalidRequestError, UnicodeDecodeError) as error:
            raise UsageError(f"--from-file {error}") from error
    if options.to_current:
        return {"shift_by": 0}
    raise UsageError(
        "no target: use --to-earliest, --to-latest, --to-offset, --to-datetime, --by-duration, --shift-by, "
        "--from-file or --to-current"
    )


def run_reset(options: argparse.Namespace) -> int:
    target = target_of(options)
    scope = None if options.from_file is not None and not options.topic else scope_of(options)
    if options.export and options.output == "json":
        raise UsageError("--export prints lines of its own; leave --output out")
    with open_admin(options) as admin:
        try:
            changes = admin.reset_group_offsets(options.group, **target, topics=scope, dry_run=not options.execute)
        except InvalidRequestError as error:
            raise UsageError(str(error)) from error
        _print_changes(options, changes)
        if not options.execute:
            if not options.export:
                report("nothing was changed; --execute makes the changes")
            _warn_of_members(admin, options.group)
    return EXIT_OK


def _warn_of_members(admin: Admin, group: str) -> None:
    description = admin.describe_groups([group], partial=True).succeeded.get(group)
    if description is not None and description.is_active:
        report(str(active_group_error(group, description)))


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
        print_json({"group": options.group, "executed": options.execute, "partitions": rows})
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
        headings = ["topic", "partition", "before", "after", "note"]
        table.write(sys.stdout, headings, cells, right=["partition", "before", "after"])


def run_delete(options: argparse.Namespace) -> int:
    names = list(dict.fromkeys(options.group))
    with open_admin(options) as admin:
        admin.describe_cluster()  # a cluster that does not answer is reported once, not for each group
        if not confirm(options, f"Delete {', '.join(names)} and their committed offsets?"):
            return EXIT_FAILURE
        return _print_outcomes(options, "groups", admin.delete_groups(names, partial=True), "deleted")


def run_delete_offsets(options: argparse.Namespace) -> int:
    scope = scope_of(options)
    with open_admin(options) as admin:
        if scope is None:
            offsets = admin.group_offsets(options.group)
            scope = [partition for partition, offset in offsets.items() if not offset.is_topic_deleted]
            if not scope:
                raise UsageError(f"group '{options.group}' has committed nothing: name the topics")
        names = ", ".join(map(str, scope[:5])) + (f" and {len(scope) - 5} more" if len(scope) > 5 else "")
        if not confirm(options, f"Delete the committed offsets of {options.group} in {names}?"):
            return EXIT_FAILURE
        outcomes = admin.delete_group_offsets(options.group, scope, partial=True)
    return _print_outcomes(options, "partitions", outcomes, "deleted")


def run_remove_members(options: argparse.Namespace) -> int:
    if options.all == bool(options.member or options.instance):
        raise UsageError("use --member ID, --instance ID, or --all")
    with open_admin(options) as admin:
        names = ", ".join([*options.member, *options.instance]) or "all members"
        if not confirm(options, f"Remove {names} from {options.group}?"):
            return EXIT_FAILURE
        outcomes = admin.remove_members(
            options.group,
            member_ids=options.member,
            instance_ids=options.instance,
            all_members=options.all,
            partial=True,
        )
    return _print_outcomes(options, "members", outcomes, "removed")


def _print_outcomes(options: argparse.Namespace, what: str, outcomes: Outcomes[Any, None], done: str) -> int:
    errors = {str(item): outcomes.errors.get(item) for item in (*outcomes.succeeded, *outcomes.errors)}
    if not errors and options.output != "json":
        report(f"there were no {what}")
    return print_outcomes(options, what, errors, done, creates=False, has_validate_only=False)
