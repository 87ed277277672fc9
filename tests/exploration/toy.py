"""A toy protocol whose states can be counted by hand, with a known bug: a lock that nodes ask each other for.

A node asks all others and holds the lock when a majority has granted it. A node grants to one node, for ever. With
`forgets_grants`, a node that restarts grants again: then two nodes hold the lock.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import permutations
from typing import Any

from exploration.explorer import Action

ASK, GRANT = "ask", "grant"


@dataclass
class Lock:
    granted_to: list[int]
    """By node; -1 for nobody. A node grants to itself by asking."""
    grants: list[set[int]]
    messages: set[tuple[str, int, int]] = field(default_factory=set)
    restarts: int = 0


@dataclass(frozen=True)
class LockModel:
    nodes: int = 3
    restarts_max: int = 1
    forgets_grants: bool = False
    is_symmetric: bool = True

    def initial(self) -> Lock:
        return Lock([-1] * self.nodes, [set() for _ in range(self.nodes)])

    def actions(self, state: Lock) -> list[Action]:
        found: list[Action] = [("ask", node) for node in range(self.nodes) if state.granted_to[node] == -1]
        found += [("deliver", *message) for message in sorted(state.messages)]
        if state.restarts < self.restarts_max:
            found += [("restart", node) for node in range(self.nodes)]
        return found

    def apply(self, state: Lock, action: Action) -> None:
        kind, *rest = action
        if kind == "ask":
            (node,) = rest
            state.granted_to[node] = node
            state.grants[node] = {node}
            state.messages |= {(ASK, node, other) for other in range(self.nodes) if other != node}
        elif kind == "deliver":
            self._deliver(state, *rest)
        else:
            (node,) = rest
            state.restarts += 1
            state.grants[node] = set()
            if self.forgets_grants:
                state.granted_to[node] = -1
        holders = [node for node in range(self.nodes) if 2 * len(state.grants[node]) > self.nodes]
        assert len(holders) <= 1, f"nodes {holders} hold the lock"

    def _deliver(self, state: Lock, kind: str, sender: int, to: int) -> None:
        state.messages.remove((kind, sender, to))
        if kind == ASK and state.granted_to[to] in (-1, sender):
            state.granted_to[to] = sender
            state.messages.add((GRANT, to, sender))
        elif kind == GRANT and state.grants[to]:
            state.grants[to].add(sender)

    def key(self, state: Lock) -> Any:
        names = permutations(range(self.nodes)) if self.is_symmetric else [tuple(range(self.nodes))]
        return min(self._named(state, renamed) for renamed in names)

    def _named(self, state: Lock, renamed: tuple[int, ...]) -> Any:
        nodes = sorted(
            (renamed[node], -1 if to == -1 else renamed[to], tuple(sorted(renamed[n] for n in state.grants[node])))
            for node, to in enumerate(state.granted_to)
        )
        messages = sorted((kind, renamed[sender], renamed[to]) for kind, sender, to in state.messages)
        return (tuple(nodes), tuple(messages), state.restarts)

    def check_progress(self, state: Lock) -> None:
        """The toy promises none."""
