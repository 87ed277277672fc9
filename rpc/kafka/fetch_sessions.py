"""Fetch sessions (KIP-227): the broker remembers a client's partitions, so messages carry only changes. Pure.

A session holds each partition's fetch position and the offsets of its last response. A request names a session (0 is
none) and its epoch:

    session   epoch    the request                              partitions   the response
    any       -1       needs no session; ends the named one     as named     all of them, session 0
    any       0        starts one; ends the named one           as named     all of them, the new session; 0 if it
                                                                             is not cached
    s         n > 0    continues s: named partitions are added  those of s   changed ones, session s
                       or changed, forgotten ones removed
    s         n > 0    ... and no partition is left             none         empty, session 0: s has ended
    unknown   n > 0                                                          FETCH_SESSION_ID_NOT_FOUND
    s         another  than the one that s expects                           INVALID_FETCH_SESSION_EPOCH
    s         n > 0    topic ids if s has names, or vice versa               FETCH_SESSION_TOPIC_ID_ERROR

The expected epoch rises with each request, and 1 follows 2^31 - 1: this detects a lost response or a second request in
flight. A rejected client starts a new session. A partition has changed if it has data, an error, a diverging epoch or a
preferred replica, or if its offsets differ from those sent last; after an error its offsets are sent again. A partition
with data moves to the end, so the next response starts with the others.

A new session is cached while there are fewer than `slots_max`. Otherwise it evicts the least recently used session if
that was idle for `idle_ms`; else the smallest one older than `idle_ms`, unless that is larger than the new one.
Consumers of many partitions keep their sessions (followers, which Kafka keeps longest, do not read here). Without a
cached session, or with a name that no topic can have, a client gets full responses.

Invariants (`validate`): sessions are ordered by last use; each has at least one partition and at most
`session_partitions_max`; all together have `partitions`, at most `partitions_max`.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from tidelog.metadata.topics import NAME_LENGTH_MAX
from tidelog.model.errors import ErrorCode, TidelogError

if TYPE_CHECKING:
    from random import Random

NO_SESSION = 0
FINAL_EPOCH, FIRST_EPOCH = -1, 0
EPOCH_MAX = ID_MAX = (1 << 31) - 1

Topic = str | bytes
"""A name or an id: sessions of version 13 and later have ids."""
Key = tuple[Topic, int]


class FetchSessionError(TidelogError):
    """The request does not match its session; the client starts a new one."""

    def __init__(self, message: str, code: ErrorCode) -> None:
        super().__init__(message)
        self.code = code


@dataclass(slots=True, eq=False)
class SessionPartition:
    """The fetch position of a partition, and the offsets of its last response."""

    topic: Topic
    partition: int
    offset: int
    bytes_max: int
    leader_epoch: int = -1
    last_epoch: int = -1
    sent_offsets: tuple[int, int, int] | None = None
    """(high watermark, last stable offset, start offset); None before the first response and after an error."""

    def ask(self, other: SessionPartition) -> None:
        self.offset = other.offset
        self.bytes_max = other.bytes_max
        self.leader_epoch = other.leader_epoch
        self.last_epoch = other.last_epoch


class PartitionChange(NamedTuple):
    """The result of a read, as far as a session needs it."""

    offsets: tuple[int, int, int]
    has_data: bool = False
    is_error: bool = False
    is_forced: bool = False
    """A diverging epoch or a preferred replica: always sent."""


@dataclass(slots=True, eq=False)
class Session:
    session_id: int
    has_ids: bool
    created_ms: int
    used_ms: int
    partitions: dict[Key, SessionPartition]
    """In read order."""
    epoch: int = 1
    """Expected in the next request."""
    size: int = 0
    """Partitions that the cache counts for it."""


@dataclass(slots=True, eq=False)
class SessionFetch:
    """One request: read `partitions` in this order, then pass it to `FetchSessions.end` with the results."""

    partitions: Sequence[SessionPartition]
    has_ids: bool
    epoch: int
    session: Session | None = None
    """The session that continues."""


class FetchSessions:
    """The sessions of one broker. Call `begin` with a request, read, then `end` with the results. A fetch may skip
    `end`."""

    def __init__(
        self,
        random: Random,
        *,
        slots_max: int = 1_000,
        idle_ms: int = 120_000,
        partitions_max: int = 200_000,
        session_partitions_max: int = 10_000,
    ) -> None:
        """`slots_max` is `max.incremental.fetch.session.cache.slots`; 0 disables sessions."""
        self._random = random
        self._slots_max = slots_max
        self._idle_ms = idle_ms
        self._partitions_max = partitions_max
        self._session_partitions_max = session_partitions_max
        self._sessions: OrderedDict[int, Session] = OrderedDict()
        self.partitions = 0
        self.evicted = 0
        """Evicted sessions."""

    def __len__(self) -> int:
        return len(self._sessions)

    def begin(
        self,
        session_id: int,
        epoch: int,
        named: Iterable[SessionPartition],
        forgotten: Iterable[Key],
        *,
        has_ids: bool,
        now_ms: int,
    ) -> SessionFetch:
        """Start a fetch. Raises `FetchSessionError`. The last of duplicate partitions counts."""
        if epoch in (FIRST_EPOCH, FINAL_EPOCH):
            self._drop(self._sessions.get(session_id))
            partitions = {(one.topic, one.partition): one for one in named}
            return SessionFetch(list(partitions.values()), has_ids, epoch)
        session = self._find(session_id, epoch, has_ids=has_ids)
        for one in named:
            if not _can_be_kept(one.topic):
                self._drop(session)
                raise FetchSessionError(
                    f"fetch session {session_id} has a topic name of {len(one.topic)} characters,"
                    " which no topic can have",
                    ErrorCode.FETCH_SESSION_ID_NOT_FOUND,
                )
            known = session.partitions.setdefault((one.topic, one.partition), one)
            if known is not one:
                known.ask(one)
        for key in forgotten:
            session.partitions.pop(key, None)
        if not session.partitions:
            self._drop(session)
            return SessionFetch((), has_ids, FINAL_EPOCH)
        self._use(session, now_ms)
        session.epoch = epoch + 1 if epoch < EPOCH_MAX else 1
        return SessionFetch(list(session.partitions.values()), has_ids, epoch, session)

    def _find(self, session_id: int, epoch: int, *, has_ids: bool) -> Session:
        session = self._sessions.get(session_id)
        if session is None:
            raise FetchSessionError(
                f"there is no fetch session {session_id}: start a new one", ErrorCode.FETCH_SESSION_ID_NOT_FOUND
            )
        if epoch != session.epoch:
            raise FetchSessionError(
                f"fetch session {session_id} expects epoch {session.epoch}, not {epoch}",
                ErrorCode.INVALID_FETCH_SESSION_EPOCH,
            )
        if has_ids != session.has_ids:
            kinds = ("names", "ids") if has_ids else ("ids", "names")
            raise FetchSessionError(
                f"fetch session {session_id} has topic {kinds[0]}, the request has {kinds[1]}",
                ErrorCode.FETCH_SESSION_TOPIC_ID_ERROR,
            )
        return session

    def end(self, turn: SessionFetch, changes: Sequence[PartitionChange], *, now_ms: int) -> tuple[int, list[bool]]:
        """Return the response's session id, and whether it has each fetched partition. Raises `FetchSessionError` if
        the client continued the session before this response."""
        session = turn.session
        if session is None:
            session_id = self._create(turn, now_ms) if turn.epoch == FIRST_EPOCH else NO_SESSION
            if session_id != NO_SESSION:
                for partition, change in zip(turn.partitions, changes, strict=True):
                    _record_change(partition, change)
            return session_id, [True] * len(changes)
        if session.epoch != (turn.epoch + 1 if turn.epoch < EPOCH_MAX else 1):
            raise FetchSessionError(
                f"fetch session {session.session_id} was continued before its last response",
                ErrorCode.INVALID_FETCH_SESSION_EPOCH,
            )
        is_sent = []
        for partition, change in zip(turn.partitions, changes, strict=True):
            is_sent.append(_record_change(partition, change))
            if change.has_data:
                key = partition.topic, partition.partition
                session.partitions[key] = session.partitions.pop(key)
        return session.session_id, is_sent

    # The session cache.

    def _create(self, turn: SessionFetch, now_ms: int) -> int:
        size = len(turn.partitions)
        if not 0 < size <= min(self._session_partitions_max, self._partitions_max) or self._slots_max <= 0:
            return NO_SESSION
        if not all(_can_be_kept(one.topic) for one in turn.partitions):
            return NO_SESSION
        while len(self._sessions) >= self._slots_max or self.partitions + size > self._partitions_max:
            if not self._evict(size, now_ms):
                return NO_SESSION
        session_id = self._random.randint(1, ID_MAX)
        while session_id in self._sessions:
            session_id = self._random.randint(1, ID_MAX)
        partitions = {(one.topic, one.partition): one for one in turn.partitions}
        session = self._sessions[session_id] = Session(session_id, turn.has_ids, now_ms, now_ms, partitions)
        self._count(session)
        return session_id

    def _evict(self, size: int, now_ms: int) -> bool:
        """Evict a session to cache one of this size; False if none is worth less."""
        oldest = next(iter(self._sessions.values()))
        if now_ms - oldest.used_ms <= self._idle_ms:
            grown = (one for one in self._sessions.values() if now_ms - one.created_ms > self._idle_ms)
            smallest = min(grown, key=lambda one: (one.size, one.session_id), default=None)
            if smallest is None or smallest.size > size:
                return False
            oldest = smallest
        self._drop(oldest)
        self.evicted += 1
        return True

    def _use(self, session: Session, now_ms: int) -> None:
        """Mark as just used; drop a session that has grown too large."""
        grown = self.partitions - session.size + len(session.partitions)
        if len(session.partitions) > self._session_partitions_max or grown > self._partitions_max:
            self._drop(session)
            raise FetchSessionError(
                f"fetch session {session.session_id} has {len(session.partitions)} partitions; the limit is"
                f" {self._session_partitions_max} for one and {self._partitions_max} for all sessions",
                ErrorCode.FETCH_SESSION_ID_NOT_FOUND,
            )
        self._count(session)
        session.used_ms = now_ms
        self._sessions.move_to_end(session.session_id)

    def _count(self, session: Session) -> None:
        self.partitions += len(session.partitions) - session.size
        session.size = len(session.partitions)

    def _drop(self, session: Session | None) -> None:
        if session is not None:
            del self._sessions[session.session_id]
            self.partitions -= session.size

    def validate(self) -> None:
        """Assert the invariants, for tests."""
        used = [session.used_ms for session in self._sessions.values()]
        assert used == sorted(used), "sessions are ordered by last use"
        assert len(self._sessions) <= self._slots_max
        assert self.partitions == sum(len(session.partitions) for session in self._sessions.values())
        assert self.partitions <= self._partitions_max
        for session_id, session in self._sessions.items():
            assert session.session_id == session_id
            assert 0 < session.size == len(session.partitions) <= self._session_partitions_max
            assert 1 <= session.epoch <= EPOCH_MAX
            assert all((one.topic, one.partition) == key for key, one in session.partitions.items())
            assert all(isinstance(topic, bytes) == session.has_ids for topic, _ in session.partitions)


def _can_be_kept(topic: Topic) -> bool:
    """Return whether the topic name is valid: a session outlives its requests, whose memory is counted."""
    return isinstance(topic, bytes) or (len(topic) <= NAME_LENGTH_MAX and topic.isascii())


def _record_change(partition: SessionPartition, change: PartitionChange) -> bool:
    """Return whether the response has the partition; record its offsets as sent."""
    is_new = change.has_data or change.is_error or change.is_forced or partition.sent_offsets != change.offsets
    partition.sent_offsets = None if change.is_error else change.offsets
    return is_new
