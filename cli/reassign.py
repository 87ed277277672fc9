"""`tidelog reassign plan|execute|status|cancel`. docs/cli.md lists the keys of the JSON documents.

A plan is the file of Kafka's tools: {"version": 1, "partitions": [{"topic", "partition", "replicas"}, ...]}. Both read
plans of each other. "log_dirs" may only be "any": brokers choose directories, and `tidelog brokers move-replicas`
changes them.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tidelog.cli import table
from tidelog.cli.clients import open_admin
from tidelog.cli.exit_codes import EXIT_FAILURE, EXIT_OK
from tidelog.cli.main import UsageError
from tidelog.cli.messages import confirm, print_json, print_outcomes, report, report_errors
from tidelog.cli.progress import Progress
from tidelog.client.admin.threaded import Admin
from tidelog.client.admin.values import ConfigResource, Outcomes
from tidelog.client.record import TopicPartition
from tidelog.model.errors import RemoteError, TidelogError

if TYPE_CHECKING:
    from tidelog.metadata.image import ClusterImage
    from tidelog.metadata.reassignments import ReassignmentTarget

WAIT_S = 1.0
CANCEL_S = 30.0
RATES = ("leader.replication.throttled.rate", "follower.replication.throttled.rate")
THROTTLED = ("leader.replication.throttled.replicas", "follower.replication.throttled.replicas")


def run_plan(options: argparse.Namespace) -> int:
    from tidelog.cli.metadata_live import read_live
    from tidelog.metadata.reassignment_planner import plan_reassignments

    brokers = None
    if options.brokers is not None:
        try:
            brokers = [int(broker) for broker in options.brokers.split(",")]
        except ValueError as error:
            raise UsageError(f"--brokers {options.brokers!r}: ids, like 1,2,3") from error
    image = read_live(options).state().image
    moves = plan_reassignments(image, topics=options.topic, brokers=brokers)
    rows = []
    for move in moves:
        topic_id = image.topic_ids[move.topic]
        partition = image.partition(topic_id, move.partition)
        assert partition is not None, "a plan is about partitions that exist"
        assert move.replicas is not None, "a plan cancels nothing"
        rows.append(
            {
                "topic": move.topic,
                "partition": move.partition,
                "replicas": list(move.replicas),
                "current": list(partition.replicas),
            }
        )
    if options.save is not None:
        plan = [{key: row[key] for key in ("topic", "partition", "replicas")} for row in rows]
        Path(options.save).write_text(json.dumps({"version": 1, "partitions": plan}, indent=2) + "\n", encoding="utf-8")
    totals = _totals(image, moves)
    if options.output == "json":
        print_json({"version": 1, "partitions": rows, "brokers": totals})
    elif rows:
        cells = [[row["topic"], row["partition"], _ids(row["current"]), _ids(row["replicas"])] for row in rows]
        table.write(sys.stdout, ["topic", "partition", "now on", "then on"], cells, right=["partition"])
        print()
        keys = ("broker", "replicas_now", "replicas_then", "leaders_now", "leaders_then")
        headings = [key.replace("_", " ") for key in keys]
        table.write(sys.stdout, headings, [[row[key] for key in keys] for row in totals], right=headings)
    else:
        of_topics = f"of {', '.join(sorted(set(options.topic)))}" if options.topic else "of every topic"
        report(f"nothing to move: replicas and leaders {of_topics} are spread as evenly as racks allow")
    return EXIT_OK


def _totals(image: ClusterImage, moves: tuple[ReassignmentTarget, ...]) -> list[dict[str, int]]:
    """Returns replicas and preferred leaders of each broker, before and after the moves, of all topics."""
    target = {(move.topic, move.partition): move.replicas for move in moves}
    counts: dict[str, Counter[int]] = {key: Counter() for key in ("replicas", "leaders")}
    after: dict[str, Counter[int]] = {key: Counter() for key in ("replicas", "leaders")}
    for topic in image.topics.values():
        for number, partition in topic.partitions.items():
            replicas = partition.target or partition.replicas
            for counted, where in ((counts, replicas), (after, target.get((topic.name, number)) or replicas)):
                counted["replicas"].update(where)
                counted["leaders"][where[0]] += 1
    return [
        {
            "broker": broker,
            "replicas_now": counts["replicas"][broker],
            "replicas_then": after["replicas"][broker],
            "leaders_now": counts["leaders"][broker],
            "leaders_then": after["leaders"][broker],
        }
        for broker in sorted(image.brokers)
    ]


def _ids(brokers: Any) -> str:
    return ",".join(map(str, brokers))


Moves = dict[TopicPartition, list[int]]


def read_plan(path: str) -> Moves:
    """Returns the moves of a plan file. Raises UsageError, which names what is wrong with it."""
    try:
        document = json.loads(Path(path).read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise UsageError(f"--plan {path}: no such file") from error
    except (ValueError, UnicodeDecodeError) as error:
        raise UsageError(f"--plan {path}: invalid JSON: {error}") from error
    try:
        moves = {
            TopicPartition(str(row["topic"]), int(row["partition"])): [int(broker) for broker in row["replicas"]]
            for row in document["partitions"]
        }
    except (KeyError, TypeError, ValueError) as error:
        form = '{"version": 1, "partitions": [{"topic", "partition", "replicas"}]}'
        raise UsageError(f"--plan {path}: no plan ({error}); its form is {form}") from error
    if not moves:
        raise UsageError(f"--plan {path}: has no partitions")
    if any(directory != "any" for row in document["partitions"] for directory in row.get("log_dirs") or ()):
        hint = "move the replicas first, then: tidelog brokers move-replicas"
        raise UsageError(f"--plan {path}: log_dirs other than 'any' are not read; {hint}")
    return moves


def run_execute(options: argparse.Namespace) -> int:
    moves = read_plan(options.plan)
    if not all(moves.values()):
        raise UsageError(f"--plan {options.plan}: a partition without replicas; `reassign cancel` cancels")
    with open_admin(options) as admin:
        if options.throttle is not None and not options.validate_only:
            topics = sorted({partition.topic for partition in moves})
            if _alter_throttles(admin, topics, options.throttle) != EXIT_OK:
                report("some moves are not throttled; they start all the same")
        outcomes = admin.alter_reassignments(moves, validate_only=options.validate_only, partial=True)
        code = _print_outcomes(options, outcomes, "would start" if options.validate_only else "started")
        if options.wait and not options.validate_only and code == EXIT_OK:
            _wait(admin, list(moves))
            report("all moves are done")
    return code


def _print_outcomes(options: argparse.Namespace, outcomes: Outcomes[TopicPartition, None], done: str) -> int:
    errors = {**dict.fromkeys(outcomes.succeeded), **outcomes.errors}
    return print_outcomes(options, "partitions", errors, done)


def _alter_throttles(admin: Admin, topics: list[str], rate: int | None) -> int:
    """Sets the rate of every broker for all replicas of the topics; None removes both. Returns the exit code."""
    errors: dict[str, TidelogError] = {}
    resources = [
        (ConfigResource("cluster"), RATES, rate),
        *((ConfigResource("topic", name), THROTTLED, "*") for name in topics),
    ]
    for resource, keys, value in resources:
        try:
            if rate is None:
                admin.alter_config(resource, deletes=keys)
            else:
                admin.alter_config(resource, sets=dict.fromkeys(keys, value))
        except RemoteError as error:
            errors[str(resource)] = error
    return report_errors(errors)


def _wait(admin: Admin, partitions: list[TopicPartition], wait_s: float = float("inf")) -> bool:
    """Returns False if moves are in progress after `wait_s` seconds."""
    end_s = time.monotonic() + wait_s
    with Progress("moving", unit="partitions") as progress:
        while left := admin.list_reassignments(partitions):
            progress.show(len(partitions) - len(left), len(partitions))
            if time.monotonic() >= end_s:
                return False
            time.sleep(WAIT_S)
    _remove_throttles(admin)
    return True


def _remove_throttles(admin: Admin) -> None:
    """Removes throttles when no reassignment is in progress."""
    if admin.list_reassignments():
        return
    topics = [
        topic.name for topic in admin.describe_topics().values() if any(key in THROTTLED for key in topic.configs)
    ]
    if topics:
        _alter_throttles(admin, topics, None)
        report(f"removed the throttles of {', '.join(topics)}")


def run_status(options: argparse.Namespace) -> int:
    partitions = None if options.plan is None else list(read_plan(options.plan))
    with open_admin(options) as admin:
        moves = admin.list_reassignments(partitions)
        if not moves:
            _remove_throttles(admin)
    if options.output == "json":
        documents = [
            {
                "topic": row.partition.topic,
                "partition": row.partition.partition,
                "replicas": list(row.replicas),
                "target": list(row.target),
                "adding_replicas": list(row.adding_replicas),
                "removing_replicas": list(row.removing_replicas),
                "waiting_for": list(row.waiting_for),
            }
            for row in moves
        ]
        print_json({"reassignments": documents})
    elif moves:
        cells = [[*row.partition, _ids(row.replicas), _ids(row.target), _ids(row.waiting_for)] for row in moves]
        table.write(sys.stdout, ["topic", "partition", "on", "to", "waits for"], cells, right=["partition"])
    else:
        report("no reassignment is in progress")
    return EXIT_OK


def run_cancel(options: argparse.Namespace) -> int:
    named = None if options.plan is None else list(read_plan(options.plan))
    with open_admin(options) as admin:
        partitions = [row.partition for row in admin.list_reassignments(named)]
        if not partitions:
            report("no reassignment is in progress")
            return EXIT_OK
        if not confirm(options, f"Cancel {len(partitions)} moves?"):
            return EXIT_FAILURE
        outcomes = admin.alter_reassignments(dict.fromkeys(partitions), partial=True)
        code = _print_outcomes(options, outcomes, "cancelled")
        # The controller has committed it; the node that is asked may learn of it a little later.
        if code == EXIT_OK and not _wait(admin, partitions, CANCEL_S):
            report("throttles stay; `tidelog reassign status` removes them when nothing moves")
    return code
