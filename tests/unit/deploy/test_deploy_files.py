"""The unit and the example configurations: what systemd and the node themselves say about them."""

from __future__ import annotations

import asyncio
import re
import shutil
import subprocess
import sys
from pathlib import Path
from random import Random

import pytest

from tidelog.server.config import load
from tidelog.server.settings_table import TABLE
from tidelog.server.storage import format_node, voters_of_file

DEPLOY = Path(__file__).resolve().parents[3] / "deploy"
UNIT = DEPLOY / "tidelog@.service"
EXAMPLES = sorted((DEPLOY / "examples").glob("*.toml"))


def settings() -> dict[str, str]:
    lines = [line for line in UNIT.read_text(encoding="utf-8").splitlines() if "=" in line and line[0] not in "#["]
    return dict(line.split("=", 1) for line in lines)


def test_systemd_finds_nothing_wrong_with_the_unit(tmp_path: Path) -> None:
    if shutil.which("systemd-analyze") is None:
        pytest.skip("systemd-analyze is not installed here: the unit was not verified")
    # It looks for the program that is started; that of this environment stands in for the installed one.
    program = Path(sys.executable).parent / "tidelog"
    unit = tmp_path / "tidelog@.service"
    text = UNIT.read_text(encoding="utf-8").replace("/usr/bin/tidelog", str(program))
    unit.write_text(text.replace("User=tidelog", "User=root").replace("Group=tidelog", "Group=root"), encoding="utf-8")
    done = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", "--recursive-errors=no", str(unit)],
        capture_output=True,
        text=True,
        check=False,
    )
    said = [line for line in done.stderr.splitlines() if "tidelog" in line]
    assert (done.returncode, said) == (0, []), done.stderr


def test_the_unit_leaves_time_for_an_orderly_stop_and_does_not_retry_a_wrong_file() -> None:
    found = settings()
    shutdown_ms = TABLE["controlled.shutdown.timeout.ms"].default
    assert isinstance(shutdown_ms, int)
    assert int(found["TimeoutStopSec"]) * 1000 > 2 * shutdown_ms
    assert found["Type"] == "notify"
    assert found["RestartPreventExitStatus"] == "2"
    assert not [key for key in found if key.startswith("ExecStartPre")], "only the exit code of the main process counts"
    assert int(found["LimitNOFILE"]) >= 65_536
    assert found["User"] not in ("", "root")


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.name)
def test_an_example_is_a_good_configuration(path: Path) -> None:
    config = load(str(path), {})
    assert config.is_broker
    assert config.is_controller
    assert all(directory.startswith("/var/lib/tidelog/") for directory in config.directories)


@pytest.mark.requirement("a:O-01", "b:Q-18")
def test_the_three_nodes_have_their_own_ports_and_one_quorum(tmp_path: Path) -> None:
    configs = [load(str(DEPLOY / "examples" / f"node-{n}.toml"), {}) for n in (1, 2, 3)]
    ports = [listener.address.port for config in configs for listener in config.listeners]
    ports += [config.http.port for config in configs if config.http is not None]
    assert len(set(ports)) == 12
    assert len({config.voters for config in configs}) == 1
    for config in configs:
        assert dict(config.voters)[config.node] == f"localhost:{config.own.address.port}"
    environ = {"TIDELOG_LOG_DIRS": str(tmp_path / "data")}
    config = load(str(DEPLOY / "examples" / "node-1.toml"), environ)
    cluster_id = "4L6g3nShT-eMCtK--X86sw"
    voters = voters_of_file(config, cluster_id)
    (done,) = asyncio.run(format_node(config, cluster_id, voters, ignore_formatted=False, random=Random(1)))
    assert re.fullmatch(r".*/data", done.path)
