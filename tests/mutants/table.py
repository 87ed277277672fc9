"""Reads modules.toml: which stacks of the simulator and which test files cover a module."""

import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path

from mutants.hook import ROOT

MODULES = Path(__file__).with_name("modules.toml")
STACKS = ("core", "driver", "metadata", "brokers", "groups", "transactions", "product", "lab")


@dataclass(frozen=True, slots=True)
class Group:
    name: str
    modules: tuple[str, ...]
    """Names without wildcards."""
    stacks: tuple[str, ...]
    tests: tuple[str, ...]

    def test_files(self, root: Path = ROOT) -> list[str]:
        """Paths from the root of the repository, sorted."""
        files: set[Path] = set()
        for pattern in self.tests:
            for path in root.glob(pattern):
                files.update([path] if path.is_file() else path.rglob("test_*.py"))
        return sorted(path.relative_to(root).as_posix() for path in files)


def read_groups(path: Path = MODULES, root: Path = ROOT) -> list[Group]:
    """`ValueError` if a pattern matches no module, or a stack is unknown."""
    groups = []
    taken: set[str] = set()
    for item in tomllib.loads(path.read_text(encoding="utf-8"))["group"]:
        unknown = set(item["stacks"]) - set(STACKS)
        if unknown:
            raise ValueError(f"group '{item['name']}' names unknown stacks: {sorted(unknown)}")
        modules: list[str] = []
        for pattern in item["modules"]:
            names = sorted(_modules(pattern, root))
            if not names:
                raise ValueError(f"group '{item['name']}': no module is named {pattern}")
            modules += [name for name in names if name not in taken]
            taken.update(names)
        groups.append(Group(item["name"], tuple(modules), tuple(item["stacks"]), tuple(item["tests"])))
    return groups


def _modules(pattern: str, root: Path) -> Iterator[str]:
    for path in root.glob(f"{pattern.replace('.', '/')}.py"):
        if path.name != "__init__.py":
            yield path.relative_to(root).with_suffix("").as_posix().replace("/", ".")


def select(groups: list[Group], wanted: str) -> list[tuple[str, Group]]:
    """Modules that one of these names or patterns, separated by commas, selects: a package's name selects all of its
    modules, a group's name those of the group. `ValueError` for one that selects none."""
    selected: dict[str, Group] = {}
    for pattern in wanted.split(",") if wanted else ["*"]:
        found = {
            module: group
            for group in groups
            for module in group.modules
            if fnmatchcase(module, pattern) or module.startswith(f"{pattern}.") or group.name == pattern
        }
        if not found:
            raise ValueError(f"no module of tests/mutants/modules.toml is named '{pattern}'")
        selected |= found
    return list(selected.items())
