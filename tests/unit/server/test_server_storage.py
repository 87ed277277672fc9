"""A node's directories: formatted once, never taken from another, checked at every start."""

from __future__ import annotations

import asyncio
import os
import shutil
import subprocess
import sys
from pathlib import Path
from random import Random
from uuid import UUID

import pytest

from tidelog.log.directories import DIRECTORY_ID, directory_name
from tidelog.model import uuids
from tidelog.model.errors import (
    CorruptStateError,
    InvalidRequestError,
    StorageError,
    UnformattedDirectoryError,
    WrongDirectoryError,
)
from tidelog.model.ids import PartitionId, TopicId
from tidelog.raft.directory_identity import FORMAT_KEY
from tidelog.raft.membership import Membership
from tidelog.raft.snapshots import read_file
from tidelog.server.config import NodeConfig, load
from tidelog.server.directories import NodeDirectories
from tidelog.server.locks import DirectoryInUseError, DirectoryLock, holder_of
from tidelog.server.storage import (
    META,
    STATE,
    Formatted,
    Voters,
    check_node,
    derived_directory,
    format_node,
    inspect,
    parse_controllers,
    read_meta,
    standalone,
    voters_of_file,
)
from tidelog.world.real.disk import RealDisk
from tidelog.world.real.store import LmdbStore

CLUSTER = "4L6g3nShT-eMCtK--X86sw"
OTHER = "Some-OtherCluster_1234"


def config_of(tmp_path: Path, **keys: object) -> NodeConfig:
    fields = {"node.id": 1, "log.dirs": ["a"], **{key.replace("_", "."): value for key, value in keys.items()}}
    lines = [
        f'"{key}" = {str(value).lower() if isinstance(value, int) else value!r}\n' for key, value in fields.items()
    ]
    path = tmp_path / f"node-{fields['node.id']}.toml"
    path.write_text("".join(lines), encoding="utf-8")
    return load(str(path), {})


def formatted(
    config: NodeConfig, voters: Voters | None = None, *, cluster: str = CLUSTER, ignore: bool = False
) -> list[Formatted]:
    if voters is None and config.is_controller:
        voters = standalone(config)
    return asyncio.run(format_node(config, cluster, voters, ignore_formatted=ignore, random=Random(7)))


def membership_in(path: str) -> Membership:
    return read_file(RealDisk(path), "raft/00000000000000000000-0000000000.snapshot").membership


class TestIds:
    def test_an_id_has_22_characters_and_comes_back_as_it_was(self) -> None:
        for seed in range(200):
            value = uuids.random_uuid(Random(seed))
            text = uuids.to_text(value)
            assert len(text) == 22
            assert not text.startswith("-")
            assert uuids.from_text(text) == value

    def test_the_form_is_that_of_kafka(self) -> None:
        assert uuids.to_text(UUID(bytes=bytes(range(16)))) == "AAECAwQFBgcICQoLDA0ODw"

    @pytest.mark.parametrize(
        "text",
        ["", "short", "AAECAwQFBgcICQoLDA0ODw==", "AAECAwQFBgcICQoLDA0OD+", "AAAAAAAAAAAAAAAAAAAAAA"],
    )
    def test_anything_else_is_none(self, text: str) -> None:
        assert uuids.from_text(text) is None

    def test_bits_that_do_not_count_are_not_taken(self) -> None:
        assert uuids.from_text("AAECAwQFBgcICQoLDA0ODx") is None  # would come back as ...Dw


