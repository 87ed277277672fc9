"""The listeners of a node and their advertised addresses. Pure.

A listener has a name, an address, a security protocol and a kind: `node` (inside the cluster), `grpc` (our API) or
`kafka` (its wire protocol). Every node has at least one `node` and one `grpc` listener, every broker a `kafka` one.
A kind without a listener gets a port at the default distance from a listed one (Kafka 9092, node 9192, gRPC 9292, HTTP
9392). So a file written for Kafka needs no change, and nodes on one machine that differ by one port differ everywhere.

Clients receive the addresses of the listener that they connected to, by its name: it is the same on all brokers. Of
several `node` listeners one serves controllers (Raft, requests of brokers to controllers), one replication between
brokers; each answers everything, so nodes with different settings still reach each other.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from enum import Enum

from tidelog.rpc.protocol_sniffing import WireProtocol

PLAINTEXT = "PLAINTEXT"
KNOWN_PROTOCOLS = (PLAINTEXT, "SSL", "SASL_PLAINTEXT", "SASL_SSL")
PORT_MAX = 65_535
INTERNAL = "INTERNAL"
LISTENERS_MAX = 16
"""As many as a broker may register."""
_URI = re.compile(r"(?P<name>[A-Za-z][A-Za-z0-9_-]*)://(?P<address>.*)")
_ADDRESS = re.compile(r"(?:(?P<host>[^\[\]:/\s]*)|\[(?P<v6>[0-9A-Fa-f:.%\w]+)\]):(?P<port>[0-9]{1,5})")
_ANY_HOST = ("", "0.0.0.0", "::")


class ListenerKind(Enum):
    """What a listener serves; the values are the default ports."""

    KAFKA = 9092
    NODE = 9192
    GRPC = 9292
    HTTP = 9392


KINDS = {"grpc": ListenerKind.GRPC, "kafka": ListenerKind.KAFKA, "node": ListenerKind.NODE}


class ListenerError(ValueError):
    """An invalid listener; the message says why."""


@dataclass(frozen=True, slots=True)
class Address:
    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    @property
    def to_listen_on(self) -> str:
        """The address in gRPC's form: an empty host is every interface."""
        return str(replace(self, host="::")) if self.host == "" else str(self)

    @property
    def is_any_host(self) -> bool:
        return self.host in _ANY_HOST


@dataclass(frozen=True, slots=True)
class Listener:
    name: str
    address: Address
    advertised: Address
    kind: ListenerKind
    protocol: str = PLAINTEXT


def parse_address(text: str, *, port_least: int = 1) -> Address:
    match = _ADDRESS.fullmatch(text)
    if match is None or not port_least <= int(match["port"]) <= PORT_MAX:
        raise ListenerError(f"{text!r} is not host:port with a port from {port_least} to {PORT_MAX}")
    return Address(match["v6"] or match["host"] or "", int(match["port"]))


def parse_uri(text: str) -> tuple[str, Address]:
    """Parse `NAME://host:port`; return (upper case name, address)."""
    match = _URI.fullmatch(text)
    if match is None:
        raise ListenerError(f"{text!r} is not NAME://host:port")
    return match["name"].upper(), parse_address(match["address"])


def parse_pairs(items: Sequence[str], *, allowed: Sequence[str]) -> dict[str, str]:
    """Parse `NAME:value` items; values ignore case."""
    found: dict[str, str] = {}
    spelling = {value.lower(): value for value in allowed}
    for item in items:
        name, colon, value = item.partition(":")
        if not colon or value.lower() not in spelling:
            raise ListenerError(f"{item!r} is not NAME:value with one of {', '.join(allowed)}")
        if name.upper() in found:
            raise ListenerError(f"{name!r} is there twice")
        found[name.upper()] = spelling[value.lower()]
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class ListenerSettings:
    """The settings about listeners, as text."""

    listeners: Sequence[str]
    advertised: Sequence[str]
    protocols: Sequence[str]
    kinds: Sequence[str]
    controller_names: Sequence[str]
    inter_broker: str | None
    is_broker: bool
    is_controller: bool
    has_kafka: bool
    """Whether a Kafka listener is added if none is listed: the node is a broker."""


def build(settings: ListenerSettings, host_name: str) -> tuple[Listener, ...]:
    """Return the listeners of a node: first its own address in the cluster (the controller listener, else the one
    between brokers), then other `node` listeners, then by name. Raises `ListenerError`."""
    listed = _by_name(settings.listeners, "listeners")
    advertised = _by_name(settings.advertised, "advertised.listeners")
    protocols = parse_pairs(settings.protocols, allowed=KNOWN_PROTOCOLS)
    kinds = {name: KINDS[kind] for name, kind in parse_pairs(settings.kinds, allowed=tuple(KINDS)).items()}
    found = {name: (address, _kind_of(name, settings, kinds)) for name, address in listed.items()}
    own_name = _own_name(settings)
    needed = [
        (ListenerKind.NODE, own_name),
        (ListenerKind.GRPC, "GRPC"),
        *([(ListenerKind.KAFKA, "KAFKA")] if settings.has_kafka else []),
    ]
    for kind, name in needed:
        if not any(known is kind for _, known in found.values()):
            found[name] = (_at_its_distance(kind, list(found.values())), kind)
    listeners = [
        Listener(name, address, _advertised(name, address, advertised, host_name), kind, _protocol(name, protocols))
        for name, (address, kind) in found.items()
    ]
    if unknown := sorted(advertised.keys() - found.keys()):
        raise ListenerError(f"advertised.listeners names {', '.join(unknown)}, and there is no such listener")
    _check_inter_broker(settings, found.keys())
    _check_apart(listeners)
    own = _own(listeners, settings)
    return tuple(sorted(listeners, key=lambda one: (one is not own, one.kind is not ListenerKind.NODE, one.name)))


