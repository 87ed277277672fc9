"""Every fenced command and program in README and docs runs.

The rule: in a `console` block each line that starts with `$ ` is a command of the shell and must succeed (what follows
it is an example of its output), `kcat` only where it is installed; a `python` block is a program. The blocks of one
document run in order, in one empty directory, with this environment's commands first in the path. `make` lines are left
to CI, which runs them itself, and programs that import `tidelog.spark` to tests/spark, where there is a Spark.

`tidelog dev` stays in the foreground until Ctrl-C: it is started on free ports, awaited, serves the commands after it
(they find it by TIDELOG_BOOTSTRAP), and is stopped by Ctrl-C at the end of the document, which must go well too. What
says `localhost:9292` (or 9092, Kafka's) is run with the port that was free.
"""

import contextlib
import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
DOCUMENTS = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md"))]
KCAT = re.compile(r"(?:^|\| *)kcat ")
HAS_KCAT = shutil.which("kcat") is not None
BLOCK = re.compile(r"^```(console|python)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def programs(text: str) -> list[tuple[str, str]]:
    """(kind, program) of each runnable block; a console block becomes the commands in it."""
    found: list[tuple[str, str]] = []
    for kind, body in BLOCK.findall(text):
        if kind == "python":
            if "import tidelog.spark" not in body:
                found.append((kind, body))
            continue
        commands = [line[2:] for line in body.splitlines() if line.startswith("$ ")]
        wanted: list[str] = []
        for command in commands:
            if command.split()[:2] == ["tidelog", "dev"]:
                found.extend([*_script(wanted), ("dev", command)])
                wanted = []
            elif not command.startswith("make ") and (HAS_KCAT or KCAT.search(command) is None):
                wanted.append(command)
        found.extend(_script(wanted))
    return found


def _script(commands: list[str]) -> list[tuple[str, str]]:
    return [("console", "set -eo pipefail\n" + "\n".join(commands))] if commands else []


def port_offset() -> int:
    """Where the usual ports of three nodes are free."""
    for offset in range(10_000 + os.getpid() % 1000 * 10, 40_000, 10):
        try:
            with contextlib.ExitStack() as held:
                for port in (9092, 9093, 9094, 9192, 9193, 9194, 9292, 9293, 9294, 9392, 9393, 9394):
                    held.enter_context(socket.create_server(("127.0.0.1", port + offset)))
                return offset
        except OSError:
            continue
    raise AssertionError("no free ports")


@contextlib.contextmanager
def dev(command: str, *, offset: int, directory: Path, environment: dict[str, str]) -> Iterator[None]:
    """A `tidelog dev` that serves; stopped as a person would."""
    process = subprocess.Popen(
        [*shlex.split(command), "--port-offset", str(offset)],
        cwd=directory,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    with process:
        try:
            assert process.stdout is not None
            said = ""
            while "Ctrl-C stops it" not in said:
                line = process.stdout.readline()
                assert line, f"{command} has ended: {said}"
                said += line
            yield
        finally:
            process.send_signal(signal.SIGINT)
            rest, _ = process.communicate(timeout=60)
        assert (process.returncode, rest) == (0, "stopping...\n"), f"{command}:\n{rest}"


RUNNABLE = [path for path in DOCUMENTS if programs(path.read_text(encoding="utf-8"))]


@pytest.mark.timeout(180)
@pytest.mark.parametrize("path", RUNNABLE, ids=lambda path: path.name)
def test_the_commands_and_programs_of_a_document_run(path: Path, tmp_path: Path) -> None:
    offset = port_offset()
    environment = {
        **os.environ,
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "PYTHONSAFEPATH": "1",
        "TIDELOG_BOOTSTRAP": f"localhost:{9292 + offset}",
    }
    with contextlib.ExitStack() as clusters:
        for kind, program in programs(path.read_text(encoding="utf-8")):
            if kind == "dev":
                clusters.enter_context(dev(program, offset=offset, directory=tmp_path, environment=environment))
                continue
            interpreter = [sys.executable, "-"] if kind == "python" else ["bash"]
            for port in (9092, 9292):
                program = program.replace(f"localhost:{port}", f"localhost:{port + offset}")
            run = subprocess.run(
                interpreter, input=program, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
            )
            assert run.returncode == 0, f"{path.name}:\n{program}\n{run.stdout}\n{run.stderr}"


def test_make_lines_and_sample_output_are_not_run() -> None:
    text = "```console\n$ make test\n$ true\noutput\n```\n```python\nx = 1\n```\n```\n$ rm -rf x\n```\n"
    assert programs(text) == [("console", "set -eo pipefail\ntrue"), ("python", "x = 1\n")]


def test_programs_for_spark_are_left_to_the_tests_of_spark() -> None:
    assert programs("```python\nimport tidelog.spark\n```\n```python\nx = 1\n```\n") == [("python", "x = 1\n")]


@pytest.mark.parametrize("has_kcat", [True, False])
def test_kcat_is_run_where_it_is_installed(has_kcat: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(f"{__name__}.HAS_KCAT", has_kcat)
    found = programs("```console\n$ echo x | kcat -P\n$ kcat -L\n$ true\n```\n")
    wanted = ["echo x | kcat -P", "kcat -L", "true"] if has_kcat else ["true"]
    assert found == [("console", "\n".join(["set -eo pipefail", *wanted]))]


def test_a_cluster_in_the_foreground_is_started_between_the_commands() -> None:
    text = "```console\n$ true\n$ tidelog dev --nodes 3\n$ tidelog topics list\n```\n"
    assert programs(text) == [
        ("console", "set -eo pipefail\ntrue"),
        ("dev", "tidelog dev --nodes 3"),
        ("console", "set -eo pipefail\ntidelog topics list"),
    ]


def test_the_readme_shows_something_that_runs() -> None:
    assert ROOT / "README.md" in RUNNABLE
