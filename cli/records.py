"""`tidelog delete-records`. Keys of the JSON document are listed in docs/cli.md."""

import argparse
import json

from tidelog.cli import session
from tidelog.cli.main import EXIT_OK, EXIT_REFUSED, WrongCallError
from tidelog.client.cluster import ClusterClient
from tidelog.client.metadata import TopicInfo
from tidelog.client.offsets import delete_records
from tidelog.model.errors import TidelogError
from tidelog.model.ids import PartitionId


def chosen_partitions(topic: TopicInfo, numbers: list[int] | None) -> list[PartitionId]:
    """Those that were asked for, or all."""
    for number in numbers or ():
        if not 0 <= number < len(topic.partitions):
            raise WrongCallError(
                f"--partition {number}: {topic.name} has {len(topic.partitions)} partitions, from 0 on"
            )
    return [topic.partitions[number] for number in dict.fromkeys(numbers)] if numbers else list(topic.partitions)


def run_delete(options: argparse.Namespace) -> int:
    if options.before != "end" and not options.before.isdecimal():
        raise WrongCallError(f"--before {options.before!r}: an offset, or 'end'")
    if options.before != "end" and not options.partition:
        raise WrongCallError("an offset belongs to a --partition")
    offset = -1 if options.before == "end" else int(options.before)

    async def job(cluster: ClusterClient) -> int:
        topic = await cluster.topic(options.topic)
        places = chosen_partitions(topic, options.partition)
        told = ", ".join(f"{topic.name}-{place.partition}" for place in places)
        if not await session.is_sure(options, f"Delete records of {told} before {options.before}?"):
            return EXIT_REFUSED
        done = await delete_records(cluster, [topic], dict.fromkeys(places, offset))
        code = EXIT_OK
        rows = []
        for place in places:
            outcome = done[place]
            if isinstance(outcome, TidelogError):
                code = EXIT_REFUSED
                rows.append({"partition": place.partition, "start_offset": None, "error": outcome.code.name})
                session.tell(f"{topic.name}-{place.partition}: {session.error_text(outcome)}")
            else:
                rows.append({"partition": place.partition, "start_offset": outcome, "error": None})
                if options.output == "table":
                    print(f"{topic.name}-{place.partition}: begins at offset {outcome}")
        if options.output == "json":
            print(json.dumps({"topic": topic.name, "partitions": rows}, indent=2))
        return code

    return session.run(options, job)
