"""The queue of logs to be opened: none is left waiting when the workers end."""

import asyncio
from typing import Any, cast
from uuid import UUID

from tidelog.log.log_opener import LogOpener
from tidelog.model.ids import PartitionId, TopicId

FIRST, SECOND = (PartitionId(TopicId(UUID(int=1)), number) for number in range(2))


class Directory:
    failed = None
    paths: dict[PartitionId, str] = {}  # noqa: RUF012 - nobody changes it


def test_a_log_that_is_enqueued_as_the_last_worker_ends_is_opened() -> None:
    """A caller that waits for the first log may enqueue another one before the worker's task is done."""

    async def main() -> list[PartitionId]:
        opened: list[PartitionId] = []
        directory = cast("Any", Directory())

        async def open_log(directory: Any, log_id: PartitionId) -> None:
            opened.append(log_id)

        opener = LogOpener(open_log=open_log, spawn=asyncio.ensure_future, parallel=1)
        opener.add(directory, FIRST)

        async def add_another() -> None:
            await opener.wait(FIRST)
            opener.add(directory, SECOND)

        async with asyncio.timeout(5):
            await asyncio.create_task(add_another())
            await opener.wait(SECOND)
        return opened

    assert asyncio.run(main()) == [FIRST, SECOND]
