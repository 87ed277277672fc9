"""A small HTTP/1.1 server for metrics and health checks: GET of a few paths.

    request line and headers (at most HEAD_BYTES_MAX, within HEAD_TIMEOUT_S) -> a page or an error -> again, or close

It reads no bodies and supports neither upgrades nor compression. It closes connections past `CONNECTIONS_MAX` at once,
so that a faulty scraper costs the node nothing. A page that charges a quota is delayed by what `Tidelog-Throttle-Ms`
reports; its connection is not read meanwhile.

The first bytes of a connection show another protocol (gRPC, TLS, Kafka). The log then names the protocol and the
address to use, once for each protocol in `OTHER_PROTOCOL_LOG_S`. gRPC gets a response in HTTP/2: its libraries show the
text.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Protocol
from urllib.parse import urlsplit

from tidelog.model.errors import TransportError
from tidelog.rpc.protocol_sniffing import KNOWN_BYTES, WireProtocol, http2_response, of_client, wrong_protocol
from tidelog.services.context import Api, RequestContext

LOGGER = logging.getLogger(__name__)

HEAD_BYTES_MAX = 16 << 10
HEAD_TIMEOUT_S = 30.0
CONNECTIONS_MAX = 64
LINGER_S = 2.0
THROTTLE_HEADER = "Tidelog-Throttle-Ms"
OTHER_PROTOCOL_LOG_S = 10.0
_REASONS = {200: "OK", 400: "Bad Request", 404: "Not Found", 405: "Method Not Allowed", 500: "Internal Server Error"}
_REASONS |= {431: "Request Header Fields Too Large", 503: "Service Unavailable"}


@dataclass(frozen=True, slots=True)
class Page:
    body: str
    status: int = 200
    content_type: str = "text/plain; charset=utf-8"


Handler = Callable[[RequestContext], Awaitable[Page]]


class ListenAddress(Protocol):
    """Where the server listens; `str` shows it in errors."""

    @property
    def host(self) -> str: ...

    @property
    def port(self) -> int: ...

    @property
    def is_any_host(self) -> bool: ...


class HttpServer:
    """`pages` by path; `other_apis` are the addresses of the other APIs, in words."""

    def __init__(
        self, address: ListenAddress, pages: Mapping[str, Handler], other_apis: Mapping[WireProtocol, str] | None = None
    ) -> None:
        self.port = 0
        self.other_protocols: dict[WireProtocol, int] = {}
        """Connections that used another protocol."""
        self._other_apis = dict(other_apis or {})
        self._logged_s: dict[WireProtocol, float] = {}
        self._address = address
        self._pages = pages
        self._server: asyncio.Server | None = None
        self._open: set[asyncio.Task[None]] = set()

    async def start(self) -> None:
        """Raises `TransportError` if the address is in use."""
        host = None if self._address.is_any_host else self._address.host
        try:
            self._server = await asyncio.start_server(
                self._accept, host, self._address.port, limit=HEAD_BYTES_MAX, reuse_address=True
            )
        except OSError as error:
            raise TransportError(f"cannot listen on {self._address}: {error.strerror or error}") from error
        self.port = self._server.sockets[0].getsockname()[1]

    async def close(self) -> None:
        if self._server is not None:
            self._server.close()
        tasks = list(self._open)
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)

    @property
    def is_busy(self) -> bool:
        """No more connections are accepted."""
        return len(self._open) >= CONNECTIONS_MAX

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None, "asyncio calls this in a task"
        if self.is_busy:
            writer.close()
            return
        self._open.add(task)
        try:
            first = await self._first_bytes(reader, writer)
            while await self._answer(reader, writer, first):
                first = b""
        except (ConnectionError, TimeoutError, asyncio.CancelledError):
            LOGGER.debug("an HTTP connection ended early")
        finally:
            self._open.discard(task)
            writer.close()

    async def _first_bytes(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bytes:
        """Return the first bytes of the first request; raises `ConnectionError` if there is no HTTP request."""
        try:
            async with asyncio.timeout(HEAD_TIMEOUT_S):
                first = await reader.readexactly(KNOWN_BYTES)
        except asyncio.IncompleteReadError as error:
            raise ConnectionResetError("the connection ended before the first request") from error
        speech = of_client(first)
        if speech is not WireProtocol.HTTP:
            self._count_other_protocol(speech, writer.get_extra_info("peername"))
        if speech is WireProtocol.GRPC:
            where = self._other_apis.get(speech, "this node does not serve it")
            writer.write(http2_response(wrong_protocol("HTTP, /metrics and /healthz", where)))
            writer.write_eof()
            async with asyncio.timeout(LINGER_S):
                while await reader.read(HEAD_BYTES_MAX):
                    pass
        if speech in (WireProtocol.TLS, WireProtocol.KAFKA, WireProtocol.GRPC):
            raise ConnectionAbortedError(f"the client speaks {speech.value}")
        return first

    def _count_other_protocol(self, speech: WireProtocol, peer: object) -> None:
        self.other_protocols[speech] = count = self.other_protocols.get(speech, 0) + 1
        now_s = asyncio.get_running_loop().time()
        if now_s - self._logged_s.get(speech, -OTHER_PROTOCOL_LOG_S) >= OTHER_PROTOCOL_LOG_S:
            self._logged_s[speech] = now_s
            where = self._other_apis.get(speech, "this node does not serve it")
            LOGGER.warning(
                "peer=%s speaks %s on port %d, which is for HTTP: %s (%d so far)",
                peer,
                speech.value,
                self.port,
                where,
                count,
            )

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, first: bytes) -> bool:
        """Answer one request, whose first bytes may have been read; return whether the connection stays open."""
        try:
            async with asyncio.timeout(HEAD_TIMEOUT_S):
                head = first + await reader.readuntil(b"\r\n\r\n")
        except asyncio.IncompleteReadError:
            return False
        except asyncio.LimitOverrunError:
            await _write(writer, Page("the head of the request is too long\n", 431), stays=False, has_body=True)
            return False
        lines = head.decode("latin-1").split("\r\n")
        parts = lines[0].split(" ")
        headers = {
            name.strip().lower(): value.strip() for name, _, value in (line.partition(":") for line in lines[1:])
        }
        if len(parts) != 3 or not parts[2].startswith("HTTP/1."):
            page = Page("this is HTTP/1.1: /metrics and /healthz\n", 400)
            await _write(writer, page, stays=False, has_body=True)
            return False
        method, target, version = parts
        stays = version == "HTTP/1.1" and headers.get("connection", "").lower() != "close"
        stays = stays and headers.get("content-length", "0") == "0" and "transfer-encoding" not in headers
        host, *_ = writer.get_extra_info("peername") or ("?",)
        context = RequestContext(Api.HTTP, listener="HTTP", client_host=str(host), peer=f"{host}")
        page = await self._page(method, target, context)
        if context.throttle_ms:
            await asyncio.sleep(context.throttle_ms / 1000)
        await _write(writer, page, stays=stays, has_body=method != "HEAD", throttle_ms=context.throttle_ms)
        return stays

    async def _page(self, method: str, target: str, context: RequestContext) -> Page:
        if method not in ("GET", "HEAD"):
            return Page("only GET\n", 405)
        handler = self._pages.get(urlsplit(target).path)
        if handler is None:
            return Page(f"there is: {' '.join(sorted(self._pages))}\n", 404)
        try:
            return await handler(context)
        except Exception:
            LOGGER.exception("path=%s failed", target)
            return Page("this page failed; the node's log says why\n", 500)


async def _write(
    writer: asyncio.StreamWriter, page: Page, *, stays: bool, has_body: bool, throttle_ms: int = 0
) -> None:
    body = page.body.encode()
    throttle = f"{THROTTLE_HEADER}: {throttle_ms}\r\n" if throttle_ms else ""
    head = (
        f"HTTP/1.1 {page.status} {_REASONS[page.status]}\r\nContent-Type: {page.content_type}\r\n{throttle}"
        f"Content-Length: {len(body)}\r\nConnection: {'keep-alive' if stays else 'close'}\r\n\r\n"
    )
    writer.write(head.encode() + (body if has_body else b""))
    await writer.drain()
