"""The broker's side of the controller protocol: registers, heartbeats, sends requests to the active controller, shuts
down.

    find the active controller -> register (until accepted) -> one heartbeat stream -> it breaks: find again
                                          ^                              |
                                          '-- the controller does not know this incarnation any more

Any controller names the active one. A controller that does not answer (its process may be frozen while its sockets stay
open) is avoided for a while, unless another one names it: then it leads and may only be slow to commit, and a broker
that avoided it would be fenced. A request with an unknown outcome is repeated only if `is_repeatable`: registration is,
since an incarnation registers once.
"""

import asyncio
import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from random import Random
from typing import Any

import msgpack

from tidelog.metadata.brokers import Heartbeat, HeartbeatReply, Register
from tidelog.metadata.controller_client import ControllerClient, ControllerClientConfig
from tidelog.metadata.controller_node import HEARTBEATS, INCARNATION
from tidelog.metadata.requests import decode_reply, encode_request
from tidelog.metadata.tail import MetadataTail
from tidelog.model.errors import (
    CallTimeoutError,
    CorruptStateError,
    ErrorCode,
    RemoteError,
    TidelogError,
    TransportError,
)
from tidelog.model.ids import NodeId
from tidelog.world.store import StateStore
from tidelog.world.transport import Stream, Transport, decode_error

LOGGER = logging.getLogger(__name__)

CLEAN_STOP_KEY = b"broker/clean-stop-epoch"
REGISTER_AGAIN = frozenset({ErrorCode.STALE_BROKER_EPOCH, ErrorCode.BROKER_ID_NOT_REGISTERED})
_WAIT_AND_REGISTER = frozenset({ErrorCode.DUPLICATE_BROKER_REGISTRATION})


