"""The asyncio producer in the simulator: no thread, its core on the client machine's own loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from random import Random
from typing import Any

from support.clients.cluster import BOOTSTRAP, ClientWorld
from tidelog.client.bridge import Bridge
from tidelog.client.cluster import ClusterClient
from tidelog.client.new_cluster import client_config
from tidelog.client.producer.accumulator import Accumulator
from tidelog.client.producer.aio import Producer
from tidelog.client.producer.core import ProducerCore


class SameLoop(Bridge):
    """What the IO thread is to a producer, on the loop that it is used on."""

    is_client_thread = False

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        super().__init__(loop)
        self.released = 0

    def call_soon(self, work: Callable[..., object], *arguments: Any) -> None:
        self.loop.call_soon(work, *arguments)

    def run_callback(self, work: Callable[[], None]) -> None:
        self.loop.call_soon(work)

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
        assert self._host.core is not None
        return self._host.core

    @property
    def accumulator(self) -> Accumulator:
        return self._accumulator

    def _acquire(self, owner: object) -> SameLoop:
        return SameLoop(asyncio.get_running_loop())

    def _new_random(self) -> Random:
        return self._world.machine.random

    def _new_cluster(self, io: Any) -> ClusterClient:
        settings = client_config(self._config)
        fields = {name: getattr(settings, name) for name in settings.__slots__}
        return self._world.new_client(**fields)
