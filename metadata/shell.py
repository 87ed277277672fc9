"""A controller: Raft member, state machine, and the service that brokers and tools talk to.

    call   "metadata"             a request or question (`metadata.requests`); only the active controller answers,
                                  others say who is. Questions are linearizable: they see every change that was
                                  answered before.
    call   "metadata-local"       a question, answered from what this controller has applied, active or not
    stream "metadata-heartbeats"  one for each broker, to the active controller: heartbeats, and a reply to the newest
    call   "metadata-levels"      which feature levels this controller supports: asked of every other member of the
                                  quorum by the active one, before it decides on an `UpdateFeatures`. One that does not
                                  answer might not be able to read what the new level writes: refused, by its name
    (out)  "metadata-incarnation" asked of a broker whose stream broke: which incarnation are you? (`metadata.sessions`)

A frame of the heartbeat stream is `[0, 1, reply]` or `[1, 1, error]`, msgpack; after an error the stream is closed.

While it is active it also, by itself: fences (every `tick_ms`), gives leaderships back, grows the cluster's own topics,
and writes a NoOp when the log has not moved for `idle_ms` and there are live brokers, which tail it
(`metadata.max.idle.interval.ms`): a tail that hears of new commits knows that its source reaches a leader that works.

Bounds: requests that wait (`waiting_max`, then OVERLOADED; what the controller itself decides, and heartbeats, have
room beyond that), one heartbeat of each stream (a newer one replaces one that waits), bytes of a request
(`requests.REQUEST_BYTES_MAX`).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random
from typing import Any

import msgpack

from tidelog.metadata import configs
from tidelog.metadata.brokers import Drained, Fence, Heartbeat, HeartbeatReply, Register
from tidelog.metadata.controller import Controller
from tidelog.metadata.image import Broker, ClusterImage
from tidelog.metadata.log_ends import REPORT_WAIT_MS
from tidelog.metadata.losses import ReportLost
from tidelog.metadata.machine import Bootstrap, KeepMoving, Levels, MetadataMachine, is_question
from tidelog.metadata.partitions import (
    AlterPartition,
    AssignDirectories,
    BalanceLeaders,
    ElectLeaders,
    FindLeaders,
    ReportLogEnds,
)
from tidelog.metadata.reassignments import GrowInternalTopics
from tidelog.metadata.records import DECISION_BYTES_MAX
from tidelog.metadata.recoveries import ReportOpen
from tidelog.metadata.requests import decode_request, encode_reply
from tidelog.metadata.sessions import Answer, BrokerSessions, FenceNow
from tidelog.metadata.settings import AllocateProducerIdBlock, UpdateFeatures
from tidelog.metadata.topics import Trim
from tidelog.metadata.voter_changes import VoterChanges
from tidelog.model.errors import (
    BrokerNotRegisteredError,
    CallTimeoutError,
    FeatureUpdateError,
    InvalidRequestError,
    RemoteError,
    StaleBrokerEpochError,
    StreamBrokenError,
    StreamClosedError,
    TidelogError,
    TransportError,
    UnreachableError,
)
from tidelog.model.ids import NodeId
from tidelog.raft.config import BootState
from tidelog.raft.driver import DriverConfig, RaftDriver
from tidelog.raft.storage import RaftStorage
from tidelog.world.clock import Clock
from tidelog.world.transport import Stream, Transport, encode_error
from tidelog.world.work import Work

LOGGER = logging.getLogger(__name__)

METHOD = "metadata"
LOCAL_METHOD = "metadata-local"
HEARTBEATS = "metadata-heartbeats"
INCARNATION = "metadata-incarnation"

PROBES_MAX = 5
PROBE_WAIT_MS = 20
REPORT_POLL_MS = 100
LEVELS = "metadata-levels"

_OWN = (Fence, BalanceLeaders, FindLeaders, GrowInternalTopics)
"""Decided by the controller itself, not on request."""
_OF_SENDER = (
    Register,
    AlterPartition,
    AssignDirectories,
    AllocateProducerIdBlock,
    ReportLost,
    ReportOpen,
    Trim,
    ReportLogEnds,
)
"""A broker speaks for itself only."""


def encode_beat(answer: object) -> bytes:
    if isinstance(answer, TidelogError):
        return bytes(msgpack.packb([1, 1, encode_error(answer)]))
    return bytes(msgpack.packb([0, 1, encode_reply(answer)]))


@dataclass(frozen=True, slots=True, kw_only=True)
class ControllerConfig:
    driver: DriverConfig = field(default_factory=DriverConfig)
    tick_ms: int = 50
    """How often sessions are looked at; a broker that is refused is fenced at the next look."""
    probe_timeout_ms: int = 1_000
    idle_ms: int = 500
    """Write a NoOp after so long without a record; 0: never."""
    grow_every_ms: int = 5_000
    waiting_max: int = 10_000
    decision_bytes_max: int = DECISION_BYTES_MAX
    broker_listener: str = "CONTROLLER"
    """Which endpoint of a broker answers probes (its first one, if it has none of this name)."""


class ControllerNode:
    """`start`, then use, then `close`; not used again after that."""

    def __init__(
        self,
        storage: RaftStorage,
        boot: BootState,
        transport: Transport,
        controller: Controller,
        config: ControllerConfig,
        random: Random,
        *,
        clock: Clock,
        work: Work,
        on_failure: Callable[[BaseException], None] | None = None,
    ) -> None:
        self.config = config
        self.machine = MetadataMachine(
            storage.me.node,
            controller,
            clock,
            random,
            decision_bytes_max=config.decision_bytes_max,
            waiting_max=config.waiting_max,
            on_role=self._role_changed,
        )
        self.driver = RaftDriver(
            storage.me,
            storage,
            boot,
            transport,
            self.machine,
            config.driver,
            random,
            work=work,
            on_failure=self._failed,
        )
        self.machine.log.attach(self.driver)
        self._transport = transport
        self.voters = VoterChanges(self.driver, transport)
        self._on_failure = on_failure
        self._sessions: BrokerSessions | None = None
        """While this controller is active."""
        self._to_fence: dict[int, FenceNow] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._active_tasks: set[asyncio.Task[None]] = set()
        transport.serve(METHOD, self._serve)
        transport.serve(LOCAL_METHOD, self._serve_local)
        transport.serve(LEVELS, self._serve_levels)
        transport.serve_stream(HEARTBEATS, self._serve_heartbeats)

    # Life.

    async def start(self) -> None:
        await self.driver.start()

    async def close(self, *, hand_over_ms: int = 0) -> None:
        """Give leadership away if there is time for that, and stop."""
        if hand_over_ms and self.driver.failed is None:
            await self.driver.hand_over(timeout_ms=hand_over_ms)
        self._end_active()
        await self.voters.close()
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self.driver.close()

    def _failed(self, error: BaseException) -> None:
        self.machine.replicated.follow(None)
        self._end_active()
        if self._on_failure is not None:
            self._on_failure(error)

    @property
    def image(self) -> ClusterImage:
        """What is committed and applied here."""
        return self.machine.image

    @property
    def is_active(self) -> bool:
        return self.machine.replicated.is_leading

    def _now_ms(self) -> int:
        return int(asyncio.get_running_loop().time() * 1000)

    def _spawn(self, work: Any, *, while_active: bool = True) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        if while_active:
            self._active_tasks.add(task)
            task.add_done_callback(self._active_tasks.discard)

    # Being active.

    def _role_changed(self, is_active: bool) -> None:
        self._end_active()
        if not is_active:
            return
        now_ms = self._now_ms()
        self.machine.decider.log_ends.clear()
        self._follow_stall_timeout()
        timeout_ms = configs.cluster_int(self.image, "broker.session.timeout.ms")
        self._sessions = BrokerSessions(now_ms, session_timeout_ms=timeout_ms)
        unfenced = self._unfenced()
        self._sessions.begin(now_ms, [(broker.broker, broker.broker_epoch) for broker in unfenced])
        LOGGER.info("controller=%d is active, epoch=%s", self.machine.me, self.machine.replicated.epoch)
        for broker in unfenced:
            self._spawn(self._probe(broker))
        # A former controller may have let a broker in, and not have got to all of its partitions.
        parts = (self._watch_sessions(), self._keep_balance(), self._grow(), self._keep_moving(), self._find_leaders())
        for part in parts:
            self._spawn(part)

    def _end_active(self) -> None:
        self._sessions = None
        self._to_fence.clear()
        for task in list(self._active_tasks):
            task.cancel()

    async def submit(self, request: object) -> Any:
        """Decide as the active controller; raises the refusal, `NotLeaderError`, `UnknownOutcomeError`..."""
        if isinstance(request, UpdateFeatures) and self.is_active:
            self.machine.decider.others = await self._ask_levels()
        if isinstance(request, ElectLeaders) and self.is_active:
            await self._wait_for_log_ends(request)
        # Of heartbeats there is one at a time for each broker, and refusing one would end its stream: whoever dies
        # before it is back on another would be noticed only by its silence.
        reply = await self.machine.replicated.submit(request, is_own=isinstance(request, Heartbeat))
        while isinstance(reply, HeartbeatReply | Drained) and reply.is_more_to_do:
            if getattr(request, "validate_only", False):
                break
            if isinstance(request, Heartbeat):
                await self._find_leaders(request.broker)
            reply = await self.machine.replicated.submit(request, is_own=True)
        return reply

    async def _wait_for_log_ends(self, request: ElectLeaders) -> None:
        """An admin's unclean election waits a moment for reports that it lacks: this controller may be new."""
        for _ in range(REPORT_WAIT_MS // REPORT_POLL_MS):
            if not self.machine.decider.lacks_log_ends(self.image, request):
                return
            await asyncio.sleep(REPORT_POLL_MS / 1000)

    async def _find_leaders(self, broker: int = -1) -> None:
        """All that the rules now give, step by step."""
        done = await self._try(FindLeaders(broker=broker))
        while done is not None and done.is_more_to_do:
            done = await self._try(FindLeaders(broker=broker))

    async def _ask_levels(self) -> Levels:
        members = self.driver.core.log.membership
        others = sorted({member.node for member in (*members.voters, *members.learners)} - {self.machine.me})
        found: list[tuple[int, tuple[tuple[str, int, int], ...]]] = []
        for node in others:
            try:
                data = await self._transport.call(node, LEVELS, b"?", timeout_ms=self.config.probe_timeout_ms)
                levels = tuple((str(name), int(low), int(high)) for name, low, high in msgpack.unpackb(data))
            except (TransportError, RemoteError, ValueError, TypeError, msgpack.UnpackException) as error:
                raise FeatureUpdateError(
                    f"controller {node} does not say which feature levels it supports: {error}"
                ) from error
            found.append((int(node), levels))
        return tuple(found)

    async def _serve_levels(self, _sender: NodeId, _data: bytes) -> bytes:
        return bytes(msgpack.packb(self.machine.decider.own_levels))

    async def ask(self, question: object) -> Any:
        """A linearizable answer. Raises `NotLeaderError`."""
        if not self.is_active:
            raise self.machine.replicated.not_leader()
        await self.driver.applied(await self.driver.read_index())
        return self.machine.decider.answer(self.image, question)

    async def _try(self, request: object) -> Any:
        """For what the controller does by itself: it is done again later, if it is not done now."""
        try:
            return await self.machine.replicated.submit(request, is_own=True)
        except TidelogError as error:
            LOGGER.info("controller=%d %s: %s", self.machine.me, type(request).__name__, error)
            return None

    async def _keep_balance(self) -> None:
        waited_s = 0
        while True:
            await asyncio.sleep(1)
            waited_s += 1
            # Looked up each time: a shorter interval does not wait for the end of a longer one.
            if waited_s < configs.cluster_int(self.image, "leader.imbalance.check.interval.seconds"):
                continue
            waited_s = 0
            done = await self._try(BalanceLeaders())
            while done is not None and done.is_more_to_do:
                done = await self._try(BalanceLeaders())

    async def _grow(self) -> None:
        while True:
            await asyncio.sleep(self.config.grow_every_ms / 1000)
            await self._try(GrowInternalTopics())

    async def _keep_moving(self) -> None:
        while not self.image.features:
            await self._try(Bootstrap())
            await asyncio.sleep(self.config.tick_ms / 1000)
        while self.config.idle_ms:
            before = self.machine.offset
            await asyncio.sleep(self.config.idle_ms / 1000)
            if self.machine.offset == before and self.image.live_brokers():
                await self._try(KeepMoving())

    # Sessions.

    def _unfenced(self) -> list[Broker]:
        return [broker for _, broker in sorted(self.image.brokers.items()) if not broker.fenced]

    async def _watch_sessions(self) -> None:
        while True:
            await asyncio.sleep(self.config.tick_ms / 1000)
            sessions = self._sessions
            if sessions is None:
                return
            sessions.session_timeout_ms = configs.cluster_int(self.image, "broker.session.timeout.ms")
            self._follow_stall_timeout()
            now_ms = self._now_ms()
            for entry in sessions.tick(now_ms):
                LOGGER.warning("broker=%d epoch=%d is fenced: %s", entry.broker, entry.broker_epoch, entry.reason)
                self._fence_soon(entry)
            for broker in self._unfenced():
                if broker.is_leaving:
                    # Whoever began it: a broker that stops, another controller, or this one.
                    self._fence_soon(FenceNow(broker.broker, broker.broker_epoch, "it is leaving"))
                elif broker.broker not in self._to_fence and sessions.expect(
                    now_ms, broker.broker, broker.broker_epoch
                ):
                    self._spawn(self._probe(broker))

    def _follow_stall_timeout(self) -> None:
        """A leader whose disk stands still goes when a broker would; only leaders look at it."""
        limit_ms = configs.broker_config(self.image, "disk.stall.timeout.ms", self.machine.me).value
        assert isinstance(limit_ms, int), "it has a default"
        self.driver.set_disk_stall_timeout_ms(limit_ms)

    def _fence_soon(self, entry: FenceNow) -> None:
        if entry.broker not in self._to_fence:
            self._to_fence[entry.broker] = entry
            self._spawn(self._fence(entry))

    async def _fence(self, entry: FenceNow) -> None:
        """Until it is done, or there is nothing to do any more."""
        while self._sessions is not None and self._is_unfenced(entry.broker, entry.broker_epoch):
            if await self._try(Fence(broker=entry.broker, broker_epoch=entry.broker_epoch)) is None:
                await asyncio.sleep(self.config.tick_ms / 1000)
        self._to_fence.pop(entry.broker, None)

    def _is_unfenced(self, broker: int, broker_epoch: int) -> bool:
        found = self.image.brokers.get(broker)
        return found is not None and found.broker_epoch == broker_epoch and not found.fenced

    async def _probe(self, broker: Broker) -> None:
        """Connect to a broker anew and tell the sessions how that ended."""
        answer = await self._ask_incarnation(broker)
        if self._sessions is not None:
            self._sessions.answered(self._now_ms(), broker.broker, broker.broker_epoch, answer)

    def broker_address(self, broker: Broker) -> str:
        """Where it has registered, for controllers. What the quorum says of a voter with this node id is not asked: a
        wrong endpoint of a voter must not cut off a broker."""
        named = [(host, port) for name, _, host, port in broker.endpoints if name == self.config.broker_listener]
        host, port = [*named, *((host, port) for _, _, host, port in broker.endpoints)][0]
        return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"

    async def _ask_incarnation(self, broker: Broker) -> Answer:
        node, incarnation, timeout_ms = NodeId(broker.broker), broker.incarnation, self.config.probe_timeout_ms
        for _ in range(PROBES_MAX):
            try:
                if node == self._transport.me:  # what it advertises may lead around the machine
                    data = await self._transport.call(node, INCARNATION, b"?", timeout_ms=timeout_ms)
                else:
                    address = self.broker_address(broker)
                    data = await self._transport.call_at(node, address, INCARNATION, b"?", timeout_ms=timeout_ms)
            except UnreachableError as error:
                # No address or no route is silence, as far as we know: only who is there to refuse says it is down.
                return Answer.REFUSED if error.is_refused else Answer.SILENT
            except (CallTimeoutError, RemoteError):
                return Answer.SILENT
            except TransportError:
                # The connection from before, dying under the question: only a new one says who is there.
                await asyncio.sleep(PROBE_WAIT_MS / 1000)
            else:
                return Answer.SAME_INCARNATION if data == incarnation.bytes else Answer.OTHER_INCARNATION
        return Answer.SILENT

    # The service.

    async def _serve(self, sender: NodeId, data: bytes) -> bytes:
        if not self.is_active:
            raise self.machine.replicated.not_leader()
        request = decode_request(data)
        if isinstance(request, (*_OWN, Heartbeat)):
            raise InvalidRequestError(f"{type(request).__name__} is not for callers")
        if isinstance(request, _OF_SENDER) and request.broker != sender:
            raise InvalidRequestError(f"node {sender} speaks for broker {request.broker}")
        if is_question(request):
            return encode_reply(await self.ask(request))
        return encode_reply(await self.submit(request))

    async def _serve_local(self, _sender: NodeId, data: bytes) -> bytes:
        request = decode_request(data)
        if not is_question(request):
            raise InvalidRequestError(f"{type(request).__name__} is for the active controller")
        return encode_reply(self.machine.decider.answer(self.image, request))

    async def _serve_heartbeats(self, stream: Stream) -> None:
        beats = _Beats(self, stream)
        try:
            await beats.run()
        finally:
            beats.ended()

    def heard(self, beat: Heartbeat, sender: NodeId) -> Broker:
        """A heartbeat has arrived; raises why it does not count."""
        if self._sessions is None:
            raise self.machine.replicated.not_leader()
        if beat.broker != sender:
            raise InvalidRequestError(f"node {sender} speaks for broker {beat.broker}")
        broker = self.image.brokers.get(beat.broker)
        if broker is None:
            raise BrokerNotRegisteredError(f"broker {beat.broker} is not registered")
        if broker.broker_epoch != beat.broker_epoch:
            raise StaleBrokerEpochError(f"broker {beat.broker} is in epoch {broker.broker_epoch}")
        self._sessions.heard(self._now_ms(), beat.broker, beat.broker_epoch)
        return broker

    def stream_ended(self, broker: Broker) -> None:
        sessions = self._sessions
        if sessions is not None and sessions.stream_broke(self._now_ms(), broker.broker, broker.broker_epoch):
            self._spawn(self._probe(broker))


class _Beats:
    """One heartbeat stream. A heartbeat counts when it is received, however long the replies take."""

    def __init__(self, node: ControllerNode, stream: Stream) -> None:
        self._node = node
        self._stream = stream
        self._broker: Broker | None = None
        self._newest: Heartbeat | None = None
        self._refusal: TidelogError | None = None
        self._arrived = asyncio.Event()
        self._has_ended = False

    async def run(self) -> None:
        async with asyncio.TaskGroup() as group:
            reader = group.create_task(self._read())
            await self._answer()
            reader.cancel()

    def ended(self) -> None:
        """Told at once, not only when the reply that is being worked on has committed."""
        if self._broker is not None and not self._has_ended:
            self._has_ended = True
            self._node.stream_ended(self._broker)

    async def _read(self) -> None:
        try:
            while True:
                beat = decode_request(await self._stream.receive())
                if not isinstance(beat, Heartbeat):
                    raise InvalidRequestError("only heartbeats go over this stream")
                self._broker = self._node.heard(beat, self._stream.peer)
                self._newest = beat
                self._arrived.set()
        except TidelogError as error:
            if isinstance(error, StreamBrokenError | StreamClosedError):
                self.ended()
            self._refusal = error
            self._arrived.set()

    async def _answer(self) -> None:
        while True:
            await self._arrived.wait()
            self._arrived.clear()
            if isinstance(self._refusal, StreamBrokenError | StreamClosedError):
                return
            answer: object = self._refusal
            if answer is None:
                assert self._newest is not None, "that is what has arrived"
                try:
                    answer = await self._node.submit(self._newest)
                except TidelogError as error:
                    answer = error
            try:
                await self._stream.send(encode_beat(answer))
            except StreamBrokenError:
                return
            if isinstance(answer, TidelogError):
                return
