"""A network of its own: a namespace for each host, and between them a switch that loses, delays and reorders packets.

Each host has a TUN interface whose other end is the switch (`native/network.c`), so every packet between two hosts
passes through it. It does what `tc netem` and a firewall would, on kernels without netem too. Interfaces end with the
switch, which ends with this process. Namespaces stay when a run is killed: `remove_leftovers` removes those whose run
is gone.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

from support.root_commands import MissingError, run

from chaos.helper_process import HelperProcess
from chaos.native_tools import network

PREFIX = "tlchaos"
OPERATOR, CLIENTS = 254, 200
"""Hosts beside the nodes: this process, and the clients."""
MTU = 9_000
LEFTOVERS_MAX = 1_000
SUBNETS = 256
MILLION = 1_000_000


@dataclass(frozen=True, slots=True)
class LinkFault:
    """Of packets in one direction; shares are from 0 to 1."""

    loss: float = 0.0
    delay_ms: float = 0.0
    jitter_ms: float = 0.0
    double: float = 0.0
    early: float = 0.0

    def words(self) -> str:
        rows = (self.loss, self.delay_ms / 1000, self.jitter_ms / 1000, self.double, self.early)
        return " ".join(str(round(value * MILLION)) for value in rows)


CUT = LinkFault(loss=1.0)


class Network:
    """Hosts are numbers from 1 to 254; the last byte of an address."""

    def __init__(self, name: str, subnet: str, switch: HelperProcess, hosts: Sequence[int]) -> None:
        self.hosts = hosts
        self._name, self._subnet, self._switch = name, subnet, switch

    @classmethod
    @contextmanager
    def made(cls, nodes: Sequence[int], seed: int) -> Iterator[Network]:
        """Raises `MissingError` where namespaces or TUN interfaces cannot be made."""
        remove_leftovers()
        name, hosts = f"{PREFIX}{os.getpid()}", [*nodes, CLIENTS, OPERATOR]
        with ExitStack() as stack:
            try:
                switch = HelperProcess([str(network()), str(seed), *(f"{_interface(one)}:{one}" for one in hosts)])
            except OSError as error:
                raise MissingError(str(error)) from error
            stack.callback(switch.end)
            made = cls(name, _free_subnet(), switch, hosts)
            for host in hosts:
                if host == OPERATOR:
                    made._configure(host, ("ip",))
                    continue
                ip("netns", "add", f"{name}-{host}")
                stack.callback(ip, "netns", "delete", f"{name}-{host}")
                ip("link", "set", _interface(host), "netns", f"{name}-{host}")
                made._configure(host, ("ip", "-n", f"{name}-{host}"))
            yield made

    def _configure(self, host: int, command: Sequence[str]) -> None:
        interface = _interface(host)
        if host != OPERATOR:
            run(*command, "link", "set", "lo", "up")
        run(*command, "address", "add", f"{self.address(host)}/24", "dev", interface)
        run(*command, "link", "set", interface, "mtu", str(MTU), "up")

    def address(self, host: int) -> str:
        return f"{self._subnet}.{host}"

    def wrapper(self, host: int) -> list[str]:
        """What to put before a command that shall run on this host. `ip netns exec` would also give it the mounts of
        now, which would hold disks that are unmounted later."""
        return ["nsenter", f"--net=/run/netns/{self._name}-{host}"]

    def set_link(self, from_host: int, to_host: int, fault: LinkFault) -> None:
        self._switch.call(f"link {from_host} {to_host} {fault.words()}")

    def between(self, some: Sequence[int], others: Sequence[int], fault: LinkFault) -> None:
        """Both directions of all links between these."""
        for one in some:
            for other in others:
                if one != other:
                    self.set_link(one, other, fault)
                    self.set_link(other, one, fault)

    def clear(self) -> None:
        self._switch.call("clear")

    def counts(self) -> dict[str, int]:
        found: dict[str, int] = json.loads(self._switch.call("counts"))
        return found


def _interface(host: int) -> str:
    """At most 15 characters."""
    return f"tlc{os.getpid()}-{host}"


def _free_subnet() -> str:
    taken = run("ip", "-4", "-o", "address")
    for number in range(SUBNETS):
        subnet = f"198.19.{(os.getpid() + number) % SUBNETS}"
        if f" {subnet}." not in taken:
            return subnet
    raise MissingError(f"all {SUBNETS} networks 198.19.N.0/24 are in use")


def remove_leftovers() -> None:
    """Delete namespaces of runs whose process is gone. Processes in them have ended with their run."""
    for line in ip("netns", "list").splitlines()[:LEFTOVERS_MAX]:
        found = re.fullmatch(rf"{PREFIX}(\d+)-\d+", line.split()[0])
        if found is not None and not os.path.exists(f"/proc/{found[1]}"):
            ip("netns", "delete", found[0])


def ip(*arguments: str) -> str:
    return run("ip", *arguments)
