"""Fetch sessions seen through a client: what it knows is what full fetches would have returned, at every step.

A seed draws what happens: records come, watermarks and starts move, partitions fail and recover, the client adds,
forgets and seeks, answers are lost, other clients push the session out. The client does as Kafka's consumer does: it
goes on with what has changed, and begins again when it is refused.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidelog.model.errors import ErrorCode
from tidelog.rpc.kafka import fetch_sessions
from tidelog.rpc.kafka.fetch_sessions import FetchSessionError, FetchSessions, PartitionChange, SessionPartition

STEPS = 120
PARTITIONS = 8
BYTES_MAX = 3
"""Records of one partition in an answer."""


@dataclass
class Place:
    """A partition as it is."""

    start: int = 0
    end: int = 0
    stable: int = 0
    is_failed: bool = False

    @property
    def offsets(self) -> tuple[int, int, int]:
        return (-1, -1, -1) if self.is_failed else (self.end, self.stable, self.start)


Row = tuple[tuple[int, int, int], bool, int]
"""(offsets, whether it failed, records read)."""


@dataclass
class Client:
    """What it knows of each partition is by answers only."""

    wanted: dict[int, int] = field(default_factory=dict)
    """Partition -> the offset that is read next."""
    session_id: int = 0
    epoch: int = 0
    sent: dict[int, int] = field(default_factory=dict)
    """As the session knows it."""
    known: dict[int, Row] = field(default_factory=dict)


class Model:
    def __init__(self, seed: int) -> None:
        self.draw = Random(seed)
        self.now_ms = 0
        self.sessions = FetchSessions(Random(seed), slots_max=3, idle_ms=100, partitions_max=40)
        self.places = [Place() for _ in range(PARTITIONS)]
        self.client = Client()
        self.seen: dict[str, int] = {}

    def count(self, what: str) -> None:
        self.seen[what] = self.seen.get(what, 0) + 1

    def read(self, partition: int, offset: int) -> Row:
        """What any fetch tells of it now."""
        place = self.places[partition]
        if place.is_failed or not place.start <= offset <= place.end:
            return (-1, -1, -1), True, 0
        return place.offsets, False, min(BYTES_MAX, place.end - offset)

    def happen(self) -> None:
        place = self.draw.choice(self.places)
        match self.draw.randrange(6):
            case 0 | 1:
                place.end += self.draw.randrange(1, 6)
            case 2:
                place.stable = self.draw.randint(place.stable, place.end)
            case 3:
                place.start = self.draw.randint(place.start, place.end)
            case 4:
                place.is_failed = not place.is_failed
            case _:
                self.now_ms += self.draw.choice([1, 10, 200])

    def decide(self) -> None:
        """What the client wants next."""
        wanted, draw = self.client.wanted, self.draw
        partition = draw.randrange(PARTITIONS)
        match draw.randrange(5):
            case 0:
                wanted[partition] = self.places[partition].start
            case 1:
                wanted.pop(partition, None)
            case 2 if partition in wanted:
                wanted[partition] = draw.randint(0, self.places[partition].end + 1)
            case _:
                pass

    def others(self) -> None:
        for _ in range(self.draw.randrange(3)):
            named = [SessionPartition("other", number, 0, 1) for number in range(self.draw.randrange(1, 15))]
            turn = self.sessions.begin(0, 0, named, (), has_ids=False, now_ms=self.now_ms)
            self.sessions.end(turn, [PartitionChange((0, 0, 0)) for _ in named], now_ms=self.now_ms)

    def fetch(self) -> None:
        client = self.client
        if client.epoch <= 0:
            named, gone = dict(client.wanted), []
        else:
            named = {one: at for one, at in client.wanted.items() if client.sent.get(one) != at}
            gone = [("t", one) for one in client.sent if one not in client.wanted]
        try:
            turn = self.sessions.begin(
                client.session_id,
                client.epoch,
                [SessionPartition("t", one, at, 1) for one, at in named.items()],
                gone,
                has_ids=False,
                now_ms=self.now_ms,
            )
        except FetchSessionError as error:
            assert client.epoch > 0
            self.count(error.code.name)
            self.begin_again()
            return
        truth = {one.partition: self.read(one.partition, one.offset) for one in turn.partitions}
        assert {one.partition: one.offset for one in turn.partitions} == client.wanted, (
            "the session reads what is wanted"
        )
        rows = [truth[one.partition] for one in turn.partitions]
        news = [PartitionChange(offsets, records > 0, failed) for offsets, failed, records in rows]
        session_id, returned = self.sessions.end(turn, news, now_ms=self.now_ms)
        partitions = [one.partition for one, is_returned in zip(turn.partitions, returned, strict=True) if is_returned]
        answer = {partition: truth[partition] for partition in partitions}
        is_full = client.epoch <= 0
        if self.draw.random() < 0.1:
            self.count("lost")
            if self.draw.random() < 0.5:
                self.begin_again()  # else it says the same once more, and is refused
            return
        self.take(answer, session_id, is_full=is_full)
        self.count("full" if is_full else "incremental")
        self.count("complete" if len(answer) == len(truth) else "spared")
        self.check(truth)

    def begin_again(self) -> None:
        self.client.session_id = self.client.epoch = 0
        self.client.known.clear()

    def take(self, answer: dict[int, Row], session_id: int, *, is_full: bool) -> None:
        client = self.client
        client.sent = dict(client.wanted)
        if is_full:
            client.known = {}
        for gone in [one for one in client.known if one not in client.wanted]:
            del client.known[gone]
        client.known.update(answer)
        client.session_id = session_id
        client.epoch = client.epoch + 1 if session_id else 0
        for partition, (_, _, records) in answer.items():
            client.wanted[partition] += records

    def check(self, truth: dict[int, Row]) -> None:
        """As a full fetch would have it; records and errors are returned each time."""
        for partition, (offsets, failed, records) in truth.items():
            known = self.client.known[partition]
            assert known[:2] == (offsets, failed), f"partition {partition}: it knows {known}"
            if records:
                assert known[2] == records
        for partition, (offsets, failed, _) in list(self.client.known.items()):
            self.client.known[partition] = (offsets, failed, 0)


def run(seed: int, steps: int = STEPS) -> dict[str, int]:
    model = Model(seed)
    model.client.wanted = {0: 0, 1: 0}
    for _ in range(steps):
        for _ in range(model.draw.randrange(3)):
            model.happen()
        if model.draw.random() < 0.3:
            model.decide()
        if model.draw.random() < 0.1:
            model.others()
        model.fetch()
        model.sessions.validate()
    return model.seen


@given(st.integers(0, 1 << 32))
def test_a_session_tells_what_full_fetches_tell(seed: int) -> None:
    run(seed)


def test_the_model_sees_what_it_is_about() -> None:
    seen: dict[str, int] = {}
    for seed in range(20):
        for what, count in run(seed).items():
            seen[what] = seen.get(what, 0) + count
    refusals = {ErrorCode.FETCH_SESSION_ID_NOT_FOUND.name, ErrorCode.INVALID_FETCH_SESSION_EPOCH.name}
    assert refusals | {"lost", "full", "incremental", "complete", "spared"} <= seen.keys(), seen
    assert seen["incremental"] > seen["full"]


def test_the_model_notices_a_session_that_keeps_news_to_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    def takes(wanted: SessionPartition, news: PartitionChange) -> bool:
        is_new = (
            news.has_data or news.is_error or wanted.sent_offsets is None or wanted.sent_offsets[0] != news.offsets[0]
        )
        wanted.sent_offsets = news.offsets
        return is_new

    monkeypatch.setattr(fetch_sessions, "_record_change", takes)

    def run_all() -> None:
        for seed in range(20):
            run(seed)

    with pytest.raises(AssertionError, match="it knows"):
        run_all()
