"""`tidelog verify chaos`: clients, faults and checkers of `tidelog.testing.chaos` against a cluster of the user's."""

import argparse
import importlib.util
import json
import math
import time
from pathlib import Path
from typing import Any

from tidelog.cli.clients import bootstrap_of, client_errors, timeout_s
from tidelog.cli.exit_codes import EXIT_FAILURE, EXIT_OK
from tidelog.cli.main import UsageError
from tidelog.cli.messages import report
from tidelog.cli.stopping import raise_for, stop_requested
from tidelog.model.errors import InvalidRequestError, TidelogError
from tidelog.testing.chaos.commands import CommandTarget, NodeCommands, cluster_of_yours, read_nodes
from tidelog.testing.chaos.run import Options, Report
from tidelog.testing.chaos.run import run as run_chaos
from tidelog.testing.chaos.worker_spec import TIDELOG
from tidelog.testing.chaos.workers import LIBRARIES, READERS

SHOWN_MAX = 20


def run(options: argparse.Namespace) -> int:
    if not 0 < options.minutes < math.inf or options.rate < 1:
        raise UsageError("--minutes and --rate are above 0")
    try:
        commands: NodeCommands = read_nodes(Path(options.nodes)) if options.nodes else {}
    except InvalidRequestError as error:
        raise UsageError(str(error)) from error
    seed = int(time.time()) if options.seed is None else options.seed
    path = Path(options.path or f"chaos-{seed}")
    if path.exists() and any(path.iterdir()):
        raise UsageError(f"{path} is not empty: use another --path")
    bootstrap, prefix = ",".join(bootstrap_of(options)), f"tidelog-chaos-{seed}-"
    kafka = options.kafka_bootstrap or ""
    clients = tuple(one for one in READERS if _can_run(one, kafka))
    chosen = Options(seed, options.minutes, path, options.rate, 1, clients, prefix)
    report(f"seed {seed}, clients {', '.join(clients)}, faults: {'none' if not commands else 'of ' + options.nodes}")
    with (
        client_errors(),
        stop_requested(raise_for),
        cluster_of_yours(bootstrap, kafka, prefix, commands, timeout_s(options)) as target,
    ):
        try:
            found = run_chaos(chosen, target)
        except BaseException:
            report(f"left in the cluster (the run did not end): topics and groups whose names begin with {prefix}")
            raise
        document = chaos_document(found)
        if options.output == "json":
            print(json.dumps(document, indent=2), flush=True)
        else:
            _print(document)
        _clean_up(found, target)
    return EXIT_OK if found.is_good else EXIT_FAILURE


def _clean_up(found: Report, target: CommandTarget) -> None:
    """Remove what a good run has left in the cluster. What stays is named; it does not change the verdict."""
    left = [f"topic {name}" for name in target.topics] + [f"group {name}" for name in found.groups]
    why = "to look at, since the run was bad"
    if found.is_good:
        try:
            left = target.remove_traces(found.groups)
        except TidelogError as error:
            why = f"they could not be removed: {error}"
        else:
            why = "they could not be removed"
    if left:
        report(f"left in the cluster ({why}); delete them when you do not need them: {', '.join(left)}")


def _can_run(client: str, kafka_bootstrap: str) -> bool:
    return client == TIDELOG or (bool(kafka_bootstrap) and importlib.util.find_spec(LIBRARIES[client]) is not None)


def chaos_document(found: Report) -> dict[str, Any]:
    latency = found.figures.latency()
    faults = [(kind, count) for kind, count in found.faults.items() if " of " not in kind and kind != "quiet"]
    return {
        "is_good": found.is_good,
        "seed": found.options.seed,
        "minutes": found.options.minutes,
        "faults": [{"kind": kind, "count": count} for kind, count in faults],
        "acknowledged": sum(found.acknowledged.values()),
        "failed": sum(found.failed_sends.values()),
        "counts": {kind: count for kind, count in found.anomalies.items() if count},
        "stuck_readers": found.stuck,
        "failures": found.failures,
        "anomalies": found.words,
        "longest_without_write_ms": round(found.figures.gap.seconds * 1000),
        "longest_partition_gap_ms": round(found.figures.partition_gap.seconds * 1000),
        "longest_gap_partition": found.figures.gap_partition,
        "latency_median_ms": None if latency is None else latency.median,
        "latency_p99_ms": None if latency is None else latency.p99,
        "report": str(found.options.path / "report.html"),
    }


def _print(document: dict[str, Any]) -> None:
    faults = ", ".join(f"{row['kind']} {row['count']}" for row in document["faults"]) or "none"
    print(f"{document['acknowledged']} records acknowledged, {document['failed']} failed; faults: {faults}")
    print(
        f"longest time without an acknowledged write: {document['longest_without_write_ms']} ms, "
        f"to one partition: {document['longest_partition_gap_ms']} ms"
    )
    for text in (*document["failures"], *document["stuck_readers"], *document["anomalies"])[:SHOWN_MAX]:
        print(text)
    print(f"report: {document['report']}")
    verdict = (
        "good: nothing was lost, duplicated or reordered, and no reader is stuck" if document["is_good"] else "BAD"
    )
    print(verdict, flush=True)
