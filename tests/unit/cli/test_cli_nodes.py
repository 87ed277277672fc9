"""`tidelog storage`, `config`, `quorum`, `server`, `dev` without a cluster: right and wrong calls, and what is said."""

import json
import os
import re
import socket
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from tidelog.cli import dev
from tidelog.cli import main as cli
from tidelog.model.uuids import from_text
from tidelog.server.local_nodes import Layout, LocalNodes, Ports, free_ports
from tidelog.server.locks import DirectoryLock

CLUSTER = "4L6g3nShT-eMCtK--X86sw"
OTHER = "AAECAwQFBgcICQoLDA0ODw"
Capture = pytest.CaptureFixture[str]


@pytest.fixture(autouse=True)
def _no_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in [name for name in os.environ if name.startswith("TIDELOG_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "no-config"))


@pytest.fixture
def config(tmp_path: Path) -> str:
    path = tmp_path / "node.toml"
    path.write_text('node.id = 1\nlog.dirs = ["data"]\n', encoding="utf-8")
    return str(path)


def run(capsys: Capture, *arguments: str) -> tuple[int, str, str]:
    code = cli.main(arguments)
    captured = capsys.readouterr()
    return code, captured.out, captured.err


class TestStorage:
    @pytest.mark.requirement("a:N-09")
    def test_a_random_uuid_is_one_line_that_can_be_used(self, capsys: Capture) -> None:
        code, out, err = run(capsys, "storage", "random-uuid")
        assert (code, err) == (0, "")
        assert from_text(out.strip()) is not None

    @pytest.mark.requirement("a:N-09", "a:O-02")
    def test_format_then_info(self, capsys: Capture, config: str, tmp_path: Path) -> None:
        code, out, err = run(capsys, "storage", "format", "-t", CLUSTER, "-c", config, "--standalone")
        assert (code, err) == (0, "")
        assert re.fullmatch(rf"{tmp_path}/data: formatted, directory id [\w-]{{22}}\n", out)
        code, out, err = run(capsys, "storage", "info", "--config", config)
        assert (code, err) == (0, "")
        heading, row = out.splitlines()
        assert heading.split("  ")[0] == "directory"
        assert row.split()[:4] == [f"{tmp_path}/data", "metadata,", "logs", CLUSTER]

    def test_the_keys_of_the_documents(self, capsys: Capture, config: str, tmp_path: Path) -> None:
        code, out, _ = run(
            capsys, "storage", "format", "-t", CLUSTER, "-c", config, "-s", "--node-id", "1", "--output", "json"
        )
        assert code == 0
        (made,) = json.loads(out)["directories"]
        assert list(made) == ["path", "was_formatted", "cluster_id", "node_id", "directory_id", "version"]
        code, out, _ = run(capsys, "storage", "info", "-c", config, "--output", "json")
        found = json.loads(out)
        assert list(found) == ["node_id", "directories"]
        (row,) = found["directories"]
        assert list(row) == [
            *("path", "holds", "logs", "free_bytes", "cluster_id", "node_id", "directory_id", "version", "problems")
        ]
        assert (row["directory_id"], row["problems"]) == (made["directory_id"], [])

    def test_info_says_what_is_wrong_and_exits_with_1(self, capsys: Capture, config: str, tmp_path: Path) -> None:
        code, out, err = run(capsys, "storage", "info", "-c", config)
        assert code == 1
        assert f"{tmp_path}/data: does not exist" in out
        assert err == "tidelog: 1 problem found\n"

    def test_format_warns_if_the_first_voters_have_its_node_at_a_port_that_is_not_advertised(
        self, capsys: Capture, config: str, tmp_path: Path
    ) -> None:
        with open(config, "a", encoding="utf-8") as file:
            file.write('listeners = ["CONTROLLER://127.0.0.1:9192"]\n')
        voters = f"1@127.0.0.1:9199:{OTHER}"
        code, out, err = run(capsys, "storage", "format", "-t", CLUSTER, "-c", config, "-I", voters)
        assert (code, out) == (0, f"{tmp_path}/data: formatted, directory id {OTHER}\n")
        assert err.startswith(
            "tidelog: the first voters have node 1 at 127.0.0.1:9199, but this node advertises 127.0.0.1:9192"
        )
        code, _, err = run(capsys, "storage", "format", "-t", CLUSTER, "-c", config, "-I", voters, "--ignore-formatted")
        assert (code, err) == (0, ""), "it never advises to empty a directory that was formatted before"

    def test_format_does_not_warn_if_the_first_voters_have_its_node_under_another_host_name(
        self, capsys: Capture, config: str
    ) -> None:
        with open(config, "a", encoding="utf-8") as file:
            file.write('listeners = ["CONTROLLER://127.0.0.1:9192"]\n')
        voters = f"1@localhost:9192:{OTHER}"
        code, _, err = run(capsys, "storage", "format", "-t", CLUSTER, "-c", config, "-I", voters)
        assert (code, err) == (0, "")

    def test_a_second_format_is_refused_with_the_way_out(self, capsys: Capture, config: str) -> None:
        arguments = ("storage", "format", "-t", CLUSTER, "-c", config, "-s")
        assert run(capsys, *arguments)[0] == 0
        code, out, err = run(capsys, *arguments)
        assert (code, out) == (1, "")
        assert "formatted already" in err
        assert "--ignore-formatted" in err
        code, out, _ = run(capsys, *arguments, "--ignore-formatted")
        assert code == 0
        assert "was formatted before" in out

    def test_another_cluster_is_refused_by_both_names(self, capsys: Capture, config: str) -> None:
        assert run(capsys, "storage", "format", "-t", CLUSTER, "-c", config, "-s")[0] == 0
        code, _, err = run(capsys, "storage", "format", "-t", OTHER, "-c", config, "-s", "-g")
        assert code == 1
        assert f"belongs to node 1 of cluster {CLUSTER}, this is node 1 of cluster {OTHER}" in err

    @pytest.mark.parametrize(
        ("more", "said"),
        [
            (["-t", "short", "-s"], "--cluster-id 'short': an id has 22 characters"),
            (["-t", CLUSTER], "who votes first? --standalone"),
            (["-t", CLUSTER, "-s", "--node-id", "2"], "--node-id 2: "),
            (["-t", CLUSTER, "-I", "1@host:9192"], "--initial-controllers: '1@host:9192' is not id@host:port"),
            (["-t", CLUSTER, "-I", f"2@host:9192:{OTHER}"], "node 1 is a controller and not among the first voters 2"),
            (["-t", CLUSTER, "-s", "-N"], "not allowed with argument"),
            ([], "required: --cluster-id"),
        ],
    )
    def test_wrong_calls_exit_with_2_and_write_nothing(
        self, capsys: Capture, config: str, tmp_path: Path, more: list[str], said: str
    ) -> None:
        code, out, err = run(capsys, "storage", "format", "-c", config, *more)
        assert (code, out) == (2, "")
        assert said in err
        assert not (tmp_path / "data").exists()

    def test_a_broker_has_nobody_to_vote_for(self, capsys: Capture, tmp_path: Path) -> None:
        path = tmp_path / "broker.toml"
        path.write_text(
            'node.id = 4\nlog.dirs = ["b"]\nprocess.roles = "broker"\ncontroller.quorum.voters = "1@c:9192"\n',
            encoding="utf-8",
        )
        code, _, err = run(capsys, "storage", "format", "-t", CLUSTER, "-c", str(path), "-s")
        assert code == 2
        assert "this node is not a controller" in err
        assert run(capsys, "storage", "format", "-t", CLUSTER, "-c", str(path))[0] == 0

    def test_voters_of_the_file_come_with_a_note(self, capsys: Capture, tmp_path: Path) -> None:
        path = tmp_path / "node.toml"
        path.write_text('node.id = 1\nlog.dirs = ["a"]\ncontroller.quorum.voters = "1@h:1,2@h:2"\n', encoding="utf-8")
        code, _, err = run(capsys, "storage", "format", "-t", CLUSTER, "-c", str(path))
        assert code == 0
        (note,) = [line for line in err.splitlines() if "note: " in line]
        assert note.startswith("tidelog: note: none of the other controllers answers (h:2), as at the first start")
        assert note.endswith("do not start this node: see docs/operations.md, 'A lost voter'")


class TestConfig:
    def test_a_good_file_is_said_to_be_good(self, capsys: Capture, config: str) -> None:
        assert run(capsys, "config", "check", "--config", config) == (
            0,
            f"{config}: valid; node 1, broker and controller\n",
            "",
        )

    def test_all_problems_are_reported_at_once_with_exit_code_2(self, capsys: Capture, config: str) -> None:
        Path(config).write_text('node.id = "x"\nlog.dirs = "d"\nlog.retenton.ms = 1\n', encoding="utf-8")
        code, out, err = run(capsys, "config", "check", "-c", config)
        assert (code, out) == (2, "")
        assert err.splitlines() == [
            f"tidelog: {config}: 2 things are wrong",
            "  log.retenton.ms=1: no such key; did you mean log.retention.ms?",
            "  node.id=x (node.toml): an integer from 0 to 2147483647",
        ]

    def test_a_file_that_is_not_there(self, capsys: Capture, tmp_path: Path) -> None:
        code, _, err = run(capsys, "config", "check", "-c", str(tmp_path / "none.toml"))
        assert (code, err) == (2, f"tidelog: {tmp_path}/none.toml: No such file or directory\n")

    def test_show_tells_value_source_and_default(
        self, capsys: Capture, config: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("TIDELOG_NUM_PARTITIONS", "6")
        code, out, _ = run(capsys, "config", "show", "-c", config)
        assert code == 0
        rows = [line.split() for line in out.splitlines()]
        assert ["num.partitions", "6", "TIDELOG_NUM_PARTITIONS", "1"] in rows
        assert ["node.id", "1", "node.toml"] in [row[:3] for row in rows]
        assert "logging.level" not in out
        assert "logging.level" in run(capsys, "config", "show", "--all", "-c", config)[1]

    def test_the_keys_of_the_document(self, capsys: Capture, config: str) -> None:
        found = json.loads(run(capsys, "config", "show", "-c", config, "--output", "json")[1])
        assert list(found) == ["path", "settings", "listeners", "ignored", "warnings"]
        assert list(found["settings"][0]) == ["key", "value", "source", "default", "is_of_cluster"]
        assert list(found["listeners"][0]) == ["name", "protocol", "listens", "advertised"]

    def test_what_is_ignored_of_a_properties_file_is_listed(self, capsys: Capture, tmp_path: Path) -> None:
        path = tmp_path / "server.properties"
        path.write_text("node.id=1\nlog.dirs=d\nnum.io.threads=8\n", encoding="utf-8")
        code, _, err = run(capsys, "config", "check", "-c", str(path))
        assert (code, err) == (0, "tidelog: ignored, since they mean nothing here: num.io.threads\n")


def serve(config: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "tidelog", "server", "--config", config],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PYTHONSAFEPATH": "1"},
        timeout=60,
    )


class TestServer:
    def test_a_wrong_file_ends_with_2(self, capsys: Capture, config: str) -> None:
        Path(config).write_text("node.id = 1\n", encoding="utf-8")
        code, _, err = run(capsys, "server", "--config", config)
        assert code == 2
        assert "log.dirs is missing" in err

    def test_a_directory_that_is_not_formatted_ends_with_2_and_the_command(self, config: str, tmp_path: Path) -> None:
        done = serve(config)
        assert done.returncode == 2, "nobody starts it again and again"
        assert f"{tmp_path}/data is not formatted. If this node has never run: tidelog storage format" in done.stderr
        assert "If its disk was lost or replaced, it must not come back as the voter that it was" in done.stderr
        assert "`tidelog quorum remove --node-id 1`" in done.stderr
        assert "--no-initial-controllers`, start the node, and `tidelog quorum add --node-id 1" in done.stderr
        assert "Traceback" not in done.stderr

    def test_a_directory_of_another_node_ends_with_2(self, capsys: Capture, config: str) -> None:
        assert run(capsys, "storage", "format", "-c", config, "--cluster-id", OTHER, "--standalone")[0] == 0
        path = Path(config)
        path.write_text(path.read_text(encoding="utf-8").replace("node.id = 1", "node.id = 2"), encoding="utf-8")
        done = serve(config)
        assert done.returncode == 2
        assert f"belongs to node 1 of cluster {OTHER}, this is node 2" in done.stderr
        assert done.stderr.count("\n") == 1


class TestNoCluster:
    def test_nothing_listens_at_the_usual_place(self, capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
        port = free_ports(1)[0]
        expected = f"tidelog: no cluster at localhost:{port}; start one with: tidelog dev\n"
        assert run(capsys, "quorum", "describe", "--bootstrap", f"localhost:{port}") == (1, "", expected)
        assert run(capsys, "metadata", "show", "--bootstrap-server", f"localhost:{port}") == (1, "", expected)
        monkeypatch.setenv("TIDELOG_BOOTSTRAP", f"localhost:{port}")
        assert run(capsys, "quorum", "describe") == (1, "", expected)

    def test_a_port_that_speaks_something_else_is_not_taken_for_nothing(self, capsys: Capture) -> None:
        with socket.create_server(("127.0.0.1", 0)) as listener:
            at = f"127.0.0.1:{listener.getsockname()[1]}"
            code, out, err = run(capsys, "quorum", "describe", "--bootstrap", at)
        assert (code, out) == (1, "")
        assert at in err
        assert err.count("\n") == 1

    def test_the_profile_says_where(self, capsys: Capture, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        one, two = free_ports(2)
        folder = tmp_path / "no-config" / "tidelog"
        folder.mkdir(parents=True)
        (folder / "config.toml").write_text(
            f'[profiles.default]\nbootstrap = "localhost:{one}"\n[profiles.far]\nbootstrap = "localhost:{two}"\n',
            encoding="utf-8",
        )
        assert f"no cluster at localhost:{one};" in run(capsys, "quorum", "describe")[2]
        monkeypatch.setenv("TIDELOG_PROFILE", "far")
        assert f"no cluster at localhost:{two};" in run(capsys, "quorum", "describe")[2]
        monkeypatch.setenv("TIDELOG_PROFILE", "fra")
        code, _, err = run(capsys, "quorum", "describe")
        assert code == 2
        assert "has no such profile; there are: default, far" in err

    @pytest.mark.parametrize(
        ("arguments", "said"),
        [
            (["quorum", "describe", "--bootstrap", "nonsense"], "--bootstrap: 'nonsense' is not host:port"),
            (["quorum", "add", "--node-id", "2"], "required: --directory-id"),
            (
                ["quorum", "add", "--node-id", "2", "--directory-id", "x", "--endpoint", "h:1"],
                "--directory-id 'x': an id has 22 characters, this has 1",
            ),
            (
                ["quorum", "add", "--node-id", "2", "--directory-id", "A" * 22, "--endpoint", "h:1"],
                "--directory-id 'AAAAAAAAAAAAAAAAAAAAAA': this id is reserved",
            ),
            (
                ["quorum", "add", "--node-id", "2", "--directory-id", "A" * 21 + "+", "--endpoint", "h:1"],
                "an id has letters, digits, - and _ only",
            ),
            (
                ["quorum", "add", "--node-id", "2", "--directory-id", "B" * 22, "--endpoint", "h:1"],
                "its last character must be A, Q, g or w",
            ),
            (
                ["quorum", "add", "--node-id", "2", "--directory-id", OTHER, "--endpoint", "h"],
                "--endpoint: 'h' is not host:port",
            ),
            (["quorum", "remove", "--node-id", "-2"], "--node-id -2: from 0"),
            (["quorum", "describ"], "did you mean 'describe'?"),
            (["metadata", "show", "--data", "/nowhere/at/all"], "no such file or directory"),
        ],
    )
    def test_wrong_calls_exit_with_2(self, capsys: Capture, arguments: list[str], said: str) -> None:
        code, out, err = run(capsys, *arguments)
        assert (code, out) == (2, "")
        assert said in err


class TestDev:
    @pytest.mark.parametrize(
        ("arguments", "said"),
        [
            (["--nodes", "0"], "--nodes 0: from 1 to 9"),
            (["--nodes", "x"], "invalid int value"),
            (["--port-offset", "-1"], "--port-offset -1: from 0"),
            (["--ephemeral", "--data", "x"], "use one of them"),
        ],
    )
    def test_wrong_calls_exit_with_2(self, capsys: Capture, arguments: list[str], said: str) -> None:
        code, out, err = run(capsys, "dev", *arguments)
        assert (code, out) == (2, "")
        assert said in err

    @pytest.mark.parametrize(
        ("is_kept", "advice"),
        [
            (True, "Ctrl-C and the same command start all of them again"),
            (False, "Ctrl-C deletes the cluster and this log (--ephemeral)"),
        ],
    )
    def test_dead_node_is_reported_with_what_ctrl_c_does(
        self, capsys: Capture, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_kept: bool, advice: str
    ) -> None:
        nodes = LocalNodes(tmp_path, Layout.fresh([Ports.usual(1, 0)]), {})
        monkeypatch.setattr(LocalNodes, "ended", lambda _self: {1: -9})
        monkeypatch.setattr(LocalNodes, "pid", lambda _self, number: 4_000 + number)
        dev._report_story(nodes, 1.0, is_kept=is_kept)
        assert "\n  pids   4001 (node 1)\n" in capsys.readouterr().out
        assert dev._watch(nodes, is_kept=is_kept) == 1
        error = capsys.readouterr().err
        assert error == f"tidelog: node 1 ended with code -9; see {nodes.path(1) / 'node.log'}; {advice}\n"

    def test_a_directory_of_something_else_is_not_touched(self, capsys: Capture, tmp_path: Path) -> None:
        (tmp_path / "letter.txt").write_text("dear", encoding="utf-8")
        code, _, err = run(capsys, "dev", "--data", str(tmp_path))
        assert code == 2
        assert "holds letter.txt and no cluster of `tidelog dev`" in err

    def test_another_number_of_nodes_or_other_ports_are_refused(self, capsys: Capture, tmp_path: Path) -> None:
        Layout.fresh([Ports.usual(n, 7) for n in (1, 2, 3)]).write(tmp_path)
        code, _, err = run(capsys, "dev", "--data", str(tmp_path))
        assert (code, "is a cluster of 3 nodes: --nodes 3" in err) == (2, True)
        code, _, err = run(capsys, "dev", "--data", str(tmp_path), "--nodes", "3")
        assert (code, "by their ports: --port-offset 7" in err) == (2, True)

    def test_a_directory_in_use_names_the_process(self, capsys: Capture, tmp_path: Path) -> None:
        lock = DirectoryLock(str(tmp_path), who="tidelog dev")
        code, _, err = run(capsys, "dev", "--data", str(tmp_path))
        lock.close()
        assert code == 1
        assert f"is in use by process {os.getpid()} (tidelog dev)" in err

    def test_a_taken_port_is_named_with_the_way_out(self, capsys: Capture) -> None:
        for offset in range(20_000, 20_100):  # one where only ours is taken
            with socket.socket() as listener:
                try:
                    listener.bind(("127.0.0.1", 9292 + offset))
                except OSError:
                    continue
                listener.listen()
                code, _, err = run(capsys, "dev", "--ephemeral", "--port-offset", str(offset))
                assert code == 1
                if f"port {9292 + offset} (gRPC, of node 1) is taken; --port-offset N" in err:
                    return
        pytest.fail("no port was free")


class TestDocumentedKeys:
    """Every key of a JSON document is listed in docs/cli.md, and nothing else is."""

    PAGE = Path(__file__).resolve().parents[3] / "docs" / "cli.md"

    def documented(self, command: str) -> set[str]:
        text = self.PAGE.read_text(encoding="utf-8")
        _, _, rest = text.partition(f"Keys of `{command}`:\n\n")
        assert rest, f"no list of keys of {command}"
        return set(re.findall(r"^- `([^`]+)`: ", rest.partition("\n\n")[0], re.MULTILINE))

    def keys(self, value: object, path: str = "") -> set[str]:
        if isinstance(value, dict) and not path.endswith("endpoints"):
            found = {f"{path}.{key}".lstrip("."): inside for key, inside in value.items()}
            return set().union(*(self.keys(inside, key) for key, inside in found.items()))
        if isinstance(value, list) and value and isinstance(value[0], dict):
            return set().union(*(self.keys(inside, f"{path}[]") for inside in value))
        return {path}

    @pytest.mark.parametrize(
        ("command", "arguments"),
        [
            ("storage format", ["storage", "format", "-s", "-t", CLUSTER]),
            ("storage info", ["storage", "info"]),
            ("config show", ["config", "show"]),
        ],
    )
    def test_of_commands_that_need_no_cluster(
        self, capsys: Capture, config: str, command: str, arguments: list[str]
    ) -> None:
        _, out, _ = run(capsys, *arguments, "-c", config, "--output", "json")
        assert self.keys(json.loads(out)) == self.documented(command)

    def test_of_the_quorum(self) -> None:
        from tidelog.cli.quorum import describe_document
        from tidelog.client.admin.conversions import quorum_description
        from tidelog.rpc.v1 import cluster_pb2 as pb

        answer = pb.DescribeQuorumResponse(
            members=[pb.QuorumMember(directory_id=bytes(16))], observers=[pb.QuorumObserver()]
        )
        assert self.keys(describe_document(quorum_description(answer))) == self.documented("quorum describe")


def test_quorum_summary_says_none_if_no_leader_is_known() -> None:
    from tidelog.cli.quorum import describe_document, summary
    from tidelog.client.admin.values import QuorumDescription

    quorum = QuorumDescription(None, 2, 7, (), {}, log_start_offset=3, log_end_offset=8)
    assert summary(describe_document(quorum)) == "leader none, epoch 2, high watermark 7, log start 3, log end 8"
    assert summary(describe_document(replace(quorum, leader=1))).startswith("leader 1, epoch 2, ")


def test_server_silences_the_log_of_grpc_before_grpc_is_imported() -> None:
    """A line of gRPC's own on stderr would be no JSON for a reader of `logging.format = "json"`."""
    program = """
import os, sys

class Recorder:
    def find_spec(self, name, path=None, target=None):
        if name == "grpc":
            print(os.environ.get("GRPC_VERBOSITY"))

sys.meta_path.insert(0, Recorder())
import tidelog.cli.server
"""
    environment = {name: value for name, value in os.environ.items() if name != "GRPC_VERBOSITY"}
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, env=environment, timeout=60
    )
    assert done.stdout == "NONE\n"
    environment["GRPC_VERBOSITY"] = "DEBUG"
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, env=environment, timeout=60
    )
    assert done.stdout == "DEBUG\n"
