"""`tidelog transactions list|describe|abort|find-hanging`. docs/cli.md lists the keys of the JSON documents."""

import argparse
import base64
import sys
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from tidelog.cli import table
from tidelog.cli.clients import open_admin, timeout_s
from tidelog.cli.exit_codes import EXIT_FAILURE, EXIT_OK
from tidelog.cli.log_rows import time_text
from tidelog.cli.main import UsageError
from tidelog.cli.messages import asks, confirm, error_document, error_text, named_error_text, print_json, report
from tidelog.client.admin.values import TransactionDescription
from tidelog.client.durations import duration_ms
from tidelog.client.errors import NoClusterError
from tidelog.client.record import TopicPartition
from tidelog.model.errors import ErrorCode, TidelogError

if TYPE_CHECKING:
    from tidelog.client.admin.threaded import Admin

LIST_S = 10.0
"""How long `list` waits for a broker that does not answer, or loads transactional ids."""
OPEN_STATES = ("Ongoing", "PrepareCommit", "PrepareAbort")


def run_list(options: argparse.Namespace) -> int:
    open_for = None if options.open_for is None else _duration(options.open_for)
    filters: dict[str, Any] = {"states": options.state, "producer_ids": options.producer_id, "open_for": open_for}
    with open_admin(options) as admin:
        limit_s = timeout_s(options, LIST_S)
        try:
            listed = admin.list_transactions(**filters, timeout=limit_s)
        except NoClusterError:
            raise
        except TidelogError:
            # A part of the list is better than none; messages name the brokers that are missing.
            listed = admin.list_transactions(**filters, partial=True, timeout=limit_s)
    if options.output == "json":
        print_json(
            {
                "transactions": [
                    {
                        "transactional_id": row.transactional_id,
                        "producer_id": row.producer_id,
                        "state": row.state,
                        "coordinator": row.coordinator,
                    }
                    for row in listed
                ],
                "errors": [
                    {"broker": broker, "error": error_document(error)} for broker, error in listed.errors.items()
                ],
                "loading": [{"broker": broker, "partitions": count} for broker, count in listed.loading.items()],
            }
        )
    elif listed.transactions:
        cells = [[row.transactional_id, row.producer_id, row.state, row.coordinator] for row in listed]
        headings = ["transactional id", "producer", "state", "coordinator"]
        table.write(sys.stdout, headings, cells, right=["producer", "coordinator"])
    elif not listed.errors and not listed.loading:
        is_filtered = options.state or options.producer_id or open_for is not None
        report("no transactional id matches" if is_filtered else "there are no transactional ids")
    for broker, error in listed.errors.items():
        report(f"transactional ids of broker {broker} are missing: {error_text(error)}")
    for broker, count in listed.loading.items():
        report(f"broker {broker} has {table.count(count, 'partition')} of transactional ids to load: try again")
    return EXIT_FAILURE if listed.errors or listed.loading else EXIT_OK


def run_describe(options: argparse.Namespace) -> int:
    code = EXIT_OK
    documents: list[dict[str, Any]] = []
    with open_admin(options) as admin:
        names = list(dict.fromkeys(options.id))
        if not names:
            names = [row.transactional_id for row in admin.list_transactions(states=OPEN_STATES)]
        for number, name in enumerate(names):
            try:
                description = admin.describe_transaction(name)
            except TidelogError as error:
                if error.code is not ErrorCode.TRANSACTIONAL_ID_NOT_FOUND:
                    raise
                report(named_error_text(name, error, creates=False))
                documents.append({"transactional_id": name, "error": error_document(error)})
                code = EXIT_FAILURE
                continue
            if options.output == "json":
                documents.append(_document(description))
            else:
                if number:
                    print()
                _print(description)
    if options.output == "json":
        print_json({"transactions": documents})
    elif not names:
        report("no transaction is open")
    return code


def _document(description: TransactionDescription) -> dict[str, Any]:
    return {
        "transactional_id": description.transactional_id,
        "error": None,
        "coordinator": description.coordinator,
        "producer_id": description.producer_id,
        "producer_epoch": description.producer_epoch,
        "state": description.state,
        "timeout_ms": description.timeout_ms,
        "started_ms": description.started_ms,
        "prepared_ms": description.prepared_ms,
        "partitions": _places(description.partitions),
        "members": [
            {"producer_id": member.producer_id, "label": member.label or None, "partitions": _places(member.partitions)}
            for member in description.members
        ],
        "last_token": base64.b64encode(description.last_token).decode() or None,
    }


