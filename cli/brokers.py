"""`tidelog brokers list|describe|drain|unregister|move-replicas`. docs/cli.md lists the keys of the JSON documents."""

import argparse
import sys
from collections.abc import Sequence
from typing import Any

from tidelog.cli import table
from tidelog.cli.clients import open_admin
from tidelog.cli.exit_codes import EXIT_FAILURE, EXIT_OK
from tidelog.cli.main import CommandError
from tidelog.cli.messages import (
    confirm,
    error_document,
    id_text,
    print_json,
    print_outcomes,
    report_errors,
    report_if_stale,
    stale_fields,
    stale_mark,
)
from tidelog.cli.progress import Progress
from tidelog.client.admin.threaded import Admin
from tidelog.client.admin.values import BrokerDescription, LogDir
from tidelog.client.record import TopicPartition
from tidelog.model.errors import ErrorCode, InvalidRequestError, TidelogError

MOVE_ASK_S = 2.5


def _document(broker: BrokerDescription, controller: int | None) -> dict[str, Any]:
    return {
        "id": broker.id,
        "epoch": broker.epoch,
        "endpoints": dict(broker.endpoints),
        "rack": broker.rack or None,
        "state": _state(broker),
        "is_fenced": broker.is_fenced,
        "is_draining": broker.is_draining,
        "is_controller": broker.id == controller,
        "replicas": broker.replicas,
        "preferred_leaderships": broker.preferred_leaderships,
        "offline_directories": [id_text(directory) for directory in broker.offline_directories],
    }


def _state(broker: BrokerDescription) -> str:
    if broker.is_fenced:
        return "fenced"
    return "draining" if broker.is_draining else "live"


def _print(documents: Sequence[dict[str, Any]], mark: str) -> None:
    """`mark` is added to each state; see `stale_mark`."""
    rows = [
        [
            broker["id"],
            broker["state"] + (", active controller" if broker["is_controller"] else "") + mark,
            ", ".join(f"{name} {address}" for name, address in broker["endpoints"].items()),
            broker["rack"],
            broker["replicas"],
            broker["preferred_leaderships"],
        ]
        for broker in documents
    ]
    headings = ["id", "state", "endpoints", "rack", "replicas", "preferred for"]
    table.write(sys.stdout, headings, rows, right=["id", "replicas", "preferred for"])


def run_list(options: argparse.Namespace) -> int:
    with open_admin(options) as admin:
        controller = admin.describe_cluster().controller
        documents = [_document(broker, controller) for broker in admin.describe_brokers(allow_stale=True)]
        stale_ms = admin.stale_ms
        report_if_stale(stale_ms, admin.answered_by)
    if options.output == "json":
        print_json({"brokers": documents, **stale_fields(stale_ms)})
    else:
        _print(documents, stale_mark(stale_ms))
    return EXIT_OK


def run_describe(options: argparse.Namespace) -> int:
    with open_admin(options) as admin:
        controller = admin.describe_cluster().controller
        brokers = admin.describe_brokers(options.broker or None, allow_stale=True)
        stale_ms = admin.stale_ms
        report_if_stale(stale_ms, admin.answered_by)
        live = [broker.id for broker in brokers if not broker.is_fenced]
        log_dirs = admin.describe_log_dirs(live, partial=True)
    documents = []
    for broker in brokers:
        directories = log_dirs.succeeded.get(broker.id, ())
        documents.append(
            {
                **_document(broker, controller),
                "directories": [_directory(directory) for directory in directories],
                "error": error_document(log_dirs.errors.get(broker.id)),
            }
        )
    if options.output == "json":
        print_json({"brokers": documents, **stale_fields(stale_ms)})
    else:
        _print(documents, stale_mark(stale_ms))
        _print_directories(documents)
    return report_errors({f"broker {broker}": error for broker, error in sorted(log_dirs.errors.items())})


def _directory(directory: LogDir) -> dict[str, Any]:
    return {
        "directory_id": id_text(directory.directory_id),
        "path": directory.path,
        "error": error_document(directory.error),
        "usable_bytes": directory.usable_bytes,
        "is_full": directory.is_full,
        "replicas": [
            {
                "topic": replica.partition.topic,
                "partition": replica.partition.partition,
                "bytes": replica.bytes,
                "lag": replica.lag,
            }
            for replica in directory.replicas
        ],
    }


