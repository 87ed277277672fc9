"""Entry point of the `tidelog` command: finds the command, runs it, and turns every ending into an exit code.

    0    done
    1    failure: a problem was found, or the disk or the cluster rejected the request
    2    usage error: unknown command, bad option, no such path
    130  Ctrl-C            141  the reader of our output has gone (both quiet, as shells expect)
    143  SIGTERM

Data goes to stdout, messages to stderr. Users see a traceback only with TIDELOG_TRACEBACK=1. Commands are imported
when they run, so that `tidelog --version` costs an interpreter and this file.
"""

import argparse
import contextlib
import difflib
import importlib
import itertools
import os
import re
import signal
import sys
import threading
import traceback
from collections.abc import Iterator, Sequence
from types import FrameType
from typing import Any, NoReturn

from tidelog import __version__
from tidelog.cli import client_grammar, demo_grammar, node_grammar
from tidelog.cli.examples import examples_of
from tidelog.cli.exit_codes import (
    EXIT_CLOSED_PIPE,
    EXIT_FAILURE,
    EXIT_INTERRUPTED,
    EXIT_OK,
    EXIT_TERMINATED,
    EXIT_USAGE,
)

_CHOICE = re.compile(r"argument (?P<what>[^:]+): invalid choice: '(?P<given>[^']*)' \(choose from (?P<known>.*)\)")


_OF_KAFKA = {
    "--group": ("group", "the group is an argument without an option"),
    "--topic": ("topic", "the topic is an argument without an option"),
    "--to": ("--to-earliest", "use --to-earliest, --to-latest, --to-offset, --to-datetime or --to-current"),
    "--config": ("topics alter", "change settings with: tidelog configs alter --topic NAME --set KEY=VALUE"),
    "--add-config": ("--set", "use --set KEY=VALUE"),
    "--delete-config": ("--delete", "use --delete KEY"),
}
"""Options of Kafka's tools: the option, argument or command (by its end) that the hint belongs to, and the hint."""


class UsageError(Exception):
    """The command line is invalid: a path that does not exist, options that exclude each other."""


class CommandError(Exception):
    """The command failed, and the message says why: no cluster answers, a port is taken."""


class TerminatedError(BaseException):
    """SIGTERM. Like KeyboardInterrupt: what is open is closed, and nothing catches it on the way."""


class _Parser(argparse.ArgumentParser):
    """argparse with errors of one line, and the nearest command or option for a misspelt one.

    Options are not shortened: what `--y` means would change with the next option.
    """

    def __init__(self, **arguments: Any) -> None:
        super().__init__(**{**arguments, "allow_abbrev": False})

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> tuple[Any, list[str]]:
        """What is left over is wrong here, where the options are known, not in the parser above."""
        words = sys.argv[1:] if args is None else args
        self._check_options_before_command(words)
        self._check_options_of_kafka(words)
        found, rest = super().parse_known_args(args, namespace)
        if rest:
            self._refuse_unknown(rest[0].partition("=")[0])
        return found, rest

    def _check_options_before_command(self, words: Sequence[str]) -> None:
        """Refuses an unknown option before the command, whose value would otherwise be taken for the command."""
        if self._subparsers is None or not words or not words[0].startswith("-"):
            return
        option = words[0].partition("=")[0]
        if option not in self._option_strings():
            self._refuse_unknown(option, "options of a command follow the command")

    def _check_options_of_kafka(self, words: Sequence[str]) -> None:
        """Refuses an option of Kafka's tools with what it is here, before an argument is missed."""
        options = self._option_strings()
        if self._subparsers is not None:
            return
        for word in itertools.takewhile(lambda word: word != "--", words):
            option = word.partition("=")[0]
            if option in options or option not in _OF_KAFKA:
                continue
            needed, hint = _OF_KAFKA[option]
            if needed in options or needed in {action.dest for action in self._actions} or self.prog.endswith(needed):
                self.error(f"unknown option: {option}; {hint}")

    def _option_strings(self) -> list[str]:
        return [option for action in self._actions for option in action.option_strings]

    def _refuse_unknown(self, word: str, otherwise: str = "") -> NoReturn:
        near = difflib.get_close_matches(word, self._option_strings(), n=1, cutoff=0.6)
        what = "option" if word.startswith("-") else "argument"
        hint = f"did you mean '{near[0]}'?" if near else otherwise
        self.error(f"unknown {what}: {word}" + (f"; {hint}" if hint else ""))

    def format_help(self) -> str:
        shown = "".join(f"  {example}\n" for example in examples_of(self.prog))
        return super().format_help() + (f"\nexamples:\n{shown}" if shown else "")

    def _print_message(self, message: str, file: Any = None) -> None:
        """argparse ignores that the reader has gone; here it ends the command as everywhere."""
        if message:
            (sys.stderr if file is None else file).write(message)

    def error(self, message: str) -> NoReturn:
        match = _CHOICE.fullmatch(message)
        if match is not None:
            known = re.findall(r"[\w.-]+", match["known"])
            what = "command" if "command" in match["what"] else f"value of {match['what']}"
            near = difflib.get_close_matches(match["given"], known, n=1, cutoff=0.5)
            hint = f"did you mean '{near[0]}'?" if near else f"there are: {', '.join(known)}"
            message = f"unknown {what}: '{match['given']}'; {hint}"
        sys.stderr.write(f"{self.prog}: {message} (see '{self.prog} --help')\n")
        raise SystemExit(EXIT_USAGE)


