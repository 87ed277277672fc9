"""modules.toml names modules that exist, and equivalent.toml mutants that exist."""

from pathlib import Path

import pytest

from mutants.equivalents import read_equivalents, stale
from mutants.finder import Mutant, find_mutants
from mutants.hook import source_path
from mutants.runner import toml_entry
from mutants.table import read_groups, select

GROUPS = read_groups()


def test_every_module_is_in_one_group_and_has_mutants_and_tests() -> None:
    modules = [module for group in GROUPS for module in group.modules]
    assert len(set(modules)) == len(modules) > 100
    assert all(source_path(module).is_file() for module in modules)
    assert all(len(group.test_files()) > 1 for group in GROUPS)


@pytest.mark.parametrize(
    ("wanted", "selected"),
    [
        ("log.durability", {"log.durability"}),
        ("log.durability,raft.core", {"log.durability", "raft.core"}),
        ("log.recovery*", {"log.recovery", "log.recovery_checkpoint", "log.recovery_files"}),
        ("raft core", {module for group in GROUPS if group.name == "raft core" for module in group.modules}),
        ("raft", {module for group in GROUPS for module in group.modules if module.startswith("raft.")}),
    ],
)
def test_a_pattern_selects_modules(wanted: str, selected: set[str]) -> None:
    assert {module for module, _ in select(GROUPS, wanted)} == selected


def test_a_pattern_without_a_module_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"no module of .* is named 'logs'"):
        select(GROUPS, "logs")
    path = tmp_path / "modules.toml"
    path.write_text('[[group]]\nname = "toy"\nmodules = ["log.no_such"]\nstacks = ["core"]\ntests = []\n')
    with pytest.raises(ValueError, match=r"group 'toy': no module is named log\.no_such"):
        read_groups(path)
    path.write_text('[[group]]\nname = "toy"\nmodules = ["log.epochs"]\nstacks = ["cores"]\ntests = []\n')
    with pytest.raises(ValueError, match=r"group 'toy' names unknown stacks: \['cores'\]"):
        read_groups(path)


def test_every_equivalent_mutant_exists_and_has_a_reason() -> None:
    assert stale(read_equivalents()) == []


def _entries(tmp_path: Path, *entries: str) -> dict[Mutant, str]:
    path = tmp_path / "equivalent.toml"
    path.write_text("\n".join(entries))
    return read_equivalents(path)


def test_an_entry_that_matches_nothing_is_named(tmp_path: Path) -> None:
    mutants = find_mutants("log.epochs", source_path("log.epochs").read_text())
    entry = toml_entry(mutants[0]).replace('reason = ""', 'reason = "nobody sees it"')
    other = entry.replace("source = ", 'source = "gone; " # ')
    found = _entries(tmp_path, entry, other)
    assert set(found) - set(mutants) == {mutant for mutant in found if mutant.source == "gone; "}
    assert stale(found) == [mutant.key for mutant in found if mutant.source == "gone; "]


def test_an_entry_needs_a_reason_and_is_named_once(tmp_path: Path) -> None:
    mutants = find_mutants("log.epochs", source_path("log.epochs").read_text())
    entry = toml_entry(mutants[0])
    with pytest.raises(ValueError, match="lacks or has too many"):
        _entries(tmp_path, entry)
    with pytest.raises(ValueError, match="names a mutant twice"):
        _entries(tmp_path, *[entry.replace('reason = ""', 'reason = "nobody sees it"')] * 2)
