"""`tidelog topics create|list|describe|alter|delete`. Keys of the JSON documents are listed in docs/cli.md."""

import argparse
import json
import sys
from collections.abc import Callable
from typing import Any
from uuid import UUID

from tidelog.cli import session, table
from tidelog.cli.config_values import config_pairs_of
from tidelog.cli.main import EXIT_OK, EXIT_REFUSED, WrongCallError
from tidelog.cli.partition_logs import ASK_MS, STALE_ASK_MS, UNKNOWN, PartitionLog, partition_id, partition_logs
from tidelog.client.admin import AdminClient
from tidelog.client.cluster import ClusterClient
from tidelog.model.errors import ErrorCode
from tidelog.model.ids import PartitionId
from tidelog.rpc.v1 import admin_pb2 as pb


def _assignment(text: str | None) -> list[pb.Replicas]:
    if text is None:
        return []
    try:
        return [pb.Replicas(brokers=[int(one) for one in row.split(":")]) for row in text.split(",")]
    except ValueError as error:
        raise WrongCallError(f"--replica-assignment {text!r}: brokers of each partition, like 1:2:3,2:3:1") from error


def run_create(options: argparse.Namespace) -> int:
    assignment = _assignment(options.replica_assignment)
    if assignment and (options.partitions is not None or options.replication_factor is not None):
        raise WrongCallError(
            "--replica-assignment says how many partitions and replicas there are; leave the others out"
        )
    configs = [
        pb.ConfigPair(key=key, value=value) for key, value in config_pairs_of(options.config, "--config", "topic")
    ]
    wanted = [
        pb.NewTopic(
            name=name,
            partitions=options.partitions,
            replication_factor=options.replication_factor,
            assignment=assignment,
            configs=configs,
        )
        for name in options.topic
    ]

    async def job(cluster: ClusterClient) -> int:
        rows = await AdminClient(cluster).create_topics(wanted, validate_only=options.validate_only)
        accepted = [ErrorCode.TOPIC_ALREADY_EXISTS] if options.if_not_exists else []
        if options.output == "json":
            document = {"topics": [_created(row) for row in rows], "validate_only": options.validate_only}
            print(json.dumps(document, indent=2))
        else:
            for row in rows:
                if not row.HasField("error"):
                    would = "would be created" if options.validate_only else "created"
                    print(f"{row.name}: {would}, {_size(row.partitions, row.replication_factor)}")
                    if row.note:
                        session.tell(f"{row.name}: {row.note}")
        return session.tell_errors([(row.name, row) for row in rows], but=accepted)

    return session.run(options, job)


def _size(partitions: int, replicas: int) -> str:
    return f"{table.count(partitions, 'partition')}, {table.count(replicas, 'replica')}"


def _id(data: bytes) -> str | None:
    return str(UUID(bytes=data)) if len(data) == 16 else None


def _created(row: pb.CreatedTopic) -> dict[str, Any]:
    return {
        "name": row.name,
        "topic_id": _id(row.topic_id),
        "partitions": row.partitions,
        "replication_factor": row.replication_factor,
        "note": row.note or None,
        "error": session.error_document(row),
    }


def run_list(options: argparse.Namespace) -> int:
    async def job(cluster: ClusterClient) -> int:
        found = [t for t in await cluster.all_topics() if not (options.exclude_internal and t.is_internal)]
        session.tell_if_stale(cluster.stale_ms, cluster.answered)
        if options.output == "json":
            rows = [
                {
                    "name": topic.name,
                    "topic_id": str(topic.topic_id),
                    "is_internal": topic.is_internal,
                    "partitions": len(topic.partitions),
                }
                for topic in found
            ]
            print(json.dumps({"topics": rows, **session.stale_fields(cluster.stale_ms)}, indent=2))
        else:
            for topic in found:
                print(topic.name)
        return EXIT_OK

    return session.run(options, job)


def partition_filter(options: argparse.Namespace) -> Callable[[pb.PartitionDescription], bool] | None:
    """Which partitions were asked for; None: all."""
    tests: list[Callable[[pb.PartitionDescription], bool]] = []
    if options.under_replicated:
        tests.append(lambda row: len(row.isr) < len(set(row.replicas) - set(row.adding_replicas)))
    if options.unavailable:
        tests.append(lambda row: row.leader < 0)
    if options.under_min_isr:
        tests.append(lambda row: len(row.isr) < row.min_isr)
    if options.at_min_isr:
        tests.append(lambda row: len(row.isr) == row.min_isr)
    return (lambda row: any(test(row) for test in tests)) if tests else None


