"""A node's directories: formatted once (`format_node`), inspected (`inspect`), checked at every start (`check_node`).

    <directory>/meta.properties    whose it is: cluster id, node id, directory id; written last, at once, durably
    <directory>/state/             the state store (LMDB): the same directory id again
    <directory>/raft/              of a controller, in its metadata directory: see `raft.storage`
    <directory>/metadata/          of a broker, there too: its copy of the metadata, see `metadata.tail`
    <directory>/<topic>.<id>-<n>/  logs
    <directory>/.lock              see `server.locks`

    missing or empty --format--> begun (a crash came in between) --format again--> formatted
                                 begun --start--> rejected: not formatted

A directory of another cluster or node is never touched. One that holds logs, or a controller's log, without saying
whose they are is rejected: it was put together by hand.

The first voters: `--standalone` (this one), `--initial-controllers` (these, with their directory ids), none (the node
joins a running group by `quorum add`), or, as with older Kafka, `controller.quorum.voters` of the file: then directory
ids follow from cluster id and node id, since nobody knows those of the others. Such a directory must not be formatted a
second time for the same cluster: a voter that lost its votes must return with a new directory id, as a new voter.
`server.quorum_check` asks the other controllers before that.
"""

from __future__ import annotations

import hashlib
import os
import re
from dataclasses import dataclass, field
from random import Random
from uuid import UUID

from tidelog.log.directories import DIRECTORY_ID, list_logs, read_directory_id
from tidelog.model.errors import (
    CorruptStateError,
    InvalidRequestError,
    StorageError,
    TidelogError,
    UnformattedDirectoryError,
    WrongDirectoryError,
)
from tidelog.model.ids import DirectoryId, NodeId
from tidelog.model.uuids import from_text, random_uuid, to_text
from tidelog.raft.directory_identity import FORMAT_KEY, IDENTITY
from tidelog.raft.membership import VOTERS_MAX, Member, Membership
from tidelog.raft.persistent_state import unpack
from tidelog.raft.storage import STATE_KEY, RaftStorage
from tidelog.server.config import NodeConfig
from tidelog.server.listeners import ListenerError, parse_address
from tidelog.server.locks import DirectoryInUseError, DirectoryLock, holder_of
from tidelog.world.real.clock import SystemClock
from tidelog.world.real.disk import RealDisk
from tidelog.world.real.store import LmdbStore
from tidelog.world.real.work import InlineWork

META = "meta.properties"
STATE = "state"
VERSION = 1
_CONTROLLER = re.compile(r"(?P<node>[0-9]{1,10})@(?P<address>.+):(?P<directory>[A-Za-z0-9_-]+)")


@dataclass(frozen=True, slots=True)
class Meta:
    """The content of `meta.properties`."""

    cluster_id: str
    node: NodeId
    directory: UUID
    version: int = VERSION

    def text(self) -> str:
        return (
            f"version={self.version}\ncluster.id={self.cluster_id}\nnode.id={self.node}\n"
            f"directory.id={to_text(self.directory)}\n"
        )


class FormattedAlreadyError(StorageError):
    """The directories are formatted already."""

    @property
    def advice(self) -> str:
        return "--ignore-formatted leaves such directories as they are and formats the others"


def read_meta(directory: str) -> Meta | None:
    """Return the meta of a directory, or None; raises `CorruptStateError` for an invalid file."""
    path = os.path.join(directory, META)
    try:
        with open(path, encoding="utf-8") as file:
            text = file.read(10_000)
    except FileNotFoundError:
        return None
    except (OSError, UnicodeDecodeError) as error:
        raise CorruptStateError(f"{path}: {error}", path=path) from error
    fields = dict(line.split("=", 1) for line in text.splitlines() if "=" in line and not line.startswith("#"))
    directory_id = from_text(fields.get("directory.id", ""))
    node, version, cluster_id = fields.get("node.id", ""), fields.get("version", ""), fields.get("cluster.id", "")
    if not node.isdecimal() or not version.isdecimal() or directory_id is None or not cluster_id:
        raise CorruptStateError(f"{path} does not say cluster, node and directory", path=path)
    if int(version) != VERSION:
        raise CorruptStateError(f"{path} is of version {version}; this program knows {VERSION}", path=path)
    return Meta(cluster_id, NodeId(int(node)), directory_id)


