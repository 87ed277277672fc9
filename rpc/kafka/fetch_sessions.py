"""Fetch sessions: the broker remembers what a client reads, so that requests and answers carry only what changes. Pure.

A session is what its client asks of each partition and what the last answer has told of it. A request names a session
(0 is none) and its epoch, and says so what it means (KIP-227):

    session   epoch    the request                              partitions   the answer
    any       -1       needs no session; the named one ends     as named     all of them, session 0
    any       0        begins one; the named one ends           as named     all of them, the new session; 0 if it
                                                                             found no place
    s         n > 0    goes on: what it names is added or       those of s   those with news, session s
                       changed, what it forgets leaves
    s         n > 0    ... and nothing is left to read          none         empty, session 0: s has ended
    unknown   n > 0                                                          FETCH_SESSION_ID_NOT_FOUND
    s         another  than the one that s expects                           INVALID_FETCH_SESSION_EPOCH
    s         n > 0    topic ids where s has names, or the other way round   FETCH_SESSION_TOPIC_ID_ERROR

The epoch that a session expects rises with each request, after 2^31 - 1 comes 1: an answer that was lost, or a second
request under way, is noticed. A client that is refused begins anew. There is news of a partition if it has data, an
error, a diverging epoch or another replica to read from, or if its offsets are not those that were told last; after an
error all is told again. What had data goes to the end of the line: the next answer begins with the others.

A new session finds a place while there are fewer than `slots_max`. Then the one that was not used for longest makes
room if it was idle for `idle_ms`; else the smallest of those that are older than `idle_ms`, unless that one is larger
than the new one. Consumers that read much keep theirs (followers, which Kafka keeps longest, do not read here). Without
a place, or with a name that no topic can have, a client is served all the same, in full.

Invariants (`validate`): sessions are in the order of their last use; each has at least one partition and at most
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
"""A name, or an id: the sessions of version 13 and later have ids."""
Key = tuple[Topic, int]


class FetchSessionError(TidelogError):
    """The request does not fit to its session; the client begins a new one."""

    def __init__(self, message: str, code: ErrorCode) -> None:
        super().__init__(message)
        self.code = code


@dataclass(slots=True, eq=False)
class Wanted:
    """What is asked of a partition, and the offsets that were told of it last."""

    topic: Topic
    partition: int
    offset: int
    bytes_max: int
    leader_epoch: int = -1
    last_epoch: int = -1
    told: tuple[int, int, int] | None = None
    """(high watermark, last stable offset, start offset); None before the first time and after an error."""

    def ask(self, other: Wanted) -> None:
        self.offset = other.offset
        self.bytes_max = other.bytes_max
        self.leader_epoch = other.leader_epoch
        self.last_epoch = other.last_epoch


class News(NamedTuple):
    """What a read has brought, as far as a session has to know."""

    offsets: tuple[int, int, int]
    has_data: bool = False
    is_error: bool = False
    is_told: bool = False
    """A diverging epoch, or another replica: always told."""


@dataclass(slots=True, eq=False)
class Session:
    session_id: int
    has_ids: bool
    created_ms: int
    used_ms: int
    wanted: dict[Key, Wanted]
    """In the order in which they are read."""
    epoch: int = 1
    """The one that the next request must have."""
    size: int = 0
    """Partitions that the cache counts for it."""


@dataclass(slots=True, eq=False)
class Turn:
    """One request: `wanted` is what to read, in this order. `FetchSessions.end` takes it with what was found."""

    wanted: Sequence[Wanted]
    has_ids: bool
    epoch: int
    session: Session | None = None
    """That goes on."""


class FetchSessions:
    """Of one broker. `begin` with a request, read, `end` with what was found; a turn may also be left."""

    def __init__(
        self,
        random: Random,
        *,
        slots_max: int = 1_000,
        idle_ms: int = 120_000,
        partitions_max: int = 200_000,
        session_partitions_max: int = 10_000,
    ) -> None:
        """`slots_max` is `max.incremental.fetch.session.cache.slots`; with 0 there are no sessions."""
        self._random = random
        self._slots_max = slots_max
        self._idle_ms = idle_ms
        self._partitions_max = partitions_max
        self._session_partitions_max = session_partitions_max
        self._sessions: OrderedDict[int, Session] = OrderedDict()
        self.partitions = 0
        self.evicted = 0
        """Sessions that made room for others."""

    def __len__(self) -> int:
        return len(self._sessions)

    def begin(
        self,
        session_id: int,
        epoch: int,
        named: Iterable[Wanted],
        forgotten: Iterable[Key],
        *,
        has_ids: bool,
        now_ms: int,
    ) -> Turn:
        """Raises `FetchSessionError`. A partition that is named twice is asked for as it is named last."""
        if epoch in (FIRST_EPOCH, FINAL_EPOCH):
            self._drop(self._sessions.get(session_id))
            wanted = {(one.topic, one.partition): one for one in named}
            return Turn(list(wanted.values()), has_ids, epoch)
        session = self._find(session_id, epoch, has_ids=has_ids)
        for one in named:
            if not _can_be_kept(one.topic):
                self._drop(session)
                raise FetchSessionError(
                    f"fetch session {session_id} would have to remember a name of {len(one.topic)} characters,"
                    " which no topic can have",
                    ErrorCode.FETCH_SESSION_ID_NOT_FOUND,
                )
            known = session.wanted.setdefault((one.topic, one.partition), one)
            if known is not one:
                known.ask(one)
        for key in forgotten:
            session.wanted.pop(key, None)
        if not session.wanted:
            self._drop(session)
            return Turn((), has_ids, FINAL_EPOCH)
        self._use(session, now_ms)
        session.epoch = epoch + 1 if epoch < EPOCH_MAX else 1
        return Turn(list(session.wanted.values()), has_ids, epoch, session)

    def _find(self, session_id: int, epoch: int, *, has_ids: bool) -> Session:
        session = self._sessions.get(session_id)
        if session is None:
            raise FetchSessionError(
                f"there is no fetch session {session_id}, or no more", ErrorCode.FETCH_SESSION_ID_NOT_FOUND
            )
        if epoch != session.epoch:
            raise FetchSessionError(
                f"fetch session {session_id} goes on with epoch {session.epoch}, not {epoch}",
                ErrorCode.INVALID_FETCH_SESSION_EPOCH,
            )
        if has_ids != session.has_ids:
            kinds = ("names", "ids") if has_ids else ("ids", "names")
            raise FetchSessionError(
                f"fetch session {session_id} has topic {kinds[0]}, the request has {kinds[1]}",
                ErrorCode.FETCH_SESSION_TOPIC_ID_ERROR,
            )
        return session

    def end(self, turn: Turn, found: Sequence[News], *, now_ms: int) -> tuple[int, list[bool]]:
        """The session of the answer, and whether it tells of each partition that was wanted. Raises
        `FetchSessionError` if the client has not waited for this answer before it went on."""
        session = turn.session
        if session is None:
            session_id = self._create(turn, now_ms) if turn.epoch == FIRST_EPOCH else NO_SESSION
            if session_id != NO_SESSION:
                for wanted, news in zip(turn.wanted, found, strict=True):
                    _takes(wanted, news)
            return session_id, [True] * len(found)
        if session.epoch != (turn.epoch + 1 if turn.epoch < EPOCH_MAX else 1):
            raise FetchSessionError(
                f"fetch session {session.session_id} went on before it was answered",
                ErrorCode.INVALID_FETCH_SESSION_EPOCH,
            )
        told = []
        for wanted, news in zip(turn.wanted, found, strict=True):
            told.append(_takes(wanted, news))
            if news.has_data:
                key = wanted.topic, wanted.partition
                session.wanted[key] = session.wanted.pop(key)
        return session.session_id, told

    # Places.

    def _create(self, turn: Turn, now_ms: int) -> int:
        size = len(turn.wanted)
        if not 0 < size <= min(self._session_partitions_max, self._partitions_max) or self._slots_max <= 0:
            return NO_SESSION
        if not all(_can_be_kept(one.topic) for one in turn.wanted):
            return NO_SESSION
        while len(self._sessions) >= self._slots_max or self.partitions + size > self._partitions_max:
            if not self._evict(size, now_ms):
                return NO_SESSION
        session_id = self._random.randint(1, ID_MAX)
        while session_id in self._sessions:
            session_id = self._random.randint(1, ID_MAX)
        wanted = {(one.topic, one.partition): one for one in turn.wanted}
        session = self._sessions[session_id] = Session(session_id, turn.has_ids, now_ms, now_ms, wanted)
        self._count(session)
        return session_id

    def _evict(self, size: int, now_ms: int) -> bool:
        """Make room for a session of this size, if one is worth less."""
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
        """As it is now; one that has grown too large ends."""
        grown = self.partitions - session.size + len(session.wanted)
        if len(session.wanted) > self._session_partitions_max or grown > self._partitions_max:
            self._drop(session)
            raise FetchSessionError(
                f"fetch session {session.session_id} has {len(session.wanted)} partitions, and there is no room for so"
                f" many: {self._session_partitions_max} in one, {self._partitions_max} in all",
                ErrorCode.FETCH_SESSION_ID_NOT_FOUND,
            )
        self._count(session)
        session.used_ms = now_ms
        self._sessions.move_to_end(session.session_id)

    def _count(self, session: Session) -> None:
        self.partitions += len(session.wanted) - session.size
        session.size = len(session.wanted)

    def _drop(self, session: Session | None) -> None:
        if session is not None:
            del self._sessions[session.session_id]
            self.partitions -= session.size

    def validate(self) -> None:
        """Assert the invariants; for tests."""
        used = [session.used_ms for session in self._sessions.values()]
        assert used == sorted(used), "in the order of their last use"
        assert len(self._sessions) <= self._slots_max
        assert self.partitions == sum(len(session.wanted) for session in self._sessions.values())
        assert self.partitions <= self._partitions_max
        for session_id, session in self._sessions.items():
            assert session.session_id == session_id
            assert 0 < session.size == len(session.wanted) <= self._session_partitions_max
            assert 1 <= session.epoch <= EPOCH_MAX
            assert all((one.topic, one.partition) == key for key, one in session.wanted.items())
            assert all(isinstance(topic, bytes) == session.has_ids for topic, _ in session.wanted)


def _can_be_kept(topic: Topic) -> bool:
    """A session outlives its requests, whose memory is counted: names that no topic can have are not kept."""
    return isinstance(topic, bytes) or (len(topic) <= NAME_LENGTH_MAX and topic.isascii())


def _takes(wanted: Wanted, news: News) -> bool:
    """Whether this is told; it counts as told from now on."""
    is_new = news.has_data or news.is_error or news.is_told or wanted.told != news.offsets
    wanted.told = None if news.is_error else news.offsets
    return is_new
