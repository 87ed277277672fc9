"""Reading a large snapshot without holding up the event loop: chunk by chunk, with turns for others in between.

    await loader.prepare(data)      decodes; the state that is served meanwhile is the old one
    loader.take(data)               what was prepared of these very bytes; or decodes on the spot

An image of 100,000 partitions takes more than a second to build. A helper process would not help: what it returns has
to be built again on this side. A snapshot of one chunk is read at once, without a turn for anybody.
"""

from __future__ import annotations

import asyncio
import gc

from tidelog.metadata.snapshot import RECORDS, Snapshot, SnapshotReader, chunks, decode_snapshot


class SnapshotLoader:
    """Keeps at most one snapshot, from `prepare` until it is taken or another one is prepared."""

    __slots__ = ("_ready",)

    def __init__(self) -> None:
        self._ready: tuple[bytes, Snapshot] | None = None

    async def prepare(self, data: bytes) -> None:
        """Raises `CorruptStateError` as `decode_snapshot` does."""
        self._ready = None
        reader = SnapshotReader()
        is_first = True
        for kind, payload in chunks(data):
            if kind == RECORDS:
                if not is_first:
                    # What is loaded is there to stay. The collector would look through all of it again and again while
                    # it grows, for longer each time. (What is garbage in cycles at this moment stays as well.)
                    gc.freeze()
                    await asyncio.sleep(0)
                is_first = False
            reader.take(kind, payload)
        self._ready = (data, reader.finish())

    def take(self, data: bytes) -> Snapshot:
        ready, self._ready = self._ready, None
        if ready is not None and ready[0] is data:
            return ready[1]
        return decode_snapshot(data)
