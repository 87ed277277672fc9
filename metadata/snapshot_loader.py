"""Loads a large snapshot in slices, so that the event loop stays responsive.

    await loader.prepare(data)      decodes; the old state is served meanwhile
    loader.take(data)               returns what was prepared of these very bytes; otherwise decodes inline

An image of 100,000 partitions takes more than a second to build. A helper process would not help: its result has to be
built again on this side. A snapshot of one chunk is loaded in one turn.
"""

import asyncio
import gc

from tidelog.metadata.snapshot import RECORDS, Snapshot, SnapshotReader, chunks, decode_snapshot


class SnapshotLoader:
    """Holds at most one snapshot, from `prepare` until it is taken or another one is prepared."""

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
                    # Loaded objects live long, and the collector would scan all of them again and again while they
                    # grow in number. Cyclic garbage of this moment is never collected either.
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
