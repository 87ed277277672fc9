"""`BackgroundTasks`: automatic commits, `max_poll_interval_ms`, warnings about partitions and coordinators."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable

from tidelog.client.consumer.commits import Commits
from tidelog.client.consumer.poll_timer import PollTimer
from tidelog.client.consumer.reader import Reader
from tidelog.client.consumer.reconciler import Reconciler
from tidelog.client.consumer.subscription_state import PartitionState, SubscriptionState
from tidelog.client.option_table import ConsumerConfig
from tidelog.client.outage_log import REPEAT_S

LOGGER = logging.getLogger(__name__)

_TICK_S = 1.0
_WARN_S = 10.0
_NO_COORDINATOR_S = 5.0
"""Without a response of a coordinator, before the first warning; the next ones follow every `REPEAT_S`."""
_LEAVE_COMMIT_MS = 2_000
"""For the last commit of a member that does not poll: others wait for its partitions."""


class BackgroundTasks:
    def __init__(
        self,
        config: ConsumerConfig,
        subscription: SubscriptionState,
        reader: Reader,
        commits: Commits,
        reconciler: Reconciler,
        *,
        notify: Callable[[], None],
        leave: Callable[[str], Awaitable[None]],
    ) -> None:
        """`notify` makes an iterating user call the core; `leave` leaves the group for a reason."""
        self.poll_timer = PollTimer()
        self._config = config
        self._subscription = subscription
        self._reader = reader
        self._commits = commits
        self._reconciler = reconciler
        self._notify = notify
        self._leave = leave
        self._warned: set[PartitionState] = set()
        self._next_warning_s = _NO_COORDINATOR_S

    async def run(self) -> None:
        config = self._config
        period_s = min(_TICK_S, config.auto_commit_interval_ms / 1000, config.max_poll_interval_ms / 4000)
        committed_s = _now_s()
        while True:
            await asyncio.sleep(period_s)
            self._notify()
            self._warn()
            self._warn_of_coordinator()
            if _now_s() - committed_s >= config.auto_commit_interval_ms / 1000:
                committed_s = _now_s()
                if self._reconciler.is_member or not self._reconciler.is_subscribed:
                    self._commits.start_auto_commit()
            if self._is_idle_too_long() and self._reconciler.is_member:
                await self._leave_group()

    def _is_idle_too_long(self) -> bool:
        return self.poll_timer.idle_s(_now_s()) * 1000 > self._config.max_poll_interval_ms

    async def _leave_group(self) -> None:
        idle_ms = self.poll_timer.idle_s(_now_s()) * 1000
        await self._commits.before_revocation(list(self._subscription.partitions), timeout_ms=_LEAVE_COMMIT_MS)
        if not self._is_idle_too_long() or not self._reconciler.is_member:
            return  # meanwhile the user polled, or the coordinator fenced the member
        await self._leave(
            f"{idle_ms:.0f} ms without a poll, max_poll_interval_ms is {self._config.max_poll_interval_ms}: the "
            "member has left the group, so that others take its partitions; do less between two polls, or raise "
            "the limit"
        )

    def _warn_of_coordinator(self) -> None:
        outage = None if self._reconciler.membership is None else self._reconciler.membership.outage()
        if outage is None:
            self._next_warning_s = _NO_COORDINATOR_S
        elif outage[0] >= self._next_warning_s:
            self._next_warning_s = outage[0] + REPEAT_S
            LOGGER.warning(
                "group %s: no coordinator for %.0f s: %s; trying again",
                *(self._config.group, *outage),
            )

    def _warn(self) -> None:
        """Once for each partition that cannot be fetched for a while."""
        failing = self._reader.failing()
        self._warned &= set(failing)
        for state, failing_s in failing.items():
            if failing_s > _WARN_S and state not in self._warned:
                self._warned.add(state)
                LOGGER.warning("partition=%s cannot be fetched for %.0f s: %s", state.name, failing_s, state.last_error)


def _now_s() -> float:
    return asyncio.get_running_loop().time()
