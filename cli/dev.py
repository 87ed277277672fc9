"""`tidelog dev`: a cluster of node processes in the foreground, ready in seconds, stopped by Ctrl-C."""

import argparse
import contextlib
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from types import FrameType

from tidelog import __version__
from tidelog.cli.exit_codes import EXIT_FAILURE, EXIT_OK
from tidelog.cli.main import UsageError
from tidelog.server.local_nodes import HOST, Layout, LocalNodes, NodeEndedError, Ports
from tidelog.server.locks import DirectoryLock

DATA = "tidelog-data"
NODES_MAX = 9
PORT_OFFSET_MAX = 50_000
POLL_S = 0.2
SETTINGS: dict[str, object] = {
    "auto.create.topics.enable": True,
    "controlled.shutdown.timeout.ms": 3_000,
}


class _StopError(Exception):
    """Ctrl-C or SIGTERM."""


def run(options: argparse.Namespace) -> int:
    _check(options)
    with contextlib.ExitStack() as stack:
        if options.ephemeral:
            data = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="tidelog-dev-")))
        else:
            data = Path(options.data or DATA).absolute()
        if data.exists() and not data.is_dir():
            raise UsageError(f"--data {data}: is not a directory")
        data.mkdir(parents=True, exist_ok=True)
        lock = DirectoryLock(str(data), who="tidelog dev")
        stack.callback(lock.close)
        layout = _layout(data, options)
        return _run(LocalNodes(data, layout, SETTINGS), is_kept=not options.ephemeral)


def _check(options: argparse.Namespace) -> None:
    if not 1 <= options.nodes <= NODES_MAX:
        raise UsageError(f"--nodes {options.nodes}: from 1 to {NODES_MAX}")
    if not 0 <= options.port_offset <= PORT_OFFSET_MAX:
        raise UsageError(f"--port-offset {options.port_offset}: from 0 to {PORT_OFFSET_MAX}")
    if options.ephemeral and options.data is not None:
        raise UsageError("--ephemeral keeps nothing and --data says where to keep it: use one of them")


def _layout(data: Path, options: argparse.Namespace) -> Layout:
    wanted = tuple(Ports.usual(number, options.port_offset) for number in range(1, options.nodes + 1))
    made = Layout.read(data)
    if made is None:
        foreign = [path.name for path in data.iterdir() if path.name != ".lock"]
        if foreign:
            raise UsageError(f"{data} holds {foreign[0]} and no cluster of `tidelog dev`: use an empty directory")
        return Layout.fresh(wanted)
    if len(made.ports) != options.nodes:
        raise UsageError(
            f"{data} is a cluster of {len(made.ports)} nodes: --nodes {len(made.ports)}, or another --data"
        )
    if made.ports != wanted:
        if options.nodes > 1:
            offset = made.ports[0].grpc - Ports.usual(1, 0).grpc
            raise UsageError(f"the nodes of {data} know each other by their ports: --port-offset {offset}")
        return Layout(made.cluster_id, wanted, made.directories)
    return made


def _run(nodes: LocalNodes, *, is_kept: bool) -> int:
    taken = nodes.taken_port()
    if taken is not None:
        port, what, number = taken
        print(
            f"tidelog: port {port} ({what}, of node {number}) is taken; --port-offset N moves all ports by N",
            file=sys.stderr,
        )
        return EXIT_FAILURE
    began = time.monotonic()
    with _signals():
        try:
            nodes.prepare()
            for number in nodes.numbers:
                nodes.start(number)
            nodes.wait_ready()
            _report_story(nodes, time.monotonic() - began, is_kept=is_kept)
            return _watch(nodes, is_kept=is_kept)
        except NodeEndedError as error:
            print(f"tidelog: {error}", file=sys.stderr)
            return EXIT_FAILURE
        except _StopError:
            print("stopping...", file=sys.stderr)
            return EXIT_OK
        finally:
            with contextlib.suppress(_StopError):
                _stop(nodes)


def _stop(nodes: LocalNodes) -> None:
    try:
        nodes.stop_all()
    except _StopError:
        # The second signal stops at once: acknowledged records are on disk.
        for number in list(nodes.processes):
            nodes.kill(number)


def _report_story(nodes: LocalNodes, seconds: float, *, is_kept: bool) -> None:
    count = len(nodes.numbers)
    option = "" if nodes.bootstrap == f"{HOST}:9292" else f" --bootstrap {nodes.bootstrap}"
    # Name all nodes: a command must find the cluster when the first one is down.
    export = f"  export TIDELOG_BOOTSTRAP={nodes.bootstrap}\n" if count > 1 else ""
    option = "" if export else option
    data = f"{nodes.data} (kept)" if is_kept else "temporary (--ephemeral)"
    pids = ", ".join(f"{nodes.pid(number)} (node {number})" for number in nodes.numbers)
    pages = ", ".join(f"http://{HOST}:{ports.http}/metrics" for ports in nodes.layout.ports)
    print(
        f"Tidelog {__version__}: {count} node{'s' if count > 1 else ''} ready in {seconds:.1f} s\n"
        f"  gRPC   {nodes.bootstrap.replace(',', ', ')}\n"
        f"  Kafka  {nodes.kafka_bootstrap.replace(',', ', ')}\n"
        f"  HTTP   {pages}\n"
        f"  data   {data}\n"
        f"  pids   {pids}\n"
        f"Try, in another terminal:\n{export}"
        f"  tidelog topics create greetings --partitions 3{option}\n"
        f"  echo hello | tidelog produce greetings{option}\n"
        f"  tidelog consume greetings --from-beginning --max-messages 1{option}\n"
        "Ctrl-C stops it.",
        flush=True,
    )


def _watch(nodes: LocalNodes, *, is_kept: bool) -> int:
    """Wait until Ctrl-C, or until no node is left."""
    reported: set[int] = set()
    again = (
        "Ctrl-C and the same command start all of them again"
        if is_kept
        else "Ctrl-C deletes the cluster and this log (--ephemeral)"
    )
    while len(reported) < len(nodes.numbers):
        time.sleep(POLL_S)
        for number, code in nodes.ended().items():
            if number not in reported:
                reported.add(number)
                path = nodes.path(number) / "node.log"
                print(f"tidelog: node {number} ended with code {code}; see {path}; {again}", file=sys.stderr)
    return EXIT_FAILURE


@contextlib.contextmanager
def _signals() -> Iterator[None]:
    def stop(_number: int, _frame: FrameType | None) -> None:
        raise _StopError

    before = {number: signal.signal(number, stop) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
