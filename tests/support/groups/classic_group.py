"""A classic group with its shell: tickets, a log that takes generations, and time."""

from __future__ import annotations

from typing import Any

from support.groups.machine import Groups
from tidelog.coordinator.classic_group import ClassicGroup
from tidelog.coordinator.classic_requests import (
    ClassicEffects,
    JoinGroup,
    JoinReply,
    LeaveGroup,
    StoreGeneration,
    SyncGroup,
    SyncReply,
)
from tidelog.coordinator.limits import GroupLimits
from tidelog.model.errors import TidelogError


class Rounds:
    def __init__(self, groups: Groups | None = None, **limits: Any) -> None:
        self.groups = groups or Groups()
        self.now_ms = 1_000
        self.limits = GroupLimits(**limits)
        self.group = ClassicGroup("g", self.limits, stored=self.groups.state.group("g"), now_ms=self.now_ms)
        self.answers: dict[int, Any] = {}
        self.tickets = 0
        self.holds_stores = False
        self.stores: list[StoreGeneration] = []

    def take(self, effects: ClassicEffects) -> None:
        for ticket, answer in effects.answers:
            assert ticket not in self.answers, "every ticket is answered once"
            assert 0 < ticket <= self.tickets
            self.answers[ticket] = answer
        if effects.store is not None:
            self.stores.append(effects.store)
            if not self.holds_stores:
                self.store()

    def store(self, error: TidelogError | None = None) -> None:
        """The log takes the oldest generation that waits, or does not."""
        request = self.stores.pop(0)
        if error is None:
            try:
                self.groups.submit(request)
            except TidelogError as refusal:
                error = refusal
        self.take(self.group.stored(request.value.generation, self.now_ms, error))

    def ticket(self) -> int:
        self.tickets += 1
        return self.tickets

    def join(self, member_id: str = "", *, name: str = "", metadata: bytes = b"meta", **fields: Any) -> int:
        ticket = self.ticket()
        plain: dict[str, Any] = {
            "protocol_type": "consumer",
            "protocols": (("range", metadata),),
            "session_timeout_ms": 10_000,
            "rebalance_timeout_ms": 60_000,
            "new_member_id": name or f"m{ticket}",
            "needs_known_id": False,
        }
        self.take(
            self.group.join(JoinGroup(ticket=ticket, now_ms=self.now_ms, member_id=member_id, **(plain | fields)))
        )
        return ticket

    def sync(
        self, member_id: str, generation: int | None = None, *, dealt: dict[str, bytes] | None = None, **fields: Any
    ) -> int:
        ticket = self.ticket()
        request = SyncGroup(
            ticket=ticket,
            now_ms=self.now_ms,
            member_id=member_id,
            generation=self.group.generation if generation is None else generation,
            assignments=tuple((dealt or {}).items()),
            **fields,
        )
        self.take(self.group.sync(request))
        return ticket

    def beat(self, member_id: str, generation: int | None = None, **fields: Any) -> Any:
        number = self.group.generation if generation is None else generation
        try:
            self.group.heartbeat(member_id, number, self.now_ms, **fields)
        except TidelogError as error:
            return error
        return None

    def leave(self, *members: tuple[str, str]) -> Any:
        ticket = self.ticket()
        self.take(self.group.leave(LeaveGroup(ticket=ticket, now_ms=self.now_ms, members=members)))
        return self.answers[ticket]

    def wait(self, duration_ms: int) -> None:
        """Time passes, with every tick that the group wants."""
        end_ms = self.now_ms + duration_ms
        while (deadline_ms := self.group.deadline_ms) is not None and deadline_ms <= end_ms:
            self.now_ms = max(self.now_ms, deadline_ms)
            self.take(self.group.tick(self.now_ms))
            assert self.group.deadline_ms != deadline_ms, "a tick that was wanted does something"
        self.now_ms = end_ms

    def joined(self, ticket: int) -> JoinReply:
        answer = self.answers[ticket]
        assert isinstance(answer, JoinReply), answer
        return answer

    def synced(self, ticket: int) -> SyncReply:
        answer = self.answers[ticket]
        assert isinstance(answer, SyncReply), answer
        return answer

    def stable(self, *names: str, **fields: Any) -> None:
        """A group of these members, the first of them leading, each with its name as its assignment."""
        tickets = [self.join(name=name, **fields) for name in names]
        self.wait(self.limits.initial_rebalance_delay_ms)
        assert self.joined(tickets[0]).leader == names[0]
        self.deal(*names)

    def deal(self, *names: str) -> None:
        waiting = [self.sync(name) for name in names if name != self.group.leader]
        self.sync(self.group.leader, dealt={name: name.encode() for name in names})
        assert all(ticket in self.answers for ticket in waiting)
