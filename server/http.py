"""A small HTTP/1.1 server for machines that look at a node: GET of a few paths, one answer, then the next request.

    request line and headers (at most HEAD_BYTES_MAX, within HEAD_TIMEOUT_S) -> a page or an error -> again, or close

It reads no bodies, knows no upgrade and no compression. Connections are bounded: what comes past `CONNECTIONS_MAX` is
closed at once, so that a scraper gone wild costs the node nothing.

Who speaks something else (gRPC, TLS, Kafka's protocol) is known by its first bytes: the log has a line that says what
it was and where it belongs, one of each kind in `WRONG_DOOR_S`. gRPC is answered in HTTP/2,
and its libraries show the text.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from urllib.parse import urlsplit

from tidelog.model.errors import TransportError
from tidelog.rpc.first_bytes import KNOWN_BYTES, Speech, http2_answer, of_client, wrong_door
from tidelog.server.listeners import Address

LOGGER = logging.getLogger(__name__)

HEAD_BYTES_MAX = 16 << 10
HEAD_TIMEOUT_S = 30.0
CONNECTIONS_MAX = 64
LINGER_S = 2.0
WRONG_DOOR_S = 10.0
_REASONS = {200: "OK", 400: "Bad Request", 404: "Not Found", 405: "Method Not Allowed", 500: "Internal Server Error"}
_REASONS |= {431: "Request Header Fields Too Large", 503: "Service Unavailable"}


@dataclass(frozen=True, slots=True)
class Page:
    body: str
    status: int = 200
    content_type: str = "text/plain; charset=utf-8"


Handler = Callable[[], Awaitable[Page]]


class HttpServer:
    """`pages` by path; `doors` says where clients belong that speak something else, in words."""

    def __init__(
        self, address: Address, pages: Mapping[str, Handler], doors: Mapping[Speech, str] | None = None
    ) -> None:
        self.port = 0
        self.strangers: dict[Speech, int] = {}
        """Connections that spoke something else."""
        self._doors = dict(doors or {})
        self._told_s: dict[Speech, float] = {}
        self._address = address
        self._pages = pages
        self._server: asyncio.Server | None = None
        self._open: set[asyncio.Task[None]] = set()

    async def start(self) -> None:
        """Raises `TransportError` if the address is taken."""
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
        """No more connections are taken."""
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
            LOGGER.debug("a connection of HTTP ended early")
        finally:
            self._open.discard(task)
            writer.close()

    async def _first_bytes(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bytes:
        """Looked at, and part of the first request; raises `ConnectionError` if there will be none."""
        try:
            async with asyncio.timeout(HEAD_TIMEOUT_S):
                first = await reader.readexactly(KNOWN_BYTES)
        except asyncio.IncompleteReadError as error:
            raise ConnectionResetError("it ended before it began") from error
        speech = of_client(first)
        if speech is not Speech.HTTP:
            self._stranger(speech, writer.get_extra_info("peername"))
        if speech is Speech.GRPC:
            where = self._doors.get(speech, "there is no such door here")
            writer.write(http2_answer(wrong_door("HTTP, /metrics and /healthz", where)))
            writer.write_eof()
            async with asyncio.timeout(LINGER_S):
                while await reader.read(HEAD_BYTES_MAX):
                    pass
        if speech in (Speech.TLS, Speech.KAFKA, Speech.GRPC):
            raise ConnectionAbortedError(f"it speaks {speech.value}")
        return first

    def _stranger(self, speech: Speech, peer: object) -> None:
        self.strangers[speech] = count = self.strangers.get(speech, 0) + 1
        now_s = asyncio.get_running_loop().time()
        if now_s - self._told_s.get(speech, -WRONG_DOOR_S) >= WRONG_DOOR_S:
            self._told_s[speech] = now_s
            where = self._doors.get(speech, "there is no such door here")
            LOGGER.warning(
                "peer=%s speaks %s on port %d, which is for HTTP: %s (%d so far)",
                peer,
                speech.value,
                self.port,
                where,
                count,
            )

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, first: bytes) -> bool:
        """One request, of which the first bytes may have been read; whether the connection stays."""
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
            told = "this is HTTP/1.1: /metrics and /healthz\n"
            await _write(writer, Page(told, 400), stays=False, has_body=True)
            return False
        method, target, version = parts
        stays = version == "HTTP/1.1" and headers.get("connection", "").lower() != "close"
        stays = stays and headers.get("content-length", "0") == "0" and "transfer-encoding" not in headers
        await _write(writer, await self._page(method, target), stays=stays, has_body=method != "HEAD")
        return stays

    async def _page(self, method: str, target: str) -> Page:
        if method not in ("GET", "HEAD"):
            return Page("only GET\n", 405)
        handler = self._pages.get(urlsplit(target).path)
        if handler is None:
            return Page(f"there is: {' '.join(sorted(self._pages))}\n", 404)
        try:
            return await handler()
        except Exception:
            LOGGER.exception("path=%s failed", target)
            return Page("this page failed; the node's log says why\n", 500)


async def _write(writer: asyncio.StreamWriter, page: Page, *, stays: bool, has_body: bool) -> None:
    body = page.body.encode()
    head = (
        f"HTTP/1.1 {page.status} {_REASONS[page.status]}\r\nContent-Type: {page.content_type}\r\n"
        f"Content-Length: {len(body)}\r\nConnection: {'keep-alive' if stays else 'close'}\r\n\r\n"
    )
    writer.write(head.encode() + (body if has_body else b""))
    await writer.drain()