def run_describe(options: argparse.Namespace) -> int:
    asked = partition_filter(options)

    async def job(cluster: ClusterClient) -> int:
        admin = AdminClient(cluster, allow_stale=True)
        found = list(await admin.describe_topics(options.topic or None))
        session.tell_if_stale(admin.stale_ms, cluster.answered)
        if options.with_overrides:
            found = [topic for topic in found if topic.HasField("error") or topic.configs]
        shown = []
        for topic in found:
            rows = [row for row in topic.partitions if asked is None or asked(row)]
            if not topic.HasField("error") and (rows or asked is None):
                shown.append((topic, rows))
        ask_ms = ASK_MS if admin.stale_ms is None else STALE_ASK_MS
        logs = await partition_logs(cluster, shown, ask_ms=ask_ms)
        if options.output == "json":
            document = [describe_document(topic, rows, logs) for topic, rows in shown]
            document += [_missing(topic) for topic in found if topic.HasField("error")]
            print(json.dumps({"topics": document, **session.stale_fields(admin.stale_ms)}, indent=2))
        elif asked is not None:
            _print_partitions([(topic, row) for topic, rows in shown for row in rows], logs, has_names=True)
        else:
            for number, (topic, rows) in enumerate(shown):
                _print_topic(topic, rows, logs, is_first=number == 0)
        return session.tell_errors([(topic.name, topic) for topic in found])

    return session.run(options, job)


def _missing(topic: pb.TopicDescription) -> dict[str, Any]:
    return {"name": topic.name, "error": session.error_document(topic)}


Logs = dict[PartitionId, PartitionLog]


def _log_of(topic: pb.TopicDescription, row: pb.PartitionDescription, logs: Logs) -> PartitionLog:
    return logs.get(partition_id(topic, row), UNKNOWN)


def describe_document(topic: pb.TopicDescription, rows: list[pb.PartitionDescription], logs: Logs) -> dict[str, Any]:
    found = {row.partition: _log_of(topic, row, logs) for row in rows}
    return {
        "name": topic.name,
        "topic_id": _id(topic.topic_id),
        "is_internal": topic.is_internal,
        "replication_factor": topic.replication_factor,
        "configs": {pair.key: pair.value for pair in topic.configs},
        "error": None,
        "partitions": [
            {
                "partition": row.partition,
                "state": row.state,
                "leader": row.leader if row.leader >= 0 else None,
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
                "log_start_offset": found[row.partition].start_offset,
                "end_offset": found[row.partition].end_offset,
                "bytes": found[row.partition].bytes,
                "advice": row.advice or None,
            }
            for row in rows
        ],
    }


def _print_topic(
    topic: pb.TopicDescription, rows: list[pb.PartitionDescription], logs: Logs, *, is_first: bool
) -> None:
    if not is_first:
        print()
    configs = ", ".join(f"{pair.key}={pair.value}" for pair in topic.configs)
    facts = f"{_size(len(topic.partitions), topic.replication_factor)}, id {_id(topic.topic_id)}"
    said = table.wrapped(f"{topic.name}: {facts}{f'; {configs}' if configs else ''}", sys.stdout)
    print(said.replace(topic.name, table.bold(topic.name, sys.stdout), 1))
    _print_partitions([(topic, row) for row in rows], logs, has_names=False)


def _print_partitions(
    rows: list[tuple[pb.TopicDescription, pb.PartitionDescription]], logs: Logs, *, has_names: bool
) -> None:
    headings = ["partition", "leader", "epoch", "replicas", "in sync", "min", "start", "end", "bytes", "state"]
    cells = []
    for topic, row in rows:
        state = row.state + (f": {row.advice}" if row.advice else "")
        if row.adding_replicas or row.removing_replicas:
            state += f"; moving (+{_ids(row.adding_replicas) or 'none'} -{_ids(row.removing_replicas) or 'none'})"
        leader = row.leader if row.leader >= 0 else "none"
        found = _log_of(topic, row, logs)
        figures = ["-" if figure is None else figure for figure in (found.start_offset, found.end_offset, found.bytes)]
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
    async def job(cluster: ClusterClient) -> int:
        wanted = [pb.MorePartitions(topic=name, total=options.partitions) for name in options.topic]
        rows = await AdminClient(cluster).add_partitions(wanted, validate_only=options.validate_only)
        return print_outcomes(options, "topics", rows, table.count(options.partitions, "partition"))

    return session.run(options, job)


def print_outcomes(
    options: argparse.Namespace,
    what: str,
    rows: Any,
    done: str,
    *,
    but: tuple[ErrorCode, ...] = (),
    creates: bool = True,
) -> int:
    """How each named item of a change ended. `creates`: as in `session.tell_errors`."""
    if options.output == "json":
        items = [{"name": row.name, "error": session.error_document(row)} for row in rows]
        print(json.dumps({what: items, "validate_only": options.validate_only}, indent=2))
    else:
        for row in rows:
            if not row.HasField("error"):
                print(f"{row.name}: {'would be: ' if options.validate_only else ''}{done}")
    return session.tell_errors([(row.name, row) for row in rows], but=but, creates=creates)


def run_delete(options: argparse.Namespace) -> int:
    async def job(cluster: ClusterClient) -> int:
        admin = AdminClient(cluster)
        if not options.validate_only:
            # What is asked about is what is there: a name that is wrong is told before the question.
            checked = await admin.delete_topics(options.topic, validate_only=True)
            named = ", ".join(row.name for row in checked if not row.HasField("error"))
            if named and not await session.is_sure(options, f"Delete {named} and all records at {cluster.answered}?"):
                return EXIT_REFUSED
        rows = await admin.delete_topics(options.topic, validate_only=options.validate_only)
        accepted = (ErrorCode.UNKNOWN_TOPIC_OR_PARTITION,) if options.if_exists else ()
        return print_outcomes(options, "topics", rows, "deleted", but=accepted, creates=False)

    return session.run(options, job)