def _places(partitions: Iterable[TopicPartition]) -> list[dict[str, Any]]:
    return [{"topic": place.topic, "partition": place.partition} for place in partitions]


def _print(description: TransactionDescription) -> None:
    parts = [
        description.state,
        f"producer {description.producer_id} epoch {description.producer_epoch}",
        f"timeout {description.timeout_ms} ms",
        f"coordinator {description.coordinator}",
    ]
    if description.started_ms is not None:
        parts.append(f"open since {time_text(description.started_ms)} UTC")
    if description.prepared_ms is not None:
        parts.append(f"prepared since {time_text(description.prepared_ms)} UTC")
    if description.last_token:
        parts.append(f"token {description.last_token!r}")
    print(f"{table.printable(description.transactional_id)}: {', '.join(parts)}")
    rows: list[Sequence[object]] = [
        [place.topic, place.partition, "-", description.producer_id] for place in description.partitions
    ]
    rows += [
        [place.topic, place.partition, member.label or "-", member.producer_id]
        for member in description.members
        for place in member.partitions
    ]
    if rows:
        table.write(sys.stdout, ["topic", "partition", "member", "producer"], rows, right=["partition", "producer"])


def run_abort(options: argparse.Namespace) -> int:
    names = list(dict.fromkeys(options.id))
    code = EXIT_OK
    documents: list[dict[str, Any]] = []
    with open_admin(options) as admin:
        if not confirm(options, _question(admin, options, names)):
            return EXIT_FAILURE
        for name in names:
            failure: TidelogError | None = None
            was_open = False
            try:
                was_open = admin.abort_transaction(name)
            except NoClusterError:
                raise
            except TidelogError as error:
                failure, code = error, EXIT_FAILURE
                report(named_error_text(name, error, creates=False))
            documents.append({"transactional_id": name, "was_open": was_open, "error": error_document(failure)})
            if options.output != "json" and failure is None:
                print(f"{table.printable(name)}: {'aborted' if was_open else 'no transaction is open'}")
    if options.output == "json":
        print_json({"transactions": documents})
    return code


def _question(admin: "Admin", options: argparse.Namespace, names: Sequence[str]) -> str:
    prepared = [name for name in names if asks(options) and _is_prepared(admin, name)]
    warning = (
        f"{', '.join(prepared)} {'is' if len(prepared) == 1 else 'are'} prepared, and another system may have committed"
        " its part; "
    )
    return table.printable(f"{warning if prepared else ''}abort the open transaction of {', '.join(names)}?")


def _is_prepared(admin: "Admin", name: str) -> bool:
    try:
        return admin.describe_transaction(name).prepared_ms is not None
    except TidelogError as error:
        if error.code is not ErrorCode.TRANSACTIONAL_ID_NOT_FOUND:
            raise
        return False  # the abort reports it


def run_find_hanging(options: argparse.Namespace) -> int:
    open_for = _duration(options.open_for)
    with open_admin(options) as admin:
        hanging = admin.find_hanging_transactions(list(dict.fromkeys(options.topic)) or None, open_for=open_for)
    if options.output == "json":
        print_json(
            {
                "hanging": [
                    {
                        "topic": row.partition.topic,
                        "partition": row.partition.partition,
                        "producer_id": row.producer_id,
                        "producer_epoch": row.producer_epoch,
                        "start_offset": row.start_offset,
                        "last_timestamp_ms": row.last_timestamp_ms,
                        "coordinator_epoch": row.coordinator_epoch,
                    }
                    for row in hanging
                ]
            }
        )
    elif hanging:
        headings = ["topic", "partition", "producer", "epoch", "from offset", "last record (UTC)"]
        rows = [
            [*row.partition, row.producer_id, row.producer_epoch, row.start_offset, time_text(row.last_timestamp_ms)]
            for row in hanging
        ]
        table.write(sys.stdout, headings, rows, right=headings[1:])
    else:
        report("no transaction hangs")
    return EXIT_FAILURE if hanging else EXIT_OK


def _duration(text: str) -> int:
    ms = duration_ms(text)
    if ms is None:
        raise UsageError(f"--open-for {text!r}: use a duration like 90s or 15m")
    return ms
