"""The asyncio producer in the simulator: no thread, its core on the client machine's own loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from random import Random
from typing import Any

from client_world import BOOTSTRAP, ClientWorld

from tidelog.client.accumulator import Accumulator
from tidelog.client.aio_producer import Producer
from tidelog.client.cluster import ClusterClient
from tidelog.client.new_cluster import client_config
from tidelog.client.producer_core import ProducerCore


class SameLoop:
    """What the IO thread is to a producer, on the loop that it is used on."""

    is_here = is_telling = False

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self.released = 0

    def call_soon(self, work: Callable[..., object], *arguments: Any) -> None:
        self._loop.call_soon(work, *arguments)

    async def do(self, job: Coroutine[Any, Any, Any]) -> Any:
        return await job

    def tell(self, work: Callable[[], None]) -> None:
        self._loop.call_soon(work)

    def release(self, owner: object, *, is_awaited: bool = True) -> None:
        self.released += 1


class SimProducer(Producer):
    """On the machine of a `ClientWorld`."""

    def __init__(self, world: ClientWorld, **options: Any) -> None:
        self._world = world
        self._now_s = world.machine.loop.time
        self._clock_ms = world.machine.clock.now_ms
        super().__init__(list(BOOTSTRAP), **options)

    @property
    def core(self) -> ProducerCore:
        assert self._core is not None
        return self._core

    @property
    def accumulator(self) -> Accumulator:
        return self._in

    def _acquire_host(self) -> SameLoop:
        return SameLoop(asyncio.get_running_loop())

    def _new_random(self) -> Random:
        return self._world.machine.random

    def _new_cluster(self, host: Any) -> ClusterClient:
        settings = client_config(self._options)
        fields = {name: getattr(settings, name) for name in settings.__slots__}
        return self._world.new_client(**fields)
