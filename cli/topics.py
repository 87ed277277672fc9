"""`tidelog topics create|list|describe|alter|delete`. docs/cli.md lists the keys of the JSON documents."""

import argparse
import sys
from collections.abc import Callable, Sequence
from typing import Any

from tidelog.cli import table
from tidelog.cli.clients import open_admin
from tidelog.cli.config_values import config_pairs_of
from tidelog.cli.exit_codes import EXIT_FAILURE, EXIT_OK
from tidelog.cli.main import UsageError
from tidelog.cli.messages import (
    confirm,
    error_document,
    id_text,
    print_json,
    print_outcomes,
    report,
    report_errors,
    report_if_stale,
    stale_fields,
    stale_mark,
)
from tidelog.cli.partition_logs import ASK_S, STALE_ASK_S, UNKNOWN, PartitionLog, partition_logs
from tidelog.client.admin.values import CreatedTopic, NewTopic, PartitionDescription, TopicDescription
from tidelog.client.record import TopicPartition
from tidelog.model.errors import ErrorCode

Logs = dict[TopicPartition, PartitionLog]


def _assignment(text: str | None) -> tuple[tuple[int, ...], ...]:
    if text is None:
        return ()
    try:
        return tuple(tuple(int(broker) for broker in row.split(":")) for row in text.split(","))
    except ValueError as error:
        raise UsageError(
            f"--replica-assignment {text!r}: list the brokers of each partition, like 1:2:3,2:3:1"
        ) from error


def run_create(options: argparse.Namespace) -> int:
    assignment = _assignment(options.replica_assignment)
    if assignment and (options.partitions is not None or options.replication_factor is not None):
        raise UsageError(
            "--replica-assignment gives the numbers of partitions and replicas; leave out --partitions and "
            "--replication-factor"
        )
    configs = dict(config_pairs_of(options.config, "--config", "topic"))
    topics = [
        NewTopic(name, options.partitions, options.replication_factor, configs, assignment) for name in options.topic
    ]
    with open_admin(options) as admin:
        outcomes = admin.create_topics(
            topics, if_not_exists=options.if_not_exists, validate_only=options.validate_only, partial=True
        )
    if options.output == "json":
        rows = [
            _created_document(name, outcomes.succeeded.get(name), outcomes.errors.get(name)) for name in options.topic
        ]
        print_json({"topics": rows, "validate_only": options.validate_only})
    else:
        done = "would be created" if options.validate_only else "created"
        for topic in outcomes.succeeded.values():
            state = done if topic.is_new else "exists"
            print(f"{topic.name}: {state}, {_size(topic.partitions, topic.replication_factor)}")
            if topic.note:
                report(f"{topic.name}: {topic.note}")
    return report_errors(outcomes.errors)


def _created_document(name: str, topic: CreatedTopic | None, error: Any) -> dict[str, Any]:
    return {
        "name": name,
        "topic_id": None if topic is None else id_text(topic.topic_id),
        "is_new": topic is not None and topic.is_new,
        "partitions": 0 if topic is None else topic.partitions,
        "replication_factor": 0 if topic is None else topic.replication_factor,
        "note": (topic.note or None) if topic is not None else None,
        "error": error_document(error),
    }


def _size(partitions: int, replicas: int) -> str:
    return f"{table.count(partitions, 'partition')}, {table.count(replicas, 'replica')}"


def run_list(options: argparse.Namespace) -> int:
    with open_admin(options) as admin:
        topics = admin.list_topics(internal=not options.exclude_internal)
        stale_ms = admin.stale_ms
        report_if_stale(stale_ms, admin.answered_by)
    if options.output == "json":
        rows = [
            {
                "name": topic.name,
                "topic_id": id_text(topic.topic_id),
                "is_internal": topic.is_internal,
                "partitions": topic.partitions,
            }
            for topic in topics
        ]
        print_json({"topics": rows, **stale_fields(stale_ms)})
    else:
        for topic in topics:
            print(topic.name)
    return EXIT_OK


def partition_filter(options: argparse.Namespace) -> Callable[[PartitionDescription], bool] | None:
    """Returns the filter of the options; None: all partitions."""
    tests: list[Callable[[PartitionDescription], bool]] = []
    if options.under_replicated:
        tests.append(lambda row: len(row.isr) < len(set(row.replicas) - set(row.adding_replicas)))
    if options.unavailable:
        tests.append(lambda row: row.leader is None)
    if options.under_min_isr:
        tests.append(lambda row: len(row.isr) < row.min_isr)
    if options.at_min_isr:
        tests.append(lambda row: len(row.isr) == row.min_isr)
    return (lambda row: any(test(row) for test in tests)) if tests else None


def run_describe(options: argparse.Namespace) -> int:
    is_shown = partition_filter(options)
    with open_admin(options) as admin:
        outcomes = admin.describe_topics(options.topic or None, allow_stale=True, partial=True)
        stale_ms = admin.stale_ms
        mark = stale_mark(stale_ms)
        report_if_stale(stale_ms, admin.answered_by)
        topics = [topic for topic in outcomes.succeeded.values() if topic.configs or not options.with_overrides]
        shown = []
        for topic in topics:
            rows = [row for row in topic.partitions if is_shown is None or is_shown(row)]
            if rows or is_shown is None:
                shown.append((topic, rows))
        logs = partition_logs(admin, shown, ask_s=ASK_S if stale_ms is None else STALE_ASK_S)
    if options.output == "json":
        documents = [describe_document(topic, rows, logs) for topic, rows in shown]
        documents += [{"name": name, "error": error_document(error)} for name, error in outcomes.errors.items()]
        print_json({"topics": documents, **stale_fields(stale_ms)})
    elif is_shown is not None:
        _print_partitions([(topic, row) for topic, rows in shown for row in rows], logs, has_names=True, mark=mark)
    else:
        for number, (topic, rows) in enumerate(shown):
            _print_topic(topic, rows, logs, is_first=number == 0, mark=mark)
    code = report_errors(outcomes.errors)
    if is_shown is not None and stale_ms is not None:
        report("this selection is unknown now: only an active controller knows leaders and in-sync replicas")
        return EXIT_FAILURE
    return code


