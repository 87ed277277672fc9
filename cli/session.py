"""How a command of a client runs: a `ClusterClient` for the length of one coroutine, and its errors in one line."""

import argparse
import asyncio
import contextlib
import os
import random
import re
import shlex
import sys
from collections.abc import Awaitable, Callable, Iterator, Sequence
from typing import Any

os.environ.setdefault("GRPC_VERBOSITY", "NONE")  # before grpc is imported: what it has to say comes as errors

from tidelog.cli.channel import bootstrap_of
from tidelog.cli.main import EXIT_REFUSED, RefusedError
from tidelog.cli.stdin_chunks import LineReader
from tidelog.cli.stopping import terminated_in_loop
from tidelog.client.cluster import ClusterClient, error_in
from tidelog.client.config import ClientConfig
from tidelog.client.errors import NoClusterError, UnknownTopicError
from tidelog.client.grpc_connections import GrpcConnections
from tidelog.model.errors import ErrorCode, TidelogError, UnreachableError, UnsupportedVersionError
from tidelog.world.real.clock import SystemClock

TIMEOUT_MS = 30_000
Job = Callable[[ClusterClient], Awaitable[int]]
_NOBODY = ("connection refused", "connect failed")
_NO_TOPIC = re.compile(r"there is no topic (\S+)")
"""As a controller says it."""
_OTHER_DOOR = (" speaks ", " is for ")
"""As `grpc_connections` says it of a port that is not for clients."""


def run(options: argparse.Namespace, job: Job) -> int:
    """Run the job against the cluster that the options name; its exit code."""
    return run_at(bootstrap_of(options), job, request_ms=timeout_ms(options))


def run_at(addresses: Sequence[str], job: Job, *, request_ms: int = TIMEOUT_MS) -> int:
    with errors_told():
        return asyncio.run(_run(addresses, job, request_ms))


def timeout_ms(options: argparse.Namespace, default_ms: int = TIMEOUT_MS) -> int:
    """What --timeout says, or the default."""
    seconds = getattr(options, "timeout", None)
    return default_ms if seconds is None else max(1, int(seconds * 1000))


def timeout_setting(options: argparse.Namespace, name: str) -> dict[str, int]:
    """--timeout as this setting of a client, if it is given."""
    return {} if getattr(options, "timeout", None) is None else {name: timeout_ms(options)}


@contextlib.contextmanager
def errors_told() -> Iterator[None]:
    """Errors of a client that say all that there is to say, in one line."""
    try:
        yield
    except NoClusterError as error:
        raise RefusedError(_no_cluster(error)) from error
    except UnknownTopicError as error:
        raise RefusedError(no_topic(error.topic)) from error
    except (UnreachableError, UnsupportedVersionError) as error:
        raise RefusedError(str(error)) from error  # it says what to do; the catalogue's advice is for other cases


async def _run(addresses: Sequence[str], job: Job, request_ms: int) -> int:
    with terminated_in_loop():
        return await _run_job(addresses, job, request_ms)


async def _run_job(addresses: Sequence[str], job: Job, request_ms: int) -> int:
    config = ClientConfig(
        request_timeout_ms=request_ms, attempt_timeout_ms=min(request_ms, ClientConfig().attempt_timeout_ms)
    )
    cluster = ClusterClient(addresses, GrpcConnections(), random=random.Random(), clock=SystemClock(), config=config)
    try:
        return await job(cluster)
    finally:
        await cluster.close()


def _no_cluster(error: NoClusterError) -> str:
    odd = [
        f"{where}: {why}" if where not in why else why
        for where, why in zip(error.addresses, error.reasons, strict=True)
        if not any(word in why.lower() for word in _NOBODY)
    ]
    told = f" ({'; '.join(odd)})" if odd else ""
    # Something that runs is at hand where another door answers: it says which one is right.
    advice = "" if any(word in why for word in _OTHER_DOOR for why in odd) else "; start one with: tidelog dev"
    return f"no cluster at {', '.join(error.addresses)}{told}{advice}"


def tell(message: str) -> None:
    """Talk: to stderr, so that stdout is data alone."""
    sys.stdout.flush()
    print(f"tidelog: {message}", file=sys.stderr, flush=True)


def tell_if_stale(stale_ms: int | None, where: str) -> None:
    """Say that what is shown may be old."""
    if stale_ms is not None:
        tell(
            f"this may be old: {where} does not hear from an active controller, and shows what it knew "
            f"{stale_ms / 1000:.1f} s ago"
        )


def stale_fields(stale_ms: int | None) -> dict[str, Any]:
    """For a JSON document: whether it may be old, and how old."""
    return {"stale": stale_ms is not None, "age_ms": stale_ms}


async def is_sure(options: argparse.Namespace, question: str) -> bool:
    """Ask on a terminal, unless --yes; a program that calls is taken at its word. Ctrl-C and the end of the input are
    no consent, and the event loop goes on while the user thinks."""
    if options.yes or not sys.stdin.isatty():
        return True
    print(f"{question} [y/N] ", end="", file=sys.stderr, flush=True)
    answer = b""
    try:
        async for lines in LineReader(sys.stdin.fileno()).batches():
            answer = lines[0]
            break
        else:
            print(file=sys.stderr)
    except asyncio.CancelledError:
        print(file=sys.stderr)
        tell("nothing was changed")
        raise
    if answer.strip().lower() in (b"y", b"yes"):
        return True
    tell("nothing was changed")
    return False


def error_text(error: TidelogError) -> str:
    return f"{error} ({error.code.name}: {error.advice})"


def no_topic(name: str) -> str:
    return f"there is no topic '{name}'; create it with: tidelog topics create {shlex.quote(name)}"


def named_error_text(name: str, error: TidelogError, *, creates: bool) -> str:
    """The error of something that has a name; the name stands in it once."""
    missing = _NO_TOPIC.fullmatch(str(error))
    if error.code is ErrorCode.UNKNOWN_TOPIC_OR_PARTITION and missing is not None:
        return no_topic(missing[1]) if creates else f"there is no topic '{missing[1]}' ({error.code.name})"
    is_in = re.search(rf"(?<![\w.-]){re.escape(name)}(?![\w-]|\.\w)", str(error)) is not None
    return error_text(error) if is_in else f"{name}: {error_text(error)}"


def error_document(row: Any) -> dict[str, Any] | None:
    """The error of one item, for a JSON document."""
    error = error_in(row)
    if error is None:
        return None
    return {"code": error.code.value.code, "name": error.code.name, "message": str(error), "retriable": error.retriable}


def tell_errors(rows: Sequence[tuple[str, Any]], *, but: Sequence[ErrorCode] = (), creates: bool = True) -> int:
    """One line for each item that failed; the exit code. `creates`: to create a missing topic would help."""
    code = 0
    for name, row in rows:
        error = error_in(row)
        if error is not None and error.code not in but:
            tell(named_error_text(name, error, creates=creates))
            code = EXIT_REFUSED
    return code
