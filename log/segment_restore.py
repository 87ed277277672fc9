"""Restores a sealed segment whose file fails its checksum from copies of its bytes (decision 31).

A copy proves itself by the size and CRC-32C that were stored when the segment was sealed. It replaces the file by one
rename: a crash leaves one or the other, and nothing is cut. `combine` makes a sound copy of two damaged ones.

Files of a segment are read and removed in a helper process. No call of it takes long: there may be one helper for all
logs of a node.
"""

import logging
from collections.abc import Iterator, Sequence
from contextlib import closing
from itertools import islice

from crc32c import crc32c

from tidelog.log import stored_state as stored
from tidelog.log.log_state import LogState
from tidelog.log.segment import SegmentInfo
from tidelog.world.disk import Disk
from tidelog.world.work import Work

LOGGER = logging.getLogger(__name__)

PIECE_BYTES = 1 << 20
RUNS_MAX = 4
"""Places where two copies differ: all 16 combinations are tried."""
BLOCK_BYTES = 4096
CALL_BYTES = 64 << 20
"""Of each copy that one call of a helper reads."""

Run = tuple[int, int]
"""[start, end) of bytes where two copies differ."""


class SegmentRestore:
    """Restores segments of an open log. Owns no state."""

    __slots__ = ("_state",)

    def __init__(self, state: LogState) -> None:
        self._state = state

    async def install(self, info: SegmentInfo, path: str) -> bool:
        """Replace the file of a sealed segment by the one at `path`, which has its size and CRC. The damage that it was
        ends. Return False if the segment has changed meanwhile, or it is not sure that it is replaced. The caller
        removes the copy."""
        context, segments, damage = self._state.context, self._state.segments, self._state.damage
        async with context.lock:
            if context.is_closed or info not in segments.sealed:
                return False
            target = segments.file_path(info.base_offset)
            with closing(context.disk.open(path)) as copy:
                is_whole = copy.size == info.size
                if is_whole:
                    await context.disk.sync_many([copy])
            if not is_whole:
                return False
            self._state.durability.forget(target)
            is_replaced = await context.work.run(replace_file, context.disk, path, target)
            self._state.durability.forget(target)  # readers have opened it meanwhile
            segments.changed()
            await self._state.durability.flush_names(context.path)
            if not is_replaced:
                return False
            current = damage.current
            if current is not None and current.segment == info.base_offset and not current.is_missing:
                await context.commit({stored.DAMAGE: None})
                damage.clear()
        LOGGER.warning("log=%s segment=%d is restored byte by byte", context.path, info.base_offset)
        return True


def write_piece(disk: Disk, path: str, position: int, data: bytes) -> None:
    """Runs in a helper process, possibly twice if a helper dies: write a piece of a copy, whose end it is."""
    with closing(disk.open(path, create=True)) as file:
        if file.size > position:
            file.truncate(position)
        file.append(data)


def replace_file(disk: Disk, path: str, target: str) -> bool:
    """Return False if there is no file at `path`, possibly since this call is repeated. Runs in a helper process: to
    free the space of the old file takes a while."""
    if not disk.exists(path):
        return False
    disk.rename(path, target)
    return True


async def combine(work: Work, disk: Disk, own: str, other: str, target: str, size: int, crc: int) -> bool:
    """Write a copy with this size and CRC to `target`, of the bytes of two others; return False if there is none.

    Where they differ, each run of differing bytes is taken from one or the other, in all combinations.
    """
    runs = await _differing_runs(work, disk, own, other, size)
    calls = [(at, min(at + CALL_BYTES, size)) for at in range(0, size, CALL_BYTES)]
    for mask in range(1 << len(runs)) if runs is not None else ():
        chosen = [run for at, run in enumerate(runs or ()) if mask >> at & 1]
        total = 0
        for start, end in calls:
            total = await work.run(crc_of_combined, disk, own, other, start, end, chosen, total)
        if total == crc:
            for start, end in calls:
                await work.run(write_combined, disk, own, other, target, start, end, chosen)
            return True
    return False


def crc_of_combined(disk: Disk, own: str, other: str, start: int, end: int, chosen: Sequence[Run], crc: int) -> int:
    """The CRC up to `end`, if that up to `start` is `crc`. Runs in a helper process."""
    for piece in _combined(disk, own, other, start, end, chosen):
        crc = crc32c(piece, crc)
    return crc


def write_combined(disk: Disk, own: str, other: str, target: str, start: int, end: int, chosen: Sequence[Run]) -> None:
    """Runs in a helper process."""
    for number, piece in enumerate(_combined(disk, own, other, start, end, chosen)):
        write_piece(disk, target, start + number * PIECE_BYTES, piece)


def _pieces(disk: Disk, path: str, start: int, end: int) -> Iterator[bytes]:
    """These bytes of a file; zeros where it is shorter."""
    with closing(disk.open(path)) as file:
        for position in range(start, end, PIECE_BYTES):
            length = min(PIECE_BYTES, end - position)
            yield file.read(position, length).ljust(length, b"\0")


async def _differing_runs(work: Work, disk: Disk, own: str, other: str, size: int) -> list[Run] | None:
    """Where the copies differ: single bytes if they are few, else runs of bytes, else of blocks; None if in too many
    places."""
    for step, joins in ((1, False), (1, True), (BLOCK_BYTES, True)):
        runs: list[Run] = []
        for start in range(0, size, CALL_BYTES):
            more = await work.run(differing_runs, disk, own, other, start, min(start + CALL_BYTES, size), step, joins)
            if joins and runs and more and runs[-1][1] == more[0][0]:
                more[0] = runs.pop()[0], more[0][1]
            runs += more
            if len(runs) > RUNS_MAX:
                break
        else:
            return runs
    return None


def differing_runs(disk: Disk, own: str, other: str, start: int, end: int, step: int, joins: bool) -> list[Run]:
    """The first ones in this range, one more than may be. Runs in a helper process."""
    return list(islice(_runs(disk, own, other, start, end, step, joins=joins), RUNS_MAX + 1))


def _runs(disk: Disk, own: str, other: str, first: int, last: int, step: int, *, joins: bool) -> Iterator[Run]:
    """Differing units of `step` bytes; `joins`: one run of those that follow each other."""
    current: Run | None = None
    pairs = zip(_pieces(disk, own, first, last), _pieces(disk, other, first, last), strict=True)
    for number, (mine, theirs) in enumerate(pairs):
        if mine == theirs:
            continue
        for block in range(0, len(mine), BLOCK_BYTES):
            if mine[block : block + BLOCK_BYTES] == theirs[block : block + BLOCK_BYTES]:
                continue
            for at in range(block, min(block + BLOCK_BYTES, len(mine)), step):
                if mine[at : at + step] == theirs[at : at + step]:
                    continue
                start = first + number * PIECE_BYTES + at
                end = min(start + step, last)
                if joins and current is not None and current[1] == start:
                    current = current[0], end
                    continue
                if current is not None:
                    yield current
                current = start, end
    if current is not None:
        yield current


def _combined(disk: Disk, own: str, other: str, first: int, last: int, chosen: Sequence[Run]) -> Iterator[bytes]:
    """The bytes of `own`, in the chosen runs those of `other`."""
    pairs = zip(_pieces(disk, own, first, last), _pieces(disk, other, first, last), strict=True)
    for number, (mine, theirs) in enumerate(pairs):
        at = first + number * PIECE_BYTES
        piece = bytearray(mine)
        for start, end in chosen:
            low, high = max(start - at, 0), min(end - at, len(piece))
            if low < high:
                piece[low:high] = theirs[low:high]
        yield bytes(piece)
