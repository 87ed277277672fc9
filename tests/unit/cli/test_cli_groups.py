"""`tidelog groups` and `tidelog completion`, as far as no cluster is needed: tables, scripts of shells."""

from __future__ import annotations

import argparse
import shutil
import subprocess
from pathlib import Path

import pytest

from tidelog.cli import completion, groups
from tidelog.cli import main as cli
from tidelog.cli.main import UsageError
from tidelog.client.record import TopicPartition

RESET = ["groups", "reset-offsets", "g"]


def parsed(*arguments: str) -> argparse.Namespace:
    return cli.parser().parse_args([*RESET, *arguments])


def test_what_a_reset_is_about_and_where_it_goes(tmp_path: Path) -> None:
    assert groups.scope_of(parsed("--all-topics")) is None
    named = groups.scope_of(parsed("--topic", "a", "--topic", "b:0,2"))
    assert named == ["a", TopicPartition("b", 0), TopicPartition("b", 2)]
    file = tmp_path / "f.csv"
    file.write_text("t,0,5\n")
    for arguments, asked in (
        (["--to-earliest"], {"to": "earliest"}),
        (["--to-latest"], {"to": "latest"}),
        (["--to-offset", "7"], {"to": 7}),
        (["--shift-by=-3"], {"shift_by": -3}),
        (["--shift-by", "-3"], {"shift_by": -3}),
        (["--to-current"], {"shift_by": 0}),
        (["--by-duration", "1h"], {"by_duration": "1h"}),
        (["--to-datetime", "2021-03-31T04:03:00.000Z"], {"to_time": 1_617_163_380_000}),
        (["--from-file", str(file)], {"to": {TopicPartition("t", 0): 5}}),
    ):
        assert groups.target_of(parsed(*arguments)) == asked
    file.write_text("t,0\n")
    with pytest.raises(UsageError, match=r"f\.csv:1: 't,0' is not topic,partition,offset"):
        groups.target_of(parsed("--from-file", str(file)))


# Completion.


def script(shell: str, capsys: pytest.CaptureFixture[str]) -> str:
    assert cli.main(["completion", shell]) == 0
    return capsys.readouterr().out


def test_the_tree_has_every_command_of_the_grammar() -> None:
    tree = {one.path: one for one in completion.commands(cli.parser())}
    assert {"", "topics", "topics create", "groups reset-offsets", "completion", "demo log"} <= set(tree)
    assert [name for name, _ in tree["groups"].commands] == [
        "list", "describe", "reset-offsets", "delete", "delete-offsets", "remove-members",
    ]  # fmt: skip
    (output,) = [one for one in tree["groups list"].options if "--output" in one.names]
    assert (output.takes_value, output.choices) == (True, ("table", "json"))
    (yes,) = [one for one in tree["groups delete"].options if "--yes" in one.names]
    assert not yes.takes_value


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_a_script_has_all_commands_and_options(shell: str, capsys: pytest.CaptureFixture[str]) -> None:
    text = script(shell, capsys)
    for one in completion.commands(cli.parser()):
        for name, _ in one.commands:
            assert name in text
        for option in one.options:
            assert all(name.lstrip("-") in text for name in option.names)
    if shutil.which(shell) is not None:  # its own opinion of the syntax
        subprocess.run([shell, "-n"], input=text, text=True, check=True, timeout=30)


@pytest.mark.skipif(shutil.which("bash") is None, reason="no bash here")
@pytest.mark.parametrize(
    ("line", "expected"),
    [
        (["gr"], {"groups"}),
        (["groups", "re"], {"reset-offsets", "remove-members"}),
        (["groups", "reset-offsets", "g", "--to-e"], {"--to-earliest"}),
        (["topics", "create", "topics", "--part"], {"--partitions"}),
        (["topics", "list", "--output", ""], {"table", "json"}),
        (["produce", "t", "--acks", ""], {"all", "-1", "1", "0"}),
        (["completion", "z"], {"zsh"}),
        (["consume", "t", "--group", "x"], set()),
    ],
)
def test_bash_completes(line: list[str], expected: set[str], capsys: pytest.CaptureFixture[str]) -> None:
    words = " ".join(f"'{word}'" for word in ["tidelog", *line])
    ask = f"COMP_WORDS=({words}); COMP_CWORD={len(line)}; _tidelog; printf '%s\\n' \"${{COMPREPLY[@]}}\""
    done = subprocess.run(
        ["bash", "--norc", "-c", f"{script('bash', capsys)}\n{ask}"],
        capture_output=True, text=True, check=True, timeout=30,
    )  # fmt: skip
    assert set(done.stdout.split()) == expected
    assert done.stderr == ""
