"""Kernel settings for a machine of brokers: the settings file, and the limits of the unit."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

DEPLOY = Path(__file__).resolve().parents[3] / "deploy"


@pytest.fixture
def settings() -> dict[str, tuple[int, ...]]:
    found: dict[str, tuple[int, ...]] = {}
    for line in (DEPLOY / "tidelog.sysctl.conf").read_text(encoding="utf-8").splitlines():
        if line and not line.startswith("#"):
            row = re.fullmatch(r"([a-z0-9_.]+) = ([0-9]+(?: [0-9]+)*)", line)
            assert row is not None, f"not a setting: {line}"
            assert row[1] not in found, f"set twice: {row[1]}"
            found[row[1]] = tuple(map(int, row[2].split()))
    return found


@pytest.mark.requirement("b:Q-12")
def test_memory_is_hardly_swapped_and_dirty_pages_are_written_early_and_block_late(
    settings: dict[str, tuple[int, ...]],
) -> None:
    assert settings["vm.swappiness"] == (1,)
    assert 0 < settings["vm.dirty_background_ratio"][0] <= 5
    assert 60 <= settings["vm.dirty_ratio"][0] <= 80


@pytest.mark.requirement("b:Q-14", "b:Q-15")
def test_socket_buffers_and_queues_are_at_least_those_of_a_busy_broker(settings: dict[str, tuple[int, ...]]) -> None:
    for way in ("r", "w"):
        default, most = settings[f"net.core.{way}mem_default"][0], settings[f"net.core.{way}mem_max"][0]
        assert 131_072 <= default <= most
        assert most >= 2_097_152
        least, usual, largest = settings[f"net.ipv4.tcp_{way}mem"]
        assert (least, usual >= 65_536, largest >= 2_048_000) == (4096, True, True)
        assert least < usual < largest
    assert settings["net.ipv4.tcp_window_scaling"] == (1,)
    assert settings["net.ipv4.tcp_max_syn_backlog"][0] > 1024
    assert settings["net.core.netdev_max_backlog"][0] > 1000


@pytest.mark.requirement("b:Q-15")
def test_a_node_may_open_enough_files() -> None:
    unit = (DEPLOY / "tidelog@.service").read_text(encoding="utf-8")
    limit = re.search(r"^LimitNOFILE=(\d+)$", unit, re.MULTILINE)
    assert limit is not None
    assert int(limit[1]) >= 128_000


def test_the_kernel_knows_every_setting(settings: dict[str, tuple[int, ...]]) -> None:
    known = [key for key in settings if (Path("/proc/sys") / key.replace(".", "/")).exists()]
    # A container may hide those of the network; what is about memory is always there.
    assert {key for key in settings if key.startswith("vm.")} <= set(known)
    hidden = sorted(set(settings) - set(known))
    assert all(key.startswith("net.core.") for key in hidden), hidden
