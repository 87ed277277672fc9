"""`tidelog completion bash|zsh|fish`: shell completion scripts, generated from the grammar.

A script contains tables of words: the commands that may follow each command, and the values of options. The shell does
not call `tidelog` to complete. Free values (a name, a file) complete to files.
"""

import argparse
from collections.abc import Iterator
from dataclasses import dataclass

from tidelog.cli.exit_codes import EXIT_OK
from tidelog.cli.main import parser


@dataclass(frozen=True, slots=True)
class Option:
    names: tuple[str, ...]
    says: str
    takes_value: bool
    choices: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Command:
    path: str
    """Like "topics create"; empty for the command itself."""
    commands: tuple[tuple[str, str], ...]
    """(name, description) of its subcommands."""
    options: tuple[Option, ...]
    choices: tuple[str, ...]
    """Choices of its arguments."""


def commands(made: argparse.ArgumentParser, path: str = "") -> Iterator[Command]:
    """Yield the grammar as a tree, top first."""
    below: list[tuple[str, str]] = []
    options: list[Option] = []
    choices: list[str] = []
    inner: list[tuple[str, argparse.ArgumentParser]] = []
    for action in made._actions:
        if isinstance(action, argparse._SubParsersAction):
            text = {one.dest: one.help or "" for one in action._choices_actions}
            below += [(name, text.get(name, "")) for name in action.choices]
            inner += action.choices.items()
        elif action.option_strings:
            values = tuple(map(str, action.choices or ()))
            options.append(Option(tuple(action.option_strings), action.help or "", action.nargs != 0, values))
        else:
            choices += map(str, action.choices or ())
    yield Command(path, tuple(below), tuple(options), tuple(choices))
    for name, one in inner:
        yield from commands(one, f"{path} {name}".strip())


def run(options: argparse.Namespace) -> int:
    tree = list(commands(parser()))
    print({"bash": bash, "zsh": zsh, "fish": fish}[options.shell](tree), end="")
    return EXIT_OK


def _quoted(text: str) -> str:
    return "'" + text.replace("'", "'\\''") + "'"


def _words(one: Command) -> list[str]:
    """Return the possible words: commands and choices, or options."""
    return [
        *(name for name, _ in one.commands),
        *one.choices,
        *(name for option in one.options for name in option.names),
    ]


def _lines_of_paths(tree: list[Command]) -> Iterator[str]:
    """Yield cases that follow the words of a line down the tree."""
    for one in tree:
        for name, _ in one.commands:
            below = f"{one.path} {name}".strip()
            yield f"      {_quoted(f'{one.path}|{name}')}) at={_quoted(below)} ;;"


def _lines_of_values(tree: list[Command], give: str, files: str) -> Iterator[str]:
    """Yield cases for the value of an option."""
    for one in tree:
        for option in one.options:
            if option.takes_value:
                pattern = " | ".join(_quoted(f"{one.path}|{name}") for name in option.names)
                todo = f"{give} {_quoted(' '.join(option.choices))}" if option.choices else files
                yield f"    {pattern}) {todo}; return ;;"


def bash(tree: list[Command]) -> str:
    words = [f"    {_quoted(one.path)}) words={_quoted(' '.join(_words(one)))} ;;" for one in tree]
    return "\n".join(
        [
            "# Completion of tidelog for bash: source <(tidelog completion bash)",
            '_tidelog_words() { COMPREPLY=($(compgen -W "$1" -- "$cur")); }',
            "_tidelog_files() { compopt -o default 2>/dev/null; COMPREPLY=(); }",
            "_tidelog() {",
            '  local cur="${COMP_WORDS[COMP_CWORD]}" prev="${COMP_WORDS[COMP_CWORD-1]}" at="" words="" i',
            "  for ((i = 1; i < COMP_CWORD; i++)); do",
            '    case "$at|${COMP_WORDS[i]}" in',
            *_lines_of_paths(tree),
            "    esac",
            "  done",
            '  case "$at|$prev" in',
            *_lines_of_values(tree, "_tidelog_words", "_tidelog_files"),
            "  esac",
            '  case "$at" in',
            *words,
            "  esac",
            '  _tidelog_words "$words"',
            "  if [ ${#COMPREPLY[@]} -eq 0 ]; then _tidelog_files; fi",
            "}",
            "complete -F _tidelog tidelog",
            "",
        ]
    )


def zsh(tree: list[Command]) -> str:
    def described(one: Command) -> str:
        pairs = [*one.commands, *((word, "") for word in one.choices)]
        pairs += [(name, option.says) for option in one.options for name in option.names]
        return " ".join(_quoted(f"{name}:{says.replace(':', ';')}") for name, says in pairs)

    return "\n".join(
        [
            "#compdef tidelog",
            "# Completion of tidelog for zsh: source <(tidelog completion zsh)",
            "_tidelog_words() { compadd -- ${=1}; }",
            "_tidelog() {",
            '  local at="" prev="${words[CURRENT-1]}" i',
            "  local -a entries",
            "  for ((i = 2; i < CURRENT; i++)); do",
            '    case "$at|${words[i]}" in',
            *_lines_of_paths(tree),
            "    esac",
            "  done",
            '  case "$at|$prev" in',
            *_lines_of_values(tree, "_tidelog_words", "_files"),
            "  esac",
            '  case "$at" in',
            *(f"    {_quoted(one.path)}) entries=({described(one)}) ;;" for one in tree),
            "  esac",
            "  _describe -t commands tidelog entries || _files",
            "}",
            "compdef _tidelog tidelog",
            "",
        ]
    )


def fish(tree: list[Command]) -> str:
    lines = [
        "# Completion of tidelog for fish: tidelog completion fish | source",
        "function __tidelog_at",
        "  set -l at ''",
        "  for word in (commandline -opc)[2..-1]",
        '    switch "$at|$word"',
    ]
    for one in tree:
        for name, _ in one.commands:
            below = f"{one.path} {name}".strip()
            lines += [f"      case {_quoted(f'{one.path}|{name}')}", f"        set at {_quoted(below)}"]
    lines += ["    end", "  end", '  test "$at" = "$argv[1]"', "end"]
    for one in tree:
        condition = f'__tidelog_at "{one.path}"'
        here = f"-n {_quoted(condition)}"
        for name, says in one.commands:
            lines.append(f"complete -c tidelog -f {here} -a {_quoted(name)} -d {_quoted(says)}")
        if one.choices:
            lines.append(f"complete -c tidelog -f {here} -a {_quoted(' '.join(one.choices))}")
        for option in one.options:
            names = " ".join(f"-l {name[2:]}" if name.startswith("--") else f"-s {name[1:]}" for name in option.names)
            value = ""
            if option.choices:
                value = f" -x -a {_quoted(' '.join(option.choices))}"
            elif option.takes_value:
                value = " -r"
            lines.append(f"complete -c tidelog {here} {names}{value} -d {_quoted(option.says)}")
    return "\n".join([*lines, ""])
