"""What a node shows to those who watch it: HTTP, metrics, log lines, the service manager, the loop's watchdog."""

from __future__ import annotations

import asyncio
import io
import json
import logging
import re
import socket
from collections.abc import Awaitable, Callable
from pathlib import Path

import msgpack
import pytest
from support.async_tests import asyncio_test

from tidelog.metadata.image import ClusterImage
from tidelog.metadata.records import SetConfig
from tidelog.model.errors import CorruptStateError, TransportError
from tidelog.model.ids import NodeId
from tidelog.raft.membership import Member
from tidelog.rpc.http import server as server_module
from tidelog.rpc.http.server import HttpServer, Page
from tidelog.server import log_lines, metrics
from tidelog.server.initial_configs import missing
from tidelog.server.known_controllers import decode_rows, encode_rows
from tidelog.server.listeners import Address
from tidelog.server.local_nodes import Layout, LocalNodes, Ports, free_ports, is_free
from tidelog.server.notify import ServiceManager
from tidelog.server.ports import check_free
from tidelog.server.transport import BrokerTransport, NodeTransport
from tidelog.server.watchdog import LoopWatchdog
from tidelog.services.context import RequestContext


async def good(_context: RequestContext) -> Page:
    return Page("good\n")


async def broken(_context: RequestContext) -> Page:
    raise ValueError("a defect")


def serving(job: Callable[[HttpServer], Awaitable[None]]) -> None:
    async def main() -> None:
        server = HttpServer(Address("127.0.0.1", free_ports(1)[0]), {"/good": good, "/broken": broken})
        await server.start()
        try:
            await job(server)
        finally:
            await server.close()

    asyncio.run(main())


async def talk(server: HttpServer, *requests: bytes) -> bytes:
    """All that comes back until the server closes."""
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    for request in requests:
        writer.write(request)
    async with asyncio.timeout(5):
        found = await reader.read()
    writer.close()
    return found


