"""A connection of the Kafka API: requests in, responses out, in the order of the requests.

    bytes --Framing--> arrived --worker--> begun --handler, or its `DeferredResponse`--> done --flush--> transport
                       '--------------------- unanswered, in order ----------------------'

State

    open           requests are read and begun
    draining       nothing is read; earlier requests are answered (at a stop: those that have begun); then it closes
    half-closed    the client has closed its side: arrived requests begin (a write with acks=0 counts), then it closes
    closed         nothing is held, no task is left

    event                                    open            draining          half-closed     closed
    bytes, a whole request                   arrived         -                 -               -
    a request that cannot be read or served  draining        -                 closed          -
    the node stops                           draining        -                 closed          -
    the last unanswered one is answered      -               closed            -               -
    the last arrived one is begun            -               -                 closed          -
    the client closes its side               half-closed     closed            -               -
    lost, idle, too slow, grace is over      closed          closed            closed          -

Invariants

1. `unanswered` holds every request from its arrival until the transport has its response, oldest first; `arrived` is
   its tail, the requests that have not begun. Responses leave from its head only, so they leave in order.
2. One request at a time begins, in order. A handler that returns a `DeferredResponse` has begun: so writes are appended
   in order while earlier ones wait for acknowledgement, and a long poll delays only the responses behind it, as the
   protocol demands.
3. Bytes of a request count in `RequestMemory` before it is read and until its response is made. Without room the
   connection is not read; nor is it while `requests_max` are unanswered (and those of the same read).
4. Bytes of responses count in `ResponseMemory` from when they are made until the kernel has them (`ConnectionMemory`).
   While the transport is paused, or more than `response_bytes_max` wait behind an older request, nothing begins; nor
   does a fetch while another one of the connection is not written: so each connection holds one fetch response.
   A throttled connection is not read either (`mute`).
5. `DeferredResponse.abandon` is called once for each; a closed connection has given back all memory that it took.

`timeouts` ends slow connections. `check_timeouts` checks them; a connection has no timer of its own.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable
from struct import Struct
from typing import Any, cast

from tidelog.model.errors import ErrorCode, RemoteError, TidelogError
from tidelog.rpc.kafka import api_versions, slices
from tidelog.rpc.kafka.connection_state import Group, State
from tidelog.rpc.kafka.dispatch import failure
from tidelog.rpc.kafka.entries import Served
from tidelog.rpc.kafka.errors import MESSAGE_LENGTH_MAX
from tidelog.rpc.kafka.framing import Framing, Request
from tidelog.rpc.kafka.headers import read_request_header, response_frame
from tidelog.rpc.kafka.mute import Mute
from tidelog.rpc.kafka.pending import Pending
from tidelog.rpc.kafka.protocol_detection import reject_protocol
from tidelog.rpc.kafka.services import ConnectionMemory, Context, DeferredResponse, Origin
from tidelog.rpc.kafka.shared import READ_BYTES, Shared
from tidelog.rpc.kafka.timeouts import Timeouts
from tidelog.rpc.kafka.wire import Buffer, MalformedError
from tidelog.rpc.protocol_sniffing import KNOWN_BYTES
from tidelog.services.cancellation import foreign_cancellation

LOGGER = logging.getLogger(__name__)

READ_BYTES_FULL = 4 << 10
"""Read at once while there is no room for requests: the rest stays with its sender."""
HEADER_BYTES_MIN = 8
JOINED_BYTES_MAX = 32 << 10
"""Responses up to this size are one buffer: one copy is cheaper than a list of pieces."""
REQUESTS_PER_SLICE = 32
"""Requests begun in one turn of the event loop, if none of them waits."""
WRITE_HIGH_BYTES = 256 << 10
LINGER_S = 2.0
_HEAD = Struct(">hhi")
"""API key, version and correlation id begin every header."""


class Connection(asyncio.BufferedProtocol):
    """The listener calls `check_timeouts`, `stop` and `abort`."""

    def __init__(self, shared: Shared, listener: str, group: Group[Connection]) -> None:
        self.state = State.OPEN
        self.host = ""
        self._shared = shared
        self._listener = listener
        self._group = group
        self._loop = asyncio.get_running_loop()
        self._framing = Framing(shared.read)
        self._unanswered: deque[Pending] = deque()
        self._arrived: deque[Pending] = deque()
        self._memory = ConnectionMemory(shared.responses, shared.limits)
        self._waiting_bytes = 0
        """Bytes of responses that are ready and not written."""
        self._is_detected = False
        """The first bytes were those of a Kafka client."""
        self._is_reading = True
        self._is_write_paused = False
        self._needs_memory = False
        self._single_request: Pending | None = None
        """The request of an API with `is_single` that has begun and whose response is not written yet."""
        self._worker: asyncio.Task[None] | None = None
        self._gate: asyncio.Future[None] | None = None
        """The worker waits for it while responses pile up."""
        self._flushing: asyncio.Handle | None = None
        self._timeouts = Timeouts(shared.limits, shared.sockets, self._loop.time())
        self._mute = Mute(self._loop, self._read_on)
        self._arriving = 0
        """Size of the request that is arriving."""

    # Transport callbacks.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport = cast(asyncio.Transport, transport)  # uvloop's is no subclass
        peer = transport.get_extra_info("peername") or ("?", 0)
        self.host = str(peer[0]).removeprefix("::ffff:")
        self._origin = Origin(
            listener=self._listener,
            peer=f"[{self.host}]:{peer[1]}" if ":" in self.host else f"{self.host}:{peer[1]}",
            host=self.host,
            memory=self._memory,
            fetch_sessions=self._shared.fetch_sessions,
        )
        transport.set_write_buffer_limits(high=WRITE_HIGH_BYTES)
        if not self._group.enter(self):
            self.state = State.CLOSED
            transport.abort()

    def connection_lost(self, error: Exception | None) -> None:
        self._close()
        self._group.leave(self)

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._framing.buffer(READ_BYTES if self._shared.requests.has_room else READ_BYTES_FULL)

    def buffer_updated(self, nbytes: int) -> None:
        self._shared.counts.bytes_in += nbytes
        if self.state is not State.OPEN:
            return
        self._timeouts.active_s = self._loop.time()
        whole = self._framing.received(nbytes)
        if whole is not None:
            self._arrive(whole, self._arriving)
            self._arriving = 0
            self._timeouts.forget()
        self._take_requests()

    def eof_received(self) -> bool:
        """Returns True to keep the transport."""
        if self.state is State.OPEN and self._worker is not None:
            self.state = State.HALF_CLOSED
            self._open_gate()
            return True
        self._flush()  # responses that were to leave in the next turn
        return False

    def pause_writing(self) -> None:
        self._is_write_paused = True

    def resume_writing(self) -> None:
        self._is_write_paused = False
        self._count_queued()
        self._open_gate()

    # Reading.

    def _take_requests(self) -> None:
        """Takes all requests that are here and fit into memory; then reads on or pauses."""
        framing, shared = self._framing, self._shared
        self._needs_memory = False
        while not self._mute.is_on and (size := framing.next_size()) is not None:
            if not self._is_detected:
                if framing.left < KNOWN_BYTES:
                    break
                if not self._is_kafka(framing.head(KNOWN_BYTES)):
                    return
            if not HEADER_BYTES_MIN <= size <= shared.limits.message_bytes_max:
                self._reject_size(size)
                return
            if not shared.requests.take(size):
                self._needs_memory = True
                shared.requests.on_room(self._read_on)
                break
            whole = framing.accept(size)
            self._timeouts.forget()
            if whole is None:
                self._arriving = size
                break
            self._arrive(whole, size)
        framing.keep()
        self._read_or_not()

    def _read_on(self) -> None:
        """There is memory again, or the client is no longer throttled."""
        if self.state is State.OPEN:
            self._take_requests()

    def _arrive(self, data: Request, size: int) -> None:
        pending = Pending(data, size, self._timeouts.active_s)
        self._unanswered.append(pending)
        self._arrived.append(pending)
        if self._worker is None:
            self._worker = self._loop.create_task(self._run())

    def _read_or_not(self) -> None:
        may_read = (
            self.state is State.OPEN
            and not self._needs_memory
            and (self._arriving > 0 or not self._mute.is_on)
            and len(self._unanswered) < self._shared.sockets.requests_max
        )
        if may_read != self._is_reading and not self._transport.is_closing():
            self._is_reading = may_read
            if may_read:
                self._transport.resume_reading()
            else:
                self._transport.pause_reading()
        if not may_read or not self._framing.is_incomplete:
            self._timeouts.forget()
        else:
            self._timeouts.expect(self._loop.time())

    def _is_kafka(self, head: bytes) -> bool:
        port = self._group.port_of(self._listener)
        said = reject_protocol(head, self._shared, peer=self._origin.peer, port=port)
        self._is_detected = said is None
        if said:
            # Closing with unread bytes would reset the connection, and the response may be lost with it.
            self.state = State.DRAINING
            self._stop_reading()
            self._transport.write(said)
            self._transport.write_eof()
            self._loop.call_later(LINGER_S, self._transport.close)
        elif said is not None:
            self._drain()
        return self._is_detected

    def _reject_size(self, size: int) -> None:
        allowed = (
            f"{HEADER_BYTES_MIN} to {self._shared.limits.message_bytes_max} (socket.request.max.bytes) are allowed"
        )
        self._shared.count_malformed("size", self._origin.peer, f"sent a request of {size} bytes; {allowed}")
        self._drain()

    # Handling.

    @property
    def _must_wait(self) -> bool:
        if self._is_write_paused or self._waiting_bytes > self._shared.sockets.response_bytes_max:
            return True
        return self._single_request is not None and self._shared.is_single(self._arrived[0].data)

    def _open_gate(self) -> None:
        if self._gate is not None and not self._gate.done():
            self._gate.set_result(None)

    async def _run(self) -> None:
        """Begins the requests that have arrived, and ends when there are none."""
        count = 0
        try:
            while self._arrived:
                while self._arrived and self._must_wait and self.state is not State.HALF_CLOSED:
                    self._gate = self._loop.create_future()
                    await self._gate
                if not self._arrived:
                    break  # dropped meanwhile
                await self._begin(self._arrived.popleft())
                count += 1
                if count % REQUESTS_PER_SLICE == 0:
                    await asyncio.sleep(0)
        except Exception:
            LOGGER.exception("peer=%s closing the connection after an internal error", self._origin.peer)
            self.abort()
        finally:
            self._worker = None
        if self.state is State.HALF_CLOSED:
            self._flush()
            self._transport.close()

    async def _begin(self, pending: Pending) -> None:
        try:
            decoded = await self._read(pending)
        except MalformedError as error:
            if not pending.is_dropped:
                what = f"sent a malformed request of key {pending.key} version {pending.version}: {error}"
                self._reject(pending, "malformed", what)
            return
        if decoded is None:
            return
        served, request, context = decoded
        if served.is_single:
            self._single_request = pending
        try:
            outcome = await served.handle(request, context)
        except Exception as error:
            self._fail(pending, error)
        except asyncio.CancelledError as error:
            self._fail(pending, foreign_cancellation(error))
        else:
            if isinstance(outcome, DeferredResponse):
                self._start(pending, outcome)
            else:
                self._respond(pending, outcome)

    async def _read(self, pending: Pending) -> tuple[Served, Any, Context] | None:
        """Returns None if the request is not served, and rejected, or was dropped meanwhile."""
        data, pending.data = pending.data, b""
        pending.key, pending.version, pending.correlation_id = key, version, _ = _HEAD.unpack_from(data)
        pending.served = served = self._shared.table.get(key)
        if served is None or not served.low <= version <= served.high:
            self._unsupported(pending, key, version)
            return None
        header = read_request_header(data)
        if pending.is_sliced:
            request = await self._shared.decode_in_slices(served.api, pending, data, header.body)
            if request is None:
                return None
        else:
            request = served.api.decode_request(version, data, header.body)
        timeout_ms, client_id = getattr(request, "timeout_ms", 0), header.client_id
        deadline_s = pending.since_s + timeout_ms / 1000 if timeout_ms > 0 else None
        services, correlation_id = self._shared.services, pending.correlation_id
        context = Context(services, self._origin, version, correlation_id, client_id, deadline_s)
        pending.request = context.request
        return served, request, context

    def _unsupported(self, pending: Pending, key: int, version: int) -> None:
        table = self._shared.table
        if key == api_versions.KEY:
            # Every client knows version 0, and asks again in a version of the table.
            pending.version = 0
            self._respond(pending, api_versions.unsupported(table))
            return
        served = table.get(key)
        known = f"{served.api.name} has versions {served.low} to {served.high}" if served else "there is no such api"
        self._reject(pending, "unsupported", f"sent api key {key} version {version}: {known}")

    def _reject(self, pending: Pending, kind: str, why: str) -> None:
        """The request has no response: older ones are answered, then the connection ends."""
        self._shared.count_malformed(kind, self._origin.peer, why)
        self._drain()
        self._drop_arrived()
        while not pending.is_dropped:
            self._drop(self._unanswered.pop())  # the client would take a later response for this one
        self._flush()

    def _drop(self, pending: Pending) -> None:
        """The request gets no response."""
        pending.is_dropped = True
        if pending is self._single_request:
            self._single_request = None
        if pending.task is not None:
            pending.task.cancel()
        if pending.deferred is not None:
            deferred, pending.deferred = pending.deferred, None
            deferred.abandon()
        if pending.frame is None:
            self._shared.give_back(pending)
        self._waiting_bytes -= pending.response_bytes

    def _start(self, pending: Pending, deferred: DeferredResponse) -> None:
        if pending.is_dropped:
            deferred.abandon()
            return
        if deferred.taskless is not None:
            pending.deferred = deferred
            deferred.taskless.on_done(lambda: self._make(pending))
            return
        pending.task = task = self._loop.create_task(deferred.respond())
        task.add_done_callback(lambda done: self._ended(pending, deferred, done))
        if self.state is State.DRAINING:
            self._interrupt(pending)

    def _make(self, pending: Pending) -> None:
        """Callback of a `TasklessResponse`: makes the response and sends it."""
        deferred, pending.deferred = pending.deferred, None
        if deferred is None:
            return  # dropped meanwhile
        assert deferred.taskless is not None, "a taskless response"
        try:
            try:
                response = deferred.taskless.make()
            finally:
                deferred.abandon()
        except Exception as error:
            self._fail(pending, error)
        else:
            self._respond(pending, response)

    def _ended(self, pending: Pending, deferred: DeferredResponse, task: asyncio.Task[Any]) -> None:
        pending.task = None
        error = None if task.cancelled() else task.exception()
        if pending.is_sliced and not pending.is_dropped and not task.cancelled() and error is None:
            self._respond(pending, task.result(), deferred.abandon)
            return
        try:
            deferred.abandon()
        except Exception as broken:
            error = error or broken
        if pending.is_dropped:
            if error is not None and not isinstance(error, TidelogError):  # the client is gone, so only the log has it
                LOGGER.error("peer=%s api=%s failed", self._origin.peer, pending.name, exc_info=error)
        elif task.cancelled():
            assert pending.served is not None, "it was begun"
            code = pending.served.on_stop
            if pending.is_stopped and code is not None:
                self._fail(pending, RemoteError("this node is stopping; ask another one", code=code))
            else:
                self._fail(pending, RuntimeError("cancelled by what it waited for"))
        elif isinstance(error, Exception):
            self._fail(pending, error)
        elif error is not None:
            raise error
        else:
            self._respond(pending, task.result())

    # Responses.

    def _fail(self, pending: Pending, error: Exception) -> None:
        """Responds to the request with an error; one that is not of the catalogue is our own."""
        served = pending.served
        assert served is not None, "it was begun"
        if isinstance(error, TidelogError):
            code, message = error.code, str(error)
        else:
            LOGGER.error("peer=%s api=%s failed", self._origin.peer, pending.name, exc_info=error)
            code, message = ErrorCode.UNKNOWN_SERVER_ERROR, f"{pending.name} failed: {type(error).__name__}: {error}"
        response = failure(served, pending.version, code, message[:MESSAGE_LENGTH_MAX])
        if response is None:
            self._reject(pending, "failed", f"sent {pending.name} version {pending.version}, which failed: {message}")
        else:
            self._respond(pending, response)

    def _respond(self, pending: Pending, response: Any, release: Callable[[], None] = lambda: None) -> None:
        """The request is done; None: without a response. Calls `release` when the response is encoded."""
        if pending.request is not None and pending.request.throttle_ms and self.state is State.OPEN:
            self._mute.begin(response, pending.request.throttle_ms)

        def written(body: list[Buffer] | Exception | None) -> None:
            try:
                self._responded(pending, response, body)
            finally:
                release()

        if pending.is_dropped or pending.served is None or response is None:
            written(None)
        elif pending.is_sliced:
            pending.encoding = slices.encode_sliced(pending.served.api, pending.version, response, written)
        else:
            written(slices.encode(pending.served.api, pending.version, response))

    def _responded(self, pending: Pending, response: Any, body: list[Buffer] | Exception | None) -> None:
        served, shared = pending.served, self._shared
        assert served is not None, "it was begun"
        if pending.is_dropped:
            return
        if isinstance(body, Exception):
            LOGGER.error("api=%s version=%d: cannot encode the response", pending.name, pending.version, exc_info=body)
            self._reject(pending, "failed", f"sent {pending.name}, whose response cannot be encoded")
            return
        frame: list[Buffer] = []
        if body is not None:
            frame = response_frame(served.api, pending.version, pending.correlation_id, body)
            pending.response_bytes = sum(map(len, frame))
            self._waiting_bytes += pending.response_bytes
        pending.frame = frame
        counts = shared.counts.of(served.api.name)
        counts.requests += 1
        counts.errors += bool(getattr(response, "error_code", 0))
        counts.seconds += self._loop.time() - pending.since_s
        self._shared.give_back(pending)
        if self._unanswered[0] is pending:
            self._flush_soon()
        if served.is_single or self._flushing is None:
            self._count_queued()  # nothing else counts its data from now on

    def _flush_soon(self) -> None:
        """All responses of this turn of the loop leave together."""
        if self._flushing is None:
            self._flushing = self._loop.call_soon(self._flush)

    def _flush(self) -> None:
        if self._flushing is not None:
            self._flushing.cancel()
            self._flushing = None
        if self.state is State.CLOSED:
            return
        unanswered = self._unanswered
        buffers: list[Buffer] = []
        size = 0
        while unanswered and (frame := unanswered[0].frame) is not None:
            done = unanswered.popleft()
            if done is self._single_request:
                self._single_request = None
            size += done.response_bytes
            buffers += frame
        if buffers:
            self._timeouts.active_s = self._loop.time()
            self._waiting_bytes -= size
            self._shared.counts.bytes_out += size
            if size <= JOINED_BYTES_MAX:
                self._transport.write(b"".join(buffers))
            else:
                self._transport.writelines(buffers)
        self._count_queued()
        self._open_gate()
        if self.state is State.OPEN:
            self._read_or_not()
        elif self.state is State.DRAINING and not unanswered:
            self._transport.close()

    def _count_queued(self) -> None:
        """Counts the bytes that the client has not read."""
        self._memory.set_queued(self._waiting_bytes + self._transport.get_write_buffer_size())

    # Closing.

    def stop(self) -> None:
        """Answers requests that have begun, and closes; long polls end at once with an error."""
        if self.state in (State.OPEN, State.DRAINING):
            self._drain()
            self._drop_arrived()
            for pending in self._unanswered:
                self._interrupt(pending)
            self._flush()
        elif self.state is State.HALF_CLOSED:
            self._transport.close()

    def _interrupt(self, pending: Pending) -> None:
        if pending.task is not None and pending.served is not None and pending.served.on_stop is not None:
            pending.is_stopped = True
            pending.task.cancel()

    def _drain(self) -> None:
        """Reads nothing more."""
        self.state = State.DRAINING
        self._stop_reading()
        self._read_or_not()
        if not self._unanswered:
            self._transport.close()

    def _drop_arrived(self) -> None:
        while self._arrived:
            self._arrived.pop()
            self._drop(self._unanswered.pop())
        self._open_gate()

    def _stop_reading(self) -> None:
        self._shared.requests.forget(self._read_on)
        self._mute.end()
        self._framing.clear()
        if self._arriving:
            size, self._arriving = self._arriving, 0
            self._shared.requests.give_back(size)

    def abort(self) -> None:
        self._transport.abort()

    def _close(self) -> None:
        """Gives back all memory. Idempotent."""
        if self.state is State.CLOSED:
            return
        self.state = State.CLOSED
        self._stop_reading()
        if self._flushing is not None:
            self._flushing.cancel()
        if self._worker is not None:
            self._worker.cancel()
        self._arrived.clear()
        while self._unanswered:
            self._drop(self._unanswered.pop())
        self._memory.set_queued(0)

    # Timeouts.

    def rate(self, now_s: float) -> float | None:
        """Bytes per second of the request that is arriving; None if none is, or if it is too early to say."""
        return self._timeouts.rate(self._framing.arrived, now_s) if self._arriving else None

    def check_timeouts(self, now_s: float) -> None:
        """Closes the connection if it is too slow or idle."""
        if self.state is State.CLOSED:
            return
        self._count_queued()
        written = self._transport.get_write_buffer_size()
        why = self._timeouts.too_slow(now_s, arriving=self._arriving, written=written)
        if why is not None:
            self.end_slow(why)
        elif not self._unanswered and written == 0 and self._timeouts.is_idle(now_s):
            self._shared.counts.ended_idle += 1
            self._transport.close()

    def end_slow(self, why: str) -> None:
        self._shared.counts.ended_slow += 1
        self._shared.rate_limited_log.warn("slow", "peer=%s %s: closing it", self._origin.peer, why)
        self.abort()
