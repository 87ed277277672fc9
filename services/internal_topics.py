"""Creates a coordinator's topic when it is needed first."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

from tidelog.coordinator.partition_coordinator import PartitionCoordinator
from tidelog.metadata.controller_client import ControllerClient
from tidelog.metadata.image import Topic
from tidelog.metadata.tail import MetadataTail
from tidelog.metadata.topics import CreateTopics, NewTopic
from tidelog.model.errors import ErrorCode, RemoteError, TidelogError
from tidelog.model.group_errors import CoordinatorNotAvailableError

LOGGER = logging.getLogger(__name__)

CREATE_MS = 5_000
"""Wait for the controller to create the topic, and for this broker's image to have it."""


class InternalTopic:
    """One for each broker and topic. All callers share one request."""

    def __init__(self, owner: PartitionCoordinator[Any], tail: MetadataTail, client: ControllerClient) -> None:
        self._owner = owner
        self._tail = tail
        self._client = client
        self._creating: asyncio.Future[None] | None = None
        """Of the request in progress; its callers get the error."""

    async def get(self) -> Topic:
        """Return the topic; create it if it does not exist."""
        return self._tail.image.topic_named(self._owner.TOPIC) or await self._create()

    async def _create(self) -> Topic:
        name = self._owner.TOPIC
        if self._creating is None:
            self._creating = asyncio.get_running_loop().create_future()
            self._owner.spawn(self._request(self._creating), name=f"create-{name}")
        try:
            async with asyncio.timeout(CREATE_MS / 1000):
                await asyncio.shield(self._creating)
                await self._tail.until(lambda image: name in image.topic_ids)
        except TimeoutError:
            raise CoordinatorNotAvailableError(
                f"{name} does not exist yet, and no controller has created it in {CREATE_MS} ms"
            ) from None
        topic = self._tail.image.topic_named(name)
        if topic is None:
            raise CoordinatorNotAvailableError(f"{name} was deleted")
        return topic

    async def _request(self, outcome: asyncio.Future[None]) -> None:
        request = CreateTopics(topics=(NewTopic(name=self._owner.TOPIC),))
        try:
            async with asyncio.timeout(CREATE_MS / 1000):
                # A repeated request gets TOPIC_ALREADY_EXISTS.
                (created,) = (await self._client.call(request, is_repeatable=True)).topics
            if created.error is not None and created.error is not ErrorCode.TOPIC_ALREADY_EXISTS:
                raise RemoteError(created.message, code=created.error)
            outcome.set_result(None)
        except (TimeoutError, TidelogError) as error:
            reason = str(error) or "no controller answers"
            LOGGER.warning("topic=%s cannot be created: %s", self._owner.TOPIC, reason)
            outcome.set_exception(CoordinatorNotAvailableError(f"{self._owner.TOPIC} cannot be created: {reason}"))
        finally:
            self._creating = None
            if not outcome.done():
                outcome.set_exception(CoordinatorNotAvailableError("this broker stops"))
            outcome.exception()  # retrieved, so that the loop does not report it if every caller is gone
