"""Fetch sessions as a state machine: what is asked, what is returned, which session is evicted."""

from __future__ import annotations

from random import Random

import pytest

from tidelog.metadata.topics import NAME_LENGTH_MAX
from tidelog.model.errors import ErrorCode
from tidelog.rpc.kafka.fetch_sessions import (
    EPOCH_MAX,
    FINAL_EPOCH,
    FIRST_EPOCH,
    NO_SESSION,
    FetchSessionError,
    FetchSessions,
    Key,
    PartitionChange,
    SessionFetch,
    SessionPartition,
)

IDLE_MS = 120_000
QUIET = PartitionChange((5, 5, 0))
DATA = PartitionChange((5, 5, 0), has_data=True)
FAILED = PartitionChange((-1, -1, -1), is_error=True)


class Cache:
    """A cache, and a clock that stands still unless it is moved."""

    def __init__(self, **limits: int) -> None:
        self.sessions = FetchSessions(Random(3), **limits)
        self.now_ms = 1_000_000

    def begin(
        self,
        session_id: int,
        epoch: int,
        *named: SessionPartition,
        forgotten: tuple[Key, ...] = (),
        has_ids: bool = False,
    ) -> SessionFetch:
        turn = self.sessions.begin(session_id, epoch, named, forgotten, has_ids=has_ids, now_ms=self.now_ms)
        self.sessions.validate()
        return turn

    def end(self, turn: SessionFetch, *found: PartitionChange) -> tuple[int, list[bool]]:
        answer = self.sessions.end(turn, found or [QUIET] * len(turn.partitions), now_ms=self.now_ms)
        self.sessions.validate()
        return answer

    def open(self, *names: str) -> int:
        """A session with these topics; 0 if there was no place."""
        return self.end(self.begin(NO_SESSION, FIRST_EPOCH, *map(want, names)))[0]

    def refused(self, session_id: int, epoch: int, *, has_ids: bool = False) -> ErrorCode:
        with pytest.raises(FetchSessionError) as refusal:
            self.begin(session_id, epoch, has_ids=has_ids)
        assert str(session_id) in str(refusal.value)
        return refusal.value.code


def want(topic: str | bytes, offset: int = 0, *, partition: int = 0) -> SessionPartition:
    return SessionPartition(topic, partition, offset, 1 << 20)


def asked(turn: SessionFetch) -> list[tuple[str | bytes, int, int]]:
    return [(one.topic, one.partition, one.offset) for one in turn.partitions]


@pytest.mark.requirement("a:C-11")
def test_a_session_remembers_what_is_read_and_takes_only_changes() -> None:
    cache = Cache()
    first = cache.begin(NO_SESSION, FIRST_EPOCH, want("a", 1), want("b", 2), want("b", 3, partition=1))
    assert asked(first) == [("a", 0, 1), ("b", 0, 2), ("b", 1, 3)]
    session_id, returned = cache.end(first)
    assert session_id > 0
    assert returned == [True, True, True], "a first answer tells everything"
    second = cache.begin(session_id, 1, want("b", 20), want("c"), forgotten=(("a", 0), ("z", 9)))
    assert asked(second) == [("b", 0, 20), ("b", 1, 3), ("c", 0, 0)]
    assert cache.end(second) == (session_id, [False, False, True]), "nothing has changed but what is new"
    assert cache.sessions.partitions == 3


@pytest.mark.requirement("a:C-11")
def test_only_changes_are_reported() -> None:
    cache = Cache()
    session_id, _ = cache.end(cache.begin(NO_SESSION, FIRST_EPOCH, want("a"), want("b"), want("c")))
    rounds: list[tuple[tuple[PartitionChange, PartitionChange, PartitionChange], list[bool]]] = [
        ((QUIET, QUIET, QUIET), [False, False, False]),
        ((DATA, QUIET, QUIET), [True, False, False]),
        # a went to the end of the line
        ((PartitionChange((6, 5, 0)), PartitionChange((5, 6, 0)), PartitionChange((5, 5, 1))), [True, True, True]),
        ((PartitionChange((6, 5, 0)), PartitionChange((5, 6, 0)), PartitionChange((5, 5, 1))), [False, False, False]),
        ((FAILED, PartitionChange((5, 6, 0), is_forced=True), PartitionChange((5, 5, 1))), [True, True, False]),
        ((PartitionChange((6, 5, 0)), FAILED, PartitionChange((5, 5, 1))), [True, True, False]),
    ]
    for epoch, (found, expected) in enumerate(rounds, start=1):
        answer = cache.end(cache.begin(session_id, epoch), *found)
        assert answer == (session_id, expected), epoch


def test_what_had_data_goes_to_the_end_of_the_line() -> None:
    cache = Cache()
    session_id, _ = cache.end(cache.begin(NO_SESSION, FIRST_EPOCH, want("a"), want("b"), want("c")))
    turn = cache.begin(session_id, 1)
    cache.end(turn, DATA, QUIET, DATA)
    assert [one.topic for one in cache.begin(session_id, 2).partitions] == ["b", "a", "c"]


