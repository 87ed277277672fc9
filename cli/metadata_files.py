"""`tidelog metadata show|dump`: from a stopped node's files, or live. Keys of the JSON are listed in docs/cli.md."""

import argparse
import json
import sys

from tidelog.cli import metadata_view
from tidelog.cli.exit_codes import EXIT_FAILURE, EXIT_OK
from tidelog.cli.main import UsageError
from tidelog.cli.metadata_reading import StoredMetadata, read_stored
from tidelog.model.admin_errors import ResourceNotFoundError


def run_show(options: argparse.Namespace) -> int:
    stored = _source(options)
    state = stored.state()
    try:
        found = metadata_view.at_path(metadata_view.tree(state), options.path)
    except ResourceNotFoundError:
        _verdict(stored)  # a problem may be why it is not there
        raise
    if options.output == "json":
        document = {"path": options.path, "value": found, "problems": stored.problems}
        document |= {"stale": stored.stale_ms is not None, "age_ms": stored.stale_ms}
        print(json.dumps(document, indent=2))
    else:
        metadata_view.write(sys.stdout, found, options.path)
    return _verdict(stored)


def run_dump(options: argparse.Namespace) -> int:
    stored = _source(options)
    for line in stored.lines():
        print(json.dumps(metadata_view.line_document(line)))
    return _verdict(stored)


def _source(options: argparse.Namespace) -> StoredMetadata:
    if options.data is None:
        from tidelog.cli.metadata_live import read_live

        return read_live(options)
    if options.bootstrap is not None:
        raise UsageError("--data reads files and --bootstrap a running cluster: use one of them")
    return read_stored(options.data, options.copy)


def _verdict(stored: StoredMetadata) -> int:
    sys.stdout.flush()
    for note in stored.notes:
        print(f"tidelog: {note}", file=sys.stderr)
    for problem in stored.problems:
        print(f"tidelog: {problem}", file=sys.stderr)
    return EXIT_FAILURE if stored.problems else EXIT_OK
