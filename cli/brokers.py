"""`tidelog brokers list|describe|drain|move-replicas`. Keys of the JSON documents are listed in docs/cli.md."""

import argparse
import json
import sys
from collections.abc import Sequence
from typing import Any
from uuid import UUID

from tidelog.cli import session, table
from tidelog.cli.elections import print_partition_outcomes
from tidelog.cli.main import EXIT_OK, RefusedError
from tidelog.cli.progress import Progress
from tidelog.client.admin import AdminClient, directory_named
from tidelog.client.cluster import ClusterClient, error_in
from tidelog.client.metadata import address_of
from tidelog.model.errors import ErrorCode, InvalidRequestError
from tidelog.rpc.v1 import admin_pb2 as pb
from tidelog.rpc.v1 import common_pb2 as common

MOVE_ASK_MS = 2_000


def _document(broker: pb.BrokerDescription, controller: int) -> dict[str, Any]:
    return {
        "id": broker.id,
        "epoch": broker.epoch,
        "endpoints": {end.listener: address_of(end.host, end.port) for end in broker.endpoints},
        "rack": broker.rack or None,
        "state": _state(broker),
        "is_fenced": broker.is_fenced,
        "is_draining": broker.is_draining,
        "is_controller": broker.id == controller,
        "replicas": broker.replicas,
        "preferred_for": broker.preferred_for,
        "offline_directories": [str(UUID(bytes=one)) for one in broker.offline_directories],
    }


def _state(broker: pb.BrokerDescription) -> str:
    if broker.is_fenced:
        return "fenced"
    return "draining" if broker.is_draining else "live"


def _print(documents: Sequence[dict[str, Any]]) -> None:
    rows = [
        [
            one["id"],
            one["state"] + (", active controller" if one["is_controller"] else ""),
            ", ".join(f"{name} {address}" for name, address in one["endpoints"].items()),
            one["rack"],
            one["replicas"],
            one["preferred_for"],
        ]
        for one in documents
    ]
    headings = ["id", "state", "endpoints", "rack", "replicas", "preferred for"]
    table.write(sys.stdout, headings, rows, right=["id", "replicas", "preferred for"])


def run_list(options: argparse.Namespace) -> int:
    async def job(cluster: ClusterClient) -> int:
        admin = AdminClient(cluster, allow_stale=True)
        controller = (await admin.describe_cluster()).controller
        documents = [_document(broker, controller) for broker in await admin.describe_brokers()]
        session.tell_if_stale(admin.stale_ms, cluster.answered)
        if options.output == "json":
            print(json.dumps({"brokers": documents, **session.stale_fields(admin.stale_ms)}, indent=2))
        else:
            _print(documents)
        return EXIT_OK

    return session.run(options, job)


def run_describe(options: argparse.Namespace) -> int:
    async def job(cluster: ClusterClient) -> int:
        admin = AdminClient(cluster, allow_stale=True)
        controller = (await admin.describe_cluster()).controller
        found = await admin.describe_brokers(options.broker)
        session.tell_if_stale(admin.stale_ms, cluster.answered)
        live = [broker.id for broker in found if not broker.is_fenced]
        answers = {one.broker: one for one in await admin.describe_log_dirs(live)} if live else {}
        documents = []
        for broker in found:
            document = _document(broker, controller)
            dirs = answers.get(broker.id)
            document["directories"] = [] if dirs is None else [_directory(one) for one in dirs.directories]
            document["error"] = None if dirs is None else session.error_document(dirs)
            documents.append(document)
        if options.output == "json":
            print(json.dumps({"brokers": documents, **session.stale_fields(admin.stale_ms)}, indent=2))
        else:
            _print(documents)
            _print_directories(documents)
        return session.tell_errors([(f"broker {broker}", dirs) for broker, dirs in sorted(answers.items())])

    return session.run(options, job)


def _directory(one: pb.LogDir) -> dict[str, Any]:
    return {
        "directory_id": str(UUID(bytes=one.directory_id)) if one.directory_id else None,
        "path": one.path,
        "error": session.error_document(one),
        "usable_bytes": one.usable_bytes if one.usable_bytes >= 0 else None,
        "is_full": one.is_full,
        "replicas": [
            {"topic": row.topic, "partition": row.partition, "bytes": row.bytes, "lag": row.lag} for row in one.replicas
        ],
    }


def _print_directories(documents: Sequence[dict[str, Any]]) -> None:
    rows = []
    for document in documents:
        for one in document["directories"]:
            size = sum(replica["bytes"] for replica in one["replicas"])
            state = "full: make room" if one["is_full"] else "good"
            state = state if one["error"] is None else one["error"]["message"]
            rows.append([document["id"], one["path"], len(one["replicas"]), size, one["usable_bytes"], state])
    if rows:
        print()
        headings = ["broker", "directory", "replicas", "bytes", "free bytes", "state"]
        table.write(sys.stdout, headings, rows, right=["broker", "replicas", "bytes", "free bytes"])


def run_drain(options: argparse.Namespace) -> int:
    async def job(cluster: ClusterClient) -> int:
        admin = AdminClient(cluster)
        answer = await admin.drain_broker(options.broker, undo=options.undo, validate_only=options.validate_only)
        document = {
            "broker": options.broker,
            "is_draining": not options.undo,
            "leads": answer.leads,
            "replicas": answer.replicas,
            "validate_only": options.validate_only,
        }
        if options.output == "json":
            print(json.dumps(document, indent=2))
        elif options.undo:
            print(f"broker {options.broker} takes part again")
        else:
            leads, holds = table.count(answer.leads, "partition"), table.count(answer.replicas, "replica")
            left = f"it leads {leads} that nobody else can, and holds {holds}"
            print(f"broker {options.broker} is drained: {left}")
        return EXIT_OK

    return session.run(options, job)


def run_move_replicas(options: argparse.Namespace) -> int:
    async def job(cluster: ClusterClient) -> int:
        admin = AdminClient(cluster)
        try:
            directory = directory_named(await admin.working_log_dirs(options.broker), options.directory)
        except InvalidRequestError as error:
            raise RefusedError(f"broker {options.broker}: {error}") from error
        numbers = sorted(set(options.partition or ())) or await _partitions_on(admin, options.broker, options.topic)
        if not numbers:
            raise RefusedError(f"broker {options.broker} has no replica of {options.topic}")
        wanted = [
            pb.MovedReplica(topic=options.topic, partition=number, directory_id=directory.bytes) for number in numbers
        ]
        rows = await _moved(admin, options.broker, wanted)
        return print_partition_outcomes(options, rows, f"moved to {options.directory}")

    return session.run(options, job)


async def _partitions_on(admin: AdminClient, broker: int, topic: str) -> list[int]:
    (found,) = await admin.describe_log_dirs([broker], topics=[topic])
    return sorted(row.partition for one in found.directories for row in one.replicas)


async def _moved(admin: AdminClient, broker: int, wanted: list[pb.MovedReplica]) -> list[common.PartitionOutcome]:
    """All at once, until each has moved or failed: what takes long goes on, and is asked for again."""
    found: dict[int, common.PartitionOutcome] = {}
    admin.timeout_ms = MOVE_ASK_MS
    with Progress(f"moving to another directory of broker {broker}", unit="replicas") as progress:
        while left := [one for one in wanted if one.partition not in found]:
            progress.show(len(found), len(wanted))
            for row in await admin.move_replicas(broker, left):
                error = error_in(row)
                if error is None or error.code is not ErrorCode.REQUEST_TIMED_OUT:
                    found[row.partition] = row
    return [found[one.partition] for one in wanted]
