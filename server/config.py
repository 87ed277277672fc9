"""The configuration of a node: read once, checked as a whole; all problems are reported at once.

    file (TOML, or Kafka's server.properties) < TIDELOG_<KEY> of the environment

Every key is either a row of `settings_table`, which acts on this node, or a key of the cluster's state
(`metadata.config_table`). The latter are initial values: the active controller stores those that are not set in the
cluster's state, and logs those that differ (`server.initial_configs`).

A value of a key with a unit may carry it: 7d, 30s, 512MiB.
"""

from __future__ import annotations

import difflib
import os
import re
import socket
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from tidelog.metadata import configs
from tidelog.metadata.config_table import TABLES, Scope
from tidelog.model.errors import InvalidConfigError
from tidelog.model.ids import NodeId
from tidelog.security.secret_references import SecretReferenceError, resolve
from tidelog.security.secrets import HIDDEN
from tidelog.server.config_sources import (
    NOT_SETTINGS,
    PREFIX,
    RawSetting,
    SourceError,
    read_file,
    unknown_variable,
    variable_of,
)
from tidelog.server.listeners import (
    Address,
    Listener,
    ListenerError,
    ListenerKind,
    ListenerSettings,
    between_brokers,
    build,
    http_address,
    parse_address,
)
from tidelog.server.settings_table import ALIASES, BROKER, CONTROLLER, TABLE, Kind, Setting, Value
from tidelog.services.acl_authorizer import parse_super_users

_UNITS = {
    "ms": {"ms": 1, "s": 1000, "min": 60_000, "m": 60_000, "h": 3_600_000, "d": 86_400_000, "w": 604_800_000},
    "s": {"s": 1, "min": 60, "m": 60, "h": 3_600, "d": 86_400, "w": 604_800},
    "min": {"min": 1, "m": 1, "h": 60, "d": 1_440, "w": 10_080},
    "bytes": {
        "b": 1,
        "kb": 1000,
        "mb": 10**6,
        "gb": 10**9,
        "tb": 10**12,
        "kib": 1 << 10,
        "mib": 1 << 20,
        "gib": 1 << 30,
        "tib": 1 << 40,
    },
}
_INTEGER = re.compile(r"[+-]?[0-9]{1,20}")
_WITH_UNIT = re.compile(r"([0-9]{1,18})\s*([A-Za-z]{1,3})")
_VOTER = re.compile(r"(?P<node>[0-9]{1,10})@(?P<address>.+)")
_SHOWN_MAX = 60


class ConfigError(Exception):
    """The problems of a node's configuration, one sentence each."""

    def __init__(self, where: str, problems: Iterable[str]) -> None:
        self.problems = tuple(problems)
        count = len(self.problems)
        first = f"{where}: " + (self.problems[0] if count == 1 else f"{count} things are wrong")
        super().__init__("\n".join([first, *(f"  {problem}" for problem in self.problems if count > 1)]))


@dataclass(frozen=True, slots=True)
class Entry:
    """A line of `tidelog config show`."""

    key: str
    value: str
    source: str
    """A file, a variable, or `default`."""
    default: str
    doc: str
    is_of_cluster: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeConfig:
    """A checked configuration."""

    path: str
    node: NodeId
    is_broker: bool
    is_controller: bool
    log_dirs: tuple[str, ...]
    metadata_dir: str
    listeners: tuple[Listener, ...]
    """All listeners; the first is the one for other nodes (`own`)."""
    http: Address | None
    voters: tuple[tuple[NodeId, str], ...]
    """Controllers as (node, host:port)."""
    bootstrap: tuple[str, ...]
    """Addresses of controllers with unknown ids."""
    rack: str | None
    values: Mapping[str, Value]
    """Every key of the settings table that has a value."""
    cluster: Mapping[str, str]
    """Keys of the cluster's state that the file sets."""
    entries: tuple[Entry, ...] = ()
    ignored: tuple[str, ...] = ()
    """Unknown keys of a `.properties` file."""
    warnings: tuple[str, ...] = ()
    """Environment variables with the prefix that are no settings."""

    @property
    def own(self) -> Listener:
        """The listener for other nodes: of a controller the controller listener, else the one between brokers."""
        return self.listeners[0]

    @property
    def between_brokers(self) -> Listener:
        """`own`, unless `inter.broker.listener.name` names another."""
        name = self.values.get("inter.broker.listener.name")
        return between_brokers(self.listeners, None if name is None else str(name))

    @property
    def between_nodes(self) -> tuple[Listener, ...]:
        return tuple(one for one in self.listeners if one.kind is ListenerKind.NODE)

    @property
    def grpc(self) -> tuple[Listener, ...]:
        return tuple(one for one in self.listeners if one.kind is ListenerKind.GRPC)

    @property
    def kafka(self) -> tuple[Listener, ...]:
        """Served by brokers only."""
        return tuple(one for one in self.listeners if one.kind is ListenerKind.KAFKA) if self.is_broker else ()

    @property
    def directories(self) -> tuple[str, ...]:
        """All directories of the node, the metadata directory first."""
        logs = self.log_dirs if self.is_broker else ()
        return (self.metadata_dir, *(path for path in logs if path != self.metadata_dir))

    def number(self, key: str) -> int:
        value = self.values[key]
        assert type(value) is int, f"{key} is an integer"
        return value

    def names(self, key: str) -> tuple[str, ...]:
        """Return listener names in upper case, as they are compared."""
        value = self.values.get(key, ())
        assert isinstance(value, tuple), f"{key} is a list"
        return tuple(name.upper() for name in value)

    def text(self, key: str) -> str:
        value = self.values[key]
        assert isinstance(value, str), f"{key} is text"
        return value


