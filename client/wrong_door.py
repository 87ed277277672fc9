"""What stands at an address where gRPC could not connect: asked once, by one connection of its own.

gRPC tells HTTP/1 servers by itself, and shows what another door of a node says of itself (`told_in`); of any other it
says only that the socket was closed. Then, and only then, `look` connects, begins as gRPC does, and reads the first
bytes of the answer (`rpc.first_bytes`). A door that is ours costs nothing: it is never looked at. An address is looked
at again after `AGAIN_S` at the earliest.
"""

from __future__ import annotations

import asyncio
import contextlib

from tidelog.rpc.first_bytes import EMPTY_SETTINGS, PREFACE, Speech, of_server, told_in

LOOK_S = 1.0
AGAIN_S = 10.0
ADDRESSES_MAX = 1_024
FIRST_BYTES_MAX = 1_024
USUAL = "9292 is the usual gRPC port"
_SENTENCES = {
    Speech.HTTP: f"speaks HTTP, not gRPC (the metrics port?); {USUAL}",
    Speech.TLS: f"speaks TLS, and this client plain text: give it the address of a plaintext listener; {USUAL}",
    Speech.UNKNOWN: f"answers, but not with gRPC; {USUAL}",
}
CLOSED = f"hangs up on gRPC without a word, as Kafka's port (9092) or one for TLS would; {USUAL}"


def sentence(answer: bytes) -> str | None:
    """What to say of a server that answered so; None if it is gRPC after all."""
    if not answer:
        return CLOSED
    if (door := told_in(answer.decode("latin-1"))) is not None:
        return f"is {door}"
    return _SENTENCES.get(of_server(answer))


class DoorLook:
    """Remembers what was found, for a while. Used on one event loop."""

    def __init__(self) -> None:
        self._found: dict[str, tuple[float, str | None]] = {}

    async def look(self, address: str) -> str | None:
        """What is wrong with it, in words; None if nobody knows."""
        now_s = asyncio.get_running_loop().time()
        known = self._found.get(address)
        if known is not None and now_s - known[0] < AGAIN_S:
            return known[1]
        if known is None and len(self._found) >= ADDRESSES_MAX:
            del self._found[next(iter(self._found))]
        self._found[address] = (now_s, None)  # who asks meanwhile does not look as well
        found = await _ask(address)
        self._found[address] = (now_s, found)
        return found


async def _ask(address: str) -> str | None:
    host, _, port = address.rpartition(":")
    if not port.isdigit():
        return None
    try:
        async with asyncio.timeout(LOOK_S):
            reader, writer = await asyncio.open_connection(host.strip("[]"), int(port))
            try:
                writer.write(PREFACE + EMPTY_SETTINGS)
                await writer.drain()
                return sentence(await _first_bytes(reader))
            finally:
                writer.close()
    except (OSError, TimeoutError):
        return None  # it is not there, or silent: gRPC has said as much


async def _first_bytes(reader: asyncio.StreamReader) -> bytes:
    """At least 16, and what came with them; fewer if it hangs up before, by a reset as often as in order."""
    data = b""
    with contextlib.suppress(ConnectionError):
        while len(data) < 16 and (more := await reader.read(FIRST_BYTES_MAX - len(data))):
            data += more
    return data
