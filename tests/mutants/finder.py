"""The mutants of a module, each with a key that survives changes elsewhere, and its syntax tree."""

import ast
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from typing import Any

from mutants.blocks import Blocks
from mutants.edits import Edit, functions
from mutants.operators import edits

REACHED = "__mutant_reached__"
"""A global of the mutated module, a list: it is no longer empty when the mutated statement has run."""


@dataclass(frozen=True, slots=True, order=True)
class Mutant:
    module: str
    """Without `tidelog.`, as `log.durability`."""
    function: str
    operator: str
    source: str
    becomes: str
    occurrence: int
    """Among the mutants that are equal otherwise, in the order of the text."""
    line: int = field(compare=False, default=0)
    block: int = field(compare=False, default=-1)
    """In which block of the module it is: see `blocks`."""

    @property
    def key(self) -> str:
        """One line that identifies it as long as its function has the same source there."""
        what = f"{self.source} => {self.becomes}" if self.becomes != "pass" else self.source
        return f"{self.module}:{self.function} {self.operator} #{self.occurrence} {what}"

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def find_mutants(module: str, source: str) -> list[Mutant]:
    tree = ast.parse(source)
    return [mutant for mutant, _ in _mutants(module, tree)]


def mutate(mutant: Mutant, source: str) -> ast.Module:
    """The module's tree with this mutant. `LookupError` if the source has no such mutant."""
    tree = ast.parse(source)
    for candidate, edit in _mutants(mutant.module, tree):
        if candidate == mutant:
            edit.apply()
            edit.position.suite.insert(edit.position.index, _probe(edit))
            return ast.fix_missing_locations(tree)
    raise LookupError(f"{mutant.module} has no mutant {mutant.key}")


def _mutants(module: str, tree: ast.Module) -> Iterator[tuple[Mutant, Edit]]:
    blocks = Blocks(tree)
    seen: dict[tuple[str, ...], int] = {}
    for name, function in functions(tree):
        for edit in edits(name, function):
            kind = (name, edit.operator, edit.source, edit.becomes)
            occurrence = seen[kind] = seen.get(kind, -1) + 1
            line, block = edit.position.statement.lineno, blocks.number(edit.position.suite, edit.position.index)
            yield Mutant(module, *kind, occurrence, line, block), edit


def _probe(edit: Edit) -> ast.stmt:
    probe = ast.parse(f"{REACHED}.append(1) if not {REACHED} else None").body[0]
    for node in ast.walk(probe):
        if isinstance(node, ast.expr | ast.stmt):
            ast.copy_location(node, edit.position.statement)
    return probe
