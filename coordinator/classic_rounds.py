"""The classic groups of a shard at work: who waits for which answer, what is to be stored, when time is up.

    join, sync, heartbeat, leave --> ClassicGroup (pure) --> effects: a generation to store, answers by ticket
    a deadline of the group      -->                              |
    stored, or not               <--------------------------------'

A ticket is a future here. Whoever waits for a round waits as long as the round takes; a caller that is gone is passed
over. A group without members and without anybody on the way is not held: what is left of it stands in the log.

Requests for a consumer group with members go to `mixed_groups`, and so does a join whose group becomes one meanwhile.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from dataclasses import replace
from typing import TYPE_CHECKING, Any
from uuid import UUID

from tidelog.coordinator.classic_group import ClassicGroup, ClassicState
from tidelog.coordinator.classic_requests import (
    ClassicEffects,
    ClassicHeartbeat,
    GroupMigratedError,
    JoinGroup,
    JoinReply,
    LeaveGroup,
    StoreGeneration,
    SyncGroup,
    SyncReply,
)
from tidelog.coordinator.mixed_groups import DISPATCHES_MAX, MixedGroups
from tidelog.model.errors import OverloadedError, TidelogError
from tidelog.model.group_errors import IllegalGenerationError, UnknownMemberIdError

if TYPE_CHECKING:
    from tidelog.coordinator.shard import Shard, ShardHost

LOGGER = logging.getLogger(__name__)

STORE_RETRY_S = 0.5
_OVERTAKEN = (GroupMigratedError, IllegalGenerationError)
"""The log has members of a consumer group, or has had since: it knows of none of this group."""
ROUND = "round"
"""The first part of the keys of our deadlines; the second is the group."""


class ClassicRounds:
    """See the module. Belongs to a shard, and ends with it."""

    def __init__(self, shard: Shard, host: ShardHost) -> None:
        self._shard = shard
        self._host = host
        self._groups: dict[str, ClassicGroup] = {}
        self._waiting: dict[int, asyncio.Future[Any]] = {}
        self._ticket = 0
        self._storing: Counter[str] = Counter()
        """Generations that are under way to the log."""
        self._idle: dict[str, asyncio.Future[None]] = {}
        """Groups for whose generations somebody waits; resolved when none is under way."""
        self.mixed = MixedGroups(shard, host)

    def __len__(self) -> int:
        """How many wait for an answer."""
        return len(self._waiting)

    @property
    def groups(self) -> int:
        """How many are held, whether the log knows them yet or not."""
        return len(self._groups)

    def get(self, group_id: str) -> ClassicGroup | None:
        """The group, if it is held: it has members, or some are on their way."""
        return self._groups.get(group_id)

    # Requests.

    async def join(self, group_id: str, **fields: Any) -> JoinReply:
        """Fields of `JoinGroup`; the answer comes when the round is over."""
        for _ in range(DISPATCHES_MAX):
            await self.mixed.thawed(group_id)
            request = JoinGroup(
                ticket=self._new_ticket(),
                now_ms=self._host.steady_ms(),
                new_member_id=self._new_member_id(fields.get("client_id", "")),
                **fields,
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

    async def sync(self, group_id: str, **fields: Any) -> SyncReply:
        await self.mixed.thawed(group_id)
        request = SyncGroup(ticket=self._new_ticket(), now_ms=self._host.steady_ms(), **fields)
        if self.mixed.has_members(group_id):
            return await self.mixed.sync(group_id, request)
        group = self._find(group_id)
        reply: SyncReply = await self._wait(group, request.ticket, group.sync(request))
        return reply

    async def heartbeat(self, group_id: str, **fields: Any) -> None:
        # Answered also while the group is frozen: it changes nothing, and a conversion may wait for replicas for long.
        if self.mixed.has_members(group_id):
            self.mixed.heartbeat(group_id, **fields)
            return
        group = self._find(group_id)
        request = ClassicHeartbeat(ticket=self._new_ticket(), now_ms=self._host.steady_ms(), **fields)
        await self._wait(group, request.ticket, group.heartbeat(request))

    async def leave(self, group_id: str, members: tuple[tuple[str, str], ...]) -> tuple[TidelogError | None, ...]:
        """(member id, instance id) of each; the errors are in their order."""
        await self.mixed.thawed(group_id)
        if self.mixed.has_members(group_id):
            raise GroupMigratedError(f"group {group_id!r} is a consumer group now")
        group = self._find(group_id)
        request = LeaveGroup(ticket=self._new_ticket(), now_ms=self._host.steady_ms(), members=members)
        errors: tuple[TidelogError | None, ...] = await self._wait(group, request.ticket, group.leave(request))
        return errors

    def check_commit(self, group_id: str, member_id: str, generation: int, instance_id: str) -> None:
        """Before offsets of a member of a classic group are committed."""
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
            self._waiting.pop(ticket, None)  # a caller that is gone does not count as waiting

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
            # Rounds count in time that never jumps; what is stored is compared with the time of the wall.
            store = replace(store, value=replace(store.value, empty_since_ms=self._host.now_ms()))
        store = replace(store, now_ms=self._host.now_ms())
        self._storing[group_id] += 1
        try:
            error = await self._try(store)
            while error is not None and not isinstance(error, _OVERTAKEN) and self._must_store(group, store):
                LOGGER.info("group=%s: that it is empty is not stored yet: %s", group_id, error)
                await asyncio.sleep(STORE_RETRY_S)
                error = await self._try(store)
        finally:
            self._storing[group_id] -= 1
            if not self._storing[group_id]:
                del self._storing[group_id]
                idle = self._idle.pop(group_id, None)
                if idle is not None and not idle.done():
                    # Not before its outcome is known to the group, below.
                    asyncio.get_running_loop().call_soon(_resolve, idle)
        self._answer(effects, error)
        if self._groups.get(group.group_id) is group:
            self._carry_out(group, group.stored(store.value.generation, self._host.steady_ms(), error))

    async def _try(self, store: StoreGeneration) -> TidelogError | None:
        try:
            await self._shard.submit(store, is_own=True)
        except TidelogError as refusal:
            return refusal
        return None

    def _must_store(self, group: ClassicGroup, store: StoreGeneration) -> bool:
        """The log still knows members of a group that has none: nobody but us will tell it."""
        is_held = self._groups.get(group.group_id) is group
        return is_held and group.state is ClassicState.EMPTY and group.generation == store.value.generation

    def _answer(self, effects: ClassicEffects, failed: TidelogError | None = None) -> None:
        for ticket, answer in effects.answers:
            future = self._waiting.pop(ticket, None)
            if future is None or future.done():
                continue  # the caller is gone
            error = answer if isinstance(answer, TidelogError) else failed
            if error is None:
                future.set_result(answer)
            else:
                future.set_exception(error)
                future.exception()  # a caller that is gone must not make the loop complain

    # Time.

    async def stored(self, group_id: str) -> None:
        """Returns when no generation of the group is under way to the log."""
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

    # Life.

    def load(self, group_id: str) -> None:
        """The last generation of a group that was read from the log goes on, with a full session for everybody."""
        group = self._groups[group_id] = self._made(group_id)
        self._set_deadline(group)

    def has_members(self, group_id: str) -> bool:
        group = self._groups.get(group_id)
        return group is not None and bool(group.members)

    def thaw(self, group_id: str) -> None:
        """Deadlines that have passed while the group was frozen come up now."""
        group = self._groups.get(group_id)
        if group is not None:
            self._set_deadline(group)

    def drop(self, group_id: str, error: TidelogError) -> None:
        """The rounds of the group are over; waiting requests get the error."""
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
        waiting, self._waiting = self._waiting, {}
        for future in waiting.values():
            if not future.done():
                future.set_exception(error)
                future.exception()


def _resolve(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)
