"""`tidelog delete-records`. docs/cli.md lists the keys of the JSON document."""

import argparse
from typing import Literal

from tidelog.cli.clients import open_admin, topic_of
from tidelog.cli.exit_codes import EXIT_FAILURE, EXIT_OK
from tidelog.cli.main import UsageError
from tidelog.cli.messages import confirm, error_text, print_json, report
from tidelog.client.record import TopicPartition


def chosen_partitions(topic: str, count: int, numbers: list[int] | None) -> list[TopicPartition]:
    """Returns the partitions that --partition names, or all."""
    for number in numbers or ():
        if not 0 <= number < count:
            raise UsageError(f"--partition {number}: {topic} has {count} partitions, from 0 on")
    return [TopicPartition(topic, number) for number in dict.fromkeys(numbers or range(count))]


def run_delete(options: argparse.Namespace) -> int:
    if options.before != "end" and not options.before.isdecimal():
        raise UsageError(f"--before {options.before!r}: use an offset, or 'end'")
    if options.before != "end" and not options.partition:
        raise UsageError("--before OFFSET requires --partition")
    with open_admin(options) as admin:
        count = len(topic_of(admin, options.topic).partitions)
        partitions = chosen_partitions(options.topic, count, options.partition)
        names = ", ".join(map(str, partitions))
        if not confirm(options, f"Delete records of {names} before {options.before}?"):
            return EXIT_FAILURE
        before: int | Literal["end"] = "end" if options.before == "end" else int(options.before)
        outcomes = admin.delete_records(dict.fromkeys(partitions, before), partial=True)
    rows = []
    for partition in partitions:
        start, error = outcomes.succeeded.get(partition), outcomes.errors.get(partition)
        code = None if error is None else error.code.name
        rows.append({"partition": partition.partition, "start_offset": start, "error": code})
        if error is not None:
            report(f"{partition}: {error_text(error)}")
        elif options.output == "table":
            print(f"{partition}: begins at offset {start}")
    if options.output == "json":
        print_json({"topic": options.topic, "partitions": rows})
    return EXIT_FAILURE if outcomes.errors else EXIT_OK