def test_a_full_request_ends_the_session_that_it_names() -> None:
    cache = Cache()
    session_id = cache.open("a")
    sessionless = cache.begin(session_id, FINAL_EPOCH, want("a"))
    assert cache.end(sessionless) == (NO_SESSION, [True])
    assert len(cache.sessions) == 0
    second = cache.open("a")
    turn = cache.begin(second, FIRST_EPOCH, want("a"))
    assert len(cache.sessions) == 0, "a new one is made with its answer"
    third, _ = cache.end(turn)
    assert third not in (NO_SESSION, second)
    assert cache.refused(second, 1) is ErrorCode.FETCH_SESSION_ID_NOT_FOUND


@pytest.mark.requirement("a:C-11", "a:T-26")
def test_a_request_that_does_not_fit_its_session_is_rejected() -> None:
    cache = Cache()
    session_id = cache.open("a")
    assert cache.refused(session_id + 1, 1) is ErrorCode.FETCH_SESSION_ID_NOT_FOUND
    assert cache.refused(session_id, 2) is ErrorCode.INVALID_FETCH_SESSION_EPOCH
    assert cache.refused(session_id, -7) is ErrorCode.INVALID_FETCH_SESSION_EPOCH
    assert cache.refused(session_id, 1, has_ids=True) is ErrorCode.FETCH_SESSION_TOPIC_ID_ERROR
    turn = cache.begin(session_id, 1)
    assert asked(turn) == [("a", 0, 0)], "a refused request has changed nothing"
    assert cache.refused(session_id, 1) is ErrorCode.INVALID_FETCH_SESSION_EPOCH, "a repeat"
    later = cache.begin(session_id, 2)
    with pytest.raises(FetchSessionError) as refusal:
        cache.end(turn)
    assert refusal.value.code is ErrorCode.INVALID_FETCH_SESSION_EPOCH
    assert cache.end(later)[0] == session_id


def test_sessions_with_ids_are_apart_from_those_with_names() -> None:
    cache = Cache()
    topic_id = bytes(range(16))
    turn = cache.begin(NO_SESSION, FIRST_EPOCH, want(topic_id), has_ids=True)
    session_id, _ = cache.end(turn)
    assert cache.refused(session_id, 1) is ErrorCode.FETCH_SESSION_TOPIC_ID_ERROR
    again = cache.begin(session_id, 1, forgotten=((topic_id, 0),), has_ids=True)
    assert again.partitions == ()
    assert cache.end(again) == (NO_SESSION, []), "nothing is left to read"
    assert len(cache.sessions) == 0


def test_an_empty_request_makes_no_session() -> None:
    cache = Cache()
    assert cache.open() == NO_SESSION
    assert Cache(slots_max=0).open("a") == NO_SESSION


def test_a_partition_named_twice_is_asked_for_as_it_is_named_last() -> None:
    cache = Cache()
    turn = cache.begin(NO_SESSION, FIRST_EPOCH, want("a", 1), want("a", 2))
    assert asked(turn) == [("a", 0, 2)]
    session_id, _ = cache.end(turn)
    assert asked(cache.begin(session_id, 1, want("a", 3), want("a", 4))) == [("a", 0, 4)]


def test_after_the_last_epoch_comes_the_first() -> None:
    cache = Cache()
    session_id = cache.open("a")
    cache.sessions._sessions[session_id].epoch = EPOCH_MAX
    assert cache.end(cache.begin(session_id, EPOCH_MAX))[0] == session_id
    assert cache.end(cache.begin(session_id, 1))[0] == session_id


# Places.


@pytest.mark.requirement("a:C-11", "a:T-26")
def test_without_a_place_a_client_is_served_in_full() -> None:
    cache = Cache(slots_max=2)
    assert cache.open("a")
    assert cache.open("b")
    assert cache.open("c", "d") == NO_SESSION, "both are young and in use"
    assert (len(cache.sessions), cache.sessions.evicted) == (2, 0)


@pytest.mark.requirement("a:T-26")
def test_the_session_that_was_idle_for_longest_makes_room() -> None:
    cache = Cache(slots_max=2)
    large, small = cache.open("a", "b", "c"), cache.open("d")
    cache.now_ms += 1
    cache.end(cache.begin(small, 1))
    cache.now_ms += IDLE_MS
    made = cache.open("e")
    assert made
    assert cache.sessions.evicted == 1
    assert cache.refused(large, 1) is ErrorCode.FETCH_SESSION_ID_NOT_FOUND, "however much it reads"
    assert cache.end(cache.begin(small, 2))[0] == small


