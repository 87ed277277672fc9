"""Records suspect and damaged ranges of a log.

    a sync fails    everything past the durable end is suspect: stored, so that a restart does not trust it
    rot is found    the log is damaged at `good_end`: it rejects appends, also after a restart, until it is repaired.
                    A start that finds that the segment has its checksum (it was restored just before) ends it

Both count in memory at once. On a full disk the suspect end is stored later. Damage is then not stored: a reader or a
scrub finds it again after a restart. A state store that is lost with its device stores nothing.
"""

import asyncio
import logging
from dataclasses import dataclass, replace

from tidelog.log import fallback_notes, log_scan
from tidelog.log import stored_state as stored
from tidelog.log.durability import Durability
from tidelog.log.log_context import LogContext
from tidelog.log.log_scan import ScrubResult
from tidelog.log.segments import Segments
from tidelog.model.errors import DamagedLogError, DiskFullError, StorageError
from tidelog.model.ids import Offset

LOGGER = logging.getLogger(__name__)

SUSPECT_RETRY_S = 1.0


@dataclass(frozen=True, slots=True)
class Damage:
    """Below `good_end` the log can be trusted; above it acknowledged bytes are missing or wrong."""

    good_end: Offset
    reason: str
    segment: int | None = None
    """Base offset of the sealed segment that fails its checksum, if that is the damage."""
    is_missing: bool = False
    """Segments past it were moved away: a restored segment does not end it. Not stored: the next start finds that they
    are missing."""


@dataclass(slots=True, eq=False)
class DamageState:
    """Owns the damage of an open log (`current`, None if it is sound) and the task that stores a suspect end."""

    _context: LogContext
    _segments: Segments
    _durability: Durability
    current: Damage | None
    suspect_task: "asyncio.Task[None] | None" = None

    def validate(self) -> None:
        damage, end = self.current, self._segments.end_offset
        assert damage is None or damage.good_end <= end, f"good up to {damage and damage.good_end} of {end}"

    def error(self) -> DamagedLogError:
        damage, path = self.current, self._context.path
        assert damage is not None, f"{path} is not damaged"
        return DamagedLogError(f"{path} is damaged: {damage.reason}", path=path, good_end=damage.good_end)

    def clear(self) -> None:
        """The log was truncated to its good end, or reset."""
        self.current = None

    def found_in(self, segment: int) -> None:
        """The damage is that this sealed segment fails its checksum."""
        assert self.current is not None, "the log is damaged"
        self.current = replace(self.current, segment=segment)

    def record_in_memory(self, damage: Damage) -> Damage:
        """Keep the damage with the lower good end, and return it."""
        current = self.current
        if current is None or damage.good_end < current.good_end:
            current = damage if current is None else replace(damage, is_missing=damage.is_missing or current.is_missing)
        elif damage.is_missing:
            current = replace(current, is_missing=True)
        self.current = current
        return current

    async def record(self, damage: Damage) -> None:
        """Reject appends from now on, also after a restart, until the log is repaired."""
        current = self.record_in_memory(damage)
        LOGGER.error("log=%s damaged good_end=%d reason=%s", self._context.path, damage.good_end, damage.reason)
        try:
            segment = None if current.is_missing else current.segment
            await self._context.commit({stored.DAMAGE: stored.encode_damage(current.good_end, current.reason, segment)})
        except DiskFullError as error:
            LOGGER.error("log=%s the damage is not stored: %s", self._context.path, error)

    def suspect(self) -> None:
        """A sync has failed: store the durable end, so that a restart truncates the log there."""
        if self.suspect_task is None and not self._context.is_closed and self.current is None:
            self.suspect_task = asyncio.get_running_loop().create_task(self._store_suspect())

    async def wait_suspect(self) -> None:
        if self.suspect_task is not None:
            await self.suspect_task

    async def _store_suspect(self) -> None:
        """Store the durable end of a suspect log. The store is on the same device and may fail with it: then a note
        in the directory of the log says it, and any error is retried until the log is closed."""
        context, durable_end = self._context, self._durability.durable_end
        is_logged = False
        while True:
            try:
                await context.commit({stored.SUSPECT: stored.encode_number("suspect", durable_end)})
                return
            except StorageError as error:
                if not is_logged:
                    LOGGER.error("log=%s durable_end=%d is not stored: %s", context.path, durable_end, error)
                is_logged = True
                if context.is_closed or self._leave_note(durable_end):
                    return
            await asyncio.sleep(SUSPECT_RETRY_S)

    def _leave_note(self, durable_end: int) -> bool:
        try:
            fallback_notes.leave(self._context.disk, self._context.path, stored.SUSPECT, durable_end)
        except StorageError:
            return False  # both are retried
        return True

    async def scrub(self, base_offset: int, *, has_gaps: bool) -> ScrubResult:
        """As `check`. A segment that fails makes the log damaged."""
        result = await self.check(base_offset, has_gaps=has_gaps)
        if result.fault is not None:
            await self.record(Damage(Offset(result.good_end), result.fault, base_offset))
        return result

    async def check(self, base_offset: int, *, has_gaps: bool) -> ScrubResult:
        """Check a sealed segment against the CRC of its file.

        A segment that was dropped, replaced or truncated while it was read has no fault: its bytes prove nothing.
        """
        context, segments = self._context, self._segments
        info, version = segments.info(base_offset), segments.version
        result = await context.work.run(log_scan.scrub, context.disk, context.path, info, has_gaps)
        if result.fault is None:
            return result
        async with context.lock:
            if context.is_closed or segments.version != version or info not in segments.sealed:
                return replace(result, fault=None)
        return result
