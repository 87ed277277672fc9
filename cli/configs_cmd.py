"""`tidelog configs describe|alter`. docs/cli.md lists the keys of the JSON documents."""

import argparse
import sys

from tidelog.cli import table
from tidelog.cli.clients import open_admin
from tidelog.cli.config_values import config_pairs_of
from tidelog.cli.exit_codes import EXIT_FAILURE
from tidelog.cli.main import UsageError
from tidelog.cli.messages import (
    error_document,
    print_json,
    print_outcomes,
    report,
    report_errors,
    report_if_stale,
    stale_fields,
)
from tidelog.client.admin.values import ConfigEntry, ConfigResource
from tidelog.model.errors import RemoteError, TidelogError


def _resource(options: argparse.Namespace) -> ConfigResource:
    if options.topic is not None:
        return ConfigResource("topic", options.topic)
    if options.broker is not None:
        if not options.broker.isdecimal():
            raise UsageError(f"--broker {options.broker!r} is not a broker id: use a number")
        return ConfigResource("broker", options.broker)
    return ConfigResource("cluster")


def run_describe(options: argparse.Namespace) -> int:
    resource = _resource(options)
    with open_admin(options) as admin:
        outcomes = admin.describe_configs([resource], options.key, allow_stale=True, partial=True)
        stale_ms = admin.stale_ms
        report_if_stale(stale_ms, admin.answered_by)
    error = outcomes.errors.get(resource)
    entries = _shown(options, resource, list(outcomes.succeeded.get(resource, {}).values()))
    if options.output == "json":
        rows = [
            {
                "key": entry.key,
                "value": entry.value,
                "source": entry.source,
                "default": entry.default,
                "is_dynamic": entry.is_dynamic,
                "documentation": entry.documentation,
            }
            for entry in entries
        ]
        document = {"type": resource.type, "name": resource.name or None, "error": error_document(error)}
        print_json({**document, "entries": rows, **stale_fields(stale_ms)})
    elif entries:
        cells = [[entry.key, entry.value, entry.source, entry.default] for entry in entries]
        table.write(sys.stdout, ["key", "value", "source", "default"], cells)
    elif error is None and not options.key:
        report("no config is set here; --all shows the effective ones")
    code = report_errors({} if error is None else {f"{resource.type} {resource.name}".strip(): error})
    unknown = sorted(set(options.key or ()) - {entry.key for entry in entries})
    if unknown and error is None:
        report(f"unknown key: {', '.join(unknown)}; --all shows the keys of a {resource.type}")
        return EXIT_FAILURE
    return code


def _shown(options: argparse.Namespace, resource: ConfigResource, entries: list[ConfigEntry]) -> list[ConfigEntry]:
    if options.all or options.key:
        return entries
    if resource.type == "cluster":
        return [entry for entry in entries if entry.source == "cluster"]
    return [entry for entry in entries if entry.source not in ("default", "cluster")]


def run_alter(options: argparse.Namespace) -> int:
    resource = _resource(options)
    sets, appends, subtracts = (
        dict(config_pairs_of(items, option, resource.type))
        for option, items in (
            ("--set", options.set),
            ("--append", options.append),
            ("--subtract", options.subtract),
        )
    )
    count = len(sets) + len(appends) + len(subtracts) + len(options.delete)
    if not count:
        raise UsageError("nothing to change: use --set KEY=VALUE, --delete KEY, --append or --subtract")
    error: TidelogError | None = None
    with open_admin(options) as admin:
        try:
            admin.alter_config(
                resource,
                sets=sets,
                deletes=options.delete,
                appends=appends,
                subtracts=subtracts,
                validate_only=options.validate_only,
            )
        except RemoteError as rejection:
            error = rejection
    done = f"{'would be: ' if options.validate_only else ''}{count} changed"
    return print_outcomes(options, "resources", {str(resource): error}, done)
