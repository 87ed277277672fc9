"""Runs a node as a process: event loop, signals, exit code."""

from __future__ import annotations

import asyncio
import ctypes
import logging
import os
import signal
import sys

import uvloop

os.environ.setdefault("GRPC_VERBOSITY", "NONE")  # before grpc is imported: its own lines are no lines of our log

from tidelog.server import log_lines
from tidelog.server.config import NodeConfig
from tidelog.server.node import Node

LOGGER = logging.getLogger(__name__)

SWITCH_INTERVAL_S = 0.0005
KEPT_BYTES_MAX = 64 << 20
"""Freed memory that the process keeps at each heap's end, instead of returning it to the system."""
MAPPED_BYTES_MIN = 32 << 20
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
EXIT_AT_ONCE = 128 + signal.SIGTERM


def run_node(config: NodeConfig, *, ends_with_stdin: bool = False) -> int:
    """Run the node until a signal stops it; return the exit code. Raises the error of a failed start.

    `ends_with_stdin`: also stop, in order, when stdin ends. A process that starts nodes and holds the other end of that
    pipe stops them however it dies.
    """
    names = log_lines.set_up(config.node, level=config.text("logging.level"), form=config.text("logging.format"))
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    _keep_memory()
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(_run(config, names, ends_with_stdin=ends_with_stdin))


def _keep_memory() -> None:
    """Keep freed memory in the process: otherwise each large message costs 200 page faults per megabyte."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:  # glibc
        mallopt(_M_MMAP_THRESHOLD, MAPPED_BYTES_MIN)
        mallopt(_M_TRIM_THRESHOLD, KEPT_BYTES_MAX)


async def _run(config: NodeConfig, names: log_lines.Names, *, ends_with_stdin: bool) -> int:
    node = Node(config)
    names.topic = node.topic_name
    signals = 0

    def on_signal() -> None:
        nonlocal signals
        signals += 1
        if signals == 1:
            LOGGER.info("stopping in order; once more to stop at once")
            node.stop()
        else:
            # As safe as kill -9: everything acknowledged is on disk.
            LOGGER.warning("stopped at once")
            os._exit(EXIT_AT_ONCE)

    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, on_signal)
    if ends_with_stdin:
        _watch_stdin(loop, node)
    return await node.run()


def _watch_stdin(loop: asyncio.AbstractEventLoop, node: Node) -> None:
    def readable() -> None:
        if not os.read(0, 4096):
            loop.remove_reader(0)
            LOGGER.info("the process that started this node is gone: stopping in order")
            node.stop()

    loop.add_reader(0, readable)
