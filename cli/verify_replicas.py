"""`tidelog brokers verify-replicas`: proves that replicas agree, or names where they differ. docs/cli.md lists the keys
of the JSON document."""

import argparse
import sys
from collections import Counter
from collections.abc import Sequence
from typing import Any

from tidelog.cli import table
from tidelog.cli.clients import open_admin
from tidelog.cli.exit_codes import EXIT_FAILURE, EXIT_OK
from tidelog.cli.main import CommandError, UsageError
from tidelog.cli.messages import no_topic, print_json, report
from tidelog.cli.progress import Progress
from tidelog.client.admin.verification import AGREE, DIFFER, UNVERIFIED, PartitionVerification, VerificationProgress
from tidelog.client.record import TopicPartition
from tidelog.model.errors import ErrorCode, InvalidRequestError, TidelogError


def run(options: argparse.Namespace) -> int:
    scope = [_read(text) for text in options.partitions] or None
    with open_admin(options) as admin, Progress("verifying replicas", unit="partitions") as progress:

        def show(state: VerificationProgress) -> None:
            says = f"{state.partitions:,} of {state.partitions_total:,} partitions, {state.offsets:,} offsets"
            progress.show(state.partitions, state.partitions_total, says=says)

        try:
            results = admin.verify_replicas(scope, on_progress=show, timeout=options.timeout)
        except InvalidRequestError as error:
            raise CommandError(str(error)) from error
        except TidelogError as error:
            if error.code is not ErrorCode.UNKNOWN_TOPIC_OR_PARTITION:
                raise
            names = dict.fromkeys(item if isinstance(item, str) else item.topic for item in scope or [])
            missing = next((name for name in names if f"'{name}'" in str(error) or f" {name}" in str(error)), "")
            raise CommandError(no_topic(missing) if missing else str(error)) from error
    counts = Counter(result.state for result in results)
    if options.output == "json":
        summary = {state: counts[state] for state in (AGREE, DIFFER, UNVERIFIED)}
        print_json({"partitions": [_document(result) for result in results], "summary": summary})
    else:
        _print(results, counts)
    return EXIT_OK if counts[AGREE] == len(results) else EXIT_FAILURE


def _read(text: str) -> str | TopicPartition:
    topic, colon, number = text.partition(":")
    if not colon:
        return topic
    if not topic or not number.isdecimal():
        raise UsageError(f"{text!r}: TOPIC or TOPIC:PARTITION, like orders or orders:3")
    return TopicPartition(topic, int(number))


def _document(result: PartitionVerification) -> dict[str, Any]:
    difference = result.difference
    return {
        "topic": result.topic,
        "partition": result.partition,
        "state": result.state,
        "start": result.start,
        "end": result.end,
        "bytes": result.bytes,
        "by_record": result.by_record,
        "verified": [{"broker": broker, "end": end} for broker, end in result.verified.items()],
        "unverified": [
            {"broker": broker if broker >= 0 else None, "reason": reason}
            for broker, reason in result.unverified.items()
        ],
        "difference": None
        if difference is None
        else {
            "start": difference.start,
            "end": difference.end,
            "suspects": list(difference.suspects),
            "replicas": [
                {"broker": broker, "epoch": copy.epoch, "digest": copy.digest, "fault": copy.fault}
                for broker, copy in difference.replicas.items()
            ],
            "advice": difference.advice,
        },
    }


def _print(results: Sequence[PartitionVerification], counts: Counter[str]) -> None:
    rows = []
    for result in results:
        where = f"{result.topic}-{result.partition}"
        if result.difference is not None:
            place = f"offsets {result.difference.start} to {result.difference.end - 1}"
            suspects = ", ".join(map(str, result.difference.suspects))
            rows.append([where, result.state, f"{place}; suspect: broker {suspects}"])
            report(f"{where}: {result.difference.advice}")
        for broker, reason in result.unverified.items():
            rows.append([where, UNVERIFIED, reason if broker < 0 else f"broker {broker}: {reason}"])
    if rows:
        table.write(sys.stdout, ["partition", "state", "why"], rows)
    size = sum(result.bytes for result in results)
    print(
        f"{table.count(len(results), 'partition')}: {counts[AGREE]} agree, {counts[DIFFER]} differ,"
        f" {counts[UNVERIFIED]} unverified; {size:,} bytes of the leaders compared"
    )
