"""A node as a controller: the figures of its quorum, and the settings that reach Raft."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.metadata.quorum import CONTROLLERS, Quorum

from tidelog.metadata.config_changes import SET, AlterConfigs, ConfigChange, ResourceChange
from tidelog.metadata.controller_node import ControllerNode
from tidelog.model.ids import NodeId
from tidelog.server.config import load
from tidelog.server.controller_metrics import raft_samples
from tidelog.server.metrics import page
from tidelog.server.node import controller_role_config

STALL = "disk.stall.timeout.ms"


def figures(quorum: Quorum, node: NodeId) -> dict[str, float]:
    async def read(controller: ControllerNode) -> str:
        return page([lambda: raft_samples(controller.driver)])

    lines = [line for line in quorum.on(node, read).splitlines() if not line.startswith("#")]
    return {name.removeprefix("tidelog_"): float(value) for name, value in (line.rsplit(" ", 1) for line in lines)}


def roles(found: dict[str, float]) -> list[str]:
    return [name for name, value in found.items() if name.startswith("raft_role") and value == 1]


@pytest.mark.requirement("b:E-34", "b:O-06")
def test_a_controller_tells_its_role_the_lag_of_the_others_and_all_time_without_a_leader() -> None:
    with Quorum(21) as quorum:
        quorum.start(CONTROLLERS[0])
        quorum.world.run_for(3)
        alone = figures(quorum, CONTROLLERS[0])
        assert roles(alone) != ['raft_role{role="leader"}']
        assert alone["raft_without_leader_seconds_total"] == pytest.approx(3, abs=0.5)
        assert not any(name.startswith("raft_member_lag") for name in alone), "only a leader knows"
        quorum.start(*CONTROLLERS[1:])
        active = quorum.active()
        quorum.world.run_for(1)
        found = {node: figures(quorum, node) for node in CONTROLLERS}
        assert {node: roles(one) for node, one in found.items()} == {
            node: [f'raft_role{{role="{"leader" if node == active else "follower"}"}}'] for node in CONTROLLERS
        }
        assert {f'raft_member_lag{{node="{node}"}}' for node in CONTROLLERS} <= found[active].keys()
        first = found[CONTROLLERS[0]]
        assert first["raft_without_leader_seconds"] == 0
        assert first["raft_without_leader_seconds_total"] >= alone["raft_without_leader_seconds_total"]
        gone = next(node for node in CONTROLLERS if node != active)
        quorum.kill(gone)
        before = figures(quorum, active)[f'raft_member_lag{{node="{gone}"}}']
        for number in range(5):
            set_stall(quorum, 1000 + number)
        assert figures(quorum, active)[f'raft_member_lag{{node="{gone}"}}'] >= before + 5


def set_stall(quorum: Quorum, limit_ms: int) -> None:
    change = ConfigChange(key=STALL, operation=SET, value=str(limit_ms))
    (item,) = quorum.ask(
        AlterConfigs(resources=(ResourceChange(resource_type="cluster", changes=(change,)),)), is_repeatable=True
    ).items
    assert item.error is None, item


@pytest.mark.case("R12")
@pytest.mark.parametrize("limit_ms", [300, 4_000])
def test_an_active_controller_whose_disk_hangs_resigns_after_the_time_that_the_cluster_has_set(limit_ms: int) -> None:
    with Quorum(22) as quorum:
        quorum.start()
        active = quorum.active()
        set_stall(quorum, limit_ms)
        quorum.world.run_for(1)
        controller = quorum.controller(active)
        assert controller.driver.core.config.disk_stall_timeout_ms == limit_ms
        quorum.world.machine(f"n{active}").disk().begin_stall()
        quorum.admin.spawn(quorum.client.call(AlterConfigs(resources=(_touch(),)), is_repeatable=True))
        began = quorum.now_s()
        quorum.world.run_until(lambda: not controller.is_active, timeout=20)
        assert limit_ms / 1000 - 0.1 <= quorum.now_s() - began <= limit_ms / 1000 + 1.0


def _touch() -> ResourceChange:
    return ResourceChange(
        resource_type="cluster", changes=(ConfigChange(key="num.partitions", operation=SET, value="2"),)
    )


def test_what_the_file_says_of_a_stalled_disk_counts_until_the_state_is_read(tmp_path: Path) -> None:
    path = tmp_path / "node.toml"
    for text, limit_ms in (("", 2_000), (f'"{STALL}" = "700ms"\n', 700)):
        path.write_text('"node.id" = 1\n"log.dirs" = ["a"]\n' + text, encoding="utf-8")
        assert controller_role_config(load(str(path), {})).controller.driver.raft.disk_stall_timeout_ms == limit_ms
