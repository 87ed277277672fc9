"""A connection of the Kafka door: requests in, answers out, in the order of the requests.

    bytes --Framing--> arrived --worker--> begun --handler, or its `Later`--> done --flush--> transport
                       '--------------------- unanswered, in order ----------------------'

State

    open        requests are read and begun
    draining    nothing is read; what came before is answered (before a stop: what had begun); then it closes
    deaf        the client has ended its side: what has arrived is begun (a write with acks=0 counts), then it closes
    closed      nothing is held, no task is left

    event                                    open            draining          deaf            closed
    bytes, a whole request                   arrived         -                 -               -
    no request that we can read or serve     draining        -                 closed          -
    stop of the node                         draining        -                 closed          -
    the last unanswered one is answered      -               closed            -               -
    the last arrived one is begun            -               -                 closed          -
    the client ends its side                 deaf            closed            -               -
    lost, idle, too slow, grace is over      closed          closed            closed          -

Invariants

1. `unanswered` holds every request from its arrival until its answer is handed to the transport, oldest first;
   `arrived` is its tail, those that have not begun. Answers leave from its head only, so they leave in order.
2. One request at a time is being begun, in order. A handler that returns `Later` has begun: so writes are appended in
   their order while earlier ones wait for their acknowledgement, and a long poll holds up nobody but the answers
   behind it, as the protocol demands.
3. Bytes of a request count in `RequestMemory` before it is read and until its answer is made. Without room the
   connection is not read; so it is while `requests_max` are unanswered (and what came in the same read).
4. Bytes of answers count in `ResponseMemory` from when they are made until the kernel has them (`AnswerMemory`). While
   the transport is paused, or more than `answer_bytes_max` wait behind an older request, nothing is begun; nor is a
   fetch while another one of the connection is not written: so one answer of fetched data is held for each.
5. `Later.leave` is called once for each; a connection that is closed has given back all that it took.

Who takes too long ends the connection (`patience`). `look` checks that; there is no timer for each connection.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable
from struct import Struct
from typing import Any, cast

from tidelog.model.errors import ErrorCode, TidelogError
from tidelog.rpc.first_bytes import KNOWN_BYTES
from tidelog.rpc.kafka import api_versions, slices
from tidelog.rpc.kafka.connection_state import Group, State
from tidelog.rpc.kafka.dispatch import failure
from tidelog.rpc.kafka.entries import Served
from tidelog.rpc.kafka.errors import MESSAGE_LENGTH_MAX
from tidelog.rpc.kafka.framing import Framing, Request
from tidelog.rpc.kafka.headers import read_request_header, response_frame
from tidelog.rpc.kafka.patience import Patience
from tidelog.rpc.kafka.pending import Pending
from tidelog.rpc.kafka.services import AnswerMemory, Context, Later, Origin
from tidelog.rpc.kafka.shared import READ_BYTES, Shared
from tidelog.rpc.kafka.strangers import turn_away
from tidelog.rpc.kafka.wire import Buffer, MalformedError

LOGGER = logging.getLogger(__name__)

READ_BYTES_FULL = 4 << 10
"""Read at once while there is no room for requests: what cannot be taken stays with its sender."""
HEADER_BYTES_MIN = 8
JOINED_BYTES_MAX = 32 << 10
"""Answers up to here go out as one buffer: one copy is cheaper than a list of pieces."""
TURNS = 32
"""Requests that are begun before others have their turn, if none of them waits."""
WRITE_HIGH_BYTES = 256 << 10
LINGER_S = 2.0
_HEAD = Struct(">hhi")
"""Api key, version, correlation id: of every header there is."""


class Connection(asyncio.BufferedProtocol):
    """Made for each client; `look`, `stop` and `abort` are for the listener."""

    def __init__(self, shared: Shared, listener: str, group: Group) -> None:
        self.state = State.OPEN
        self.host = ""
        self._shared = shared
        self._listener = listener
        self._group = group
        self._loop = asyncio.get_running_loop()
        self._framing = Framing(shared.read)
        self._unanswered: deque[Pending] = deque()
        self._arrived: deque[Pending] = deque()
        self._memory = AnswerMemory(shared.responses, shared.limits)
        self._waiting_bytes = 0
        """Of answers that are ready and not handed to the transport."""
        self._is_known = False
        """Its first bytes were those of a Kafka client."""
        self._is_reading = True
        self._is_write_paused = False
        self._needs_room = False
        self._single: Pending | None = None
        """The one of its kind that is begun and not written (`Entry.is_single`)."""
        self._worker: asyncio.Task[None] | None = None
        self._gate: asyncio.Future[None] | None = None
        """What the worker waits for while answers pile up."""
        self._flushing: asyncio.Handle | None = None
        self._patience = Patience(shared.limits, shared.sockets, self._loop.time())
        self._arriving = 0
        """The size of the request that is arriving."""

    # The transport's side.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport = cast(asyncio.Transport, transport)  # uvloop's is no subclass
        peer = transport.get_extra_info("peername") or ("?", 0)
        self.host = str(peer[0]).removeprefix("::ffff:")
        self._origin = Origin(
            listener=self._listener,
            peer=f"[{self.host}]:{peer[1]}" if ":" in self.host else f"{self.host}:{peer[1]}",
            host=self.host,
            memory=self._memory,
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
        self._patience.active_s = self._loop.time()
        whole = self._framing.received(nbytes)
        if whole is not None:
            self._arrive(whole, self._arriving)
            self._arriving = 0
            self._patience.forget()
        self._take_requests()

    def eof_received(self) -> bool:
        """True keeps the transport."""
        if self.state is State.OPEN and self._worker is not None:
            self.state = State.DEAF
            self._open_gate()
            return True
        self._flush()  # what is ready, and was to leave in the next turn
        return False

    def pause_writing(self) -> None:
        self._is_write_paused = True

    def resume_writing(self) -> None:
        self._is_write_paused = False
        self._settle()
        self._open_gate()

    # Reading.

    def _take_requests(self) -> None:
        """All that is here and has room; then read on, or do not."""
        framing, shared = self._framing, self._shared
        self._needs_room = False
        while (size := framing.next_size()) is not None:
            if not self._is_known:
                if framing.left < KNOWN_BYTES:
                    break
                if not self._is_kafka(framing.head(KNOWN_BYTES)):
                    return
            if not HEADER_BYTES_MIN <= size <= shared.limits.message_bytes_max:
                self._refuse_size(size)
                return
            if not shared.requests.take(size):
                self._needs_room = True
                shared.requests.on_room(self._room_again)
                break
            whole = framing.accept(size)
            self._patience.forget()
            if whole is None:
                self._arriving = size
                break
            self._arrive(whole, size)
        framing.keep()
        self._read_or_not()

    def _room_again(self) -> None:
        if self.state is State.OPEN:
            self._take_requests()

    def _arrive(self, data: Request, size: int) -> None:
        pending = Pending(data, size, self._patience.active_s)
        self._unanswered.append(pending)
        self._arrived.append(pending)
        if self._worker is None:
            self._worker = self._loop.create_task(self._work())

    def _read_or_not(self) -> None:
        may_read = (
            self.state is State.OPEN
            and not self._needs_room
            and len(self._unanswered) < self._shared.sockets.requests_max
        )
        if may_read != self._is_reading and not self._transport.is_closing():
            self._is_reading = may_read
            if may_read:
                self._transport.resume_reading()
            else:
                self._transport.pause_reading()
        if not may_read or not self._framing.is_incomplete:
            self._patience.forget()
        else:
            self._patience.expect(self._loop.time())

    def _is_kafka(self, head: bytes) -> bool:
        port = self._group.port_of(self._listener)
        said = turn_away(head, self._shared, peer=self._origin.peer, port=port)
        self._is_known = said is None
        if said:
            # To close with bytes of its own unread would reset the connection, and the answer may be lost with it.
            self.state = State.DRAINING
            self._give_up_reading()
            self._transport.write(said)
            self._transport.write_eof()
            self._loop.call_later(LINGER_S, self._transport.close)
        elif said is not None:
            self._drain()
        return self._is_known

    def _refuse_size(self, size: int) -> None:
        self._shared.counts.malformed += 1
        self._shared.seldom.warn(
            "size",
            "peer=%s sends a request of %d bytes; from %d to %d (socket.request.max.bytes) are allowed: it is closed",
            self._origin.peer,
            size,
            HEADER_BYTES_MIN,
            self._shared.limits.message_bytes_max,
        )
        self._drain()

    # Working.

    @property
    def _must_wait(self) -> bool:
        if self._is_write_paused or self._waiting_bytes > self._shared.sockets.answer_bytes_max:
            return True
        return self._single is not None and self._shared.is_single(self._arrived[0].data)

    def _open_gate(self) -> None:
        if self._gate is not None and not self._gate.done():
            self._gate.set_result(None)

    async def _work(self) -> None:
        """Begins what has arrived, and ends when there is nothing left."""
        turns = 0
        try:
            while self._arrived:
                while self._arrived and self._must_wait and self.state is not State.DEAF:
                    self._gate = self._loop.create_future()
                    await self._gate
                if not self._arrived:
                    break  # given up meanwhile
                await self._begin(self._arrived.popleft())
                turns += 1
                if turns % TURNS == 0:
                    await asyncio.sleep(0)
        except Exception:
            LOGGER.exception("peer=%s is closed by an error of our own", self._origin.peer)
            self.abort()
        finally:
            self._worker = None
        if self.state is State.DEAF:
            self._flush()
            self._transport.close()

    async def _begin(self, pending: Pending) -> None:
        try:
            found = await self._read(pending)
        except MalformedError as error:
            if not pending.is_dropped:
                what = f"sends what is no request of key {pending.key} version {pending.version}: {error}"
                self._refuse(pending, "malformed", what)
            return
        if found is None:
            return
        served, request, context = found
        if served.is_single:
            self._single = pending
        try:
            outcome = await served.handle(request, context)
        except TidelogError as error:
            self._fail(pending, error.code, str(error))
        except Exception as error:
            self._fail_unexpected(pending, error)
        else:
            if isinstance(outcome, Later):
                self._start(pending, outcome)
            else:
                self._answer(pending, outcome)

    async def _read(self, pending: Pending) -> tuple[Served, Any, Context] | None:
        """None: it is not served, and dealt with, or it was dropped meanwhile."""
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
        context = Context(self._shared.services, self._origin, version, pending.correlation_id, header.client_id)
        return served, request, context

    def _unsupported(self, pending: Pending, key: int, version: int) -> None:
        table = self._shared.table
        if key == api_versions.KEY:
            # Known to every client, which then asks again in a version of the table.
            pending.version = 0
            self._answer(pending, api_versions.unsupported(table))
            return
        served = table.get(key)
        there = f"{served.api.name} is served from {served.low} to {served.high}" if served else "no such api is served"
        self._refuse(pending, "unsupported", f"asks for api key {key} version {version}: {there}")

    def _refuse(self, pending: Pending, kind: str, why: str) -> None:
        """There is no answer to it: older ones are answered, then the connection ends."""
        shared = self._shared
        shared.counts.malformed += 1
        shared.seldom.warn(kind, "peer=%s %s; it is closed", self._origin.peer, why)
        self._drain()
        self._drop_arrived()
        while not pending.is_dropped:
            self._drop(self._unanswered.pop())  # an answer behind it would be taken for its own
        self._flush()

    def _drop(self, pending: Pending) -> None:
        """It is not answered any more."""
        pending.is_dropped = True
        if pending is self._single:
            self._single = None
        if pending.task is not None:
            pending.task.cancel()
        if pending.later is not None:
            later, pending.later = pending.later, None
            later.leave()
        if pending.answer is None:
            self._shared.give_back(pending)
        self._waiting_bytes -= pending.answer_bytes

    def _start(self, pending: Pending, later: Later) -> None:
        if pending.is_dropped:
            later.leave()
            return
        if later.soon is not None:
            pending.later = later
            later.soon.on_done(lambda: self._make(pending))
            return
        pending.task = task = self._loop.create_task(later.answer())
        task.add_done_callback(lambda done: self._ended(pending, later, done))
        if self.state is State.DRAINING:
            self._interrupt(pending)

    def _make(self, pending: Pending) -> None:
        """What it has waited for without a task is over."""
        later, pending.later = pending.later, None
        if later is None:
            return  # dropped meanwhile
        assert later.soon is not None, "it waits for that"
        try:
            try:
                response = later.soon.make()
            finally:
                later.leave()
        except TidelogError as error:
            self._fail(pending, error.code, str(error))
        except Exception as error:
            self._fail_unexpected(pending, error)
        else:
            self._answer(pending, response)

    def _ended(self, pending: Pending, later: Later, task: asyncio.Task[Any]) -> None:
        pending.task = None
        error = None if task.cancelled() else task.exception()
        if pending.is_sliced and not pending.is_dropped and not task.cancelled() and error is None:
            self._answer(pending, task.result(), later.leave)
            return
        try:
            later.leave()
        except Exception as broken:
            error = error or broken
        if pending.is_dropped:
            self._tell_unheard(pending, error)
        elif task.cancelled():
            assert pending.served is not None, "it was begun"
            code = pending.served.on_stop
            if pending.is_stopped and code is not None:
                self._fail(pending, code, "this node stops; ask another one")
            else:
                self._fail_unexpected(pending, RuntimeError("it was cancelled by what it waited for"))
        elif isinstance(error, TidelogError):
            self._fail(pending, error.code, str(error))
        elif isinstance(error, Exception):
            self._fail_unexpected(pending, error)
        elif error is not None:
            raise error
        else:
            self._answer(pending, task.result())

    def _tell_unheard(self, pending: Pending, error: BaseException | None) -> None:
        """Nobody waits for it: only an error of our own is worth a line."""
        if error is not None and not isinstance(error, TidelogError):
            LOGGER.error("peer=%s api=%s failed", self._origin.peer, pending.name, exc_info=error)

    # Answers.

    def _fail_unexpected(self, pending: Pending, error: Exception) -> None:
        LOGGER.error("peer=%s api=%s failed", self._origin.peer, pending.name, exc_info=error)
        self._fail(pending, ErrorCode.UNKNOWN_SERVER_ERROR, f"{pending.name} failed: {type(error).__name__}: {error}")

    def _fail(self, pending: Pending, code: ErrorCode, message: str) -> None:
        """The request as a whole."""
        served = pending.served
        assert served is not None, "it was begun"
        response = failure(served, pending.version, code, message[:MESSAGE_LENGTH_MAX])
        if response is None:
            self._refuse(pending, "failed", f"sent {pending.name} version {pending.version}, which failed: {message}")
        else:
            self._answer(pending, response)

    def _answer(self, pending: Pending, response: Any, leave: Callable[[], None] = lambda: None) -> None:
        """It is done; None: without an answer. `leave` is called when the answer holds what it is made of."""

        def written(body: list[Buffer] | Exception | None) -> None:
            try:
                self._answered(pending, response, body)
            finally:
                leave()

        if pending.is_dropped or pending.served is None or response is None:
            written(None)
        elif pending.is_sliced:
            pending.encoding = slices.write(pending.served.api, pending.version, response, written)
        else:
            written(slices.written(pending.served.api, pending.version, response))

    def _answered(self, pending: Pending, response: Any, body: list[Buffer] | Exception | None) -> None:
        served, shared = pending.served, self._shared
        assert served is not None, "it was begun"
        if pending.is_dropped:
            return
        if isinstance(body, Exception):
            LOGGER.error("api=%s version=%d: no answer can be written", pending.name, pending.version, exc_info=body)
            self._refuse(pending, "failed", f"sent {pending.name}, whose answer cannot be written")
            return
        answer: list[Buffer] = []
        if body is not None:
            answer = response_frame(served.api, pending.version, pending.correlation_id, body)
            pending.answer_bytes = sum(map(len, answer))
            self._waiting_bytes += pending.answer_bytes
        pending.answer = answer
        counts = shared.counts.of(served.api.name)
        counts.requests += 1
        counts.errors += bool(getattr(response, "error_code", 0))
        counts.seconds += self._loop.time() - pending.since_s
        self._shared.give_back(pending)
        if self._unanswered[0] is pending:
            self._flush_soon()
        if served.is_single or self._flushing is None:
            self._settle()  # its data is counted by nobody else from now on

    def _flush_soon(self) -> None:
        """All that is done in this turn of the loop goes out together."""
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
        while unanswered and (answer := unanswered[0].answer) is not None:
            done = unanswered.popleft()
            if done is self._single:
                self._single = None
            size += done.answer_bytes
            buffers += answer
        if buffers:
            self._patience.active_s = self._loop.time()
            self._waiting_bytes -= size
            self._shared.counts.bytes_out += size
            if size <= JOINED_BYTES_MAX:
                self._transport.write(b"".join(buffers))
            else:
                self._transport.writelines(buffers)
        self._settle()
        self._open_gate()
        if self.state is State.OPEN:
            self._read_or_not()
        elif self.state is State.DRAINING and not unanswered:
            self._transport.close()

    def _settle(self) -> None:
        """Count what the client has not taken."""
        self._memory.set_queued(self._waiting_bytes + self._transport.get_write_buffer_size())

    # The end.

    def stop(self) -> None:
        """Answer what has begun, and close; what waits for news is told at once to go elsewhere."""
        if self.state in (State.OPEN, State.DRAINING):
            self._drain()
            self._drop_arrived()
            for pending in self._unanswered:
                self._interrupt(pending)
            self._flush()
        elif self.state is State.DEAF:
            self._transport.close()

    def _interrupt(self, pending: Pending) -> None:
        if pending.task is not None and pending.served is not None and pending.served.on_stop is not None:
            pending.is_stopped = True
            pending.task.cancel()

    def _drain(self) -> None:
        """Nothing is read any more."""
        self.state = State.DRAINING
        self._give_up_reading()
        self._read_or_not()
        if not self._unanswered:
            self._transport.close()

    def _drop_arrived(self) -> None:
        while self._arrived:
            self._arrived.pop()
            self._drop(self._unanswered.pop())
        self._open_gate()

    def _give_up_reading(self) -> None:
        self._shared.requests.forget(self._room_again)
        self._framing.clear()
        if self._arriving:
            size, self._arriving = self._arriving, 0
            self._shared.requests.give_back(size)

    def abort(self) -> None:
        self._transport.abort()

    def _close(self) -> None:
        """Give back all that it has; idempotent."""
        if self.state is State.CLOSED:
            return
        self.state = State.CLOSED
        self._give_up_reading()
        if self._flushing is not None:
            self._flushing.cancel()
        if self._worker is not None:
            self._worker.cancel()
        self._arrived.clear()
        while self._unanswered:
            self._drop(self._unanswered.pop())
        self._memory.set_queued(0)

    # Limits of time.

    def rate(self, now_s: float) -> float | None:
        """Bytes a second of the request that is arriving; None if none is, or none for long enough to tell."""
        return self._patience.rate(self._framing.arrived, now_s) if self._arriving else None

    def look(self, now_s: float) -> None:
        """Called from time to time: ends what takes too long."""
        if self.state is State.CLOSED:
            return
        self._settle()
        written = self._transport.get_write_buffer_size()
        why = self._patience.too_slow(now_s, arriving=self._arriving, written=written)
        if why is not None:
            self.end_slow(why)
        elif not self._unanswered and written == 0 and self._patience.is_idle(now_s):
            self._shared.counts.ended_idle += 1
            self._transport.close()

    def end_slow(self, why: str) -> None:
        self._shared.counts.ended_slow += 1
        self._shared.seldom.warn("slow", "peer=%s %s: it is closed", self._origin.peer, why)
        self.abort()