class TestFormat:
    @pytest.mark.requirement("a:N-09", "a:O-02")
    def test_every_directory_gets_an_id_of_its_own_and_says_whose_it_is(self, tmp_path: Path) -> None:
        config = config_of(tmp_path, log_dirs=["a", "b"])
        done = formatted(config)
        assert [one.path for one in done] == [str(tmp_path / "a"), str(tmp_path / "b")]
        metas = [read_meta(one.path) for one in done]
        assert [meta and (meta.cluster_id, meta.node) for meta in metas] == [(CLUSTER, 1)] * 2
        assert metas[0] is not None
        assert metas[1] is not None
        assert metas[0].directory != metas[1].directory
        text = (tmp_path / "a" / META).read_text(encoding="utf-8")
        assert text == (
            f"version=1\ncluster.id={CLUSTER}\nnode.id=1\ndirectory.id={uuids.to_text(metas[0].directory)}\n"
        )

    def test_the_state_store_and_the_first_voter_have_the_same_directory_id(self, tmp_path: Path) -> None:
        config = config_of(tmp_path)
        (one,) = formatted(config)
        with LmdbStore(os.path.join(one.path, STATE), read_only=True) as store:
            stored = store.get(DIRECTORY_ID)
        assert stored is not None
        assert one.meta.directory.bytes in stored
        (voter,) = membership_in(one.path).voters
        assert (voter.node, voter.directory) == (1, one.meta.directory.bytes)
        assert voter.endpoints == (("CONTROLLER", str(config.own.advertised)),)

    def test_a_second_format_is_refused_or_ignored_and_changes_nothing(self, tmp_path: Path) -> None:
        config = config_of(tmp_path)
        (first,) = formatted(config)
        with pytest.raises(StorageError, match="formatted already"):
            formatted(config)
        (again,) = formatted(config, ignore=True)
        assert again == Formatted(first.path, first.meta, True)

    def test_a_directory_that_is_added_later_is_formatted_alone(self, tmp_path: Path) -> None:
        (first,) = formatted(config_of(tmp_path))
        done = formatted(config_of(tmp_path, log_dirs=["a", "b"]), ignore=True)
        assert [one.was_there for one in done] == [True, False]
        assert done[0].meta == first.meta

    @pytest.mark.parametrize("ignore", [False, True])
    def test_one_of_another_cluster_or_node_is_refused_by_both_names(self, tmp_path: Path, ignore: bool) -> None:
        formatted(config_of(tmp_path))
        with pytest.raises(
            WrongDirectoryError, match=f"node 1 of cluster {CLUSTER}, this is node 1 of cluster {OTHER}"
        ):
            formatted(config_of(tmp_path), cluster=OTHER, ignore=ignore)
        with pytest.raises(WrongDirectoryError, match=f"node 1 of cluster {CLUSTER}, this is node 2 of cluster"):
            formatted(config_of(tmp_path, node_id=2), ignore=ignore)

    def test_nothing_is_written_if_one_directory_must_not_be(self, tmp_path: Path) -> None:
        formatted(config_of(tmp_path, log_dirs=["b"]))
        with pytest.raises(WrongDirectoryError):
            formatted(config_of(tmp_path, node_id=2, log_dirs=["a", "b"]), ignore=True)
        assert not (tmp_path / "a").exists()

    def test_a_format_that_was_cut_short_is_finished_with_the_same_id(self, tmp_path: Path) -> None:
        config = config_of(tmp_path)
        (first,) = formatted(config)
        os.unlink(os.path.join(first.path, META))  # the last thing that is written
        with pytest.raises(UnformattedDirectoryError):
            check_node(config)
        (again,) = formatted(config)
        assert again.meta == first.meta
        os.unlink(os.path.join(first.path, META))
        with pytest.raises(WrongDirectoryError):
            formatted(config, cluster=OTHER)

    def test_of_a_broker_too_and_store_and_file_agree_afterwards(self, tmp_path: Path) -> None:
        config = config_of(tmp_path, process_roles="broker", controller_quorum_voters="9@c:9192")
        (first,) = formatted(config)
        os.unlink(os.path.join(first.path, META))
        (again,) = asyncio.run(format_node(config, CLUSTER, None, ignore_formatted=False, random=Random(8)))
        with LmdbStore(os.path.join(first.path, STATE), read_only=True) as store:
            stored = store.get(DIRECTORY_ID)
        assert stored is not None
        assert again.meta.directory.bytes in stored

    def test_logs_without_an_owner_are_refused(self, tmp_path: Path) -> None:
        log_id = PartitionId(TopicId(UUID(int=5)), 0)
        (tmp_path / "a" / directory_name(log_id, "orders")).mkdir(parents=True)
        with pytest.raises(StorageError, match="put together by hand"):
            formatted(config_of(tmp_path))

    def test_a_directory_in_use_is_refused_by_the_name_of_the_process(self, tmp_path: Path) -> None:
        (tmp_path / "a").mkdir()
        lock = DirectoryLock(str(tmp_path / "a"), who="a test")
        with pytest.raises(StorageError, match=f"process {os.getpid()} \\(a test\\)"):
            formatted(config_of(tmp_path))
        lock.close()

    def test_a_broker_has_no_raft_state(self, tmp_path: Path) -> None:
        config = config_of(tmp_path, process_roles="broker", controller_quorum_voters="9@c:9192")
        (one,) = formatted(config)
        assert not os.path.exists(os.path.join(one.path, "raft"))
        with LmdbStore(os.path.join(one.path, STATE), read_only=True) as store:
            assert store.get(FORMAT_KEY) is None


