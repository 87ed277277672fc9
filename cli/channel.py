"""How a command reaches a cluster: where it is, one call, one stream. Errors become those of the catalogue.

Where: `--bootstrap`, else TIDELOG_BOOTSTRAP, else the profile, else localhost:9292. The profile is a table of
`~/.config/tidelog/config.toml`, the one that TIDELOG_PROFILE names or `default`:

    [profiles.default]
    bootstrap = "host:9292,host2:9292"
"""

import argparse
import asyncio
import os
import socket
import tomllib
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Any, Generic, TypeVar

import grpc  # type: ignore[import-untyped]
from google.protobuf.message import Message

from tidelog.cli.main import RefusedError, WrongCallError
from tidelog.client.errors import as_read_error
from tidelog.client.wrong_door import DoorLook
from tidelog.model.errors import CallTimeoutError, TidelogError, TransportError, UnreachableError
from tidelog.rpc.errors import ERROR_KEY
from tidelog.rpc.first_bytes import told_in
from tidelog.server.listeners import ListenerError, parse_address
from tidelog.world.transport import decode_error

DEFAULT = "localhost:9292"
TIMEOUT_S = 30.0
CONNECT_S = 3.0
MESSAGE_BYTES_MAX = 64 << 20
_OPTIONS = [
    ("grpc.max_receive_message_length", MESSAGE_BYTES_MAX),
    ("grpc.enable_http_proxy", 0),
    ("grpc.enable_retries", 0),
]

M = TypeVar("M", bound=Message)


def bootstrap_of(options: argparse.Namespace) -> list[str]:
    """Addresses to try, in order."""
    text = options.bootstrap or os.environ.get("TIDELOG_BOOTSTRAP") or _profile().get("bootstrap") or DEFAULT
    items = [item.strip() for item in (text if isinstance(text, list) else str(text).split(","))]
    try:
        return [str(parse_address(item)) for item in items if item]
    except ListenerError as error:
        raise WrongCallError(f"--bootstrap: {error}") from error


def _profile() -> dict[str, Any]:
    base = os.environ.get("XDG_CONFIG_HOME") or os.path.join(os.path.expanduser("~"), ".config")
    path = Path(base) / "tidelog" / "config.toml"
    name = os.environ.get("TIDELOG_PROFILE")
    if not path.exists():
        if name:
            raise WrongCallError(f"TIDELOG_PROFILE={name}: there is no {path}")
        return {}
    try:
        profiles = tomllib.loads(path.read_text(encoding="utf-8")).get("profiles", {})
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise WrongCallError(f"{path}: {error}") from error
    found = profiles.get(name or "default")
    if found is None and name:
        raise WrongCallError(f"TIDELOG_PROFILE={name}: {path} has no such profile; there are: {', '.join(profiles)}")
    return found if isinstance(found, dict) else {}


def _is_open(address: str) -> bool:
    """Whether anything at all listens there."""
    host, _, port = address.rpartition(":")
    try:
        with socket.create_connection((host.strip("[]"), int(port)), timeout=CONNECT_S):
            return True
    except OSError:
        return False


class ClusterChannel:
    """A connection to the first node that answers. `with` closes it."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.address = ""
        self.timeout_s: float = getattr(options, "timeout", None) or TIMEOUT_S
        """How long a call may take, unless its caller says otherwise."""
        self._channel = self._connect(bootstrap_of(options))

    def _connect(self, addresses: list[str]) -> grpc.Channel:
        opened: list[str] = []
        for address in addresses:
            # gRPC goes on trying where nobody listens: a node that is down would cost all of its time.
            if not _is_open(address):
                continue
            opened.append(address)
            channel = grpc.insecure_channel(address, options=_OPTIONS)
            try:
                grpc.channel_ready_future(channel).result(timeout=CONNECT_S)
                self.address = address
                return channel
            except grpc.FutureTimeoutError:
                channel.close()
        if opened:
            door = asyncio.run(DoorLook().look(opened[0]))
            if door is not None:
                raise RefusedError(f"{opened[0]} {door}")
            raise RefusedError(f"{opened[0]} is open, but it is no gRPC door; that of a node is 9292 as a rule")
        raise RefusedError(f"no cluster at {', '.join(addresses)}; start one with: tidelog dev")

    def __enter__(self) -> "ClusterChannel":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._channel.close()

    def call(
        self, method: str, request: Message, response: type[M], *, timeout_s: float | None = None, is_read: bool = False
    ) -> M:
        """`method` is like `Cluster/DescribeQuorum`. `is_read`: it changes nothing, and its errors say so."""
        return self.begin(method, request, response, timeout_s=timeout_s).result(is_read=is_read)

    def begin(
        self, method: str, request: Message, response: type[M], *, timeout_s: float | None = None
    ) -> "RunningCall[M]":
        calling = self._channel.unary_unary(
            f"/tidelog.v1.{method}",
            request_serializer=lambda message: message.SerializeToString(),
            response_deserializer=response.FromString,
        )
        return RunningCall(self, method, calling.future(request, timeout=timeout_s or self.timeout_s))

    def stream(
        self, method: str, request: Message, response: type[M], *, timeout_s: float | None = None
    ) -> Iterator[M]:
        calling = self._channel.unary_stream(
            f"/tidelog.v1.{method}",
            request_serializer=lambda message: message.SerializeToString(),
            response_deserializer=response.FromString,
        )
        try:
            yield from calling(request, timeout=timeout_s)
        except grpc.RpcError as error:
            raise self.error(method, error) from error

    def error(self, method: str, error: Any) -> TidelogError:
        for key, value in error.trailing_metadata() or ():
            if key == ERROR_KEY:
                return decode_error(value if isinstance(value, bytes) else value.encode())
        if error.code() is grpc.StatusCode.DEADLINE_EXCEEDED:
            return CallTimeoutError(f"{self.address} did not answer {method} in time")
        if error.code() is grpc.StatusCode.UNIMPLEMENTED:
            return TransportError(f"{self.address} does not know {method}: the gRPC door of a node is 9292 as a rule")
        if (door := told_in(error.details() or "")) is not None:
            return UnreachableError(f"{self.address} is {door}")
        return TransportError(f"{self.address}: {error.code().name}: {error.details()}")


class RunningCall(Generic[M]):
    """A call that was sent."""

    def __init__(self, channel: ClusterChannel, method: str, future: Any) -> None:
        self._channel = channel
        self._method = method
        self._future = future

    def is_done(self, wait_s: float) -> bool:
        """Whether there is an answer, at the latest after this time."""
        try:
            self._future.exception(timeout=wait_s)
        except grpc.FutureTimeoutError:
            return False
        return True

    def result(self, *, is_read: bool = False) -> M:
        """The answer, when it is there; raises the error of the catalogue."""
        try:
            answer: M = self._future.result()
            return answer
        except grpc.RpcError as error:
            found = self._channel.error(self._method, error)
            raise (as_read_error(found) if is_read else found) from error
