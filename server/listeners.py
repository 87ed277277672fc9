"""Where a node listens, and where others are told to find it. Pure.

A listener has a name, an address, a security protocol and a door: `node` (inside of the cluster), `grpc` (our API) or
`kafka` (its wire protocol). Every node has one or more of `node` and of `grpc`, every broker of `kafka`. A door that is
not listed stands at its usual distance from one that is (Kafka 9092, node 9192, gRPC 9292, HTTP 9392). So a file
written for Kafka needs no change, and nodes on one machine that differ by one port differ by one everywhere.

Clients are told the addresses of the listener that they came through, by its name: it has the same name on all brokers.
Of several `node` doors one is for controllers (Raft, and what brokers say to controllers), one is between brokers
(replication); each answers everything, so nodes that are set up differently still find each other.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from enum import Enum

from tidelog.rpc.first_bytes import Speech

PLAINTEXT = "PLAINTEXT"
KNOWN_PROTOCOLS = (PLAINTEXT, "SSL", "SASL_PLAINTEXT", "SASL_SSL")
PORT_MAX = 65_535
INTERNAL = "INTERNAL"
LISTENERS_MAX = 16
"""As many as a broker may register."""
_URI = re.compile(r"(?P<name>[A-Za-z][A-Za-z0-9_-]*)://(?P<address>.*)")
_ADDRESS = re.compile(r"(?:(?P<host>[^\[\]:/\s]*)|\[(?P<v6>[0-9A-Fa-f:.%\w]+)\]):(?P<port>[0-9]{1,5})")
_ANY_HOST = ("", "0.0.0.0", "::")


class Door(Enum):
    """The values are the usual ports."""

    KAFKA = 9092
    NODE = 9192
    GRPC = 9292
    HTTP = 9392


DOORS = {"grpc": Door.GRPC, "kafka": Door.KAFKA, "node": Door.NODE}


class ListenerError(ValueError):
    """What is wrong with a listener, in words."""


@dataclass(frozen=True, slots=True)
class Address:
    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    @property
    def to_listen_on(self) -> str:
        """As gRPC takes it: no host is every interface."""
        return str(replace(self, host="::")) if self.host == "" else str(self)

    @property
    def is_any_host(self) -> bool:
        return self.host in _ANY_HOST


@dataclass(frozen=True, slots=True)
class Listener:
    name: str
    address: Address
    advertised: Address
    door: Door
    protocol: str = PLAINTEXT


def parse_address(text: str, *, port_least: int = 1) -> Address:
    match = _ADDRESS.fullmatch(text)
    if match is None or not port_least <= int(match["port"]) <= PORT_MAX:
        raise ListenerError(f"{text!r} is not host:port with a port from {port_least} to {PORT_MAX}")
    return Address(match["v6"] or match["host"] or "", int(match["port"]))


def parse_uri(text: str) -> tuple[str, Address]:
    """(name in capitals, address) of `NAME://host:port`."""
    match = _URI.fullmatch(text)
    if match is None:
        raise ListenerError(f"{text!r} is not NAME://host:port")
    return match["name"].upper(), parse_address(match["address"])


def parse_pairs(items: Sequence[str], *, allowed: Sequence[str]) -> dict[str, str]:
    """`NAME:value` items; values are compared without regard to case."""
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
class Wanted:
    """What the settings say about listeners, as text."""

    listeners: Sequence[str]
    advertised: Sequence[str]
    protocols: Sequence[str]
    doors: Sequence[str]
    controller_names: Sequence[str]
    inter_broker: str | None
    is_broker: bool
    is_controller: bool
    has_kafka: bool
    """It is a broker, and a Kafka listener is opened where none is listed."""


def build(wanted: Wanted, host_name: str) -> tuple[Listener, ...]:
    """The listeners of a node: first the one that others know it by (of a controller the controllers', else the one
    between brokers), then those between nodes, then by name. Raises `ListenerError`."""
    given = _by_name(wanted.listeners, "listeners")
    advertised = _by_name(wanted.advertised, "advertised.listeners")
    protocols = parse_pairs(wanted.protocols, allowed=KNOWN_PROTOCOLS)
    doors = {name: DOORS[door] for name, door in parse_pairs(wanted.doors, allowed=tuple(DOORS)).items()}
    found = {name: (address, _door(name, wanted, doors)) for name, address in given.items()}
    own_name = _own_name(wanted)
    needed = [(Door.NODE, own_name), (Door.GRPC, "GRPC"), *([(Door.KAFKA, "KAFKA")] if wanted.has_kafka else [])]
    for door, name in needed:
        if not any(known is door for _, known in found.values()):
            found[name] = (_at_its_distance(door, list(found.values())), door)
    listeners = [
        Listener(name, address, _advertised(name, address, advertised, host_name), door, _protocol(name, protocols))
        for name, (address, door) in found.items()
    ]
    if unknown := sorted(advertised.keys() - found.keys()):
        raise ListenerError(f"advertised.listeners names {', '.join(unknown)}, and there is no such listener")
    _check_inter_broker(wanted, found.keys())
    _check_apart(listeners)
    own = _own(listeners, wanted)
    return tuple(sorted(listeners, key=lambda one: (one is not own, one.door is not Door.NODE, one.name)))


def between_brokers(listeners: Sequence[Listener], inter_broker: str | None) -> Listener:
    """Of what `build` returns: the one that `inter.broker.listener.name` names, else the first."""
    name = (inter_broker or INTERNAL).upper()
    return next((one for one in listeners if one.name == name and one.door is Door.NODE), listeners[0])


def _by_name(items: Sequence[str], what: str) -> dict[str, Address]:
    found: dict[str, Address] = {}
    for item in items:
        name, address = parse_uri(item)
        if name in found:
            raise ListenerError(f"{what} has {name} twice")
        found[name] = address
    return found


def _own_name(wanted: Wanted) -> str:
    if wanted.is_controller:
        return next((name.upper() for name in wanted.controller_names), "CONTROLLER")
    return INTERNAL


def _own(listeners: Sequence[Listener], wanted: Wanted) -> Listener:
    names = [name.upper() for name in wanted.controller_names] if wanted.is_controller else []
    names += [(wanted.inter_broker or INTERNAL).upper(), INTERNAL]
    nodes = sorted((one for one in listeners if one.door is Door.NODE), key=lambda one: one.name)
    return next((one for name in names for one in nodes if one.name == name), nodes[0])


def _check_inter_broker(wanted: Wanted, names: Collection[str]) -> None:
    """A file without `listeners` may be Kafka's, whose default is PLAINTEXT."""
    name = (wanted.inter_broker or "").upper()
    if name and wanted.is_broker and wanted.listeners and name not in names:
        raise ListenerError(f"inter.broker.listener.name is {name}, and there is no such listener")


