"""Raw calls of a node's gRPC API, for tests that read its responses as they are."""

from __future__ import annotations

import argparse
import asyncio
import socket
from collections.abc import Iterator
from types import TracebackType
from typing import Any, Generic, TypeVar

import grpc  # type: ignore[import-untyped]
from google.protobuf.message import Message

from tidelog.cli.clients import bootstrap_of
from tidelog.cli.main import CommandError
from tidelog.client.errors import as_read_error
from tidelog.client.protocol_probe import ProtocolProbe
from tidelog.model.errors import CallTimeoutError, TidelogError, TransportError, UnreachableError
from tidelog.rpc.grpc.errors import ERROR_KEY
from tidelog.rpc.protocol_sniffing import hint_in
from tidelog.world.transport import decode_error

TIMEOUT_S = 30.0
CONNECT_S = 3.0
MESSAGE_BYTES_MAX = 64 << 20
_OPTIONS = [
    ("grpc.max_receive_message_length", MESSAGE_BYTES_MAX),
    ("grpc.enable_http_proxy", 0),
    ("grpc.enable_retries", 0),
]

M = TypeVar("M", bound=Message)


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
            protocol = asyncio.run(ProtocolProbe().probe(opened[0]))
            raise CommandError(f"{opened[0]} {protocol or 'is not a gRPC port'}")
        raise CommandError(f"no cluster at {', '.join(addresses)}; start one with: tidelog dev")

    def __enter__(self) -> ClusterChannel:
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
    ) -> RunningCall[M]:
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
            return TransportError(f"{self.address} does not know {method}: is it the port for clients?")
        if (protocol := hint_in(error.details() or "")) is not None:
            return UnreachableError(f"{self.address} is {protocol}")
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
