"""Probes which protocol an address speaks after gRPC failed to connect, with one connection of its own.

gRPC itself recognizes HTTP/1 servers and shows the hint of a node's other listeners (`hint_in`); otherwise it reports
only a closed socket. Then `probe` connects, starts like gRPC, and reads the first bytes of the response
(`rpc.protocol_sniffing`). Successful connections are never probed, and an address at most once per `AGAIN_S`.
"""

from __future__ import annotations

import asyncio
import contextlib

from tidelog.rpc.protocol_sniffing import EMPTY_SETTINGS, PREFACE, WireProtocol, hint_in, of_server

PROBE_S = 1.0
AGAIN_S = 10.0
ADDRESSES_MAX = 1_024
FIRST_BYTES_MAX = 1_024
USUAL = "9292 is the usual gRPC port"
_SENTENCES = {
    WireProtocol.HTTP: f"speaks HTTP, not gRPC (the metrics port?); {USUAL}",
    WireProtocol.TLS: f"speaks TLS, and this client plain text: use the address of a plaintext listener; {USUAL}",
    WireProtocol.UNKNOWN: f"answers, but not with gRPC; {USUAL}",
}
CLOSED = f"closes gRPC connections without a response, as Kafka's port (9092) or one for TLS would; {USUAL}"


def sentence(answer: bytes) -> str | None:
    """Describe a server by its response; None if it speaks gRPC."""
    if not answer:
        return CLOSED
    if (hint := hint_in(answer.decode("latin-1"))) is not None:
        return f"is {hint}"
    return _SENTENCES.get(of_server(answer))


class ProtocolProbe:
    """Caches results. Used on one event loop."""

    def __init__(self) -> None:
        self._found: dict[str, tuple[float, str | None]] = {}

    async def probe(self, address: str) -> str | None:
        """Return what is wrong with the address, in words; None if unknown."""
        now_s = asyncio.get_running_loop().time()
        known = self._found.get(address)
        if known is not None and now_s - known[0] < AGAIN_S:
            return known[1]
        if known is None and len(self._found) >= ADDRESSES_MAX:
            del self._found[next(iter(self._found))]
        self._found[address] = (now_s, None)  # concurrent callers do not probe as well
        problem = await _ask(address)
        self._found[address] = (now_s, problem)
        return problem


async def _ask(address: str) -> str | None:
    host, _, port = address.rpartition(":")
    if not port.isdigit():
        return None
    try:
        async with asyncio.timeout(PROBE_S):
            reader, writer = await asyncio.open_connection(host.strip("[]"), int(port))
            try:
                writer.write(PREFACE + EMPTY_SETTINGS)
                await writer.drain()
                return sentence(await _first_bytes(reader))
            finally:
                writer.close()
    except (OSError, TimeoutError):
        return None  # unreachable or silent, as gRPC has reported


async def _first_bytes(reader: asyncio.StreamReader) -> bytes:
    """Read at least 16 bytes; fewer if the peer closes or resets the connection."""
    data = b""
    with contextlib.suppress(ConnectionError):
        while len(data) < 16 and (more := await reader.read(FIRST_BYTES_MAX - len(data))):
            data += more
    return data