def _log_of(topic: TopicDescription, row: PartitionDescription, logs: Logs) -> PartitionLog:
    return logs.get(TopicPartition(topic.name, row.partition), UNKNOWN)


def describe_document(topic: TopicDescription, rows: Sequence[PartitionDescription], logs: Logs) -> dict[str, Any]:
    return {
        "name": topic.name,
        "topic_id": id_text(topic.topic_id),
        "is_internal": topic.is_internal,
        "replication_factor": topic.replication_factor,
        "configs": dict(topic.configs),
        "error": None,
        "partitions": [_partition_document(row, _log_of(topic, row, logs)) for row in rows],
    }


def _partition_document(row: PartitionDescription, log: PartitionLog) -> dict[str, Any]:
    return {
        "partition": row.partition,
        "state": row.state,
        "leader": row.leader,
        "leader_epoch": row.leader_epoch,
        "partition_epoch": row.partition_epoch,
        "replicas": list(row.replicas),
        "isr": list(row.isr),
        "min_isr": row.min_isr,
        "eligible_leader_replicas": list(row.eligible_leader_replicas),
        "offline_replicas": list(row.offline_replicas),
        "adding_replicas": list(row.adding_replicas),
        "removing_replicas": list(row.removing_replicas),
        "start_offset": row.start_offset,
        "log_start_offset": log.start_offset,
        "end_offset": log.end_offset,
        "bytes": log.bytes,
        "advice": row.advice or None,
    }


def _print_topic(
    topic: TopicDescription, rows: list[PartitionDescription], logs: Logs, *, is_first: bool, mark: str
) -> None:
    if not is_first:
        print()
    configs = ", ".join(f"{key}={value}" for key, value in topic.configs.items())
    size = f"{_size(len(topic.partitions), topic.replication_factor)}, id {id_text(topic.topic_id)}"
    line = table.wrapped(f"{topic.name}: {size}{f'; {configs}' if configs else ''}", sys.stdout)
    print(line.replace(topic.name, table.bold(topic.name, sys.stdout), 1))
    _print_partitions([(topic, row) for row in rows], logs, has_names=False, mark=mark)


def _print_partitions(
    rows: list[tuple[TopicDescription, PartitionDescription]], logs: Logs, *, has_names: bool, mark: str
) -> None:
    """`mark` is added to each state; see `stale_mark`."""
    headings = ["partition", "leader", "epoch", "replicas", "in sync", "min", "start", "end", "bytes", "state"]
    cells = []
    for topic, row in rows:
        state = row.state + mark + (f": {row.advice}" if row.advice else "")
        if row.adding_replicas or row.removing_replicas:
            state += f"; moving (+{_ids(row.adding_replicas) or 'none'} -{_ids(row.removing_replicas) or 'none'})"
        leader = "none" if row.leader is None else row.leader
        log = _log_of(topic, row, logs)
        figures = ["-" if figure is None else figure for figure in (log.start_offset, log.end_offset, log.bytes)]
        replicas = [_ids(row.replicas), _ids(row.isr)]
        cell = [row.partition, leader, row.leader_epoch, *replicas, row.min_isr, *figures, state]
        cells.append([topic.name, *cell] if has_names else cell)
    table.write(
        sys.stdout,
        ["topic", *headings] if has_names else headings,
        cells,
        right=["partition", "leader", "epoch", "min", "start", "end", "bytes"],
    )


def _ids(brokers: Any) -> str:
    return ",".join(map(str, brokers))


def run_alter(options: argparse.Namespace) -> int:
    totals = dict.fromkeys(options.topic, options.partitions)
    with open_admin(options) as admin:
        outcomes = admin.add_partitions(totals, validate_only=options.validate_only, partial=True)
    done = f"{'would be: ' if options.validate_only else ''}{table.count(options.partitions, 'partition')}"
    return print_outcomes(options, "topics", {name: outcomes.errors.get(name) for name in totals}, done)


def run_delete(options: argparse.Namespace) -> int:
    names = list(dict.fromkeys(options.topic))
    with open_admin(options) as admin:
        if not options.validate_only:
            # The question names topics that exist; a wrong name is reported before it.
            existing = admin.delete_topics(names, validate_only=True, partial=True).succeeded
            question = f"Delete {', '.join(existing)} and all records at {admin.answered_by}?"
            if existing and not confirm(options, question):
                return EXIT_FAILURE
        outcomes = admin.delete_topics(names, validate_only=options.validate_only, partial=True)
    accepted = (ErrorCode.UNKNOWN_TOPIC_OR_PARTITION,) if options.if_exists else ()
    done = "would be: deleted" if options.validate_only else "deleted"
    errors = {name: outcomes.errors.get(name) for name in names}
    return print_outcomes(options, "topics", errors, done, creates=False, expected=accepted)
