"""The order in which a node stops its parts."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from support.kafka.node import prepare

from tidelog.server.node import Node


@pytest.mark.parametrize("is_orderly", [True, False])
def test_a_node_ends_its_groups_before_the_streams_of_their_members(tmp_path: Path, is_orderly: bool) -> None:
    steps: list[str] = []
    config = prepare(tmp_path)

    def step(name: str) -> Any:
        async def run() -> None:
            steps.append(name)

        return run

    async def main() -> None:
        node = Node(config)
        node.broker = cast(
            "Any",
            SimpleNamespace(
                shut_down=step("leaderships move"),
                stop_coordinators=lambda: steps.append("groups end"),
                close=step("broker closes"),
            ),
        )
        node.api_servers = cast("Any", SimpleNamespace(close=step("API servers close")))
        await node._close(is_orderly=is_orderly)
        assert node.failure is None

    asyncio.run(main())
    assert steps == [*["leaderships move"] * is_orderly, "groups end", "API servers close", "broker closes"]
