"""`tidelog reassign plan|execute|status|cancel`. Keys of the JSON documents are listed in docs/cli.md.

A plan is the file that Kafka's tools use: {"version": 1, "partitions": [{"topic", "partition", "replicas"}, ...]}, so
that a plan of either can be read by the other. Its "log_dirs" may only be "any": directories are chosen by the broker,
and changed by `tidelog brokers move-replicas`.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tidelog.cli import session, table
from tidelog.cli.elections import print_partition_outcomes
from tidelog.cli.main import EXIT_OK, EXIT_REFUSED, WrongCallError
from tidelog.cli.progress import Progress
from tidelog.client.admin import AdminClient
from tidelog.client.cluster import ClusterClient
from tidelog.rpc.v1 import admin_pb2 as pb

if TYPE_CHECKING:
    from tidelog.metadata.image import ClusterImage
    from tidelog.metadata.reassignments import Reassigned

WAIT_S = 1.0
SETTLED_S = 30.0
RATES = ("leader.replication.throttled.rate", "follower.replication.throttled.rate")
THROTTLED = ("leader.replication.throttled.replicas", "follower.replication.throttled.replicas")


def run_plan(options: argparse.Namespace) -> int:
    from tidelog.cli.metadata_live import read_live
    from tidelog.metadata.planning import plan_reassignments

    brokers = None
    if options.brokers is not None:
        try:
            brokers = [int(one) for one in options.brokers.split(",")]
        except ValueError as error:
            raise WrongCallError(f"--brokers {options.brokers!r}: ids, like 1,2,3") from error
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
        print(json.dumps({"version": 1, "partitions": rows, "brokers": totals}, indent=2))
    elif rows:
        cells = [[row["topic"], row["partition"], _ids(row["current"]), _ids(row["replicas"])] for row in rows]
        table.write(sys.stdout, ["topic", "partition", "now on", "then on"], cells, right=["partition"])
        print()
        keys = ("broker", "replicas_now", "replicas_then", "leaders_now", "leaders_then")
        headings = [key.replace("_", " ") for key in keys]
        table.write(sys.stdout, headings, [[row[key] for key in keys] for row in totals], right=headings)
    else:
        of_topics = f"of {', '.join(sorted(set(options.topic)))}" if options.topic else "of every topic"
        session.tell(f"nothing to move: replicas and leaders {of_topics} are spread as evenly as racks allow")
    return EXIT_OK


def _totals(image: ClusterImage, moves: tuple[Reassigned, ...]) -> list[dict[str, int]]:
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


def read_plan(path: str) -> list[pb.Reassignment]:
    """The moves of a plan's file; says what is wrong with one that is none."""
    try:
        found = json.loads(Path(path).read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise WrongCallError(f"--plan {path}: no such file") from error
    except (ValueError, UnicodeDecodeError) as error:
        raise WrongCallError(f"--plan {path}: no JSON: {error}") from error
    try:
        rows = [
            pb.Reassignment(topic=row["topic"], partition=row["partition"], replicas=row["replicas"])
            for row in found["partitions"]
        ]
    except (KeyError, TypeError, ValueError) as error:
        form = '{"version": 1, "partitions": [{"topic", "partition", "replicas"}]}'
        raise WrongCallError(f"--plan {path}: no plan ({error}); its form is {form}") from error
    if not rows:
        raise WrongCallError(f"--plan {path}: has no partitions")
    if any(one != "any" for row in found["partitions"] for one in row.get("log_dirs") or ()):
        hint = "move the replicas first, then: tidelog brokers move-replicas"
        raise WrongCallError(f"--plan {path}: log_dirs other than 'any' are not read; {hint}")
    return rows


def run_execute(options: argparse.Namespace) -> int:
    moves = read_plan(options.plan)
    if any(not move.replicas for move in moves):
        raise WrongCallError(f"--plan {options.plan}: a partition without replicas; `reassign cancel` cancels")

    async def job(cluster: ClusterClient) -> int:
        admin = AdminClient(cluster)
        if options.throttle is not None and not options.validate_only:
            await _throttle(admin, moves, options.throttle)
        rows = await admin.alter_reassignments(moves, validate_only=options.validate_only)
        code = print_partition_outcomes(options, rows, "would begin" if options.validate_only else "begun")
        if options.wait and not options.validate_only and code == EXIT_OK:
            await _wait(admin, moves)
            session.tell("all moves are done")
        return code

    return session.run(options, job)


async def _throttle(admin: AdminClient, moves: list[pb.Reassignment], rate: int) -> None:
    """The rate for every broker, and all replicas of what moves."""
    sets = [pb.ConfigChange(key=key, value=str(rate)) for key in RATES]
    changes = [pb.AlteredConfig(resource=pb.ConfigResource(type="cluster"), changes=sets)]
    for topic in sorted({move.topic for move in moves}):
        every = [pb.ConfigChange(key=key, value="*") for key in THROTTLED]
        changes.append(pb.AlteredConfig(resource=pb.ConfigResource(type="topic", name=topic), changes=every))
    rows = await admin.alter_configs(changes)
    if session.tell_errors([(row.name, row) for row in rows]) != EXIT_OK:
        session.tell("not all of it is throttled; going on")


async def _unthrottle(admin: AdminClient, topics: list[str]) -> None:
    gone = pb.ConfigChange.DELETE
    changes = [
        pb.AlteredConfig(
            resource=pb.ConfigResource(type="cluster"),
            changes=[pb.ConfigChange(key=key, operation=gone) for key in RATES],
        )
    ]
    for topic in topics:
        every = [pb.ConfigChange(key=key, operation=gone) for key in THROTTLED]
        changes.append(pb.AlteredConfig(resource=pb.ConfigResource(type="topic", name=topic), changes=every))
    session.tell_errors([(row.name, row) for row in await admin.alter_configs(changes)])


def _places(moves: list[pb.Reassignment] | None) -> dict[str, list[int]] | None:
    if moves is None:
        return None
    found: dict[str, list[int]] = {}
    for move in moves:
        found.setdefault(move.topic, []).append(move.partition)
    return found


async def _wait(admin: AdminClient, moves: list[pb.Reassignment]) -> None:
    with Progress("moving", unit="partitions") as progress:
        while left := await admin.list_reassignments(_places(moves)):
            progress.show(len(moves) - len(left), len(moves))
            await asyncio.sleep(WAIT_S)
    await _unthrottle_idle(admin)


async def _throttled_topics(admin: AdminClient) -> list[str]:
    found = await admin.describe_topics()
    return [topic.name for topic in found if any(pair.key in THROTTLED for pair in topic.configs)]


async def _unthrottle_idle(admin: AdminClient) -> None:
    """Nothing moves any more: throttles of moves end."""
    if await admin.list_reassignments():
        return
    topics = await _throttled_topics(admin)
    if topics:
        await _unthrottle(admin, topics)
        session.tell(f"throttles of {', '.join(topics)} are lifted")


def run_status(options: argparse.Namespace) -> int:
    moves = None if options.plan is None else read_plan(options.plan)

    async def job(cluster: ClusterClient) -> int:
        admin = AdminClient(cluster)
        found = await admin.list_reassignments(_places(moves))
        documents = [
            {
                "topic": row.topic,
                "partition": row.partition,
                "replicas": list(row.replicas),
                "target": list(row.target),
                "adding_replicas": list(row.adding_replicas),
                "removing_replicas": list(row.removing_replicas),
                "waiting_for": list(row.waiting_for),
            }
            for row in found
        ]
        if options.output == "json":
            print(json.dumps({"reassignments": documents}, indent=2))
        elif documents:
            cells = [
                [one["topic"], one["partition"], _ids(one["replicas"]), _ids(one["target"]), _ids(one["waiting_for"])]
                for one in documents
            ]
            table.write(sys.stdout, ["topic", "partition", "on", "to", "waits for"], cells, right=["partition"])
        else:
            session.tell("nothing is under way")
        if not documents:
            await _unthrottle_idle(admin)
        return EXIT_OK

    return session.run(options, job)


def run_cancel(options: argparse.Namespace) -> int:
    moves = None if options.plan is None else read_plan(options.plan)

    async def job(cluster: ClusterClient) -> int:
        admin = AdminClient(cluster)
        found = await admin.list_reassignments(_places(moves))
        if not found:
            session.tell("nothing is under way")
            return EXIT_OK
        if not await session.is_sure(options, f"Cancel {len(found)} moves?"):
            return EXIT_REFUSED
        cancelled = [pb.Reassignment(topic=row.topic, partition=row.partition) for row in found]
        code = print_partition_outcomes(options, await admin.alter_reassignments(cancelled), "cancelled")
        if code == EXIT_OK:
            # It is decided; the node that is asked may hear of it a little later.
            try:
                async with asyncio.timeout(SETTLED_S):
                    await _wait(admin, cancelled)
            except TimeoutError:
                session.tell("throttles stay as they are; `tidelog reassign status` lifts them when nothing moves")
        return code

    return session.run(options, job)