def write_meta(directory: str, meta: Meta) -> None:
    """Write the file atomically and durably."""
    path = os.path.join(directory, META)
    with open(path + ".new", "w", encoding="utf-8") as file:
        file.write(meta.text())
        file.flush()
        os.fsync(file.fileno())
    os.rename(path + ".new", path)
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


# The first voters.


@dataclass(frozen=True, slots=True)
class Voters:
    """The first voters; a directory of None is the id that this node's directory gets."""

    members: tuple[tuple[NodeId, str, UUID | None], ...]
    are_derived: bool = False


def derived_directory(cluster_id: str, node: int) -> UUID:
    """Return the directory id of a voter that is known only by its node id."""
    digest = hashlib.sha256(f"tidelog voter {node} of {cluster_id}".encode()).digest()
    return UUID(bytes=digest[:16], version=4)


def parse_controllers(text: str) -> Voters:
    """Parse `id@host:port:directory-id,...`; raises `InvalidRequestError` with the invalid item."""
    found: dict[NodeId, tuple[NodeId, str, UUID | None]] = {}
    for item in (part.strip() for part in text.split(",")):
        match = _CONTROLLER.fullmatch(item)
        directory = None if match is None else from_text(match["directory"])
        if match is None or directory is None:
            raise InvalidRequestError(
                f"--initial-controllers: {item!r} is not id@host:port:directory-id "
                "(a directory id has 22 characters: tidelog storage random-uuid)"
            )
        node = NodeId(int(match["node"]))
        try:
            address = str(parse_address(match["address"]))
        except ListenerError as error:
            raise InvalidRequestError(f"--initial-controllers: {item!r}: {error}") from error
        if node in found or directory in {known[2] for known in found.values()}:
            raise InvalidRequestError(f"--initial-controllers: {item!r}: its id or its directory id is there twice")
        found[node] = (node, address, directory)
    if len(found) > VOTERS_MAX:
        raise InvalidRequestError(f"--initial-controllers: {len(found)} voters, at most {VOTERS_MAX}")
    return Voters(tuple(found.values()))


def standalone(config: NodeConfig) -> Voters:
    return Voters(((config.node, str(config.own.advertised), None),))


def voters_of_file(config: NodeConfig, cluster_id: str) -> Voters:
    rows = tuple((node, address, derived_directory(cluster_id, node)) for node, address in config.voters)
    return Voters(rows, are_derived=True)


# Formatting.


@dataclass(frozen=True, slots=True)
class Formatted:
    path: str
    meta: Meta
    was_there: bool


async def format_node(
    config: NodeConfig, cluster_id: str, voters: Voters | None, *, ignore_formatted: bool, random: Random
) -> list[Formatted]:
    """Make every directory of the node ready. `voters` is for a controller; an empty one joins later.

    Nothing is written unless every directory may be.
    """
    if config.is_controller:
        assert voters is not None, "a controller has its voters"
        mine = [row for row in voters.members if row[0] == config.node]
        if voters.members and not mine:
            numbers = ", ".join(str(node) for node, _, _ in voters.members)
            raise InvalidRequestError(f"node {config.node} is a controller and not among the first voters {numbers}")
    states = [_state_of(path, cluster_id, config.node) for path in config.directories]
    formatted = [path for path, state in zip(config.directories, states, strict=True) if isinstance(state, Meta)]
    if formatted and not ignore_formatted:
        raise FormattedAlreadyError(f"{', '.join(formatted)}: formatted already", path=formatted[0])
    done = []
    for path, state in zip(config.directories, states, strict=True):
        if isinstance(state, Meta):
            done.append(Formatted(path, state, True))
            continue
        wanted = state or random_uuid(random)
        is_metadata = path == config.metadata_dir
        group = None
        if is_metadata and config.is_controller and voters is not None:
            own = [directory for node, _, directory in voters.members if node == config.node]
            wanted = state or (own[0] if own and own[0] is not None else wanted)
            group = voters
        done.append(Formatted(path, await _format(config, path, cluster_id, wanted, group), False))
    return done