def between_brokers(listeners: Sequence[Listener], inter_broker: str | None) -> Listener:
    """Return the listener that `inter.broker.listener.name` names, else the first one that `build` returned."""
    name = (inter_broker or INTERNAL).upper()
    return next((one for one in listeners if one.name == name and one.kind is ListenerKind.NODE), listeners[0])


def _by_name(items: Sequence[str], what: str) -> dict[str, Address]:
    found: dict[str, Address] = {}
    for item in items:
        name, address = parse_uri(item)
        if name in found:
            raise ListenerError(f"{what} has {name} twice")
        found[name] = address
    return found


def _own_name(settings: ListenerSettings) -> str:
    if settings.is_controller:
        return next((name.upper() for name in settings.controller_names), "CONTROLLER")
    return INTERNAL


def _own(listeners: Sequence[Listener], settings: ListenerSettings) -> Listener:
    names = [name.upper() for name in settings.controller_names] if settings.is_controller else []
    names += [(settings.inter_broker or INTERNAL).upper(), INTERNAL]
    nodes = sorted((one for one in listeners if one.kind is ListenerKind.NODE), key=lambda one: one.name)
    return next((one for name in names for one in nodes if one.name == name), nodes[0])


def _check_inter_broker(settings: ListenerSettings, names: Collection[str]) -> None:
    """Raise if no listener has this name. A file without `listeners` may be Kafka's, whose default is PLAINTEXT."""
    name = (settings.inter_broker or "").upper()
    if name and settings.is_broker and settings.listeners and name not in names:
        raise ListenerError(f"inter.broker.listener.name is {name}, and there is no such listener")


def _kind_of(name: str, settings: ListenerSettings, kinds: dict[str, ListenerKind]) -> ListenerKind:
    if name in kinds:
        return kinds[name]
    # A file written for Kafka names its client listener here, by the protocol; that stays a client listener.
    inter_broker = (settings.inter_broker or INTERNAL).upper()
    if name == inter_broker and name not in (*KNOWN_PROTOCOLS, "KAFKA") and not name.startswith("GRPC"):
        return ListenerKind.NODE
    if name == INTERNAL or name in {known.upper() for known in settings.controller_names}:
        return ListenerKind.NODE
    if name.startswith("GRPC"):
        return ListenerKind.GRPC
    return ListenerKind.KAFKA


def _at_its_distance(kind: ListenerKind, known: list[tuple[Address, ListenerKind]]) -> Address:
    for near in (ListenerKind.KAFKA, ListenerKind.GRPC, ListenerKind.NODE):
        for address, other in known:
            if other is near:
                port = address.port + kind.value - near.value
                if not 1 <= port <= PORT_MAX:
                    raise ListenerError(f"no listener for {kind.name}, and port {port} is none: list it")
                return Address(address.host, port)
    return Address("", kind.value)


def http_address(listeners: Sequence[Listener]) -> Address:
    """Return the default HTTP address."""
    return _at_its_distance(ListenerKind.HTTP, [(listener.address, listener.kind) for listener in listeners])


def listener_hints(listeners: Sequence[Listener], http: Address | None = None) -> dict[WireProtocol, str]:
    """Return a hint for clients that connect to the wrong port, by the protocol that they use."""
    found = {WireProtocol.TLS: "it is plain text; connect without TLS"}
    if http is not None:
        found[WireProtocol.HTTP] = f"HTTP is on port {http.port}"
    for listener in listeners:
        if listener.kind is ListenerKind.GRPC:
            found.setdefault(WireProtocol.GRPC, f"gRPC is on port {listener.advertised.port}")
        elif listener.kind is ListenerKind.KAFKA:
            found.setdefault(WireProtocol.KAFKA, f"Kafka clients belong on port {listener.advertised.port}")
    found.setdefault(WireProtocol.KAFKA, "this node has no Kafka listener")
    return found


def _advertised(name: str, address: Address, advertised: dict[str, Address], host_name: str) -> Address:
    explicit = advertised.get(name)
    if explicit is not None:
        if explicit.is_any_host:
            raise ListenerError(f"advertised.listeners: {name} needs a host that others can reach, not {explicit}")
        return explicit
    return replace(address, host=host_name) if address.is_any_host else address


def _protocol(name: str, protocols: dict[str, str]) -> str:
    protocol = protocols.get(name, name if name in KNOWN_PROTOCOLS else PLAINTEXT)
    if protocol != PLAINTEXT:
        raise ListenerError(f"listener {name} wants {protocol}; only {PLAINTEXT} is there so far")
    return protocol


def _check_apart(listeners: Sequence[Listener]) -> None:
    if len(listeners) > LISTENERS_MAX:
        raise ListenerError(f"there are {len(listeners)} listeners; a node has at most {LISTENERS_MAX}")
    places: dict[int, list[Listener]] = {}
    for listener in listeners:
        for other in places.setdefault(listener.address.port, []):
            if other.address.host == listener.address.host or other.address.is_any_host or listener.address.is_any_host:
                raise ListenerError(f"{other.name} and {listener.name} listen on one port, {listener.address.port}")
        places[listener.address.port].append(listener)
