"""`tidelog configs describe|alter`. Keys of the JSON documents are listed in docs/cli.md."""

import argparse
import json
import sys

from tidelog.cli import session, table
from tidelog.cli.config_values import config_pairs_of
from tidelog.cli.main import WrongCallError
from tidelog.cli.topics import print_outcomes
from tidelog.client.admin import AdminClient
from tidelog.client.cluster import ClusterClient
from tidelog.rpc.v1 import admin_pb2 as pb


def _resource(options: argparse.Namespace) -> pb.ConfigResource:
    if options.topic is not None:
        return pb.ConfigResource(type="topic", name=options.topic)
    if options.broker is not None:
        if not options.broker.isdecimal():
            raise WrongCallError(f"--broker {options.broker!r}: the id of a broker")
        return pb.ConfigResource(type="broker", name=options.broker)
    return pb.ConfigResource(type="cluster")


def run_describe(options: argparse.Namespace) -> int:
    resource = _resource(options)

    async def job(cluster: ClusterClient) -> int:
        admin = AdminClient(cluster, allow_stale=True)
        (found,) = await admin.describe_configs([resource], keys=options.key)
        session.tell_if_stale(admin.stale_ms, cluster.answered)
        entries = [
            entry for entry in found.entries if options.all or options.key or entry.source not in ("default", "cluster")
        ]
        if resource.type == "cluster" and not options.all and not options.key:
            entries = [entry for entry in found.entries if entry.source == "cluster"]
        if options.output == "json":
            rows = [
                {
                    "key": entry.key,
                    "value": entry.value,
                    "source": entry.source,
                    "default": entry.default_value,
                    "is_dynamic": entry.is_dynamic,
                    "documentation": entry.documentation,
                }
                for entry in entries
            ]
            document = {
                "type": resource.type,
                "name": resource.name or None,
                "error": session.error_document(found),
                "entries": rows,
                **session.stale_fields(admin.stale_ms),
            }
            print(json.dumps(document, indent=2))
        elif entries:
            cells = [[entry.key, entry.value, entry.source, entry.default_value] for entry in entries]
            table.write(sys.stdout, ["key", "value", "source", "default"], cells)
        elif not found.HasField("error"):
            session.tell("nothing is set here; --all shows what applies")
        return session.tell_errors([(f"{resource.type} {resource.name}".strip(), found)])

    return session.run(options, job)


def run_alter(options: argparse.Namespace) -> int:
    resource = _resource(options)
    kinds = pb.ConfigChange
    changes = [
        pb.ConfigChange(key=key, operation=operation, value=value)
        for operation, option, items in (
            (kinds.SET, "--set", options.set),
            (kinds.APPEND, "--append", options.append),
            (kinds.SUBTRACT, "--subtract", options.subtract),
        )
        for key, value in config_pairs_of(items, option, resource.type)
    ]
    changes += [pb.ConfigChange(key=key, operation=kinds.DELETE) for key in options.delete]
    if not changes:
        raise WrongCallError("nothing to change: --set KEY=VALUE, --delete KEY, --append or --subtract")

    async def job(cluster: ClusterClient) -> int:
        altered = pb.AlteredConfig(resource=resource, changes=changes)
        rows = await AdminClient(cluster).alter_configs([altered], validate_only=options.validate_only)
        return print_outcomes(options, "resources", rows, f"{len(changes)} changed")

    return session.run(options, job)
