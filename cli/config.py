"""`tidelog config check|show`: a node's configuration file. Keys of the JSON document are listed in docs/cli.md."""

import argparse
import json
import sys

from tidelog.cli import table
from tidelog.cli.exit_codes import EXIT_OK
from tidelog.cli.main import UsageError
from tidelog.server.config import ConfigError, NodeConfig, load


def read_config(path: str) -> NodeConfig:
    """Read the node's configuration. Errors in it are usage errors."""
    try:
        return load(path)
    except ConfigError as error:
        raise UsageError(str(error)) from error
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror or error}") from error


def run_check(options: argparse.Namespace) -> int:
    config = read_config(options.config)
    _print_ignored(config)
    roles = " and ".join(
        role for role, has in (("broker", config.is_broker), ("controller", config.is_controller)) if has
    )
    print(f"{options.config}: valid; node {config.node}, {roles}")
    return EXIT_OK


def run_show(options: argparse.Namespace) -> int:
    config = read_config(options.config)
    entries = [entry for entry in config.entries if options.all or entry.source != "default"]
    if options.output == "json":
        rows = [
            {
                "key": entry.key,
                "value": entry.value,
                "source": entry.source,
                "default": entry.default,
                "is_of_cluster": entry.is_of_cluster,
            }
            for entry in entries
        ]
        listeners = [
            {
                "name": one.name,
                "protocol": one.kind.name.lower(),
                "listens": str(one.address),
                "advertised": str(one.advertised),
            }
            for one in config.listeners
        ]
        document = {"path": config.path, "settings": rows, "listeners": listeners, "ignored": list(config.ignored)}
        document["warnings"] = list(config.warnings)
        print(json.dumps(document, indent=2))
        return EXIT_OK
    cells = [[entry.key, entry.value, entry.source, entry.default] for entry in entries]
    table.write(sys.stdout, ["key", "value", "source", "default"], cells)
    print()
    addresses = [[one.name, one.kind.name.lower(), one.address, one.advertised] for one in config.listeners]
    if config.http is not None:
        addresses.append(["HTTP", "http", config.http, None])
    table.write(sys.stdout, ["listener", "protocol", "listens", "advertised"], addresses)
    _print_ignored(config)
    return EXIT_OK


def _print_ignored(config: NodeConfig) -> None:
    if config.ignored:
        print(f"tidelog: ignored, since they mean nothing here: {', '.join(config.ignored)}", file=sys.stderr)
    for warning in config.warnings:
        print(f"tidelog: {warning}", file=sys.stderr)
