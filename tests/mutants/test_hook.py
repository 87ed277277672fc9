"""Modules are changed as they are imported: in memory, before every other finder."""

import subprocess
import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path

import pytest

from mutants import hook
from mutants.finder import find_mutants
from mutants.hook import ROOT, check_imports, install_mutant

SOURCE = "def is_before(end, other):\n    return end < other\n"


@pytest.fixture
def toy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A module `toy_of_hook` that can be imported, and the hook as it was afterwards."""
    path = tmp_path / "toy_of_hook.py"
    path.write_text(SOURCE)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "meta_path", [*sys.meta_path])
    yield path
    sys.modules.pop("toy_of_hook", None)


def test_a_mutant_is_imported_and_its_file_stays(toy: Path) -> None:
    (mutant,) = find_mutants("toy_of_hook", SOURCE)
    reached = install_mutant(mutant, path=toy, name="toy_of_hook")
    module = import_module("toy_of_hook")
    assert reached == []
    assert module.is_before(1, 1), "it is <= now"
    assert reached == [1]
    assert toy.read_text() == SOURCE
    assert [path.name for path in toy.parent.iterdir()] == ["toy_of_hook.py"], "no bytecode"


def test_a_module_that_is_already_imported_is_refused(toy: Path) -> None:
    import_module("toy_of_hook")
    (mutant,) = find_mutants("toy_of_hook", SOURCE)
    with pytest.raises(AssertionError, match="already imported: toy_of_hook"):
        install_mutant(mutant, path=toy, name="toy_of_hook")


def test_an_import_past_the_hook_is_noticed(toy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hook, "PACKAGE", "json")
    import_module("json.decoder")
    with pytest.raises(ImportError, match=r"^decoder was not imported through the hook"):
        check_imports(["decoder"])
    check_imports(["no_such_module"])


PROGRAM = """
from mutants.finder import find_mutants
from mutants.hook import check_imports, install_mutant, install_probes, source_path
kernel = source_path("log.kernel").read_text()
mutant = next(m for m in find_mutants("log.kernel", kernel) if m.function == "{function}")
install_mutant(mutant)
hits = install_probes(["log.epochs"])
from tidelog.log import epochs, kernel
print(kernel.__file__.endswith(".py"), kernel.COMPILED)
hits.take()
epochs.EpochHistory(())
print(sorted(hits.take()), hits.take())
check_imports(["log.kernel", "log.epochs"])
"""


def test_a_compiled_module_is_replaced_by_its_source_and_blocks_are_recorded() -> None:
    run = subprocess.run(
        [sys.executable, "-c", PROGRAM.format(function="varint")],
        cwd=ROOT,
        env={"PYTHONPATH": str(ROOT / "tests")},
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.stdout.splitlines() == ["True False", "['log.epochs'] {}"], run.stderr