@pytest.mark.requirement("a:C-11", "a:T-26")
def test_of_old_sessions_in_use_the_smallest_makes_room_for_one_as_large() -> None:
    cache = Cache(slots_max=3)
    sessions = [cache.open(*"abc"), cache.open(*"ab"), cache.open(*"abcd")]
    for epoch in (1, 2):
        cache.now_ms += IDLE_MS // 2 + 1
        for session_id in sessions:
            cache.end(cache.begin(session_id, epoch))
    assert cache.open("a") == NO_SESSION, "smaller than all of them"
    assert cache.open(*"xy"), "as large as the smallest"
    assert cache.refused(sessions[1], 3) is ErrorCode.FETCH_SESSION_ID_NOT_FOUND
    assert cache.open("z") == NO_SESSION
    assert cache.open(*"uvw"), "the young one keeps its place, the smallest of the old ones does not"
    assert cache.refused(sessions[0], 3) is ErrorCode.FETCH_SESSION_ID_NOT_FOUND
    assert cache.end(cache.begin(sessions[2], 3))[0] == sessions[2]


def test_all_sessions_together_have_a_limited_number_of_partitions() -> None:
    cache = Cache(partitions_max=6, session_partitions_max=4)
    first = cache.open(*"abcd")
    assert cache.open(*"abcde") == NO_SESSION, "more than one may have"
    assert cache.open(*"abc") == NO_SESSION, "more than there is room for"
    assert cache.open(*"ab")
    with pytest.raises(FetchSessionError) as refusal:
        cache.begin(first, 1, want("e"))
    assert refusal.value.code is ErrorCode.FETCH_SESSION_ID_NOT_FOUND
    cache.sessions.validate()
    assert (len(cache.sessions), cache.sessions.partitions) == (1, 2)
    assert cache.open(*"abcd")


def test_a_turn_that_is_left_leaves_nothing_behind() -> None:
    cache = Cache()
    cache.begin(NO_SESSION, FIRST_EPOCH, want("a"))
    assert len(cache.sessions) == 0
    session_id = cache.open("a")
    cache.begin(session_id, 1)  # its client is gone
    assert cache.refused(session_id, 1) is ErrorCode.INVALID_FETCH_SESSION_EPOCH
    assert cache.end(cache.begin(session_id, FIRST_EPOCH, want("a")))[0]
    assert len(cache.sessions) == 1


@pytest.mark.parametrize("seed", range(8))
def test_a_client_that_applies_the_changes_knows_what_a_full_answer_would_tell(seed: int) -> None:
    """Many clients on few places, with lost sessions and answers."""
    random = Random(seed)
    cache = Cache(slots_max=3, partitions_max=20, session_partitions_max=8)
    truth: dict[Key, tuple[int, int, int]] = {(name, 0): (0, 0, 0) for name in "abcdefghij"}
    reads: list[dict[Key, int]] = [{} for _ in range(5)]
    known: list[dict[Key, tuple[int, int, int]]] = [{} for _ in reads]
    states = [(NO_SESSION, FIRST_EPOCH) for _ in reads]
    answered = 0
    for _ in range(1_500):
        cache.now_ms += random.choice((1, 10_000, 50_000))
        changed = random.choice(list(truth))
        truth[changed] = (truth[changed][0] + 1, truth[changed][1] + random.randrange(2), truth[changed][2])
        who = random.randrange(len(reads))
        read, (session_id, epoch) = reads[who], states[who]
        added = {key: random.randrange(100) for key in random.sample(list(truth), 2) if random.random() < 0.7}
        gone = [key for key in read if key not in added and random.random() < 0.2]
        for key in gone:
            del read[key]
            known[who].pop(key, None)
        read |= added
        is_full = epoch == FIRST_EPOCH
        named = read if is_full else added
        try:
            turn = cache.begin(
                session_id, epoch, *(want(topic, at) for (topic, _), at in named.items()), forgotten=tuple(gone)
            )
            if random.random() < 0.05:
                states[who] = NO_SESSION, FIRST_EPOCH  # the connection is lost
                continue
            assert {(one.topic, one.partition): one.offset for one in turn.partitions} == read
            found = [PartitionChange(truth[one.topic, 0], has_data=random.random() < 0.3) for one in turn.partitions]
            next_id, returned = cache.end(turn, *found)
        except FetchSessionError:
            states[who] = session_id, FIRST_EPOCH
            continue
        for one, news, is_returned in zip(turn.partitions, found, returned, strict=True):
            if is_returned:
                known[who][one.topic, one.partition] = news.offsets
        assert known[who] == {key: truth[key] for key in read}
        states[who] = (next_id, epoch + 1) if next_id else (NO_SESSION, FIRST_EPOCH)
        answered += 1
    assert answered > 1_000
    assert cache.sessions.evicted > 0


def test_names_that_no_topic_can_have_are_not_remembered() -> None:
    """A session outlives its request, whose memory is counted: 32 KB for each of its names would not be."""
    cache = Cache()
    long = "x" * (NAME_LENGTH_MAX + 1)
    assert cache.open("a", long) == NO_SESSION
    session_id = cache.open("a", "x" * NAME_LENGTH_MAX)
    assert session_id != NO_SESSION
    with pytest.raises(FetchSessionError, match="characters") as refusal:
        cache.begin(session_id, 1, want("b"), want(long))
    assert refusal.value.code is ErrorCode.FETCH_SESSION_ID_NOT_FOUND
    assert (len(cache.sessions), cache.sessions.partitions) == (0, 0)
    cache.sessions.validate()
