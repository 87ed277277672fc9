"""`tidelog elect-leaders`. Keys of the JSON document are listed in docs/cli.md."""

import argparse
import json
from collections.abc import Mapping, Sequence
from typing import Any

from tidelog.cli import session
from tidelog.cli.main import EXIT_REFUSED, WrongCallError
from tidelog.client.admin import AdminClient
from tidelog.client.cluster import ClusterClient
from tidelog.model.errors import ErrorCode

LINES_MAX = 20


def print_partition_outcomes(
    options: argparse.Namespace, rows: Any, done: str, *, but: tuple[ErrorCode, ...] = ()
) -> int:
    """How each partition of a change ended."""
    if options.output == "json":
        items = [{"topic": row.topic, "partition": row.partition, "error": session.error_document(row)} for row in rows]
        document = {"partitions": items, "validate_only": getattr(options, "validate_only", False)}
        print(json.dumps(document, indent=2))
    else:
        for row in rows:
            if not row.HasField("error"):
                print(f"{row.topic}-{row.partition}: {done}")
    return session.tell_errors([(f"{row.topic}-{row.partition}", row) for row in rows], but=but)


async def _tell_losses(admin: AdminClient, places: Mapping[str, Sequence[int]] | None) -> None:
    """Who has what an unclean election may lose, partition by partition, before anybody is asked to confirm."""
    topics = await admin.describe_topics(None if places is None else list(places))
    sizes: dict[tuple[str, int, int], int] = {}
    for broker in await admin.describe_log_dirs(topics=[topic.name for topic in topics]):
        for directory in broker.directories:
            for replica in directory.replicas:
                sizes[replica.topic, replica.partition, broker.broker] = replica.bytes
    lines = loss_lines(topics, places, sizes)
    for line in lines[:LINES_MAX]:
        session.tell(line)
    if len(lines) > LINES_MAX:
        session.tell(f"and {len(lines) - LINES_MAX} more partitions")


def loss_lines(
    topics: Sequence[Any], places: Mapping[str, Sequence[int]] | None, sizes: Mapping[tuple[str, int, int], int]
) -> list[str]:
    """One line for each partition without a leader. `sizes`: bytes of the log of (topic, partition, broker)."""
    lines = []
    for topic in topics:
        for row in topic.partitions:
            if row.leader >= 0 or (places is not None and row.partition not in places[topic.name]):
                continue
            complete = ", ".join(map(str, row.eligible_leader_replicas))
            known = (
                f"broker {complete} has every acknowledged record" if complete else "nobody is known to have all of it"
            )
            logs = ", ".join(
                _log_text(broker, sizes.get((topic.name, row.partition, broker))) for broker in row.replicas
            )
            lines.append(f"{topic.name}-{row.partition}: {known}; logs: {logs}")
    return lines


def _log_text(broker: int, size: int | None) -> str:
    return f"broker {broker} {'does not show its log' if size is None else f'{size:,} bytes'}"


def run(options: argparse.Namespace) -> int:
    if options.partition and options.topic is None:
        raise WrongCallError("--partition belongs to a --topic")
    if options.all == (options.topic is not None):
        raise WrongCallError("--topic NAME, or --all for the whole cluster")

    async def job(cluster: ClusterClient) -> int:
        places = None
        if options.topic is not None:
            topic = await cluster.topic(options.topic)
            places = {options.topic: options.partition or [place.partition for place in topic.partitions]}
        if options.unclean:
            await _tell_losses(AdminClient(cluster), places)
        if options.unclean and not options.validate_only:
            what = options.topic or "every partition without a leader"
            if not await session.is_sure(options, f"Acknowledged records of {what} may be lost. Elect uncleanly?"):
                return EXIT_REFUSED
        rows = await AdminClient(cluster).elect_leaders(
            places, is_unclean=options.unclean, validate_only=options.validate_only
        )
        done = "would be elected" if options.validate_only else "elected"
        return print_partition_outcomes(options, rows, done, but=(ErrorCode.ELECTION_NOT_NEEDED,))

    return session.run(options, job)
