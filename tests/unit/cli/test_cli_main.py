"""The frame of the command: exit codes, one-line errors, quiet endings."""

import io
import os
import resource
import signal
import subprocess
import sys
from pathlib import Path
from typing import ClassVar

import pytest

from tidelog import __version__
from tidelog.cli import main as cli
from tidelog.cli import table
from tidelog.model.errors import StorageError

ENVIRONMENT = {**os.environ, "PYTHONSAFEPATH": "1", "PYTHONUNBUFFERED": ""}


def tidelog(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "tidelog", *arguments],
        capture_output=True,
        text=True,
        check=False,
        env={**ENVIRONMENT, **environment},
    )


def test_the_version_is_printed_on_stdout_quickly() -> None:
    # Processor time, not the clock on the wall: other tests run beside this one.
    spent = []
    for _ in range(3):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        run = tidelog("--version")
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        spent.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
    assert (run.returncode, run.stdout, run.stderr) == (0, f"tidelog {__version__}\n", "")
    assert min(spent) < 0.2


def test_the_version_imports_nothing_heavy() -> None:
    run = subprocess.run(
        [sys.executable, "-X", "importtime", "-m", "tidelog", "--version"],
        capture_output=True,
        text=True,
        check=True,
        env=ENVIRONMENT,
    )
    imported = {line.rpartition("|")[2].strip() for line in run.stderr.splitlines()}
    heavy = {"asyncio", "grpc", "lmdb", "uvloop", "msgpack", "zstandard", "cramjam", "tidelog.log.batch"}
    assert imported & heavy == set()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["lgo"], "tidelog: unknown command: 'lgo'; did you mean 'log'? (see 'tidelog --help')"),
        (["--versoin"], "tidelog: unknown option: --versoin; did you mean '--version'? (see 'tidelog --help')"),
        (
            ["topics", "--bootstrap", "host:9292", "list"],
            "tidelog topics: unknown option: --bootstrap; options of a command follow the command "
            "(see 'tidelog topics --help')",
        ),
        (["log", "dmp", "x"], "tidelog log: unknown command: 'dmp'; did you mean 'dump'? (see 'tidelog log --help')"),
        (
            ["log", "dump"],
            "tidelog log dump: the following arguments are required: PATH (see 'tidelog log dump --help')",
        ),
        (
            ["log", "dump", "x", "--output", "jso"],
            "tidelog log dump: unknown value of --output: 'jso'; did you mean 'json'? (see 'tidelog log dump --help')",
        ),
        ([], "tidelog: the following arguments are required: command (see 'tidelog --help')"),
    ],
)
def test_a_wrong_call_is_one_line_and_exit_code_2(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(arguments) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err == message + "\n"


def test_a_command_that_is_near_to_none_is_answered_with_all_there_are(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["xyzzy"]) == 2
    said = capsys.readouterr().err
    assert said.startswith("tidelog: unknown command: 'xyzzy'; there are: demo, log, ")
    assert said.endswith(" (see 'tidelog --help')\n")


def test_help_goes_to_stdout(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["--help"]) == 0
    assert "log" in capsys.readouterr().out


class TestErrorsOfACommand:
    """A command is replaced by one that fails in a given way: the frame is under test, not the command."""

    @pytest.fixture(autouse=True)
    def _broken(self, monkeypatch: pytest.MonkeyPatch) -> None:
        module = type(sys)("broken_command")
        module.run = self._run  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, "tidelog.cli.log_dump", module)
        monkeypatch.delenv("TIDELOG_TRACEBACK", raising=False)

    error: BaseException = Exception()

    def _run(self, options: object) -> int:
        raise self.error

    def test_an_unexpected_one_is_one_line_that_says_how_to_learn_more(
        self, capsys: pytest.CaptureFixture[str]
    ) -> None:
        self.error = ValueError("two\nlines")
        assert cli.main(["log", "dump", "x"]) == 1
        expected = "unexpected error, this is a defect: ValueError: two lines (TIDELOG_TRACEBACK=1 shows where)"
        assert capsys.readouterr().err == f"tidelog: {expected}\n"

    def test_the_traceback_is_shown_on_request(
        self, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("TIDELOG_TRACEBACK", "1")
        self.error = ValueError("x")
        assert cli.main(["log", "dump", "x"]) == 1
        assert "Traceback (most recent call last)" in capsys.readouterr().err

    def test_a_catalogued_one_comes_with_its_name_and_advice(self, capsys: pytest.CaptureFixture[str]) -> None:
        self.error = StorageError("disk a: gone", path="a")
        assert cli.main(["log", "dump", "x"]) == 1
        assert capsys.readouterr().err.startswith("tidelog: disk a: gone (STORAGE_ERROR: check the disk")

    def test_one_of_the_system_names_the_file(self, capsys: pytest.CaptureFixture[str]) -> None:
        self.error = PermissionError(13, "Permission denied", "secret.log")
        assert cli.main(["log", "dump", "x"]) == 1
        assert capsys.readouterr().err == "tidelog: secret.log: Permission denied\n"

    def test_a_wrong_call_found_by_the_command_is_exit_code_2(self, capsys: pytest.CaptureFixture[str]) -> None:
        self.error = cli.UsageError("x: no such file")
        assert cli.main(["log", "dump", "x"]) == 2
        assert capsys.readouterr().err == "tidelog: x: no such file\n"

    def test_ctrl_c_is_quiet(self, capsys: pytest.CaptureFixture[str]) -> None:
        self.error = KeyboardInterrupt()
        assert cli.main(["log", "dump", "x"]) == 130
        assert capsys.readouterr() == ("", "")


CHATTERBOX = """
import sys, types
module = types.ModuleType("chatter")
def run(options):
    print("ready", flush=True)
    while True:
        print("x" * 1000)
module.run = run
sys.modules["tidelog.cli.log_dump"] = module
from tidelog.cli.main import main
sys.exit(main(["log", "dump", "x"]))
"""


def test_a_closed_pipe_is_quiet() -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", CHATTERBOX], stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=ENVIRONMENT
    )
    assert process.stdout is not None
    assert process.stderr is not None
    assert process.stdout.readline() == b"ready\n"
    process.stdout.close()
    errors = process.stderr.read()
    assert (process.wait(), errors) == (141, b"")
    process.stderr.close()


