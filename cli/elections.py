"""`tidelog elect-leaders`. Keys of the JSON document are listed in docs/cli.md."""

import argparse
import json
from typing import Any

from tidelog.cli import session
from tidelog.cli.main import EXIT_REFUSED, WrongCallError
from tidelog.client.admin import AdminClient
from tidelog.client.cluster import ClusterClient
from tidelog.model.errors import ErrorCode


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
