"""Which seed and which test reaches which block, and what it costs. Measured when it is asked for, then kept.

build/mutants/reach.jsonl has a line for each measured seed and test file. A line counts for a module as long as the
module's source is the same, and the test file or the simulator. Other modules may have changed: then a seed may reach a
block now that it did not reach before. Remove the file to measure everything again.
"""

import hashlib
import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from mutants.hook import ROOT, source_path
from mutants.processes import Worker
from mutants.table import Group

MEASURE_WITHIN_S = 600.0
"""For one seed or test, on a machine that others use, too."""
SIMULATOR = ("tests/simulation", "tests/support")


@dataclass(frozen=True, slots=True)
class Run:
    """A seed (`brokers 7`) or a test (its node id) that holds without mutants."""

    name: str
    cpu_s: float
    hits: dict[str, int]

    def reaches(self, module: str, block: int) -> bool:
        return bool(self.hits.get(module, 0) >> block & 1)


@dataclass(slots=True)
class _Measured:
    versions: dict[str, str]
    """Of the modules, when it was measured."""
    version: str
    """Of the simulator or the test file."""
    runs: list[Run] = field(default_factory=list)


@cache
def digest(path: Path) -> str:
    """Of a file, or of all Python files of a folder."""
    value = hashlib.blake2b(digest_size=8)
    for file in sorted(path.rglob("*.py")) if path.is_dir() else [path]:
        value.update(file.read_bytes())
    return value.hexdigest()


def version_of(module: str) -> str:
    return digest(source_path(module))


class Reach:
    def __init__(self, path: Path, groups: list[Group]) -> None:
        self._path = path
        self._log = path.with_name("measuring.log")
        self._modules = [module for group in groups for module in group.modules]
        self._versions = {module: version_of(module) for module in self._modules}
        self._measured: dict[str, _Measured] = {}
        """By `stack seed`, or test file."""
        self._read()

    def seeds(self, module: str, group: Group, count: int) -> list[Run]:
        """Seeds 1 to `count` of each stack of the group; measures those that are not measured."""
        version = "".join(digest(ROOT / part) for part in SIMULATOR)
        names = []
        for stack in group.stacks:
            missing = [n for n in range(1, count + 1) if not self._counts(f"{stack} {n}", module, version)]
            if missing:
                print(f"measures {len(missing)} seeds of {stack}", flush=True)
                job = {"task": "measure seeds", "stack": stack, "seeds": missing, "modules": self._modules}
                with Worker(job, self._log) as worker:
                    for reply in worker.replies(within_s=MEASURE_WITHIN_S):
                        self._add(f"{stack} {reply['seed']}", version, [{**reply, "name": f"{stack} {reply['seed']}"}])
            names += [f"{stack} {number}" for number in range(1, count + 1)]
        return [run for name in names for run in self._measured[name].runs]

    def tests(self, module: str, group: Group) -> list[Run]:
        """Tests of the group; measures files that are not measured."""
        files = group.test_files()
        missing = [file for file in files if not self._counts(file, module, digest(ROOT / file))]
        if missing:
            print(f"measures {len(missing)} test files", flush=True)
            self._measure_files(missing)
        return [run for file in files for run in self._measured[file].runs]

    def _measure_files(self, files: list[str]) -> None:
        job = {"task": "measure tests", "files": files, "modules": self._modules}
        done: set[str] = set()
        current, replies = "", list[dict[str, Any]]()
        with Worker(job, self._log) as worker:
            for reply in worker.replies(within_s=MEASURE_WITHIN_S):
                file = reply["test"].partition("::")[0]
                if file != current and current:
                    self._add(current, digest(ROOT / current), replies)
                    done.add(current)
                    replies = []
                current = file
                replies.append({**reply, "name": reply["test"]})
        if current:
            self._add(current, digest(ROOT / current), replies)
            done.add(current)
        for file in files:
            if file not in done:  # without a test that could run
                self._add(file, digest(ROOT / file), [])

    def _counts(self, name: str, module: str, version: str) -> bool:
        measured = self._measured.get(name)
        return (
            measured is not None
            and measured.version == version
            and measured.versions.get(module) == self._versions[module]
        )

    def _add(self, name: str, version: str, replies: Iterable[dict[str, Any]]) -> None:
        runs = [{"name": reply["name"], "s": reply["s"], "hits": reply["hits"]} for reply in replies if reply["holds"]]
        line = {"name": name, "version": version, "versions": self._versions, "runs": runs}
        self._path.parent.mkdir(parents=True, exist_ok=True)
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")
        self._keep(line)

    def _read(self) -> None:
        if self._path.exists():
            with self._path.open(encoding="utf-8") as file:
                for line in file:
                    self._keep(json.loads(line))

    def _keep(self, line: dict[str, Any]) -> None:
        runs = [
            Run(run["name"], run["s"], {module: int(mask, 16) for module, mask in run["hits"].items()})
            for run in line["runs"]
        ]
        self._measured[line["name"]] = _Measured(line["versions"], line["version"], runs)
