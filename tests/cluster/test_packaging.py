"""The package as a user gets it: what is in the wheel, and that it works in an empty environment."""

import os
import re
import shutil
import signal
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from tidelog.server.local_nodes import is_free

ROOT = Path(__file__).resolve().parents[2]
LEFT_OUT = shutil.ignore_patterns(
    ".git", ".venv", "build", "dist", "*.egg-info", "__pycache__", ".*_cache", ".hypothesis", "*.so"
)
ENVIRONMENT = {**os.environ, "TIDELOG_PURE": "1", "PYTHONSAFEPATH": "1"}


def copy_of_the_sources(target: Path) -> Path:
    """A build writes into its tree, and ours is in use."""
    shutil.copytree(ROOT, target, symlinks=True, ignore=LEFT_OUT)
    return target


def build(tree: Path, target: Path) -> Path:
    """An sdist, and from it the wheel, as an index would serve it."""
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(target), str(tree)]
    target.mkdir()
    run = subprocess.run(command, cwd=target, env=ENVIRONMENT, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stdout + run.stderr
    assert len(list(target.glob("*.tar.gz"))) == 1
    (wheel,) = target.glob("*.whl")
    return wheel


def check_names(wheel: Path, tree: Path) -> None:
    """Our name and the one that Spark looks for; every module of every room; typed, and with its license."""
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    tops = {name.partition("/")[0] for name in names}
    assert {top for top in tops if not top.endswith(".dist-info")} == {"tidelog", "pyspark_tidelog.py"}
    rooms = [path for path in (tree / "src" / "tidelog").iterdir() if path.is_symlink()]
    assert {"model", "world", "log", "cli"} <= {room.name for room in rooms}
    wanted = {
        f"tidelog/{room.name}/{path.relative_to(room.resolve()).as_posix()}"
        for room in rooms
        for path in room.resolve().rglob("*.py")
    }
    assert wanted - names == set()
    assert "tidelog/py.typed" in names
    assert any(name.endswith(".dist-info/licenses/LICENSE") for name in names)


def check_extras(wheel: Path) -> None:
    """Managed Spark brings its own PySpark: only the extra for this machine does."""
    with zipfile.ZipFile(wheel) as archive:
        (name,) = [one for one in archive.namelist() if one.endswith(".dist-info/METADATA")]
        lines = archive.read(name).decode().splitlines()
    wanted: dict[str, set[str]] = {}
    for line in lines:
        if (found := re.match(r'Requires-Dist: ([\w-]+).*; extra == "([\w-]+)"', line)) is not None:
            wanted.setdefault(found[2], set()).add(found[1])
    assert wanted["spark"] == {"pyarrow"}
    assert wanted["spark-local"] == {"pyarrow", "pyspark"}


def install(wheel: Path, home: Path) -> None:
    """The wheel and what it needs, nothing else, into a new environment; by uv where it is there."""
    uv = shutil.which("uv")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", home], check=True)
    python = str(home / "bin" / "python")
    with_uv = ["uv", "pip", "install", "-q", "--python", python]
    with_pip = [sys.executable, "-m", "pip", "--python", python, "install", "-q", "--disable-pip-version-check"]
    command = [*(with_uv if uv else with_pip), "-c", str(ROOT / "constraints.txt"), str(wheel)]
    run = subprocess.run(command, cwd=home, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stdout + run.stderr


def check_round_trip(home: Path, work: Path) -> None:
    """Write, crash, recover, read and verify a log, by the installed command alone."""

    def call(*arguments: object) -> subprocess.CompletedProcess[str]:
        return subprocess.run([str(part) for part in arguments], cwd=work, capture_output=True, text=True, check=False)

    command = home / "bin" / "tidelog"
    assert call(command, "--version").stdout.startswith("tidelog 0.")
    demo = call(command, "demo", "log", "--records", 500, "--data", work / "data")
    assert demo.returncode == 0, demo.stdout + demo.stderr
    verified = call(command, "log", "dump", work / "data", "--verify")
    assert verified.returncode == 0, verified.stdout + verified.stderr
    for room in ("log", "raft", "cli"):
        assert call(home / "bin" / "python", "-c", f"import {room}").returncode == 1, f"there is a package {room}"


def free_offset() -> int:
    """By how much all ports of one node have to be moved to be free at this moment."""
    for offset in range(10_000 + os.getpid() % 1000 * 10, 30_000, 10):
        if all(is_free(port + offset) for port in (9092, 9192, 9292, 9392)):
            return offset
    raise AssertionError("no free ports")


def check_cluster(home: Path, work: Path) -> None:
    """The first minute of a new user: a cluster, a topic, a record in, the same record out; also after a restart."""
    command = str(home / "bin" / "tidelog")
    offset = free_offset()
    environment = {"PATH": os.environ["PATH"], "TIDELOG_BOOTSTRAP": f"localhost:{9292 + offset}"}

    def call(*arguments: str, given: str | None = None) -> str:
        run = subprocess.run(
            [command, *arguments],
            cwd=work,
            env=environment,
            input=given,
            capture_output=True,
            text=True,
            check=False,
            timeout=60,
        )
        assert (run.returncode, run.stderr) == (0, ""), run.stdout + run.stderr
        return run.stdout

    for life in (1, 2):
        start = [command, "dev", "--port-offset", str(offset)]
        with subprocess.Popen(start, cwd=work, env=environment, stdout=subprocess.PIPE, text=True) as process:
            try:
                assert process.stdout is not None
                assert any("Ctrl-C stops it" in line for line in process.stdout), "it has ended"
                if life == 1:
                    call("topics", "create", "greetings", "--partitions", "3")
                call("produce", "greetings", given=f"hello {life}\n")
                read = call("consume", "greetings", "--from-beginning", "--max-messages", str(life))
                assert sorted(read.splitlines()) == [f"hello {n}" for n in range(1, life + 1)]
            finally:
                process.send_signal(signal.SIGINT)
            assert process.wait(60) == 0


@pytest.mark.cluster
@pytest.mark.timeout(400)
def test_the_package_builds_and_works_in_an_empty_environment(tmp_path: Path) -> None:
    # One test, not four: the suite runs on two workers, and the wheel shall be built once.
    tree = copy_of_the_sources(tmp_path / "tidelog")
    wheel = build(tree, tmp_path / "dist")
    check_names(wheel, tree)
    check_extras(wheel)
    install(wheel, tmp_path / "venv")
    check_round_trip(tmp_path / "venv", tmp_path)
    check_cluster(tmp_path / "venv", tmp_path)