def load(path: str, environ: Mapping[str, str] | None = None) -> NodeConfig:
    """Read and check a file; raises `ConfigError`, or OSError if the file cannot be read."""
    environ = os.environ if environ is None else environ
    try:
        found, is_properties = read_file(path)
    except SourceError as error:
        raise ConfigError(path, [str(error)]) from error
    reader = _Reader(path, environ, is_properties=is_properties)
    reader.take_file(found)
    reader.take_environment()
    return reader.finish()


@dataclass(slots=True)
class _Reader:
    path: str
    environ: Mapping[str, str]
    is_properties: bool
    problems: list[str] = field(default_factory=list)
    ignored: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    raw: dict[str, RawSetting] = field(default_factory=dict)
    cluster: dict[str, RawSetting] = field(default_factory=dict)
    values: dict[str, Value] = field(default_factory=dict)

    # Sources.

    def take_file(self, found: Mapping[str, str]) -> None:
        for key, text in found.items():
            self._take(key, text, os.path.basename(self.path))

    def take_environment(self) -> None:
        variables = {variable_of(key): key for key in (*TABLE, *ALIASES, *TABLES[Scope.CLUSTER])}
        for variable, text in sorted(self.environ.items()):
            if not variable.startswith(PREFIX) or variable in NOT_SETTINGS:
                continue
            key = variables.get(variable)
            if key is None:
                self.warnings.append(unknown_variable(variable, variables))
                continue
            self.raw.pop(ALIASES.get(key, key), None)
            self.cluster.pop(key, None)
            self._take(key, text, variable)

    def _take(self, key: str, text: str, source: str) -> None:
        name = ALIASES.get(key, key)
        table = self.raw if name in TABLE else self.cluster
        if name not in TABLE and name not in TABLES[Scope.CLUSTER]:
            self._unknown(key, text)
            return
        if name in table:
            self.problems.append(f"{key}: the same as {name}, which is given too")
            return
        try:
            filled, is_secret = resolve(text, self.environ)
        except SecretReferenceError as error:
            self.problems.append(f"{key}: {error}")
            return
        table[name] = RawSetting(filled.strip(), source, is_secret)

    def _unknown(self, key: str, text: str) -> None:
        if self.is_properties:
            self.ignored.append(key)
            return
        known = (*TABLE, *ALIASES, *TABLES[Scope.CLUSTER])
        near = difflib.get_close_matches(key, known, n=1, cutoff=0.6) if len(key) < 100 else []
        hint = f"; did you mean {near[0]}?" if near else ""
        topic = TABLES[Scope.TOPIC].get(key)
        if topic is not None and topic.server:
            hint = f"; it is a topic config, its default for all topics is {topic.server[0][0]}"
        self.problems.append(f"{_shown(key)}={_shown(text)}: no such key{hint}")

    # Values.

    def finish(self) -> NodeConfig:
        for row in TABLE.values():
            self._read(row)
        for key, raw in self.cluster.items():
            self._read_cluster(key, raw)
        if "node.id" not in self.values and "node.id" not in self.raw:
            self.problems.append("node.id is missing: a number of its own for each node, from 0 on")
        if not self.values.get("log.dirs") and "log.dirs" not in self.raw:
            self.problems.append("log.dirs is missing: the directory, or directories, for this node's data")
        listeners = self._listeners()
        http = self._http(listeners)
        voters = self._voters()
        bootstrap = self._bootstrap()
        if not self.problems:
            self._check_whole(voters, bootstrap)
        if self.problems:
            raise ConfigError(self.path, self.problems)
        roles, dirs = self._list("process.roles"), self._paths(self._list("log.dirs"))
        (metadata_dir,) = self._paths([str(self.values.get("metadata.log.dir", dirs[0]))])
        rack = self.values.get("broker.rack")
        node = self.values["node.id"]
        assert isinstance(node, int), "checked above"
        return NodeConfig(
            path=self.path,
            node=NodeId(node),
            is_broker=BROKER in roles,
            is_controller=CONTROLLER in roles,
            log_dirs=dirs,
            metadata_dir=metadata_dir,
            listeners=listeners,
            http=http,
            voters=voters,
            bootstrap=bootstrap,
            rack=None if rack is None else str(rack),
            values=dict(self.values),
            cluster={key: raw.text for key, raw in self.cluster.items()},
            entries=tuple(self._entries()),
            ignored=tuple(self.ignored),
            warnings=tuple(self.warnings),
        )

    def _paths(self, paths: Iterable[str]) -> tuple[str, ...]:
        """Resolve relative paths against the directory of the file."""
        base = os.path.dirname(os.path.abspath(self.path))
        return tuple(os.path.normpath(os.path.join(base, os.path.expanduser(path))) for path in paths)

    def _list(self, key: str) -> tuple[str, ...]:
        value = self.values.get(key, ())
        assert isinstance(value, tuple), f"{key} is a list"
        return value

    def _read(self, row: Setting) -> None:
        raw = self.raw.get(row.name)
        if raw is None:
            if row.default is not None:
                self.values[row.name] = row.default
            return
        value = read_value(row, raw.text)
        if value is None:
            shown = HIDDEN if raw.is_secret else _shown(raw.text)
            self.problems.append(f"{row.name}={shown} ({raw.source}): {allowed(row)}")
        else:
            self.values[row.name] = value

    def _read_cluster(self, key: str, raw: RawSetting) -> None:
        row = TABLES[Scope.CLUSTER][key]
        text = with_unit(raw.text, row.unit)
        try:
            configs.check(Scope.CLUSTER, key, text)
        except InvalidConfigError as error:
            self.problems.append(f"{error} ({raw.source})")
        self.cluster[key] = RawSetting(text, raw.source, raw.is_secret)

    def _listeners(self) -> tuple[Listener, ...]:
        inter_broker = self.values.get("inter.broker.listener.name")
        settings = ListenerSettings(
            listeners=self._list("listeners"),
            advertised=self._list("advertised.listeners"),
            protocols=self._list("listener.security.protocol.map"),
            kinds=self._list("listener.protocols"),
            controller_names=self._list("controller.listener.names"),
            inter_broker=None if inter_broker is None else str(inter_broker),
            is_broker=BROKER in self._list("process.roles"),
            is_controller=CONTROLLER in self._list("process.roles"),
            has_kafka=BROKER in self._list("process.roles") and self.values.get("kafka.enable") is True,
        )
        try:
            return build(settings, socket.gethostname())
        except ListenerError as error:
            self.problems.append(f"listeners: {error}")
            return ()

    def _http(self, listeners: tuple[Listener, ...]) -> Address | None:
        text = self.values.get("http.listener")
        try:
            if text == "none" or not listeners:
                return None
            address = http_address(listeners) if text is None else parse_address(str(text))
            taken = [listener.name for listener in listeners if listener.address.port == address.port]
            if taken:
                raise ListenerError(f"port {address.port} is that of {taken[0]}")
            return address
        except ListenerError as error:
            self.problems.append(f"http.listener: {error}")
            return None

    def _voters(self) -> tuple[tuple[NodeId, str], ...]:
        found: dict[NodeId, str] = {}
        for item in self._list("controller.quorum.voters"):
            match = _VOTER.fullmatch(item)
            try:
                if match is None or NodeId(int(match["node"])) in found:
                    raise ListenerError(f"{item!r} is not id@host:port, or its id is there twice")
                found[NodeId(int(match["node"]))] = str(parse_address(match["address"]))
            except ListenerError as error:
                self.problems.append(f"controller.quorum.voters: {error}")
        return tuple(found.items())

    def _bootstrap(self) -> tuple[str, ...]:
        found = []
        for item in self._list("controller.quorum.bootstrap.servers"):
            try:
                found.append(str(parse_address(item)))
            except ListenerError as error:
                self.problems.append(f"controller.quorum.bootstrap.servers: {error}")
        return tuple(found)

    def _check_whole(self, voters: tuple[tuple[NodeId, str], ...], bootstrap: tuple[str, ...]) -> None:
        is_controller = CONTROLLER in self._list("process.roles")
        node = self.values["node.id"]
        if not is_controller and not voters and not bootstrap:
            self.problems.append(
                "a broker alone must know the controllers: set controller.quorum.voters=id@host:port,... "
                "or controller.quorum.bootstrap.servers=host:port,..."
            )
        if not is_controller and node in dict(voters):
            self.problems.append(f"controller.quorum.voters has node {node}, which is no controller by process.roles")
        if len(set(self._paths(self._list("log.dirs")))) < len(self._list("log.dirs")):
            self.problems.append("log.dirs names one directory twice")
        self._check_authorizer()

    def _check_authorizer(self) -> None:
        super_users = str(self.values.get("super.users", ""))
        try:
            has_super_users = bool(parse_super_users(super_users))
        except InvalidConfigError as error:
            self.problems.append(str(error))
            return
        is_open = self.values["allow.everyone.if.no.acl.found"] is True
        if self.values["authorizer"] == "acl" and not has_super_users and not is_open:
            self.problems.append(
                "authorizer=acl without super.users: nobody could create the first ACL: "
                "set super.users=User:name or allow.everyone.if.no.acl.found=true"
            )

    def _entries(self) -> Iterable[Entry]:
        for key, row in TABLE.items():
            raw = self.raw.get(key)
            default = row.default_text or as_text(row.default)
            value = default if raw is None else HIDDEN if raw.is_secret else as_text(self.values[key])
            yield Entry(key, value, "default" if raw is None else raw.source, default, row.doc)
        for key, raw in sorted(self.cluster.items()):
            of_cluster = TABLES[Scope.CLUSTER][key]
            default = of_cluster.default_text or configs.as_text(of_cluster.default)
            shown = HIDDEN if raw.is_secret else raw.text
            yield Entry(key, shown, raw.source, default, of_cluster.doc, is_of_cluster=True)


