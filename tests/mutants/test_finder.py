"""Mutants have keys that survive changes elsewhere, and every one of a real module can be compiled."""

import ast
from dataclasses import replace

import pytest

from mutants.blocks import instrumented
from mutants.finder import Mutant, find_mutants, mutate
from mutants.hook import source_path

SOURCE = '''
def cut(log, end):
    """Cut."""
    log.sync()
    if end < log.end:
        log.sync()
    return end
'''


def test_equal_lines_of_a_function_differ_by_their_number() -> None:
    syncs = [mutant for mutant in find_mutants("toy", SOURCE) if mutant.source == "log.sync()"]
    assert [(mutant.occurrence, mutant.line) for mutant in syncs] == [(0, 4), (1, 6)]
    assert ast.unparse(mutate(syncs[1], SOURCE)).count("log.sync()") == 1


def test_a_key_does_not_depend_on_the_rest_of_the_module() -> None:
    longer = f"def before(log):\n    log.sync()\n\n{SOURCE}"
    assert set(find_mutants("toy", SOURCE)) < set(find_mutants("toy", longer))


def test_a_mutant_that_the_source_does_not_have_is_an_error() -> None:
    mutant = replace(find_mutants("toy", SOURCE)[0], source="log.flush()")
    with pytest.raises(LookupError, match=r"toy has no mutant toy:cut drop-call #0 log\.flush\(\)"):
        mutate(mutant, SOURCE)


def test_a_mutant_survives_its_json() -> None:
    mutant = find_mutants("toy", SOURCE)[0]
    assert Mutant(**mutant.as_json()) == mutant


def test_mutants_of_a_real_module_compile_and_have_keys_of_their_own() -> None:
    source = source_path("log.durability").read_text()
    mutants = find_mutants("log.durability", source)
    assert len({mutant.key for mutant in mutants}) == len(mutants) > 50
    _, blocks = instrumented(source)
    for mutant in mutants[::5]:
        compile(mutate(mutant, source), "durability.py", "exec")
        assert 0 <= mutant.block < blocks