def _state_of(path: str, cluster_id: str, node: NodeId) -> Meta | UUID | None:
    """Returns the state of a directory: `Meta` if it is formatted for this node, its id if it is partly formatted, or
    None if it is empty. Raises otherwise."""
    if not os.path.isdir(path):
        if os.path.lexists(path):
            raise StorageError(f"{path} is no directory", path=path)
        return None
    _check_unused(path)
    meta = read_meta(path)
    if meta is not None:
        check_owner(path, meta, cluster_id, node)
        return meta
    directory: UUID | None = None
    if os.path.exists(os.path.join(path, STATE, "data.mdb")):
        with LmdbStore(os.path.join(path, STATE), read_only=True) as store:
            directory = _begun(path, store, cluster_id, node)
    disk = RealDisk(path)
    if list_logs(disk).logs or (disk.exists(IDENTITY) and directory is None):
        raise StorageError(
            f"{path} holds logs, but no {META} says whose: it was put together by hand; "
            "empty it, or bring the file back",
            path=path,
        )
    return directory


def _begun(path: str, store: LmdbStore, cluster_id: str, node: NodeId) -> UUID | None:
    stored = store.get(FORMAT_KEY)
    if stored is not None:
        known_cluster, directory, known_node = unpack("format", stored)
        meta = Meta(known_cluster, NodeId(known_node), UUID(bytes=directory))
        check_owner(path, meta, cluster_id, node)
        return meta.directory
    return None


def _check_unused(path: str) -> None:
    holder = holder_of(path)
    if holder is not None:
        raise DirectoryInUseError(f"{path} is in use by process {holder[0]} ({holder[1]})", path=path, pid=holder[0])


def check_owner(path: str, meta: Meta, cluster_id: str, node: NodeId) -> None:
    if (meta.cluster_id, meta.node) != (cluster_id, node):
        raise WrongDirectoryError(
            f"{path} belongs to node {meta.node} of cluster {meta.cluster_id}, "
            f"this is node {node} of cluster {cluster_id}",
            path=path,
        )


async def _format(config: NodeConfig, path: str, cluster_id: str, directory: UUID, voters: Voters | None) -> Meta:
    os.makedirs(path, exist_ok=True)
    lock = DirectoryLock(path, who="tidelog storage format")
    try:
        with LmdbStore(os.path.join(path, STATE)) as store:
            if voters is not None and store.get(FORMAT_KEY) is None:
                await _format_raft(config, path, store, cluster_id, directory, voters)
            kept = await read_directory_id(store, DirectoryId(directory))
            if kept != directory:
                # A begun one without a controller's log: nothing refers to its id yet.
                await store.commit({DIRECTORY_ID: None})
                await read_directory_id(store, DirectoryId(directory))
        meta = Meta(cluster_id, config.node, directory)
        write_meta(path, meta)
    finally:
        lock.close()
    return meta


async def _format_raft(
    config: NodeConfig, path: str, store: LmdbStore, cluster_id: str, directory: UUID, voters: Voters
) -> None:
    name = config.own.name
    members = [
        Member(node, (directory if known is None else known).bytes, ((name, address),))
        for node, address, known in voters.members
    ]
    disk = RealDisk(path)
    storage = RaftStorage(
        disk=disk, store=store, work=InlineWork(), clock=SystemClock(), cluster_id=cluster_id, node=config.node
    )
    try:
        await storage.format(directory=directory.bytes, membership=Membership(tuple(sorted(members))))
    finally:
        await storage.close()
        disk.close()


# Inspection, and the check at every start.


@dataclass(slots=True)
class DirectoryReport:
    """A line of `tidelog storage info`."""

    path: str
    role: str
    """`metadata`, `logs` or `metadata, logs`."""
    meta: Meta | None = None
    logs: int = 0
    free_bytes: int | None = None
    problems: list[str] = field(default_factory=list)