class TestFirstVoters:
    def test_a_list_gives_each_voter_its_directory_id_and_this_node_its_own(self, tmp_path: Path) -> None:
        ids = [uuids.random_uuid(Random(n)) for n in range(3)]
        text = ",".join(f"{n + 1}@host{n}:9192:{uuids.to_text(one)}" for n, one in enumerate(ids))
        (one,) = formatted(config_of(tmp_path), parse_controllers(text))
        assert one.meta.directory == ids[0]
        voters = membership_in(one.path).voters
        assert [(voter.node, voter.directory, voter.endpoints) for voter in voters] == [
            (n + 1, ids[n].bytes, (("CONTROLLER", f"host{n}:9192"),)) for n in range(3)
        ]

    @pytest.mark.parametrize(
        "text",
        [
            "",
            "1@host:9192",
            "1@host:9192:short",
            "x@host:9192:AAECAwQFBgcICQoLDA0ODw",
            "1@host:AAECAwQFBgcICQoLDA0ODw",
            "1@host:99999:AAECAwQFBgcICQoLDA0ODw",
            "1@a:1:AAECAwQFBgcICQoLDA0ODw,1@b:1:BAECAwQFBgcICQoLDA0ODw",
            "1@a:1:AAECAwQFBgcICQoLDA0ODw,2@b:1:AAECAwQFBgcICQoLDA0ODw",
        ],
    )
    def test_a_list_that_makes_no_sense_is_refused(self, text: str) -> None:
        with pytest.raises(InvalidRequestError, match="--initial-controllers: "):
            parse_controllers(text)

    def test_a_controller_that_is_not_among_them_is_refused(self, tmp_path: Path) -> None:
        voters = parse_controllers("2@host:9192:AAECAwQFBgcICQoLDA0ODw")
        with pytest.raises(InvalidRequestError, match="node 1 is a controller and not among the first voters 2"):
            formatted(config_of(tmp_path), voters)

    def test_a_node_that_joins_later_begins_with_none(self, tmp_path: Path) -> None:
        (one,) = formatted(config_of(tmp_path), Voters(()))
        assert membership_in(one.path).voters == ()

    @pytest.mark.requirement("a:O-02")
    def test_nodes_that_know_each_other_by_number_agree_without_talking(self, tmp_path: Path) -> None:
        quorum = "1@h:9192,2@h:9193,3@h:9194"
        memberships = []
        for node in (1, 2, 3):
            config = config_of(tmp_path, node_id=node, log_dirs=[f"n{node}"], controller_quorum_voters=quorum)
            (one,) = formatted(config, voters_of_file(config, CLUSTER))
            assert one.meta.directory == derived_directory(CLUSTER, node)
            memberships.append(membership_in(one.path))
        assert memberships[0] == memberships[1] == memberships[2]
        assert derived_directory(OTHER, 1) != derived_directory(CLUSTER, 1)


