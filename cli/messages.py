"""Output that commands share: messages on stderr, confirmations, outcomes and errors as text and JSON."""

import argparse
import json
import os
import re
import select
import shlex
import signal
import sys
from collections.abc import Mapping
from typing import Any
from uuid import UUID

from tidelog.cli.exit_codes import EXIT_FAILURE, EXIT_OK
from tidelog.model.errors import ErrorCode, TidelogError
from tidelog.model.uuids import RESERVED, to_text

ID_LENGTH = 22
_NO_TOPIC = re.compile(r"there is no topic '?([^\s']+)'?")
"""The controller's and the client's words."""


def report(message: str) -> None:
    """Prints a message to stderr: stdout has data alone."""
    sys.stdout.flush()
    print(f"tidelog: {message}", file=sys.stderr, flush=True)


def print_json(document: object) -> None:
    print(json.dumps(document, indent=2))


def id_text(value: UUID | None) -> str | None:
    """Formats an id as Kafka's tools do: 22 characters."""
    return None if value is None else to_text(value)


def wrong_id(text: str) -> str:
    """Why this is not an id; see `from_text`."""
    if len(text) != ID_LENGTH:
        return f"an id has {ID_LENGTH} characters, this has {len(text)}"
    if not re.fullmatch(r"[\w-]*", text, re.ASCII):
        return "an id has letters, digits, - and _ only"
    if text in map(to_text, RESERVED):
        return "this id is reserved"
    return "no 16 bytes have this form: its last character must be A, Q, g or w"


def report_if_stale(stale_ms: int | None, address: str) -> None:
    if stale_ms is not None:
        report(f"stale: {address} has no contact with an active controller; its state is {stale_ms / 1000:.1f} s old")


def stale_mark(stale_ms: int | None) -> str:
    """The end of a state in a table that may have changed since."""
    return "" if stale_ms is None else f" ({stale_ms / 1000:.0f} s ago)"


def stale_fields(stale_ms: int | None) -> dict[str, Any]:
    """JSON fields: whether the document may be stale, and its age."""
    return {"stale": stale_ms is not None, "age_ms": stale_ms}


def asks(options: argparse.Namespace) -> bool:
    """Whether `confirm` asks."""
    return not options.yes and sys.stdin.isatty()


def confirm(options: argparse.Namespace, question: str) -> bool:
    """Asks on a terminal, unless --yes; a program that calls is not asked. The end of the input means no."""
    if not asks(options):
        return True
    try:
        print(f"{question} [y/N] ", end="", file=sys.stderr, flush=True)
        answer = _read_line()
    except KeyboardInterrupt:
        print(file=sys.stderr)
        report("nothing was changed")
        raise
    if not answer:
        print(file=sys.stderr)
    if answer.strip().lower() in ("y", "yes"):
        return True
    report("nothing was changed")
    return False


def _read_line() -> str:
    """Reads a line of the terminal. Ctrl-C interrupts it also when another thread receives the signal, or when it comes
    just before the read: both only write to the wakeup descriptor."""
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    previous = signal.set_wakeup_fd(-1)  # an interrupt from here on restores it, or leaves none
    try:
        signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
        while sys.stdin not in select.select([sys.stdin, reader], [], [])[0]:
            os.read(reader, 4096)  # the handler of the signal runs after this call
        return sys.stdin.readline()
    finally:
        signal.set_wakeup_fd(previous)
        os.close(reader)
        os.close(writer)


# Errors.


_WITHOUT_ADVICE = frozenset(
    {ErrorCode.INVALID_REQUEST, ErrorCode.INVALID_TOPIC, ErrorCode.UNKNOWN_MEMBER_ID, ErrorCode.RESOURCE_NOT_FOUND}
)
"""Codes with many reasons: the message says what to do, and the advice of the code fits a few of them only."""


def error_text(error: TidelogError) -> str:
    advice = "" if error.code in _WITHOUT_ADVICE else f": {error.advice}"
    return f"{error} ({error.code.name}{advice})"


def no_topic(name: str) -> str:
    return f"there is no topic '{name}'; create it with: tidelog topics create {shlex.quote(name)}"


def named_error_text(name: str, error: TidelogError, *, creates: bool) -> str:
    """The error of a named item, with the name in it once. `creates`: to create a missing topic would help."""
    missing = _NO_TOPIC.fullmatch(str(error))
    if error.code is ErrorCode.UNKNOWN_TOPIC_OR_PARTITION and missing is not None:
        return no_topic(missing[1]) if creates else f"there is no topic '{missing[1]}' ({error.code.name})"
    is_named = re.search(rf"(?<![\w.-]){re.escape(name)}(?![\w-]|\.\w)", str(error)) is not None
    return error_text(error) if is_named else f"{name}: {error_text(error)}"


def error_document(error: TidelogError | None) -> dict[str, Any] | None:
    if error is None:
        return None
    return {"code": error.code.value.code, "name": error.code.name, "message": str(error), "retriable": error.retriable}


def report_errors(errors: Mapping[Any, TidelogError], *, creates: bool = True) -> int:
    """Prints a line for each error. Returns the exit code."""
    for name, error in errors.items():
        report(named_error_text(str(name), error, creates=creates))
    return EXIT_FAILURE if errors else EXIT_OK


# Outcomes of changes.


def print_outcomes(
    options: argparse.Namespace,
    what: str,
    outcomes: Mapping[Any, TidelogError | None],
    done: str,
    *,
    creates: bool = True,
    expected: tuple[ErrorCode, ...] = (),
    has_validate_only: bool = True,
) -> int:
    """Prints the outcome of each item: its error, or None. Errors with an `expected` code are no failures."""
    if options.output == "json":
        document: dict[str, Any] = {
            what: [{**_item(item), "error": error_document(error)} for item, error in outcomes.items()]
        }
        if has_validate_only:
            document["validate_only"] = getattr(options, "validate_only", False)
        print_json(document)
    else:
        for item, error in outcomes.items():
            if error is None:
                print(f"{item}: {done}")
    failures = {item: error for item, error in outcomes.items() if error is not None and error.code not in expected}
    return report_errors(failures, creates=creates)


def _item(item: Any) -> dict[str, Any]:
    return {"topic": item.topic, "partition": item.partition} if hasattr(item, "topic") else {"name": str(item)}
