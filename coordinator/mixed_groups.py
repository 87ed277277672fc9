"""Drives classic members of consumer groups, and conversions of groups between the two protocols, for a shard.

    JoinGroup, SyncGroup, Heartbeat --> ClassicRounds --the group is a consumer group--> here --> machine
    a consumer member joins a classic group with members --> freeze its rounds --> machine --> drop the rounds
    the last consumer member is gone                     --> machine --> load the rounds, which begin with a rebalance

While a group is converted its rounds are frozen: requests that would change them wait, deadlines do not count. The
snapshot of the rounds that the machine gets stays valid until the conversion has committed or failed; the requesting
client may be gone by then. A failed conversion changes nothing, and the rounds go on. Requests that were dispatched to
the former protocol of the group are dispatched again (`GroupMigratedError`).
"""

from __future__ import annotations

import asyncio
import logging
from dataclasses import replace
from typing import Any

from tidelog.coordinator import classic_members
from tidelog.coordinator.classic_requests import (
    ClassicJoin,
    ClassicSync,
    Downgrade,
    GroupMigratedError,
    JoinGroup,
    JoinReply,
    SyncGroup,
    SyncReply,
)
from tidelog.coordinator.hosts import GroupShard, ShardHost
from tidelog.coordinator.migration import check_upgrade, is_downgrade_due
from tidelog.coordinator.requests import JOIN_EPOCH, Heartbeat, HeartbeatReply, LiveClassicGroup
from tidelog.coordinator.state import CoordinatorState, Group
from tidelog.model.errors import PolicyViolationError, TidelogError
from tidelog.model.group_errors import CoordinatorNotAvailableError, RebalanceInProgressError
from tidelog.world.slicing import sliced

LOGGER = logging.getLogger(__name__)

DISPATCHES_MAX = 8
"""Attempts to dispatch a request while its group changes its protocol."""
RETRY_S = 0.5
GROUPS_PER_TURN = 1_000


