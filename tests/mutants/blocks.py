"""Blocks of a module: runs of statements that are executed together unless one raises. A probe records each.

A block begins at the start of every body inside a function, and after every compound statement. Numbers depend on the
source only.
"""

import ast

from mutants.edits import Suite, functions, inner_suites

HITS = "__block_hits__"
"""A global of the module with probes: a bytearray, one byte for each block."""


class Blocks:
    def __init__(self, tree: ast.Module) -> None:
        self.count = 0
        self._starts: dict[int, list[tuple[int, int]]] = {}
        """For each body, by identity: (index of the first statement, number) of its blocks."""
        self._suites: list[Suite] = []
        for _, function in functions(tree):
            self._add(function.body)

    def number(self, suite: Suite, index: int) -> int:
        """The block of `suite[index]`."""
        return max(number for start, number in self._starts[id(suite)] if start <= index)

    def add_probes(self) -> None:
        """Make every block record that it runs. Nothing else may be asked or changed afterwards."""
        for suite in self._suites:
            for start, number in reversed(self._starts[id(suite)]):
                probe = ast.parse(f"{HITS}[{number}] = 1").body[0]
                at = max(start, 1) if _has_docstring(suite) else start
                for node in ast.walk(probe):
                    if isinstance(node, ast.expr | ast.stmt):
                        ast.copy_location(node, suite[min(at, len(suite) - 1)])
                suite.insert(at, probe)

    def _add(self, suite: Suite) -> None:
        starts = [0] + [
            index + 1 for index, statement in enumerate(suite[:-1]) if any(True for _ in inner_suites(statement))
        ]
        self._suites.append(suite)
        self._starts[id(suite)] = [(start, self.count + offset) for offset, start in enumerate(starts)]
        self.count += len(starts)
        for statement in suite:
            for inner in inner_suites(statement):
                self._add(inner)


def _has_docstring(suite: Suite) -> bool:
    return isinstance(suite[0], ast.Expr) and isinstance(suite[0].value, ast.Constant)


def instrumented(source: str) -> tuple[ast.Module, int]:
    """The tree of a module with probes, and how many blocks it has."""
    tree = ast.parse(source)
    blocks = Blocks(tree)
    blocks.add_probes()
    return ast.fix_missing_locations(tree), blocks.count