def _door(name: str, wanted: Wanted, doors: dict[str, Door]) -> Door:
    if name in doors:
        return doors[name]
    # A file of Kafka's names its clients' listener here, by the protocol; that stays the clients'.
    inter_broker = (wanted.inter_broker or INTERNAL).upper()
    if name == inter_broker and name not in (*KNOWN_PROTOCOLS, "KAFKA") and not name.startswith("GRPC"):
        return Door.NODE
    if name == INTERNAL or name in {known.upper() for known in wanted.controller_names}:
        return Door.NODE
    if name.startswith("GRPC"):
        return Door.GRPC
    return Door.KAFKA


def _at_its_distance(door: Door, known: list[tuple[Address, Door]]) -> Address:
    for near in (Door.KAFKA, Door.GRPC, Door.NODE):
        for address, other in known:
            if other is near:
                port = address.port + door.value - near.value
                if not 1 <= port <= PORT_MAX:
                    raise ListenerError(f"no listener for {door.name}, and port {port} is none: list it")
                return Address(address.host, port)
    return Address("", door.value)


def http_address(listeners: Sequence[Listener]) -> Address:
    """Where HTTP is if nothing is said."""
    return _at_its_distance(Door.HTTP, [(listener.address, listener.door) for listener in listeners])


def where_doors_are(listeners: Sequence[Listener], http: Address | None = None) -> dict[Speech, str]:
    """For who has come to the wrong one: where it belongs."""
    found = {Speech.TLS: "it is plain text; connect without TLS"}
    if http is not None:
        found[Speech.HTTP] = f"HTTP is on port {http.port}"
    for listener in listeners:
        if listener.door is Door.GRPC:
            found.setdefault(Speech.GRPC, f"gRPC is on port {listener.advertised.port}")
        elif listener.door is Door.KAFKA:
            found.setdefault(Speech.KAFKA, f"Kafka clients belong on port {listener.advertised.port}")
    found.setdefault(Speech.KAFKA, "this node has no Kafka listener")
    return found


def _advertised(name: str, address: Address, advertised: dict[str, Address], host_name: str) -> Address:
    told = advertised.get(name)
    if told is not None:
        if told.is_any_host:
            raise ListenerError(f"advertised.listeners: {name} needs a host that others can reach, not {told}")
        return told
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
