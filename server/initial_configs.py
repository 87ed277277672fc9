"""Sets the cluster configs of a controller's file where the cluster has none yet.

The active controller writes those that are not set. A value that is set wins: the controller logs a file that differs,
once for each time that it becomes active, and changes nothing. So the cluster has one value, whatever the files of its
nodes contain; change it with `tidelog configs alter`.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping

from tidelog.metadata import configs
from tidelog.metadata.config_changes import SET, AlterConfigs, ConfigChange, ResourceChange
from tidelog.metadata.controller_node import ControllerNode
from tidelog.metadata.image import ClusterImage
from tidelog.model.errors import TidelogError
from tidelog.model.ids import Epoch
from tidelog.raft.effects import Role

LOGGER = logging.getLogger(__name__)

POLL_S = 0.05


def missing(image: ClusterImage, wanted: Mapping[str, str]) -> tuple[dict[str, str], dict[str, str]]:
    """Returns (configs that are not set, configs that are set to another value: key -> that value)."""
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
        written_epoch: Epoch | None = None
        while True:
            # The features are the first records of a cluster; configs come after them.
            if machine.runtime.is_leading and machine.image.features and await self._write():
                written_epoch = machine.runtime.epoch
            if driver.core.role is Role.LEADER and driver.core.epoch != written_epoch:
                await asyncio.sleep(POLL_S)
            else:
                await driver.wait_for_role_change()

    async def _write(self) -> bool:
        unset, other = missing(self._controller.image, self._wanted)
        for key, value in other.items():
            LOGGER.warning(
                "%s=%s of %s is not used: the cluster has %s (change it with tidelog configs alter)",
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
            LOGGER.info("the initial configs are not written yet: %s", error)
            return False
        for item in reply.items:
            if item.error is not None:
                LOGGER.error("the configs of %s were rejected: %s", self._path, item.message)
            else:
                LOGGER.info("initial configs: %s", ", ".join(f"{key}={value}" for key, value in unset.items()))
        return True
