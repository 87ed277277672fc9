"""Fetches by the Kafka API: sessions, leaders and followers nearby, as Java's consumer does.

One fetch is in flight for each broker. It belongs to a session (KIP-227): the first request names all partitions, later
ones name what has changed, and a response leaves out what has not. A partition is fetched from its leader, or for a
while from the replica in the client's rack that the leader names.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random
from typing import Any

from simulation.broker_checker import Fail, KnownPartition, is_sound
from simulation.kafka_client import CODES, GONE, REFRESHES, KafkaClient
from tidelog.log.batch import read_header
from tidelog.model.errors import ErrorCode, TransportError
from tidelog.rpc.kafka import messages as apis
from tidelog.rpc.kafka.messages.data import (
    FetchPartition,
    FetchRequest,
    FetchTopic,
    ForgottenTopic,
    ListOffsetsPartition,
    ListOffsetsRequest,
    ListOffsetsTopic,
)

IDS_SINCE, LAST_EPOCH_SINCE = 13, 12
NEARBY_S = 1.0
IDLE_S = 0.05
LATEST, EARLIEST = -1, -2
SESSION_ERRORS = frozenset(
    {
        ErrorCode.FETCH_SESSION_ID_NOT_FOUND,
        ErrorCode.INVALID_FETCH_SESSION_EPOCH,
        ErrorCode.FETCH_SESSION_TOPIC_ID_ERROR,
    }
)
PASSING = frozenset({ErrorCode.OFFSET_NOT_AVAILABLE, ErrorCode.CORRUPT_MESSAGE})


@dataclass(slots=True, eq=False)
class Position:
    """Where a partition is read."""

    known: KnownPartition
    offset: int
    last_epoch: int = -1
    known_end: int = 0
    """The largest high watermark that a leader has reported."""
    nearby: int = -1
    """The replica that the leader has named."""
    nearby_until_s: float = 0.0
    is_out: bool = False
    """Its offset has to be looked up again."""

    @property
    def key(self) -> tuple[str, int]:
        return self.known.topic.name, self.known.partition_id.partition


Asked = tuple[int, int, int]
"""Offset, leader epoch, epoch of the last record."""


@dataclass(slots=True)
class Session:
    session_id: int = 0
    epoch: int = 0
    partitions: dict[tuple[str, int], Asked] = field(default_factory=dict)
    """As the broker remembers them."""

    def restart(self) -> None:
        self.session_id = self.epoch = 0
        self.partitions = {}


@dataclass(slots=True)
class FetchCounts:
    fetches: int = 0
    incremental: int = 0
    nearby: int = 0
    lookups: int = 0


class KafkaFetcher:
    """`on_data` takes the data of a partition from its position on, and moves the position. `on_rot` is called for a
    broker that serves a batch with a wrong CRC."""

    def __init__(
        self,
        client: KafkaClient,
        draw: Random,
        fail: Fail,
        *,
        on_data: Callable[[Position, bytes, int], None],
        on_rot: Callable[[int, KnownPartition, int], None],
        counts: FetchCounts,
        isolation: int,
    ) -> None:
        self.positions: dict[KnownPartition, Position] = {}
        self.counts = counts
        self._client = client
        self._random = draw
        self._fail = fail
        self._on_data = on_data
        self._on_rot = on_rot
        self._isolation = isolation
        self._sessions: dict[int, Session] = {}
        self._has_ids = client.version_of(apis.FETCH) >= IDS_SINCE

    async def run(self, brokers: list[int]) -> None:
        """One task for each broker; ends when it is cancelled."""
        async with asyncio.TaskGroup() as tasks:
            for broker in brokers:
                tasks.create_task(self._fetch_from(broker))

    async def _fetch_from(self, broker: int) -> None:
        session = self._sessions[broker] = Session()
        while True:
            names = sorted({position.known.topic.name for position in self.positions.values()})
            if not names:
                await asyncio.sleep(IDLE_S)
                continue
            await self._client.ready(names)
            wanted = self._wanted(broker)
            if not wanted and not session.partitions:
                await self._client.pause(IDLE_S)
                continue
            lost = next((one for one in wanted if one.is_out or self._random.random() < 0.03), None)
            if lost is not None:
                await self._look_up(broker, lost)
                continue
            if await self._fetch(broker, session, wanted):
                await self._client.pause()

    def _wanted(self, broker: int) -> list[Position]:
        now_s = asyncio.get_running_loop().time()
        wanted = []
        for position in self.positions.values():
            if position.nearby >= 0 and now_s >= position.nearby_until_s:
                position.nearby = -1
            leader = self._client.leader(*position.key)
            if leader.node < 0:
                self._client.stale()
            if broker == (position.nearby if position.nearby >= 0 else leader.node):
                wanted.append(position)
        return wanted

    # Fetch.

    async def _fetch(self, broker: int, session: Session, wanted: list[Position]) -> bool:
        """True if the next one is better made a little later."""
        asked = {
            one.key: (one.offset, self._client.leader(*one.key).epoch, one.last_epoch)
            for one in wanted
            if self._client.topics[one.known.topic.name].topic_id == one.known.topic.topic_id.bytes
        }
        if len(asked) < len(wanted):
            self._client.stale()  # of a topic that was deleted
        known_ends = {one.key: one.known_end for one in wanted if one.nearby < 0}  # asked of their leader
        request = self._request(session, asked)
        is_full = session.epoch == 0
        self.counts.fetches += 1
        self.counts.incremental += not is_full
        try:
            response = await self._client.call(broker, request)
        except TransportError as error:
            self._client.note(error.code)
            self._client.stale()
            for one in wanted:
                one.nearby = -1
            session.restart()
            return True
        if response.error_code:
            error_code = CODES[response.error_code]
            self._client.note(error_code)
            if error_code in REFRESHES:
                self._client.stale()  # a broker that stops ends its long polls so
            elif error_code not in SESSION_ERRORS:
                self._fail(self._client.client_id, f"a fetch from broker {broker}: {error_code.name}")
            session.restart()
            return True
        rows = self._rows(response)
        self._check_rows(broker, session, asked, rows, is_full=is_full)
        session.session_id = response.session_id
        session.epoch = session.epoch + 1 if response.session_id else 0
        session.partitions = asked if response.session_id else {}
        positions = {position.key: position for position in wanted}
        is_bad = not rows and not request.max_wait_ms
        for key, row in rows.items():
            position = positions.get(key)
            is_held = position is not None and self.positions.get(position.known) is position
            if position is not None and is_held and position.offset == asked[key][0]:
                is_bad = self._take(broker, position, row, known_ends.get(key)) or is_bad
        return is_bad

    def _request(self, session: Session, asked: dict[tuple[str, int], Asked]) -> FetchRequest:
        named = {key: one for key, one in asked.items() if session.partitions.get(key) != one}
        forgotten = [key for key in session.partitions if key not in asked]
        request = FetchRequest(
            max_wait_ms=self._random.choice((0, 100, 300)),
            min_bytes=1,
            max_bytes=self._random.choice((300, 1 << 20)),
            isolation_level=self._isolation,
            session_id=session.session_id,
            session_epoch=session.epoch,
            rack_id=self._client.rack,
        )
        topics: dict[str, FetchTopic] = {}
        bytes_max = self._random.choice((1, 400, 1 << 20))
        has_last = self._client.version_of(apis.FETCH) >= LAST_EPOCH_SINCE
        for (name, number), (offset, epoch, last_epoch) in named.items():
            topic = topics.setdefault(name, FetchTopic(**self._named(name)))
            topic.partitions.append(
                FetchPartition(
                    partition=number,
                    fetch_offset=offset,
                    current_leader_epoch=epoch,
                    last_fetched_epoch=last_epoch if has_last else -1,
                    partition_max_bytes=bytes_max,
                )
            )
        request.topics = list(topics.values())
        request.forgotten_topics_data = [
            ForgottenTopic(**self._named(name), partitions=[number]) for name, number in forgotten
        ]
        return request

    def _named(self, name: str) -> dict[str, Any]:
        return {"topic_id": self._client.topics[name].topic_id} if self._has_ids else {"topic": name}

    def _rows(self, response: Any) -> dict[tuple[str, int], Any]:
        return {
            (self._client.names[topic.topic_id] if self._has_ids else topic.topic, row.partition_index): row
            for topic in response.responses
            for row in topic.partitions
        }

    def _check_rows(
        self, broker: int, session: Session, asked: dict[tuple[str, int], Asked], rows: Any, *, is_full: bool
    ) -> None:
        more, missing = sorted(set(rows) - set(asked)), sorted(set(asked) - set(rows))
        if more:
            self._fail(self._client.client_id, f"session: broker {broker} returns {more}, which was not asked for")
        if is_full and missing:
            self._fail(self._client.client_id, f"session: a full response of broker {broker} lacks {missing}")

    def _take(self, broker: int, position: Position, row: Any, known_end: int | None) -> bool:
        """True if its next fetch is better made a little later. `known_end` is what a leader must know; None if another
        replica was asked."""
        known = position.known
        if row.error_code:
            return self._take_error(position, row)
        if row.diverging_epoch.end_offset >= 0:
            if not known.topic.is_unclean:
                what = f"what was read up to {position.offset} is not there: {row.diverging_epoch}"
                self._fail(self._client.client_id, f"{known}: {what}")
            return True
        if row.preferred_read_replica >= 0:
            position.nearby = row.preferred_read_replica
            position.nearby_until_s = asyncio.get_running_loop().time() + NEARBY_S
            self.counts.nearby += 1
            return False
        if known_end is not None:
            if 0 <= row.high_watermark < known_end:
                what = f"a leader with high watermark {row.high_watermark}, after {known_end}"
                self._fail(self._client.client_id, f"{known}: {what}")
            position.known_end = max(position.known_end, row.high_watermark)
        data = bytes(row.records or b"")
        if not data:
            return False
        if not is_sound(data):
            self._on_rot(broker, known, position.offset)
            return True
        following = read_header(data).next_offset
        if following <= position.offset:
            what = f"stale: offset {position.offset} was asked for, and a batch that ends at {following} comes"
            self._fail(self._client.client_id, f"{known}: {what}")
        self._on_data(position, data, row.high_watermark)
        return False

    def _take_error(self, position: Position, row: Any) -> bool:
        error, known = CODES[row.error_code], position.known
        self._client.note(error)
        position.nearby = -1
        if error is ErrorCode.OFFSET_OUT_OF_RANGE:
            if not known.deleting:
                self._fail(self._client.client_id, f"{known}: offset {position.offset} is out of range")
            position.is_out = True
        elif error in REFRESHES:
            self._client.stale()
            self._client.learn(*position.key, row.current_leader.leader_id, row.current_leader.leader_epoch)
        elif error not in PASSING and not (error in GONE and known.topic.delete_asked):
            self._fail(self._client.client_id, f"{known}: a fetch at {position.offset}: {error.name}")
        return True

    # Offsets.

    async def _look_up(self, broker: int, position: Position) -> None:
        """Asks the leader where the partition begins, or where it ends."""
        known, (name, number) = position.known, position.key
        leader = self._client.leader(name, number)
        timestamp = EARLIEST if position.is_out else self._random.choice((LATEST, LATEST, EARLIEST))
        row = ListOffsetsPartition(partition_index=number, current_leader_epoch=leader.epoch, timestamp=timestamp)
        request = ListOffsetsRequest(
            replica_id=-1,
            isolation_level=self._isolation,
            topics=[ListOffsetsTopic(name=name, partitions=[row])],
            timeout_ms=1_000,
        )
        known_end = position.known_end
        self.counts.lookups += 1
        try:
            response = await self._client.call(leader.node if leader.node >= 0 else broker, request)
        except TransportError as error:
            self._client.note(error.code)
            self._client.stale()
            return
        ((answer,),) = [topic.partitions for topic in response.topics]
        if answer.error_code:
            self._client.note(CODES[answer.error_code])
            self._client.stale()
            await self._client.pause()
        elif timestamp == LATEST and answer.offset < known_end:
            self._fail(self._client.client_id, f"{known}: ends at {answer.offset}, and {known_end} was read before")
        elif timestamp == EARLIEST and answer.offset > known.deleting:
            what = f"begins at {answer.offset}; up to {known.deleting} may be deleted"
            self._fail(self._client.client_id, f"{known}: {what}")
        elif position.is_out:
            position.offset, position.last_epoch, position.is_out = max(position.offset, answer.offset), -1, False