class TestHttp:
    @pytest.mark.parametrize(
        ("request_", "status", "body"),
        [
            (b"GET /good HTTP/1.1\r\nConnection: close\r\n\r\n", 200, b"good\n"),
            (b"GET /good?x=1 HTTP/1.0\r\n\r\n", 200, b"good\n"),
            (b"HEAD /good HTTP/1.1\r\nConnection: close\r\n\r\n", 200, b""),
            (b"GET /nothing HTTP/1.0\r\n\r\n", 404, b"there is: /broken /good\n"),
            (b"POST /good HTTP/1.0\r\n\r\n", 405, b"only GET\n"),
            (b"GET /broken HTTP/1.0\r\n\r\n", 500, b"this page failed; the node's log says why\n"),
            (b"nonsense\r\n\r\n", 400, b"this is HTTP/1.1: /metrics and /healthz\n"),
            (
                b"GET /" + b"x" * server_module.HEAD_BYTES_MAX + b" HTTP/1.1\r\n\r\n",
                431,
                b"the head of the request is too long\n",
            ),
        ],
    )
    def test_a_request_has_its_answer(self, request_: bytes, status: int, body: bytes) -> None:
        async def job(server: HttpServer) -> None:
            head, _, found = (await talk(server, request_)).partition(b"\r\n\r\n")
            assert head.startswith(b"HTTP/1.1 %d " % status)
            assert found == body

        serving(job)

    def test_a_connection_is_used_again(self) -> None:
        async def job(server: HttpServer) -> None:
            ask, last = b"GET /good HTTP/1.1\r\n\r\n", b"GET /good HTTP/1.1\r\nConnection: close\r\n\r\n"
            assert (await talk(server, ask, ask, last)).count(b"good\n") == 3

        serving(job)

    def test_a_body_ends_the_connection_and_is_not_taken_for_a_request(self) -> None:
        async def job(server: HttpServer) -> None:
            hidden = b"GET /good HTTP/1.1\r\nContent-Length: 26\r\n\r\nGET /broken HTTP/1.1\r\n\r\n"
            assert (await talk(server, hidden)).count(b"HTTP/1.1 ") == 1

        serving(job)

    def test_too_many_connections_are_closed_at_once(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(server_module, "CONNECTIONS_MAX", 1)

        async def job(server: HttpServer) -> None:
            _, writer = await asyncio.open_connection("127.0.0.1", server.port)
            writer.write(b"GET /good HTTP/1.1\r\n")  # not finished
            while not server.is_busy:  # noqa: ASYNC110 - it has no event to wait for
                await asyncio.sleep(0.001)
            try:
                assert await talk(server) == b""
            finally:
                writer.close()

        serving(job)

    def test_a_taken_port_is_named(self) -> None:
        async def job(server: HttpServer) -> None:
            second = HttpServer(Address("127.0.0.1", server.port), {})
            with pytest.raises(TransportError, match=f"cannot listen on 127.0.0.1:{server.port}: "):
                await second.start()

        serving(job)


class TestMetrics:
    def test_samples_of_one_name_stand_together_with_one_help(self) -> None:
        text = metrics.page(
            [
                lambda: [metrics.gauge("a", 1, "First.", disk='x"\\\n'), metrics.counter("b_total", 2.5, "Second.")],
                lambda: [metrics.gauge("a", 3, "First.", disk="y")],
            ]
        )
        assert text == (
            '# HELP tidelog_a First.\n# TYPE tidelog_a gauge\ntidelog_a{disk="x\\"\\\\\\n"} 1\ntidelog_a{disk="y"} 3\n'
            "# HELP tidelog_b_total Second.\n# TYPE tidelog_b_total counter\ntidelog_b_total 2.5\n"
        )


class TestLogLines:
    def line(self, form: str) -> str:
        stream = io.StringIO()
        handler = logging.StreamHandler(stream)
        handler.setFormatter(log_lines.JsonLines(3) if form == "json" else log_lines.TextLines(3))
        logger = logging.Logger("tidelog.raft.driver")
        logger.addHandler(handler)
        try:
            raise ValueError("why")
        except ValueError:
            logger.exception("epoch=%d", 7)
        return stream.getvalue()

    def test_a_line_for_a_person(self) -> None:
        first, *rest = self.line("text").splitlines()
        assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z ERROR node=3 raft.driver: epoch=7", first)
        assert rest[-1] == "ValueError: why"

    def test_a_line_for_a_program(self) -> None:
        found = json.loads(self.line("json"))
        assert (found["level"], found["node"], found["epoch"]) == ("error", 3, 7)
        assert found["traceback"].endswith("ValueError: why")


class TestServiceManager:
    def receive(self, path: Path, abstract: bool = False) -> tuple[socket.socket, str]:
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        listener.settimeout(5)
        name = f"tidelog-{path.name}-{id(self)}" if abstract else str(path / "notify")
        listener.bind("\0" + name if abstract else name)
        return listener, "@" + name if abstract else name

    @pytest.mark.parametrize("abstract", [False, True])
    def test_the_service_manager_gets_every_state(self, tmp_path: Path, abstract: bool) -> None:
        listener, address = self.receive(tmp_path, abstract)
        with listener:
            manager = ServiceManager({"NOTIFY_SOCKET": address, "WATCHDOG_USEC": "2000000"})
            manager.status("waits")
            manager.ready("ready")
            manager.alive()
            manager.stopping()
            manager.close()
            found = [listener.recv(1000).decode() for _ in range(4)]
        assert found == ["STATUS=waits", "READY=1\nSTATUS=ready", "WATCHDOG=1", "STOPPING=1\nSTATUS=stopping"]
        assert manager.watchdog_s == 2.0

    def test_without_one_nothing_happens(self) -> None:
        manager = ServiceManager({})
        manager.ready("ready")
        assert manager.watchdog_s is None

    def test_one_that_is_gone_is_no_error(self, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
        manager = ServiceManager({"NOTIFY_SOCKET": str(tmp_path / "gone")})
        manager.ready("ready")
        manager.close()
        assert "could not notify the service manager of READY=1" in caplog.text

    def test_a_watchdog_of_another_process_is_not_ours(self) -> None:
        assert ServiceManager({"WATCHDOG_USEC": "1000000", "WATCHDOG_PID": "1"}).watchdog_s is None


def test_a_blocked_event_loop_is_noticed_and_reported(caplog: pytest.LogCaptureFixture) -> None:
    import time

    async def main() -> LoopWatchdog:
        watchdog = LoopWatchdog(ServiceManager({}), warn_ms=100)
        running = asyncio.create_task(watchdog.run())
        await asyncio.sleep(0)
        time.sleep(0.3)  # noqa: ASYNC251 - that is the fault
        async with asyncio.timeout(5):
            while watchdog.late == 0:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        running.cancel()
        return watchdog

    watchdog = asyncio.run(main())
    assert watchdog.take_worst_s() >= 0.1
    assert watchdog.take_worst_s() == 0.0
    assert "the event loop was blocked for " in caplog.text


class TestLocalNodes:
    def test_ports_are_the_usual_ones_and_move_together(self) -> None:
        assert Ports.usual(1, 0) == Ports(9192, 9292, 9392, 9092)
        assert Ports.usual(3, 100) == Ports(9294, 9394, 9494, 9194)

    def test_a_layout_is_kept(self, tmp_path: Path) -> None:
        made = Layout.fresh([Ports.usual(1, 0), Ports.usual(2, 0)])
        made.write(tmp_path)
        assert Layout.read(tmp_path) == made
        assert Layout.read(tmp_path / "elsewhere") is None

    def test_a_layout_from_before_there_was_a_kafka_port_is_read(self, tmp_path: Path) -> None:
        made = Layout.fresh([Ports.usual(1, 0), Ports.usual(2, 0)])
        made.write(tmp_path)
        path = tmp_path / "cluster.json"
        fields = json.loads(path.read_text(encoding="utf-8"))
        fields["ports"] = [row[:3] for row in fields["ports"]]
        path.write_text(json.dumps(fields), encoding="utf-8")
        assert Layout.read(tmp_path) == made

    def test_a_taken_port_is_found(self, tmp_path: Path) -> None:
        with socket.create_server(("127.0.0.1", 0)) as listener:
            port = listener.getsockname()[1]
            assert not is_free(port)
            free = free_ports(3)
            nodes = LocalNodes(tmp_path, Layout.fresh([Ports(free[0], port, free[1], free[2])]))
            assert nodes.taken_port() == (port, "gRPC", 1)
            nodes = LocalNodes(tmp_path, Layout.fresh([Ports(free[0], free[1], free[2], port)]))
            assert nodes.taken_port() == (port, "Kafka", 1)
            assert nodes.kafka_bootstrap == f"localhost:{port}"


class TestControllers:
    def test_the_list_of_controllers_comes_back_as_it_was(self) -> None:
        members = [Member(NodeId(1), bytes(16), (("CONTROLLER", "a:1"),)), Member(NodeId(2), bytes(16))]
        assert decode_rows(encode_rows(members)) == [(1, "a:1")]

    @pytest.mark.parametrize(
        "data", [b"", b"\xc1", msgpack.packb(["other", 1, []]), msgpack.packb(["controllers", 1, [7]])]
    )
    def test_bytes_that_are_none_are_refused(self, data: bytes) -> None:
        with pytest.raises(CorruptStateError):
            decode_rows(data)


def test_a_file_tells_where_the_cluster_begins_and_no_more() -> None:
    image = ClusterImage().apply(SetConfig(resource_type="cluster", resource="", key="num.partitions", value="5"))
    unset, other = missing(image, {"num.partitions": "3", "log.retention.ms": "7", "min.insync.replicas": "2"})
    assert unset == {"log.retention.ms": "7", "min.insync.replicas": "2"}
    assert other == {"num.partitions": "5"}
    assert missing(image, {"num.partitions": "5"}) == ({}, {})


def test_an_address_of_which_one_half_is_taken_is_not_free() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        for host in ("localhost", "127.0.0.1", ""):
            with pytest.raises(TransportError, match=f"cannot listen on {host}:{port}"):
                check_free(Address(host, port))
    check_free(Address("localhost", port))


def test_an_address_that_is_not_ours_is_said() -> None:
    with pytest.raises(TransportError, match=r"cannot listen on 192\.0\.2\.1:9292"):
        check_free(Address("192.0.2.1", 9292))
    with pytest.raises(TransportError, match="cannot listen on no-such-host"):
        check_free(Address("no-such-host.invalid", 9292))


@asyncio_test
async def test_the_address_of_a_voter_is_not_used_to_reach_the_broker_of_that_node() -> None:
    async def name(_caller: NodeId, _request: bytes) -> bytes:
        return b"here"

    one, other, typo = free_ports(3)
    mine = NodeTransport(NodeId(1), "cluster", Address("localhost", one))
    brokers = BrokerTransport(mine, "cluster", Address("localhost", one))
    there = NodeTransport(NodeId(2), "cluster", Address("localhost", other))
    there.serve("name", name)
    await there.start()
    try:
        brokers.set_address(NodeId(2), f"localhost:{other}")  # as it has registered
        mine.set_address(NodeId(2), f"localhost:{typo}")  # as the quorum says
        assert await brokers.call(NodeId(2), "name", b"?", timeout_ms=5_000) == b"here"
        with pytest.raises(TransportError, match=f"localhost:{typo}"):
            await mine.call(NodeId(2), "name", b"?", timeout_ms=5_000)
    finally:
        for transport in (brokers, mine, there):
            await transport.close()


@asyncio_test
async def test_a_node_reaches_itself_whatever_it_advertises() -> None:
    transport = NodeTransport(NodeId(3), "cluster", Address("", free_ports(1)[0]))

    async def echo(_caller: NodeId, request: bytes) -> bytes:
        return request

    transport.serve("echo", echo)
    await transport.start()
    transport.set_address(NodeId(3), "192.0.2.1:1")  # nobody is there
    try:
        assert await transport.call(NodeId(3), "echo", b"here", timeout_ms=5_000) == b"here"
    finally:
        await transport.close()
