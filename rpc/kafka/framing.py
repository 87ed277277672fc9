"""Requests out of a stream of bytes, however it is cut. Pure; it decodes nothing.

    size (4 bytes, big-endian)   request (size bytes)   size   request ...

Bytes are read where `buffer` says and `received` takes note of them. Then, in this order:

    next_size      the size of the next request, as soon as its 4 bytes are here; None before that
    accept         somebody has found room for it: the request, if all of it is here; else it is `arriving`, the rest of
                   it is read straight into its own memory, and `received` gives it when it is whole
    keep           nothing more is taken now: what is left is moved out of the place that all connections share
    clear          nothing more is taken at all

Invariants: at most one request is arriving, and while it is, nothing is left over. The memory of one that is arriving
grows as its bytes come (`FIRST_BYTES`, then twofold), never by what its sender says that it will send.
"""

from __future__ import annotations

SIZE_BYTES = 4
FIRST_BYTES = 4 << 20
SMALL_BYTES = 64 << 10
"""A request up to here is copied into `bytes` of its own."""

Request = bytes | memoryview


class Framing:
    """Of one connection. `shared` is where bytes arrive first, for all connections of a loop: whoever is read takes
    note of it before another one is."""

    __slots__ = ("_filled", "_frame", "_given", "_kept", "_left", "_shared", "_size", "_view")

    def __init__(self, shared: memoryview) -> None:
        self._shared = shared
        self._left = shared[:0]
        """What was read and is not part of a request yet; in `_shared`, or in `_kept`."""
        self._kept = b""
        self._frame: bytearray | None = None
        self._view = self._given = shared[:0]
        self._filled = self._size = 0

    @property
    def left(self) -> int:
        """Bytes that were read and are of no request yet."""
        return len(self._left)

    @property
    def is_arriving(self) -> bool:
        return self._frame is not None

    @property
    def missing(self) -> int:
        """Bytes that the arriving request has not got yet."""
        return self._size - self._filled

    @property
    def arrived(self) -> int:
        """Bytes that it has."""
        return self._filled

    @property
    def is_incomplete(self) -> bool:
        """The sender has begun a request, or its size, and not finished it."""
        return self._frame is not None or bool(self._left)

    def head(self, count: int) -> bytes:
        """The first bytes that are left."""
        return bytes(self._left[:count])

    def buffer(self, most: int) -> memoryview:
        """Where the next bytes go; about `most` of them, if they are not of a request that is arriving."""
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
        # Whoever read into it is done: nothing may point into what is moved.
        self._given.release()
        self._view.release()
        # In place, without a copy where the allocator can move pages.
        self._frame += bytes(min(len(self._frame), self._size - len(self._frame)))
        self._view = memoryview(self._frame)

    def received(self, count: int) -> Request | None:
        """So many bytes are in the buffer; the request that they complete, if one was arriving."""
        if self._frame is None:
            self._left = self._shared[: len(self._kept) + count]
            self._kept = b""
            return None
        self._filled += count
        return self._finish() if self._filled == self._size else None

    def _finish(self) -> Request:
        frame, self._frame = self._frame, None
        assert frame is not None, "it was arriving"
        # Not even a view of what was read last: it would keep all of the request after its answer.
        self._view = self._given = self._shared[:0]
        self._filled = self._size = 0
        return bytes(frame) if len(frame) <= SMALL_BYTES else memoryview(frame).toreadonly()

    def next_size(self) -> int | None:
        left = self._left
        return int.from_bytes(left[:SIZE_BYTES], "big", signed=True) if len(left) >= SIZE_BYTES else None

    def accept(self, size: int) -> Request | None:
        """The next request, of the size that `next_size` has given; None if it is arriving."""
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
        """What is no request yet is let go: nothing of it will be taken any more."""
        self._frame = None
        self._view = self._given = self._left = self._shared[:0]
        self._kept = b""
        self._filled = self._size = 0
