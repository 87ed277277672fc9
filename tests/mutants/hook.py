"""An import hook: some modules are compiled from a changed syntax tree. Nothing is written, and no bytecode is used.

It comes before all other finders, so that it replaces modules that Cython has compiled by their source, too. It has to
be installed before the first import of such a module. Processes that the program starts are not changed.
"""

import ast
import importlib.abc
import importlib.machinery
import importlib.util
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import CodeType, ModuleType

from mutants.blocks import HITS, instrumented
from mutants.finder import REACHED, Mutant, mutate

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = "tidelog"

Change = Callable[[str], tuple[ast.Module, Mapping[str, object]]]
"""Source in; the tree to compile and further globals of the module out."""


class _Loader(importlib.machinery.SourceFileLoader):
    def __init__(self, name: str, path: str, change: Change) -> None:
        super().__init__(name, path)
        self._change = change
        self._globals: Mapping[str, object] = {}

    def get_code(self, fullname: str) -> CodeType:
        path = self.get_filename(fullname)
        tree, self._globals = self._change(Path(path).read_text(encoding="utf-8"))
        code = compile(tree, path, "exec", dont_inherit=True)
        assert isinstance(code, CodeType)
        return code

    def exec_module(self, module: ModuleType) -> None:
        code = self.get_code(module.__name__)
        module.__dict__.update(self._globals)
        exec(code, module.__dict__)


class _Finder(importlib.abc.MetaPathFinder):
    def __init__(self, changes: Mapping[str, tuple[Path, Change]]) -> None:
        self._changes = changes

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname not in self._changes:
            return None
        source, change = self._changes[fullname]
        loader = _Loader(fullname, str(source), change)
        return importlib.util.spec_from_file_location(fullname, source, loader=loader)


def source_path(module: str, root: Path = ROOT / "src" / PACKAGE) -> Path:
    return root / f"{module.replace('.', '/')}.py"


def install_mutant(mutant: Mutant, *, path: Path | None = None, name: str | None = None) -> list[int]:
    """The returned list is not empty as soon as the mutated statement has run. `LookupError` if there is no such
    mutant."""
    reached: list[int] = []
    path = path or source_path(mutant.module)
    tree = mutate(mutant, path.read_text(encoding="utf-8"))
    _install({name or f"{PACKAGE}.{mutant.module}": (path, lambda _: (tree, {REACHED: reached}))})
    return reached


@dataclass(slots=True)
class Hits:
    """Which blocks of which modules have run since the last `take`."""

    blocks: dict[str, bytearray] = field(default_factory=dict)

    def take(self) -> dict[str, int]:
        """For each module that ran, a number whose bit n says that block n did."""
        taken = {
            module: sum(1 << number for number, hit in enumerate(hits) if hit)
            for module, hits in self.blocks.items()
            if any(hits)
        }
        for hits in self.blocks.values():
            hits[:] = bytes(len(hits))
        return taken


def install_probes(modules: Iterable[str]) -> Hits:
    hits = Hits()

    def change_of(module: str) -> Change:
        def change(source: str) -> tuple[ast.Module, Mapping[str, object]]:
            tree, count = instrumented(source)
            hits.blocks[module] = bytearray(count)
            return tree, {HITS: hits.blocks[module]}

        return change

    _install({f"{PACKAGE}.{module}": (source_path(module), change_of(module)) for module in modules})
    return hits


def check_imports(modules: Iterable[str]) -> None:
    """`ImportError` if one of these modules was imported by another finder: it runs as it is."""
    for module in modules:
        loaded = sys.modules.get(f"{PACKAGE}.{module}")
        if loaded is not None and not isinstance(loaded.__loader__, _Loader):
            raise ImportError(f"{module} was not imported through the hook")


def _install(changes: Mapping[str, tuple[Path, Change]]) -> None:
    loaded = sorted(name for name in changes if name in sys.modules)
    assert not loaded, f"already imported: {', '.join(loaded)}"
    sys.meta_path.insert(0, _Finder(changes))
