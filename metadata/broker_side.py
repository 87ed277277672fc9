"""A broker's side of the metadata quorum: registers, heartbeats, asks the active controller, stops in order.

    find the active controller -> register (until it is taken) -> one heartbeat stream -> it breaks: find, again
                                          ^                              |
                                          '-- the controller does not know this incarnation any more

The active controller is found by asking: any controller answers with who leads. One that has fallen silent (R17: it may
be frozen, its sockets open) is not asked again for a while, unless another one names it: then it is known to lead, and
may only be slow to commit. Who stayed away from it then would be fenced as silent.
A request whose outcome is not known is repeated only if it may be (`is_repeatable`): registration is, since an
incarnation registers once.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from random import Random
from typing import Any

import msgpack

from tidelog.metadata.brokers import Heartbeat, HeartbeatReply, Register
from tidelog.metadata.requests import decode_reply, encode_request
from tidelog.metadata.shell import HEARTBEATS, INCARNATION, METHOD
from tidelog.metadata.tail import MetadataTail
from tidelog.model.errors import (
    CallTimeoutError,
    CorruptStateError,
    ErrorCode,
    RemoteError,
    TidelogError,
    TransportError,
    UnreachableError,
)
from tidelog.model.ids import NodeId
from tidelog.world.store import StateStore
from tidelog.world.transport import Stream, Transport, decode_error

LOGGER = logging.getLogger(__name__)

CLEAN_STOP_KEY = b"broker/clean-stop-epoch"
_NOTHING_DONE = frozenset({ErrorCode.NOT_CONTROLLER, ErrorCode.THROTTLING_QUOTA_EXCEEDED})
_REGISTER_AGAIN = frozenset({ErrorCode.STALE_BROKER_EPOCH, ErrorCode.BROKER_ID_NOT_REGISTERED})
_WAIT_AND_REGISTER = frozenset({ErrorCode.DUPLICATE_BROKER_REGISTRATION})


@dataclass(frozen=True, slots=True, kw_only=True)
class BrokerConfig:
    heartbeat_ms: int = 500
    silence_ms: int = 2_000
    """A controller that does not answer a heartbeat for so long is left."""
    avoid_ms: int = 1_000
    """A controller that fell silent is not asked for so long, while others are known and do not name it."""
    call_timeout_ms: int = 2_000
    retry_min_ms: int = 20
    retry_max_ms: int = 500


class ControllerClient:
    """Calls to whoever is the active controller."""

    def __init__(
        self, transport: Transport, controllers: Callable[[], Sequence[NodeId]], config: BrokerConfig, random: Random
    ) -> None:
        self._transport = transport
        self._controllers = controllers
        self._config = config
        self._random = random
        self._leader: NodeId | None = None
        self._silent: tuple[NodeId, float] | None = None
        """Who did not answer last, and until when another one is asked instead."""

    @property
    def leader(self) -> NodeId | None:
        """The active controller, as far as the last answers say."""
        return self._leader

    def known(self) -> Sequence[NodeId]:
        return self._controllers()

    def target(self) -> NodeId | None:
        """Whom to try next."""
        if self._leader is not None:
            return self._leader
        known = list(self._controllers())
        others = [node for node in known if not self._is_avoided(node)]
        return self._random.choice(others or known) if known else None

    def _is_avoided(self, node: NodeId) -> bool:
        return self._silent is not None and self._silent[0] == node and self._silent[1] > _now_s()

    def fell_silent(self, node: NodeId) -> None:
        """It took a request, or a connection, and does not answer."""
        self._silent = (node, _now_s() + self._config.avoid_ms / 1000)
        self._leader = None

    def hint(self, error: TidelogError) -> None:
        """What an answer says about who leads; any other failure means: look elsewhere."""
        leader = error.facts.get("leader") if isinstance(error, RemoteError) else None
        # A leader that somebody names may be long gone: now and then another one is asked.
        is_known = isinstance(leader, int) and leader in self._controllers() and leader != self._leader
        self._leader = NodeId(leader) if is_known and isinstance(leader, int) else None

    def found(self, node: NodeId) -> None:
        self._leader = node

    async def pause(self, attempt: int) -> None:
        wait_ms = min(self._config.retry_min_ms << min(attempt, 10), self._config.retry_max_ms)
        await asyncio.sleep(self._random.uniform(wait_ms / 2, wait_ms) / 1000)

    async def call(self, request: object, *, is_repeatable: bool = False) -> Any:
        """The reply of the active controller, however long it takes to find one.

        Raises the refusal (`RemoteError`) or, where the outcome is not known and it is not repeatable,
        `TransportError` or a `RemoteError` with REQUEST_TIMED_OUT.
        """
        data = encode_request(request)
        attempt = 0
        while True:
            target = self.target()
            if target is not None:
                try:
                    answer = await self._transport.call(target, METHOD, data, timeout_ms=self._config.call_timeout_ms)
                except TransportError as error:
                    self.hint(error)
                    if isinstance(error, CallTimeoutError):
                        self.fell_silent(target)
                    if not is_repeatable and not isinstance(error, UnreachableError):
                        raise
                except RemoteError as error:
                    if error.code not in _NOTHING_DONE and not (
                        is_repeatable and error.code is ErrorCode.REQUEST_TIMED_OUT
                    ):
                        raise
                    self.hint(error)
                    if self._leader is not None and attempt == 0:
                        attempt += 1
                        continue
                else:
                    self.found(target)
                    return decode_reply(answer)
            attempt += 1
            await self.pause(attempt)


class BrokerAgent:
    """One incarnation of a broker. `run` is its task."""

    def __init__(
        self,
        registration: Register,
        transport: Transport,
        tail: MetadataTail,
        controllers: Callable[[], Sequence[NodeId]],
        config: BrokerConfig,
        random: Random,
    ) -> None:
        self.registration = registration
        self.tail = tail
        self.client = ControllerClient(transport, controllers, config, random)
        self.broker_epoch: int | None = None
        """Set when this incarnation is registered."""
        self.failed_directories: tuple[Any, ...] = ()
        self.stalled_directories: tuple[Any, ...] = ()
        self.full_directories: tuple[Any, ...] = ()
        """Log directories without room for appends."""
        self.last_reply: HeartbeatReply | None = None
        self._transport = transport
        self._config = config
        self._wants_shutdown = False
        self._may_stop = asyncio.Event()
        self._beat_now = asyncio.Event()
        transport.serve(INCARNATION, self._incarnation)

    async def _incarnation(self, _sender: NodeId, _data: bytes) -> bytes:
        return self.registration.incarnation.bytes

    @property
    def broker(self) -> int:
        return self.registration.broker

    @property
    def is_fenced(self) -> bool:
        """By the log, not by what one controller says: until this incarnation's own record shows it as live."""
        found = self.tail.image.brokers.get(self.broker)
        return found is None or found.broker_epoch != self.broker_epoch or found.fenced

    def beat_soon(self) -> None:
        """Something that the controller should know has changed."""
        self._beat_now.set()

    async def run(self) -> None:
        """Ends by cancellation, or when this incarnation cannot be registered (the refusal)."""
        while True:
            await self._register()
            while await self._beat():
                pass
            self.broker_epoch = None

    async def shut_down(self) -> int:
        """Controlled shutdown: returns when the leaderships are elsewhere, with the epoch to keep for
        `store_clean_stop` once the logs are closed. `run` goes on meanwhile."""
        self._wants_shutdown = True
        self.beat_soon()
        await self._may_stop.wait()
        assert self.broker_epoch is not None, "only a registered broker is let go"
        return self.broker_epoch

    async def ask(self, request: object) -> Any:
        """A request of this broker to the active controller; see `ControllerClient.call`."""
        return await self.client.call(request)

    async def _register(self) -> None:
        attempt = 0
        while True:
            try:
                reply = await self.client.call(self.registration, is_repeatable=True)
            except RemoteError as error:
                if error.code not in _WAIT_AND_REGISTER:
                    raise
                # A former life whose session has not ended yet.
                LOGGER.info("broker=%d cannot register yet: %s", self.broker, error)
                attempt += 1
                await self.client.pause(attempt)
            else:
                self.broker_epoch = reply.broker_epoch
                LOGGER.info("broker=%d is registered, epoch=%d", self.broker, reply.broker_epoch)
                return

    async def _beat(self) -> bool:
        """One stream, until it is of no more use; False if this incarnation has to register again."""
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
                    self._take(_decode_beat(await stream.receive()))
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
            if error.code in _REGISTER_AGAIN:
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

    def _take(self, reply: HeartbeatReply) -> None:
        self.last_reply = reply
        if reply.may_shut_down:
            self._may_stop.set()

    async def _until_next_beat(self) -> None:
        wait_ms = self._config.heartbeat_ms
        reply = self.last_reply
        if reply is not None and (reply.is_fenced or self._wants_shutdown) and not reply.may_shut_down:
            wait_ms = max(1, wait_ms // 10)  # it waits to be let in, or out
        try:
            async with asyncio.timeout(wait_ms / 1000):
                await self._beat_now.wait()
        except TimeoutError:
            return


def _now_s() -> float:
    return asyncio.get_running_loop().time()


def _decode_beat(data: bytes) -> HeartbeatReply:
    """A frame of the stream; raises the error that it holds, or CorruptStateError if it is nothing that we know."""
    try:
        kind, _version, value = msgpack.unpackb(data)
        refusal = decode_error(value) if kind == 1 else None
        reply = None if refusal is not None else decode_reply(value)
    except RemoteError:
        raise
    except (ValueError, TypeError, LookupError, AttributeError, msgpack.UnpackException, TidelogError) as error:
        raise CorruptStateError(f"a heartbeat's reply cannot be read: {error}") from error
    if refusal is not None:
        raise refusal
    if not isinstance(reply, HeartbeatReply):
        raise CorruptStateError(f"the reply to a heartbeat is a {type(reply).__name__}")
    return reply


async def store_clean_stop(store: StateStore, broker_epoch: int) -> None:
    """After everything is closed: the next life says that this one ended cleanly."""
    await store.commit({CLEAN_STOP_KEY: bytes(msgpack.packb(broker_epoch))})


def with_clean_stop(registration: Register, store: StateStore) -> Register:
    """A value that cannot be read says nothing: the last life then counts as one that did not end cleanly."""
    try:
        stored = store.get(CLEAN_STOP_KEY)
    except CorruptStateError as error:
        LOGGER.warning("broker=%d does not know how it stopped: %s", registration.broker, error)
        return registration
    return registration if stored is None else replace(registration, clean_stop_epoch=int(msgpack.unpackb(stored)))
