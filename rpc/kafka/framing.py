"""Splits a stream of bytes into requests. Pure; it decodes nothing.

    size (4 bytes, big-endian)   request (size bytes)   size   request ...

The transport reads into `buffer`, then calls `received`. Then, in this order:

    next_size      returns the size of the next request as soon as its 4 bytes are here, else None
    accept         the caller has memory for it: returns the request if all of it is here; else it is `arriving`, the
                   rest is read into its own memory, and `received` returns it when it is complete
    keep           moves the remaining bytes out of the buffer that all connections share
    clear          drops all bytes

Invariants: at most one request is arriving, and while it is, no other bytes remain. The memory of an arriving request
grows with its bytes (`FIRST_BYTES`, then doubles), never by the size that its sender announces.
"""

from __future__ import annotations

SIZE_BYTES = 4
FIRST_BYTES = 4 << 20
SMALL_BYTES = 64 << 10
"""A request up to this size is copied into its own `bytes`."""

Request = bytes | memoryview


class Framing:
    """Of one connection. `shared` is the read buffer of all connections of a loop: each takes its bytes out before
    another one is read."""

    __slots__ = ("_filled", "_frame", "_given", "_kept", "_left", "_shared", "_size", "_view")

    def __init__(self, shared: memoryview) -> None:
        self._shared = shared
        self._left = shared[:0]
        """Bytes that belong to no request yet; in `_shared` or in `_kept`."""
        self._kept = b""
        self._frame: bytearray | None = None
        self._view = self._given = shared[:0]
        self._filled = self._size = 0

    @property
    def left(self) -> int:
        """Bytes that belong to no request yet."""
        return len(self._left)

    @property
    def missing(self) -> int:
        """Missing bytes of the arriving request."""
        return self._size - self._filled

    @property
    def arrived(self) -> int:
        """Bytes of the arriving request that are here."""
        return self._filled

    @property
    def is_incomplete(self) -> bool:
        """Whether a request, or its size, is incomplete."""
        return self._frame is not None or bool(self._left)

    def head(self, count: int) -> bytes:
        """Returns the first remaining bytes."""
        return bytes(self._left[:count])

    def buffer(self, most: int) -> memoryview:
        """Returns the buffer for the next bytes; about `most`, unless a request is arriving."""
        if self._frame is not None:
            if self._filled == len(self._frame):
                self._grow()
            self._given = self._view[self._filled :]
            return self._given
        count = len(self._kept)
        assert count < len(self._shared), "what is left is taken before more is read"
        self._shared[:count] = self._kept
        return self._shared[count : count + most]

    def _grow(self) -> None:
        assert self._frame is not None, "there is one"
        # No view may point into memory that moves.
        self._given.release()
        self._view.release()
        # In place, without a copy where the allocator can move pages.
        self._frame += bytes(min(len(self._frame), self._size - len(self._frame)))
        self._view = memoryview(self._frame)

    def received(self, count: int) -> Request | None:
        """`count` bytes are in the buffer; returns the request that they complete, if one was arriving."""
        if self._frame is None:
            self._left = self._shared[: len(self._kept) + count]
            self._kept = b""
            return None
        self._filled += count
        return self._finish() if self._filled == self._size else None

    def _finish(self) -> Request:
        frame, self._frame = self._frame, None
        assert frame is not None, "it was arriving"
        # Also drop the view of the last read: it would keep the whole request alive after its response.
        self._view = self._given = self._shared[:0]
        self._filled = self._size = 0
        return bytes(frame) if len(frame) <= SMALL_BYTES else memoryview(frame).toreadonly()

    def next_size(self) -> int | None:
        left = self._left
        return int.from_bytes(left[:SIZE_BYTES], "big", signed=True) if len(left) >= SIZE_BYTES else None

    def accept(self, size: int) -> Request | None:
        """Returns the next request, of the size that `next_size` returned; None if it is arriving."""
        end = SIZE_BYTES + size
        left = self._left
        if len(left) >= end:
            self._left = left[end:]
            return bytes(left[SIZE_BYTES:end])
        here = len(left) - SIZE_BYTES
        self._frame = bytearray(min(size, max(FIRST_BYTES, here)))
        self._view = memoryview(self._frame)
        self._view[:here] = left[SIZE_BYTES:]
        self._filled, self._size = here, size
        self._left = self._shared[:0]
        self._kept = b""
        return None

    def keep(self) -> None:
        """Idempotent."""
        self._kept = bytes(self._left)
        self._left = memoryview(self._kept)

    def clear(self) -> None:
        """Discards all buffered bytes."""
        self._frame = None
        self._view = self._given = self._left = self._shared[:0]
        self._kept = b""
        self._filled = self._size = 0