class TestInfoAndStart:
    def test_what_is_sound_has_no_problems(self, tmp_path: Path) -> None:
        config = config_of(tmp_path, log_dirs=["a", "b"])
        formatted(config)
        reports = inspect(config)
        assert [(report.role, report.problems) for report in reports] == [("metadata, logs", []), ("logs", [])]
        assert check_node(config)[0] == CLUSTER

    def test_what_is_wrong_is_said(self, tmp_path: Path) -> None:
        config = config_of(tmp_path, log_dirs=["a", "b", "c", "d", "e"])
        formatted(config)
        shutil.rmtree(tmp_path / "b")
        os.unlink(tmp_path / "c" / META)
        (tmp_path / "d" / META).write_text("version=1\n", encoding="utf-8")
        shutil.rmtree(tmp_path / "e")
        shutil.copytree(tmp_path / "a", tmp_path / "e")
        found = {os.path.basename(report.path): report.problems for report in inspect(config)}
        assert found["b"] == ["does not exist"]
        assert found["c"] == ["is not formatted"]
        assert "does not say cluster, node and directory" in found["d"][0]
        assert found["a"] == ["two directories have one directory id: one is a copy of the other"]

    def test_an_unknown_version_is_not_guessed_at(self, tmp_path: Path) -> None:
        config = config_of(tmp_path)
        (one,) = formatted(config)
        path = tmp_path / "a" / META
        path.write_text(path.read_text(encoding="utf-8").replace("version=1", "version=9"), encoding="utf-8")
        with pytest.raises(CorruptStateError, match="is of version 9"):
            read_meta(one.path)
        with pytest.raises(CorruptStateError):
            check_node(config)

    @pytest.mark.case("R11")
    def test_a_lost_state_store_is_not_replaced_by_an_empty_one(self, tmp_path: Path) -> None:
        config = config_of(tmp_path)
        formatted(config)
        shutil.rmtree(tmp_path / "a" / STATE)
        with pytest.raises(StorageError, match="its state store is missing"):
            NodeDirectories(config)
        assert not (tmp_path / "a" / STATE).exists()
        assert inspect(config)[0].problems == ["its state store is missing"]

    def test_a_start_without_format_names_the_command(self, tmp_path: Path) -> None:
        with pytest.raises(UnformattedDirectoryError, match="tidelog storage format --config"):
            check_node(config_of(tmp_path))

    def test_a_log_directory_that_is_gone_is_left_out_and_the_others_are_used(self, tmp_path: Path) -> None:
        config = config_of(tmp_path, log_dirs=["a", "b"])
        formatted(config)
        shutil.rmtree(tmp_path / "b")
        directories = NodeDirectories(config)
        assert [one.path for one in directories.open] == [str(tmp_path / "a")]
        assert list(directories.left_out) == [str(tmp_path / "b")]
        directories.close()

    def test_a_directory_of_another_node_stops_the_start(self, tmp_path: Path) -> None:
        formatted(config_of(tmp_path, log_dirs=["b"], node_id=2))
        formatted(config_of(tmp_path))
        with pytest.raises(WrongDirectoryError, match="belongs to node 2"):
            check_node(config_of(tmp_path, log_dirs=["a", "b"]))

    def test_two_nodes_do_not_run_on_one_directory(self, tmp_path: Path) -> None:
        config = config_of(tmp_path)
        formatted(config)
        directories = NodeDirectories(config)
        with pytest.raises(DirectoryInUseError, match=f"in use by process {os.getpid()} \\(tidelog node 1\\)") as found:
            NodeDirectories(config)
        assert found.value.pid == os.getpid()
        directories.close()
        NodeDirectories(config).close()


class TestLock:
    def test_the_lock_of_a_killed_process_is_free(self, tmp_path: Path) -> None:
        program = (
            "import sys, time\nfrom tidelog.server.locks import DirectoryLock\n"
            f"lock = DirectoryLock({str(tmp_path)!r}, who='a child')\nprint('locked', flush=True)\ntime.sleep(60)\n"
        )
        with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE) as child:
            assert child.stdout is not None
            assert child.stdout.readline() == b"locked\n"
            assert holder_of(str(tmp_path)) == (child.pid, "a child")
            child.kill()
        assert holder_of(str(tmp_path)) is None
        DirectoryLock(str(tmp_path), who="us").close()
