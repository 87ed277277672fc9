"""Drives the classic groups of a shard: answers waiting requests, stores generations, sets deadlines.

    join, sync, leave            --> ClassicGroup (pure) --> effects: a generation to store, answers by ticket
    a deadline of the group      -->                              |
    stored, or failed            <--------------------------------'

A round is one rebalance of a classic group. A ticket is a future here: a join or a sync waits as long as the round
takes. A group does not learn that a caller was cancelled: its member keeps the ticket until the round is over, and
counts as joined, as a client does that loses its connection and joins again. A group without members and without
pending joins is not held: its state is in the log.

Requests for a consumer group with members go to `mixed_groups`, and so does a join whose group becomes one meanwhile.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from dataclasses import replace
from typing import Any
from uuid import UUID

from tidelog.coordinator.classic_group import ClassicGroup, ClassicState
from tidelog.coordinator.classic_invariants import validate_classic
from tidelog.coordinator.classic_requests import (
    ClassicEffects,
    GroupMigratedError,
    JoinGroup,
    JoinReply,
    LeaveGroup,
    StoreGeneration,
    SyncGroup,
    SyncReply,
)
from tidelog.coordinator.hosts import GroupShard, ShardHost
from tidelog.coordinator.mixed_groups import DISPATCHES_MAX, MixedGroups
from tidelog.model.errors import OverloadedError, TidelogError
from tidelog.model.group_errors import IllegalGenerationError, UnknownMemberIdError

LOGGER = logging.getLogger(__name__)

STORE_RETRY_S = 0.5
_OVERTAKEN = (GroupMigratedError, IllegalGenerationError)
"""The group in the log is, or was meanwhile, a consumer group: this generation is void."""
ROUND = "round"
"""First part of the timer keys of rounds; the second is the group."""


class ClassicRounds:
    """See the module. A shard owns it and ends it."""

    def __init__(self, shard: GroupShard, host: ShardHost) -> None:
        self._shard = shard
        self._host = host
        self._groups: dict[str, ClassicGroup] = {}
        self._waiting: dict[int, asyncio.Future[Any]] = {}
        self._abandoned: set[int] = set()
        """Tickets of cancelled callers that their groups have not answered yet; only `validate` reads them."""
        self._ticket = 0
        self._storing: Counter[str] = Counter()
        """Generations being stored, by group."""
        self._idle: dict[str, asyncio.Future[None]] = {}
        """By group: resolved when none of its generations is being stored."""
        self.mixed = MixedGroups(shard, host)

    def __len__(self) -> int:
        """Return how many requests wait for an answer."""
        return len(self._waiting)

    @property
    def groups(self) -> int:
        """The number of groups in memory, stored or not."""
        return len(self._groups)

    def get(self, group_id: str) -> ClassicGroup | None:
        """Return the group if it is in memory: it has members, or pending joins."""
        return self._groups.get(group_id)

    # Requests.

    async def join(self, group_id: str, request: JoinGroup) -> JoinReply:
        """Return when the round is over."""
        for _ in range(DISPATCHES_MAX):
            await self.mixed.thawed(group_id)
            request = replace(
                request,
                ticket=self._new_ticket(),
                now_ms=self._host.steady_ms(),
                new_member_id=self._new_member_id(request.client_id),
            )
            try:
                if self.mixed.has_members(group_id):
                    return await self.mixed.join(group_id, request)
                return await self._join_round(group_id, request)
            except GroupMigratedError as error:
                last = error
        raise last

    async def _join_round(self, group_id: str, request: JoinGroup) -> JoinReply:
        stored = self._shard.state.group(group_id)
        group = self._groups.get(group_id)
        if group is None:
            group = self._groups[group_id] = self._made(group_id)
        elif stored is not None:
            group.catch_up(stored.epoch)
        reply: JoinReply = await self._wait(group, request.ticket, group.join(request))
        return reply

    async def sync(self, group_id: str, request: SyncGroup) -> SyncReply:
        await self.mixed.thawed(group_id)
        request = replace(request, ticket=self._new_ticket(), now_ms=self._host.steady_ms())
        if self.mixed.has_members(group_id):
            return await self.mixed.sync(group_id, request)
        group = self._find(group_id)
        reply: SyncReply = await self._wait(group, request.ticket, group.sync(request))
        return reply

    async def heartbeat(self, group_id: str, *, member_id: str, generation: int, instance_id: str = "") -> None:
        # Answered while the group is frozen, too: it changes nothing, and a conversion may wait long for replicas. It
        # takes no ticket: the joins of one group must not end the sessions of others.
        if self.mixed.has_members(group_id):
            self.mixed.heartbeat(group_id, member_id=member_id, generation=generation, instance_id=instance_id)
            return
        group = self._find(group_id)
        group.heartbeat(member_id, generation, self._host.steady_ms(), instance_id)
        self._set_deadline(group)

    async def leave(self, group_id: str, members: tuple[tuple[str, str], ...]) -> tuple[TidelogError | None, ...]:
        """Remove the members, given as (member id, instance id); return their errors in order."""
        await self.mixed.thawed(group_id)
        if self.mixed.has_members(group_id):
            raise GroupMigratedError(f"group {group_id!r} is a consumer group now")
        group = self._find(group_id)
        request = LeaveGroup(ticket=self._new_ticket(), now_ms=self._host.steady_ms(), members=members)
        errors: tuple[TidelogError | None, ...] = await self._wait(group, request.ticket, group.leave(request))
        return errors

    def check_commit(self, group_id: str, member_id: str, generation: int, instance_id: str) -> None:
        """Raise unless the member of a classic group may commit offsets."""
        group = self._groups.get(group_id)
        if group is not None and group.members:
            group.check_commit(member_id, generation, self._host.steady_ms(), instance_id)
            self._set_deadline(group)

    def _find(self, group_id: str) -> ClassicGroup:
        group = self._groups.get(group_id)
        if group is None:
            raise UnknownMemberIdError(f"group {group_id!r} has no members: join it")
        return group

    def _made(self, group_id: str) -> ClassicGroup:
        stored = self._shard.state.group(group_id)
        return ClassicGroup(group_id, self._host.limits, stored=stored, now_ms=self._host.steady_ms())

    def _new_ticket(self) -> int:
        if len(self._waiting) >= self._host.waiting_max:
            raise OverloadedError(f"{len(self._waiting)} requests of classic groups wait already")
        self._ticket += 1
        return self._ticket

    def _new_member_id(self, client_id: str) -> str:
        return f"{client_id or 'member'}-{UUID(int=self._host.random.getrandbits(128), version=4)}"

    async def _wait(self, group: ClassicGroup, ticket: int, effects: ClassicEffects) -> Any:
        future = self._waiting[ticket] = asyncio.get_running_loop().create_future()
        try:
            self._carry_out(group, effects)
            return await future
        finally:
            if self._waiting.pop(ticket, None) is not None:  # a cancelled caller does not count as waiting
                self._abandoned.add(ticket)

    # Effects.

    def _carry_out(self, group: ClassicGroup, effects: ClassicEffects) -> None:
        if effects.store is None:
            self._answer(effects)
        else:
            self._host.spawn(self._store(group, effects.store, effects), name="store-generation")
        self._set_deadline(group)

    async def _store(self, group: ClassicGroup, store: StoreGeneration, effects: ClassicEffects) -> None:
        group_id = group.group_id
        if store.value.empty_since_ms >= 0:
            # Rounds use monotonic time; stored times are wall clock times.
            store = replace(store, value=replace(store.value, empty_since_ms=self._host.now_ms()))
        store = replace(store, now_ms=self._host.now_ms())
        self._storing[group_id] += 1
        try:
            error = await self._try(store)
            while error is not None and not isinstance(error, _OVERTAKEN) and self._must_store(group, store):
                LOGGER.info("group=%s: its empty generation is not stored yet: %s", group_id, error)
                await asyncio.sleep(STORE_RETRY_S)
                error = await self._try(store)
        finally:
            self._storing[group_id] -= 1
            if not self._storing[group_id]:
                del self._storing[group_id]
                idle = self._idle.pop(group_id, None)
                if idle is not None and not idle.done():
                    # Only after the group has the outcome, below.
                    asyncio.get_running_loop().call_soon(_resolve, idle)
        self._answer(effects, error)
        if self._groups.get(group.group_id) is group:
            self._carry_out(group, group.stored(store.value.generation, self._host.steady_ms(), error))

    async def _try(self, store: StoreGeneration) -> TidelogError | None:
        try:
            await self._shard.submit(store, is_own=True)
        except TidelogError as rejection:
            return rejection
        return None

    def _must_store(self, group: ClassicGroup, store: StoreGeneration) -> bool:
        """Return whether an empty group still has members in the log: only this coordinator can correct it."""
        is_held = self._groups.get(group.group_id) is group
        return is_held and group.state is ClassicState.EMPTY and group.generation == store.value.generation

    def _answer(self, effects: ClassicEffects, failed: TidelogError | None = None) -> None:
        for ticket, answer in effects.answers:
            self._abandoned.discard(ticket)
            future = self._waiting.pop(ticket, None)
            if future is None or future.done():
                continue  # the caller was cancelled
            error = answer if isinstance(answer, TidelogError) else failed
            if error is None:
                future.set_result(answer)
            else:
                future.set_exception(error)
                future.exception()  # marks it as retrieved: the caller may be gone

    # Time.

    async def stored(self, group_id: str) -> None:
        """Return when no generation of the group is being stored."""
        while self._storing[group_id]:
            idle = self._idle.get(group_id)
            if idle is None:
                idle = self._idle[group_id] = asyncio.get_running_loop().create_future()
            await asyncio.shield(idle)

    def _set_deadline(self, group: ClassicGroup) -> None:
        is_empty = group.state is ClassicState.EMPTY and not group.members and not group.pending
        if group.state is ClassicState.DEAD or (is_empty and not self._storing[group.group_id]):
            self._shard.timers.cancel((ROUND, group.group_id))
            if self._groups.get(group.group_id) is group:
                del self._groups[group.group_id]
            return
        deadline_ms = group.deadline_ms
        if deadline_ms is None:
            self._shard.timers.cancel((ROUND, group.group_id))
        else:
            due_s = asyncio.get_running_loop().time() + (deadline_ms - self._host.steady_ms()) / 1000
            self._shard.timers.set((ROUND, group.group_id), due_s)

    def due(self, group_id: str) -> None:
        """A deadline of the group has passed."""
        group = self._groups.get(group_id)
        if group is not None and not self.mixed.is_frozen(group_id):
            self._carry_out(group, group.tick(self._host.steady_ms()))

    def validate(self) -> None:
        """Assert the invariants of the groups, and that somebody waits for each of their tickets, or was cancelled."""
        assert not self._abandoned & self._waiting.keys(), "a ticket waits whose caller was cancelled"
        known = self._waiting.keys() | self._abandoned
        for group_id, group in self._groups.items():
            assert group.group_id == group_id, f"{group.group_id} is known as {group_id}"
            assert group.state is not ClassicState.DEAD, f"{group_id}: dead, and in use"
            validate_classic(group)
            for member in group.members.values():
                for ticket in (member.join_ticket, member.sync_ticket):
                    assert ticket is None or ticket in known, f"{group_id}: nobody waits for ticket {ticket}"

    # Lifecycle.

    def load(self, group_id: str) -> None:
        """Continue the last generation of a loaded group, with a full session for every member."""
        group = self._groups[group_id] = self._made(group_id)
        self._set_deadline(group)

    def has_members(self, group_id: str) -> bool:
        group = self._groups.get(group_id)
        return group is not None and bool(group.members)

    def thaw(self, group_id: str) -> None:
        """Set the group's deadline again: it may have passed while the group was frozen."""
        group = self._groups.get(group_id)
        if group is not None:
            self._set_deadline(group)

    def drop(self, group_id: str, error: TidelogError) -> None:
        """End the rounds of the group; waiting requests get the error."""
        group = self._groups.pop(group_id, None)
        if group is not None:
            self._answer(group.close(error))
            self._set_deadline(group)

    def limits_changed(self) -> None:
        for group in self._groups.values():
            group.limits = self._host.limits
        self.mixed.limits_changed()

    def end(self, error: TidelogError) -> None:
        groups, self._groups = self._groups, {}
        self.mixed.end()
        for group in groups.values():
            self._answer(group.close(error))
        self._abandoned.clear()
        waiting, self._waiting = self._waiting, {}
        for future in waiting.values():
            if not future.done():
                future.set_exception(error)
                future.exception()


def _resolve(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)
