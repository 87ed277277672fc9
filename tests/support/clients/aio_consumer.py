"""`tidelog.aio.Consumer` in the simulator: its core runs on the loop that it is used on, without an IO thread."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from tidelog.client.cluster import ClusterClient
from tidelog.client.consumer.aio import Consumer
from tidelog.client.consumer.core import ConsumerCore
from tidelog.client.consumer.frontend import ConsumerFrontend

T = TypeVar("T")


class SameLoopHost:
    """Stands in for the IO thread."""

    async def run_async(self, job: Coroutine[Any, Any, T], *, timeout: float | None = None) -> T:
        return await job

    def start(self, job: Coroutine[Any, Any, Any]) -> None:
        """For jobs that do not wait."""
        try:
            job.send(None)
        except StopIteration:
            return
        raise AssertionError("the job waits")

    def call_soon(self, work: Callable[..., object], *arguments: Any) -> None:
        work(*arguments)

    def release(self, _owner: object, *, is_awaited: bool = True) -> None:
        pass


class SameLoopConsumer(Consumer[Any, Any]):
    def __init__(self, cluster: ClusterClient, host: Any = None, **options: Any) -> None:
        self._cluster = cluster
        self._host = SameLoopHost() if host is None else host
        super().__init__(list(cluster.bootstrap), **options)

    def _new_frontend(self) -> ConsumerFrontend:
        return ConsumerFrontend(
            self.options,
            at_exit=lambda _timeout: None,
            new_core=lambda _io, config, buffer: ConsumerCore(self._cluster, config, buffer),
            acquire=lambda _owner: self._host,
        )

    @property
    def core(self) -> ConsumerCore:
        host = self._frontend.host
        if host.core is None:
            host.core = ConsumerCore(self._cluster, self.options, self._frontend.buffer)
        return host.core
