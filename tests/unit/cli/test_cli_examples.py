"""Every `--help` ends with examples, and every example is a call that the grammar understands."""

from __future__ import annotations

import argparse
import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest

from tidelog.cli import main as cli
from tidelog.cli.examples import EXAMPLES, examples_of


def parsers(made: argparse.ArgumentParser) -> Iterator[argparse.ArgumentParser]:
    yield made
    for action in made._actions:
        if isinstance(action, argparse._SubParsersAction):
            for below in action.choices.values():
                yield from parsers(below)


ALL = {made.prog: made for made in parsers(cli.parser())}


def calls_of(example: str) -> list[list[str]]:
    """The arguments of each call of `tidelog` in a line of the shell."""
    line = re.sub(r'"\$\((tidelog [^)]*)\)"', "VALUE", example)
    inner = re.findall(r'"\$\(tidelog ([^)]*)\)"', example)
    found = [shlex.split(part) for part in inner]
    for part in re.split(r"[|()]", line) if "'" not in line and '"' not in line else [line]:
        words = shlex.split(part)
        while "tidelog" in words:
            words = words[words.index("tidelog") + 1 :]
            end = words.index("|") if "|" in words else len(words)
            found.append(words[:end])
            words = words[end:]
    return found


@pytest.mark.parametrize("program", sorted(ALL))
def test_the_help_of_a_command_ends_with_examples_that_can_be_parsed(
    program: str, capsys: pytest.CaptureFixture[str]
) -> None:
    examples = examples_of(program)
    assert examples, f"`{program} --help` has no example: add one to cli/examples.py"
    assert cli.main([*program.split()[1:], "--help"]) == 0
    shown = capsys.readouterr().out
    assert shown.endswith("examples:\n" + "".join(f"  {example}\n" for example in examples))
    calls = [call for example in examples for call in calls_of(example)]
    assert calls
    for call in calls:
        cli.parser().parse_args(call)
    if program != "tidelog":
        path = program.split()[1:]
        assert any(call[: len(path)] == path for call in calls), "an example shows the command that it belongs to"


def test_no_example_is_of_a_command_that_does_not_exist() -> None:
    assert {f"tidelog {path}".strip() for path in EXAMPLES} == set(ALL)


def test_the_calls_of_an_example_are_found() -> None:
    assert calls_of("tail -f x | tidelog produce a --key k") == [["produce", "a", "--key", "k"]]
    assert calls_of("source <(tidelog completion bash)") == [["completion", "bash"]]
    assert calls_of("tidelog a 'b|c' | tidelog d") == [["a", "b|c"], ["d"]]


def test_the_page_names_the_commands_without_json() -> None:
    without = {
        program.removeprefix("tidelog ")
        for program, made in ALL.items()
        if "run" in made._defaults
        and not any("--output" in one.option_strings and "json" in (one.choices or ()) for one in made._actions)
    }
    page = " ".join((Path(__file__).resolve().parents[3] / "docs" / "cli.md").read_text(encoding="utf-8").split())
    sentence = page[page.index("Commands without this option") : page.index("In every command")]
    named = set(re.findall(r"`([^`]+)`", sentence))
    assert {name for name in without if name.split()[0] != "demo"} | {"demo"} == named