def parser() -> argparse.ArgumentParser:
    """The whole grammar. `run` of a parsed call is the `module:function` that does it."""
    top = _Parser(prog="tidelog", description="A streaming log cluster.")
    top.add_argument("--version", action="version", version=f"tidelog {__version__}")
    commands = top.add_subparsers(dest="command", metavar="command", parser_class=_Parser, required=True)

    demo_grammar.add(commands, _Parser)
    log = commands.add_parser("log", help="files of a log, offline", description="Files of a log, offline.")
    log_commands = log.add_subparsers(dest="log command", metavar="command", parser_class=_Parser, required=True)
    dump = log_commands.add_parser(
        "dump",
        help="show what is in a segment, an index or a whole directory",
        description="Shows batches, records, indexes, epochs and producer state of a file (.log, .index, .timeindex, "
        ".txnindex), of a log's directory or of a node's log directory. Only reads.",
    )
    dump.add_argument("path", metavar="PATH", help="a file, a log's directory or a node's log directory")
    dump.add_argument("--records", action="store_true", help="show the records inside the batches too")
    dump.add_argument(
        "--offsets-decoder",
        action="store_true",
        help="show records of __consumer_offsets in readable form: groups, members, committed offsets; with --records",
    )
    dump.add_argument(
        "--verify", action="store_true", help="check everything against everything; exit with 1 if something is wrong"
    )
    dump.add_argument("--output", choices=("table", "json"), default="table", help="output format")
    dump.set_defaults(run="tidelog.cli.log_dump:run")
    node_grammar.add(commands, _Parser)
    client_grammar.add(commands, _Parser)
    completion = commands.add_parser(
        "completion",
        help="a script that lets a shell complete commands and options",
        description="Prints a script for your shell: `source <(tidelog completion bash)`, the same for zsh, or "
        "`tidelog completion fish | source`.",
    )
    completion.add_argument("shell", choices=("bash", "zsh", "fish"))
    completion.set_defaults(run="tidelog.cli.completion:run")
    return top


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return the exit code of the process."""
    _open_standard_streams()
    with _terminated_by_signal():
        try:
            code = _run(sys.argv[1:] if arguments is None else arguments)
            sys.stdout.flush()
            return code
        except BrokenPipeError:
            _discard_output()
            return EXIT_CLOSED_PIPE
        except KeyboardInterrupt:
            return _ended_by_signal(EXIT_INTERRUPTED)
        except TerminatedError:
            return _ended_by_signal(EXIT_TERMINATED)


def _open_standard_streams() -> None:
    """Opens /dev/null for a stream that was closed before the start (`>&-`); else a socket would get its number."""
    for number, name in ((0, "stdin"), (1, "stdout"), (2, "stderr")):
        if getattr(sys, name) is None:
            descriptor = os.open(os.devnull, os.O_RDWR)
            if descriptor != number:
                os.dup2(descriptor, number)
                os.close(descriptor)
            setattr(sys, name, open(number, "r" if number == 0 else "w", encoding="utf-8", closefd=False))  # noqa: SIM115


@contextlib.contextmanager
def _terminated_by_signal() -> Iterator[None]:
    """SIGTERM raises `TerminatedError`, unless the command has a handler of its own."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def handle(_number: int, _frame: FrameType | None) -> None:
        raise TerminatedError

    before = signal.signal(signal.SIGTERM, handle)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _ended_by_signal(code: int) -> int:
    try:
        sys.stdout.flush()
    except BrokenPipeError:
        _discard_output()
    return code


def _discard_output() -> None:
    """What is still buffered must not raise a second time when the interpreter closes its streams."""
    sink = os.open(os.devnull, os.O_WRONLY)
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except BrokenPipeError:
            os.dup2(sink, stream.fileno())


def _run(arguments: Sequence[str]) -> int:
    try:
        options = parser().parse_args(arguments)
    except SystemExit as stop:  # argparse's way to end --help, --version and a wrong call
        return stop.code if isinstance(stop.code, int) else EXIT_OK
    module, _, function = options.run.partition(":")
    try:
        code = getattr(importlib.import_module(module), function)(options)
        assert isinstance(code, int), f"{options.run} returned no exit code"
        return code
    except BrokenPipeError:
        raise
    except UsageError as error:
        return _complain(str(error), EXIT_USAGE)
    except CommandError as error:
        return _complain(str(error), EXIT_FAILURE)
    except Exception as error:
        return _complain(_describe(error), EXIT_FAILURE)


def _describe(error: Exception) -> str:
    """One line for the user: a catalogued error with its advice, else what it was and how to learn more."""
    from tidelog.cli.messages import error_text
    from tidelog.model.errors import TidelogError

    if isinstance(error, TidelogError):
        return error_text(error)
    if isinstance(error, OSError):
        where = f"{error.filename}: " if error.filename else ""
        return f"{where}{error.strerror or error}"
    what = " ".join(str(error).split()) or "no message"
    return f"unexpected error, this is a defect: {type(error).__name__}: {what} (TIDELOG_TRACEBACK=1 shows where)"


def _complain(message: str, code: int) -> int:
    if os.environ.get("TIDELOG_TRACEBACK"):
        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.write(f"tidelog: {message}\n")
    return code


if __name__ == "__main__":
    raise SystemExit(main())