def inspect(config: NodeConfig) -> list[DirectoryReport]:
    """Return the state and problems of a node's directories. Changes nothing."""
    reports = []
    for path in config.directories:
        roles = [
            *(["metadata"] if path == config.metadata_dir else []),
            *(["logs"] if config.is_broker and path in config.log_dirs else []),
        ]
        report = DirectoryReport(path, ", ".join(roles))
        try:
            _look(config, report)
        except TidelogError as error:
            report.problems.append(str(error))
        reports.append(report)
    metas = [report.meta for report in reports if report.meta is not None]
    for what, values in (("cluster id", {m.cluster_id for m in metas}), ("node id", {str(m.node) for m in metas})):
        if len(values) > 1:
            reports[0].problems.append(f"the directories do not have one {what}: {', '.join(sorted(values))}")
    if len({meta.directory for meta in metas}) < len(metas):
        reports[0].problems.append("two directories have one directory id: one is a copy of the other")
    return reports


def _look(config: NodeConfig, report: DirectoryReport) -> None:
    path = report.path
    if not os.path.isdir(path):
        report.problems.append("is no directory" if os.path.lexists(path) else "does not exist")
        return
    report.meta = read_meta(path)
    disk = RealDisk(path)
    report.free_bytes = disk.free_bytes()
    report.logs = len(list_logs(disk).logs)
    if report.meta is None:
        report.problems.append("is not formatted")
        return
    if report.meta.node != config.node:
        report.problems.append(f"belongs to node {report.meta.node}, this is node {config.node}")
    if not os.path.exists(os.path.join(path, STATE, "data.mdb")):
        report.problems.append("its state store is missing")
        return
    with LmdbStore(os.path.join(path, STATE), read_only=True) as store:
        if config.is_controller and path == config.metadata_dir and store.get(STATE_KEY) is None:
            report.problems.append("it was not formatted for a controller: epoch and vote are not there")


LOST_VOTER = "see docs/operations.md, 'A lost voter'"
"""Where the steps are, for messages that have no space for them."""


def replace_voter(config: NodeConfig, cluster_id: str = "ID") -> str:
    """Return the instructions to replace a voter whose disk is lost."""
    return (
        f"Replace the voter: `tidelog quorum remove --node-id {config.node}`, then `tidelog storage format --config "
        f"{config.path} --cluster-id {cluster_id} --no-initial-controllers`, start the node, and `tidelog quorum add "
        f"--node-id {config.node} --directory-id NEW --endpoint {config.own.advertised}` with the new directory id"
    )


def _not_formatted(config: NodeConfig, path: str) -> str:
    """What is wrong, and what is safe to do about it: a new directory and a lost one look the same."""
    new = f"tidelog storage format --config {config.path} --cluster-id ID"
    if path != config.metadata_dir:
        return (
            f"{path} is not formatted. If it is new, or its disk was replaced: {new} --ignore-formatted; it gets a new "
            "directory id, and replicas that were there are copied from other brokers"
        )
    if not config.is_controller:
        return (
            f"{path} is not formatted. If the node is new, or its disk was replaced: {new} --ignore-formatted; "
            "replicas that were there are copied from other brokers"
        )
    return (
        f"{path} is not formatted. If this node has never run: {new}, with the first voters (see docs/operations.md, "
        f"'A new cluster'). If its disk was lost or replaced, it must not come back as the voter that it was. "
        f"{replace_voter(config)}"
    )


def check_node(config: NodeConfig) -> tuple[str, dict[str, Meta]]:
    """(cluster id, directory -> meta) of the directories that can be used; raises if the node must not start.

    A log directory that is gone or cannot be read does not keep the node from starting, as long as it is not the one
    for metadata: its partitions are offline. One that belongs elsewhere does.
    """
    metas: dict[str, Meta] = {}
    own: Meta | None = None
    for path in config.directories:
        try:
            meta = read_meta(path)
        except CorruptStateError:
            if path == config.metadata_dir:
                raise
            continue
        if meta is None and (path == config.metadata_dir or os.path.isdir(path)):
            raise UnformattedDirectoryError(_not_formatted(config, path), path=path)
        if meta is None:
            continue
        own = own or meta
        check_owner(path, meta, own.cluster_id, config.node)
        metas[path] = meta
    assert own is not None, "the metadata directory is there, or this has raised"
    if len({meta.directory for meta in metas.values()}) < len(metas):
        raise StorageError("two log directories have one directory id: one is a copy of the other")
    return own.cluster_id, metas
