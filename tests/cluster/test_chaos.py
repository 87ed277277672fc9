"""`make chaos` for some seconds: the tool runs, its report is sound, and it ends what it has started."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from support.clusters.waiting import until

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(900)]

TESTS = Path(__file__).parent.parent
RUN_S = 600.0
"""Seconds of faults; the rest is for a machine that has other work."""


def chaos(path: Path, *arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "chaos", "--path", str(path), *arguments],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "PYTHONPATH": f"{TESTS}{os.pathsep}{TESTS / 'cluster'}", "PYTHONSAFEPATH": "1"},
    )


def processes_of(path: Path) -> list[str]:
    """Command lines of processes that work in, or were started for, this directory."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                where, command = (entry / "cwd").resolve(), (entry / "cmdline").read_bytes().decode()
            except OSError:
                continue  # it has ended meanwhile
            if path in where.parents or ("chaos.worker" in command and str(path) in command):
                found.append(command)
    return found


@pytest.mark.requirement("a:X3-36")
def test_short_chaos_run_is_good_and_leaves_nothing_behind(tmp_path: Path) -> None:
    path = tmp_path / "run"
    # This seed begins with a short kill.
    clients = ("--clients", "tidelog,classic", "--alone", "1", "--pipelines", "tidelog")
    process = chaos(
        path, "--small", "--minutes", "0.1", "--seed", "1519", "--rate", "60", "--kinds", "kill,freeze", *clients
    )
    try:
        out, _ = process.communicate(timeout=RUN_S)
    finally:
        process.kill()
    report = json.loads(out.splitlines()[-1])
    assert process.returncode == 0, out
    assert report["is_good"]
    assert sum(report["faults"].values()) >= 1
    assert set(report["acknowledged"]) == {"confluent-producer", "tidelog-producer"}
    assert all(report["acknowledged"].values())
    assert (report["lost"], report["duplicated"], report["reordered"], report["stuck_readers"]) == (0, 0, 0, [])
    pipeline = report["pipelines"]["tidelog"]
    assert pipeline["records"] == sum(report["acknowledged"].values()), "each input has one output"
    assert pipeline["reads"] == pipeline["records"], "a reader of committed data got each of them, once"
    assert pipeline["committed"] > 0
    assert any(kind.endswith("-client") for kind in report["faults"]), "workers of the pipeline were struck, too"
    assert processes_of(path) == []


def test_interrupted_chaos_run_ends_its_processes(tmp_path: Path) -> None:
    path = tmp_path / "run"
    process = chaos(
        path, "--small", "--minutes", "5", "--seed", "4", "--rate", "60", "--clients", "consumer", "--alone", "1"
    )
    try:
        until(lambda: len(processes_of(path)) >= 5, "nodes and clients run", timeout_s=RUN_S / 2)
        process.send_signal(signal.SIGINT)
        out, _ = process.communicate(timeout=RUN_S / 2)
    finally:
        process.kill()
    assert process.returncode == 130, out
    until(lambda: processes_of(path) == [], "nothing of the run is left", timeout_s=60)
    assert not [line for line in Path("/proc/mounts").read_text(encoding="utf-8").splitlines() if str(path) in line]
