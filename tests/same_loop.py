"""`tidelog.aio.Consumer` in the simulator: no IO thread, both of its sides on the loop that it is used on."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from tidelog.client.aio_consumer import Consumer
from tidelog.client.async_consumer import ConsumerCore
from tidelog.client.cluster import ClusterClient
from tidelog.client.hand import Hand
from tidelog.client.user_side import UserSide

T = TypeVar("T")


class SameLoopHost:
    """What the IO thread is to a real consumer."""

    async def do(self, job: Coroutine[Any, Any, T]) -> T:
        return await job

    def call_soon(self, work: Callable[..., object], *arguments: Any) -> None:
        work(*arguments)

    def release(self, _owner: object, *, is_awaited: bool = True) -> None:
        pass


class SameLoopConsumer(Consumer):
    def __init__(self, cluster: ClusterClient, **options: Any) -> None:
        self._cluster = cluster
        super().__init__(list(cluster.bootstrap), **options)

    def _acquire_host(self) -> Any:
        return SameLoopHost()

    def _new_side(self) -> UserSide:
        def make(hand: Hand) -> ConsumerCore:
            return ConsumerCore(self._cluster, self.options, hand)

        return UserSide(make, self.options, self._host.do, lambda: asyncio.get_running_loop().time())

    @property
    def core(self) -> ConsumerCore:
        return self._my_side.core
