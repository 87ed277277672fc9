"""`Reconciler`: reconciles the assigned partitions with the target assignment of the group, and runs the callbacks.

    the target has a new partition     assigned at once; fetched after `on_assigned`, if there is one
    the target lacks a partition       in the next `reconcile`: commit, `on_revoked`, then report it as given up
    the member is fenced               `on_lost` in the next `reconcile`; then the member joins again

`reconcile` and `leave` run in a call of the user, so that the callbacks run on the user's thread or loop. A call may be
interrupted (Ctrl-C, a cancelled task) anywhere. A change stays pending until its callback was called; then it is
finished, although the callback may have failed.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable
from typing import Any

from tidelog.client.bridge import call_user
from tidelog.client.consumer.commits import Commits
from tidelog.client.consumer.membership import Assignment, Membership
from tidelog.client.consumer.rebalance import Change, Rebalance, RebalanceListener
from tidelog.client.consumer.subscription_state import PartitionState, SubscriptionState
from tidelog.client.metadata import TopicInfo
from tidelog.client.record import TopicPartition
from tidelog.model.errors import TidelogError
from tidelog.model.ids import PartitionId

LOGGER = logging.getLogger(__name__)


def topic_of(name: str, partition: PartitionId) -> TopicInfo:
    """The topic of a partition, without its other partitions."""
    return TopicInfo(name, partition.topic_id, False, ())


class Reconciler:
    """Implements `membership.Member`. Used on the IO loop."""

    def __init__(
        self,
        subscription: SubscriptionState,
        commits: Commits,
        *,
        positions_needed: Callable[[], None],
        changed: Callable[[], None],
        notify: Callable[[], None],
    ) -> None:
        """`positions_needed`: partitions have no position. `changed`: the subscription has changed. `notify`: the user
        has to call `reconcile`."""
        self.membership: Membership | None = None
        self.listener = RebalanceListener()
        self.is_subscribed = False
        self.departure: TidelogError | None = None
        """Why this consumer is not a member any more."""
        self.fatal: TidelogError | None = None
        self.rebalances = 0
        self.is_in_callback = False
        self.callback_task: object = None
        self._subscription = subscription
        self._commits = commits
        self._positions_needed = positions_needed
        self._changed = changed
        self._notify = notify
        self._target: Assignment | None = None
        self._has_new_target = False
        self._lost: dict[PartitionId, TopicPartition] = {}
        self._pending: Rebalance | None = None
        self._is_leaving = False

    @property
    def is_member(self) -> bool:
        return self.is_subscribed and self.membership is not None and self.membership.is_member

    @property
    def may_join(self) -> bool:
        """Lost partitions are reported to the user first."""
        return self.is_subscribed and not self._lost and self.fatal is None

    # The membership calls these.

    def assigned(self, assignment: Assignment) -> None:
        self._target = assignment
        self.departure = None
        self._has_new_target = True
        self.rebalances += 1
        self._adopt()
        self._notify()

    def lost(self, error: TidelogError) -> None:
        self.departure = error
        self._target = None
        self._has_new_target = False
        for state in self._subscription.remove(list(self._subscription.partitions)):
            # The user does not know of a partition before `on_assigned`, and was notified of a pending revocation.
            if state.is_assigned_to_user or (self._is_leaving and self._pending is None):
                self._lost[state.partition] = state.name
        self._changed()
        self._notify()

    def failed(self, error: TidelogError) -> None:
        self.fatal = error
        self._notify()

    def _adopt(self) -> None:
        """Assigns what is new; what has to go waits for `reconcile`."""
        assert self._target is not None, "a member has a target"
        assert self.membership is not None, "a subscription has a membership"
        for partition, name in self._target.items():
            # A partition without a name was deleted: the next assignment takes it away.
            if name and partition not in self._subscription and partition not in self._lost:
                state = PartitionState(topic_of(name, partition), partition)
                state.pending_assigned_callback = self.listener.on_assigned is not None
                self._subscription.add(state)
        self.membership.report({state.partition: state.topic.name for state in self._subscription})
        self._positions_needed()

    def forget(self, partitions: Iterable[PartitionId]) -> None:
        self._subscription.remove(list(partitions))
        self._changed()

    # The user calls these.

    async def reconcile(self) -> None:
        """Carries out all changes that are due."""
        if self._is_leaving:
            self._stay()
        while True:
            if self._pending is None:
                self._pending = await self._next_change()
            if self._pending is None:
                return
            await self._run_callback(self._pending)

    async def _next_change(self) -> Rebalance | None:
        while True:
            if self._lost:
                return Rebalance(Change.LOST, tuple(self._lost), tuple(self._lost.values()))
            target = self._target
            if target is None:
                return None
            going = [state for state in self._subscription if state.partition not in target]
            if unknown := [state.partition for state in going if state.pending_assigned_callback]:
                # Assigned and taken away again before the user knew: no callback.
                self.forget(unknown)
                self._adopt()
                continue
            if not going:
                return self._new_partitions()
            await self._commits.before_revocation([state.partition for state in going])
            if self._lost or self._target is not target:
                continue
            # Nothing waits from here to the caller: a change that the caller does not see has not happened.
            self._mark_revoked(going)
            return Rebalance.of(Change.REVOKED, going)

    def _new_partitions(self) -> Rebalance | None:
        if not self._has_new_target:
            return None
        self._has_new_target = False
        new = [state for state in self._subscription if state.pending_assigned_callback]
        if self.listener.on_assigned is not None:
            return Rebalance.of(Change.ASSIGNED, new)
        for state in new:
            state.pending_assigned_callback = False
        self._changed()
        return None

    def _mark_revoked(self, states: Iterable[PartitionState]) -> None:
        for state in states:
            state.pending_revocation = True
            state.drop_fetched()
        self._changed()

    async def _run_callback(self, rebalance: Rebalance) -> None:
        callback = self.listener.callback(rebalance.change)
        is_called = callback is None

        def call() -> Any:
            nonlocal is_called
            is_called = True
            self.callback_task = _current_task()
            return None if callback is None else callback(list(rebalance.names))

        try:
            if callback is not None:
                self.is_in_callback = True
                await call_user(call)
        finally:
            self.is_in_callback, self.callback_task = False, None
            if is_called:
                self._finish(rebalance)

    def _finish(self, rebalance: Rebalance) -> None:
        self._pending = None
        if rebalance.change is Change.ASSIGNED:
            for partition, name in zip(rebalance.partitions, rebalance.names, strict=True):
                state = self._subscription.partitions.get(partition)
                if state is None:
                    self._lost[partition] = name  # during its callback
                else:
                    state.pending_assigned_callback = False
            self._changed()
            return
        for partition in rebalance.partitions:
            self._lost.pop(partition, None)
        if rebalance.change is Change.REVOKED:
            self.forget(rebalance.partitions)
            if self._target is not None and not self._is_leaving:
                self._adopt()

    # Leaving.

    async def leave(self, *, timeout_ms: int) -> None:
        """Before an unsubscribe or close: commits what is due and runs `on_revoked` for all partitions."""
        if self._is_leaving and self._pending is None:
            self._unmark_revoked()  # a former call was interrupted
        while True:
            if self._pending is None:
                self._pending = await self._last_change(timeout_ms)
            if self._pending is None:
                return
            await self._run_callback(self._pending)

    async def _last_change(self, timeout_ms: int) -> Rebalance | None:
        if self._lost:
            return Rebalance(Change.LOST, tuple(self._lost), tuple(self._lost.values()))
        if not self._subscription.partitions or (self.is_subscribed and not self.is_member):
            return None
        self._is_leaving = True
        assigned = [state for state in self._subscription if state.is_assigned_to_user]
        self._mark_revoked(self._subscription)
        await self._commits.before_revocation(list(self._subscription.partitions), timeout_ms=timeout_ms)
        if not self.is_subscribed or self._lost or not assigned:
            return None
        return Rebalance.of(Change.REVOKED, assigned)

    def _unmark_revoked(self) -> None:
        for state in self._subscription:
            state.pending_revocation = False
        self._changed()

    def _stay(self) -> None:
        """`leave` was interrupted, and the user goes on."""
        self._is_leaving = False
        if self._pending is None:
            self._unmark_revoked()
        if self._target is not None:
            self._has_new_target = True
            self._adopt()

    def reset(self) -> None:
        """Unsubscribed."""
        self.forget(self._subscription.partitions)
        self.is_subscribed = self._has_new_target = self._is_leaving = False
        self._target = self.fatal = self.departure = self._pending = None
        self._lost.clear()
        self.listener = RebalanceListener()


def _current_task() -> object:
    """The caller's, if it runs on an event loop."""
    try:
        return asyncio.current_task()
    except RuntimeError:
        return None
