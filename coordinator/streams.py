"""A member's stream: its heartbeats in, answers out, and news by itself as soon as there is any.

    receive --> heartbeat --> shard --.
                                       +--> one at a time, in order --> send
    news of a commit --> shard -------'

The member's heartbeats and what is asked in its name take turns, so that answers go out in the order of the decisions
behind them. What is asked in its name carries the epoch that the member is known to have: the last one that it has
sent, or the answer to its joining (whoever has not got that answer joins again).

The stream ends after a goodbye, after an error (which is the last thing that is sent), when the coordinator says so, or
when the member's side is gone. Only then does the member have just its grace.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import TYPE_CHECKING

from tidelog.coordinator.requests import JOIN_EPOCH, Heartbeat, HeartbeatReply, TopicsView
from tidelog.coordinator.shard import RETRY_S, Shard
from tidelog.model.errors import InvalidRequestError, StreamBrokenError, StreamClosedError, TidelogError

if TYPE_CHECKING:
    from tidelog.coordinator.service import GroupService

LOGGER = logging.getLogger(__name__)

ANSWERS_MAX = 16
"""Of a member that does not read them: then its heartbeats are not read either."""

Answer = HeartbeatReply | TidelogError
Receive = Callable[[], Awaitable[Heartbeat | None]]
Send = Callable[[Answer], Awaitable[None]]


class MemberStream:
    """`run` is the call; the rest is for the shard."""

    def __init__(self, service: GroupService, receive: Receive, send: Send) -> None:
        self._service = service
        self._receive = receive
        self._send = send
        self._key: tuple[str, str] | None = None
        self._shard: Shard | None = None
        self._instance_id = ""
        self._epoch = JOIN_EPOCH
        """What the member is known to have."""
        self._told_epoch = JOIN_EPOCH
        self._turn = asyncio.Lock()
        self._answers: deque[Answer] = deque()
        self._has_news = False
        self._is_saying_goodbye = False
        """Its going is no news to it."""
        self._is_over = False
        """Nothing follows but the answers that wait, and the last word."""
        self._last_word: TidelogError | None = None
        self._is_broken = False
        self._has_ended = False
        """The call is over."""
        self._wake = asyncio.Event()
        self._drained = asyncio.Event()

    # From the shard.

    def tell_news(self) -> None:
        """The member's assignment may be another."""
        self._has_news = True
        self._wake.set()

    def end(self, error: TidelogError | None) -> None:
        """With this as the last word."""
        if not self._is_saying_goodbye and not self._is_over:
            self._is_over, self._last_word = True, error
            self._wake.set()

    # The call.

    async def run(self) -> None:
        reader = asyncio.get_running_loop().create_task(self._read(), name="membership")
        self._service.keep(reader)
        is_broken = True
        try:
            await self._answer()
            is_broken = self._is_broken
            if reader.done():
                reader.result()
        except (StreamBrokenError, StreamClosedError) as error:
            LOGGER.debug("a member's stream has broken: %s", error)
        finally:
            # The reader is left alone: it ends with the stream. To cancel it would break that, and what was sent last
            # might not arrive.
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
            self.end(error)  # what came is no request
        finally:
            self._is_broken = not self._is_over
            self._is_over = True
            self._wake.set()

    async def _take(self, request: Heartbeat) -> None:
        async with self._turn:
            if self._is_over:
                return
            self._is_saying_goodbye = request.member_epoch < JOIN_EPOCH
            try:
                self._answers.append(await self._heartbeat(request))
                self._is_over = self._is_saying_goodbye
                self._wake.set()
            except TidelogError as error:
                self._is_saying_goodbye = False
                self.end(error)

    async def _heartbeat(self, request: Heartbeat) -> HeartbeatReply:
        key = request.group, request.member_id
        if self._key is None:
            self._key, self._instance_id = key, request.instance_id
        elif self._key != key:
            raise InvalidRequestError(f"this is the stream of member {self._key[1]} of group {self._key[0]}")
        shard, reply = await self._service.heartbeat_of(replace(request, is_streamed=True))
        if request.member_epoch >= JOIN_EPOCH:
            self._epoch = request.member_epoch or reply.member_epoch
            if self._shard is not shard:
                self._shard = shard
                shard.attach(key, self)
                if self._has_ended:  # it was gone before it could be let in
                    shard.detach(key, self, is_broken=True)
        return reply

    async def _answer(self) -> None:
        while True:
            await self._wake.wait()
            self._wake.clear()
            await self._say_all()
            if self._is_over:
                if self._last_word is not None:
                    await self._send(self._last_word)
                return
            if self._has_news:
                await self._tell_news()

    async def _say_all(self) -> None:
        while self._answers:
            await self._say(self._answers.popleft())
        self._drained.set()

    async def _tell_news(self) -> None:
        async with self._turn:
            await self._say_all()
            if self._is_over or self._shard is None or self._key is None:
                return
            self._has_news = False
            if self._epoch != self._told_epoch:
                return  # it has yet to show that it knows what it was told: that heartbeat brings it the news
            request = Heartbeat(
                group=self._key[0],
                member_id=self._key[1],
                member_epoch=self._epoch,
                instance_id=self._instance_id,
                view=self._view,
                now_ms=self._service.now_ms(),
            )
            try:
                reply = await self._service.news_of(self._shard, request)
            except TidelogError as error:
                if not error.retriable:
                    self.end(error)
                elif not self._is_over:
                    asyncio.get_running_loop().call_later(RETRY_S, self.tell_news)
                return
            if reply.assignment is not None or reply.member_epoch != self._told_epoch:
                await self._say(reply)

    @property
    def _view(self) -> TopicsView:
        return self._service.view

    async def _say(self, answer: Answer) -> None:
        if isinstance(answer, HeartbeatReply):
            self._told_epoch = answer.member_epoch
        await self._send(answer)
