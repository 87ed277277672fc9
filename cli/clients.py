"""Clients of the cluster that a command names, and their errors as one line.

The cluster: `--bootstrap`, else TIDELOG_BOOTSTRAP, else the profile, else localhost:9292. A profile is a table of
`~/.config/tidelog/config.toml`; TIDELOG_PROFILE names it (default: `default`):

    [profiles.default]
    bootstrap = "host:9292,host2:9292"
"""

import argparse
import contextlib
import logging
import os
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

os.environ.setdefault("GRPC_VERBOSITY", "NONE")  # before grpc is imported: its messages arrive as errors

from tidelog.cli.main import CommandError, UsageError
from tidelog.cli.messages import no_topic
from tidelog.client.errors import NoClusterError, UnknownTopicError
from tidelog.model.errors import ErrorCode, RemoteError, UnreachableError, UnsupportedVersionError
from tidelog.server.listeners import ListenerError, parse_address

if TYPE_CHECKING:
    from tidelog.client.admin.threaded import Admin
    from tidelog.client.admin.values import TopicDescription

DEFAULT = "localhost:9292"
TIMEOUT_S = 30.0
_NOT_LISTENING = ("connection refused", "connect failed")
_OTHER_PROTOCOL = (" speaks ", " is for ")
"""`grpc_connections` says so of a port that is not for clients."""


def bootstrap_of(options: argparse.Namespace) -> list[str]:
    """Returns the bootstrap addresses, in order."""
    text = options.bootstrap or os.environ.get("TIDELOG_BOOTSTRAP") or _profile().get("bootstrap") or DEFAULT
    items = [item.strip() for item in (text if isinstance(text, list) else str(text).split(","))]
    try:
        return [str(parse_address(item)) for item in items if item]
    except ListenerError as error:
        raise UsageError(f"--bootstrap: {error}") from error


def _profile() -> dict[str, Any]:
    base = os.environ.get("XDG_CONFIG_HOME") or os.path.join(os.path.expanduser("~"), ".config")
    path = Path(base) / "tidelog" / "config.toml"
    name = os.environ.get("TIDELOG_PROFILE")
    if not path.exists():
        if name:
            raise UsageError(f"TIDELOG_PROFILE={name}: there is no {path}")
        return {}
    try:
        profiles = tomllib.loads(path.read_text(encoding="utf-8")).get("profiles", {})
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UsageError(f"{path}: {error}") from error
    profile = profiles.get(name or "default")
    if profile is None and name:
        raise UsageError(f"TIDELOG_PROFILE={name}: {path} has no such profile; there are: {', '.join(profiles)}")
    return profile if isinstance(profile, dict) else {}


def timeout_s(options: argparse.Namespace, default_s: float = TIMEOUT_S) -> float:
    """Returns --timeout, or the default."""
    seconds: float | None = getattr(options, "timeout", None)
    return default_s if seconds is None else seconds


def timeout_ms(options: argparse.Namespace, default_s: float = TIMEOUT_S) -> int:
    return max(1, int(timeout_s(options, default_s) * 1000))


def timeout_option(options: argparse.Namespace, name: str) -> dict[str, Any]:
    """Returns --timeout as this option of a client, if it is given."""
    return {} if getattr(options, "timeout", None) is None else {name: timeout_ms(options)}


@contextlib.contextmanager
def open_admin(options: argparse.Namespace, default_s: float = TIMEOUT_S) -> Iterator["Admin"]:
    """Opens an admin client. A cluster that does not answer is an error at once."""
    from tidelog.client.admin.threaded import Admin

    limit_ms = timeout_ms(options, default_s)
    with (
        client_errors(),
        Admin(
            bootstrap_of(options),
            client_id="tidelog-cli",
            bootstrap_wait_ms=0,
            default_api_timeout_ms=limit_ms,
            request_timeout_ms=limit_ms,
        ) as admin,
    ):
        yield admin


def topic_of(admin: "Admin", name: str) -> "TopicDescription":
    """Raises UnknownTopicError if it does not exist."""
    try:
        return admin.describe_topic(name)
    except RemoteError as error:
        if error.code is ErrorCode.UNKNOWN_TOPIC_OR_PARTITION:
            raise UnknownTopicError(name) from error
        raise


@contextlib.contextmanager
def client_errors() -> Iterator[None]:
    """Turns errors that say all there is to say into one line, without the catalogue's advice. Warnings of the client
    are lines of the command."""
    try:
        with _log_lines():
            yield
    except NoClusterError as error:
        raise CommandError(_no_cluster(error)) from error
    except UnknownTopicError as error:
        raise CommandError(no_topic(error.topic)) from error
    except (UnreachableError, UnsupportedVersionError) as error:
        raise CommandError(str(error)) from error


@contextlib.contextmanager
def _log_lines() -> Iterator[None]:
    """Prints warnings of the clients to stderr as `report` does, unless the command handles its log itself."""
    logger = logging.getLogger("tidelog")
    if logger.handlers:
        yield
        return
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("tidelog: %(message)s"))
    handler.setLevel(logging.WARNING)
    logger.addHandler(handler)
    try:
        yield
    finally:
        logger.removeHandler(handler)


def _no_cluster(error: NoClusterError) -> str:
    reasons = [
        f"{address}: {reason}" if address not in reason else reason
        for address, reason in zip(error.addresses, error.reasons, strict=True)
        if not any(word in reason.lower() for word in _NOT_LISTENING)
    ]
    details = f" ({'; '.join(reasons)})" if reasons else ""
    # A port of another protocol belongs to a node that runs: its reason names the right port.
    is_running = any(word in reason for word in _OTHER_PROTOCOL for reason in reasons)
    advice = "" if is_running else "; start one with: tidelog dev"
    if advice and error.addresses == (DEFAULT,):
        advice += "; one that runs elsewhere, or without its first node: name its nodes by --bootstrap or "
        advice += "TIDELOG_BOOTSTRAP"
    return f"no cluster at {', '.join(error.addresses)}{details}{advice}"