class BrokerLifecycle:
    """One incarnation of a broker. `run` is its task."""

    def __init__(
        self,
        registration: Register,
        transport: Transport,
        tail: MetadataTail,
        controllers: Callable[[], Sequence[NodeId]],
        config: ControllerClientConfig,
        random: Random,
    ) -> None:
        self.registration = registration
        self.tail = tail
        self.client = ControllerClient(transport, controllers, config, random)
        self.broker_epoch: int | None = None
        """Set while this incarnation is registered."""
        self._registered = asyncio.Event()
        self.failed_directories: tuple[Any, ...] = ()
        self.stalled_directories: tuple[Any, ...] = ()
        self.full_directories: tuple[Any, ...] = ()
        """Log directories without space for appends."""
        self.last_reply: HeartbeatReply | None = None
        self._transport = transport
        self._config = config
        self._wants_shutdown = False
        self._may_stop = asyncio.Event()
        self._stop_epoch = -1
        """The epoch in which the controller allowed the shutdown."""
        self._beat_now = asyncio.Event()
        transport.serve(INCARNATION, self._incarnation)

    async def _incarnation(self, _sender: NodeId, _data: bytes) -> bytes:
        return self.registration.incarnation.bytes

    @property
    def broker(self) -> int:
        return self.registration.broker

    @property
    def is_fenced(self) -> bool:
        """By the metadata log, not by one controller: True until the record of this incarnation shows it as live."""
        registered = self.tail.image.brokers.get(self.broker)
        return registered is None or registered.broker_epoch != self.broker_epoch or registered.fenced

    def heartbeat_soon(self) -> None:
        """Sends a heartbeat soon: the state of the broker has changed."""
        self._beat_now.set()

    async def run(self) -> None:
        """Ends by cancellation, or when the controller rejects this incarnation."""
        while True:
            await self._register()
            while await self._beat():
                pass
            self.broker_epoch = None
            self._registered.clear()

    async def shut_down(self) -> int:
        """Controlled shutdown: returns when other brokers lead its partitions, with the epoch for `store_clean_stop`
        once the logs are closed. `run` continues meanwhile."""
        self._wants_shutdown = True
        self.heartbeat_soon()
        await self._may_stop.wait()
        return self._stop_epoch

    async def ask(self, request: object) -> Any:
        """Sends a request of this broker to the active controller; see `ControllerClient.call`."""
        return await self.client.call(request)

    async def ask_registered(self, request: Callable[[int], object]) -> Any:
        """Sends a repeatable request with this broker's epoch, when it is registered, and again in each new epoch."""
        attempt = 0
        while True:
            await self._registered.wait()
            assert self.broker_epoch is not None, "it is registered"
            try:
                return await self.client.call(request(self.broker_epoch), is_repeatable=True)
            except RemoteError as error:
                if error.code not in REGISTER_AGAIN:
                    raise
            attempt += 1
            await self.client.pause(attempt)  # the next heartbeat gets the same answer

    async def _register(self) -> None:
        attempt = 0
        while True:
            try:
                reply = await self.client.call(self.registration, is_repeatable=True)
            except RemoteError as error:
                if error.code not in _WAIT_AND_REGISTER:
                    raise
                # The session of a former incarnation has not ended yet.
                LOGGER.info("broker=%d cannot register yet: %s", self.broker, error)
                attempt += 1
                await self.client.pause(attempt)
            else:
                self.broker_epoch = reply.broker_epoch
                self._registered.set()
                LOGGER.info("broker=%d registered epoch=%d", self.broker, reply.broker_epoch)
                return

    async def _beat(self) -> bool:
        """Sends heartbeats on one stream until it fails; returns False if this incarnation has to register again."""
        target = self.client.target()
        if target is None:
            await self.client.pause(4)
            return True
        stream: Stream | None = None
        try:
            async with asyncio.timeout(self._config.silence_ms / 1000):
                stream = await self._transport.open_stream(target, HEARTBEATS)
            while True:
                self._beat_now.clear()
                beat = self._heartbeat()
                await stream.send(encode_request(beat))
                async with asyncio.timeout(self._config.silence_ms / 1000):
                    self._process(_decode_beat(await stream.receive()))
                self.client.found(target)
                await self._until_next_beat()
        except TimeoutError:
            LOGGER.warning("controller=%d does not answer heartbeats", target)
            self.client.fell_silent(target)
        except CorruptStateError as error:
            LOGGER.error("controller=%d: %s", target, error)
            self.client.fell_silent(target)
        except RemoteError as error:
            LOGGER.info("controller=%d: %s", target, error)
            if error.code in REGISTER_AGAIN:
                return False
            self.client.hint(error)
        except CallTimeoutError:
            self.client.fell_silent(target)
        except TransportError as error:
            self.client.hint(error)
        finally:
            if stream is not None:
                stream.close()
        await self.client.pause(1)
        return True

    def _heartbeat(self) -> Heartbeat:
        assert self.broker_epoch is not None, "register first"
        return Heartbeat(
            broker=self.broker,
            broker_epoch=self.broker_epoch,
            metadata_offset=self.tail.offset,
            wants_shutdown=self._wants_shutdown,
            failed_directories=self.failed_directories,
            stalled_directories=self.stalled_directories,
            full_directories=self.full_directories,
        )

    def _process(self, reply: HeartbeatReply) -> None:
        self.last_reply = reply
        if reply.may_shut_down:
            assert self.broker_epoch is not None, "it has sent a heartbeat"
            self._stop_epoch = self.broker_epoch
            self._may_stop.set()

    async def _until_next_beat(self) -> None:
        wait_ms = self._config.heartbeat_ms
        reply = self.last_reply
        if reply is not None and (reply.is_fenced or self._wants_shutdown) and not reply.may_shut_down:
            wait_ms = max(1, wait_ms // 10)  # it waits to be unfenced, or to shut down
        try:
            async with asyncio.timeout(wait_ms / 1000):
                await self._beat_now.wait()
        except TimeoutError:
            return


def _decode_beat(data: bytes) -> HeartbeatReply:
    """Decodes a frame; raises the error that it holds, or `CorruptStateError` if it is unreadable."""
    try:
        kind, _version, value = msgpack.unpackb(data)
        rejection = decode_error(value) if kind == 1 else None
        reply = None if rejection is not None else decode_reply(value)
    except RemoteError:
        raise
    except (ValueError, TypeError, LookupError, AttributeError, msgpack.UnpackException, TidelogError) as error:
        raise CorruptStateError(f"a heartbeat reply is unreadable: {error}") from error
    if rejection is not None:
        raise rejection
    if not isinstance(reply, HeartbeatReply):
        raise CorruptStateError(f"the reply to a heartbeat is a {type(reply).__name__}")
    return reply


async def store_clean_stop(store: StateStore, broker_epoch: int) -> None:
    """Stores a clean stop, after everything is closed, for the next incarnation."""
    await store.commit({CLEAN_STOP_KEY: bytes(msgpack.packb(broker_epoch))})


def with_clean_stop(registration: Register, store: StateStore) -> Register:
    """Adds the stored clean stop to the registration. An unreadable value counts as an unclean stop."""
    try:
        stored = store.get(CLEAN_STOP_KEY)
    except CorruptStateError as error:
        LOGGER.warning("broker=%d does not know how it stopped: %s", registration.broker, error)
        return registration
    return registration if stored is None else replace(registration, clean_stop_epoch=int(msgpack.unpackb(stored)))