def with_unit(text: str, unit: str) -> str:
    """Convert a text such as 7d or 512MiB to a number of `unit`s; return any other text unchanged."""
    match = _WITH_UNIT.fullmatch(text)
    factor = _UNITS.get(unit, {}).get(match[2].lower()) if match else None
    return text if match is None or factor is None else str(int(match[1]) * factor)


def read_value(row: Setting, text: str) -> Value | None:
    """Return the value of a setting; None if the text is invalid."""
    match row.kind:
        case Kind.INT:
            text = with_unit(text, row.unit)
            if not _INTEGER.fullmatch(text):
                return None
            value = int(text)
            is_inside = (row.least is None or value >= row.least) and (row.most is None or value <= row.most)
            return value if is_inside else None
        case Kind.BOOL:
            return {"true": True, "false": False}.get(text.lower())
        case Kind.CHOICE:
            return text.lower() if text.lower() in row.choices else None
        case Kind.TEXT:
            return text if text and text.isprintable() else None
        case Kind.LIST:
            items = configs.split_list(text)
            is_sound = 0 < len(items) == len(set(items)) and (not row.choices or set(items) <= set(row.choices))
            return items if is_sound else None


def allowed(row: Setting) -> str:
    """Describe the allowed values."""
    match row.kind:
        case Kind.INT:
            words = f"an integer from {row.least}" + (f" to {row.most}" if row.most != (1 << 63) - 1 else "")
            return words + (f" ({row.unit})" if row.unit else "")
        case Kind.BOOL:
            return "true or false"
        case Kind.CHOICE:
            return "one of " + ", ".join(row.choices)
        case Kind.TEXT:
            return row.form
        case Kind.LIST:
            return "a list of " + (", ".join(row.choices) if row.choices else row.form)


def as_text(value: Value | None) -> str:
    return configs.as_text(value)


def _shown(text: str) -> str:
    return text if len(text) <= _SHOWN_MAX else text[:_SHOWN_MAX] + "..."