class MixedGroups:
    """See the module. A shard owns it and ends it."""

    def __init__(self, shard: GroupShard, host: ShardHost) -> None:
        self._shard = shard
        self._host = host
        self._frozen: dict[str, asyncio.Future[None]] = {}
        """Groups under conversion; resolved when it ends."""
        self._downgrading: set[str] = set()
        self._policy = host.limits.migration_policy

    def is_frozen(self, group_id: str) -> bool:
        return group_id in self._frozen

    async def thawed(self, group_id: str) -> None:
        """Return when the group is not under conversion."""
        while (frozen := self._frozen.get(group_id)) is not None:
            await asyncio.shield(frozen)
            self._shard.check()

    def has_members(self, group_id: str) -> bool:
        """Return whether it is a consumer group with members."""
        group = self._shard.state.group(group_id)
        return group is not None and bool(group.members)

    # Classic members of a consumer group.

    async def join(self, group_id: str, request: JoinGroup) -> JoinReply:
        work = ClassicJoin(group=group_id, join=request, view=self._host.view, now_ms=self._host.now_ms())
        reply: JoinReply = await self._shard.submit(work)
        self._renew(group_id, reply.member_id)
        return reply

    async def sync(self, group_id: str, request: SyncGroup) -> SyncReply:
        self._shard.renew((group_id, request.member_id))
        work = ClassicSync(group=group_id, sync=request, view=self._host.view, now_ms=self._host.now_ms())
        reply: SyncReply = await self._shard.submit(work)
        self._renew(group_id, request.member_id)
        return reply

    def heartbeat(self, group_id: str, *, member_id: str, generation: int, instance_id: str = "") -> None:
        self._shard.check()
        group = self._shard.state.group(group_id)
        try:
            classic_members.heartbeat(group, group_id, member_id, instance_id, generation)
        except RebalanceInProgressError:
            self._renew(group_id, member_id)
            raise
        self._renew(group_id, member_id)

    def _renew(self, group_id: str, member_id: str) -> None:
        """Renew the member's session; start its rebalance timeout if the group waits for its join or sync."""
        group = self._shard.state.group(group_id)
        if group is None or member_id not in group.members:
            return
        member, key = group.members[member_id], (group_id, member_id)
        self._shard.renew(key)
        is_pending = member.is_classic and classic_members.is_pending(group, member_id)
        self._shard.note_revoking(
            key,
            HeartbeatReply(
                member_id,
                group.currents[member_id].epoch,
                None,
                member.session_timeout_ms,
                is_revoking=is_pending,
                rebalance_timeout_ms=member.rebalance_timeout_ms,
            ),
        )

    # Upgrades.

    async def consumer_heartbeat(self, request: Heartbeat) -> HeartbeatReply:
        """Handle a heartbeat of the consumer protocol. A join to a classic group with members converts the group."""
        for _ in range(DISPATCHES_MAX):
            if request.member_epoch != JOIN_EPOCH:
                break
            await self.thawed(request.group)
            try:
                if self._shard.rounds.has_members(request.group):
                    return await self._upgrade(request)
                joined: HeartbeatReply = await self._shard.submit(request)
                return joined
            except GroupMigratedError:
                await self._shard.rounds.stored(request.group)
        else:
            raise CoordinatorNotAvailableError(f"group {request.group!r} keeps changing its protocol: try again")
        reply: HeartbeatReply = await self._shard.submit(request)
        return reply

    async def _upgrade(self, request: Heartbeat) -> HeartbeatReply:
        held = self._shard.rounds.get(request.group)
        if held is not None:
            check_upgrade(request.group, held.protocol_type, self._host.limits)
        outcome: asyncio.Future[HeartbeatReply] = asyncio.get_running_loop().create_future()
        self._frozen[request.group] = asyncio.get_running_loop().create_future()
        self._host.spawn(self._convert(request, outcome), name="upgrade-group")
        return await outcome

    async def _convert(self, request: Heartbeat, outcome: asyncio.Future[HeartbeatReply]) -> None:
        """Convert the group; runs to the end even if the requesting client is gone."""
        try:
            await self._shard.rounds.stored(request.group)
            reply = await self._shard.submit(replace(request, live_classic=self._live(request.group)))
            LOGGER.info("group=%s member=%s: a classic group has become a consumer group", *_names(request))
            if not outcome.done():
                outcome.set_result(reply)
        except TidelogError as error:
            LOGGER.info("group=%s member=%s: not upgraded: %s", *_names(request), error)
            if not outcome.done():
                outcome.set_exception(error)
                outcome.exception()  # marks it as retrieved: the caller may be gone
        finally:
            self._thaw(request.group)
            if not outcome.done():
                outcome.cancel()

    def _live(self, group_id: str) -> LiveClassicGroup | None:
        """Return the live members of a classic group; None if none is in its rounds."""
        held, stored = self._shard.rounds.get(group_id), self._shard.state.group(group_id)
        if held is None or not held.members:
            return None
        return LiveClassicGroup(
            -1 if stored is None or stored.classic is None else stored.classic.generation,
            held.generation,
            {member.member_id: member.protocols for member in held.members.values()},
        )

    def _thaw(self, group_id: str) -> None:
        frozen = self._frozen.pop(group_id, None)
        if frozen is not None and not frozen.done():
            frozen.set_result(None)
        self._shard.rounds.thaw(group_id)

    # After a commit.

    def group_changed(self, group_id: str, old: Group | None, new: Group | None) -> None:
        was, now = old is not None and bool(old.members), new is not None and bool(new.members)
        if now:
            self._shard.rounds.drop(group_id, GroupMigratedError(f"group {group_id!r} is a consumer group now"))
        elif was and new is not None and new.classic is not None and new.classic.members:
            self._shard.rounds.load(group_id)
        if now and (old is None or new is None or old.members is not new.members):
            self._downgrade_soon(group_id)

    async def start(self, state: CoordinatorState) -> None:
        """Start downgrades that a former coordinator or policy has left undone. Yields between groups: a shard may have
        100,000."""
        due = []
        async for group_id, group in sliced(state.groups.items(), GROUPS_PER_TURN):
            if is_downgrade_due(group, self._host.limits):
                due.append(group_id)
        for group_id in sorted(due):
            self._downgrade_soon(group_id)

    def limits_changed(self) -> None:
        before, self._policy = self._policy, self._host.limits.migration_policy
        if before != self._policy:
            self._host.spawn(self.start(self._shard.state), name="downgrade-groups")

    def _downgrade_soon(self, group_id: str) -> None:
        is_due = is_downgrade_due(self._shard.state.group(group_id), self._host.limits)
        if is_due and group_id not in self._downgrading:
            self._downgrading.add(group_id)
            self._host.spawn(self._downgrade(group_id), name="downgrade-group")

    async def _downgrade(self, group_id: str) -> None:
        try:
            while is_downgrade_due(self._shard.state.group(group_id), self._host.limits):
                work = Downgrade(group=group_id, view=self._host.view, now_ms=self._host.now_ms())
                try:
                    await self._shard.submit(work, is_own=True)
                    LOGGER.info("group=%s: a consumer group of classic members has become a classic group", group_id)
                    return
                except PolicyViolationError as error:
                    LOGGER.warning("group=%s stays a consumer group: %s", group_id, error)
                    return
                except TidelogError as error:
                    self._shard.check()  # raises if the shard has ended
                    LOGGER.info("group=%s is downgraded later: %s", group_id, error)
                    await asyncio.sleep(RETRY_S)
        except TidelogError as error:
            LOGGER.info("group=%s: not downgraded here: %s", group_id, error)
        finally:
            self._downgrading.discard(group_id)

    def end(self) -> None:
        for group_id in list(self._frozen):
            self._thaw(group_id)


def _names(request: Heartbeat) -> tuple[Any, Any]:
    return request.group, request.member_id
