"""The storage of a Raft member against its devices: each member by itself, so that the others cannot mask it.

    after an event that changed the log   the log's and the storage's invariants; every `AUDIT_STRIDE`th time the log
                                          against its files and its state store (`log_audit`)
    when it has started                   it recovers only if something of its files was harmed
    when an ack leaves                    every entry that it acknowledges is on the device, as a loss of power would
                                          leave it, and is the entry that the core has

Not of a member whose files a fault has harmed: nobody knows which of their bytes still count.
"""

from __future__ import annotations

from collections.abc import Callable

from simulation.log_audit import LogAudit, can_audit
from simulation.log_walk import Found, LogWalk
from simulation.stored_promises import newest_snapshot
from tidelog.log.log import Log
from tidelog.model.ids import Epoch, Offset
from tidelog.raft.core import RaftCore
from tidelog.raft.entries import decode_entries
from tidelog.raft.messages import AppendResponse, Message
from tidelog.raft.storage import RaftStorage

AUDIT_STRIDE = 16

Fail = Callable[[str, str], None]


class RaftAudit:
    """Of one process of a member, once its storage is open."""

    def __init__(self, name: str, storage: RaftStorage, core: Callable[[], RaftCore], fail: Fail) -> None:
        self.audited = 0
        self._name = name
        self._storage = storage
        self._core = core
        self._fail = fail
        self._log: Log = storage.log
        self._audit = LogAudit(self._log)
        self._walk = LogWalk(self._log, durable=True)
        self._state: tuple[object, ...] = ()
        self._changes = 0

    def began(self) -> None:
        """The process has opened its files, none of which a fault has harmed."""
        until = self._core().recovering_until
        if until is not None:
            self._fail(self._name, f"recovers up to {until}, and nothing of what it has stored was harmed")

    def look(self) -> None:
        """After an event of this process."""
        log = self._log
        durability = log.durability
        state = (log.segments.end_offset, durability.durable_end, durability.generation, log.mark)
        if state == self._state or not can_audit(log) or self._storage._progress is not None:
            return
        self._state = state
        self._changes += 1
        self._check("the log", lambda: log.validate(thorough=False))
        self._check("the storage", self._storage.validate)
        if not self._changes % AUDIT_STRIDE:
            self.run()

    def run(self) -> None:
        """Compare the log with its files."""
        if can_audit(self._log) and self._storage._progress is None:
            self._check("the log and its files", self._run)

    def _run(self) -> None:
        self._log.validate()
        self.audited += self._audit.run()

    def left(self, message: Message) -> None:
        """A message leaves."""
        if isinstance(message, AppendResponse) and message.counts and not message.rejected:
            match, progress = message.match, self._storage._progress
            if progress is not None and progress.tail is not None:
                return  # a truncation has put entries that it must not lose into the state store
            if match > newest_snapshot(self._storage) and not self._log.is_closed:
                self._check("what it acknowledges", lambda: self._check_device(match))

    def _check_device(self, match: Offset) -> None:
        """Entries that the core is about to replace may still be on the device, behind what it counts as durable."""
        walk, core = self._walk, self._core()
        if walk.is_stale:
            walk.restart()
        end = int(self._log.end_offset)
        while walk.offset < match:
            place = (walk.segment, walk.position, walk.offset)
            found = next(walk.batches(end), None)
            assert found is not None, f"acknowledges entries up to {match}, its device has them up to {walk.offset}"
            self._compare(found, min(match, core.durable_end), core)
            if found.header.next_offset > match:
                walk.segment, walk.position, walk.offset = place
                return

    def _compare(self, found: Found, end: Offset, core: RaftCore) -> None:
        log = core.log
        first = Offset(found.header.base_offset)
        for offset, entry in decode_entries(bytes(found.data), first=first, last_epoch=Epoch(0)):
            if log.start <= offset < end:
                held = log.entries[offset - log.start]
                assert held == entry, f"{entry} is on the device at {offset}, in memory {held}"

    def _check(self, what: str, check: Callable[[], object]) -> None:
        try:
            check()
        except AssertionError as error:
            self._fail(self._name, f"Invariant of {what}: {error}")
