"""Every fenced command and program in README and docs runs.

The rule: in a `console` block each line that starts with `$ ` is a command of the shell and must succeed (what follows
it is an example of its output); a `python` block is a program. The blocks of one document run in order, in one empty
directory, with this environment's commands first in the path. `make` lines are left to CI, which runs them itself.
"""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
DOCUMENTS = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md"))]
BLOCK = re.compile(r"^```(console|python)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def programs(text: str) -> list[tuple[str, str]]:
    """(kind, program) of each runnable block; a console block becomes the commands in it."""
    found: list[tuple[str, str]] = []
    for kind, body in BLOCK.findall(text):
        if kind == "python":
            found.append((kind, body))
            continue
        commands = [line[2:] for line in body.splitlines() if line.startswith("$ ")]
        wanted = [command for command in commands if not command.startswith("make ")]
        if wanted:
            found.append((kind, "set -e\n" + "\n".join(wanted)))
    return found


RUNNABLE = [path for path in DOCUMENTS if programs(path.read_text(encoding="utf-8"))]


@pytest.mark.timeout(180)
@pytest.mark.parametrize("path", RUNNABLE, ids=lambda path: path.name)
def test_the_commands_and_programs_of_a_document_run(path: Path, tmp_path: Path) -> None:
    environment = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "PYTHONSAFEPATH": "1"}
    for kind, program in programs(path.read_text(encoding="utf-8")):
        interpreter = [sys.executable, "-"] if kind == "python" else ["bash"]
        run = subprocess.run(
            interpreter, input=program, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
        )
        assert run.returncode == 0, f"{path.name}:\n{program}\n{run.stdout}\n{run.stderr}"


def test_make_lines_and_sample_output_are_not_run() -> None:
    text = "```console\n$ make test\n$ true\noutput\n```\n```python\nx = 1\n```\n```\n$ rm -rf x\n```\n"
    assert programs(text) == [("console", "set -e\ntrue"), ("python", "x = 1\n")]


def test_the_readme_shows_something_that_runs() -> None:
    assert ROOT / "README.md" in RUNNABLE
