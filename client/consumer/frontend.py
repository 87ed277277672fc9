"""`ConsumerFrontend`: what the threaded and the asyncio consumer share on the user's side of the bridge.

The core runs on the IO thread. The user's side takes records from the `FetchBuffer` without a call of the core as long
as there are some and `attention` is not set. Then it calls `ConsumerCore.fill`, which also runs the user's callbacks.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Coroutine
from contextlib import suppress
from typing import Any, TypeVar

from tidelog.client import io_thread
from tidelog.client.consumer.arguments import interceptor_methods, read_deserializer
from tidelog.client.consumer.core import FILL_BYTES, ConsumerCore
from tidelog.client.consumer.errors import ConsumerClosedError, SubscriptionError
from tidelog.client.consumer.fetch_buffer import FetchBuffer
from tidelog.client.consumer.metrics import GROUP_NAMES, NAMES
from tidelog.client.core_host import CoreHost
from tidelog.client.errors import ClientClosedError
from tidelog.client.new_cluster import new_cluster
from tidelog.client.option_table import ConsumerConfig

LOGGER = logging.getLogger(__name__)

T = TypeVar("T")
Call = Callable[[ConsumerCore], Coroutine[Any, Any, T]]
ARROW_FILL_BYTES = 16 << 20


class ConsumerFrontend:
    def __init__(
        self,
        config: ConsumerConfig,
        *,
        at_exit: Callable[[float], None],
        new_core: Callable[[Any, ConsumerConfig, FetchBuffer], ConsumerCore] | None = None,
        acquire: Callable[[io_thread.Owner], Any] = io_thread.acquire,
    ) -> None:
        """`new_core` and `acquire` are for the simulator."""
        self.config = config
        self.buffer = FetchBuffer(
            read_deserializer(config.key_deserializer),
            read_deserializer(config.value_deserializer),
            checks=config.check_crcs,
            interceptors=interceptor_methods(config.interceptors, "on_consume"),
        )
        create = new_core or _new_core
        self.host = CoreHost(
            lambda io: create(io, config, self.buffer),
            name="consumer",
            closed_error=ConsumerClosedError,
            survives_fork=lambda _: False,
            at_exit=at_exit,
            acquire=acquire,
        )
        self.host.start()
        self.is_polling = False

    def run(self, call: Call[T]) -> T:
        self.buffer.attention = True  # the call may move positions, and may be interrupted
        return self.host.run(lambda core: _enter(core, call))

    async def run_async(self, call: Call[T]) -> T:
        self.buffer.attention = True
        return await self.host.run_async(lambda core: _enter(core, call))

    # Records.

    def begin_poll(self) -> None:
        """The user asks for more: it has processed what it received."""
        if self.is_polling:
            raise SubscriptionError("a callback, or another task, polls this consumer during a poll")
        self.host.check_open()
        self.buffer.acknowledge()
        self.is_polling = True

    def take_now(self, take: Callable[[], T]) -> T | None:
        """Records that need no call of the core."""
        return None if self.buffer.attention else take()

    def fill(self, timeout: float | None, *, is_arrow: bool = False) -> Call[None]:
        has_records = not self.buffer.is_empty
        bytes_max = ARROW_FILL_BYTES if is_arrow else FILL_BYTES
        return lambda core: core.fill(timeout, has_records=has_records, bytes_max=bytes_max)

    def wakeup(self) -> None:
        io = self.host.io  # once: another thread may close the consumer now
        if not self.host.is_closed and io is not None:
            with suppress(ClientClosedError):
                io.start(self.host._call(io, _wake_up))

    def metrics(self) -> dict[str, float]:
        core = self.host.core
        names = NAMES if self.config.group is None else NAMES + GROUP_NAMES
        counts = {"records_consumed": self.buffer.records, "bytes_consumed": self.buffer.bytes}
        return dict.fromkeys(names, 0.0) | counts | ({} if core is None else core.metrics())

    # The end.

    @property
    def is_open(self) -> bool:
        return not self.host.is_closed and not self.host._is_forked

    @property
    def is_in_callback(self) -> bool:
        return self.host.core is not None and self.host.core.reconciler.is_in_callback

    def close_interceptors(self) -> None:
        for close in interceptor_methods(self.config.interceptors, "close"):
            try:
                close()
            except Exception:
                LOGGER.exception("interceptor failed in close")


def _new_core(io: io_thread.IoThread, config: ConsumerConfig, buffer: FetchBuffer) -> ConsumerCore:
    return ConsumerCore(new_cluster(io, config), config, buffer)


async def _enter(core: ConsumerCore, call: Call[T]) -> T:
    async with core.call():
        return await call(core)


async def _wake_up(core: ConsumerCore) -> None:
    core.wakeup()
