"""A member's stream: heartbeats in, answers out, and assignment changes as soon as they commit.

    receive --> heartbeat --> shard --.
                                       +--> one at a time, in order --> send
    commit changes the member -> shard '

The member's heartbeats and the heartbeats made in its name take turns, so answers leave in the order of their
decisions. A heartbeat made in its name carries the epoch that the member is known to have: the last one that it sent,
or the answer to its join (a member without that answer joins again).

The stream ends after a leave, after an error (sent last), when the coordinator ends it, or when the member's side is
gone. Only in the last case does the member have just its grace time. A broker that stops ends its shards before its
streams, so that it removes nobody.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Protocol

from tidelog.coordinator.partition_shard import RETRY_S
from tidelog.coordinator.requests import JOIN_EPOCH, Heartbeat, HeartbeatReply, TopicsView
from tidelog.coordinator.shard import Shard
from tidelog.model.errors import InvalidRequestError, StreamBrokenError, StreamClosedError, TidelogError
from tidelog.world.events import is_asleep

LOGGER = logging.getLogger(__name__)

ANSWERS_MAX = 16
"""Unsent answers of a member that does not read them; at this limit its heartbeats are not read either."""

Answer = HeartbeatReply | TidelogError
Receive = Callable[[], Awaitable[Heartbeat | None]]
"""The next heartbeat of the stream, with `is_streamed`; None at its end."""
Send = Callable[[Answer], Awaitable[None]]


class HeartbeatRouter(Protocol):
    """Passes heartbeats to the shard of their group."""

    @property
    def view(self) -> TopicsView: ...

    def now_ms(self) -> int: ...

    def keep(self, task: asyncio.Task[None]) -> None:
        """Holds a reference to the task until it ends."""
        ...

    async def heartbeat(self, request: Heartbeat) -> tuple[Shard, HeartbeatReply]: ...

    async def changes(self, shard: Shard, request: Heartbeat) -> HeartbeatReply: ...


class MemberStream:
    """`run` handles the call; the shard calls the other methods."""

    def __init__(self, router: HeartbeatRouter, receive: Receive, send: Send) -> None:
        self._router = router
        self._receive = receive
        self._send = send
        self._key: tuple[str, str] | None = None
        self._shard: Shard | None = None
        self._instance_id = ""
        self._epoch = JOIN_EPOCH
        """The epoch that the member is known to have."""
        self._sent_epoch = JOIN_EPOCH
        self._turn = asyncio.Lock()
        self._answers: deque[Answer] = deque()
        self._has_changes = False
        self._is_in_doubt = False
        """Whether a change may have been decided whose answer was not sent: the next answer has the assignment."""
        self._is_leaving = False
        """Whether a leave is in progress: the member needs no notice of its own removal."""
        self._is_over = False
        """Whether only the queued answers and the last error are still sent."""
        self._final_error: TidelogError | None = None
        self._is_broken = False
        self._has_ended = False
        """Whether the call has returned."""
        self._wake = asyncio.Event()
        self._is_retrying = False
        """Whether a timer repeats a notice that failed."""
        self._drained = asyncio.Event()

    @property
    def is_notified(self) -> bool:
        """Whether it is about to check for changes: now, or with the next heartbeat of the member."""
        is_busy = self._turn.locked() or self._is_over
        return is_busy or self._has_changes or self._is_retrying or self._epoch != self._sent_epoch

    def validate(self) -> None:
        """Assert that whatever there is to send has somebody who sends it."""
        is_due = self._answers or self._has_changes or self._is_over
        assert not (is_due and is_asleep(self._wake)), f"something is to be sent to {self._key}"
        assert len(self._answers) <= ANSWERS_MAX, f"{len(self._answers)} answers wait for {self._key}"

    # From the shard.

    def notify(self) -> None:
        """Check whether the member's assignment has changed, and send it."""
        self._has_changes, self._is_retrying = True, False
        self._wake.set()

    def end(self, error: TidelogError | None) -> None:
        """End the stream, with this error as its last message."""
        if not self._is_leaving and not self._is_over:
            self._is_over, self._final_error = True, error
            self._wake.set()

    # The call.

    async def run(self) -> None:
        reader = asyncio.get_running_loop().create_task(self._read(), name="membership")
        self._router.keep(reader)
        is_broken = True
        try:
            await self._answer()
            is_broken = self._is_broken
            if reader.done():
                reader.result()
        except (StreamBrokenError, StreamClosedError) as error:
            LOGGER.debug("a member's stream has broken: %s", error)
        finally:
            # The reader ends with the stream. Cancelling it would break the stream, and the last message might not
            # arrive.
            self._is_over = self._has_ended = True
            self._drained.set()
            if self._shard is not None and self._key is not None:
                self._shard.detach(self._key, self, is_broken=is_broken)

    async def _read(self) -> None:
        try:
            while not self._is_over:
                while len(self._answers) >= ANSWERS_MAX and not self._is_over:
                    self._drained.clear()
                    await self._drained.wait()
                request = await self._receive()
                if request is None:
                    break
                await self._take(request)
        except (StreamBrokenError, StreamClosedError) as error:
            LOGGER.debug("a member's stream has broken: %s", error)
        except TidelogError as error:
            self.end(error)  # the message is no valid request
        finally:
            self._is_broken = not self._is_over
            self._is_over = True
            self._wake.set()

    async def _take(self, request: Heartbeat) -> None:
        async with self._turn:
            if self._is_over:
                return
            self._is_leaving = request.member_epoch < JOIN_EPOCH
            try:
                self._answers.append(await self._heartbeat(request))
                self._is_over = self._is_leaving
                self._wake.set()
            except TidelogError as error:
                self._is_leaving = False
                self.end(error)

    async def _heartbeat(self, request: Heartbeat) -> HeartbeatReply:
        key = request.group, request.member_id
        if self._key is None:
            self._key, self._instance_id = key, request.instance_id
        elif self._key != key:
            raise InvalidRequestError(f"this is the stream of member {self._key[1]} of group {self._key[0]}")
        if self._is_in_doubt:
            request = replace(request, wants_assignment=True)
        shard, reply = await self._router.heartbeat(request)
        self._is_in_doubt = False  # a heartbeat that fails ends the stream
        if request.member_epoch >= JOIN_EPOCH:
            self._epoch = request.member_epoch or reply.member_epoch
            if self._shard is not shard:
                self._shard = shard
                shard.attach(key, self)
                if self._has_ended:  # the member was gone before its join committed
                    shard.detach(key, self, is_broken=True)
        return reply

    async def _answer(self) -> None:
        while True:
            await self._wake.wait()
            self._wake.clear()
            await self._send_answers()
            if self._is_over:
                if self._final_error is not None:
                    await self._send(self._final_error)
                return
            if self._has_changes:
                await self._send_changes()

    async def _send_answers(self) -> None:
        while self._answers:
            await self._send_answer(self._answers.popleft())
        self._drained.set()

    async def _send_changes(self) -> None:
        async with self._turn:
            await self._send_answers()
            if self._is_over or self._shard is None or self._key is None:
                return
            self._has_changes = False
            if self._epoch != self._sent_epoch:
                return  # the member has not confirmed the last epoch yet; its next heartbeat gets the changes
            request = Heartbeat(
                group=self._key[0],
                member_id=self._key[1],
                member_epoch=self._epoch,
                instance_id=self._instance_id,
                view=self._view,
                now_ms=self._router.now_ms(),
                is_on_behalf=True,
                wants_assignment=self._is_in_doubt,
            )
            self._is_in_doubt = True
            try:
                reply = await self._router.changes(self._shard, request)
            except TidelogError as error:
                if not error.retriable:
                    self.end(error)
                elif not self._is_over:
                    self._is_retrying = True
                    asyncio.get_running_loop().call_later(RETRY_S, self.notify)
                return
            self._is_in_doubt = False
            if reply.assignment is not None or reply.member_epoch != self._sent_epoch:
                await self._send_answer(reply)

    @property
    def _view(self) -> TopicsView:
        return self._router.view

    async def _send_answer(self, answer: Answer) -> None:
        if isinstance(answer, HeartbeatReply):
            self._sent_epoch = answer.member_epoch
        await self._send(answer)