def test_ctrl_c_of_a_real_process_is_quiet(tmp_path: Path) -> None:
    with (tmp_path / "out").open("wb") as sink:
        process = subprocess.Popen(
            [sys.executable, "-c", CHATTERBOX.replace('print("x" * 1000)', "import time; time.sleep(60)")],
            stdout=subprocess.PIPE,
            stderr=sink,
            env=ENVIRONMENT,
        )
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n"
        process.send_signal(signal.SIGINT)
        assert process.wait() == 130
        process.stdout.close()
    assert (tmp_path / "out").read_bytes() == b""


class Terminal:
    """A stream that says it is a terminal."""

    def __init__(self) -> None:
        self.text = ""

    def write(self, text: str) -> int:
        self.text += text
        return len(text)

    def isatty(self) -> bool:
        return True


class TestTable:
    def test_columns_line_up_and_figures_stand_flush_right(self) -> None:
        found = list(table.lines(["name", "size"], [["a", 1], ["long name", 12345], ["none", None]], right=["size"]))
        assert found == ["name        size", "a              1", "long name  12345", "none"]

    def test_booleans_are_shown_in_words(self) -> None:
        assert list(table.lines(["ok"], [[True], [False]])) == ["ok", "yes", "no"]

    def test_rows_are_printed_as_they_come(self) -> None:
        def rows() -> "list[list[object]]":
            return [[number] for number in range(1000)]

        assert len(list(table.lines(["n"], rows()))) == 1001

    ROWS: ClassVar = [[1, "controller, broker", "host-one:9192"], [22222, "broker", "host-two:9192"]]

    @pytest.mark.parametrize("width", range(20, 60))
    def test_a_table_is_never_wider_than_asked_for_and_loses_nothing(self, width: int) -> None:
        found = list(table.lines(["node", "what it is", "address"], self.ROWS, right=["node"], width=width))
        assert max(map(len, found)) <= width
        every = "nodewhat it isaddress1controller, brokerhost-one:919222222brokerhost-two:9192"
        if found[0].startswith(" node"):  # no paragraphs, which repeat the headings
            assert sorted("".join("".join(found).split())) == sorted("".join(every.split()))

    def test_cells_of_text_continue_below_and_figures_stay_whole(self) -> None:
        found = list(table.lines(["node", "what it is", "address"], self.ROWS, right=["node"], width=33))
        assert found == [
            " node  what it is   address",
            "    1  controller,  host-one:9192",
            "       broker",
            "22222  broker       host-two:9192",
        ]

    def test_a_heading_is_cut_before_a_row_becomes_a_paragraph(self) -> None:
        headings, row = ["partition", "replicas", "bytes"], [0, "1,2", 100]
        assert list(table.lines(headings, [row], right=["partition", "bytes"], width=20)) == [
            "parti…  repl…  bytes",
            "     0  1,2      100",
        ]
        wide = [*headings, "another one"]
        assert list(table.lines(wide, [[*row, "x" * 8]], right=["partition", "bytes"], width=24)) == [
            "partition: 0",
            "replicas: 1,2",
            "bytes: 100",
            "another one: xxxxxxxx",
        ]

    def test_the_width_is_that_of_columns_or_of_the_terminal(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.delenv("COLUMNS", raising=False)
        plain = io.StringIO()
        assert table.width_of(plain) is None, "a file has no width"
        monkeypatch.setenv("COLUMNS", "60")
        assert table.width_of(plain) == 60

    def test_a_terminal_gets_a_bold_heading_unless_no_color_is_set(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.delenv("NO_COLOR", raising=False)
        monkeypatch.setenv("TERM", "xterm")
        terminal = Terminal()
        table.write(terminal, ["a"], [["b"]])  # type: ignore[arg-type]
        assert terminal.text == "\x1b[1ma\x1b[0m\nb\n"
        monkeypatch.setenv("NO_COLOR", "1")
        plain = Terminal()
        table.write(plain, ["a"], [["b"]])  # type: ignore[arg-type]
        assert plain.text == "a\nb\n"
