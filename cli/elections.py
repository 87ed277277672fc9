"""`tidelog elect-leaders`. docs/cli.md lists the keys of the JSON document."""

import argparse
from collections.abc import Iterable, Mapping, Sequence

from tidelog.cli.clients import open_admin, topic_of
from tidelog.cli.exit_codes import EXIT_FAILURE
from tidelog.cli.main import UsageError
from tidelog.cli.messages import confirm, print_outcomes, report
from tidelog.client.admin.threaded import Admin
from tidelog.client.admin.values import TopicDescription
from tidelog.client.record import TopicPartition
from tidelog.model.errors import ErrorCode

LINES_MAX = 20


def _tell_losses(admin: Admin, partitions: Sequence[TopicPartition] | None) -> None:
    """Prints what an unclean election may lose, by partition, before you confirm it."""
    names = None if partitions is None else {partition.topic for partition in partitions}
    topics = admin.describe_topics(names, partial=True).succeeded
    sizes = {
        (replica.partition, broker): replica.bytes
        for broker, directories in admin.describe_log_dirs(None, topics, partial=True).succeeded.items()
        for directory in directories
        for replica in directory.replicas
    }
    lines = loss_lines(topics.values(), partitions, sizes)
    for line in lines[:LINES_MAX]:
        report(line)
    if len(lines) > LINES_MAX:
        report(f"and {len(lines) - LINES_MAX} more partitions")


def loss_lines(
    topics: Iterable[TopicDescription],
    partitions: Iterable[TopicPartition] | None,
    sizes: Mapping[tuple[TopicPartition, int], int],
) -> list[str]:
    """Returns a line for each partition without a leader. `sizes`: log bytes of (partition, broker)."""
    lines = []
    named = None if partitions is None else set(partitions)
    for topic in topics:
        for row in topic.partitions:
            partition = TopicPartition(topic.name, row.partition)
            if row.leader is not None or (named is not None and partition not in named):
                continue
            complete = ", ".join(map(str, row.eligible_leader_replicas))
            known = (
                f"broker {complete} has every acknowledged record" if complete else "nobody is known to have all of it"
            )
            logs = ", ".join(_log_text(broker, sizes.get((partition, broker))) for broker in row.replicas)
            lines.append(f"{partition}: {known}; logs: {logs}")
    return lines


def _log_text(broker: int, size: int | None) -> str:
    return f"broker {broker} {'does not show its log' if size is None else f'{size:,} bytes'}"


def run(options: argparse.Namespace) -> int:
    if options.partition and options.topic is None:
        raise UsageError("--partition belongs to a --topic")
    if options.all == (options.topic is not None):
        raise UsageError("use --topic NAME, or --all for the whole cluster")
    with open_admin(options) as admin:
        partitions = None
        if options.topic is not None:
            count = len(topic_of(admin, options.topic).partitions)
            partitions = [TopicPartition(options.topic, number) for number in options.partition or range(count)]
        if options.unclean:
            _tell_losses(admin, partitions)
        if options.unclean and not options.validate_only:
            what = options.topic or "every partition without a leader"
            if not confirm(options, f"Acknowledged records of {what} may be lost. Elect uncleanly?"):
                return EXIT_FAILURE
        outcomes = admin.elect_leaders(
            partitions, unclean=options.unclean, validate_only=options.validate_only, partial=True
        )
    done = "would be elected" if options.validate_only else "elected"
    errors = dict(sorted({**dict.fromkeys(outcomes.succeeded), **outcomes.errors}.items()))
    if all(error is not None and error.code is ErrorCode.ELECTION_NOT_NEEDED for error in errors.values()):
        reason = "no partition lacks a leader" if options.unclean else "the preferred replicas lead already"
        report(f"nothing to do: {reason}")
    return print_outcomes(options, "partitions", errors, done, expected=(ErrorCode.ELECTION_NOT_NEEDED,))
