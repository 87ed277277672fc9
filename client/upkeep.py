"""`Upkeep`: what a consumer does by itself, whether its user comes by or not: automatic commits, warnings, and leaving
the group for a user who has been away too long."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable

from tidelog.client.commits import Commits
from tidelog.client.hand import Hand
from tidelog.client.names import ConsumerOptions
from tidelog.client.positions import Positions
from tidelog.client.presence import Presence
from tidelog.client.reader import Reader
from tidelog.client.record import TopicPartition
from tidelog.model.ids import PartitionId

LOGGER = logging.getLogger(__name__)

_TICK_S = 1.0
_WARN_S = 10.0
_LEAVING_MS = 2_000
"""For the commit of a member that has not polled: others wait for its partitions."""


class Upkeep:
    def __init__(
        self,
        options: ConsumerOptions,
        positions: Positions,
        reader: Reader,
        commits: Commits,
        hand: Hand,
        *,
        attend: Callable[[], None],
        is_member: Callable[[], bool],
        may_commit: Callable[[], bool],
        leave: Callable[[str], Awaitable[None]],
    ) -> None:
        """`attend` has the user look in; `leave` leaves the group, for the reason that it is given."""
        self.presence = Presence()
        self._options = options
        self._positions = positions
        self._reader = reader
        self._commits = commits
        self._hand = hand
        self._attend = attend
        self._is_member = is_member
        self._may_commit = may_commit
        self._leave = leave
        self._warned: set[PartitionId] = set()

    async def run(self) -> None:
        options = self._options
        period_s = min(_TICK_S, options.auto_commit_interval_ms / 1000, options.max_poll_interval_ms / 4000)
        committed_s = _now_s()
        while True:
            await asyncio.sleep(period_s)
            self._attend()
            self._warn()
            if _now_s() - committed_s >= options.auto_commit_interval_ms / 1000:
                committed_s = _now_s()
                if self._may_commit():
                    self.look_at_hand()
                    self._commits.auto_soon()
            if self._is_away_too_long() and self._is_member():
                await self._leave_for_polling()

    def _is_away_too_long(self) -> bool:
        return self.presence.away_s(_now_s()) * 1000 > self._options.max_poll_interval_ms

    async def _leave_for_polling(self) -> None:
        away_ms = self.presence.away_s(_now_s()) * 1000
        self.look_at_hand()
        await self._commits.before_giving_up(tuple(self._positions.held), timeout_ms=_LEAVING_MS)
        if not self._is_away_too_long() or not self._is_member():
            return  # he has come back meanwhile, or others have put it out
        await self._leave(
            f"{away_ms:.0f} ms without a poll, max_poll_interval_ms is {self._options.max_poll_interval_ms}: the "
            "member has left the group, so that others go on with its partitions; do less between two polls, or raise "
            "the limit"
        )

    def look_at_hand(self) -> None:
        """All before the record that the user works on is done, though he may be long at it."""
        record = self._hand.in_work()
        if record is not None and (held := self._positions.named(TopicPartition(record.topic, record.partition))):
            self._positions.done_up_to(held, record.offset, record.leader_epoch)

    def _warn(self) -> None:
        """Once for each partition that cannot be read for a while."""
        failing = self._reader.failing()
        self._warned &= set(failing)
        for partition, (since_s, error) in failing.items():
            held = self._positions.held.get(partition)
            if since_s > _WARN_S and partition not in self._warned and held is not None:
                self._warned.add(partition)
                LOGGER.warning("partition=%s cannot be read for %.0f s: %s", held.name, since_s, error)


def _now_s() -> float:
    return asyncio.get_running_loop().time()
