"""Keys of the cluster's state that stand in a node's file: where the cluster begins.

The active controller writes those into the state that are not set there. What is set there counts: a file that says
something else is told in the log, once in each time of being active, and changes nothing. So a cluster has one value,
whatever the files of its nodes say, and a change goes through `tidelog configs alter`.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping

from tidelog.metadata import configs
from tidelog.metadata.image import ClusterImage
from tidelog.metadata.settings import SET, AlterConfigs, ConfigChange, ResourceChange
from tidelog.metadata.shell import ControllerNode
from tidelog.model.errors import TidelogError
from tidelog.model.ids import Epoch
from tidelog.raft.effects import Role

LOGGER = logging.getLogger(__name__)

POLL_S = 0.05


def missing(image: ClusterImage, wanted: Mapping[str, str]) -> tuple[dict[str, str], dict[str, str]]:
    """(what is not set, what is set to something else: key -> value that holds)."""
    present = image.config("cluster", configs.CLUSTER)
    unset = {key: value for key, value in wanted.items() if key not in present}
    other = {key: present[key] for key, value in wanted.items() if key in present and present[key] != value}
    return unset, other


class InitialConfigs:
    """`run` is its task, on a controller."""

    def __init__(self, controller: ControllerNode, wanted: Mapping[str, str], path: str) -> None:
        self._controller = controller
        self._wanted = wanted
        self._path = path

    async def run(self) -> None:
        if not self._wanted:
            return
        driver, machine = self._controller.driver, self._controller.machine
        told: Epoch | None = None
        while True:
            # The features are the first decision of a cluster; before them there is no state to write to.
            if machine.replicated.is_leading and machine.image.features and await self._write():
                told = machine.replicated.epoch
            if driver.core.role is Role.LEADER and driver.core.epoch != told:
                await asyncio.sleep(POLL_S)
            else:
                await driver.next_role()

    async def _write(self) -> bool:
        unset, other = missing(self._controller.image, self._wanted)
        for key, value in other.items():
            LOGGER.warning(
                "%s=%s of %s is not in force: the cluster has %s (tidelog configs alter)",
                key,
                self._wanted[key],
                self._path,
                value,
            )
        if not unset:
            return True
        changes = tuple(ConfigChange(key=key, operation=SET, value=value) for key, value in sorted(unset.items()))
        request = AlterConfigs(resources=(ResourceChange(resource_type="cluster", changes=changes),))
        try:
            reply = await self._controller.submit(request)
        except TidelogError as error:
            LOGGER.info("the first configs are not written yet: %s", error)
            return False
        for item in reply.items:
            if item.error is not None:
                LOGGER.error("the configs of %s are not taken: %s", self._path, item.message)
            else:
                LOGGER.info("the cluster begins with %s", ", ".join(f"{key}={value}" for key, value in unset.items()))
        return True