def _print_directories(documents: Sequence[dict[str, Any]]) -> None:
    rows = []
    for document in documents:
        for directory in document["directories"]:
            size = sum(replica["bytes"] for replica in directory["replicas"])
            state = "full: free some space" if directory["is_full"] else "good"
            state = state if directory["error"] is None else directory["error"]["message"]
            count, usable = len(directory["replicas"]), directory["usable_bytes"]
            rows.append([document["id"], directory["path"], count, size, usable, state])
    if rows:
        print()
        headings = ["broker", "directory", "replicas", "bytes", "free bytes", "state"]
        table.write(sys.stdout, headings, rows, right=["broker", "replicas", "bytes", "free bytes"])


def run_drain(options: argparse.Namespace) -> int:
    with open_admin(options) as admin:
        left = admin.drain_broker(options.broker, undo=options.undo, validate_only=options.validate_only)
    if options.output == "json":
        print_json(
            {
                "broker": options.broker,
                "is_draining": not options.undo,
                "partitions_led": left.partitions_led,
                "replicas": left.replicas,
                "validate_only": options.validate_only,
            }
        )
    elif options.undo:
        print(f"broker {options.broker} is no longer draining")
    else:
        leads, holds = table.count(left.partitions_led, "partition"), table.count(left.replicas, "replica")
        print(f"broker {options.broker} is drained: it leads {leads} that no other broker can, and holds {holds}")
    return EXIT_OK


def run_unregister(options: argparse.Namespace) -> int:
    with open_admin(options) as admin:
        if not options.validate_only:
            # The question names a broker that can be unregistered; anything else is rejected before it.
            admin.unregister_broker(options.broker, validate_only=True)
            question = f"Unregister broker {options.broker} of the cluster at {admin.answered_by}?"
            if not confirm(options, question):
                return EXIT_FAILURE
        admin.unregister_broker(options.broker, validate_only=options.validate_only)
    if options.output == "json":
        print_json({"broker": options.broker, "validate_only": options.validate_only})
    else:
        print(f"broker {options.broker} {'would be' if options.validate_only else 'is'} unregistered")
    return EXIT_OK


def run_move_replicas(options: argparse.Namespace) -> int:
    with open_admin(options) as admin:
        numbers = sorted(set(options.partition or ())) or _partitions_on(admin, options.broker, options.topic)
        if not numbers:
            raise CommandError(f"broker {options.broker} has no replica of {options.topic}")
        partitions = [TopicPartition(options.topic, number) for number in numbers]
        try:
            outcomes = _move(admin, options.broker, partitions, options.directory)
        except InvalidRequestError as error:
            raise CommandError(f"broker {options.broker}: {error}") from error
    return print_outcomes(options, "partitions", outcomes, f"moved to {options.directory}")


def _partitions_on(admin: Admin, broker: int, topic: str) -> list[int]:
    directories = admin.describe_log_dirs([broker], [topic])[broker]
    return sorted(replica.partition.partition for row in directories for replica in row.replicas)


def _move(
    admin: Admin, broker: int, partitions: Sequence[TopicPartition], directory: str
) -> dict[TopicPartition, TidelogError | None]:
    """Moves all at once, until each has moved or failed. A move that takes longer than a call continues."""
    ended: dict[TopicPartition, TidelogError | None] = {}
    with Progress(f"moving to another directory of broker {broker}", unit="replicas") as progress:
        while left := [partition for partition in partitions if partition not in ended]:
            progress.show(len(ended), len(partitions))
            outcomes = admin.move_replicas(broker, dict.fromkeys(left, directory), partial=True, timeout=MOVE_ASK_S)
            ended |= outcomes.succeeded
            ended |= {
                partition: error
                for partition, error in outcomes.errors.items()
                if error.code is not ErrorCode.REQUEST_TIMED_OUT
            }
    return {partition: ended[partition] for partition in partitions}
