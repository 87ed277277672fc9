"""Compares what a state store says of a log with the log itself, while nobody holds the log's lock.

    mark, start, epochs    are those of the log, unless it says that it has newer ones to store
    segments               each sealed segment that the mark is past has its info, and no other one has
    producers              the snapshots are those that the log counts with
    clean, suspect, ...    what only a stopped or a damaged log has is gone
    high watermark         is not past the log end

An open log that differs works as long as it runs: the next start would go by the wrong value. What was read once is not
decoded again before it changes; a value whose bits were flipped is left to recovery.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tidelog.log import stored_state as stored
from tidelog.log.config import FlushMode
from tidelog.log.log import Log
from tidelog.log.segment import RecoveryMark
from tidelog.model.errors import CorruptStateError
from tidelog.world.sealing import unseal
from tidelog.world.simulated.store import SimStore

STOPPED = (stored.CLEAN, stored.SUSPECT, stored.UNSYNCED, stored.DAMAGE)
"""Fields that a log has only before it is opened, or when it has failed or is damaged."""


class StoreAudit:
    """Of one open log. `check` asserts."""

    def __init__(self, log: Log) -> None:
        self._log = log
        store = log.store
        while not isinstance(store, SimStore):
            store = store._store  # type: ignore[attr-defined]  # that of a directory, which notes failures
        self._values = store._device.stored
        self._read: dict[bytes, tuple[bytes, Any]] = {}
        """By field: the bytes in the store when they were read last, and their meaning."""
        self._compared: tuple[Any, ...] = ()
        """What the log was when keys were compared last."""

    def read(self, field: bytes, decode: Callable[[bytes], Any]) -> Any:
        """What the store has; None if it has nothing, or nothing that can be read."""
        key = self._log.prefix + field
        sealed = self._values.get(key)
        if sealed is None:
            return None
        known = self._read.get(field)
        if known is None or known[0] != sealed:
            try:
                value = decode(unseal(key, sealed, path=self._log.path))
            except CorruptStateError:
                value = None
            known = self._read[field] = (sealed, value)
        return known[1]

    def mark(self) -> RecoveryMark | None:
        mark: RecoveryMark | None = self.read(stored.MARK, stored.decode_mark)
        return mark

    def check(self) -> None:
        log = self._log
        end = int(log.end_offset)
        entries = self.read(stored.EPOCHS, _epochs)
        start = entries[-1][1] if entries else None
        assert start is None or start <= end, f"stored epochs are past the end: {start}"
        offset = self.read(stored.HIGH_WATERMARK, _high_watermark)
        assert offset is None or offset <= end, f"the stored high watermark {offset} is past the end {end}"
        if log.lock.locked():
            return
        if not log._epochs.is_unsaved and entries is not None:
            known = [(int(epoch), int(first)) for epoch, first in log.epochs]
            assert entries == known, f"the epochs {entries} are stored, and {known} count as stored"
        begin = self.read(stored.START, lambda data: stored.decode_number("start", data))
        assert begin in (None, log.start_offset), f"the start {begin} is stored, it is {log.start_offset}"
        mark, checkpoint = self.mark(), log._checkpoint
        assert mark in (None, checkpoint.mark), f"{mark} is stored, {checkpoint.mark} counts as stored"
        for field in STOPPED:
            assert log.prefix + field not in self._values, f"'{field.decode()}' is stored of a log that is open"
        has_intent = log.prefix + stored.INTENT in self._values
        assert has_intent == (checkpoint.intent is not None), f"intent: stored {has_intent}, {checkpoint.intent}"
        assert not log.gaps or log.prefix + stored.GAPS in self._values, "it has gaps, and that is not stored"
        if log.config.flush_mode is FlushMode.PAGE_CACHE or checkpoint.is_page_cache:
            assert log.prefix + stored.PAGE_CACHE in self._values, "that it acknowledges before a sync is not stored"
        state = (checkpoint.mark, log.segments.version, log.segments.first_offset, len(self._values))
        if state != self._compared:
            self._check_keys()
            self._compared = state

    def _check_keys(self) -> None:
        log, checkpoint = self._log, self._log._checkpoint
        bases, snapshots = set[int](), list[int]()
        at = len(log.prefix)
        for key in self._values:
            if key.startswith(log.prefix):
                if key.startswith(stored.SEGMENT, at):
                    bases.add(int.from_bytes(key[-8:], "big"))
                elif key.startswith(stored.PRODUCERS, at):
                    snapshots.append(int.from_bytes(key[-8:], "big"))
        assert sorted(snapshots) == checkpoint.snapshots, (
            f"snapshots of the producers are stored at {sorted(snapshots)}, and count at {checkpoint.snapshots}"
        )
        pending = checkpoint._pending_infos
        known = {int(info.base_offset): info for info in log.segments.sealed if info.base_offset not in pending}
        assert bases <= set(known), f"segments {sorted(bases - set(known))} are stored, there are {sorted(known)}"
        if not (log.report.lost or log.report.rebuilt):
            assert bases == set(known), f"segments {sorted(set(known) - bases)} are not stored"
        for base in bases:
            info = self.read(stored.SEGMENT + base.to_bytes(8, "big"), stored.decode_segment)
            assert info in (None, known[base]), f"{info} is stored, the segment is {known[base]}"


def _epochs(data: bytes) -> list[tuple[int, int]]:
    return [(int(epoch), int(start)) for epoch, start in stored.decode_epochs(data)]


def _high_watermark(data: bytes) -> Any:
    return stored.decode("high-watermark", data)["offset"]
